/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int ps_read_file(const char *path, size_t max, char **ret_data, size_t *ret_size, struct ps_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return ps_fail_errno(err, errno, "cannot open %s", path);
    size_t capacity = 1 << 16, size = 0;
    struct stat st;
    int code = 0;
    char *data = NULL;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
        if ((uint64_t)st.st_size > max) {
            code = ps_fail(err, PS_INVALID_ARGUMENT, "%s holds %lld bytes, more than the %zu allowed", path,
                           (long long)st.st_size, max);
            goto out;
        }
        capacity = (size_t)st.st_size + 1;
    }
    for (;;) {
        if (!data || size == capacity) {
            if (data)
                capacity *= 2;
            char *more = realloc(data, capacity + 1);
            if (!more) {
                code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory while reading %s", path);
                goto out;
            }
            data = more;
        }
        ssize_t n = read(fd, data + size, capacity - size);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            code = ps_fail_errno(err, errno, "cannot read %s", path);
            goto out;
        }
        if (n == 0)
            break;
        size += (size_t)n;
        if (size > max) {
            code = ps_fail(err, PS_INVALID_ARGUMENT, "%s holds more than the %zu bytes allowed", path, max);
            goto out;
        }
    }
    data[size] = '\0';
    *ret_data = data;
    if (ret_size)
        *ret_size = size;
    data = NULL;
out:
    free(data);
    close(fd);
    return code;
}

int ps_write_all(int fd, const void *data, size_t size, const char *name, struct ps_error *err)
{
    const char *p = data;
    while (size) {
        ssize_t n = write(fd, p, size);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return ps_fail_errno(err, errno, "cannot write %s", name);
        p += n;
        size -= (size_t)n;
    }
    return 0;
}

static pthread_mutex_t making_lock =
    PTHREAD_MUTEX_INITIALIZER; /* guards the list and each file's temporary */
static struct ps_new_file *making;

/* With the lock held. */
static void unlist(struct ps_new_file *file)
{
    for (struct ps_new_file **link = &making; *link; link = &(*link)->next) {
        if (*link == file) {
            *link = file->next;
            break;
        }
    }
    file->next = NULL;
}

void ps_new_files_abandon_all(void)
{
    pthread_mutex_lock(&making_lock); /* and never unlocked: nothing may come into being behind our back */
    for (struct ps_new_file *file = making; file; file = file->next)
        unlink(file->temporary);
}

int ps_new_file_open(struct ps_new_file *file, const char *path, struct ps_error *err)
{
    *file = (struct ps_new_file){.fd = -1};
    file->path = strdup(path);
    if (!file->path || asprintf(&file->temporary, "%s.XXXXXX.tmp", path) < 0) {
        file->temporary = NULL;
        ps_new_file_abandon(file);
        ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        return PS_RESOURCE_EXHAUSTED;
    }
    pthread_mutex_lock(&making_lock);
    file->fd = mkostemps(file->temporary, 4, O_CLOEXEC);
    int errnum = errno;
    if (file->fd >= 0) {
        file->next = making;
        making = file;
    }
    pthread_mutex_unlock(&making_lock);
    if (file->fd < 0) {
        int code = ps_fail_errno(err, errnum, "cannot create %s", path);
        free(file->temporary);
        file->temporary = NULL;
        ps_new_file_abandon(file);
        return code;
    }
    mode_t mask = umask(0); /* mkostemps makes 0600; a checkpoint is read by others as any file is */
    umask(mask);
    if (fchmod(file->fd, 0666 & ~mask) < 0) {
        int code = ps_fail_errno(err, errno, "cannot set the mode of %s", path);
        ps_new_file_abandon(file);
        return code;
    }
    return 0;
}

int ps_new_file_commit(struct ps_new_file *file, struct ps_error *err)
{
    if (fsync(file->fd) < 0)
        return ps_fail_errno(err, errno, "cannot sync %s", file->path);
    int fd = file->fd;
    file->fd = -1;
    if (close(fd) < 0)
        return ps_fail_errno(err, errno, "cannot close %s", file->path);
    pthread_mutex_lock(&making_lock);
    int errnum = rename(file->temporary, file->path) < 0 ? errno : 0;
    if (!errnum)
        unlist(file);
    pthread_mutex_unlock(&making_lock);
    if (errnum)
        return ps_fail_errno(err, errnum, "cannot put %s in place", file->path);
    free(file->temporary);
    file->temporary = NULL;
    int code = ps_sync_parent(file->path, err);
    free(file->path);
    file->path = NULL;
    return code;
}

void ps_new_file_abandon(struct ps_new_file *file)
{
    if (file->fd >= 0)
        close(file->fd);
    pthread_mutex_lock(&making_lock);
    unlist(file);
    if (file->temporary)
        unlink(file->temporary);
    pthread_mutex_unlock(&making_lock);
    free(file->temporary);
    free(file->path);
    *file = (struct ps_new_file){.fd = -1};
}

int ps_write_file_atomic(const char *path, const void *data, size_t size, struct ps_error *err)
{
    struct ps_new_file file;
    int code = ps_new_file_open(&file, path, err);
    if (code)
        return code;
    code = ps_write_all(file.fd, data, size, path, err);
    if (!code)
        code = ps_new_file_commit(&file, err);
    ps_new_file_abandon(&file);
    return code;
}

int ps_make_dirs(const char *path, unsigned mode, struct ps_error *err)
{
    char *copy = strdup(path);
    if (!copy)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int code = 0;
    for (char *p = copy + 1; !code && *copy; p++) {
        char saved = *p;
        if (saved != '/' && saved != '\0')
            continue;
        *p = '\0';
        if (mkdir(copy, mode) < 0) {
            struct stat st;
            int errnum = errno;
            if (errnum != EEXIST && errnum != EROFS && errnum != EACCES)
                code = ps_fail_errno(err, errnum, "cannot make the folder %s", copy);
            else if (stat(copy, &st) < 0)
                code = ps_fail_errno(err, errnum, "cannot make the folder %s", copy);
            else if (!S_ISDIR(st.st_mode))
                code = ps_fail(err, PS_INVALID_ARGUMENT, "%s is not a folder", copy);
        }
        if (saved == '\0')
            break;
        *p = saved;
    }
    free(copy);
    return code;
}

int ps_sync_parent(const char *path, struct ps_error *err)
{
    const char *slash = strrchr(path, '/');
    char *dir = slash == path ? strdup("/") : slash ? strndup(path, (size_t)(slash - path)) : strdup(".");
    if (!dir)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int code = 0;
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        code = ps_fail_errno(err, errno, "cannot open the folder %s", dir);
    else if (fsync(fd) < 0 && errno != EINVAL) /* some file systems cannot sync folders */
        code = ps_fail_errno(err, errno, "cannot sync the folder %s", dir);
    if (fd >= 0)
        close(fd);
    free(dir);
    return code;
}

char *ps_path_join(const char *dir, const char *name)
{
    char *path;
    size_t n = strlen(dir);
    return asprintf(&path, "%s%s%s", dir, n && dir[n - 1] == '/' ? "" : "/", name) < 0 ? NULL : path;
}
