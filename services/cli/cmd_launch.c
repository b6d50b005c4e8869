/* SPDX-License-Identifier: Apache-2.0
 * paramsync launch: starts, watches and starts again the processes of a training, on one node or several. */
#include "services/cli/agents.h"
#include "services/cli/cli.h"
#include "services/cli/sidecar_child.h"
#include "services/cli/topology.h"
#include "services/cli/workers.h"

#include "services/base/clock.h"
#include "services/base/fs.h"
#include "services/base/launch.h"
#include "services/base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

struct launch_settings {
    struct cli_common common;
    int64_t nnodes, node_rank, max_restarts, master_port;
    const char *nproc, *rdzv, *prefix, *log_dir, *run, *sidecar_dir;
    bool bind;
    double grace, join_timeout, heartbeat;
};

#define AT(field) .offset = offsetof(struct launch_settings, field)
static const struct ps_option rows[] = {
    {.name = "nproc-per-node",
     .type = PS_TYPE_STRING,
     AT(nproc),
     .value = "N",
     .fallback = "auto",
     .help = "processes of this node; auto: one per card, or one where there is none",
     .group = "Where"},
    {.name = "nnodes",
     .type = PS_TYPE_INT,
     AT(nnodes),
     .value = "N",
     .min = 0,
     .max = PS_WORLD_MAX,
     .help = "nodes of the job; without it Slurm, Open MPI or ModelArts tell, else one"},
    {.name = "node-rank",
     .type = PS_TYPE_INT,
     AT(node_rank),
     .value = "N",
     .fallback = "-1",
     .min = -1,
     .max = PS_WORLD_MAX - 1,
     .help = "this node among them, from 0"},
    {.name = "rdzv",
     .type = PS_TYPE_STRING,
     AT(rdzv),
     .value = "HOST:PORT",
     .help = "node 0's address, where the launchers meet; the same on all nodes"},
    {.name = "master-port",
     .type = PS_TYPE_INT,
     AT(master_port),
     .value = "PORT",
     .min = 0,
     .max = 65535,
     .help = "where the ranks meet on node 0 (MASTER_PORT); default: any free one"},
    {.name = "bind",
     .type = PS_TYPE_BOOL,
     AT(bind),
     .fallback = "true",
     .help = "each rank to cores of its own, near its card's memory (NUMA)"},

    {.name = "max-restarts",
     .type = PS_TYPE_INT,
     AT(max_restarts),
     .value = "N",
     .fallback = "0",
     .min = 0,
     .max = 100000,
     .help = "when a rank fails, start all ranks again at most N times",
     .group = "When something fails"},
    {.name = "grace",
     .type = PS_TYPE_DURATION,
     AT(grace),
     .value = "TIME",
     .fallback = "15s",
     .min = 0,
     .max = 86400,
     .help = "from SIGTERM to SIGKILL"},
    {.name = "join-timeout",
     .type = PS_TYPE_DURATION,
     AT(join_timeout),
     .value = "TIME",
     .fallback = "10min",
     .min = 1,
     .max = 7 * 86400,
     .help = "how long to wait for nodes that are not there (yet, or any more)"},
    {.name = "heartbeat-timeout",
     .type = PS_TYPE_DURATION,
     AT(heartbeat),
     .value = "TIME",
     .fallback = "10s",
     .min = 0.5,
     .max = 3600,
     .help = "after which a silent node counts as lost"},

    {.name = "prefix",
     .type = PS_TYPE_CHOICE,
     AT(prefix),
     .choices = "auto|rank|none",
     .fallback = "auto",
     .help = "before each line: its rank, or nothing; auto: the rank if there are several on this node",
     .group = "Output"},
    {.name = "log-dir",
     .type = PS_TYPE_STRING,
     AT(log_dir),
     .value = "DIR",
     .help = "each rank's output to DIR/rank_N.log as well"},

    {.name = "sidecar",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct launch_settings, common.sidecar),
     .value = "auto|none|HOST:PORT",
     .environment = "PARAMSYNC_SIDECAR",
     .help =
         "the sidecar the ranks report to; auto: one of the job's own on node 0 (for several nodes with a "
         "token, without TLS)",
     .group = "Sidecar"},
    {.name = "sidecar-dir",
     .type = PS_TYPE_STRING,
     AT(sidecar_dir),
     .value = "DIR",
     .help = "store of auto; default: sidecar in the command's --output_dir, else "
             "$XDG_STATE_HOME/paramsync or ~/.local/state/paramsync"},
    {.name = "run",
     .type = PS_TYPE_STRING,
     AT(run),
     .value = "NAME",
     .environment = "PARAMSYNC_RUN",
     .help = "name of the run there; paramsync-train takes it over"},
    {.name = "token-file",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct launch_settings, common.token_file),
     .value = "FILE",
     .help = "file whose first line is the token; PARAMSYNC_TOKEN stands in"},
    {.name = "tls-ca",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct launch_settings, common.tls_ca),
     .value = "FILE",
     .help = "CA certificate (PEM); turns TLS on"},
    {.name = "tls-cert",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct launch_settings, common.tls_cert),
     .value = "FILE",
     .help = "client certificate (PEM)"},
    {.name = "tls-key",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct launch_settings, common.tls_key),
     .value = "FILE",
     .help = "client certificate's key (PEM)"},
    {.name = "help",
     .short_name = "h",
     .type = PS_TYPE_BOOL,
     .offset = offsetof(struct launch_settings, common.help),
     .help = "print this",
     .group = "Other"},
};
static const struct ps_options table_of_options = {
    .program = "paramsync launch",
    .usage = "[options] -- COMMAND [ARGUMENT...]",
    .example = "paramsync launch --nproc-per-node 2 -- paramsync-train --data_url /data\n"
               "paramsync launch --nnodes 2 --node-rank 1 --rdzv node0:29400 -- python3 x.py",
    .about =
        "Starts one process per card with torchrun's environment (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, "
        "...), on this node; the launchers of several nodes meet at --rdzv and start, stop and restart "
        "together. "
        "In Slurm (one task per node), Open MPI (one process per node) and ModelArts no flags are needed. "
        "When a rank fails all are ended; the exit status is that of the first that failed, 128 + N for "
        "signal N. After a restart paramsync-train goes on from its last checkpoint; other scripts see "
        "TORCHELASTIC_RESTART_COUNT. PARAMSYNC_JOB_SECRET, the same on all nodes, keeps strangers out.",
    .rows = rows,
    .count = PS_OPTIONS_COUNT(rows),
};

enum state {
    WAITING, /* for the other nodes, or for node 0's START */
    RUNNING,
    ENDING,  /* this attempt has failed somewhere: the local ranks are being ended */
    SETTLED, /* none lives here; others may */
};
enum member { ABSENT, READY, BUSY, DONE };
enum { ENVIRONMENT_MAX = 24, LINES_MAX = 8192 };
static const double notice_s = 2.5; /* a rank that learns of another's death says so before it goes */

struct failure {
    bool known;
    int node, rank, status; /* rank -1: a node, not a rank */
    double at_s;
    char text[CLI_LINE_MAX];
};

struct job {
    const struct launch_settings *settings;
    char **command;
    struct ps_nodes nodes;
    int local; /* ranks of this node */
    struct cli_topology topology;
    struct cli_output out, err;
    int signals;
    int64_t started_ns;

    struct cli_agents *agents; /* NULL: a single node */
    enum member *members;      /* node 0: of each node, its own too */
    int *member_ranks;

    enum state state;
    int attempt, restarts;
    bool reported_end; /* DONE or FAILED was sent, or counted here */
    struct cli_workers *workers;
    struct failure failure; /* of this attempt */
    char lines[LINES_MAX];  /* what the failing rank printed last, if it was one of ours */
    double wait_until_s, term_at_s, kill_at_s;
    bool termed;
    int interrupted; /* the signal that ends the job */
    bool over;
    int status;

    char training[33], session[CLI_SESSION], ranks_secret[PS_SHA256_HEX], token[PS_SHA256_HEX];
    char sidecar_address[300], master_port[16], restarts_text[16], most_text[16], nodes_text[16];
    struct cli_sidecar sidecar;
    bool own_sidecar;
    char run_again[256]; /* what the run of a failed attempt is called */
};

static void say(struct job *job, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(struct job *job, const char *format, ...)
{
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    ps_buf_puts(&job->err.waiting, "paramsync launch: ");
    cli_escape(&job->err.waiting, text);
    ps_buf_append(&job->err.waiting, "\n", 1);
    cli_output_flush(&job->err, false);
}

/* ---- before the first attempt ---- */

static int count_local(struct job *job, struct ps_error *err)
{
    const char *text = job->settings->nproc;
    int64_t count;
    int cards = job->nodes.cards ? job->nodes.cards : job->topology.card_count;
    if (strcmp(text, "auto") == 0 || strcmp(text, "gpu") == 0) {
        if (!cards && strcmp(text, "gpu") == 0)
            return ps_fail(err, PS_INVALID_ARGUMENT, "--nproc-per-node gpu: this node has no card");
        job->local = cards ? cards : 1;
        return 0;
    }
    if (strcmp(text, "cpu") == 0)
        count = CPU_COUNT(&job->topology.allowed);
    else if (ps_parse_int64(text, 1, PS_WORLD_MAX, &count))
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "--nproc-per-node %.40s: must be a number from 1 to %d, auto, gpu or cpu", text,
                       PS_WORLD_MAX);
    job->local = (int)count;
    if (job->topology.card_count && count > job->topology.card_count)
        say(job, "%d processes on %d cards: two of them would share one, which NCCL refuses", job->local,
            job->topology.card_count);
    return 0;
}

/* The value of --NAME in the command that is launched; _ and - are the same. */
static const char *command_flag(const struct job *job, const char *name)
{
    size_t length = strlen(name);
    const char *found = NULL;
    for (char **word = job->command; *word; word++) {
        if (strncmp(*word, "--", 2) != 0)
            continue;
        size_t i = 0;
        while (i < length && ((*word)[2 + i] == name[i] || ((*word)[2 + i] == '-' && name[i] == '_')))
            i++;
        if (i == length && (*word)[2 + i] == '=')
            found = *word + 3 + i;
        else if (i == length && !(*word)[2 + i] && word[1])
            found = word[1];
    }
    return found;
}

static int store_folder(const struct job *job, char *path, size_t size, struct ps_error *err)
{
    const char *output = command_flag(job, "output_dir"), *state = getenv("XDG_STATE_HOME"),
               *home = getenv("HOME");
    int n;
    if (job->settings->sidecar_dir)
        n = snprintf(path, size, "%s", job->settings->sidecar_dir);
    else if (output)
        n = snprintf(path, size, "%s/sidecar", output);
    else if (state && *state)
        n = snprintf(path, size, "%s/paramsync", state);
    else if (home && *home)
        n = snprintf(path, size, "%s/.local/state/paramsync", home);
    else
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "--sidecar auto needs a place for its store: --sidecar-dir DIR");
    return n < (int)size ? 0 : ps_fail(err, PS_INVALID_ARGUMENT, "--sidecar-dir: the path is too long");
}

static int start_sidecar(struct job *job, struct ps_error *err)
{
    char dir[PATH_MAX - 16], token_file[PATH_MAX];
    const char *address = job->settings->common.sidecar;
    if (!address || !*address || strcmp(address, "none") == 0)
        return 0;
    if (strcmp(address, "auto") != 0) {
        if (strlen(address) >= sizeof job->sidecar_address || strchr(address, ' '))
            return ps_fail(err, PS_INVALID_ARGUMENT, "--sidecar: give auto or HOST:PORT");
        snprintf(job->sidecar_address, sizeof job->sidecar_address, "%s", address);
        return 0;
    }
    bool several = job->nodes.count > 1;
    if (several && cli_mac(job->nodes.secret, "token of the sidecar", job->token))
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (job->nodes.rank)
        return 0; /* node 0 tells where it is */
    int code = store_folder(job, dir, sizeof dir, err);
    if (code)
        return code;
    snprintf(token_file, sizeof token_file, "%s/token", dir);
    if (several && !(code = ps_make_dirs(dir, 0700, err)))
        code = ps_write_file_atomic(token_file, job->token, strlen(job->token), err);
    if (!code)
        code = cli_sidecar_start(dir, several, several ? token_file : NULL, &job->sidecar, err);
    if (code)
        return code;
    job->own_sidecar = true;
    const char *colon = strrchr(job->sidecar.grpc, ':');
    bool v6 = strchr(job->nodes.host, ':');
    snprintf(job->sidecar_address, sizeof job->sidecar_address, several ? v6 ? "[%s]%s" : "%s%s" : "%.0s%s",
             several ? job->nodes.host : "", several ? colon : job->sidecar.grpc);
    say(job, "sidecar: gRPC on %s, dashboard on http://%s/%s%s, store in %s", job->sidecar_address,
        job->sidecar.http, several ? ", token in " : "", several ? token_file : "", dir);
    return 0;
}

static int open_signals(struct job *job, struct ps_error *err)
{
    static const int taken[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        sigaddset(&set, taken[i]);
    sigprocmask(SIG_BLOCK, &set, NULL);
    job->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return job->signals < 0 ? ps_fail_errno(err, errno, "no signalfd") : 0;
}

static int open_agents(struct job *job, struct ps_error *err)
{
    if (job->nodes.count == 1)
        return 0;
    struct cli_agents_config config = {.node = job->nodes.rank,
                                       .nodes = job->nodes.count,
                                       .ranks = job->local,
                                       .host = job->nodes.host,
                                       .port = job->nodes.port,
                                       .secret = job->nodes.secret,
                                       .heartbeat_s = job->settings->heartbeat};
    if (job->nodes.open_secret && job->nodes.rank == 0)
        say(job, "PARAMSYNC_JOB_SECRET is not set: whoever reaches %s:%d may take part", job->nodes.host,
            job->nodes.port);
    return cli_agents_open(&config, &job->agents, err);
}

/* ---- an attempt ---- */

static int free_port(const struct job *job)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t size = sizeof address;
    if (job->settings->master_port)
        return (int)job->settings->master_port;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), port = 29500;
    if (fd >= 0 && bind(fd, (const struct sockaddr *)&address, size) == 0 &&
        getsockname(fd, (struct sockaddr *)&address, &size) == 0)
        port = ntohs(address.sin_port);
    if (fd >= 0)
        close(fd);
    return port;
}

static void add(struct cli_pair *pairs, size_t *count, const char *name, const char *value)
{
    snprintf(pairs[*count].name, sizeof pairs[*count].name, "%s", name);
    pairs[(*count)++].value = value;
}

static int start_ranks(struct job *job, int first_rank, int world_size, int port, struct ps_error *err)
{
    struct cli_pair pairs[ENVIRONMENT_MAX];
    size_t count = 0;
    char text[96], heading[128], now[40];
    snprintf(text, sizeof text, "ranks|%s|%d", job->session, job->attempt);
    if (cli_mac(job->nodes.secret, text, job->ranks_secret))
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    snprintf(job->master_port, sizeof job->master_port, "%d", port);
    snprintf(job->restarts_text, sizeof job->restarts_text, "%d", job->attempt);
    snprintf(job->most_text, sizeof job->most_text, "%d", (int)job->settings->max_restarts);
    snprintf(job->nodes_text, sizeof job->nodes_text, "%d", job->nodes.count);
    memcpy(job->training, job->session, sizeof job->training);
    add(pairs, &count, "MASTER_ADDR", job->nodes.count > 1 ? job->nodes.host : "127.0.0.1");
    add(pairs, &count, "MASTER_PORT", job->master_port);
    add(pairs, &count, "GROUP_WORLD_SIZE", job->nodes_text);
    add(pairs, &count, "ROLE_NAME", "default");
    add(pairs, &count, "TORCHELASTIC_RESTART_COUNT", job->restarts_text);
    add(pairs, &count, "TORCHELASTIC_MAX_RESTARTS", job->most_text);
    add(pairs, &count, "TORCHELASTIC_RUN_ID", job->session);
    add(pairs, &count, "TORCHELASTIC_USE_AGENT_STORE", "False"); /* rank 0 listens on MASTER_PORT itself */
    add(pairs, &count, "PARAMSYNC_JOB_SECRET", job->ranks_secret);
    add(pairs, &count, "PARAMSYNC_TRAINING", job->training);
    /* none: nor the one that this program's environment names */
    add(pairs, &count, "PARAMSYNC_SIDECAR", job->sidecar_address[0] ? job->sidecar_address : NULL);
    if (job->token[0])
        add(pairs, &count, "PARAMSYNC_TOKEN", job->token);
    if (job->settings->run)
        add(pairs, &count, "PARAMSYNC_RUN", job->settings->run);
    add(pairs, &count, "PARAMSYNC_RUN_AGAIN", job->run_again[0] ? job->run_again : NULL);
    ps_format_utc(ps_wall_ns(), now, sizeof now);
    snprintf(heading, sizeof heading, "== attempt %d, %s\n", job->attempt, now);
    const struct launch_settings *s = job->settings;
    struct cli_workers_config config = {.command = job->command,
                                        .count = job->local,
                                        .first_rank = first_rank,
                                        .world_size = world_size,
                                        .node = job->nodes.rank,
                                        .environment = pairs,
                                        .environment_count = count,
                                        .topology = &job->topology,
                                        .bind = s->bind,
                                        .prefix = strcmp(s->prefix, "rank") == 0 ||
                                                  (strcmp(s->prefix, "auto") == 0 && job->local > 1),
                                        .log_dir = s->log_dir,
                                        .heading = heading,
                                        .out = &job->out,
                                        .err = &job->err};
    int code = cli_workers_start(&config, &job->workers, err);
    if (code)
        return code;
    say(job, "attempt %d: ranks %d to %d of %d%s", job->attempt, first_rank, first_rank + job->local - 1,
        world_size, job->attempt ? ", started again" : "");
    job->state = RUNNING;
    job->failure = (struct failure){0};
    job->lines[0] = '\0';
    job->reported_end = job->termed = false;
    return 0;
}

/* The job ends: with this status, here and everywhere. */
static void finish(struct job *job, int status, const char *text)
{
    if (job->over)
        return;
    job->over = true;
    job->status = status;
    if (job->agents && job->nodes.rank == 0) {
        for (int node = 1; node < job->nodes.count; node++)
            cli_agents_send(job->agents, node, "END %d %s", status, *text ? text : "-");
        cli_agents_drain(job->agents, 2);
    }
}

/* Local ranks are to end. gently: they may have reasons of their own to tell. */
static void end_ranks(struct job *job, bool gently)
{
    if (job->state != RUNNING)
        return;
    double now = ps_monotonic_s();
    job->state = ENDING;
    job->term_at_s = gently ? now + notice_s : now;
    job->kill_at_s = job->term_at_s + job->settings->grace;
}

static void describe(const struct failure *f, char *text, size_t size)
{
    int used = snprintf(text, size, "rank %d", f->rank);
    if (f->rank < 0)
        snprintf(text, size, "%s", f->text);
    else if (f->status > 128)
        snprintf(text + used, size - (size_t)used, " (node %d) was killed by signal %d (%s)", f->node,
                 f->status - 128, strsignal(f->status - 128));
    else
        snprintf(text + used, size - (size_t)used, " (node %d) exited with status %d", f->node, f->status);
}

/* Node 0 and single nodes: the earliest failure is the cause; of two that come together the death by a
 * signal. */
static void count_failure(struct job *job, const struct failure *f)
{
    struct failure *known = &job->failure;
    bool earlier = f->at_s < known->at_s - 0.2,
         violent = f->at_s < known->at_s + 0.2 && f->rank >= 0 && f->status > 128 && known->status <= 128;
    if (!known->known || earlier || violent)
        *known = *f;
    known->known = true;
    if (job->state != RUNNING)
        return;
    for (int node = 1; node < job->nodes.count; node++)
        cli_agents_send(job->agents, node, "STOP %d", job->attempt);
    end_ranks(job, true);
}

/* Node 0: every node is there. */
static int start_all(struct job *job, struct ps_error *err)
{
    int world_size = 0, first = 0, port = free_port(job);
    for (int node = 0; node < job->nodes.count; node++)
        world_size += job->member_ranks[node];
    if (world_size > PS_WORLD_MAX)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%d ranks in all: at most %d", world_size, PS_WORLD_MAX);
    for (int node = 0; node < job->nodes.count; node++) {
        if (node)
            cli_agents_send(job->agents, node, "START %d %d %d %d %s %s", job->attempt, first, world_size,
                            port, job->session, job->sidecar_address[0] ? job->sidecar_address : "-");
        job->members[node] = BUSY;
        first += job->member_ranks[node];
    }
    return start_ranks(job, 0, world_size, port, err);
}

static void wait_for_nodes(struct job *job)
{
    job->state = WAITING;
    job->wait_until_s = ps_monotonic_s() + job->settings->join_timeout;
    for (int node = 0; job->nodes.rank == 0 && node < job->nodes.count; node++)
        job->members[node] = node == 0 || cli_agents_there(job->agents, node) ? READY : ABSENT;
}

/* ---- what the sidecar is told: why an attempt ended, which a killed rank 0 cannot say itself ---- */

static bool is_ours(const struct job *job, const struct paramsync_run *run, const char *name)
{
    if (run->state == PARAMSYNC_RUN_FINISHED)
        return false;
    /* Another machine's clock may stand behind the sidecar's data a little. */
    const int64_t start = job->started_ns - 2 * PS_NS_PER_S;
    bool since = run->created_ns >= start;
    if (job->run_again[0])
        return strcmp(run->name, job->run_again) == 0;
    if (!name)
        return job->own_sidecar && since;
    size_t length = strlen(name);
    if (strcmp(run->name, name) == 0) /* or went on in this job */
        return since || run->state == PARAMSYNC_RUN_RUNNING || run->ended_ns >= start;
    return since && strncmp(run->name, name, length) == 0 && run->name[length] == '-' &&
           run->name[length + 1] &&
           strspn(run->name + length + 1, "0123456789") == strlen(run->name + length + 1);
}

static void report_attempt(struct job *job, const char *reason)
{
    if (!job->sidecar_address[0] || job->nodes.rank)
        return;
    const char *name = command_flag(job, "run");
    if (!name)
        name = job->settings->run;
    const struct cli_common *c = &job->settings->common;
    struct paramsync_options options = {.address =
                                            job->own_sidecar ? job->sidecar.grpc : job->sidecar_address,
                                        .token = job->token[0] ? job->token : NULL,
                                        .token_file = c->token_file,
                                        .tls_ca = c->tls_ca,
                                        .tls_cert = c->tls_cert,
                                        .tls_key = c->tls_key,
                                        .timeout_s = 2};
    struct paramsync_client *client = NULL;
    struct paramsync_runs *runs = NULL;
    struct paramsync_error err = {0};
    const struct paramsync_run *run = NULL;
    if (paramsync_connect(&options, &client, &err) == 0 &&
        paramsync_list_runs(client, name ? name : "", 0, &runs, &err) == 0) {
        for (size_t i = 0; i < runs->count && !run; i++) /* the newest first */
            run = is_ours(job, &runs->runs[i], name) ? &runs->runs[i] : NULL;
        if (run)
            snprintf(job->run_again, sizeof job->run_again, "%s", run->name);
        if (run)
            (void)paramsync_finish_run(client, run->id, run->attempt,
                                       job->interrupted ? PARAMSYNC_RUN_KILLED : PARAMSYNC_RUN_FAILED, reason,
                                       run->elapsed_s, &err);
    }
    if (err.code)
        say(job, "the sidecar was not told of it: %s", err.message);
    paramsync_runs_free(runs);
    paramsync_disconnect(client);
}

/* ---- the end of an attempt ---- */

static void show_failure(struct job *job, const char *text)
{
    say(job, "attempt %d has failed: %s", job->attempt, text);
    if (!job->lines[0])
        return;
    ps_buf_puts(&job->err.waiting, "-- its last lines:\n");
    ps_buf_puts(&job->err.waiting, job->lines);
    ps_buf_puts(&job->err.waiting, "--\n");
    cli_output_flush(&job->err, false);
}

/* A wrong flag is as wrong the next time. */
static bool is_usage_error(const struct job *job)
{
    const char *slash = strrchr(job->command[0], '/');
    return job->failure.status == 2 && strcmp(slash ? slash + 1 : job->command[0], "paramsync-train") == 0;
}

/* Node 0 and single nodes: no rank lives on any node that can be reached. */
static void decide(struct job *job)
{
    char text[CLI_LINE_MAX];
    describe(&job->failure, text, sizeof text);
    if (job->interrupted) {
        snprintf(text, sizeof text, "ended by signal %d (%s)", job->interrupted, strsignal(job->interrupted));
        say(job, "%s", text);
        report_attempt(job, text);
        finish(job, 128 + job->interrupted, text);
        return;
    }
    show_failure(job, text);
    report_attempt(job, text);
    if (job->restarts >= job->settings->max_restarts || is_usage_error(job)) {
        finish(job, job->failure.status, text);
        return;
    }
    job->restarts++;
    job->attempt++;
    say(job, "restart %d of %d", job->restarts, (int)job->settings->max_restarts);
    wait_for_nodes(job);
}

static bool all_are(const struct job *job, enum member wanted)
{
    for (int node = 0; node < job->nodes.count; node++)
        if (job->members[node] != wanted)
            return false;
    return true;
}

/* Node 0: whether some node has ranks that may live. */
static bool some_are_busy(const struct job *job)
{
    for (int node = 1; node < job->nodes.count; node++)
        if (job->members[node] == BUSY || job->members[node] == DONE)
            return true;
    return false;
}

static void take_local_failure(struct job *job)
{
    struct cli_failure f;
    if (job->reported_end || !cli_workers_failure(job->workers, &f))
        return;
    job->reported_end = true;
    struct failure failure = {
        .known = true, .node = job->nodes.rank, .rank = f.rank, .status = f.status, .at_s = f.at_s};
    cli_workers_read(job->workers);
    snprintf(job->lines, sizeof job->lines, "%s", cli_workers_last_lines(job->workers, f.rank));
    if (job->nodes.rank == 0) {
        count_failure(job, &failure);
        return;
    }
    describe(&failure, failure.text, sizeof failure.text);
    cli_agents_send(job->agents, 0, "FAILED %d %d %d %d %s", job->attempt,
                    (int)((ps_monotonic_s() - f.at_s) * 1000), f.rank, f.status, failure.text);
    job->failure = failure;
    end_ranks(job, true);
}

/* No local rank lives. */
static void settle(struct job *job)
{
    cli_workers_sweep(job->workers);
    if (job->state == RUNNING) { /* all by themselves, and none failed */
        if (job->reported_end)
            return;
        job->reported_end = true;
        if (job->nodes.rank)
            cli_agents_send(job->agents, 0, "DONE %d", job->attempt);
        else
            job->members[0] = DONE;
        return;
    }
    if (job->state != ENDING)
        return;
    job->state = SETTLED;
    job->workers = cli_workers_free(job->workers);
    if (!job->nodes.rank)
        return;
    if (job->failure.known)
        show_failure(job, job->failure.text);
    cli_agents_send(job->agents, 0, "STOPPED %d", job->attempt);
    wait_for_nodes(job);
    if (job->interrupted && !cli_agents_there(job->agents, 0))
        finish(job, 128 + job->interrupted, "");
}

/* ---- what happens ---- */

static void interrupt(struct job *job, int number)
{
    bool again = job->interrupted != 0;
    job->interrupted = number;
    if (again && job->workers) { /* who asks twice does not want to wait */
        cli_workers_signal(job->workers, SIGKILL, true);
        return;
    }
    say(job, "signal %d (%s): all ranks are to end", number, strsignal(number));
    if (job->nodes.rank)
        cli_agents_send(job->agents, 0, "INTERRUPTED %d", number);
    else
        for (int node = 1; node < job->nodes.count; node++)
            cli_agents_send(job->agents, node, "STOP %d", job->attempt);
    if (job->state == RUNNING && cli_workers_alive(job->workers)) {
        cli_workers_signal(job->workers, number, true);
        end_ranks(job, true); /* SIGTERM follows where the first signal was another and was not enough */
        job->kill_at_s = ps_monotonic_s() + job->settings->grace;
    } else if (job->state == RUNNING) {
        end_ranks(job, false);
    } else if (job->state == WAITING && (job->nodes.rank == 0 || !cli_agents_there(job->agents, 0))) {
        finish(job, 128 + number, "interrupted");
    }
}

static void reap(struct job *job)
{
    for (;;) {
        siginfo_t info = {0};
        if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) < 0 || !info.si_pid)
            return;
        if (cli_workers_reap(job->workers, info.si_pid))
            continue;
        waitpid(info.si_pid, NULL, WNOHANG); /* the sidecar, or an orphan of a rank */
        if (job->sidecar.pid == info.si_pid) {
            job->sidecar.pid = 0;
            close(job->sidecar.pipe);
            say(job, "the sidecar has ended; the training goes on without it");
        }
    }
}

static void take_signals(struct job *job)
{
    struct signalfd_siginfo info;
    while (read(job->signals, &info, sizeof info) == (ssize_t)sizeof info) {
        int number = (int)info.ssi_signo;
        if (number == SIGUSR1 || number == SIGUSR2)
            cli_workers_signal(job->workers, number, false);
        else if (number != SIGCHLD)
            interrupt(job, number);
    }
    reap(job);
}

static void take_lost(struct job *job, const struct cli_agent_event *e)
{
    if (job->nodes.rank) {
        say(job, "node 0 is lost (%s): the ranks here are ended; it is looked for for %.0f s", e->text,
            job->settings->join_timeout);
        job->wait_until_s = ps_monotonic_s() + job->settings->join_timeout;
        end_ranks(job, false);
        return;
    }
    say(job, "node %d is lost (%s)", e->node, e->text);
    enum member was = job->members[e->node];
    job->members[e->node] = ABSENT;
    if (job->state == RUNNING && (was == BUSY || was == DONE)) {
        struct failure f = {
            .known = true, .node = e->node, .rank = -1, .status = 1, .at_s = ps_monotonic_s()};
        snprintf(f.text, sizeof f.text, "node %d is lost (%.200s)", e->node, e->text);
        count_failure(job, &f);
    }
}

static int take_event(struct job *job, const struct cli_agent_event *e, struct ps_error *err)
{
    struct failure f = {
        .known = true, .node = e->node, .rank = e->rank, .status = e->status, .at_s = e->at_s};
    bool current = e->attempt == job->attempt;
    switch (e->type) {
    case CLI_AGENT_JOINED:
        if (job->nodes.rank) {
            say(job, "node 0 is there");
            return 0;
        }
        say(job, "node %d is there, with %d rank%s", e->node, e->ranks, e->ranks == 1 ? "" : "s");
        job->member_ranks[e->node] = e->ranks;
        job->members[e->node] = READY;
        if (e->attempt >= job->attempt && job->state == WAITING)
            job->attempt = e->attempt + 1; /* this launcher was started anew amid the job */
        return 0;
    case CLI_AGENT_LOST:
        take_lost(job, e);
        return 0;
    case CLI_AGENT_START:
        if (job->state != WAITING)
            return 0;
        job->attempt = e->attempt;
        memcpy(job->session, e->session, sizeof job->session);
        if (strcmp(e->sidecar, "-") != 0)
            snprintf(job->sidecar_address, sizeof job->sidecar_address, "%s", e->sidecar);
        return start_ranks(job, e->first_rank, e->world_size, e->master_port, err);
    case CLI_AGENT_FAILED:
        if (current && (job->state == RUNNING || job->state == ENDING || job->state == SETTLED))
            count_failure(job, &f);
        return 0;
    case CLI_AGENT_DONE:
        if (current && job->members[e->node] == BUSY)
            job->members[e->node] = DONE;
        return 0;
    case CLI_AGENT_STOP:
        end_ranks(job, true);
        return 0;
    case CLI_AGENT_STOPPED:
        if (current)
            job->members[e->node] = READY;
        return 0;
    case CLI_AGENT_INTERRUPTED:
        interrupt(job, e->status > 0 && e->status < NSIG ? e->status : SIGTERM);
        return 0;
    case CLI_AGENT_END:
        if (e->status)
            say(job, "the job has failed: %s", e->text);
        finish(job, e->status, "");
        return 0;
    case CLI_AGENT_REFUSED:
        return ps_fail(err, PS_FAILED_PRECONDITION, "node 0 refuses this node: %s", e->text);
    }
    return 0;
}

/* What time alone brings about. */
static int tick(struct job *job, struct ps_error *err)
{
    double now = ps_monotonic_s();
    take_local_failure(job);
    if (job->state == ENDING && now >= job->term_at_s && !job->termed) {
        job->termed = true;
        cli_workers_signal(job->workers, SIGTERM, true);
    }
    if (job->state == ENDING && now >= job->kill_at_s)
        cli_workers_signal(job->workers, SIGKILL, true);
    if (job->workers && !cli_workers_alive(job->workers))
        settle(job);
    if (job->over)
        return 0;
    if (job->nodes.rank == 0) {
        if (job->state == RUNNING && all_are(job, DONE)) {
            finish(job, 0, "");
        } else if (job->state == SETTLED && (!some_are_busy(job) || now > job->kill_at_s + 10)) {
            decide(job); /* a node that does not even answer STOP is as good as lost: it may come again */
        } else if (job->state == WAITING && all_are(job, READY)) {
            return start_all(job, err);
        }
    }
    if (job->state == WAITING && now > job->wait_until_s &&
        (job->nodes.rank == 0 || !cli_agents_there(job->agents, 0))) {
        int missing = 0;
        while (job->nodes.rank == 0 && missing < job->nodes.count - 1 && job->members[missing] == READY)
            missing++;
        char text[160];
        snprintf(text, sizeof text, "node %d has not come within %.0f s (--join-timeout)", missing,
                 job->settings->join_timeout);
        say(job, "%s", text);
        finish(job, 1, text);
    }
    return 0;
}

static int loop(struct job *job, struct ps_error *err)
{
    size_t most = 4 + 2 * (size_t)job->local + 20 + (size_t)job->nodes.count;
    struct pollfd *fds = calloc(most, sizeof *fds);
    if (!fds)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int code = 0;
    double beat = job->settings->heartbeat / 8 < 0.1 ? job->settings->heartbeat / 8 : 0.1;
    while (!code && !job->over) {
        size_t count = 0;
        fds[count++] = (struct pollfd){.fd = job->signals, .events = POLLIN};
        if (job->out.waiting.size)
            fds[count++] = (struct pollfd){.fd = job->out.fd, .events = POLLOUT};
        if (job->err.waiting.size)
            fds[count++] = (struct pollfd){.fd = job->err.fd, .events = POLLOUT};
        count += cli_workers_pollfds(job->workers, fds + count);
        count += cli_agents_pollfds(job->agents, fds + count);
        poll(fds, count, (int)(beat * 1000) + 1);
        cli_workers_read(job->workers);
        cli_output_flush(&job->out, false);
        cli_output_flush(&job->err, false);
        take_signals(job);
        cli_agents_step(job->agents);
        struct cli_agent_event event;
        while (job->agents && !code && !job->over && cli_agents_next(job->agents, &event))
            code = take_event(job, &event, err);
        if (!code && !job->over)
            code = tick(job, err);
    }
    free(fds);
    return code;
}

static int launch_main(struct job *job, struct ps_error *err)
{
    const struct launch_settings *s = job->settings;
    const struct ps_nodes_flags flags = {.count = s->nnodes, .rank = s->node_rank, .address = s->rdzv};
    cpu_set_t allowed;
    int code = ps_nodes_resolve(&flags, NULL, NULL, &job->nodes, err);
    if (code)
        return code;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed) < 0)
        return ps_fail_errno(err, errno, "the cores of this process are not known");
    cli_topology_read("", &allowed, getenv("CUDA_VISIBLE_DEVICES"), &job->topology);
    if (cli_nonce(job->session))
        return ps_fail_errno(err, errno, "no random numbers");
    if (job->nodes.count == 1) /* nobody else needs to know it */
        snprintf(job->nodes.secret, sizeof job->nodes.secret, "%s", job->session);
    job->members = calloc((size_t)job->nodes.count, sizeof *job->members);
    job->member_ranks = calloc((size_t)job->nodes.count, sizeof *job->member_ranks);
    if (!job->members || !job->member_ranks)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if ((code = count_local(job, err)) || (s->log_dir && (code = ps_make_dirs(s->log_dir, 0777, err))))
        return code;
    job->member_ranks[0] = job->local;
    /* What a rank leaves behind when it dies comes to us, and is waited for. */
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    if ((code = open_signals(job, err)) || (code = start_sidecar(job, err)) || (code = open_agents(job, err)))
        return code;
    if (job->nodes.count > 1)
        say(job, "node %d of %d (by %s), %d rank%s here; the launchers meet at %s:%d", job->nodes.rank,
            job->nodes.count, job->nodes.source, job->local, job->local == 1 ? "" : "s", job->nodes.host,
            job->nodes.port);
    wait_for_nodes(job);
    return loop(job, err);
}

int cli_launch(int argc, char **argv)
{
    struct launch_settings settings = {0};
    struct ps_error err = {0};
    int words;
    int code = cli_parse(&table_of_options, &settings.common, argc, argv, 1, -1, &words, &err);
    if (code > 0)
        return 0;
    if (code)
        return cli_complain("launch", &err);
    char **command = calloc((size_t)words + 1, sizeof *command);
    struct job *job = calloc(1, sizeof *job);
    if (!command || !job) {
        free(command);
        free(job);
        ps_fail(&err, PS_RESOURCE_EXHAUSTED, "out of memory");
        return cli_complain("launch", &err);
    }
    for (int i = 0; i < words; i++)
        command[i] = argv[1 + i];
    job->settings = &settings;
    job->command = command;
    job->signals = -1;
    job->started_ns = ps_wall_ns();
    job->out = (struct cli_output){
        .fd = STDOUT_FILENO, .colour = cli_colours(STDOUT_FILENO), .waiting = PS_BUF_INIT(16 << 20)};
    job->err = (struct cli_output){
        .fd = STDERR_FILENO, .colour = cli_colours(STDERR_FILENO), .waiting = PS_BUF_INIT(16 << 20)};
    code = launch_main(job, &err);
    if (code && job->agents && job->nodes.rank == 0)
        finish(job, ps_code_to_exit(code), err.message);
    job->workers = cli_workers_free(job->workers);
    cli_agents_free(job->agents);
    cli_sidecar_stop(&job->sidecar);
    cli_output_flush(&job->out, true);
    cli_output_flush(&job->err, true);
    int status = code ? cli_complain("launch", &err) : job->status;
    ps_buf_done(&job->out.waiting);
    ps_buf_done(&job->err.waiting);
    if (job->signals >= 0)
        close(job->signals);
    free(job->members);
    free(job->member_ranks);
    free(job);
    free(command);
    return status;
}
