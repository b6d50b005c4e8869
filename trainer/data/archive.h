/* SPDX-License-Identifier: Apache-2.0
 * Files out of a .tar.gz (libarchive, where it was there at configure time). */
#ifndef PARAMSYNC_DATA_ARCHIVE_H
#define PARAMSYNC_DATA_ARCHIVE_H

#include "services/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Called for each regular file in the archive's order: whether its contents are wanted. */
typedef bool (*ps_archive_wanted)(void *context, const char *path);
/* Called with the contents of a wanted file; data belongs to the callee, who free()s it. */
typedef int (*ps_archive_file)(void *context, const char *path, uint8_t *data, size_t size,
                               struct ps_error *err);

/* Reads the archive once, front to back. A wanted file of more than max bytes is an error. Where libarchive
 * is not built in: PS_UNIMPLEMENTED, naming the way out. */
int ps_archive_read(const char *path, size_t max, ps_archive_wanted wanted, ps_archive_file file,
                    void *context, struct ps_error *err);

#endif
