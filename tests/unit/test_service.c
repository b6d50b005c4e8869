/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/sidecar/service.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct fixture {
    char dir[64];
    struct ps_service *service;
    _Atomic int64_t now_ns; /* turned by the test */
    struct ps_clock clock;
};

static int64_t read_clock(void *context)
{
    return ((struct fixture *)context)->now_ns;
}

static void later(struct fixture *f, double seconds)
{
    f->now_ns += (int64_t)(seconds * 1e9);
}

#define ok(call)                                                                                             \
    do {                                                                                                     \
        struct ps_error err = {0};                                                                           \
        int ok_code = (call);                                                                                \
        if (ok_code)                                                                                         \
            fail_msg("%s: %d %s", #call, ok_code, err.message);                                              \
    } while (0)
#define fails(expected, words, call)                                                                         \
    do {                                                                                                     \
        struct ps_error err = {0};                                                                           \
        assert_int_equal((call), (expected));                                                                \
        if (!strstr(err.message, words))                                                                     \
            fail_msg("\"%s\" is not in \"%s\"", words, err.message);                                         \
    } while (0)

static void reopen(struct fixture *f, const char *token)
{
    f->service = ps_service_free(f->service);
    struct ps_service_config config = {.data_dir = f->dir, .clock = &f->clock, .token = token};
    ok(ps_service_open(&config, &f->service, &err));
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    f->clock = (struct ps_clock){read_clock, f};
    f->now_ns = 1000;
    snprintf(f->dir, sizeof f->dir, "/tmp/ps_test_service.XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    reopen(f, NULL);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    ps_service_free(f->service);
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", f->dir);
    free(f);
    return system(command);
}

static void create(struct fixture *f, const char *name, bool resume)
{
    struct ps_new_run request = {.name = name, .world_size = 2, .resume = resume};
    ok(ps_service_create_run(f->service, &request, NULL, NULL, &err));
}

static void beat(struct fixture *f, const char *name, uint32_t attempt, uint32_t rank)
{
    struct ps_heartbeat heartbeat = {.attempt = attempt, .rank = rank};
    ok(ps_service_heartbeat(f->service, name, &heartbeat, NULL, &err));
}

static int state_after_sweep(struct fixture *f, const char *name)
{
    struct ps_run run;
    ok(ps_service_sweep(f->service, &err));
    ok(ps_store_get_run(f->service->store, name, &run, &err));
    int state = run.state;
    ps_run_done(&run);
    return state;
}

static void test_liveness(void **state)
{
    struct fixture *f = *state;
    create(f, "r", false);
    later(f, 100);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_CREATED); /* it may still be loading its data */
    beat(f, "r", 0, 0);
    later(f, 19.9);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_RUNNING);
    beat(f, "r", 0, 1); /* any rank will do */
    later(f, 19.9);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_RUNNING);
    struct ps_point point = {"loss", 1, 1, 1};
    ok(ps_service_append_steps(f->service, "r", 0, 0, 1, &point, 1, NULL, &err)); /* so will points */
    later(f, 19.9);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_RUNNING);
    ok(ps_service_append_steps(f->service, "r", 0, 0, 1, &point, 1, NULL, &err)); /* and a replay */
    later(f, 19.9);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_RUNNING);
    struct ps_epoch epoch = {.epoch = 1, .accuracy = 0.5};
    ok(ps_service_report_epoch(f->service, "r", &epoch, NULL, &err));
    later(f, 20);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_LOST);
    struct ps_run run;
    ok(ps_store_get_run(f->service->store, "r", &run, &err));
    assert_string_equal(run.reason, "not heard of for 20.0 s");
    ps_run_done(&run);
    later(f, 5000);
    beat(f, "r", 0, 0);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_RUNNING); /* heard of again */
    later(f, 20);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_LOST);
    later(f, 1000);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_LOST);
    ok(ps_service_finish_run(f->service, "r", 0, PS_RUN_KILLED, "", 0, NULL, &err));
    later(f, 1000);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_KILLED);
}

static void test_liveness_of_attempts(void **state)
{
    struct fixture *f = *state;
    create(f, "r", false);
    beat(f, "r", 1, 0);
    later(f, 15);
    create(f, "r", true); /* the new attempt has its own time to get going */
    later(f, 15);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_CREATED);
    beat(f, "r", 2, 0);
    later(f, 15);
    beat(f, "r", 1, 0); /* the old one is no sign of life of the new one */
    later(f, 5);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_LOST);
    beat(f, "r", 1, 0);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_LOST);
}

static void test_never_started(void **state)
{
    struct fixture *f = *state;
    create(f, "r", false);
    later(f, 599);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_CREATED);
    later(f, 1);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_LOST);
}

static void test_restart_gives_the_full_grace(void **state)
{
    struct fixture *f = *state;
    create(f, "r", false);
    create(f, "ended", false);
    beat(f, "r", 0, 0);
    ok(ps_service_finish_run(f->service, "ended", 0, PS_RUN_FINISHED, "", 0, NULL, &err));
    later(f, 19);
    reopen(f, NULL);
    later(f, 19);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_RUNNING);
    later(f, 1);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_LOST);
    assert_int_equal(state_after_sweep(f, "ended"), PS_RUN_FINISHED);
    f->now_ns = 5; /* the machine was started again: its monotonic clock begins anew */
    beat(f, "r", 0, 0);
    reopen(f, NULL);
    assert_int_equal(state_after_sweep(f, "r"), PS_RUN_RUNNING);
}

static void test_events_reach_subscribers(void **state)
{
    struct fixture *f = *state;
    struct ps_subscription *subscription;
    ok(ps_hub_subscribe(f->service->hub, NULL, 0, NULL, NULL, &subscription, &err));
    create(f, "r", false);
    beat(f, "r", 0, 0);
    later(f, 20);
    ok(ps_service_sweep(f->service, &err));
    beat(f, "r", 0, 0);
    static const char *const kinds[] = {"created", "updated", "lost", "recovered"};
    for (int i = 0; i < 4; i++) {
        const struct ps_event *event;
        struct ps_error err = {0};
        assert_int_equal(ps_hub_next(subscription, &event, &err), 1);
        assert_string_equal(event->kind, kinds[i]);
        ps_hub_release(event);
    }
    ps_hub_unsubscribe(subscription);
}

static void test_readiness(void **state)
{
    struct fixture *f = *state;
    ok(ps_service_ready(f->service, &err));
    f->service->draining = true;
    fails(PS_UNAVAILABLE, "stopping", ps_service_ready(f->service, &err));
}

static struct ps_upload *begin(struct fixture *f, const char *data, uint32_t attempt)
{
    struct ps_sha256 *sha = ps_sha256_new();
    char hex[PS_SHA256_HEX];
    ps_sha256_update(sha, data, strlen(data));
    ps_sha256_hex(sha, hex);
    ps_sha256_free(sha);
    struct ps_new_checkpoint header = {.attempt = attempt,
                                       .epoch = 1,
                                       .filename = "epoch_1.pth",
                                       .format = "pth",
                                       .size = strlen(data),
                                       .sha256 = hex};
    struct ps_upload *upload;
    ok(ps_upload_begin(f->service, "r", &header, &upload, &err));
    return upload;
}

static void test_upload_belongs_to_the_attempt_it_began_with(void **state)
{
    struct fixture *f = *state;
    create(f, "r", false);
    struct ps_upload *upload = begin(f, "weights", 0);
    create(f, "r", true);
    ok(ps_upload_data(upload, 0, "weights", 7, ps_crc32c(0, "weights", 7), &err));
    struct ps_checkpoint checkpoint;
    ok(ps_upload_commit(upload, &checkpoint, &err));
    assert_int_equal(checkpoint.attempt, 1);
    ps_checkpoint_done(&checkpoint);
    ps_upload_free(upload);
}

static void test_upload_of_a_deleted_run_leaves_no_file(void **state)
{
    struct fixture *f = *state;
    create(f, "r", false);
    struct ps_upload *upload = begin(f, "weights", 0);
    char hex[PS_SHA256_HEX];
    struct ps_sha256 *sha = ps_sha256_new();
    ps_sha256_update(sha, "weights", 7);
    ps_sha256_hex(sha, hex);
    ps_sha256_free(sha);
    ok(ps_upload_data(upload, 0, "weights", 7, ps_crc32c(0, "weights", 7), &err));
    ok(ps_service_finish_run(f->service, "r", 0, PS_RUN_FAILED, "", 0, NULL, &err));
    uint64_t bytes;
    ok(ps_service_delete_run(f->service, "r", &bytes, &err));
    struct ps_checkpoint checkpoint;
    fails(PS_NOT_FOUND, "run", ps_upload_commit(upload, &checkpoint, &err));
    ps_upload_free(upload);
    int fd;
    fails(PS_NOT_FOUND, "", ps_blobs_read(f->service->blobs, hex, 0, &fd, &err));
}

static void test_checks_at_the_edge(void **state)
{
    struct fixture *f = *state;
    create(f, "r", false);
    struct ps_service *s = f->service;
    struct ps_heartbeat beats[] = {
        {.elapsed_s = -1}, {.elapsed_s = INFINITY}, {.rank = 65536}, {.step = UINT64_MAX}};
    for (size_t i = 0; i < sizeof beats / sizeof *beats; i++)
        fails(PS_INVALID_ARGUMENT, ":", ps_service_heartbeat(s, "r", &beats[i], NULL, &err));
    fails(PS_INVALID_ARGUMENT, "run", ps_service_heartbeat(s, "", &beats[0], NULL, &err));
    struct ps_epoch nan_epoch = {.epoch = 1, .accuracy = NAN, .train_loss = NAN};
    ok(ps_service_report_epoch(s, "r", &nan_epoch, NULL, &err)); /* what a diverged run reports */
    struct ps_epoch unevaluated = {.epoch = 2, .accuracy = 77, .no_eval = true};
    ok(ps_service_report_epoch(s, "r", &unevaluated, NULL, &err));
    struct ps_point points[] = {{"a/b.c-d_e", 1, NAN, 0}, {"bad name", 1, 1, 0}};
    ok(ps_service_append_steps(s, "r", 0, 0, 1, points, 1, NULL, &err));
    fails(PS_INVALID_ARGUMENT, "points[1].name",
          ps_service_append_steps(s, "r", 0, 0, 2, points, 2, NULL, &err));
    ok(ps_service_append_steps(s, "r", 0, 0, 2, points, 0, NULL,
                               &err)); /* an empty batch is a sign of life */
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_liveness),
        TEST(test_liveness_of_attempts),
        TEST(test_never_started),
        TEST(test_restart_gives_the_full_grace),
        TEST(test_events_reach_subscribers),
        TEST(test_readiness),
        TEST(test_upload_belongs_to_the_attempt_it_began_with),
        TEST(test_upload_of_a_deleted_run_leaves_no_file),
        TEST(test_checks_at_the_edge),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
