/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/base/launch.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* "NAME=value NAME=value": an environment in one line. */
static const char *line_env(void *context, const char *name)
{
    static char values[8][256]; /* several are looked at side by side */
    static int next;
    size_t length = strlen(name);
    for (const char *at = context; at && *at;) {
        size_t word = strcspn(at, " ");
        if (word > length && strncmp(at, name, length) == 0 && at[length] == '=') {
            char *value = values[next++ % 8];
            snprintf(value, sizeof values[0], "%.*s", (int)(word - length - 1), at + length + 1);
            return value;
        }
        at += word;
        at += *at == ' ';
    }
    return NULL;
}

struct good {
    const char *env, *method, *rank, *world;
    const char *source;
    int want_rank, want_world, local_rank, local_size;
    const char *host;
    int port;
};

static const struct good goods[] = {
    {"", NULL, NULL, NULL, "single process", 0, 1, 0, 1, "", 0},
    {"MASTER_ADDR=h MASTER_PORT=1", NULL, NULL, NULL, "single process", 0, 1, 0, 1, "", 0},
    {"RANK=", "None", NULL, NULL, "single process", 0, 1, 0, 1, "", 0},
    /* flags win over everything */
    {"", "tcp://10.0.0.1:6060", "1", "2", "flags", 1, 2, -1, -1, "10.0.0.1", 6060},
    {"RANK=5 WORLD_SIZE=8 MASTER_ADDR=x MASTER_PORT=9", "tcp://[fe80::1]:7", "3", "4", "flags", 3, 4, -1, -1,
     "fe80::1", 7},
    {"MASTER_ADDR=n1 MASTER_PORT=29500 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", "env://", "1", "2", "flags", 1, 2, 1,
     2, "n1", 29500},
    {"MASTER_ADDR=n1 MASTER_PORT=29500", NULL, "1", "2", "flags", 1, 2, -1, -1, "n1", 29500},
    {"RANK=1 WORLD_SIZE=2", NULL, "0", "1", "flags", 0, 1, 0, 1, "", 0},
    {"", "none", "0", "1", "flags", 0, 1, 0, 1, "", 0},
    /* torchrun */
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", NULL,
     NULL, NULL, "torchrun", 1, 2, 1, 2, "127.0.0.1", 29500},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True", "env://", NULL,
     NULL, "torchrun", 1, 2, -1, -1, "h", 29501},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True", NULL, NULL,
     NULL, "torchrun", 1, 2, -1, -1, "h", 65534},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=False", NULL, NULL,
     NULL, "torchrun", 1, 2, -1, -1, "h", 29500},
    {"RANK=1 WORLD_SIZE=2", "tcp://h:5", NULL, NULL, "torchrun", 1, 2, -1, -1, "h", 5},
    {"RANK=0 WORLD_SIZE=1", NULL, NULL, NULL, "torchrun", 0, 1, 0, 1, "", 0},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=5 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4", NULL,
     NULL, NULL, "torchrun", 0, 2, -1, -1, "h", 5},
    /* Open MPI */
    {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 "
     "OMPI_COMM_WORLD_LOCAL_SIZE=4 "
     "OMPI_MCA_ess_base_jobid=20017",
     NULL, NULL, NULL, "Open MPI", 3, 4, 3, 4, "127.0.0.1", 20017},
    {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=77", NULL, NULL, NULL,
     "Open MPI", 3, 4, -1, -1, "h", 77},
    {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2",
     "tcp://h:5", NULL, NULL, "Open MPI", 0, 2, -1, -1, "h", 5},
    /* Slurm: a step counts, a batch script does not */
    {"SLURM_PROCID=0 SLURM_NTASKS=16 SLURM_JOB_ID=7", NULL, NULL, NULL, "single process", 0, 1, 0, 1, "", 0},
    {"SLURM_STEP_ID=0 SLURM_PROCID=9 SLURM_NTASKS=16 SLURM_LOCALID=1 SLURM_NODEID=2 "
     "SLURM_TASKS_PER_NODE=4(x2),8 "
     "SLURM_JOB_NODELIST=gnode[10,20-25] SLURM_JOB_ID=1234567",
     NULL, NULL, NULL, "Slurm", 9, 16, 1, 8, "gnode10", 20000 + 1234567 % 20000},
    {"SLURM_STEP_ID=2 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=16 "
     "SLURM_STEP_NODELIST=n[003-004]-ib,m "
     "SLURM_JOB_NODELIST=x SLURM_JOB_ID=100",
     NULL, NULL, NULL, "Slurm", 0, 2, -1, -1, "n003-ib", 20102},
    {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_NODELIST=a SLURM_JOB_ID=1 MASTER_ADDR=b "
     "MASTER_PORT=9",
     NULL, NULL, NULL, "Slurm", 1, 2, -1, -1, "b", 9},
    /* ModelArts, one card per node */
    {"VC_TASK_INDEX=1 MA_NUM_HOSTS=2 MA_NUM_GPUS=1 VC_WORKER_HOSTS=job-0.x,job-1.x MA_VJ_NAME=j", NULL, NULL,
     NULL, "ModelArts", 1, 2, 0, 1, "job-0.x", 6060},
    {"VC_TASK_INDEX=0 MA_NUM_HOSTS=1 MA_NUM_GPUS=1", NULL, NULL, NULL, "ModelArts", 0, 1, 0, 1, "", 0},
    {"VK_TASK_INDEX=1 VC_WORKER_NUM=2 VC_WORKER_HOSTS=a,b", NULL, NULL, NULL, "ModelArts", 1, 2, 0, 1, "a",
     6060},
    {"MA_NUM_GPUS=8 MA_NUM_HOSTS=2 LOCAL_RANK=3", "tcp://a:1", "1", "2", "flags", 1, 2, 3, -1, "a", 1},
    {"MA_NUM_GPUS=8 MA_NUM_HOSTS=2 VC_TASK_INDEX=1", "tcp://a:1", "9", "16", "flags", 9, 16, -1, -1, "a", 1},
};

static struct ps_launch_flags make_flags(const char *method, const char *rank, const char *world)
{
    struct ps_launch_flags f = {.init_method = method, .world_size = 1};
    if (rank) {
        f.rank_given = true;
        f.rank = strtoll(rank, NULL, 10);
    }
    if (world) {
        f.world_size_given = true;
        f.world_size = strtoll(world, NULL, 10);
    }
    return f;
}

static void test_families(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof goods / sizeof *goods; i++) {
        const struct good *g = &goods[i];
        struct ps_launch_flags flags = make_flags(g->method, g->rank, g->world);
        struct ps_launch got;
        struct ps_error err = {0};
        int code = ps_launch_resolve(&flags, line_env, (void *)g->env, &got, &err);
        if (code != 0)
            fail_msg("row %zu (%s): %s", i, g->env, err.message);
        if (strcmp(got.source, g->source) != 0 || got.rank != g->want_rank ||
            got.world_size != g->want_world || got.local_rank != g->local_rank ||
            got.local_size != g->local_size || strcmp(got.host, g->host) != 0 || got.port != g->port)
            fail_msg("row %zu (%s): %s rank %d/%d local %d/%d at %s:%d", i, g->env, got.source, got.rank,
                     got.world_size, got.local_rank, got.local_size, got.host, got.port);
    }
}

struct bad {
    const char *env, *method, *rank, *world;
    int code;
    const char *says;
};

static const struct bad bads[] = {
    {"", NULL, "0", NULL, PS_INVALID_ARGUMENT, "--world_size is not"},
    {"", NULL, NULL, "2", PS_INVALID_ARGUMENT, "--rank is not"},
    {"", "tcp://h:1", "2", "2", PS_INVALID_ARGUMENT,
     "--rank 2 is out of range: the world size is 2, so ranks are 0 to 1"},
    {"", "tcp://h:1", "-1", "2", PS_INVALID_ARGUMENT, "--rank -1 is out of range"},
    {"", "tcp://h:1", "0", "0", PS_INVALID_ARGUMENT, "--world_size 0"},
    {"", "tcp://h:1", "0", "1000000", PS_INVALID_ARGUMENT, "--world_size 1000000"},
    {"", NULL, "0", "2", PS_INVALID_ARGUMENT, "--init_method tcp://HOST:PORT"},
    {"", "tcp://h:1", NULL, NULL, PS_INVALID_ARGUMENT, "needs --rank and --world_size"},
    {"", "env://", NULL, NULL, PS_INVALID_ARGUMENT, "env:// needs RANK"},
    {"", "tcp://h", "0", "2", PS_INVALID_ARGUMENT, "tcp://h"},
    {"", "tcp://:5", "0", "2", PS_INVALID_ARGUMENT, "host is missing"},
    {"", "tcp://h:0", "0", "2", PS_INVALID_ARGUMENT, "port is missing"},
    {"", "tcp://h:99999", "0", "2", PS_INVALID_ARGUMENT, "99999"},
    {"", "tcp://h:1/x", "0", "2", PS_INVALID_ARGUMENT, "tcp://h:1/x"},
    {"", "file:///x", "0", "2", PS_INVALID_ARGUMENT, "file:///x"},
    {"", "grpc://h:1", "0", "2", PS_INVALID_ARGUMENT, "grpc://HOST:PORT/RUN"},
    {"", "grpc://h:1/", "0", "2", PS_INVALID_ARGUMENT, "grpc://HOST:PORT/RUN"},
    {"", "grpc:///run", "0", "2", PS_INVALID_ARGUMENT, "grpc://HOST:PORT/RUN"},
    {"", "grpc://h/run", "0", "2", PS_INVALID_ARGUMENT, "grpc://h/run"},
    {"", "grpc://:1/run", "0", "2", PS_INVALID_ARGUMENT, "host is missing"},
    {"", "grpc://h:1/run", NULL, NULL, PS_INVALID_ARGUMENT, "needs --rank and --world_size"},
    {"RANK=1", NULL, NULL, NULL, PS_INVALID_ARGUMENT, "RANK is set but WORLD_SIZE is not"},
    {"WORLD_SIZE=2", NULL, NULL, NULL, PS_INVALID_ARGUMENT, "WORLD_SIZE is set but RANK is not"},
    {"RANK=2 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1", NULL, NULL, NULL, PS_INVALID_ARGUMENT,
     "RANK=2 is out of range"},
    {"RANK=x WORLD_SIZE=2", NULL, NULL, NULL, PS_INVALID_ARGUMENT, "RANK=x is not a number"},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=h", NULL, NULL, NULL, PS_INVALID_ARGUMENT, "MASTER_PORT is not set"},
    {"RANK=1 WORLD_SIZE=2 MASTER_PORT=1", NULL, NULL, NULL, PS_INVALID_ARGUMENT, "MASTER_ADDR is not set"},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=70000", NULL, NULL, NULL, PS_INVALID_ARGUMENT,
     "MASTER_PORT=70000"},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", NULL, NULL, NULL,
     PS_INVALID_ARGUMENT, "LOCAL_RANK=2"},
    {"OMPI_COMM_WORLD_RANK=1", NULL, NULL, NULL, PS_INVALID_ARGUMENT, "OMPI_COMM_WORLD_SIZE is not"},
    {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2", NULL, NULL, NULL,
     PS_INVALID_ARGUMENT, "where rank 0 is"},
    {"SLURM_STEP_ID=0", NULL, NULL, NULL, PS_INVALID_ARGUMENT, "SLURM_PROCID is not"},
    {"SLURM_STEP_ID=0 SLURM_NTASKS=4", NULL, NULL, NULL, PS_INVALID_ARGUMENT, "SLURM_PROCID is not"},
    {"SLURM_STEP_ID=0 SLURM_PROCID=1", NULL, NULL, NULL, PS_INVALID_ARGUMENT, "SLURM_NPROCS is not"},
    {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=1", NULL, NULL, NULL, PS_INVALID_ARGUMENT,
     "NODELIST"},
    {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=g[1", NULL, NULL, NULL,
     PS_INVALID_ARGUMENT, "without a ]"},
    {"VC_TASK_INDEX=1", NULL, NULL, NULL, PS_INVALID_ARGUMENT, "VC_WORKER_NUM is not"},
    {"MA_NUM_HOSTS=2", NULL, NULL, NULL, PS_INVALID_ARGUMENT, "VC_TASK_INDEX is not"},
    {"VC_TASK_INDEX=1 MA_NUM_HOSTS=2 MA_NUM_GPUS=8 VC_WORKER_HOSTS=a,b", NULL, NULL, NULL,
     PS_INVALID_ARGUMENT, "paramsync launch"},
    {"VC_TASK_INDEX=1 MA_NUM_HOSTS=2 MA_NUM_GPUS=8", "tcp://a:1", "1", "2", PS_INVALID_ARGUMENT,
     "paramsync launch"},
    {"VC_TASK_INDEX=1 MA_NUM_HOSTS=2", NULL, NULL, NULL, PS_INVALID_ARGUMENT, "VC_WORKER_HOSTS is not"},
};

static void test_refusals(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bads / sizeof *bads; i++) {
        const struct bad *b = &bads[i];
        struct ps_launch_flags flags = make_flags(b->method, b->rank, b->world);
        struct ps_launch got = {.rank = 77};
        struct ps_error err = {0};
        int code = ps_launch_resolve(&flags, line_env, (void *)b->env, &got, &err);
        if (code != b->code || !strstr(err.message, b->says) || strchr(err.message, '\n') || got.rank != 77)
            fail_msg("row %zu (%s %s): %d %s", i, b->env, b->method ? b->method : "", code, err.message);
    }
}

static void secret_of(const char *env, char out[320])
{
    struct ps_launch_flags flags = {.world_size = 1};
    struct ps_launch got;
    struct ps_error err = {0};
    assert_int_equal(ps_launch_resolve(&flags, line_env, (void *)env, &got, &err), 0);
    snprintf(out, 320, "%s", got.secret);
}

static void test_secret(void **state)
{
    (void)state;
    char a[320], b[320];
#define JOB "RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 "
    secret_of(JOB "TORCHELASTIC_RUN_ID=x", a);
    secret_of(JOB "TORCHELASTIC_RUN_ID=y", b);
    assert_string_not_equal(a, b);
    secret_of("RANK=1 WORLD_SIZE=2 MASTER_ADDR=other MASTER_PORT=1 TORCHELASTIC_RUN_ID=x", b);
    assert_string_equal(a, b); /* the same on all ranks, however they spell the host */
    secret_of(JOB "PARAMSYNC_JOB_SECRET=s3", a);
    assert_string_equal(a, "s3");
    char big[700] = JOB "PARAMSYNC_JOB_SECRET=";
    memset(big + strlen(big), 'x', 400);
    struct ps_launch_flags flags = {.world_size = 1};
    struct ps_launch got;
    struct ps_error err = {0};
    /* line_env cuts values at 255 bytes, so the limit itself is tried with the environment of the process */
    setenv("PARAMSYNC_JOB_SECRET", big, 1);
    assert_int_equal(ps_launch_resolve(&flags, NULL, NULL, &got, &err), PS_INVALID_ARGUMENT);
    unsetenv("PARAMSYNC_JOB_SECRET");
}

struct node_row {
    const char *env, *address;
    int count, rank;    /* flags; 0 and -1: not given */
    const char *source; /* NULL: refused, and then says */
    const char *says;
    int want_count, want_rank, cards;
    const char *host;
    int port;
};

static const struct node_row node_rows[] = {
    {"", NULL, 0, -1, "single node", NULL, 1, 0, 0, "", 0},
    {"RANK=3 WORLD_SIZE=8 MASTER_ADDR=x MASTER_PORT=9", NULL, 0, -1, "single node", NULL, 1, 0, 0, "", 0},
    {"", "n0:29400", 2, 1, "flags", NULL, 2, 1, 0, "n0", 29400},
    {"SLURM_STEP_ID=0 SLURM_NODEID=1 SLURM_NNODES=4 SLURM_JOB_NODELIST=g[7-9]", "[fd00::1]:5", 1, -1, "flags",
     NULL, 1, 0, 0, "fd00::1", 5},
    {"SLURM_JOB_ID=41 SLURM_STEP_ID=2 SLURM_NODEID=1 SLURM_NNODES=9 SLURM_STEP_NUM_NODES=2 SLURM_NTASKS=2 "
     "SLURM_STEP_NODELIST=g[10,20-25] SLURM_GPUS_ON_NODE=8",
     NULL, 0, -1, "Slurm", NULL, 2, 1, 8, "g10", 20042},
    {"SLURM_JOB_ID=41 SLURM_STEP_ID=2 SLURM_NODEID=1 SLURM_NNODES=2 SLURM_JOB_NODELIST=a,b", "b:77", 0, -1,
     "Slurm", NULL, 2, 1, 0, "b", 77},
    {"SLURM_JOB_ID=41 SLURM_NNODES=1", NULL, 0, -1, "single node", NULL, 1, 0, 0, "", 0},
    {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1", "n0:5", 0, -1, "Open MPI",
     NULL, 2, 1, 0, "n0", 5},
    {"VC_TASK_INDEX=1 MA_NUM_HOSTS=2 MA_NUM_GPUS=8 VC_WORKER_HOSTS=job-0.job,job-1.job", NULL, 0, -1,
     "ModelArts", NULL, 2, 1, 8, "job-0.job", 6060},
    {"VC_TASK_INDEX=0 MA_NUM_HOSTS=1 MA_NUM_GPUS=4", NULL, 0, -1, "ModelArts", NULL, 1, 0, 4, "", 6060},
    /* refused */
    {"", NULL, 0, 1, NULL, "--nnodes is not", 0, 0, 0, NULL, 0},
    {"", "h:1", 2, -1, NULL, "needs --node-rank", 0, 0, 0, NULL, 0},
    {"", "h:1", 2, 2, NULL, "nodes are 0 to 1", 0, 0, 0, NULL, 0},
    {"", NULL, 2, 1, NULL, "give --rdzv", 0, 0, 0, NULL, 0},
    {"", ":1", 2, 1, NULL, "--rdzv :1", 0, 0, 0, NULL, 0},
    {"", "h:0", 2, 1, NULL, "--rdzv h:0", 0, 0, 0, NULL, 0},
    {"", "h", 2, 1, NULL, "--rdzv h", 0, 0, 0, NULL, 0},
    {"SLURM_JOB_ID=41 SLURM_NNODES=2", NULL, 0, -1, NULL, "srun --ntasks-per-node=1", 0, 0, 0, NULL, 0},
    {"SLURM_JOB_ID=41 SLURM_STEP_ID=0 SLURM_NODEID=1 SLURM_NNODES=2 SLURM_NTASKS=16 SLURM_JOB_NODELIST=a,b",
     NULL, 0, -1, NULL, "--ntasks-per-node=1", 0, 0, 0, NULL, 0},
    {"SLURM_STEP_ID=0 SLURM_NNODES=2", NULL, 0, -1, NULL, "SLURM_NODEID is not", 0, 0, 0, NULL, 0},
    {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2", "h:1", 0, -1, NULL,
     "ppr:1:node", 0, 0, 0, NULL, 0},
    {"MA_NUM_HOSTS=2", NULL, 0, -1, NULL, "VC_TASK_INDEX is not", 0, 0, 0, NULL, 0},
    {"VC_TASK_INDEX=1 MA_NUM_HOSTS=2", NULL, 0, -1, NULL, "give --rdzv", 0, 0, 0, NULL, 0},
};

static void test_nodes(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof node_rows / sizeof *node_rows; i++) {
        const struct node_row *r = &node_rows[i];
        struct ps_nodes_flags flags = {.count = r->count, .rank = r->rank, .address = r->address};
        struct ps_nodes got = {.rank = 77};
        struct ps_error err = {0};
        int code = ps_nodes_resolve(&flags, line_env, (void *)r->env, &got, &err);
        if (!r->source) {
            if (code != PS_INVALID_ARGUMENT || !strstr(err.message, r->says) || got.rank != 77)
                fail_msg("row %zu (%s): %d %s", i, r->env, code, err.message);
        } else if (code || strcmp(got.source, r->source) != 0 || got.count != r->want_count ||
                   got.rank != r->want_rank || got.cards != r->cards || strcmp(got.host, r->host) != 0 ||
                   got.port != r->port || !got.secret[0] || !got.open_secret) {
            fail_msg("row %zu (%s): %d %s: %s, %d of %d, %d cards, %s:%d", i, r->env, code, err.message,
                     got.source, got.rank, got.count, got.cards, got.host, got.port);
        }
    }
    struct ps_nodes_flags flags = {.rank = -1};
    struct ps_nodes got;
    assert_int_equal(ps_nodes_resolve(&flags, line_env, (void *)"PARAMSYNC_JOB_SECRET=apples", &got, NULL),
                     0);
    assert_string_equal(got.secret, "apples");
    assert_false(got.open_secret);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nodes),
        cmocka_unit_test(test_families),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_secret),
    };
    /* A launcher may have started this test. */
    static const char *const names[] = {
        "RANK",          "WORLD_SIZE",    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID",
        "VC_TASK_INDEX", "VK_TASK_INDEX", "MA_NUM_HOSTS",         "VC_WORKER_NUM"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unsetenv(names[i]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
