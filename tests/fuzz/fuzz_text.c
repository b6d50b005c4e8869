/* SPDX-License-Identifier: Apache-2.0
 * Texts that people and programs write, told apart by the first byte: INI files, token files, HTTP's Range
 * and Host, the lines that tail reads, durations, byte counts, addresses. */
#include "tests/fuzz/fuzz.h"

#include "services/base/clock.h"
#include "services/base/options.h"
#include "services/base/text.h"
#include "services/cli/lines.h"
#include "services/sidecar/access.h"
#include "services/sidecar/config.h"
#include "services/sidecar/http_host.h"
#include "services/sidecar/http_range.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct settings {
    const char *dir;
    int64_t number;
    double share, time;
    bool flag;
};

static void ini(const char *text)
{
    static const struct ps_option rows[] = {
        {.name = "dir",
         .type = PS_TYPE_STRING,
         .offset = offsetof(struct settings, dir),
         .value = "DIR",
         .help = "h"},
        {.name = "number",
         .type = PS_TYPE_INT,
         .offset = offsetof(struct settings, number),
         .value = "N",
         .min = 0,
         .max = 100,
         .help = "h"},
        {.name = "share",
         .type = PS_TYPE_DOUBLE,
         .offset = offsetof(struct settings, share),
         .value = "X",
         .min = 0,
         .max = 1,
         .help = "h"},
        {.name = "time",
         .type = PS_TYPE_DURATION,
         .offset = offsetof(struct settings, time),
         .value = "T",
         .min = 0,
         .max = 60,
         .help = "h"},
        {.name = "flag", .type = PS_TYPE_BOOL, .offset = offsetof(struct settings, flag), .help = "h"},
    };
    static unsigned char sources[5];
    static const struct ps_options table = {
        .program = "p", .usage = "u", .about = "a", .rows = rows, .count = 5, .sources = sources};
    struct settings settings = {0};
    struct ps_config_file *file = NULL;
    struct ps_error err = {0};
    char path[64];
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    PS_FUZZ_CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    memset(sources, 0, sizeof sources);
    if (!ps_config_read(&table, &settings, path, &file, &err)) {
        PS_FUZZ_CHECK(settings.number >= 0 && settings.number <= 100 && settings.share >= 0 &&
                      settings.share <= 1);
        PS_FUZZ_CHECK(settings.time >= 0 && settings.time <= 60);
    } else {
        PS_FUZZ_CHECK(err.message[0] && !strchr(err.message, '\n'));
    }
    ps_config_free(file);
    close(fd);
}

static void tokens(const char *text)
{
    struct ps_access *access = ps_access_new();
    struct ps_error err = {0};
    PS_FUZZ_CHECK(access);
    if (!ps_access_load(access, text, "input", &err))
        PS_FUZZ_CHECK(!ps_access_is_open(access) && ps_access_role(access, "") == PS_ROLE_NONE);
    else
        PS_FUZZ_CHECK(ps_access_is_open(access) && err.message[0]);
    ps_access_free(access);
}

static void range(const char *text)
{
    uint64_t first = 0, count = 0;
    for (uint64_t size = 0; size < 3000; size = size * 7 + 1)
        if (ps_http_range(text, size, &first, &count) == PS_RANGE_ONE)
            PS_FUZZ_CHECK(count >= 1 && count <= size && first <= size - count);
}

static void host(const char *text)
{
    static const char *const allowed[] = {"sidecar.example"};
    ps_http_host_ok(text, "127.0.0.1", allowed, 1);
    ps_http_host_ok(text, "", allowed, 1);
}

static void line(const char *text)
{
    struct cli_line one;
    if (cli_line_parse(text, &one) == 1)
        PS_FUZZ_CHECK(!one.val || !(one.accuracy < 0));
}

static void numbers(const char *text)
{
    double value;
    char name[64];
    int port;
    struct ps_error err = {0};
    if (!ps_parse_duration(text, &value))
        PS_FUZZ_CHECK(isfinite(value) && value >= 0);
    if (!ps_parse_bytes(text, &value))
        PS_FUZZ_CHECK(isfinite(value) && value >= 0);
    if (!ps_parse_host_port(text, name, sizeof name, &port, &err))
        PS_FUZZ_CHECK(port >= 0 && port <= 65535 && strlen(name) < sizeof name);
}

static void (*const targets[])(const char *text) = {ini, tokens, range, host, line, numbers};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size)
        return 0;
    char *text = malloc(size);
    PS_FUZZ_CHECK(text);
    memcpy(text, data + 1, size - 1);
    text[size - 1] = '\0';
    targets[data[0] % 6](text);
    free(text);
    return 0;
}

size_t ps_fuzz_seed(int i, uint8_t *out, size_t max)
{
    static const char *const seeds[] = {
        "0dir = /var/lib/x\n[part]\nnumber = 7 ; a comment\n# more\nshare=0.5\ntime = 10s\nflag = true\n",
        "1first-token\n# people\nread looker\nwrite trainer\nadmin chief\n",
        "2bytes=0-99",
        "2bytes=-5",
        "2bytes=100-",
        "3sidecar.example:8080",
        "3[::1]:80",
        "4train | epoch: 3 | loss: 1.2345",
        "4val | epoch: 3 | loss: 0.9876 | accuracy: 0.8123 ",
        "51h30min",
        "510.5M",
        "5[fe80::1]:50051",
    };
    if ((size_t)i >= sizeof seeds / sizeof *seeds || max < 1024)
        return 0;
    size_t n = strlen(seeds[i]);
    memcpy(out, seeds[i], n);
    out[0] = (uint8_t)(out[0] - '0');
    return n;
}
