/* SPDX-License-Identifier: Apache-2.0
 * The reporter against a sidecar in this process: outages, lost acknowledgements, slowness, refusals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/base/fs.h"
#include "services/client/paramsync.h"
#include "tests/unit/test_client_fake.h"

#include <math.h>
#include <unistd.h>

struct fixture {
    struct fake fake;
    struct paramsync_reporter *reporter;
    pthread_mutex_t lock; /* guards notices */
    char notices[4096];
};

static void take_notice(void *context, const char *line)
{
    struct fixture *f = context;
    pthread_mutex_lock(&f->lock);
    size_t n = strlen(f->notices);
    snprintf(f->notices + n, sizeof f->notices - n, "%s\n", line);
    pthread_mutex_unlock(&f->lock);
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    pthread_mutex_init(&f->lock, NULL);
    unsetenv("PARAMSYNC_TOKEN");
    fake_init(&f->fake);
    fake_start(&f->fake);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    paramsync_reporter_close(f->reporter, PARAMSYNC_RUN_UNSPECIFIED, NULL, 0, NULL, NULL);
    fake_done(&f->fake);
    pthread_mutex_destroy(&f->lock);
    free(f);
    return 0;
}

static struct paramsync_reporter_options make_options(struct fixture *f)
{
    return (struct paramsync_reporter_options){.connection = {.address = f->fake.listen},
                                               .run = {.name = "test", .world_size = 1},
                                               .heartbeat_s = 0.1,
                                               .flush_s = 0.02,
                                               .notice = take_notice,
                                               .context = f};
}

static void open_default(struct fixture *f)
{
    struct paramsync_reporter_options options = make_options(f);
    struct paramsync_error err = {0};
    if (paramsync_reporter_open(&options, &f->reporter, &err))
        fail_msg("%s", err.message);
}

static int close_now(struct fixture *f, double timeout_s, struct paramsync_reporter_stats *stats)
{
    struct paramsync_error err = {0};
    int code = paramsync_reporter_close(f->reporter, PARAMSYNC_RUN_FINISHED, "done", timeout_s, stats, &err);
    f->reporter = NULL;
    fake_see(&f->fake);
    if (code)
        print_message("%s\n", err.message);
    return code;
}

/* Points with value = step; every step from `from` to `to` - 1. */
static void points(struct fixture *f, const char *name, uint64_t from, uint64_t to)
{
    for (uint64_t i = from; i < to; i++)
        paramsync_reporter_point(f->reporter, name, i, (double)i, (double)i * 0.01);
}

/* Every step of 0..count - 1 arrived once and in order. */
static void assert_exactly_once(struct fixture *f, const char *name, uint64_t count)
{
    uint64_t next = 0;
    for (size_t i = 0; i < f->fake.point_count; i++) {
        const struct fake_point *p = &f->fake.points[i];
        if (strcmp(p->name, name) != 0)
            continue;
        assert_int_equal(p->step, next);
        assert_true(p->value == (double)next);
        next++;
    }
    assert_int_equal(next, count);
}

static char *make_file(size_t size)
{
    char *path = strdup("/tmp/ps_reporter_XXXXXX"), *data = malloc(size);
    int fd = mkstemp(path);
    memset(data, 'x', size);
    assert_int_equal(ps_write_all(fd, data, size, path, NULL), 0);
    close(fd);
    free(data);
    return path;
}

static void everything_arrives(void **state)
{
    struct fixture *f = *state;
    struct paramsync_reporter_stats stats;
    char *path = make_file(700000), id[27], name[64];
    uint32_t attempt;
    open_default(f);
    paramsync_reporter_run(f->reporter, id, &attempt, name, sizeof name);
    assert_string_equal(id, fake_run_id);
    assert_int_equal(attempt, 1);
    assert_string_equal(name, "test");
    points(f, "train/loss", 0, 5000);
    paramsync_reporter_point(f->reporter, "nan", 1, NAN, NAN);
    paramsync_reporter_point(f->reporter, "bad name", 1, 1, 1);
    for (uint32_t e = 1; e <= 3; e++)
        paramsync_reporter_epoch(
            f->reporter, &(struct paramsync_epoch){.epoch = e, .accuracy = e / 10.0, .elapsed_s = 100 * e});
    paramsync_reporter_checkpoint(f->reporter,
                                  &(struct paramsync_put){.path = path, .epoch = 3, .format = "pth"});
    fake_wait(&f->fake, f->fake.heartbeats >= 3);
    assert_int_equal(close_now(f, 30, &stats), 0);
    assert_exactly_once(f, "train/loss", 5000);
    assert_int_equal(stats.points_sent, 5001);
    assert_int_equal(stats.points_dropped, 1);
    assert_int_equal(stats.points_waiting, 0);
    assert_int_equal(stats.epochs_sent, 3);
    assert_int_equal(stats.checkpoints_sent, 1);
    assert_int_equal(stats.outages, 0);
    assert_int_equal(f->fake.epoch_count, 3);
    assert_int_equal(f->fake.blobs[0].size, 700000);
    assert_int_equal(f->fake.blobs[0].epoch, 3);
    /* The run ended after everything else was there. */
    assert_int_equal(f->fake.final_state, PARAMSYNC_RUN_FINISHED);
    assert_int_equal(f->fake.points_at_finish, 5001);
    assert_int_equal(f->fake.epochs_at_finish, 3);
    assert_int_equal(f->fake.blobs_at_finish, 1);
    assert_true(f->fake.final_elapsed >= 300 && f->fake.final_elapsed < 400);
    unlink(path);
    free(path);
}

static void outage_and_return(void **state)
{
    struct fixture *f = *state;
    struct paramsync_reporter_stats stats;
    char *path = make_file(300000);
    open_default(f);
    points(f, "x", 0, 1000);
    fake_wait(&f->fake, f->fake.point_count == 1000);
    fake_stop(&f->fake);
    points(f, "x", 1000, 60000);
    for (uint32_t e = 1; e <= 5; e++)
        paramsync_reporter_epoch(f->reporter, &(struct paramsync_epoch){.epoch = e});
    paramsync_reporter_checkpoint(f->reporter, &(struct paramsync_put){.path = path, .epoch = 5});
    do /* until the outage was seen; ends by the test's own timeout otherwise */
        paramsync_reporter_stats(f->reporter, &stats);
    while (!stats.outages);
    assert_false(stats.connected);
    points(f, "x", 60000, 70000);
    fake_start(&f->fake);
    points(f, "x", 70000, 80000);
    assert_int_equal(close_now(f, 60, &stats), 0);
    assert_exactly_once(f, "x", 80000);
    assert_int_equal(f->fake.epoch_count, 5);
    assert_int_equal(f->fake.blob_count, 1);
    assert_int_equal(f->fake.runs, 1);
    assert_int_equal(stats.outages, 1);
    assert_int_equal(stats.points_dropped, 0);
    assert_non_null(strstr(f->notices, "training goes on"));
    assert_non_null(strstr(f->notices, "answers again"));
    unlink(path);
    free(path);
}

static void lost_acknowledgements(void **state)
{
    struct fixture *f = *state;
    struct paramsync_reporter_stats stats;
    f->fake.lose_acks = 3;
    open_default(f);
    points(f, "x", 0, 20000);
    assert_int_equal(close_now(f, 60, &stats), 0);
    assert_exactly_once(f, "x", 20000);
    assert_true(f->fake.replays >= 3); /* sent again under the same number, not stored again */
    assert_int_equal(stats.points_sent, 20000);
}

static void away_at_the_start(void **state)
{
    struct fixture *f = *state;
    struct paramsync_reporter_options options = make_options(f);
    struct paramsync_reporter_stats stats;
    struct paramsync_error err = {0};
    char id[27];
    uint32_t attempt;
    options.open_timeout_s = 0.1;
    fake_stop(&f->fake);
    assert_int_equal(paramsync_reporter_open(&options, &f->reporter, &err), 0);
    paramsync_reporter_run(f->reporter, id, &attempt, NULL, 0);
    assert_string_equal(id, "");
    assert_int_equal(attempt, 0);
    points(f, "x", 0, 100);
    paramsync_reporter_epoch(f->reporter, &(struct paramsync_epoch){.epoch = 1});
    fake_start(&f->fake);
    fake_wait(&f->fake, f->fake.point_count == 100 && f->fake.epoch_count == 1);
    paramsync_reporter_run(f->reporter, id, &attempt, NULL, 0);
    assert_string_equal(id, fake_run_id);
    assert_int_equal(close_now(f, 30, &stats), 0);
    assert_int_equal(f->fake.runs, 1);
    assert_exactly_once(f, "x", 100);
}

static void never_there(void **state)
{
    struct fixture *f = *state;
    struct paramsync_reporter_options options = make_options(f);
    struct paramsync_reporter_stats stats;
    struct paramsync_error err = {0};
    options.open_timeout_s = 0.1;
    fake_stop(&f->fake);
    assert_int_equal(paramsync_reporter_open(&options, &f->reporter, &err), 0);
    points(f, "x", 0, 100);
    paramsync_reporter_epoch(f->reporter, &(struct paramsync_epoch){.epoch = 1});
    double before = ps_monotonic_s();
    assert_int_equal(close_now(f, 0.5, &stats), PARAMSYNC_DEADLINE_EXCEEDED);
    assert_true(ps_monotonic_s() - before < 20);
    assert_int_equal(stats.points_waiting, 100);
    assert_int_equal(stats.epochs_waiting, 1);
}

/* A caller may never wait for the sidecar: 20,000 calls while each answer takes seconds. */
static void slow_sidecar_does_not_block(void **state)
{
    struct fixture *f = *state;
    struct paramsync_reporter_stats stats;
    char *path = make_file(1000);
    open_default(f);
    pthread_mutex_lock(&f->fake.lock);
    f->fake.delay_s = 3;
    pthread_mutex_unlock(&f->fake.lock);
    double before = ps_monotonic_s();
    points(f, "x", 0, 20000);
    for (uint32_t e = 1; e <= 50; e++)
        paramsync_reporter_epoch(f->reporter, &(struct paramsync_epoch){.epoch = e});
    paramsync_reporter_checkpoint(f->reporter, &(struct paramsync_put){.path = path});
    double took = ps_monotonic_s() - before;
    print_message("20,051 calls in %.1f ms\n", took * 1e3);
    assert_true(took < 2); /* one answer takes longer */
    pthread_mutex_lock(&f->fake.lock);
    f->fake.delay_s = 0;
    pthread_mutex_unlock(&f->fake.lock);
    /* And closing ends in time even in the middle of a slow call. */
    before = ps_monotonic_s();
    close_now(f, 0.3, &stats);
    assert_true(ps_monotonic_s() - before < 2.5);
    unlink(path);
    free(path);
}

static void full_ring_drops_the_oldest_points(void **state)
{
    struct fixture *f = *state;
    struct paramsync_reporter_options options = make_options(f);
    struct paramsync_reporter_stats stats;
    struct paramsync_error err = {0};
    options.ring_points = 100;
    options.open_timeout_s = 0.1;
    fake_stop(&f->fake); /* before the run exists, nothing leaves the ring */
    assert_int_equal(paramsync_reporter_open(&options, &f->reporter, &err), 0);
    points(f, "x", 0, 250);
    for (uint32_t e = 1; e <= 60; e++)
        paramsync_reporter_epoch(f->reporter, &(struct paramsync_epoch){.epoch = e});
    paramsync_reporter_stats(f->reporter, &stats);
    assert_int_equal(stats.points_dropped, 150);
    assert_int_equal(stats.points_waiting, 100);
    fake_start(&f->fake);
    assert_int_equal(close_now(f, 30, &stats), 0);
    assert_int_equal(f->fake.point_count, 100);
    assert_int_equal(f->fake.points[0].step, 150); /* the newest stay */
    assert_int_equal(f->fake.points[99].step, 249);
    assert_int_equal(f->fake.epoch_count, 60); /* epochs are never dropped */
}

static void refusals(void **state)
{
    struct fixture *f = *state;
    struct paramsync_reporter_options options = make_options(f);
    struct paramsync_reporter_stats stats;
    struct paramsync_error err = {0};
    char *path = make_file(1000);
    /* At the start: an error, at once. */
    f->fake.refuse_create = PS_INVALID_ARGUMENT;
    assert_int_equal(paramsync_reporter_open(&options, &f->reporter, &err), PARAMSYNC_INVALID_ARGUMENT);
    assert_null(f->reporter);
    f->fake.refuse_create = 0;
    f->fake.token = "secret";
    assert_int_equal(paramsync_reporter_open(&options, &f->reporter, &err), PARAMSYNC_UNAUTHENTICATED);
    options.connection.token = "secret";
    options.run.name = "";
    assert_int_equal(paramsync_reporter_open(&options, &f->reporter, &err), PARAMSYNC_INVALID_ARGUMENT);
    options.run.name = "test";
    options.rank = 1;
    assert_int_equal(paramsync_reporter_open(&options, &f->reporter, &err), PARAMSYNC_INVALID_ARGUMENT);
    options.rank = 0;
    /* One epoch, one file: counted, the rest goes on. A passing trouble is retried. */
    f->fake.refuse_epoch = 2;
    f->fake.refuse_put = PS_RESOURCE_EXHAUSTED;
    assert_int_equal(paramsync_reporter_open(&options, &f->reporter, &err), 0);
    for (uint32_t e = 1; e <= 3; e++)
        paramsync_reporter_epoch(f->reporter, &(struct paramsync_epoch){.epoch = e});
    paramsync_reporter_checkpoint(f->reporter, &(struct paramsync_put){.path = "/nonexistent/file"});
    paramsync_reporter_checkpoint(f->reporter, &(struct paramsync_put){.path = path});
    assert_int_equal(close_now(f, 30, &stats), 0);
    assert_int_equal(stats.epochs_sent, 2);
    assert_int_equal(stats.epochs_refused, 1);
    assert_int_equal(stats.checkpoints_sent, 1);
    assert_int_equal(stats.checkpoints_refused, 1);
    assert_int_equal(f->fake.final_state, PARAMSYNC_RUN_FINISHED);
    assert_non_null(strstr(f->notices, "refuses epoch 2"));
    assert_non_null(strstr(f->notices, "/nonexistent/file"));
    unlink(path);
    free(path);
}

static void other_ranks_join(void **state)
{
    struct fixture *f = *state;
    struct paramsync_reporter_options options = make_options(f);
    struct paramsync_reporter_stats stats;
    struct paramsync_error err = {0};
    struct paramsync_reporter *second = NULL;
    open_default(f);
    options.rank = 1;
    options.run = (struct paramsync_new_run){0};
    options.run_id = fake_run_id;
    options.attempt = 1;
    assert_int_equal(paramsync_reporter_open(&options, &second, &err), 0);
    for (uint64_t i = 0; i < 500; i++)
        paramsync_reporter_point(second, "y", i, (double)i, 0);
    points(f, "x", 0, 500);
    assert_int_equal(paramsync_reporter_close(second, PARAMSYNC_RUN_FINISHED, NULL, 30, &stats, &err), 0);
    assert_int_equal(f->fake.final_state, 0); /* only rank 0 ends the run */
    assert_int_equal(close_now(f, 30, &stats), 0);
    assert_int_equal(f->fake.final_state, PARAMSYNC_RUN_FINISHED);
    assert_exactly_once(f, "x", 500);
    assert_exactly_once(f, "y", 500);
    assert_int_equal(f->fake.runs, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(everything_arrives, setup, teardown),
        cmocka_unit_test_setup_teardown(outage_and_return, setup, teardown),
        cmocka_unit_test_setup_teardown(lost_acknowledgements, setup, teardown),
        cmocka_unit_test_setup_teardown(away_at_the_start, setup, teardown),
        cmocka_unit_test_setup_teardown(never_there, setup, teardown),
        cmocka_unit_test_setup_teardown(slow_sidecar_does_not_block, setup, teardown),
        cmocka_unit_test_setup_teardown(full_ring_drops_the_oldest_points, setup, teardown),
        cmocka_unit_test_setup_teardown(refusals, setup, teardown),
        cmocka_unit_test_setup_teardown(other_ranks_join, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
