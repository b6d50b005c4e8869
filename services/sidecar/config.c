/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/config.h"

#include "services/base/fs.h"
#include "services/base/text.h"

#include <arpa/inet.h>
#include <ini.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { FILE_MAX = 1 << 20 };

struct text {
    struct text *next;
    char value[];
};

struct ps_config_file {
    struct text *texts;
};

struct reading {
    const struct ps_options *table;
    void *settings;
    struct ps_config_file *file;
    struct ps_error *err;
    int code;
};

/* Returns 0 to have inih tell the line. */
static int take(void *user, const char *section, const char *name, const char *value)
{
    (void)section;
    struct reading *reading = user;
    if (reading->code)
        return 1;
    size_t size = strlen(value) + 1;
    struct text *text = malloc(sizeof *text + size);
    if (!text) {
        reading->code = ps_fail(reading->err, PS_RESOURCE_EXHAUSTED, "out of memory");
        return 0;
    }
    memcpy(text->value, value, size);
    text->next = reading->file->texts;
    reading->file->texts = text;
    reading->code =
        ps_options_set(reading->table, reading->settings, name, text->value, PS_FROM_FILE, reading->err);
    return reading->code == 0;
}

int ps_config_read(const struct ps_options *table, void *settings, const char *path,
                   struct ps_config_file **ret_file, struct ps_error *err)
{
    char *data;
    size_t size;
    int code = ps_read_file(path, FILE_MAX, &data, &size, err);
    if (code)
        return code;
    struct ps_error first = {0};
    struct reading reading = {.table = table, .settings = settings, .err = &first};
    reading.file = calloc(1, sizeof *reading.file);
    if (!reading.file) {
        free(data);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    /* inih cuts lines longer than its buffer (200 bytes) in two, so that a long path would be read as two
     * lines. */
    size_t longest = 0;
    for (const char *line = data; *line; line += strcspn(line, "\n"), line += *line == '\n')
        if (strcspn(line, "\n") > longest)
            longest = strcspn(line, "\n");
    ini_allow_multiline = false;
    ini_use_stack = false;
    ini_allow_realloc = false;
    ini_max_line = ini_initial_alloc = (int)longest + 3; /* the second is what is allocated */
    int line = strlen(data) == size ? ini_parse_string(data, take, &reading)
                                    : ps_fail(&first, PS_INVALID_ARGUMENT, "the file has NUL bytes");
    free(data);
    if (line > 0)
        code = reading.code
                   ? ps_fail(err, PS_INVALID_ARGUMENT, "%s, line %d: %s", path, line, first.message)
                   : ps_fail(err, PS_INVALID_ARGUMENT, "%s, line %d: expected NAME = VALUE", path, line);
    else if (line < 0)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "cannot read %s%s%s", path, *first.message ? ": " : "",
                       first.message);
    if (code) {
        ps_config_free(reading.file);
        return code;
    }
    *ret_file = reading.file;
    return 0;
}

struct ps_config_file *ps_config_free(struct ps_config_file *file)
{
    if (!file)
        return NULL;
    for (struct text *text = file->texts, *next; text; text = next) {
        next = text->next;
        free(text);
    }
    free(file);
    return NULL;
}

bool ps_listen_is_local(const char *listen)
{
    char host[256];
    int port;
    if (strncmp(listen, "unix:", 5) == 0)
        return true;
    if (ps_parse_host_port(listen, host, sizeof host, &port, NULL))
        return false;
    struct in_addr four;
    struct in6_addr six;
    if (inet_pton(AF_INET, host, &four) == 1)
        return (ntohl(four.s_addr) >> 24) == 127;
    if (inet_pton(AF_INET6, host, &six) == 1)
        return IN6_IS_ADDR_LOOPBACK(&six) || (IN6_IS_ADDR_V4MAPPED(&six) && six.s6_addr[12] == 127);
    return strcasecmp(host, "localhost") == 0;
}

int ps_check_listen(const char *flag, const char *listen, bool tls, bool insecure, struct ps_error *err)
{
    if (tls || insecure || ps_listen_is_local(listen))
        return 0;
    return ps_fail(
        err, PS_FAILED_PRECONDITION,
        "--%s %s can be reached by others without encryption: give --tls-cert and --tls-key, listen on"
        " 127.0.0.1, or say --insecure",
        flag, listen);
}
