/* SPDX-License-Identifier: Apache-2.0
 * Writes what torch.save(state_dict) would: a zip archive of stored entries with a pickle of an OrderedDict
 * of contiguous CPU tensors, which torch.load(weights_only=True) reads. Layout: PyTorch's
 * torch/serialization.py and caffe2/serialize/inline_container.h. */
#ifndef PARAMSYNC_CHECKPOINT_PTH_H
#define PARAMSYNC_CHECKPOINT_PTH_H

#include "trainer/checkpoint/safetensors.h"

/* Whole or not at all. Types F32 and I64; less than 4 GiB in all. */
int ps_pth_write(const char *path, const struct ps_tensor *tensors, size_t count, struct ps_error *err);

#endif
