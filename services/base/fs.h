/* SPDX-License-Identifier: Apache-2.0
 * Files that are whole or absent. */
#ifndef PARAMSYNC_BASE_FS_H
#define PARAMSYNC_BASE_FS_H

#include "services/base/error.h"

#include <stdint.h>

/* Reads a whole file of at most max bytes; *ret_data is free()d by the caller and has a NUL after the bytes.
 */
int ps_read_file(const char *path, size_t max, char **ret_data, size_t *ret_size, struct ps_error *err);

/* Writes all bytes, through short writes and EINTR. name is for the message. */
int ps_write_all(int fd, const void *data, size_t size, const char *name, struct ps_error *err);

/* A file in the making: PATH.XXXXXX.tmp beside its final place. commit syncs the file, renames it and syncs
 * the folder; until then, and after any failure, nothing stands at PATH but what was there before. */
struct ps_new_file {
    int fd;
    char *path;
    char *temporary;
    struct ps_new_file *next; /* in the list of files in the making */
};
int ps_new_file_open(struct ps_new_file *file, const char *path, struct ps_error *err);
int ps_new_file_commit(struct ps_new_file *file, struct ps_error *err);
void ps_new_file_abandon(
    struct ps_new_file *file); /* after open or a failed commit; harmless after a good one */

/* For a thread that is about to _exit while others may be writing: removes the temporary of every file in the
 * making. From then on opening, committing and abandoning block. */
void ps_new_files_abandon_all(void);

int ps_write_file_atomic(const char *path, const void *data, size_t size, struct ps_error *err);

/* mkdir -p; mode applies to folders that are made. */
int ps_make_dirs(const char *path, unsigned mode, struct ps_error *err);
int ps_sync_parent(const char *path, struct ps_error *err);

/* "dir/name" in new memory (free()), or NULL. */
char *ps_path_join(const char *dir, const char *name);

#endif
