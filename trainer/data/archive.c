/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/data/archive.h"

#ifdef PARAMSYNC_HAVE_LIBARCHIVE

#include <archive.h>
#include <archive_entry.h>
#include <stdlib.h>
#include <string.h>

static int read_entry(struct archive *a, const char *path, const char *entry, size_t max, uint8_t **ret,
                      size_t *ret_size, struct ps_error *err)
{
    size_t capacity = 1 << 20, size = 0;
    uint8_t *data = malloc(capacity);
    for (;;) {
        if (data && size == capacity) {
            uint8_t *more = realloc(data, capacity *= 2);
            if (!more)
                free(data);
            data = more;
        }
        if (!data)
            return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory while reading %s", path);
        la_ssize_t n = archive_read_data(a, data + size, capacity - size);
        if (n < 0) {
            free(data);
            return ps_fail(err, PS_DATA_LOSS, "%s: %s is damaged or truncated: %s", path, entry,
                           archive_error_string(a) ? archive_error_string(a) : "unreadable");
        }
        if (n == 0)
            break;
        size += (size_t)n;
        if (size > max) {
            free(data);
            return ps_fail(err, PS_INVALID_ARGUMENT, "%s: %s holds more than the %zu bytes allowed", path,
                           entry, max);
        }
    }
    *ret = data;
    *ret_size = size;
    return 0;
}

int ps_archive_read(const char *path, size_t max, ps_archive_wanted wanted, ps_archive_file file,
                    void *context, struct ps_error *err)
{
    struct archive *a = archive_read_new();
    if (!a)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int code = 0;
    archive_read_support_filter_gzip(a);
    archive_read_support_format_tar(a);
    if (archive_read_open_filename(a, path, 1 << 18) != ARCHIVE_OK) {
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%s is not a readable .tar.gz: %s", path,
                       archive_error_string(a) ? archive_error_string(a) : "unknown format");
        goto out;
    }
    for (;;) {
        struct archive_entry *entry;
        int status = archive_read_next_header(a, &entry);
        if (status == ARCHIVE_EOF)
            break;
        if (status != ARCHIVE_OK && status != ARCHIVE_WARN) {
            code = ps_fail(err, PS_DATA_LOSS, "%s is damaged or truncated: %s", path,
                           archive_error_string(a) ? archive_error_string(a) : "unreadable");
            goto out;
        }
        const char *name = archive_entry_pathname(entry);
        if (!name || archive_entry_filetype(entry) != AE_IFREG || !wanted(context, name))
            continue;
        char *copy = strdup(name); /* the entry's own name ends with the next header */
        uint8_t *data = NULL;
        size_t size = 0;
        code = copy ? read_entry(a, path, copy, max, &data, &size, err)
                    : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        if (!code)
            code = file(context, copy, data, size, err);
        free(copy);
        if (code)
            goto out;
    }
out:
    archive_read_free(a);
    return code;
}

#else

int ps_archive_read(const char *path, size_t max, ps_archive_wanted wanted, ps_archive_file file,
                    void *context, struct ps_error *err)
{
    (void)max;
    (void)wanted;
    (void)file;
    (void)context;
    return ps_fail(
        err, PS_UNIMPLEMENTED,
        "%s: this build reads no archives (libarchive was not there at configure time): unpack it with "
        "tar -xzf and name the folder",
        path);
}

#endif
