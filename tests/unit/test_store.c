/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "db/store.h"
#include "db/store_internal.h"
#include "services/base/fs.h"

#include <fcntl.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct fixture {
    char dir[64];
    struct ps_store *store;
    struct ps_store_config config;
    pthread_mutex_t lock; /* guards the events */
    uint64_t event_ids[4096];
    char event_kinds[4096][16];
    size_t event_count;
};

static void on_event(void *context, const struct ps_event *event)
{
    struct fixture *f = context;
    pthread_mutex_lock(&f->lock);
    f->event_ids[f->event_count % 4096] = event->id;
    memcpy(f->event_kinds[f->event_count % 4096], event->kind, 16);
    f->event_count++;
    pthread_mutex_unlock(&f->lock);
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
        assert_int_equal(err.code, (expected));                                                              \
        if (!strstr(err.message, words))                                                                     \
            fail_msg("\"%s\" is not in \"%s\"", words, err.message);                                         \
    } while (0)

static void remove_tree(const char *dir)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    assert_int_equal(system(command), 0);
}

static void reopen(struct fixture *f)
{
    f->store = ps_store_free(f->store);
    ok(ps_store_open(&f->config, &f->store, &err));
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    snprintf(f->dir, sizeof f->dir, "/tmp/ps_test_store.XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    pthread_mutex_init(&f->lock, NULL);
    f->config =
        (struct ps_store_config){.dir = f->dir, .block_points = 64, .on_event = on_event, .context = f};
    *state = f;
    reopen(f);
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    ps_store_free(f->store);
    remove_tree(f->dir);
    pthread_mutex_destroy(&f->lock);
    free(f);
    return 0;
}

static struct ps_run create(struct fixture *f, const char *name, bool resume)
{
    struct ps_run run;
    struct ps_new_run request = {.name = name, .world_size = 2, .resume = resume, .model = "resnet18"};
    ok(ps_store_create_run(f->store, &request, &run, NULL, &err));
    return run;
}

static void create_only(struct fixture *f, const char *name, bool resume)
{
    struct ps_run run = create(f, name, resume);
    ps_run_done(&run);
}

static int state_of(struct fixture *f, const char *name)
{
    struct ps_run run;
    ok(ps_store_get_run(f->store, name, &run, &err));
    int state = run.state;
    ps_run_done(&run);
    return state;
}

static void beat(struct fixture *f, const char *name, uint32_t attempt, double elapsed)
{
    struct ps_heartbeat b = {.attempt = attempt, .elapsed_s = elapsed, .step = 7, .points_dropped = 3};
    ok(ps_store_heartbeat(f->store, name, &b, NULL, &err));
}

static void epoch(struct fixture *f, const char *name, uint32_t attempt, uint32_t number, double accuracy,
                  double elapsed)
{
    struct ps_epoch e = {.attempt = attempt,
                         .epoch = number,
                         .train_loss = 1.0 / number,
                         .val_loss = 2.0 / number,
                         .accuracy = accuracy,
                         .elapsed_s = elapsed};
    ok(ps_store_report_epoch(f->store, name, &e, NULL, &err));
}

/* ---- Runs ---- */

static void test_create_names_and_requests(void **state)
{
    struct fixture *f = *state;
    const struct ps_key_value config[] = {{"lr", "0.01"}, {"batch", "128"}};
    const char *const tags[] = {"nightly", "b"};
    struct ps_new_run request = {.name = "r18",
                                 .world_size = 4,
                                 .model = "resnet18",
                                 .dataset = "CIFAR-10",
                                 .dataset_hash = "ab",
                                 .device = "cpu",
                                 .commit = "c0ffee",
                                 .notes = "first",
                                 .epochs_planned = 100,
                                 .batch_per_rank = 128,
                                 .config = config,
                                 .config_count = 2,
                                 .tags = tags,
                                 .tag_count = 2,
                                 .request_id = "q1"};
    struct ps_run run;
    bool resumed = true;
    ok(ps_store_create_run(f->store, &request, &run, &resumed, &err));
    assert_false(resumed);
    assert_string_equal(run.name, "r18");
    assert_int_equal(strlen(run.id), 26);
    assert_int_equal(run.state, PS_RUN_CREATED);
    assert_int_equal(run.world_size, 4);
    assert_int_equal(run.attempt, 1);
    assert_int_equal(run.config_count, 2);
    assert_string_equal(run.config[0].key, "batch"); /* sorted */
    assert_string_equal(run.config[1].value, "0.01");
    assert_string_equal(run.tags[0], "nightly");
    assert_int_equal(run.batch_per_rank, 128);
    assert_string_equal(run.commit, "c0ffee");
    assert_true(run.created_ns > 0 && run.ended_ns == 0 && !run.has_epochs);
    char id[PS_RUN_ID_SIZE];
    memcpy(id, run.id, sizeof id);
    ps_run_done(&run);

    ok(ps_store_create_run(f->store, &request, &run, &resumed, &err)); /* the answer was lost */
    assert_string_equal(run.id, id);
    ps_run_done(&run);
    request.name = "other";
    fails(PS_INVALID_ARGUMENT, "request_id", ps_store_create_run(f->store, &request, &run, &resumed, &err));

    run = create(f, "r18", false);
    assert_string_equal(run.name, "r18-2");
    ps_run_done(&run);
    run = create(f, "r18", false);
    assert_string_equal(run.name, "r18-3");
    ps_run_done(&run);
    ok(ps_store_get_run(f->store, id, &run, &err)); /* by id */
    assert_string_equal(run.name, "r18");
    ps_run_done(&run);
    fails(PS_NOT_FOUND, "\"nobody\"", ps_store_get_run(f->store, "nobody", &run, &err));
}

static void test_odd_names(void **state)
{
    struct fixture *f = *state;
    static const char *const names[] = {"a/b/../c",    "it's", "\"quoted\"", "%_", "; DROP TABLE runs; --",
                                        "\xe8\xaf\xad"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct ps_run run = create(f, names[i], false);
        assert_string_equal(run.name, names[i]);
        ps_run_done(&run);
        ok(ps_store_get_run(f->store, names[i], &run, &err));
        assert_string_equal(run.name, names[i]);
        ps_run_done(&run);
    }
    char *big = malloc(10001);
    memset(big, 'x', 10000);
    big[10000] = '\0';
    struct ps_run run;
    struct ps_new_run request = {.name = big, .world_size = 1};
    fails(PS_INVALID_ARGUMENT, "name", ps_store_create_run(f->store, &request, &run, NULL, &err));
    fails(PS_NOT_FOUND, "xxx", ps_store_get_run(f->store, big, &run, &err));
    /* A name that fills its 200 bytes is cut for its number, not within a character. */
    big[200] = '\0';
    memcpy(big + 196, "\xe8\xaf\xad.", 4);
    create_only(f, big, false);
    run = create(f, big, false);
    assert_int_equal(strlen(run.name), 198);
    assert_string_equal(run.name + 194, "xx-2");
    ps_run_done(&run);
    free(big);
}

static bool not_silent(void *context)
{
    ++*(int *)context;
    return false;
}

static void test_states(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    struct ps_run run;
    int now = 0;
    struct ps_heartbeat b = {
        .rank = 1, .elapsed_s = 5, .step = 9, .points_sent = 10, .points_dropped = 2, .spool_bytes = 4};
    ok(ps_store_heartbeat(f->store, "r", &b, &now, &err));
    assert_int_equal(now, PS_RUN_RUNNING);
    bool marked;
    ok(ps_store_mark_lost(f->store, "r", 2, "silent", NULL, NULL, &marked, &err)); /* another attempt: no */
    assert_false(marked);
    int asked = 0;
    ok(ps_store_mark_lost(f->store, "r", 1, "silent", not_silent, &asked, &marked,
                          &err)); /* heard of meanwhile: no */
    assert_true(asked == 1 && !marked);
    ok(ps_store_mark_lost(f->store, "r", 1, "silent", NULL, NULL, &marked, &err));
    assert_true(marked);
    ok(ps_store_get_run(f->store, "r", &run, &err));
    assert_int_equal(run.state, PS_RUN_LOST);
    assert_string_equal(run.reason, "silent");
    assert_true(run.ended_ns > 0);
    ps_run_done(&run);
    beat(f, "r", 1, 6); /* late */
    ok(ps_store_get_run(f->store, "r", &run, &err));
    assert_int_equal(run.state, PS_RUN_RUNNING);
    assert_true(run.ended_ns == 0 && run.elapsed_s == 6); /* rank 1's clock does not count */
    assert_string_equal(run.reason, "");
    ps_run_done(&run);
    fails(PS_INVALID_ARGUMENT, "state",
          ps_store_finish_run(f->store, "r", 0, PS_RUN_LOST, "", 0, NULL, &err));
    ok(ps_store_finish_run(f->store, "r", 0, PS_RUN_FAILED, "out of memory", 8, &run, &err));
    assert_int_equal(run.state, PS_RUN_FAILED);
    assert_string_equal(run.reason, "out of memory");
    assert_true(run.elapsed_s == 8);
    ps_run_done(&run);
    ok(ps_store_finish_run(f->store, "r", 0, PS_RUN_FAILED, "out of memory", 8, NULL, &err)); /* again */
    fails(PS_FAILED_PRECONDITION, "failed, not finished",
          ps_store_finish_run(f->store, "r", 0, PS_RUN_FINISHED, "", 8, NULL, &err));
    beat(f, "r", 1, 9);
    assert_int_equal(state_of(f, "r"), PS_RUN_FAILED); /* an end is an end */
    b.attempt = 5;
    fails(PS_NOT_FOUND, "attempt 5", ps_store_heartbeat(f->store, "r", &b, NULL, &err));

    struct ps_rank_list ranks;
    ok(ps_store_list_ranks(f->store, "r", 0, &ranks, &err));
    assert_int_equal(ranks.count, 2);
    assert_int_equal(ranks.ranks[1].rank, 1);
    assert_int_equal(ranks.ranks[1].points_dropped, 2);
    assert_int_equal(ranks.ranks[1].step, 9);
    ps_rank_list_done(&ranks);

    struct ps_event_list events;
    ok(ps_store_list_events(f->store, "r", 0, 0, &events, &err));
    static const char *const kinds[] = {"created", "updated", "lost", "recovered", "failed"};
    assert_int_equal(events.count, 5);
    assert_int_equal(f->event_count, 5);
    for (size_t i = 0; i < 5; i++) {
        assert_string_equal(events.events[i].kind, kinds[i]);
        assert_int_equal(events.events[i].id, f->event_ids[i]);
        assert_string_equal(f->event_kinds[i], kinds[i]);
    }
    uint64_t third = events.events[2].id, last;
    ps_event_list_done(&events);
    ok(ps_store_list_events(f->store, NULL, third, 1, &events, &err));
    assert_int_equal(events.count, 1);
    assert_string_equal(events.events[0].kind, "recovered");
    ps_event_list_done(&events);
    ok(ps_store_last_event(f->store, &last, &err));
    assert_int_equal(last, third + 2);
}

static void test_attempts(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    beat(f, "r", 1, 1);
    epoch(f, "r", 1, 1, 0.5, 10);
    epoch(f, "r", 1, 2, 0.9, 20);
    beat(f, "r", 1, 25);
    usleep(20000); /* the gap that must show */
    struct ps_run run;
    bool resumed;
    struct ps_new_run request = {.name = "r", .world_size = 16, .resume = true, .request_id = "again"};
    ok(ps_store_create_run(f->store, &request, &run, &resumed, &err));
    assert_true(resumed);
    assert_int_equal(run.attempt, 2);
    assert_int_equal(run.world_size, 16);
    assert_int_equal(run.state, PS_RUN_CREATED);
    assert_string_equal(run.model, "resnet18"); /* kept */
    ps_run_done(&run);
    ok(ps_store_create_run(f->store, &request, &run, &resumed, &err)); /* not a third attempt */
    assert_true(resumed && run.attempt == 2);
    ps_run_done(&run);

    beat(f, "r", 1,
         26); /* the old attempt is still sending: recorded, but the run does not turn running by it */
    assert_int_equal(state_of(f, "r"), PS_RUN_CREATED);
    ok(ps_store_finish_run(f->store, "r", 1, PS_RUN_KILLED, "late", 0, NULL, &err));
    assert_int_equal(state_of(f, "r"), PS_RUN_CREATED);

    epoch(f, "r", 0, 2, 0.7, 10);
    epoch(f, "r", 2, 3, 0.7, 20);
    ok(ps_store_get_run(f->store, "r", &run, &err));
    assert_int_equal(run.state, PS_RUN_RUNNING);
    assert_true(run.elapsed_s == 26 + 20);
    assert_true(run.elapsed_with_gaps_s >= run.elapsed_s && run.elapsed_with_gaps_s < run.elapsed_s + 60);
    assert_int_equal(run.last_epoch, 3);
    assert_true(run.has_epochs && run.has_accuracy && run.accuracy == 0.7);
    /* Attempt 1's 0.9 of epoch 2 was superseded; 0.7 came first with epoch 2. */
    assert_int_equal(run.best_epoch, 2);
    assert_true(run.best_accuracy == 0.7);
    ps_run_done(&run);

    struct ps_attempt_list attempts;
    ok(ps_store_list_attempts(f->store, "r", &attempts, &err));
    assert_int_equal(attempts.count, 2);
    assert_true(attempts.attempts[1].offset_s == 26);
    assert_string_equal(attempts.attempts[0].reason, "late");
    assert_true(attempts.attempts[0].ended_ns > 0 && attempts.attempts[1].ended_ns == 0);
    ps_attempt_list_done(&attempts);

    struct ps_epoch_list epochs;
    ok(ps_store_query_epochs(f->store, "r", false, &epochs, &err));
    assert_int_equal(epochs.count, 3);
    assert_true(epochs.epochs[0].attempt == 1 && epochs.epochs[0].elapsed_s == 10);
    assert_true(epochs.epochs[1].attempt == 2 && epochs.epochs[1].elapsed_s == 36);
    assert_true(epochs.epochs[2].elapsed_s == 46);
    ps_epoch_list_done(&epochs);
    ok(ps_store_query_epochs(f->store, "r", true, &epochs, &err));
    assert_int_equal(epochs.count, 4);
    assert_true(epochs.epochs[1].accuracy == 0.9 && epochs.epochs[2].accuracy == 0.7);
    ps_epoch_list_done(&epochs);
}

static void test_gap_between_attempts(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    beat(f, "r", 1, 100);
    usleep(50000); /* what is measured */
    create_only(f, "r", true);
    struct ps_attempt_list attempts;
    ok(ps_store_list_attempts(f->store, "r", &attempts, &err));
    assert_true(attempts.attempts[1].gap_s >= 0.05 && attempts.attempts[1].gap_s < 30);
    assert_string_equal(attempts.attempts[0].reason, "attempt 2 took over");
    struct ps_run run;
    ok(ps_store_get_run(f->store, "r", &run, &err));
    assert_true(run.elapsed_with_gaps_s == run.elapsed_s + attempts.attempts[1].gap_s);
    ps_run_done(&run);
    ps_attempt_list_done(&attempts);
}

static void test_epochs(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    struct ps_epoch e = {.epoch = 1,
                         .train_loss = NAN,
                         .val_loss = -INFINITY,
                         .accuracy = -0.0,
                         .lr = 0.08,
                         .samples_per_s = 56,
                         .elapsed_s = 3,
                         .train_s = 2,
                         .eval_s = 1,
                         .step = 390,
                         .correct = 9,
                         .counted = 10};
    bool replaced = true;
    ok(ps_store_report_epoch(f->store, "r", &e, &replaced, &err));
    assert_false(replaced);
    ok(ps_store_report_epoch(f->store, "r", &e, &replaced, &err));
    assert_true(replaced);
    size_t events = f->event_count;
    e.lr = 0.04;
    ok(ps_store_report_epoch(f->store, "r", &e, &replaced, &err));
    assert_true(replaced);
    assert_int_equal(f->event_count, events + 1); /* the same again is no event, a change is */
    struct ps_epoch_list epochs;
    ok(ps_store_query_epochs(f->store, "r", false, &epochs, &err));
    assert_int_equal(epochs.count, 1);
    struct ps_epoch *got = &epochs.epochs[0];
    e.attempt = 1;
    assert_memory_equal(&got->train_loss, &e.train_loss, 8);
    assert_memory_equal(&got->val_loss, &e.val_loss, 8);
    assert_memory_equal(&got->accuracy, &e.accuracy, 8);
    assert_true(got->lr == 0.04 && got->samples_per_s == 56 && got->elapsed_s == 3 && got->train_s == 2 &&
                got->eval_s == 1 && got->step == 390 && got->correct == 9 && got->counted == 10 &&
                !got->no_eval);
    ps_epoch_list_done(&epochs);

    struct ps_run run;
    struct ps_epoch blind = {.epoch = 2, .train_loss = 0.5, .accuracy = 77, .val_loss = 77, .no_eval = true};
    ok(ps_store_report_epoch(f->store, "r", &blind, NULL, &err));
    epoch(f, "r", 0, 3, NAN, 9);
    ok(ps_store_get_run(f->store, "r", &run, &err));
    assert_int_equal(run.best_epoch, 1); /* neither 77 nor NaN */
    assert_true(isnan(run.accuracy) && run.last_epoch == 3);
    ps_run_done(&run);
}

static void test_list_runs(void **state)
{
    struct fixture *f = *state;
    const char *const tag = "keep";
    for (int i = 0; i < 25; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s-%02d", i % 2 ? "Odd_x" : "even", i);
        struct ps_new_run request = {.name = name, .world_size = 1, .tags = &tag, .tag_count = i == 3};
        ok(ps_store_create_run(f->store, &request, NULL, NULL, &err));
    }
    ok(ps_store_finish_run(f->store, "even-04", 0, PS_RUN_FINISHED, "", 1, NULL, &err));
    struct ps_run_query query = {.page_size = 10};
    struct ps_run_list list;
    int seen = 0;
    char token[32] = "";
    for (int page = 0; page < 3; page++) {
        query.page_token = token;
        ok(ps_store_list_runs(f->store, &query, &list, &err));
        for (size_t i = 0; i < list.count; i++, seen++) {
            char name[32];
            snprintf(name, sizeof name, "%s-%02d", (24 - seen) % 2 ? "Odd_x" : "even", 24 - seen);
            assert_string_equal(list.runs[i].name, name); /* newest first, none twice, none left out */
        }
        assert_int_equal(list.count, page < 2 ? 10 : 5);
        snprintf(token, sizeof token, "%s", list.next_page_token);
        assert_int_equal(*token != '\0', page < 2);
        ps_run_list_done(&list);
    }
    query = (struct ps_run_query){.name_contains = "odd_X"};
    ok(ps_store_list_runs(f->store, &query, &list, &err));
    assert_int_equal(list.count, 12);
    ps_run_list_done(&list);
    query.name_contains = "%";
    ok(ps_store_list_runs(f->store, &query, &list, &err));
    assert_int_equal(list.count, 0);
    ps_run_list_done(&list);
    int finished = PS_RUN_FINISHED;
    query = (struct ps_run_query){.states = &finished, .state_count = 1};
    ok(ps_store_list_runs(f->store, &query, &list, &err));
    assert_int_equal(list.count, 1);
    assert_string_equal(list.runs[0].name, "even-04");
    ps_run_list_done(&list);
    query = (struct ps_run_query){.tag = "keep"};
    ok(ps_store_list_runs(f->store, &query, &list, &err));
    assert_int_equal(list.count, 1);
    assert_string_equal(list.runs[0].tags[0], "keep");
    ps_run_list_done(&list);
    query = (struct ps_run_query){.page_token = "1; DROP"};
    fails(PS_INVALID_ARGUMENT, "page_token", ps_store_list_runs(f->store, &query, &list, &err));
    query = (struct ps_run_query){.page_size = 1001};
    fails(PS_INVALID_ARGUMENT, "page_size", ps_store_list_runs(f->store, &query, &list, &err));
}

/* A page stays small enough for a gRPC answer, however long the notes are; none is left out. */
static void test_list_of_long_texts(void **state)
{
    enum { runs = 70, notes_bytes = 65536 };
    struct fixture *f = *state;
    char *notes = malloc(notes_bytes + 1), token[32] = "";
    memset(notes, 'n', notes_bytes);
    notes[notes_bytes] = '\0';
    for (int i = 0; i < runs; i++) {
        char name[32];
        snprintf(name, sizeof name, "run-%02d", i);
        struct ps_new_run request = {.name = name, .world_size = 1, .notes = notes};
        ok(ps_store_create_run(f->store, &request, NULL, NULL, &err));
    }
    int seen = 0, pages = 0;
    do {
        struct ps_run_query query = {.page_size = 1000, .page_token = token};
        struct ps_run_list list;
        ok(ps_store_list_runs(f->store, &query, &list, &err));
        assert_in_range(list.count, 1, (4 << 20) / notes_bytes - 1);
        for (size_t i = 0; i < list.count; i++, seen++) {
            char name[32];
            snprintf(name, sizeof name, "run-%02d", runs - 1 - seen);
            assert_string_equal(list.runs[i].name, name);
        }
        snprintf(token, sizeof token, "%s", list.next_page_token);
        ps_run_list_done(&list);
        pages++;
    } while (*token);
    assert_int_equal(seen, runs);
    assert_true(pages > 1);
    free(notes);
}

static void test_update(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    struct ps_run run;
    const char *const tags[] = {"x", "x", "y"};
    ok(ps_store_update_run(f->store, "r", "it's \"noted\"", true, tags, 3, &run, &err));
    assert_string_equal(run.notes, "it's \"noted\"");
    assert_int_equal(run.tag_count, 3);
    ps_run_done(&run);
    ok(ps_store_update_run(f->store, "r", NULL, true, NULL, 0, &run, &err));
    assert_string_equal(run.notes, "it's \"noted\"");
    assert_int_equal(run.tag_count, 0);
    ps_run_done(&run);
    fails(PS_NOT_FOUND, "zz", ps_store_update_run(f->store, "zz", "", false, NULL, 0, &run, &err));
}

/* ---- Step series ---- */

static void append(struct fixture *f, uint32_t rank, uint32_t attempt, uint64_t seq,
                   const struct ps_point *points, size_t count, bool expect_stored)
{
    bool stored = !expect_stored;
    ok(ps_store_append_steps(f->store, "r", rank, attempt, seq, points, count, &stored, NULL, &err));
    assert_int_equal(stored, expect_stored);
}

static void append_range(struct fixture *f, uint32_t attempt, uint64_t seq, uint64_t from, uint64_t to,
                         double value)
{
    struct ps_point points[2000];
    size_t n = 0;
    for (uint64_t s = from; s < to; s++)
        points[n++] = (struct ps_point){"loss", s, value + (double)s, (double)s / 100};
    append(f, 0, attempt, seq, points, n, true);
}

static struct ps_series_list query(struct fixture *f, const char *name, uint32_t max, bool all)
{
    struct ps_series_list list;
    struct ps_series_query q = {.name = name, .rank = -1, .max_points = max, .all_attempts = all};
    ok(ps_store_query_series(f->store, "r", &q, false, &list, &err));
    return list;
}

static void test_values_bit_exact(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    uint64_t payload = UINT64_C(0x7ff8dead0000beef);
    double values[100] = {
        NAN, INFINITY, -INFINITY, -0.0, 0.0, 2.2250738585072014e-308, 4.9e-324, 1.7976931348623157e308};
    memcpy(&values[8], &payload, 8);
    for (int i = 9; i < 100; i++)
        values[i] = sin(i) * pow(10, i - 50);
    struct ps_point points[100];
    for (int i = 0; i < 100; i++)
        points[i] = (struct ps_point){"v", (uint64_t)i, values[i], i * 0.25};
    for (int half = 0; half < 2; half++) { /* the first packed, the second in the tail */
        char name[2] = {(char)('a' + half), 0};
        size_t n = half ? 50 : 100;
        for (int i = 0; i < 100; i++)
            points[i].name = name;
        append(f, 0, 1, (uint64_t)half + 1, points, n, true);
        reopen(f);
        struct ps_series_list list = query(f, name, 0, false);
        assert_int_equal(list.count, 1);
        assert_int_equal(list.series[0].count, n);
        assert_memory_equal(list.series[0].values, values, n * 8);
        for (size_t i = 0; i < n; i++) {
            assert_int_equal(list.series[0].steps[i], i);
            assert_true(list.series[0].elapsed_s[i] == (double)i * 0.25);
        }
        ps_series_list_done(&list);
    }
}

static void test_exactly_once(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    struct ps_point p = {"loss", 0, 1, 0};
    static const uint64_t order[] = {1, 2, 5, 4, 9, 3, 1, 5, 9, 2, 4, 3, 8};
    bool seen[10] = {false};
    size_t stored = 0;
    for (size_t i = 0; i < sizeof order / sizeof *order; i++) {
        p.step = order[i];
        append(f, 0, 1, order[i], &p, 1, !seen[order[i]]);
        stored += !seen[order[i]];
        seen[order[i]] = true;
        if (i == 5)
            reopen(f); /* what was seen is not only in memory */
    }
    append(f, 1, 1, 1, &p, 1, true); /* another rank counts for itself */
    struct ps_rank_list ranks;
    beat(f, "r", 1, 0);
    ok(ps_store_list_ranks(f->store, "r", 1, &ranks, &err));
    assert_int_equal(ranks.ranks[0].last_seq, 9);
    ps_rank_list_done(&ranks);
    struct ps_series_list list = query(f, "loss", 0, false);
    assert_int_equal(list.count, 2);
    assert_int_equal(list.series[0].count, stored);
    for (size_t i = 1; i < list.series[0].count; i++)
        assert_true(list.series[0].steps[i] > list.series[0].steps[i - 1]);
    assert_int_equal(list.series[1].rank, 1);
    ps_series_list_done(&list);
    fails(PS_INVALID_ARGUMENT, "seq", ps_store_append_steps(f->store, "r", 0, 1, 0, &p, 1, NULL, NULL, &err));
    p.step = UINT64_MAX;
    fails(PS_INVALID_ARGUMENT, "points[0].step",
          ps_store_append_steps(f->store, "r", 0, 1, 99, &p, 1, NULL, NULL, &err));
    fails(PS_NOT_FOUND, "attempt 3",
          ps_store_append_steps(f->store, "r", 0, 3, 99, NULL, 0, NULL, NULL, &err));
    fails(PS_NOT_FOUND, "zz", ps_store_append_steps(f->store, "zz", 0, 0, 99, NULL, 0, NULL, NULL, &err));
}

static void test_order_and_attempts(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    /* Attempt 1: steps 0..299, of which 100..199 come last; blocks overlap. */
    append_range(f, 1, 1, 0, 100, 0);
    append_range(f, 1, 3, 200, 300, 0);
    append_range(f, 1, 2, 100, 200, 0);
    beat(f, "r", 1, 50);
    create_only(f, "r", true);
    append_range(f, 2, 1, 250, 400, 1000); /* resumed at 250 */
    struct ps_series_list list = query(f, "loss", 0, false);
    assert_int_equal(list.count, 1);
    assert_int_equal(list.name_count, 1);
    struct ps_series *s = &list.series[0];
    assert_int_equal(s->count, 400);
    assert_int_equal(s->total_points, 400);
    for (size_t i = 0; i < 400; i++) {
        assert_int_equal(s->steps[i], i);
        assert_int_equal(s->attempts[i], i < 250 ? 1 : 2);
        assert_true(s->values[i] == (double)i + (i < 250 ? 0 : 1000));
        assert_true(fabs(s->elapsed_s[i] - ((double)i / 100 + (i < 250 ? 0 : 50))) < 1e-6);
    }
    ps_series_list_done(&list);
    list = query(f, "loss", 0, true);
    s = &list.series[0];
    assert_int_equal(s->count, 450);
    assert_true(s->attempts[299] == 1 && s->steps[299] == 299 && s->attempts[300] == 2 &&
                s->steps[300] == 250);
    ps_series_list_done(&list);

    struct ps_series_query q = {.name = "loss", .rank = 0, .from_step = 240, .to_step = 259};
    ok(ps_store_query_series(f->store, "r", &q, false, &list, &err));
    assert_int_equal(list.series[0].count, 20);
    assert_true(list.series[0].steps[0] == 240 && list.series[0].steps[19] == 259);
    ps_series_list_done(&list);
    q.rank = 7;
    ok(ps_store_query_series(f->store, "r", &q, false, &list, &err));
    assert_int_equal(list.count, 0);
    ps_series_list_done(&list);
    ok(ps_store_query_series(f->store, "r", &q, true, &list, &err));
    assert_true(list.count == 0 && list.name_count == 1);
    assert_string_equal(list.names[0], "loss");
    ps_series_list_done(&list);

    /* The same step twice in one attempt: the later batch stays. */
    struct ps_point p = {"loss", 399, -5, 0};
    append(f, 0, 2, 9, &p, 1, true);
    list = query(f, "loss", 0, false);
    assert_int_equal(list.series[0].count, 400);
    assert_true(list.series[0].values[399] == -5);
    ps_series_list_done(&list);
}

static void test_down_sampling(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    for (uint64_t seq = 1; seq <= 5; seq++) {
        struct ps_point points[2000];
        for (size_t i = 0; i < 2000; i++) {
            uint64_t step = (seq - 1) * 2000 + i;
            points[i] = (struct ps_point){"loss", step, sin((double)step / 50), 0};
            if (step == 4321)
                points[i].value = 99;
            if (step == 8765)
                points[i].value = -99;
            if (step == 777)
                points[i].value = NAN;
        }
        append(f, 0, 1, seq, points, 2000, true);
    }
    static const uint32_t sizes[] = {1, 2, 3, 4, 5, 6, 7, 100, 1000, 9999, 10000};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        struct ps_series_list list = query(f, "loss", sizes[k], false),
                              again = query(f, "loss", sizes[k], false);
        struct ps_series *s = &list.series[0];
        assert_true(s->count <= sizes[k] && s->count > 0);
        assert_int_equal(s->total_points, 10000);
        bool high = false, low = false, special = false;
        for (size_t i = 0; i < s->count; i++) {
            high = high || s->values[i] == 99;
            low = low || s->values[i] == -99;
            special = special || isnan(s->values[i]);
            assert_true(i == 0 || s->steps[i] > s->steps[i - 1]);
        }
        assert_int_equal(s->steps[s->count - 1], 9999);
        if (sizes[k] >= 2)
            assert_int_equal(s->steps[0], 0);
        assert_true(sizes[k] < 4 || (high && low));
        assert_true(sizes[k] < 5 || special);
        assert_int_equal(again.series[0].count, s->count);
        assert_memory_equal(again.series[0].values, s->values, s->count * 8);
        ps_series_list_done(&list);
        ps_series_list_done(&again);
    }
    struct ps_series_list list;
    struct ps_series_query q = {.rank = -1, .max_points = 10001};
    fails(PS_INVALID_ARGUMENT, "max_points", ps_store_query_series(f->store, "r", &q, false, &list, &err));
}

/* From afar, blocks are stood for by summaries: no point may show that a newer one has replaced. */
static void test_down_sampling_over_attempts(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    for (uint64_t seq = 1; seq <= 6; seq++)
        append_range(f, 1, seq, (seq - 1) * 1000, seq * 1000, 0);
    struct ps_point twice[200];
    for (size_t i = 0; i < 200; i++)
        twice[i] =
            (struct ps_point){"loss", 2000 + i / 2, i % 2 ? 2000 : 1e9, 20}; /* the second of each stays */
    append(f, 0, 1, 7, twice, 200, true);
    create_only(f, "r", true);
    for (uint64_t seq = 1; seq <= 5; seq++)
        append_range(f, 2, seq, 5000 + (seq - 1) * 1000, 5000 + seq * 1000, 1e6);
    for (uint32_t max = 4; max <= 10000; max *= 3) {
        struct ps_series_list list = query(f, "loss", max, false);
        struct ps_series *s = &list.series[0];
        assert_int_equal(s->total_points, 10000);
        assert_true(s->count <= max && s->count >= 4);
        assert_true(s->steps[0] == 0 && s->steps[s->count - 1] == 9999);
        bool high = false, low = false;
        for (size_t i = 0; i < s->count; i++) {
            uint64_t step = s->steps[i];
            assert_true(i == 0 || step > s->steps[i - 1]);
            assert_int_equal(s->attempts[i], step < 5000 ? 1 : 2);
            assert_true(s->values[i] == (step < 5000 ? step >= 2000 && step < 2100 ? 2000 : (double)step
                                                     : 1e6 + (double)step));
            high = high || s->values[i] == 1e6 + 9999;
            low = low || s->values[i] == 0;
        }
        assert_true(high && low);
        ps_series_list_done(&list);
    }
    struct ps_series_list list;
    struct ps_series_query q = {
        .name = "loss", .rank = 0, .from_step = 1003, .to_step = 4567, .max_points = 20};
    ok(ps_store_query_series(f->store, "r", &q, false, &list, &err));
    struct ps_series *s = &list.series[0];
    assert_true(s->total_points == 3565 && s->steps[0] == 1003 && s->steps[s->count - 1] == 4567);
    ps_series_list_done(&list);
}

static void test_many_names(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    static char names[1500][16];
    static struct ps_point points[1500];
    for (int i = 0; i < 1500; i++) {
        snprintf(names[i], sizeof names[i], "grad/%04d", i);
        points[i] = (struct ps_point){names[i], 1, i, 0};
    }
    append(f, 0, 1, 1, points, 1500, true);
    struct ps_series_list list;
    struct ps_series_query q = {.rank = -1};
    fails(PS_RESOURCE_EXHAUSTED, "1024", ps_store_query_series(f->store, "r", &q, false, &list, &err));
    ok(ps_store_query_series(f->store, "r", &q, true, &list, &err));
    assert_int_equal(list.name_count, 1500);
    assert_string_equal(list.names[1499], "grad/1499");
    ps_series_list_done(&list);
}

/* ---- Checkpoints ---- */

static void sha(char out[PS_SHA256_HEX], char digit)
{
    memset(out, digit, 64);
    out[64] = '\0';
}

static int put(struct fixture *f, const char *run, uint32_t attempt, uint32_t number, const char *format,
               char digit, double accuracy, struct ps_error *err)
{
    char hex[PS_SHA256_HEX], filename[64];
    sha(hex, digit);
    snprintf(filename, sizeof filename, "epoch_%u.%s", number, format);
    struct ps_new_checkpoint c = {.attempt = attempt,
                                  .epoch = number,
                                  .filename = filename,
                                  .format = format,
                                  .size = 1000,
                                  .sha256 = hex,
                                  .has_accuracy = accuracy >= 0,
                                  .accuracy = accuracy};
    return ps_store_add_checkpoint(f->store, run, &c, NULL, err);
}

static char pick(struct fixture *f, enum ps_checkpoint_which which, uint32_t number, const char *format)
{
    struct ps_checkpoint c;
    struct ps_checkpoint_selector selector = {.which = which, .epoch = number, .format = format};
    ok(ps_store_get_checkpoint(f->store, "r", &selector, &c, &err));
    char digit = c.sha256[0];
    ps_checkpoint_done(&c);
    return digit;
}

static void test_checkpoints(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    struct ps_checkpoint c;
    struct ps_checkpoint_selector selector = {0};
    fails(PS_NOT_FOUND, "no safetensors checkpoint yet",
          ps_store_get_checkpoint(f->store, "r", &selector, &c, &err));
    ok(put(f, "r", 0, 1, "pth", '1', -1, &err));
    assert_int_equal(pick(f, PS_CHECKPOINT_LATEST, 0, ""), '1'); /* no safetensors: pth */
    ok(put(f, "r", 0, 1, "safetensors", '2', 0.5, &err));
    ok(put(f, "r", 0, 2, "safetensors", '3', 0.9, &err));
    ok(put(f, "r", 0, 3, "safetensors", '4', 0.8, &err));
    ok(put(f, "r", 0, 3, "state", '5', -1, &err));
    size_t events = f->event_count;
    ok(put(f, "r", 1, 3, "safetensors", '4', 0.8, &err)); /* again */
    assert_int_equal(f->event_count, events);
    assert_int_equal(pick(f, PS_CHECKPOINT_LATEST, 0, NULL), '4');
    assert_int_equal(pick(f, PS_CHECKPOINT_BEST, 0, NULL), '3');
    assert_int_equal(pick(f, PS_CHECKPOINT_EPOCH, 1, NULL), '2');
    assert_int_equal(pick(f, PS_CHECKPOINT_EPOCH, 3, "state"), '5');
    create_only(f, "r", true);
    ok(put(f, "r", 2, 2, "safetensors", '6', 0.8,
           &err)); /* epoch 2 again: 0.9 is superseded, ties go to epoch 2 */
    assert_int_equal(pick(f, PS_CHECKPOINT_LATEST, 0, NULL), '6');
    assert_int_equal(pick(f, PS_CHECKPOINT_BEST, 0, NULL), '6');
    assert_int_equal(pick(f, PS_CHECKPOINT_EPOCH, 2, NULL), '6');
    /* Without an accuracy of its own, the epoch's report tells. */
    epoch(f, "r", 2, 4, 0.95, 1);
    ok(put(f, "r", 2, 4, "safetensors", '7', -1, &err));
    assert_int_equal(pick(f, PS_CHECKPOINT_BEST, 0, NULL), '7');
    ok(put(f, "r", 2, 5, "safetensors", '8', NAN, &err));
    assert_int_equal(pick(f, PS_CHECKPOINT_BEST, 0, NULL), '7');

    struct ps_checkpoint_list list;
    ok(ps_store_list_checkpoints(f->store, "r", &list, &err));
    assert_int_equal(list.count, 8);
    assert_string_equal(list.checkpoints[0].filename, "epoch_1.pth");
    assert_string_equal(list.checkpoints[0].run_name, "r");
    assert_int_equal(list.checkpoints[7].sha256[0], '8');
    ps_checkpoint_list_done(&list);
    selector = (struct ps_checkpoint_selector){.which = PS_CHECKPOINT_EPOCH, .epoch = 77};
    fails(PS_NOT_FOUND, "epoch 77", ps_store_get_checkpoint(f->store, "r", &selector, &c, &err));
    fails(PS_NOT_FOUND, "zz", ps_store_get_checkpoint(f->store, "zz", &selector, &c, &err));
    fails(PS_NOT_FOUND, "zz", put(f, "zz", 0, 1, "pth", '9', -1, &err));
    char hex[PS_SHA256_HEX];
    sha(hex, 'z');
    struct ps_new_checkpoint bad = {.epoch = 1, .filename = "f", .format = "pth", .sha256 = hex};
    fails(PS_INVALID_ARGUMENT, "sha256", ps_store_add_checkpoint(f->store, "r", &bad, NULL, &err));
}

static void test_delete(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    create_only(f, "other", false);
    ok(put(f, "r", 0, 1, "safetensors", '1', 0.5, &err));
    ok(put(f, "r", 0, 2, "safetensors", '2', 0.5, &err));
    ok(put(f, "other", 0, 1, "safetensors", '2', 0.5, &err));
    append_range(f, 1, 1, 0, 200, 0);
    epoch(f, "r", 1, 1, 0.5, 1);
    struct ps_blob_list orphans;
    fails(PS_FAILED_PRECONDITION, "alive", ps_store_delete_run(f->store, "r", &orphans, &err));
    ok(ps_store_finish_run(f->store, "r", 0, PS_RUN_FINISHED, "", 1, NULL, &err));
    ok(ps_store_delete_run(f->store, "r", &orphans, &err));
    assert_int_equal(orphans.count, 1); /* content 2 is the other run's too */
    assert_int_equal(orphans.blobs[0].sha256[0], '1');
    assert_int_equal(orphans.blobs[0].size, 1000);
    ps_blob_list_done(&orphans);
    fails(PS_NOT_FOUND, "r", ps_store_delete_run(f->store, "r", &orphans, &err));
    struct ps_store_stats stats;
    ok(ps_store_get_stats(f->store, &stats, &err));
    assert_true(stats.series == 0 && stats.epochs == 0 && stats.checkpoints == 1 && stats.blobs == 1);
    char hex[PS_SHA256_HEX];
    sha(hex, '2');
    struct ps_blob blob;
    char *filename;
    ok(ps_store_get_blob(f->store, hex, &blob, &filename, &err));
    assert_string_equal(filename, "epoch_1.safetensors");
    free(filename);
    ok(ps_store_delete_checkpoint(f->store, "other", hex, true, &orphans, &err));
    assert_int_equal(orphans.count, 1);
    ps_blob_list_done(&orphans);
    fails(PS_NOT_FOUND, "sha256", ps_store_delete_checkpoint(f->store, "other", hex, true, &orphans, &err));
    fails(PS_NOT_FOUND, "sha256", ps_store_get_blob(f->store, hex, &blob, NULL, &err));
    /* The name is free again. */
    struct ps_run run = create(f, "r", false);
    assert_string_equal(run.name, "r");
    ps_run_done(&run);
}

static void test_deleting_gives_space_back(void **state)
{
    struct fixture *f = *state;
    create_only(f, "big", false);
    static struct ps_point points[20000];
    for (size_t i = 0; i < 20000; i++)
        points[i] = (struct ps_point){"loss", i, sin((double)i * 1e9), sin((double)i) + 1};
    for (uint64_t seq = 1; seq <= 3; seq++)
        ok(ps_store_append_steps(f->store, "big", 0, 1, seq, points, 20000, NULL, NULL, &err));
    ok(ps_store_finish_run(f->store, "big", 0, PS_RUN_KILLED, "", 0, NULL, &err));
    reopen(f); /* so that the file holds it all */
    struct ps_store_stats stats;
    ok(ps_store_get_stats(f->store, &stats, &err));
    uint64_t before = stats.file_bytes;
    assert_true(before > 500000);
    struct ps_blob_list orphans;
    ok(ps_store_delete_run(f->store, "big", &orphans, &err));
    ps_blob_list_done(&orphans);
    for (int i = 0; i < 3000 && stats.file_bytes > before / 2;
         i++) { /* the limit only ends a test that fails */
        usleep(10000);
        ok(ps_store_get_stats(f->store, &stats, &err));
    }
    assert_true(stats.file_bytes <= before / 2);
}

/* ---- Durability, threads, opening ---- */

struct load {
    struct fixture *f;
    int number;
};

static void *one_writer(void *argument)
{
    struct load *load = argument;
    for (uint64_t seq = 1; seq <= 40; seq++) {
        struct ps_point points[20];
        for (size_t i = 0; i < 20; i++)
            points[i] = (struct ps_point){"loss", seq * 20 + i, (double)i, 0};
        append(load->f, (uint32_t)load->number, 1, seq, points, 20, true);
        if (seq % 8 == 0) { /* one that fails must not take its group along */
            struct ps_run run;
            fails(PS_NOT_FOUND, "zz",
                  ps_store_finish_run(load->f->store, "zz", 0, PS_RUN_FAILED, "", 0, &run, &err));
            struct ps_series_list list = query(load->f, "loss", 5, false);
            ps_series_list_done(&list);
        }
    }
    return NULL;
}

static void test_group_commit(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    pthread_t threads[16];
    struct load loads[16];
    for (int i = 0; i < 16; i++) {
        loads[i] = (struct load){f, i};
        assert_int_equal(pthread_create(&threads[i], NULL, one_writer, &loads[i]), 0);
    }
    for (int i = 0; i < 16; i++)
        pthread_join(threads[i], NULL);
    struct ps_store_stats stats;
    ok(ps_store_get_stats(f->store, &stats, &err));
    assert_int_equal(stats.operations, 1 + 16 * 45);
    assert_int_equal(stats.failed_operations, 16 * 5);
    assert_int_equal(stats.points_stored, 16 * 800);
    assert_true(stats.commits < stats.operations);
    assert_false(stats.disk_full);
    reopen(f);
    struct ps_series_list list = query(f, "loss", 0, false);
    assert_int_equal(list.count, 16);
    for (size_t i = 0; i < 16; i++)
        assert_int_equal(list.series[i].count, 800);
    ps_series_list_done(&list);
}

static void test_disk_full(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    f->config.max_pages = 120;
    reopen(f);
    struct ps_point points[500];
    for (size_t i = 0; i < 500; i++)
        points[i] = (struct ps_point){"loss", i, sin((double)i * 1e9), sin((double)i)};
    struct ps_error failure = {0};
    uint64_t seq = 1;
    int code;
    while ((code = ps_store_append_steps(f->store, "r", 0, 1, seq, points, 500, NULL, NULL, &failure)) == 0 &&
           seq < 1000)
        seq++;
    assert_int_equal(code, PS_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(failure.message, "full"));
    assert_true(seq > 3);
    struct ps_store_stats stats;
    ok(ps_store_get_stats(f->store, &stats, &err)); /* reading goes on */
    assert_true(stats.disk_full && *stats.last_error);
    assert_int_not_equal(ps_store_check(f->store, &failure), 0);
    struct ps_series_list list = query(f, "loss", 1, true);
    assert_int_equal(list.series[0].total_points,
                     (seq - 1) * 500); /* all that was acknowledged, and no more */
    ps_series_list_done(&list);
    /* Space returns: the same batch goes through, once. */
    f->config.max_pages = 100000;
    reopen(f);
    append(f, 0, 1, seq, points, 500, true);
    append(f, 0, 1, seq, points, 500, false);
    ok(ps_store_check(f->store, &err));
    list = query(f, "loss", 1, true);
    assert_int_equal(list.series[0].total_points, seq * 500);
    ps_series_list_done(&list);
}

/* Recovery without a restart: deleting makes room within the bound. */
static void test_disk_full_recovers(void **state)
{
    struct fixture *f = *state;
    create_only(f, "big", false);
    create_only(f, "r", false);
    f->config.max_pages = 120;
    reopen(f);
    struct ps_point points[500];
    for (size_t i = 0; i < 500; i++)
        points[i] = (struct ps_point){"loss", i, sin((double)i * 1e9), sin((double)i)};
    struct ps_error failure = {0};
    uint64_t seq = 1;
    while (ps_store_append_steps(f->store, "big", 0, 1, seq, points, 500, NULL, NULL, &failure) == 0)
        assert_true(++seq < 1000);
    int code = ps_store_finish_run(f->store, "big", 0, PS_RUN_KILLED, "", 0, NULL, &failure);
    assert_true(code == 0 || code == PS_RESOURCE_EXHAUSTED);
    struct ps_blob_list orphans;
    if (code) { /* not even room for its event: then nothing can be deleted within this bound */
        f->config.max_pages = 130;
        reopen(f);
        ok(ps_store_finish_run(f->store, "big", 0, PS_RUN_KILLED, "", 0, NULL, &err));
    }
    ok(ps_store_delete_run(f->store, "big", &orphans, &err));
    ps_blob_list_done(&orphans);
    append(f, 0, 1, 1, points, 500, true);
    ok(ps_store_check(f->store, &err));
    struct ps_store_stats stats;
    ok(ps_store_get_stats(f->store, &stats, &err));
    assert_false(stats.disk_full);
}

static void test_second_opening(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    struct ps_store *second;
    fails(PS_FAILED_PRECONDITION, "in use by another sidecar (process",
          ps_store_open(&f->config, &second, &err));
    struct ps_store_config config = {.dir = f->dir, .read_only = true};
    ok(ps_store_open(&config, &second, &err));
    struct ps_run run;
    ok(ps_store_get_run(second, "r", &run, &err));
    ps_run_done(&run);
    fails(PS_FAILED_PRECONDITION, "reading",
          ps_store_update_run(second, "r", "x", false, NULL, 0, NULL, &err));
    ps_store_free(second);
    config.dir = "/tmp/ps_test_store_nothing_here";
    fails(PS_NOT_FOUND, "/tmp/ps_test_store_nothing_here", ps_store_open(&config, &second, &err));
}

static void test_foreign_files(void **state)
{
    struct fixture *f = *state;
    f->store = ps_store_free(f->store);
    char *path = ps_path_join(f->dir, PS_STORE_FILE);
    sqlite3 *db;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    ok(ps_sql_exec(db, "PRAGMA user_version = 999", &err));
    sqlite3_close(db);
    fails(PS_FAILED_PRECONDITION, "schema 999", ps_store_open(&f->config, &f->store, &err));
    struct ps_store_config config = {.dir = f->dir, .read_only = true};
    fails(PS_FAILED_PRECONDITION, "newer paramsync", ps_store_open(&config, &f->store, &err));

    unlink(path);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    ok(ps_sql_exec(db, "CREATE TABLE mine (x); PRAGMA application_id = 5", &err));
    sqlite3_close(db);
    fails(PS_FAILED_PRECONDITION, "another program's", ps_store_open(&f->config, &f->store, &err));

    unlink(path);
    char junk[8192];
    memset(junk, 'j', sizeof junk);
    ok(ps_write_file_atomic(path, junk, sizeof junk, &err));
    fails(PS_DATA_LOSS, "damaged", ps_store_open(&f->config, &f->store, &err));
    unlink(path);
    free(path);
    reopen(f);
}

static void test_file_systems(void **state)
{
    (void)state;
    ok(ps_store_check_file_system(0xef53, "/d", &err));
    ok(ps_store_check_file_system(0x01021994, "/d", &err)); /* tmpfs */
    fails(PS_FAILED_PRECONDITION, "NFS", ps_store_check_file_system(0x6969, "/d", &err));
    fails(PS_FAILED_PRECONDITION, "--data-dir",
          ps_store_check_file_system((long)(int)0xff534d42, "/d", &err));
    fails(PS_FAILED_PRECONDITION, "Lustre", ps_store_check_file_system(0x0bd00bd0, "/d", &err));
}

static void test_options_of_connections(void **state)
{
    struct fixture *f = *state;
    create_only(f, "r", false);
    struct ps_conn *conn;
    static const struct {
        const char *sql;
        int64_t wanted;
    } checks[] = {
        {"PRAGMA synchronous", 2},
        {"PRAGMA foreign_keys", 1},
        {"PRAGMA trusted_schema", 0},
        {"PRAGMA busy_timeout", 5000},
        {"PRAGMA application_id", PS_STORE_APPLICATION_ID},
        {"PRAGMA query_only", 1},
        {"PRAGMA auto_vacuum", 2},
        {"SELECT count(*) FROM pragma_journal_mode WHERE journal_mode = 'wal'", 1},
    };
    ok(ps_read_begin(f->store, &conn, &err));
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        int64_t value = -1;
        ok(ps_sql_int(conn, -2, &value, &err, checks[i].sql, ""));
        if (value != checks[i].wanted)
            fail_msg("%s is %lld", checks[i].sql, (long long)value);
    }
    fails(PS_PERMISSION_DENIED, "write", ps_sql_run(conn, &err, "DELETE FROM runs", ""));
    ps_read_end(f->store, conn);
}

/* ---- Migrations, with a table of our own ---- */

#define STEP(text)                                                                                           \
    {                                                                                                        \
#text, (const unsigned char *)(text), sizeof(text) - 1                                               \
    }

static int64_t version_of(const char *path, const char *sql)
{
    struct ps_conn conn;
    int64_t value = -1;
    ok(ps_conn_open(&conn, path, SQLITE_OPEN_READWRITE, &err));
    ok(ps_sql_int(&conn, -1, &value, &err, sql, ""));
    ps_conn_close(&conn);
    return value;
}

/* ---- The log ---- */

struct overlapping_readers {
    struct ps_store *store;
    atomic_bool stop;
};

/* Each read outlasts the beginning of the next reader's. */
static void *read_for_ever(void *argument)
{
    struct overlapping_readers *r = argument;
    const struct timespec hold = {.tv_nsec = 2000000};
    while (!r->stop) {
        struct ps_conn *conn;
        int64_t runs;
        struct ps_error err = {0};
        if (ps_read_begin(r->store, &conn, &err))
            abort();
        if (ps_sql_int(conn, 0, &runs, &err, "SELECT count(*) FROM runs", "") || runs != 1)
            abort();
        nanosleep(&hold, NULL); /* what makes them overlap */
        ps_read_end(r->store, conn);
    }
    return NULL;
}

static void append_rounds(struct fixture *f, uint64_t first, uint64_t rounds, uint64_t *largest)
{
    struct ps_point points[100];
    for (uint64_t seq = first; seq < first + rounds; seq++) {
        bool stored;
        for (size_t i = 0; i < 100; i++)
            points[i] = (struct ps_point){
                .name = i % 2 ? "a" : "b", .step = seq * 100 + i, .value = (double)(seq * i)};
        ok(ps_store_append_steps(f->store, "r", 0, 1, seq, points, 100, &stored, NULL, &err));
        struct ps_store_stats stats;
        if (seq % 50 == 0) {
            ok(ps_store_get_stats(f->store, &stats, &err));
            *largest = stats.wal_bytes > *largest ? stats.wal_bytes : *largest;
        }
    }
}

static void test_log_is_bounded(void **state)
{
    struct fixture *f = *state;
    f->config.readers = 4;
    f->config.log_bytes = 1 << 20;
    reopen(f);
    create_only(f, "r", false);
    struct overlapping_readers readers = {.store = f->store};
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, read_for_ever, &readers), 0);
    uint64_t largest = 0;
    append_rounds(f, 1, 1500, &largest);
    readers.stop = true;
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    assert_in_range(largest, 1, 4 << 20);

    /* Another program's read: told, and over once that ends. */
    sqlite3 *other;
    struct ps_store_stats stats;
    assert_int_equal(sqlite3_open(f->store->path, &other), SQLITE_OK);
    assert_int_equal(sqlite3_exec(other, "BEGIN; SELECT count(*) FROM runs", NULL, NULL, NULL), SQLITE_OK);
    append_rounds(f, 1501, 400, &largest);
    ok(ps_store_get_stats(f->store, &stats, &err));
    assert_true(stats.log_held);
    sqlite3_close(other);
    const struct timespec second = {.tv_sec = 1, .tv_nsec = 100000000}; /* it is not tried at every commit */
    nanosleep(&second, NULL);
    append_rounds(f, 1901, 1, &largest);
    append_rounds(f, 1902, 1, &largest);
    ok(ps_store_get_stats(f->store, &stats, &err));
    assert_false(stats.log_held);
    assert_in_range(stats.wal_bytes, 0, 1 << 20);
}

static void test_migrations(void **state)
{
    struct fixture *f = *state;
    char path[128], copy[160];
    snprintf(path, sizeof path, "%s/other.db", f->dir);
    snprintf(copy, sizeof copy, "%s.before-2", path);
    const struct ps_migration steps[] = {
        STEP("CREATE TABLE a (x INTEGER PRIMARY KEY); INSERT INTO a VALUES (7);"
             "CREATE TABLE b (x REFERENCES a (x)); INSERT INTO b VALUES (7)"),
        STEP("ALTER TABLE a ADD COLUMN y DEFAULT 3"), STEP("DELETE FROM a"),
        STEP("CREATE TABLE c (x); SELECT nonsense FROM a")};
    struct ps_conn conn;
    ok(ps_conn_open(&conn, path, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, &err));
    ok(ps_schema_migrate(&conn, path, steps, 1, &err));
    assert_int_equal(access(copy, F_OK), -1); /* a new file needs no copy */
    ok(ps_schema_migrate(&conn, path, steps, 2, &err));
    ok(ps_schema_migrate(&conn, path, steps, 2, &err));
    fails(PS_INTERNAL, "refer to nothing", ps_schema_migrate(&conn, path, steps, 3, &err));
    fails(PS_INTERNAL, "nonsense", ps_schema_migrate(&conn, path, steps, 4, &err));
    fails(PS_FAILED_PRECONDITION, "schema 2", ps_schema_migrate(&conn, path, steps, 1, &err));
    ps_conn_close(&conn);
    assert_int_equal(version_of(path, "PRAGMA user_version"), 2);
    assert_int_equal(version_of(path, "SELECT y FROM a"), 3); /* step 3 was undone as well */
    assert_int_equal(version_of(path, "SELECT count(*) FROM sqlite_schema WHERE name = 'c'"), 0);
    assert_int_equal(version_of(copy, "PRAGMA user_version"), 1);
    assert_int_equal(version_of(copy, "SELECT x FROM a"), 7);
}

static void assert_window(struct fixture *f, struct ps_run_window window, uint64_t total, const char *names)
{
    struct ps_run_list list;
    uint64_t count = 0;
    char got[512] = "";
    ok(ps_store_window_runs(f->store, &window, &list, &count, &err));
    for (size_t i = 0; i < list.count; i++)
        snprintf(got + strlen(got), sizeof got - strlen(got), "%s%s", i ? " " : "", list.runs[i].name);
    ps_run_list_done(&list);
    assert_string_equal(got, names);
    assert_int_equal(count, total);
}

static void test_window_of_runs(void **state)
{
    struct fixture *f = *state;
    const char *const names[] = {"a", "b", "c", "d", "e"};
    for (int i = 0; i < 5; i++)
        create_only(f, names[i], false);
    epoch(f, "a", 1, 1, 0.5, 10);
    epoch(f, "b", 1, 1, NAN, 20);
    epoch(f, "c", 1, 1, 0.9, 5);
    epoch(f, "d", 1, 1, 0.7, 30);
    epoch(f, "d", 1, 2, 0.85, 60);
    const char *const tag = "Keep_me";
    ok(ps_store_update_run(f->store, "b", "ran on the OLD data", true, &tag, 1, NULL, &err));
    assert_window(f, (struct ps_run_window){.descending = true}, 5, "e d c b a");
    assert_window(f, (struct ps_run_window){.limit = 2, .offset = 1}, 5, "b c");
    /* What is missing or NaN comes last both ways, equals newest first. */
    assert_window(f, (struct ps_run_window){.order = PS_ORDER_ACCURACY}, 5, "a d c e b");
    assert_window(f, (struct ps_run_window){.order = PS_ORDER_ACCURACY, .descending = true}, 5, "c d a e b");
    assert_window(f, (struct ps_run_window){.order = PS_ORDER_NAME, .descending = true}, 5, "e d c b a");
    assert_window(f, (struct ps_run_window){.order = PS_ORDER_WORLD}, 5, "e d c b a");
    assert_window(f, (struct ps_run_window){.order = PS_ORDER_ELAPSED, .descending = true}, 5, "d b a c e");
    assert_window(f, (struct ps_run_window){.order = PS_ORDER_TIME_TO_TARGET, .target = 0.8}, 5, "c d e b a");
    assert_window(f, (struct ps_run_window){.order = PS_ORDER_TAGS}, 5, "b e d c a");
    assert_window(f, (struct ps_run_window){.text = "old DATA"}, 1, "b");
    assert_window(f, (struct ps_run_window){.text = "keep_"}, 1, "b");
    assert_window(f, (struct ps_run_window){.text = "%"}, 0, "");
    assert_window(f, (struct ps_run_window){.text = "resnet", .order = PS_ORDER_LOSS, .limit = 1}, 5, "d");
    for (int order = PS_ORDER_CREATED; order <= PS_ORDER_TAGS; order++) {
        struct ps_run_list list;
        uint64_t total;
        ok(ps_store_window_runs(f->store,
                                &(struct ps_run_window){.order = (enum ps_run_order)order, .target = 0.8},
                                &list, &total, &err));
        assert_int_equal(list.count, 5);
        ps_run_list_done(&list);
    }
}

static void test_pinned_baseline(void **state)
{
    struct fixture *f = *state;
    char id[PS_RUN_ID_SIZE];
    struct ps_run first = create(f, "first", false);
    create_only(f, "second", false);
    ok(ps_store_get_baseline(f->store, id, &err));
    assert_string_equal(id, "");
    fails(PS_NOT_FOUND, "third", ps_store_pin_baseline(f->store, "third", true, &err));
    ok(ps_store_pin_baseline(f->store, "second", true, &err));
    ok(ps_store_pin_baseline(f->store, "first", true, &err)); /* takes its place */
    reopen(f);
    ok(ps_store_get_baseline(f->store, id, &err));
    assert_string_equal(id, first.id);
    ok(ps_store_pin_baseline(f->store, "second", false, &err)); /* it is not the one */
    ok(ps_store_get_baseline(f->store, id, &err));
    assert_string_equal(id, first.id);
    ok(ps_store_finish_run(f->store, "first", 0, PS_RUN_FINISHED, "", 1, NULL, &err));
    struct ps_blob_list orphans;
    ok(ps_store_delete_run(f->store, "first", &orphans, &err));
    ps_blob_list_done(&orphans);
    ok(ps_store_get_baseline(f->store, id, &err));
    assert_string_equal(id, "");
    ps_run_done(&first);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_create_names_and_requests),
        TEST(test_odd_names),
        TEST(test_states),
        TEST(test_attempts),
        TEST(test_gap_between_attempts),
        TEST(test_epochs),
        TEST(test_list_runs),
        TEST(test_list_of_long_texts),
        TEST(test_window_of_runs),
        TEST(test_pinned_baseline),
        TEST(test_update),
        TEST(test_values_bit_exact),
        TEST(test_exactly_once),
        TEST(test_order_and_attempts),
        TEST(test_down_sampling),
        TEST(test_down_sampling_over_attempts),
        TEST(test_many_names),
        TEST(test_checkpoints),
        TEST(test_delete),
        TEST(test_deleting_gives_space_back),
        TEST(test_group_commit),
        TEST(test_disk_full),
        TEST(test_disk_full_recovers),
        TEST(test_second_opening),
        TEST(test_foreign_files),
        TEST(test_file_systems),
        TEST(test_options_of_connections),
        TEST(test_log_is_bounded),
        TEST(test_migrations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
