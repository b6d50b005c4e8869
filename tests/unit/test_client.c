/* SPDX-License-Identifier: Apache-2.0
 * libparamsync's calls against a sidecar in this process. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/base/fs.h"
#include "services/client/paramsync.h"
#include "tests/unit/test_client_fake.h"

#include <fcntl.h>
#include <math.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

struct fixture {
    struct fake fake;
    struct paramsync_client *client;
    char dir[64];
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    fake_init(&f->fake);
    fake_start(&f->fake);
    unsetenv("PARAMSYNC_TOKEN");
    unsetenv("PARAMSYNC_SIDECAR");
    snprintf(f->dir, sizeof f->dir, "/tmp/ps_client_XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    assert_int_equal(
        paramsync_connect(&(struct paramsync_options){.address = f->fake.listen}, &f->client, NULL), 0);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    char command[128];
    paramsync_disconnect(f->client);
    fake_done(&f->fake);
    snprintf(command, sizeof command, "rm -rf %s", f->dir);
    int code = system(command);
    free(f);
    return code;
}

static char *in_dir(struct fixture *f, const char *name)
{
    return ps_path_join(f->dir, name);
}

/* A file of size bytes that compress badly; returns its path (free it). */
static char *make_file(struct fixture *f, const char *name, size_t size)
{
    char *path = in_dir(f, name);
    uint32_t *data = malloc(size + 4), x = 12345 + (uint32_t)size;
    for (size_t i = 0; i < size / 4 + 1; i++)
        data[i] = x = x * 1664525u + 1013904223u;
    assert_int_equal(ps_write_file_atomic(path, data, size, NULL), 0);
    free(data);
    return path;
}

static void assert_same_file(const char *a, const char *b)
{
    char *x, *y;
    size_t n, m;
    assert_int_equal(ps_read_file(a, 1 << 26, &x, &n, NULL), 0);
    assert_int_equal(ps_read_file(b, 1 << 26, &y, &m, NULL), 0);
    assert_int_equal(n, m);
    assert_memory_equal(x, y, n);
    free(x);
    free(y);
}

static void runs(void **state)
{
    struct fixture *f = *state;
    struct paramsync_error err = {0};
    struct paramsync_run *run = NULL;
    struct paramsync_runs *list = NULL;
    bool resumed = true;
    struct paramsync_new_run request = {
        .name = "a/b \"c\" \xe8\xb7\x91", .world_size = 2, .request_id = "same"};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(paramsync_create_run(f->client, &request, &run, &resumed, &err), 0);
        assert_string_equal(run->name, request.name);
        assert_string_equal(run->id, fake_run_id);
        assert_false(resumed);
        paramsync_run_free(run);
    }
    assert_int_equal(f->fake.runs, 1);
    request.name = "";
    assert_int_equal(paramsync_create_run(f->client, &request, &run, NULL, &err), PARAMSYNC_INVALID_ARGUMENT);
    request.name = NULL;
    assert_int_equal(paramsync_create_run(f->client, &request, &run, NULL, NULL), PARAMSYNC_INVALID_ARGUMENT);

    assert_int_equal(paramsync_get_run(f->client, "x", &run, &err), 0);
    assert_string_equal(run->name, "x");
    assert_int_equal(run->config_count, 1);
    assert_string_equal(run->config[0].key, "lr");
    assert_int_equal(run->tag_count, 2);
    assert_string_equal(run->tags[1], "b");
    paramsync_run_free(run);
    run = NULL;
    assert_int_equal(paramsync_get_run(f->client, "nobody", &run, &err), PARAMSYNC_NOT_FOUND);
    assert_null(run);
    assert_non_null(strstr(err.message, "nobody"));

    assert_int_equal(paramsync_list_runs(f->client, NULL, 0, &list, &err), 0);
    assert_int_equal(list->count, 1234); /* over three pages */
    assert_string_equal(list->runs[1233].name, "run-1233");
    paramsync_runs_free(list);
    assert_int_equal(paramsync_list_runs(f->client, "", 7, &list, &err), 0);
    assert_int_equal(list->count, 7);
    paramsync_runs_free(list);

    int live = 0;
    struct paramsync_heartbeat beat = {.rank = 1, .step = 5};
    assert_int_equal(paramsync_heartbeat(f->client, "x", &beat, &live, &err), 0);
    assert_int_equal(live, PARAMSYNC_RUN_RUNNING);
    assert_int_equal(paramsync_finish_run(f->client, "x", 0, PARAMSYNC_RUN_KILLED, "SIGTERM", 12.5, &err), 0);
    assert_int_equal(f->fake.final_state, PARAMSYNC_RUN_KILLED);
    paramsync_run_free(NULL);
    paramsync_runs_free(NULL);
}

static void metrics(void **state)
{
    struct fixture *f = *state;
    struct paramsync_error err = {0};
    struct paramsync_metrics *m = NULL;
    struct paramsync_epoch epoch = {.epoch = 1, .accuracy = 0.5, .val_loss = NAN, .elapsed_s = 3};
    assert_int_equal(paramsync_report_epoch(f->client, "x", &epoch, &err), 0);
    epoch.accuracy = 0.6;
    assert_int_equal(paramsync_report_epoch(f->client, "x", &epoch, &err), 0);
    assert_int_equal(paramsync_query(f->client, "x", NULL, -1, 0, &m, &err), 0);
    assert_int_equal(m->epoch_count, 1);
    assert_true(m->epochs[0].accuracy == 0.6);
    assert_true(isnan(m->epochs[0].val_loss));
    assert_int_equal(m->series_count, 0);
    assert_string_equal(m->names[0], "loss");
    paramsync_metrics_free(m);
    assert_int_equal(paramsync_query(f->client, "x", "loss", -1, 10, &m, &err), 0);
    assert_int_equal(m->series_count, 1);
    assert_int_equal(m->series[0].count, 2);
    assert_true(m->series[0].values[1] == 0.25);
    paramsync_metrics_free(m);
    paramsync_metrics_free(NULL);
}

static int count_events(void *context, const struct paramsync_event *event)
{
    int *n = context;
    assert_int_equal(event->id, 7 + ++*n);
    assert_true((event->run != NULL) == (*n == 3));
    return *n == 10;
}

static int first_event(void *context, const struct paramsync_event *event)
{
    (void)event;
    return ++*(int *)context;
}

static void watch(void **state)
{
    struct fixture *f = *state;
    struct paramsync_error err = {0};
    int n = 0;
    assert_int_equal(paramsync_watch_run(f->client, "x", 7, 30, count_events, &n, &err),
                     PARAMSYNC_UNAVAILABLE);
    assert_int_equal(n, 3);
    n = 0;
    assert_int_equal(paramsync_watch_run(f->client, "x", 7, 30, first_event, &n, &err), 0);
    assert_int_equal(n, 1);
}

static void nobody_there(void **state)
{
    struct fixture *f = *state;
    struct paramsync_error err = {0};
    struct paramsync_run *run = NULL;
    struct paramsync_client *client = NULL;
    fake_stop(&f->fake);
    assert_int_equal(paramsync_get_run(f->client, "x", &run, &err), PARAMSYNC_UNAVAILABLE);
    assert_non_null(strstr(err.message, f->fake.listen));
    assert_null(strchr(err.message, '\n'));
    fake_start(&f->fake);

    const char *bad[] = {"localhost", "127.0.0.1:99999", "127.0.0.1:0", "a:b:c"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(paramsync_connect(&(struct paramsync_options){.address = bad[i]}, &client, &err),
                         PARAMSYNC_INVALID_ARGUMENT);
        assert_null(client);
    }
    assert_int_not_equal(
        paramsync_connect(&(struct paramsync_options){.token_file = "/nonexistent/token"}, &client, &err), 0);
    assert_non_null(strstr(err.message, "/nonexistent/token"));
    assert_int_not_equal(
        paramsync_connect(&(struct paramsync_options){.tls_ca = "/nonexistent/ca"}, &client, &err), 0);
    assert_int_equal(paramsync_connect(&(struct paramsync_options){.token = "a\nb"}, &client, &err),
                     PARAMSYNC_INVALID_ARGUMENT);
    assert_null(client);
}

static void tokens(void **state)
{
    struct fixture *f = *state;
    struct paramsync_error err = {0};
    struct paramsync_client *client;
    struct paramsync_run *run;
    char *path = in_dir(f, "token");
    struct paramsync_options options = {.address = f->fake.listen};
    f->fake.token = "s3cret";
    assert_int_equal(paramsync_get_run(f->client, "x", &run, &err), PARAMSYNC_UNAUTHENTICATED);
    assert_int_equal(ps_write_file_atomic(path, "s3cret\n", 7, NULL), 0);
    options.token_file = path;
    assert_int_equal(paramsync_connect(&options, &client, &err), 0);
    assert_int_equal(paramsync_get_run(client, "x", &run, &err), 0);
    paramsync_run_free(run);
    paramsync_disconnect(client);
    options.token_file = NULL;
    setenv("PARAMSYNC_TOKEN", "s3cret", 1);
    assert_int_equal(paramsync_connect(&options, &client, &err), 0);
    assert_int_equal(paramsync_get_run(client, "x", &run, &err), 0);
    paramsync_run_free(run);
    paramsync_disconnect(client);
    unsetenv("PARAMSYNC_TOKEN");
    free(path);
}

static void put(struct fixture *f, const char *path, uint32_t epoch)
{
    struct paramsync_error err = {0};
    struct paramsync_put what = {.path = path, .epoch = epoch};
    struct paramsync_checkpoint *checkpoint = NULL;
    if (paramsync_put_checkpoint(f->client, "x", &what, &checkpoint, &err))
        fail_msg("%s", err.message);
    assert_int_equal(checkpoint->epoch, epoch);
    paramsync_checkpoint_free(checkpoint);
}

static void count_progress(void *context, uint64_t done, uint64_t total)
{
    assert_true(done <= total);
    *(uint64_t *)context = done;
}

static void put_and_pull(void **state)
{
    struct fixture *f = *state;
    const size_t sizes[] = {0, 1, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 3000000};
    struct paramsync_error err = {0};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct paramsync_checkpoint *checkpoint = NULL;
        uint64_t done = 0;
        f->fake.blob_count = 0;
        char *source = make_file(f, "epoch_1.safetensors", sizes[i]), *out = in_dir(f, "out");
        put(f, source, 1);
        assert_string_equal(f->fake.blobs[0].format, "safetensors");
        if (paramsync_pull(f->client, "x", NULL, out, count_progress, &done, &checkpoint, &err))
            fail_msg("%s", err.message);
        assert_int_equal(checkpoint->size, sizes[i]);
        assert_int_equal(done, sizes[i]);
        assert_same_file(source, out);
        paramsync_checkpoint_free(checkpoint);
        fake_see(&f->fake);
        free(f->fake.blobs[0].data);
        f->fake.blob_count = 0;
        free(source);
        free(out);
    }
    struct paramsync_put missing = {.path = "/nonexistent/file"}, folder = {.path = "/tmp"};
    assert_int_not_equal(paramsync_put_checkpoint(f->client, "x", &missing, NULL, &err), 0);
    assert_non_null(strstr(err.message, "/nonexistent/file"));
    assert_int_equal(paramsync_put_checkpoint(f->client, "x", &folder, NULL, &err),
                     PARAMSYNC_INVALID_ARGUMENT);
    f->fake.refuse_put = PS_RESOURCE_EXHAUSTED;
    char *source = make_file(f, "big.pth", 5000000);
    struct paramsync_put what = {.path = source};
    assert_int_equal(paramsync_put_checkpoint(f->client, "x", &what, NULL, &err),
                     PARAMSYNC_RESOURCE_EXHAUSTED);
    free(source);
}

static void pull_resumes(void **state)
{
    struct fixture *f = *state;
    struct paramsync_error err = {0};
    char *source = make_file(f, "w.pth", 3000000), *out = in_dir(f, "out"), *part = in_dir(f, "out.part");
    struct stat st;
    put(f, source, 1);
    f->fake.pull_stop_at = 1000000;
    assert_int_equal(paramsync_pull(f->client, "x", NULL, out, NULL, NULL, NULL, &err),
                     PARAMSYNC_UNAVAILABLE);
    assert_int_not_equal(stat(out, &st), 0);
    assert_int_equal(stat(part, &st), 0);
    size_t first = (size_t)st.st_size;
    assert_true(first >= 1000000 && first < 3000000);
    f->fake.pulled_bytes = 0;
    assert_int_equal(paramsync_pull(f->client, "x", NULL, out, NULL, NULL, NULL, &err), 0);
    assert_int_equal(f->fake.pulled_bytes, 3000000 - first);
    assert_same_file(source, out);
    assert_int_not_equal(stat(part, &st), 0);

    /* A part of something else, one that is too long, and one that is whole already. */
    assert_int_equal(ps_write_file_atomic(part, "not the beginning", 17, NULL), 0);
    assert_int_equal(paramsync_pull(f->client, "x", NULL, out, NULL, NULL, NULL, &err), 0);
    assert_same_file(source, out);
    assert_int_equal(rename(out, part), 0);
    assert_int_equal(truncate(part, 3000001), 0);
    assert_int_equal(paramsync_pull(f->client, "x", NULL, out, NULL, NULL, NULL, &err), 0);
    assert_same_file(source, out);
    assert_int_equal(rename(out, part), 0);
    f->fake.pulled_bytes = 0;
    assert_int_equal(paramsync_pull(f->client, "x", NULL, out, NULL, NULL, NULL, &err), 0);
    assert_int_equal(f->fake.pulled_bytes, 0);
    assert_same_file(source, out);

    /* Somebody else is writing it. */
    int fd = open(part, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    assert_int_equal(paramsync_pull(f->client, "x", NULL, out, NULL, NULL, NULL, &err),
                     PARAMSYNC_FAILED_PRECONDITION);
    close(fd);
    free(source);
    free(out);
    free(part);
}

static void one_flipped_bit(void **state)
{
    struct fixture *f = *state;
    struct paramsync_error err = {0};
    char *source = make_file(f, "w.pth", 1000000), *out = in_dir(f, "out"), *part = in_dir(f, "out.part");
    struct stat st;
    put(f, source, 1);
    /* On the way: the chunk's crc32c tells, what came before it is kept, the next pull goes on from there. */
    f->fake.pull_flip_at = 600000;
    assert_int_equal(paramsync_pull(f->client, "x", NULL, out, NULL, NULL, NULL, &err), PARAMSYNC_DATA_LOSS);
    assert_int_not_equal(stat(out, &st), 0);
    assert_int_equal(stat(part, &st), 0);
    assert_int_equal(st.st_size, 2 * (256 << 10));
    assert_int_equal(paramsync_pull(f->client, "x", NULL, out, NULL, NULL, NULL, &err), 0);
    assert_same_file(source, out);

    /* On the sidecar's disk: only the sha256 tells. An older file under the name stays as it was. */
    assert_int_equal(ps_write_file_atomic(out, "old", 3, NULL), 0);
    f->fake.pull_spoil_at = 700000;
    assert_int_equal(paramsync_pull(f->client, "x", NULL, out, NULL, NULL, NULL, &err), PARAMSYNC_DATA_LOSS);
    assert_int_equal(stat(out, &st), 0);
    assert_int_equal(st.st_size, 3);
    assert_int_not_equal(stat(part, &st), 0);
    assert_int_equal(unlink(out), 0);
    assert_int_equal(paramsync_pull(f->client, "x", NULL, out, NULL, NULL, NULL, &err), PARAMSYNC_DATA_LOSS);
    assert_int_not_equal(stat(out, &st), 0);

    /* In the part file that was left behind: found at the end, then once more from the start. */
    f->fake.pull_spoil_at = 0;
    f->fake.pull_stop_at = 600000;
    assert_int_equal(paramsync_pull(f->client, "x", NULL, out, NULL, NULL, NULL, &err),
                     PARAMSYNC_UNAVAILABLE);
    int fd = open(part, O_RDWR | O_CLOEXEC);
    uint8_t byte;
    assert_int_equal(pread(fd, &byte, 1, 1000), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, 1000), 1);
    close(fd);
    assert_int_equal(paramsync_pull(f->client, "x", NULL, out, NULL, NULL, NULL, &err), 0);
    assert_same_file(source, out);
    free(source);
    free(out);
    free(part);
}

static void selectors_and_names(void **state)
{
    struct fixture *f = *state;
    struct paramsync_error err = {0};
    struct paramsync_checkpoint *checkpoint = NULL;
    struct paramsync_checkpoints *list = NULL;
    char *one = make_file(f, "epoch_1.pth", 100), *two = make_file(f, "epoch_2.pth", 200);
    put(f, one, 1);
    put(f, two, 2);
    assert_int_equal(paramsync_list_checkpoints(f->client, "x", &list, &err), 0);
    assert_int_equal(list->count, 2);
    paramsync_checkpoints_free(list);
    assert_int_equal(
        paramsync_get_checkpoint(f->client, "x", &(struct paramsync_selector){.epoch = 1}, &checkpoint, &err),
        0);
    assert_int_equal(checkpoint->size, 100);
    paramsync_checkpoint_free(checkpoint);
    assert_int_equal(paramsync_get_checkpoint(f->client, "x", NULL, &checkpoint, &err), 0);
    assert_int_equal(checkpoint->size, 200);
    paramsync_checkpoint_free(checkpoint);
    checkpoint = NULL;
    assert_int_equal(
        paramsync_get_checkpoint(f->client, "x", &(struct paramsync_selector){.epoch = 9}, &checkpoint, &err),
        PARAMSYNC_NOT_FOUND);
    assert_int_equal(paramsync_get_checkpoint(f->client, "x",
                                              &(struct paramsync_selector){.best = true, .epoch = 1},
                                              &checkpoint, &err),
                     PARAMSYNC_INVALID_ARGUMENT);
    assert_null(checkpoint);

    /* A sidecar that names a path must not choose where we write. */
    const char *evil[] = {"../x", "/etc/x", ".hidden", "", "a\tb", "-o"};
    for (size_t i = 0; i < sizeof evil / sizeof *evil; i++) {
        pthread_mutex_lock(&f->fake.lock);
        snprintf(f->fake.blobs[1].filename, sizeof f->fake.blobs[1].filename, "%s", evil[i]);
        pthread_mutex_unlock(&f->fake.lock);
        assert_int_equal(paramsync_pull(f->client, "x", NULL, NULL, NULL, NULL, NULL, &err),
                         PARAMSYNC_INVALID_ARGUMENT);
    }
    free(one);
    free(two);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(runs, setup, teardown),
        cmocka_unit_test_setup_teardown(metrics, setup, teardown),
        cmocka_unit_test_setup_teardown(watch, setup, teardown),
        cmocka_unit_test_setup_teardown(nobody_there, setup, teardown),
        cmocka_unit_test_setup_teardown(tokens, setup, teardown),
        cmocka_unit_test_setup_teardown(put_and_pull, setup, teardown),
        cmocka_unit_test_setup_teardown(pull_resumes, setup, teardown),
        cmocka_unit_test_setup_teardown(one_flipped_bit, setup, teardown),
        cmocka_unit_test_setup_teardown(selectors_and_names, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
