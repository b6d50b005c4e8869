/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/blobs.h"

#include "services/base/fs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct ps_blobs {
    char *root;      /* DIR/blobs/sha256 */
    char *temporary; /* DIR/blobs/tmp */
};

struct ps_blob_writer {
    struct ps_blobs *blobs;
    char sha256[PS_SHA256_HEX];
    uint64_t size, written;
    struct ps_sha256 *digest;
    char *path; /* the temporary file; NULL once placed */
    int fd;
    bool sealed;
};

static int no_memory(struct ps_error *err)
{
    return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
}

static int empty_folder(const char *path, struct ps_error *err)
{
    DIR *dir = opendir(path);
    if (!dir)
        return ps_fail_errno(err, errno, "cannot read the folder %s", path);
    int code = 0;
    struct dirent *entry;
    while (!code && (entry = readdir(dir)))
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
            unlinkat(dirfd(dir), entry->d_name, 0))
            code = ps_fail_errno(err, errno, "cannot remove %s/%s", path, entry->d_name);
    closedir(dir);
    return code;
}

int ps_blobs_open(const char *data_dir, struct ps_blobs **ret_blobs, struct ps_error *err)
{
    struct ps_blobs *blobs = calloc(1, sizeof *blobs);
    if (!blobs)
        return no_memory(err);
    blobs->root = ps_path_join(data_dir, "blobs/sha256");
    blobs->temporary = ps_path_join(data_dir, "blobs/tmp");
    int code = blobs->root && blobs->temporary ? 0 : no_memory(err);
    if (!code)
        code = ps_make_dirs(blobs->root, 0750, err);
    if (!code)
        code = ps_make_dirs(blobs->temporary, 0750, err);
    if (!code)
        code = empty_folder(blobs->temporary, err);
    if (code) {
        ps_blobs_free(blobs);
        return code;
    }
    *ret_blobs = blobs;
    return 0;
}

struct ps_blobs *ps_blobs_free(struct ps_blobs *blobs)
{
    if (!blobs)
        return NULL;
    free(blobs->root);
    free(blobs->temporary);
    free(blobs);
    return NULL;
}

/* ROOT/ab/cdef..., or the folder ROOT/ab; free() it. */
static char *blob_path(const struct ps_blobs *blobs, const char *sha256, bool folder)
{
    char *path;
    int n = folder ? asprintf(&path, "%s/%.2s", blobs->root, sha256)
                   : asprintf(&path, "%s/%.2s/%s", blobs->root, sha256, sha256 + 2);
    return n < 0 ? NULL : path;
}

int ps_blob_writer_open(struct ps_blobs *blobs, const char *sha256, uint64_t size,
                        struct ps_blob_writer **ret_writer, struct ps_error *err)
{
    if (!ps_sha256_hex_valid(sha256))
        return ps_fail(err, PS_INVALID_ARGUMENT, "sha256: must be 64 lower-case hexadecimal digits");
    struct ps_blob_writer *writer = calloc(1, sizeof *writer);
    if (!writer)
        return no_memory(err);
    writer->blobs = blobs;
    writer->size = size;
    writer->fd = -1;
    memcpy(writer->sha256, sha256, PS_SHA256_HEX);
    writer->digest = ps_sha256_new();
    int code = 0;
    if (!writer->digest || asprintf(&writer->path, "%s/XXXXXX", blobs->temporary) < 0) {
        writer->path = NULL;
        code = no_memory(err);
    } else if ((writer->fd = mkostemp(writer->path, O_CLOEXEC)) < 0) {
        code = ps_fail_errno(err, errno, "cannot create a file in %s", blobs->temporary);
        free(writer->path);
        writer->path = NULL;
    } else if (fchmod(writer->fd, 0640)) {
        code = ps_fail_errno(err, errno, "cannot set the mode of %s", writer->path);
    }
    if (code) {
        ps_blob_writer_free(writer);
        return code;
    }
    *ret_writer = writer;
    return 0;
}

int ps_blob_writer_write(struct ps_blob_writer *writer, const void *data, size_t size, struct ps_error *err)
{
    if (size > writer->size - writer->written)
        return ps_fail(err, PS_INVALID_ARGUMENT, "more than the %llu bytes announced have come",
                       (unsigned long long)writer->size);
    int code = ps_write_all(writer->fd, data, size, "the checkpoint", err);
    if (code)
        return code;
    ps_sha256_update(writer->digest, data, size);
    writer->written += size;
    return 0;
}

int ps_blob_writer_seal(struct ps_blob_writer *writer, struct ps_error *err)
{
    if (writer->written != writer->size)
        return ps_fail(err, PS_INVALID_ARGUMENT, "size: %llu bytes were announced, %llu came",
                       (unsigned long long)writer->size, (unsigned long long)writer->written);
    char hex[PS_SHA256_HEX];
    ps_sha256_hex(writer->digest, hex);
    writer->digest = ps_sha256_free(writer->digest);
    if (strcmp(hex, writer->sha256) != 0)
        return ps_fail(err, PS_DATA_LOSS, "sha256: %s was announced, the bytes that came have %s",
                       writer->sha256, hex);
    if (fsync(writer->fd))
        return ps_fail_errno(err, errno, "cannot sync the checkpoint");
    int fd = writer->fd;
    writer->fd = -1;
    if (close(fd))
        return ps_fail_errno(err, errno, "cannot write the checkpoint");
    writer->sealed = true;
    return 0;
}

int ps_blob_writer_place(struct ps_blob_writer *writer, struct ps_error *err)
{
    if (!writer->sealed || !writer->path)
        return ps_fail(err, PS_INTERNAL,
                       "a checkpoint that is not sealed, or placed already, was to be placed");
    char *path = blob_path(writer->blobs, writer->sha256, false);
    char *folder = blob_path(writer->blobs, writer->sha256, true);
    int code = path && folder ? 0 : no_memory(err);
    struct stat st;
    bool new_folder = !code && stat(folder, &st) != 0;
    if (!code && new_folder)
        code = ps_make_dirs(folder, 0750, err);
    /* Over what may be there: ours was checked just now, and a damaged one is put right. */
    if (!code && rename(writer->path, path))
        code = ps_fail_errno(err, errno, "cannot put %s in place", path);
    if (!code) {
        free(writer->path);
        writer->path = NULL;
        code = ps_sync_parent(path, err);
    }
    if (!code && new_folder)
        code = ps_sync_parent(folder, err);
    free(path);
    free(folder);
    return code;
}

struct ps_blob_writer *ps_blob_writer_free(struct ps_blob_writer *writer)
{
    if (!writer)
        return NULL;
    if (writer->fd >= 0)
        close(writer->fd);
    if (writer->path)
        unlink(writer->path);
    free(writer->path);
    ps_sha256_free(writer->digest);
    free(writer);
    return NULL;
}

int ps_blobs_read(struct ps_blobs *blobs, const char *sha256, uint64_t size, int *ret_fd,
                  struct ps_error *err)
{
    if (!ps_sha256_hex_valid(sha256))
        return ps_fail(err, PS_INVALID_ARGUMENT, "sha256: must be 64 lower-case hexadecimal digits");
    char *path = blob_path(blobs, sha256, false);
    if (!path)
        return no_memory(err);
    struct stat st;
    int code = 0, fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        code = ps_fail_errno(err, errno, "cannot open the checkpoint %s", path);
    else if (fstat(fd, &st))
        code = ps_fail_errno(err, errno, "cannot read the checkpoint %s", path);
    else if (size && (uint64_t)st.st_size != size)
        code = ps_fail(err, PS_DATA_LOSS, "the checkpoint %s has %lld bytes instead of %llu", path,
                       (long long)st.st_size, (unsigned long long)size);
    free(path);
    if (code) {
        if (fd >= 0)
            close(fd);
        return code;
    }
    *ret_fd = fd;
    return 0;
}

int ps_blobs_remove(struct ps_blobs *blobs, const char *sha256, struct ps_error *err)
{
    if (!ps_sha256_hex_valid(sha256))
        return ps_fail(err, PS_INVALID_ARGUMENT, "sha256: must be 64 lower-case hexadecimal digits");
    char *path = blob_path(blobs, sha256, false);
    if (!path)
        return no_memory(err);
    int code = unlink(path) && errno != ENOENT
                   ? ps_fail_errno(err, errno, "cannot remove the checkpoint %s", path)
                   : 0;
    free(path);
    return code;
}

/* One of the 256 folders: files are named by the digits that follow its own two. */
static size_t sweep_folder(struct ps_blobs *blobs, const char *two,
                           bool (*keep)(void *context, const char *sha256), void *context,
                           uint64_t *ret_bytes)
{
    char *path = ps_path_join(blobs->root, two), sha256[PS_SHA256_HEX];
    DIR *dir = path ? opendir(path) : NULL;
    size_t removed = 0;
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        struct stat st;
        if (snprintf(sha256, sizeof sha256, "%s%s", two, entry->d_name) != PS_SHA256_HEX - 1 ||
            !ps_sha256_hex_valid(sha256) || keep(context, sha256))
            continue;
        if (fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode) &&
            unlinkat(dirfd(dir), entry->d_name, 0) == 0) {
            removed++;
            *ret_bytes += (uint64_t)st.st_size;
        }
    }
    if (dir)
        closedir(dir);
    free(path);
    return removed;
}

size_t ps_blobs_sweep(struct ps_blobs *blobs, bool (*keep)(void *context, const char *sha256), void *context,
                      uint64_t *ret_bytes)
{
    size_t removed = 0;
    for (unsigned i = 0; i < 256; i++) {
        char two[3];
        snprintf(two, sizeof two, "%02x", i);
        removed += sweep_folder(blobs, two, keep, context, ret_bytes);
    }
    return removed;
}
