/* SPDX-License-Identifier: Apache-2.0
 * The reference backend: plain C, one thread, NCHW, in float (PS_FP32) or double (PS_FP64). It keeps every
 * value and every gradient of a training step. The functions here give tests what float32 on the common
 * interface cannot. */
#ifndef PARAMSYNC_BACKEND_REF_REF_H
#define PARAMSYNC_BACKEND_REF_REF_H

#include "trainer/backend/backend.h"

const struct ps_backend_ops *ps_backend_ref(void);

/* As read_value and read(PS_STATE_GRADS) of the table, in double. (With PS_FP64 the table's gradients() is
 * NULL: there is no float vector to give out.) */
int ps_ref_read_value64(struct ps_backend *backend, int value, bool gradient, double *host,
                        struct ps_error *err);
int ps_ref_read_gradients64(struct ps_backend *backend, double *host, struct ps_error *err);

#endif
