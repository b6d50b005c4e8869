/* SPDX-License-Identifier: Apache-2.0
 * Modules: shared objects loaded at run time, so that one binary starts where their libraries are absent. */
#ifndef PARAMSYNC_BASE_MODULE_H
#define PARAMSYNC_BASE_MODULE_H

#include "services/base/error.h"

/* Loads libparamsync-NAME.so and looks symbol up in it. name: 1..31 of a-z, 0-9, _.
 * Where: PARAMSYNC_MODULE_DIR alone if it is set, else ../lib/paramsync beside the program, else the folder
 * fixed at configure time. PS_UNAVAILABLE if it is nowhere, or a library that it needs is missing here (the
 * message says which); PS_INTERNAL if the symbol is not in it. A module is never unloaded. Thread-safe. */
int ps_module_open(const char *name, const char *symbol, void **ret_symbol, struct ps_error *err);

#endif
