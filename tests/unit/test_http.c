/* SPDX-License-Identifier: Apache-2.0
 * The HTTP face over a real store, through sockets. */
#include "services/base/log.h"
#include "services/sidecar/http.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ftw.h>
#include <jansson.h>
#include <math.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

struct world {
    char dir[64];
    struct ps_service *service;
    struct ps_http *http;
    char run[PS_RUN_ID_SIZE];
};

static struct world world;
static const char secret[] = "a-token-of-some-length";

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *walk)
{
    (void)st;
    (void)flag;
    (void)walk;
    return remove(path);
}

static void start(const char *token, unsigned max_streams)
{
    struct ps_error err = {0};
    snprintf(world.dir, sizeof world.dir, "/tmp/paramsync-http-XXXXXX");
    assert_non_null(mkdtemp(world.dir));
    struct ps_service_config service = {.data_dir = world.dir, .token = token};
    if (ps_service_open(&service, &world.service, &err) < 0)
        fail_msg("%s", err.message);
    struct ps_http_config config = {.service = world.service,
                                    .listen = "127.0.0.1:0",
                                    .threads = 2,
                                    .max_streams = max_streams,
                                    .heartbeat_s = 0.2};
    if (ps_http_start(&config, &world.http, &err) < 0)
        fail_msg("%s", err.message);
}

static void stop(void)
{
    world.http = ps_http_free(world.http);
    world.service = ps_service_free(world.service);
    nftw(world.dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void new_run(const char *name)
{
    struct ps_error err = {0};
    struct ps_run run = {0};
    bool resumed;
    struct ps_new_run request = {.name = name, .world_size = 1, .epochs_planned = 3};
    if (ps_service_create_run(world.service, &request, &run, &resumed, &err) < 0)
        fail_msg("%s", err.message);
    memcpy(world.run, run.id, sizeof world.run);
    ps_run_done(&run);
}

static void epoch(uint32_t number, double accuracy, double val_loss)
{
    struct ps_error err = {0};
    bool replaced;
    struct ps_epoch e = {.epoch = number,
                         .train_loss = 0.1 + 0.2, /* not 0.3: the last bit must arrive */
                         .val_loss = val_loss,
                         .accuracy = accuracy,
                         .lr = 0.01,
                         .samples_per_s = 100,
                         .elapsed_s = 10.0 * number,
                         .train_s = 9,
                         .eval_s = 1,
                         .step = number * 10};
    if (ps_service_report_epoch(world.service, world.run, &e, &replaced, &err) < 0)
        fail_msg("%s", err.message);
}

/* ---- A client of few words ---- */

static int dial(void)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)ps_http_port(world.http)),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    return fd;
}

static void say(int fd, const char *text)
{
    assert_int_equal(send(fd, text, strlen(text), MSG_NOSIGNAL), strlen(text));
}

struct answer {
    char *text; /* everything */
    size_t size;
    int status;
    char *body;
    size_t body_size;
};

static void answer_done(struct answer *a)
{
    free(a->text);
    memset(a, 0, sizeof *a);
}

/* Sends a request that ends with the connection and reads all of the answer. */
static struct answer ask(const char *method, const char *path, const char *headers)
{
    struct answer a = {.text = malloc(1 << 20)};
    static char request[16384];
    int fd = dial();
    snprintf(request, sizeof request, "%s %s HTTP/1.1\r\nConnection: close\r\n%s%s\r\n", method, path,
             headers && strstr(headers, "Host:") ? "" : "Host: localhost\r\n", headers ? headers : "");
    say(fd, request);
    ssize_t n;
    while ((n = recv(fd, a.text + a.size, (1 << 20) - 1 - a.size, 0)) > 0)
        a.size += (size_t)n;
    close(fd);
    a.text[a.size] = '\0';
    sscanf(a.text, "HTTP/1.1 %d", &a.status);
    a.body = strstr(a.text, "\r\n\r\n");
    a.body = a.body ? a.body + 4 : a.text + a.size;
    a.body_size = a.size - (size_t)(a.body - a.text);
    return a;
}

static void expect(const char *method, const char *path, const char *headers, int status, const char *needle)
{
    struct answer a = ask(method, path, headers);
    if (a.status != status || (needle && !strstr(a.text, needle)))
        fail_msg("%s %.80s: wanted %d with \"%s\", got: %.600s", method, path, status, needle ? needle : "",
                 a.text);
    answer_done(&a);
}

static json_t *get_json(const char *path)
{
    struct answer a = ask("GET", path, NULL);
    json_error_t error;
    if (a.status != 200)
        fail_msg("%s: %s", path, a.text);
    json_t *json = json_loads(a.body, 0, &error);
    if (!json)
        fail_msg("%s: %s in %s", path, error.text, a.body);
    answer_done(&a);
    return json;
}

/* Reads from a stream until it holds the words; the buffer goes on from call to call. */
static void await(int fd, char *buffer, size_t size, const char *words)
{
    size_t have = strlen(buffer);
    while (!strstr(buffer, words)) {
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        if (poll(&ready, 1, 10000) != 1)
            fail_msg("\"%s\" did not come; got: %s", words, buffer);
        ssize_t n = recv(fd, buffer + have, size - 1 - have, 0);
        if (n <= 0)
            fail_msg("the stream ended before \"%s\"; got: %s", words, buffer);
        have += (size_t)n;
        buffer[have] = '\0';
    }
}

/* ---- Tests ---- */

static void page_and_refusals(void **state)
{
    (void)state;
    start(NULL, 0);
    expect("GET", "/", NULL, 200, "Content-Security-Policy: default-src 'none'");
    expect("GET", "/", NULL, 200, "text/html");
    expect("GET", "/app.js", NULL, 200, "nosniff");
    expect("HEAD", "/app.css", NULL, 200, "text/css");
    struct answer a = ask("GET", "/index.html", NULL);
    char header[256], *tag = strstr(a.text, "ETag: ");
    assert_non_null(tag);
    snprintf(header, sizeof header, "If-None-Match: W/\"x\", %.*s\r\n", (int)strcspn(tag + 6, "\r"), tag + 6);
    answer_done(&a);
    expect("GET", "/index.html", header, 304, "ETag");

    expect("GET", "/healthz", NULL, 200, "\"ok\"");
    expect("GET", "/readyz", NULL, 200, "ready");
    expect("GET", "/metrics", NULL, 200, "paramsync_runs{state=\"running\"} 0\n");
    expect("GET", "/nothing", NULL, 404, "{\"error\":{\"code\":\"NOT_FOUND\"");
    expect("POST", "/api/v1/runs", "Content-Length: 0\r\n", 405, "Allow: GET, HEAD");
    expect("DELETE", "/api/v1/runs/x", NULL, 404, "error");
    expect("DELETE", "/api/v1/runs/x/series", NULL, 405, "error");
    expect("PATCH", "/api/v1/runs/x", "Content-Length: 0\r\n", 415, "application/json");
    expect("DELETE", "/api/v1/runs/x", "Origin: http://evil.example\r\n", 403, "own pages");
    expect("POST", "/api/v1/runs", "Content-Length: 99999999\r\n", 413, "error");

    expect("GET", "/api/v1/runs", "Host: evil.example\r\n", 403, "PERMISSION_DENIED");
    expect("GET", "/", "Host: evil.example:8080\r\n", 403, NULL);
    expect("GET", "/healthz", "Host: 127.0.0.1:1\r\n", 200, NULL);

    static const char *const hostile[] = {
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/api/v1/runs/..",
        "/api/v1/runs/%2e%2e%2f%2e%2e",
        "/api/v1/runs/x%00y",
        "/index.html%00",
        "/api/v1/checkpoints/../paramsync.db",
        "/api/v1/checkpoints/%2e%2e%2fparamsync.db",
        "/api/v1/checkpoints/",
        "/api/v1/runs/",
        "/api/v1/runs/%ff%fe",
        "/api/v1/runs//series",
        "/api/v1/",
        "/api/v2/runs",
        "//",
        "/api/v1/runs/a/b/c",
        "/api/v1/checkpoints/ABCDEF0123456789ABCDEF0123456789ABCDEF0123456789ABCDEF0123456789",
    };
    for (size_t i = 0; i < sizeof hostile / sizeof *hostile; i++)
        expect("GET", hostile[i], NULL, 404, "NOT_FOUND");
    expect("GET", "/api/v1/runs?limit=0", NULL, 400, "limit");
    expect("GET", "/api/v1/runs?state=dancing", NULL, 400, "state");
    expect("GET", "/api/v1/runs?target=2", NULL, 400, "target");
    expect("GET", "/api/v1/runs?page=garbage", NULL, 400, "error");
    expect("GET", "/api/v1/compare", NULL, 400, "runs");
    expect("GET", "/api/v1/events?since=-3", NULL, 400, "since");

    char *path = malloc(6001);
    memset(path, 'a', 6000);
    path[0] = '/';
    path[6000] = '\0';
    expect("GET", path, NULL, 414, "error");
    free(path);
    stop();
}

static void figures(void **state)
{
    (void)state;
    start(NULL, 0);
    new_run("a \"quoted\" <b>name</b>");
    epoch(1, 0.75, NAN);
    epoch(2, 0.8125, 0.5);
    char path[256];

    json_t *list = get_json("/api/v1/runs?limit=10");
    json_t *run = json_array_get(json_object_get(list, "runs"), 0);
    assert_string_equal(json_string_value(json_object_get(run, "name")), "a \"quoted\" <b>name</b>");
    assert_string_equal(json_string_value(json_object_get(run, "id")), world.run);
    assert_true(json_real_value(json_object_get(run, "time_to_target_s")) == 20.0);
    assert_true(json_real_value(json_object_get(run, "accuracy")) == 0.8125);
    assert_null(json_object_get(run, "config"));
    json_decref(list);

    list = get_json("/api/v1/runs?state=finished,lost");
    assert_int_equal(json_array_size(json_object_get(list, "runs")), 0);
    json_decref(list);
    list = get_json("/api/v1/runs?q=QUOTED&target=0.9");
    run = json_array_get(json_object_get(list, "runs"), 0);
    assert_true(json_is_null(json_object_get(run, "time_to_target_s")));
    json_decref(list);

    snprintf(path, sizeof path, "/api/v1/runs/%s/series", world.run);
    json_t *series = get_json(path), *epochs = json_object_get(series, "epochs");
    assert_string_equal(json_string_value(json_array_get(json_object_get(epochs, "val_loss"), 0)), "NaN");
    assert_true(json_real_value(json_array_get(json_object_get(epochs, "train_loss"), 0)) == 0.1 + 0.2);
    json_decref(series);

    snprintf(path, sizeof path, "/api/v1/runs/%s", world.run);
    run = get_json(path);
    assert_int_equal(json_array_size(json_object_get(run, "attempts")), 1);
    json_decref(run);
    snprintf(path, sizeof path, "/api/v1/runs/%s/events", world.run);
    json_t *events = get_json(path);
    assert_true(json_array_size(json_object_get(events, "events")) >= 2);
    json_decref(events);
    snprintf(path, sizeof path, "/api/v1/runs/%s/ranks", world.run);
    json_decref(get_json(path));

    snprintf(path, sizeof path, "/api/v1/compare?runs=%s,sample-16&target=0.8", world.run);
    json_t *comparison = get_json(path);
    json_t *mine = json_array_get(json_object_get(comparison, "rows"), 0);
    json_t *sample = json_array_get(json_object_get(comparison, "rows"), 1);
    assert_string_equal(json_string_value(json_object_get(comparison, "reference")), world.run);
    assert_true(json_real_value(json_object_get(mine, "time_to_target_s")) == 20.0);
    assert_true(json_is_true(json_object_get(sample, "threshold_only")));
    assert_true(json_is_null(json_object_get(sample, "time_to_target_s")));
    assert_true(json_is_null(json_object_get(sample, "efficiency")));
    assert_true(json_real_value(json_object_get(sample, "total_s")) == 1200);
    json_decref(comparison);
    expect("GET", "/api/v1/compare?runs=nobody", NULL, 404, "nobody");
    expect("GET", "/metrics", NULL, 200, "paramsync_epochs 2\n");
    stop();
}

static void checkpoints(void **state)
{
    (void)state;
    start(NULL, 0);
    new_run("pull-me");
    epoch(1, 0.5, 1);
    enum { SIZE = 100000 };
    char *data = malloc(SIZE), sha256[PS_SHA256_HEX], path[200], header[200];
    for (size_t i = 0; i < SIZE; i++)
        data[i] = (char)(i * 31 + i / 256);
    struct ps_sha256 *sha = ps_sha256_new();
    ps_sha256_update(sha, data, SIZE);
    ps_sha256_hex(sha, sha256);
    ps_sha256_free(sha);
    struct ps_error err = {0};
    struct ps_upload *upload = NULL;
    struct ps_checkpoint done = {0};
    struct ps_new_checkpoint new = {.epoch = 1,
                                    .filename = "epoch_1.safetensors",
                                    .format = "safetensors",
                                    .size = SIZE,
                                    .sha256 = sha256};
    if (ps_upload_begin(world.service, world.run, &new, &upload, &err) < 0 ||
        ps_upload_data(upload, 0, data, SIZE, ps_crc32c(0, data, SIZE), &err) < 0 ||
        ps_upload_commit(upload, &done, &err) < 0)
        fail_msg("%s", err.message);
    ps_checkpoint_done(&done);
    ps_upload_free(upload);

    snprintf(path, sizeof path, "/api/v1/checkpoints/%s", sha256);
    struct answer a = ask("GET", path, NULL);
    assert_int_equal(a.status, 200);
    assert_int_equal(a.body_size, SIZE);
    assert_memory_equal(a.body, data, SIZE);
    assert_non_null(strstr(a.text, "Content-Disposition: attachment; filename=\"epoch_1.safetensors\"\r\n"));
    assert_non_null(strstr(a.text, "Accept-Ranges: bytes"));
    answer_done(&a);

    static const struct {
        const char *range;
        size_t first, count;
    } good[] = {{"0-0", 0, 1},
                {"99999-", 99999, 1},
                {"10-19", 10, 10},
                {"-500", SIZE - 500, 500},
                {"50000-999999999", 50000, 50000}};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        char content_range[100];
        snprintf(header, sizeof header, "Range: bytes=%s\r\n", good[i].range);
        snprintf(content_range, sizeof content_range, "Content-Range: bytes %zu-%zu/%d\r\n", good[i].first,
                 good[i].first + good[i].count - 1, SIZE);
        a = ask("GET", path, header);
        assert_int_equal(a.status, 206);
        assert_non_null(strstr(a.text, content_range));
        assert_int_equal(a.body_size, good[i].count);
        assert_memory_equal(a.body, data + good[i].first, good[i].count);
        answer_done(&a);
    }
    expect("GET", path, "Range: bytes=100000-\r\n", 416, "Content-Range: bytes */100000");
    expect("GET", path, "Range: bytes=-0\r\n", 416, "OUT_OF_RANGE");
    expect("GET", path, "Range: bytes=0-1,4-5\r\n", 200, NULL);
    expect("GET", path, "Range: bytes=0-1\r\nIf-Range: \"other\"\r\n", 200, NULL);
    snprintf(header, sizeof header, "Range: bytes=0-1\r\nIf-Range: \"%s\"\r\n", sha256);
    expect("GET", path, header, 206, NULL);
    snprintf(header, sizeof header, "If-None-Match: \"%s\"\r\n", sha256);
    expect("GET", path, header, 304, NULL);
    a = ask("HEAD", path, NULL);
    assert_int_equal(a.status, 200);
    assert_int_equal(a.body_size, 0);
    assert_non_null(strstr(a.text, "Content-Length: 100000"));
    answer_done(&a);
    path[strlen(path) - 1] = path[strlen(path) - 1] == '0' ? '1' : '0';
    expect("GET", path, NULL, 404, "NOT_FOUND");

    snprintf(path, sizeof path, "/api/v1/runs/%s/checkpoints", world.run);
    json_t *list = get_json(path), *one = json_array_get(json_object_get(list, "checkpoints"), 0);
    assert_string_equal(json_string_value(json_object_get(one, "sha256")), sha256);
    assert_true(json_is_true(json_object_get(one, "best")));
    json_decref(list);
    free(data);
    stop();
}

static void events(void **state)
{
    (void)state;
    start(NULL, 2);
    static char buffer[1 << 18], other[1 << 18];
    *buffer = *other = '\0';
    int fd = dial();
    say(fd, "GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n");
    await(fd, buffer, sizeof buffer, "event: ping"); /* the greeting */
    await(fd, buffer, sizeof buffer, ": heartbeat"); /* parked, and woken for a sign of life */
    new_run("watched");
    await(fd, buffer, sizeof buffer, "\"kind\":\"created\"");
    epoch(1, 0.5, 1);
    await(fd, buffer, sizeof buffer, "\"kind\":\"epoch\"");
    await(fd, buffer, sizeof buffer, "\"run\":{");
    await(fd, buffer, sizeof buffer, "id: 2\n");

    /* Another reader resumes after the first event, which only the store still has in order. */
    int resumed = dial();
    say(resumed, "GET /api/v1/events?since=0 HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: 1\r\n\r\n");
    await(resumed, other, sizeof other, "id: 2\n");
    assert_null(strstr(other, "id: 1\n"));

    expect("GET", "/api/v1/events", NULL, 503, "too many");
    close(resumed);
    /* Its place is free once a heartbeat finds nobody there. */
    struct answer a = {0};
    for (int i = 0; i < 50 && a.status != 200; i++) {
        answer_done(&a);
        *other = '\0';
        resumed = dial();
        say(resumed, "GET /api/v1/events?since=999999 HTTP/1.1\r\nHost: localhost\r\n\r\n");
        await(resumed, other, sizeof other, "\r\n\r\n");
        sscanf(other, "HTTP/1.1 %d", &a.status);
        if (a.status != 200) {
            close(resumed);
            poll(NULL, 0, 100);
        }
    }
    assert_int_equal(a.status, 200);
    await(resumed, other, sizeof other, "event: reset"); /* ids of another store */
    stop();                                              /* with both streams open */
    close(fd);
    close(resumed);
}

static void many_events(void **state)
{
    (void)state;
    start(NULL, 0);
    static char buffer[1 << 22];
    *buffer = '\0';
    new_run("long");
    int fd = dial();
    say(fd, "GET /api/v1/events?since=0 HTTP/1.1\r\nHost: localhost\r\n\r\n");
    for (uint32_t i = 1; i <= 800; i++) /* more than the ring holds, while nobody reads */
        epoch(i, 0.5, 1);
    uint64_t last;
    assert_int_equal(ps_store_last_event(world.service->store, &last, NULL), 0);
    char words[64];
    snprintf(words, sizeof words, "id: %llu\n", (unsigned long long)last);
    await(fd, buffer, sizeof buffer, words);
    /* Every id once, in order: the ring and the store's replay fit together without a seam. */
    uint64_t wanted = 1;
    for (const char *at = buffer; (at = strstr(at, "\nid: ")); at++)
        assert_int_equal(strtoull(at + 5, NULL, 10), wanted++);
    assert_int_equal(wanted, last + 1);
    close(fd);
    stop();
}

static void token(void **state)
{
    (void)state;
    start(secret, 0);
    expect("GET", "/", NULL, 200, "text/html");
    expect("GET", "/healthz", NULL, 200, NULL);
    expect("GET", "/api/v1/runs", NULL, 401, "WWW-Authenticate: Bearer");
    expect("GET", "/metrics", NULL, 401, NULL);
    expect("GET", "/api/v1/events", NULL, 401, NULL);
    expect("GET", "/api/v1/session", NULL, 401, NULL);
    expect("GET", "/api/v1/runs", "Authorization: Bearer wrong\r\n", 401, NULL);
    expect("GET", "/api/v1/runs", "Authorization: Bearer a-token-of-some-length\r\n", 200, NULL);
    expect("POST", "/api/v1/session", "Content-Length: 0\r\n", 401, NULL);
    struct answer a = ask("POST", "/api/v1/session",
                          "Content-Length: 0\r\nAuthorization: Bearer a-token-of-some-length\r\n");
    assert_int_equal(a.status, 200);
    char header[300], *cookie = strstr(a.text, "Set-Cookie: ");
    assert_non_null(cookie);
    assert_non_null(strstr(cookie, "; HttpOnly; SameSite=Strict"));
    assert_null(strstr(a.text, secret));
    snprintf(header, sizeof header, "Cookie: %.*s\r\n", (int)strcspn(cookie + 12, ";"), cookie + 12);
    answer_done(&a);
    expect("GET", "/api/v1/runs", header, 200, "runs");
    header[strlen(header) - 3] ^= 1;
    expect("GET", "/api/v1/runs", header, 401, NULL);
    stop();
}

static void addresses(void **state)
{
    (void)state;
    start(NULL, 0);
    struct ps_error err = {0};
    struct ps_http *second = NULL;
    char listen[64];
    snprintf(listen, sizeof listen, "127.0.0.1:%d", ps_http_port(world.http));
    struct ps_http_config config = {.service = world.service, .listen = listen};
    assert_true(ps_http_start(&config, &second, &err) < 0);
    assert_non_null(strstr(err.message, listen));
    config.listen = "nonsense";
    assert_int_equal(ps_http_start(&config, &second, &err), PS_INVALID_ARGUMENT);
    config.listen = "127.0.0.1:0";
    config.tls_cert = "x";
    assert_int_equal(ps_http_start(&config, &second, &err), PS_INVALID_ARGUMENT);
    config.tls_key = "y";
    assert_int_equal(ps_http_start(&config, &second, &err), PS_INVALID_ARGUMENT);
    assert_null(second);
    stop();
}

int main(void)
{
    ps_log_threshold = PS_LOG_ERROR;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(page_and_refusals), cmocka_unit_test(figures),
        cmocka_unit_test(checkpoints),       cmocka_unit_test(events),
        cmocka_unit_test(many_events),       cmocka_unit_test(token),
        cmocka_unit_test(addresses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
