/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/launch.h"

#include "services/base/text.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* The question as it is asked: flags, environment, and what is known so far. */
struct asked {
    const struct ps_launch_flags *flags;
    ps_getenv get;
    void *context;
    struct ps_launch out;
    bool have_address; /* by tcp:// */
    struct ps_error *err;
};

static const char *process_env(void *context, const char *name)
{
    (void)context;
    return getenv(name);
}

static const char *env(const struct asked *a, const char *name)
{
    const char *value = a->get(a->context, name);
    return value && *value ? value : NULL;
}

static int env_number(const struct asked *a, const char *name, int64_t min, int64_t max, int *ret)
{
    int64_t value;
    const char *text = env(a, name);
    if (!text)
        return ps_fail(a->err, PS_INVALID_ARGUMENT, "%s is not set", name);
    if (ps_parse_int64(text, min, max, &value) < 0)
        return ps_fail(a->err, PS_INVALID_ARGUMENT, "%s=%.60s is not a number from %lld to %lld", name, text,
                       (long long)min, (long long)max);
    *ret = (int)value;
    return 0;
}

/* A number if it is set; *ret stays otherwise. */
static int env_optional(const struct asked *a, const char *name, int64_t min, int64_t max, int *ret)
{
    return env(a, name) ? env_number(a, name, min, max, ret) : 0;
}

/* rank and size under these names: 1 if both are set (and read), 0 if none is, an error for one of them. */
static int family(struct asked *a, const char *source, const char *rank_name, const char *size_name)
{
    const char *rank = env(a, rank_name), *size = env(a, size_name);
    if (!rank && !size)
        return 0;
    if (!rank || !size)
        return ps_fail(a->err, PS_INVALID_ARGUMENT,
                       "%s is set but %s is not: set both (%s), or neither for a single process",
                       rank ? rank_name : size_name, rank ? size_name : rank_name, source);
    int code = env_number(a, size_name, 1, PS_WORLD_MAX, &a->out.world_size);
    if (code == 0)
        code = env_number(a, rank_name, 0, PS_WORLD_MAX - 1, &a->out.rank);
    if (code == 0 && a->out.rank >= a->out.world_size)
        code = ps_fail(a->err, PS_INVALID_ARGUMENT, "%s=%d is out of range: %s is %d, so ranks are 0 to %d",
                       rank_name, a->out.rank, size_name, a->out.world_size, a->out.world_size - 1);
    if (code < 0)
        return code;
    a->out.source = source;
    return 1;
}

static int set_host(struct asked *a, const char *host, size_t length, const char *name)
{
    if (length == 0 || length >= sizeof a->out.host)
        return ps_fail(a->err, PS_INVALID_ARGUMENT, "%s: a host name has 1 to %zu bytes", name,
                       sizeof a->out.host - 1);
    memcpy(a->out.host, host, length);
    a->out.host[length] = '\0';
    return 0;
}

/* MASTER_ADDR and MASTER_PORT where they are set; what is not stays. */
static int master_address(struct asked *a)
{
    const char *host = env(a, "MASTER_ADDR");
    int code = env_optional(a, "MASTER_PORT", 1, 65535, &a->out.port);
    if (code == 0 && host)
        code = set_host(a, host, strlen(host), "MASTER_ADDR");
    return code;
}

/* The agent of torchrun serves its own store on MASTER_PORT, as long as the job lives. */
static void avoid_agent_port(struct asked *a)
{
    const char *agent = env(a, "TORCHELASTIC_USE_AGENT_STORE");
    if (agent && strcasecmp(agent, "True") == 0 && a->out.port)
        a->out.port += a->out.port < 65535 ? 1 : -1;
}

static int job_port(const char *job, int more)
{
    uint64_t number = 0;
    for (const char *c = job; *c; c++)
        number =
            *c >= '0' && *c <= '9' ? number * 10 + (uint64_t)(*c - '0') : number * 31 + (unsigned char)*c;
    return (int)(20000 + (number + (uint64_t)more) % 20000);
}

/* The first host of a Slurm list: "gnode[10,20-25],x" is gnode10. */
static int first_host(struct asked *a, const char *list, const char *name)
{
    char host[256];
    size_t used = 0;
    for (const char *c = list; *c && *c != ','; c++) {
        if (*c == '[') {
            const char *end = strchr(c, ']');
            if (!end)
                return ps_fail(a->err, PS_INVALID_ARGUMENT, "%s=%.60s has a [ without a ]", name, list);
            for (c++; c < end && *c != ',' && *c != '-'; c++)
                if (used < sizeof host)
                    host[used++] = *c;
            c = end;
        } else if (used < sizeof host) {
            host[used++] = *c;
        }
    }
    return set_host(a, host, used, name);
}

/* The node's number in "4(x2),3": 4, 4, 3. Returns -1 if the text is none of that, or ends before. */
static int tasks_of_node(const char *text, int node)
{
    while (*text) {
        char *end;
        long tasks = strtol(text, &end, 10), times = 1;
        if (end == text || tasks < 1 || tasks > PS_WORLD_MAX)
            return -1;
        if (end[0] == '(' && end[1] == 'x') {
            char *close;
            times = strtol(end + 2, &close, 10);
            if (close == end + 2 || *close != ')' || times < 1 || times > PS_WORLD_MAX)
                return -1;
            end = close + 1;
        }
        if (node < times)
            return (int)tasks;
        node -= (int)times;
        if (*end != ',' && *end)
            return -1;
        text = *end ? end + 1 : end;
    }
    return -1;
}

static int from_torchrun(struct asked *a)
{
    int code = family(a, "torchrun", "RANK", "WORLD_SIZE");
    if (code <= 0)
        return code;
    bool local_rank = env(a, "LOCAL_RANK"), local_size = env(a, "LOCAL_WORLD_SIZE");
    if ((code = env_optional(a, "LOCAL_RANK", 0, PS_WORLD_MAX - 1, &a->out.local_rank)) < 0 ||
        (code = env_optional(a, "LOCAL_WORLD_SIZE", 1, PS_WORLD_MAX, &a->out.local_size)) < 0)
        return code;
    if (local_rank && local_size && a->out.local_rank >= a->out.local_size)
        return ps_fail(a->err, PS_INVALID_ARGUMENT, "LOCAL_RANK=%d is out of range: LOCAL_WORLD_SIZE is %d",
                       a->out.local_rank, a->out.local_size);
    if (a->have_address)
        return 1;
    if ((code = master_address(a)) < 0)
        return code;
    if (a->out.world_size > 1 && (!a->out.host[0] || !a->out.port))
        return ps_fail(a->err, PS_INVALID_ARGUMENT,
                       "WORLD_SIZE is %d but %s is not set: set MASTER_ADDR and MASTER_PORT to rank 0's host "
                       "and a free port",
                       a->out.world_size, a->out.host[0] ? "MASTER_PORT" : "MASTER_ADDR");
    avoid_agent_port(a);
    return 1;
}

static int from_open_mpi(struct asked *a)
{
    int code = family(a, "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
    if (code <= 0)
        return code;
    if ((code = env_optional(a, "OMPI_COMM_WORLD_LOCAL_RANK", 0, PS_WORLD_MAX - 1, &a->out.local_rank)) < 0 ||
        (code = env_optional(a, "OMPI_COMM_WORLD_LOCAL_SIZE", 1, PS_WORLD_MAX, &a->out.local_size)) < 0)
        return code;
    if (a->have_address)
        return 1;
    const char *job = env(a, "PMIX_NAMESPACE");
    if (!job)
        job = env(a, "OMPI_MCA_ess_base_jobid");
    if (a->out.local_size == a->out.world_size)
        set_host(a, "127.0.0.1", 9, "Open MPI");
    if (job)
        a->out.port = job_port(job, 0);
    if ((code = master_address(a)) < 0)
        return code;
    if (a->out.world_size > 1 && (!a->out.host[0] || !a->out.port))
        return ps_fail(
            a->err, PS_INVALID_ARGUMENT,
            "Open MPI tells rank and size but not where rank 0 is: give --init_method tcp://HOST:PORT, or "
            "MASTER_ADDR and MASTER_PORT (mpirun -x)");
    return 1;
}

static int from_slurm(struct asked *a)
{
    /* A batch script has SLURM_PROCID=0 too, and is no rank: only srun's steps count. */
    if (!env(a, "SLURM_STEP_ID"))
        return 0;
    if (!env(a, "SLURM_PROCID"))
        return ps_fail(
            a->err, PS_INVALID_ARGUMENT,
            "SLURM_STEP_ID is set but SLURM_PROCID is not: start the processes with srun, or unset "
            "SLURM_STEP_ID for a single process");
    const char *sizes[] = {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"};
    int code = 0, node = 0;
    for (int i = 0; i < 3 && code == 0; i++)
        if (env(a, sizes[i]) || i == 2)
            code = family(a, "Slurm", "SLURM_PROCID", sizes[i]);
    if (code <= 0)
        return code;
    if ((code = env_optional(a, "SLURM_LOCALID", 0, PS_WORLD_MAX - 1, &a->out.local_rank)) < 0 ||
        (code = env_optional(a, "SLURM_NODEID", 0, PS_WORLD_MAX - 1, &node)) < 0)
        return code;
    const char *tasks = env(a, "SLURM_STEP_TASKS_PER_NODE");
    if (!tasks)
        tasks = env(a, "SLURM_TASKS_PER_NODE");
    if (tasks)
        a->out.local_size = tasks_of_node(tasks, node);
    if (a->have_address || a->out.world_size == 1)
        return 1;
    const char *name = env(a, "SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
    const char *list = env(a, name), *job = env(a, "SLURM_JOB_ID");
    int64_t step = 0;
    const char *step_text = env(a, "SLURM_STEP_ID");
    if (step_text) /* some are words, such as "interactive" */
        (void)ps_parse_int64(step_text, 0, 1 << 20, &step);
    if (list && (code = first_host(a, list, name)) < 0)
        return code;
    if (job)
        a->out.port = job_port(job, (int)step);
    if ((code = master_address(a)) < 0)
        return code;
    if (!a->out.host[0] || !a->out.port)
        return ps_fail(a->err, PS_INVALID_ARGUMENT,
                       "Slurm's step has no %s: give --init_method tcp://HOST:PORT",
                       a->out.host[0] ? "SLURM_JOB_ID" : "SLURM_JOB_NODELIST");
    return 1;
}

/* What ModelArts tells counts nodes. With several cards per node, rank and world size count something else.
 */
static int refuse_node_values(struct asked *a, int world_size)
{
    int cards = 0, hosts = 0;
    if (env(a, "LOCAL_RANK") || env_optional(a, "MA_NUM_GPUS", 0, 1024, &cards) < 0 ||
        env_optional(a, env(a, "MA_NUM_HOSTS") ? "MA_NUM_HOSTS" : "VC_WORKER_NUM", 1, PS_WORLD_MAX, &hosts) <
            0)
        return 0;
    if (cards > 1 && hosts > 0 && world_size == hosts)
        return ps_fail(
            a->err, PS_INVALID_ARGUMENT,
            "a world size of %d counts nodes, but this node has MA_NUM_GPUS=%d cards and rank and world size "
            "count processes: start through 'paramsync launch', which makes one process per card",
            world_size, cards);
    return 0;
}

static int from_model_arts(struct asked *a)
{
    const char *size_name = env(a, "MA_NUM_HOSTS") ? "MA_NUM_HOSTS" : "VC_WORKER_NUM";
    const char *rank_name =
        env(a, "VC_TASK_INDEX") || !env(a, "VK_TASK_INDEX") ? "VC_TASK_INDEX" : "VK_TASK_INDEX";
    int code = family(a, "ModelArts", rank_name, size_name);
    if (code <= 0)
        return code;
    if ((code = refuse_node_values(a, a->out.world_size)) < 0)
        return code;
    a->out.local_rank = 0;
    a->out.local_size = 1;
    if (a->have_address || a->out.world_size == 1)
        return 1;
    const char *hosts = env(a, "VC_WORKER_HOSTS");
    if (hosts && (code = set_host(a, hosts, strcspn(hosts, ","), "VC_WORKER_HOSTS")) < 0)
        return code;
    a->out.port = 6060;
    if ((code = master_address(a)) < 0)
        return code;
    if (!a->out.host[0])
        return ps_fail(a->err, PS_INVALID_ARGUMENT,
                       "%s is %d but VC_WORKER_HOSTS is not set: give --init_method tcp://HOST:PORT",
                       size_name, a->out.world_size);
    return 1;
}

/* grpc://HOST:PORT/RUN */
static int read_meeting(struct asked *a, const char *method)
{
    const char *address = method + 7, *slash = strrchr(address, '/');
    struct ps_error why = {0};
    char host[256], sidecar[sizeof a->out.meet_sidecar];
    int port = 0;
    size_t length = slash ? (size_t)(slash - address) : 0;
    if (!slash || !slash[1] || !length || length >= sizeof sidecar ||
        strlen(slash + 1) >= sizeof a->out.meet_run)
        return ps_fail(a->err, PS_INVALID_ARGUMENT,
                       "--init_method %.200s: give grpc://HOST:PORT/RUN: the sidecar's address and a name of "
                       "the job",
                       method);
    memcpy(sidecar, address, length);
    sidecar[length] = '\0';
    if (ps_parse_host_port(sidecar, host, sizeof host, &port, &why) < 0)
        return ps_fail(a->err, PS_INVALID_ARGUMENT, "--init_method %.200s: %s", method, why.message);
    if (!host[0] || port == 0)
        return ps_fail(a->err, PS_INVALID_ARGUMENT,
                       "--init_method %.200s: the sidecar's %s is missing (grpc://HOST:PORT/RUN)", method,
                       host[0] ? "port" : "host");
    snprintf(a->out.meet_sidecar, sizeof a->out.meet_sidecar, "%s", sidecar);
    snprintf(a->out.meet_run, sizeof a->out.meet_run, "%s", slash + 1);
    a->have_address = true;
    return 0;
}

/* tcp://HOST:PORT fills the address, env:// leaves it to the environment. */
static int read_init_method(struct asked *a, const char *method, bool *ret_env)
{
    *ret_env = false;
    if (strcasecmp(method, "env://") == 0) {
        *ret_env = true;
        return 0;
    }
    if (strncasecmp(method, "grpc://", 7) == 0)
        return read_meeting(a, method);
    if (strncasecmp(method, "tcp://", 6) != 0)
        return ps_fail(
            a->err, PS_INVALID_ARGUMENT,
            "--init_method %.200s: give tcp://HOST:PORT of rank 0, env://, or grpc://HOST:PORT/RUN of the "
            "sidecar",
            method);
    struct ps_error why = {0};
    if (ps_parse_host_port(method + 6, a->out.host, sizeof a->out.host, &a->out.port, &why) < 0)
        return ps_fail(a->err, PS_INVALID_ARGUMENT, "--init_method %.200s: %s", method, why.message);
    if (!a->out.host[0] || a->out.port == 0)
        return ps_fail(a->err, PS_INVALID_ARGUMENT,
                       "--init_method %.200s: rank 0's %s is missing (tcp://HOST:PORT)", method,
                       a->out.host[0] ? "port" : "host");
    a->have_address = true;
    return 0;
}

static int from_flags(struct asked *a, bool by_env)
{
    const struct ps_launch_flags *f = a->flags;
    if (f->rank_given != f->world_size_given)
        return ps_fail(a->err, PS_INVALID_ARGUMENT, "%s is given but %s is not: give both",
                       f->rank_given ? "--rank" : "--world_size", f->rank_given ? "--world_size" : "--rank");
    if (!f->rank_given)
        return 0;
    if (f->world_size < 1 || f->world_size > PS_WORLD_MAX)
        return ps_fail(a->err, PS_INVALID_ARGUMENT,
                       "--world_size %lld is not a number of processes from 1 to %d",
                       (long long)f->world_size, PS_WORLD_MAX);
    if (f->rank < 0 || f->rank >= f->world_size)
        return ps_fail(a->err, PS_INVALID_ARGUMENT,
                       "--rank %lld is out of range: the world size is %lld, so ranks are 0 to %lld",
                       (long long)f->rank, (long long)f->world_size, (long long)f->world_size - 1);
    int code = refuse_node_values(a, (int)f->world_size);
    if (code < 0)
        return code;
    a->out.rank = (int)f->rank;
    a->out.world_size = (int)f->world_size;
    a->out.source = "flags";
    if ((code = env_optional(a, "LOCAL_RANK", 0, PS_WORLD_MAX - 1, &a->out.local_rank)) < 0 ||
        (code = env_optional(a, "LOCAL_WORLD_SIZE", 1, PS_WORLD_MAX, &a->out.local_size)) < 0)
        return code;
    if (!a->have_address && (by_env || f->world_size > 1)) {
        if ((code = master_address(a)) < 0)
            return code;
        if (f->world_size > 1 && (!a->out.host[0] || !a->out.port))
            return ps_fail(
                a->err, PS_INVALID_ARGUMENT,
                "--world_size %lld needs to know where rank 0 is: give --init_method tcp://HOST:PORT (or set "
                "MASTER_ADDR and MASTER_PORT)",
                (long long)f->world_size);
        avoid_agent_port(a);
    }
    return 1;
}

/* Without PARAMSYNC_JOB_SECRET: whatever names this job in the environment, and the port. It keeps jobs
 * apart; it is no protection against somebody who can read them. */
static int make_secret(struct asked *a)
{
    static const char *const jobs[] = {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE", "MA_VJ_NAME"};
    const char *secret = env(a, "PARAMSYNC_JOB_SECRET"), *job = NULL;
    if (secret) {
        if (strlen(secret) >= sizeof a->out.secret)
            return ps_fail(a->err, PS_INVALID_ARGUMENT, "PARAMSYNC_JOB_SECRET is longer than %zu bytes",
                           sizeof a->out.secret - 1);
        snprintf(a->out.secret, sizeof a->out.secret, "%s", secret);
        return 0;
    }
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs && !job; i++)
        job = env(a, jobs[i]);
    snprintf(a->out.secret, sizeof a->out.secret, "job %.200s port %d", job ? job : "", a->out.port);
    return 0;
}

int ps_launch_resolve(const struct ps_launch_flags *flags, ps_getenv get, void *context,
                      struct ps_launch *ret, struct ps_error *err)
{
    struct asked a = {.flags = flags,
                      .get = get ? get : process_env,
                      .context = context,
                      .out = {.rank = 0, .world_size = 1, .local_rank = -1, .local_size = -1},
                      .err = err};
    const char *method = flags->init_method;
    if (method && (!*method || strcasecmp(method, "none") == 0))
        method = NULL;
    bool by_env = false;
    int code = method ? read_init_method(&a, method, &by_env) : 0;
    if (code == 0)
        code = from_flags(&a, by_env);
    if (code == 0)
        code = from_torchrun(&a);
    if (code == 0)
        code = from_open_mpi(&a);
    if (code == 0)
        code = from_slurm(&a);
    if (code == 0)
        code = from_model_arts(&a);
    if (code == 0) {
        if (by_env)
            code = ps_fail(err, PS_INVALID_ARGUMENT,
                           "--init_method env:// needs RANK and WORLD_SIZE in the environment, or --rank and "
                           "--world_size");
        else if (method)
            code = ps_fail(err, PS_INVALID_ARGUMENT, "--init_method %.200s needs --rank and --world_size",
                           method);
        else {
            a.out.source = "single process";
            code = 1;
        }
    }
    if (code > 0)
        code = make_secret(&a);
    if (code < 0)
        return code;
    if (a.out.world_size == 1)
        a.out.local_rank = 0, a.out.local_size = 1;
    *ret = a.out;
    return 0;
}

/* ---- nodes ---- */

static int nodes_of_open_mpi(struct asked *a)
{
    int code = family(a, "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), local = 1;
    if (code <= 0)
        return code;
    if ((code = env_optional(a, "OMPI_COMM_WORLD_LOCAL_SIZE", 1, PS_WORLD_MAX, &local)) < 0)
        return code;
    if (local > 1)
        return ps_fail(
            a->err, PS_INVALID_ARGUMENT,
            "mpirun has started %d launchers on this node, but one launcher starts all ranks of its "
            "node: mpirun --map-by ppr:1:node",
            local);
    const char *job = env(a, "PMIX_NAMESPACE");
    if (job)
        a->out.port = job_port(job, 1);
    return (code = master_address(a)) < 0 ? code : 1;
}

static int nodes_of_slurm(struct asked *a, int *ret_cards)
{
    int code, nodes = 0;
    if (!env(a, "SLURM_STEP_ID")) {
        if (env(a, "SLURM_JOB_ID") && (code = env_optional(a, "SLURM_NNODES", 1, PS_WORLD_MAX, &nodes)) < 0)
            return code;
        return nodes > 1 ? ps_fail(a->err, PS_INVALID_ARGUMENT,
                                   "this job has %d nodes, but the launcher runs outside of srun, on one of "
                                   "them: srun --ntasks-per-node=1 paramsync launch ..., or --nnodes 1",
                                   nodes)
                         : 0;
    }
    const char *count = env(a, "SLURM_STEP_NUM_NODES") ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES";
    const char *tasks = env(a, "SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
    int task_count = 0;
    if ((code = family(a, "Slurm", "SLURM_NODEID", count)) <= 0 ||
        (code = env_optional(a, tasks, 1, PS_WORLD_MAX, &task_count)) < 0 ||
        (code = env_optional(a, "SLURM_GPUS_ON_NODE", 0, 1024, ret_cards)) < 0)
        return code;
    if (task_count && task_count != a->out.world_size)
        return ps_fail(a->err, PS_INVALID_ARGUMENT,
                       "%s=%d on %d nodes: one launcher starts all ranks of its node, so give srun "
                       "--ntasks-per-node=1 (and --nproc-per-node to the launcher)",
                       tasks, task_count, a->out.world_size);
    const char *name = env(a, "SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
    const char *list = env(a, name), *job = env(a, "SLURM_JOB_ID");
    if (list && (code = first_host(a, list, name)) < 0)
        return code;
    if (job)
        a->out.port = job_port(job, 1);
    return 1;
}

static int nodes_of_model_arts(struct asked *a, int *ret_cards)
{
    const char *size_name = env(a, "MA_NUM_HOSTS") ? "MA_NUM_HOSTS" : "VC_WORKER_NUM";
    const char *rank_name =
        env(a, "VC_TASK_INDEX") || !env(a, "VK_TASK_INDEX") ? "VC_TASK_INDEX" : "VK_TASK_INDEX";
    int code = family(a, "ModelArts", rank_name, size_name);
    if (code <= 0 || (code = env_optional(a, "MA_NUM_GPUS", 0, 1024, ret_cards)) < 0)
        return code;
    const char *hosts = env(a, "VC_WORKER_HOSTS");
    if (hosts && (code = set_host(a, hosts, strcspn(hosts, ","), "VC_WORKER_HOSTS")) < 0)
        return code;
    a->out.port = 6060;
    return 1;
}

static int nodes_of_flags(struct asked *a, const struct ps_nodes_flags *f)
{
    if (!f->count)
        return f->rank < 0 ? 0
                           : ps_fail(a->err, PS_INVALID_ARGUMENT, "--node-rank is given but --nnodes is not");
    if (f->count < 1 || f->count > PS_WORLD_MAX)
        return ps_fail(a->err, PS_INVALID_ARGUMENT, "--nnodes must be from 1 to %d", PS_WORLD_MAX);
    if (f->count > 1 && f->rank < 0)
        return ps_fail(a->err, PS_INVALID_ARGUMENT,
                       "--nnodes %lld needs --node-rank: 0 on the first node, 1 on the next, ...",
                       (long long)f->count);
    if (f->rank >= f->count)
        return ps_fail(a->err, PS_INVALID_ARGUMENT, "--node-rank %lld is out of range: nodes are 0 to %lld",
                       (long long)f->rank, (long long)f->count - 1);
    a->out.world_size = (int)f->count;
    a->out.rank = f->rank < 0 ? 0 : (int)f->rank;
    a->out.source = "flags";
    return 1;
}

int ps_nodes_resolve(const struct ps_nodes_flags *flags, ps_getenv get, void *context, struct ps_nodes *ret,
                     struct ps_error *err)
{
    struct asked a = {
        .get = get ? get : process_env, .context = context, .out = {.rank = 0, .world_size = 1}, .err = err};
    int cards = 0, code = nodes_of_flags(&a, flags);
    if (code == 0)
        code = nodes_of_open_mpi(&a);
    if (code == 0)
        code = nodes_of_slurm(&a, &cards);
    if (code == 0)
        code = nodes_of_model_arts(&a, &cards);
    if (code == 0) {
        a.out.source = "single node";
        code = 1;
    }
    struct ps_error why = {0};
    if (code > 0 && flags->address) {
        code = ps_parse_host_port(flags->address, a.out.host, sizeof a.out.host, &a.out.port, &why);
        if (code < 0 || !a.out.host[0] || !a.out.port)
            code =
                ps_fail(err, PS_INVALID_ARGUMENT, "--rdzv %.200s: give HOST:PORT of node 0", flags->address);
    }
    if (code >= 0 && a.out.world_size > 1 && (!a.out.host[0] || !a.out.port))
        code = ps_fail(err, PS_INVALID_ARGUMENT,
                       "%d nodes need to know where node 0 is: give --rdzv HOST:PORT, the same on all nodes",
                       a.out.world_size);
    if (code >= 0)
        code = make_secret(&a);
    if (code < 0)
        return code;
    *ret = (struct ps_nodes){.count = a.out.world_size,
                             .rank = a.out.rank,
                             .cards = cards,
                             .port = a.out.port,
                             .source = a.out.source,
                             .open_secret = !env(&a, "PARAMSYNC_JOB_SECRET")};
    snprintf(ret->host, sizeof ret->host, "%s", a.out.host);
    snprintf(ret->secret, sizeof ret->secret, "%s", a.out.secret);
    return 0;
}
