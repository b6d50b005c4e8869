/* SPDX-License-Identifier: Apache-2.0 */
#include "services/client/spool.h"

#include "services/base/digest.h"
#include "services/base/fs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEAD = 9, RECORD_MAX = 64 << 20 };

struct ps_spool {
    int fd;
    char *path;
    uint64_t read, end, max;
};

static void put32(unsigned char *out, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        out[i] = (unsigned char)(value >> 8 * i);
}

static uint32_t get32(const unsigned char *in)
{
    return (uint32_t)in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16 | (uint32_t)in[3] << 24;
}

/* PS_NOT_FOUND: another process has it, or it is gone. */
static int open_locked(const char *path, int flags, struct ps_spool **ret_spool, struct ps_error *err)
{
    struct ps_spool *spool = calloc(1, sizeof *spool);
    struct stat ours, there;
    int code = 0;
    if (!spool || !(spool->path = strdup(path))) {
        free(spool);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    spool->fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | flags, 0600);
    if (spool->fd < 0)
        code = ps_fail_errno(err, errno, "cannot open %s", path);
    else if (flock(spool->fd, LOCK_EX | LOCK_NB))
        code = ps_fail(err, PS_NOT_FOUND, "%s is in use", path);
    else if (fstat(spool->fd, &ours) || !S_ISREG(ours.st_mode))
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%s is no regular file", path);
    else if (stat(path, &there) || there.st_ino != ours.st_ino) /* removed between open and lock */
        code = ps_fail(err, PS_NOT_FOUND, "%s is gone", path);
    if (code) {
        if (spool->fd >= 0)
            close(spool->fd);
        free(spool->path);
        free(spool);
        return code;
    }
    spool->end = (uint64_t)ours.st_size;
    spool->max = UINT64_MAX;
    *ret_spool = spool;
    return 0;
}

int ps_spool_open(const char *dir, const char *run_id, uint32_t attempt, uint32_t rank, uint64_t max_bytes,
                  struct ps_spool **ret_spool, struct ps_error *err)
{
    char *path;
    int code = ps_make_dirs(dir, 0700, err);
    if (code)
        return code;
    if (asprintf(&path, "%s/%s-%u-%u.spool", dir, run_id, attempt, rank) < 0)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    code = open_locked(path, O_CREAT, ret_spool, err);
    free(path);
    if (!code)
        (*ret_spool)->max = max_bytes;
    return code;
}

int ps_spool_take_over(const char *dir, struct ps_spool **ret_spool, struct ps_error *err)
{
    DIR *folder = opendir(dir);
    int code = PS_NOT_FOUND;
    if (!folder)
        return errno == ENOENT ? PS_NOT_FOUND : ps_fail_errno(err, errno, "cannot read %s", dir);
    for (const struct dirent *entry; code == PS_NOT_FOUND && (entry = readdir(folder));) {
        const char *dot = strrchr(entry->d_name, '.');
        if (*entry->d_name == '.' || !dot || strcmp(dot, ".spool") != 0)
            continue;
        char *path = ps_path_join(dir, entry->d_name);
        struct ps_error ignored = {0};
        if (!path)
            code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        else if (!open_locked(path, 0, ret_spool, &ignored))
            code = 0;
        free(path);
    }
    closedir(folder);
    return code;
}

struct ps_spool *ps_spool_close(struct ps_spool *spool)
{
    if (!spool)
        return NULL;
    if (!spool->end)
        unlink(spool->path); /* while it is locked, so that nobody takes over what goes */
    close(spool->fd);
    free(spool->path);
    free(spool);
    return NULL;
}

static int write_at(int fd, const void *data, size_t size, uint64_t offset)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = pwrite(fd, (const char *)data + done, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        done += (size_t)n;
    }
    return 0;
}

int ps_spool_append(struct ps_spool *spool, enum ps_spool_kind kind, const void *data, size_t size,
                    struct ps_error *err)
{
    unsigned char head[HEAD];
    if (size > RECORD_MAX || spool->end + HEAD + size > spool->max)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "%s holds as much as it may", spool->path);
    put32(head, (uint32_t)size);
    head[8] = (unsigned char)kind;
    put32(head + 4, ps_crc32c(ps_crc32c(0, head + 8, 1), data, size));
    if (write_at(spool->fd, head, HEAD, spool->end) || write_at(spool->fd, data, size, spool->end + HEAD)) {
        int errnum = errno;
        if (ftruncate(spool->fd, (off_t)spool->end))
            errno = errnum; /* the rest is told from a record by its crc32c */
        return ps_fail_errno(err, errnum, "cannot write %s", spool->path);
    }
    spool->end += HEAD + size;
    return 0;
}

static bool read_at(int fd, void *data, size_t size, uint64_t offset)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = pread(fd, (char *)data + done, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        done += (size_t)n;
    }
    return true;
}

int ps_spool_read(struct ps_spool *spool, enum ps_spool_kind *ret_kind, void **ret_data, size_t *ret_size,
                  struct ps_error *err)
{
    unsigned char head[HEAD];
    if (spool->read >= spool->end)
        return PS_NOT_FOUND;
    uint32_t size = 0;
    bool good = spool->end - spool->read >= HEAD && read_at(spool->fd, head, HEAD, spool->read);
    if (good) {
        size = get32(head);
        good = size <= RECORD_MAX && size <= spool->end - spool->read - HEAD;
    }
    unsigned char *data = good ? malloc((size_t)size + 1) : NULL;
    if (good && !data)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    good = good && read_at(spool->fd, data, size, spool->read + HEAD) &&
           ps_crc32c(ps_crc32c(0, head + 8, 1), data, size) == get32(head + 4);
    if (!good) { /* the end of what was written whole */
        free(data);
        if (ftruncate(spool->fd, (off_t)spool->read) == 0)
            spool->end = spool->read;
        else
            spool->read = spool->end;
        return PS_NOT_FOUND;
    }
    spool->read += HEAD + size;
    *ret_kind = (enum ps_spool_kind)head[8];
    *ret_data = data;
    *ret_size = size;
    return 0;
}

void ps_spool_rewind(struct ps_spool *spool)
{
    spool->read = 0;
}

void ps_spool_settle(struct ps_spool *spool)
{
    if (spool->read == spool->end && spool->end && ftruncate(spool->fd, 0) == 0)
        spool->read = spool->end = 0;
}

uint64_t ps_spool_bytes(const struct ps_spool *spool)
{
    return spool->end;
}

bool ps_spool_unread(const struct ps_spool *spool)
{
    return spool->read < spool->end;
}

const char *ps_spool_path(const struct ps_spool *spool)
{
    return spool->path;
}
