/* SPDX-License-Identifier: Apache-2.0
 * paramsyncd: the sidecar. Starts everything, then waits for a signal; the main thread takes them all. */
#include "paramsync_version.h"
#include "services/base/clock.h"
#include "services/base/fs.h"
#include "services/base/log.h"
#include "services/base/text.h"
#include "services/sidecar/config.h"
#include "services/sidecar/http.h"
#include "services/sidecar/rpc_handlers.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct settings {
    const char *data_dir, *grpc_listen, *http_listen, *allow_host, *config;
    const char *tls_cert, *tls_key, *tls_ca, *token_file, *log_level;
    bool insecure, help, version;
    const char *register_root, *peer_rate;
    double peer_calls;
    double lost_after, grace, rollup_after;
    int64_t keep_last, keep_best;
};

#define AT(field) .offset = offsetof(struct settings, field)
static const struct ps_option rows[] = {
    {.name = "data-dir",
     .type = PS_TYPE_STRING,
     AT(data_dir),
     .value = "DIR",
     .help = "where the database and the checkpoints are kept; made if absent. On a local disk",
     .group = "Store"},
    {.name = "register-root",
     .type = PS_TYPE_STRING,
     AT(register_root),
     .value = "DIR",
     .help = "trainers on this machine may hand over checkpoints beneath this folder by their path, without "
             "a copy"},
    {.name = "grpc-listen",
     .type = PS_TYPE_STRING,
     AT(grpc_listen),
     .value = "ADDR:PORT",
     .fallback = "127.0.0.1:50051",
     .help = "where gRPC is served; port 0 takes a free one",
     .group = "Addresses"},
    {.name = "http-listen",
     .type = PS_TYPE_STRING,
     AT(http_listen),
     .value = "ADDR:PORT",
     .fallback = "127.0.0.1:8080",
     .help = "where the dashboard and the HTTP API are served; none: not at all"},
    {.name = "allow-host",
     .type = PS_TYPE_STRING,
     AT(allow_host),
     .value = "NAME,...",
     .help = "names that browsers may call the dashboard by, beside the address it listens on"},
    {.name = "tls-cert",
     .type = PS_TYPE_STRING,
     AT(tls_cert),
     .value = "FILE",
     .help = "certificate chain (PEM)",
     .group = "Access"},
    {.name = "tls-key",
     .type = PS_TYPE_STRING,
     AT(tls_key),
     .value = "FILE",
     .help = "its private key (PEM)"},
    {.name = "tls-ca",
     .type = PS_TYPE_STRING,
     AT(tls_ca),
     .value = "FILE",
     .help = "gRPC clients must show a certificate signed by one of these (PEM)"},
    {.name = "token-file",
     .type = PS_TYPE_STRING,
     AT(token_file),
     .value = "FILE",
     .help = "callers must show a token of this file: one a line, ROLE TOKEN with a role of read, write or "
             "admin; a first line without a role is an admin's. Instead of it, PARAMSYNC_TOKEN may hold one. "
             "SIGHUP reads this file and the three above again"},
    {.name = "peer-calls",
     .type = PS_TYPE_DOUBLE,
     AT(peer_calls),
     .value = "N",
     .fallback = "0",
     .min = 0,
     .max = 1e9,
     .help = "calls a second that one address may make; 0: no bound"},
    {.name = "peer-rate",
     .type = PS_TYPE_STRING,
     AT(peer_rate),
     .value = "BYTES",
     .fallback = "0",
     .help = "bytes a second of checkpoints to or from one address, 50M is 50 MiB; 0: no bound"},
    {.name = "insecure",
     .type = PS_TYPE_BOOL,
     AT(insecure),
     .fallback = "false",
     .help = "listen beyond this machine without TLS"},
    {.name = "keep-last",
     .type = PS_TYPE_INT,
     AT(keep_last),
     .value = "N",
     .fallback = "0",
     .min = 0,
     .max = 1000000,
     .help = "of each run keep the last N checkpoints (and the best) of a format; 0: all, unless --keep-best "
             "says "
             "otherwise",
     .group = "Retention"},
    {.name = "keep-best",
     .type = PS_TYPE_INT,
     AT(keep_best),
     .value = "M",
     .fallback = "0",
     .min = 0,
     .max = 1000000,
     .help =
         "and the M with the highest accuracy (and the last). One that is being pulled stays until it is"},
    {.name = "rollup-after",
     .type = PS_TYPE_DURATION,
     AT(rollup_after),
     .value = "TIME",
     .fallback = "0",
     .min = 0,
     .max = 1e10,
     .help = "thin out step points of runs that ended so long ago (30d) to what a coarse view shows of them; "
             "0: never"},
    {.name = "lost-after",
     .type = PS_TYPE_DURATION,
     AT(lost_after),
     .value = "TIME",
     .fallback = "20s",
     .min = 0.5,
     .max = 86400,
     .help = "a running run is taken for lost after this long without a sign of life",
     .group = "Behaviour"},
    {.name = "grace",
     .type = PS_TYPE_DURATION,
     AT(grace),
     .value = "TIME",
     .fallback = "10s",
     .min = 0,
     .max = 3600,
     .help = "how long running calls may go on after SIGTERM"},
    {.name = "log-level",
     .type = PS_TYPE_CHOICE,
     AT(log_level),
     .choices = "error|warning|notice|info|debug",
     .fallback = "notice",
     .help = "what is written to standard error"},
    {.name = "config",
     .type = PS_TYPE_STRING,
     AT(config),
     .value = "FILE",
     .help = "INI file with these options, NAME = VALUE; the command line wins"},
    {.name = "help",
     .short_name = "h",
     .type = PS_TYPE_BOOL,
     AT(help),
     .help = "show this and exit",
     .group = "Other"},
    {.name = "version", .type = PS_TYPE_BOOL, AT(version), .help = "show the version and exit"},
};
static unsigned char sources[PS_OPTIONS_COUNT(rows)];
static const struct ps_options table = {
    .program = "paramsyncd",
    .usage = "--data-dir DIR [OPTIONS]",
    .example = "paramsyncd --data-dir /var/lib/paramsync",
    .about = "Records training runs over gRPC, keeps their checkpoints and serves the dashboard.",
    .rows = rows,
    .count = PS_OPTIONS_COUNT(rows),
    .sources = sources,
};

/* ---- The janitor: looks for silent runs, and tells gRPC health how the store is ---- */

struct janitor {
    struct ps_service *service;
    struct ps_rpc_server *rpc;
    pthread_t thread;
    pthread_mutex_t lock; /* guards stopping */
    pthread_cond_t wake;
    bool stopping, started;
    double interval_s;
};

static void tell_health(struct janitor *janitor, bool *ready)
{
    struct ps_error err = {0};
    bool now = ps_service_ready(janitor->service, &err) == 0;
    if (now == *ready)
        return;
    *ready = now;
    ps_rpc_server_set_serving(janitor->rpc, NULL, now);
    if (now)
        ps_log_notice("the store takes writes again");
    else if (!janitor->service->draining)
        ps_log_error("the store takes no writes: %s", err.message);
}

static void *janitor_main(void *argument)
{
    struct janitor *janitor = argument;
    bool ready = true, swept = true;
    pthread_mutex_lock(&janitor->lock);
    while (!janitor->stopping) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        int64_t ns = until.tv_nsec + (int64_t)(janitor->interval_s * PS_NS_PER_S);
        until.tv_sec += ns / PS_NS_PER_S;
        until.tv_nsec = ns % PS_NS_PER_S;
        while (!janitor->stopping && pthread_cond_timedwait(&janitor->wake, &janitor->lock, &until) == 0)
            ;
        if (janitor->stopping)
            break;
        pthread_mutex_unlock(&janitor->lock);
        tell_health(janitor, &ready);
        struct ps_error err = {0};
        int code = ps_service_sweep(janitor->service, &err);
        if (code && swept) /* once, not every second */
            ps_log_warning("looking for lost runs: %s", err.message);
        swept = code == 0;
        bool more = false;
        if (!code && ps_service_roll_up(janitor->service, &more, &err))
            ps_log_debug("rolling up: %s", err.message);
        pthread_mutex_lock(&janitor->lock);
    }
    pthread_mutex_unlock(&janitor->lock);
    return NULL;
}

static int janitor_start(struct janitor *janitor, struct ps_service *service, struct ps_rpc_server *rpc,
                         double lost_after_s, struct ps_error *err)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&janitor->lock, NULL);
    pthread_cond_init(&janitor->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    janitor->service = service;
    janitor->rpc = rpc;
    janitor->interval_s = lost_after_s / 4 < 1 ? lost_after_s / 4 : 1;
    int result = pthread_create(&janitor->thread, NULL, janitor_main, janitor);
    if (result)
        return ps_fail_errno(err, result, "cannot start a thread");
    janitor->started = true;
    return 0;
}

static void janitor_stop(struct janitor *janitor)
{
    if (!janitor->started)
        return;
    pthread_mutex_lock(&janitor->lock);
    janitor->stopping = true;
    pthread_cond_signal(&janitor->wake);
    pthread_mutex_unlock(&janitor->lock);
    pthread_join(janitor->thread, NULL);
    pthread_mutex_destroy(&janitor->lock);
    pthread_cond_destroy(&janitor->wake);
    janitor->started = false;
}

/* ---- Settings ---- */

static int show_help(void)
{
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    int code = ps_options_help(&table, &out);
    if (!code)
        fwrite(out.data, 1, out.size, stdout);
    ps_buf_done(&out);
    return code || fflush(stdout) ? 1 : 0;
}

/* Command line over environment over file over defaults. */
static int read_settings(struct settings *settings, int argc, char **argv, struct ps_config_file **ret_file,
                         struct ps_error *err)
{
    int positional = 0;
    int code = ps_options_defaults(&table, settings, err);
    if (!code)
        code = ps_options_parse(&table, settings, argc, argv, &positional, false, NULL, err);
    if (!code && positional)
        code = ps_fail(err, PS_INVALID_ARGUMENT,
                       "unexpected argument %s: paramsyncd --help lists the options", argv[1]);
    if (code || settings->help || settings->version)
        return code;
    if (settings->config) {
        const char *config = settings->config;
        code = ps_config_read(&table, settings, config, ret_file, err);
        if (!code)
            code = ps_options_parse(&table, settings, argc, argv, &positional, false, NULL, err);
    }
    if (!code && (!settings->data_dir || !*settings->data_dir))
        code =
            ps_fail(err, PS_INVALID_ARGUMENT, "--data-dir is missing: name the folder that holds the store");
    if (!code && !settings->tls_cert != !settings->tls_key)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "--tls-cert and --tls-key go together");
    if (!code && settings->tls_ca && !settings->tls_cert)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "--tls-ca needs --tls-cert and --tls-key");
    if (!code)
        code = ps_check_listen("grpc-listen", settings->grpc_listen, settings->tls_cert, settings->insecure,
                               err);
    if (!code && strcmp(settings->http_listen, "none") != 0)
        code = ps_check_listen("http-listen", settings->http_listen, settings->tls_cert, settings->insecure,
                               err);
    return code;
}

/* ---- The program ---- */

struct program {
    struct settings settings;
    struct ps_config_file *file;
    char *token, *tls_cert, *tls_key, *tls_ca, *hosts; /* token: the text of the token file */
    double peer_bytes_per_s;
    struct ps_service *service;
    struct ps_rpc_server *rpc;
    struct ps_http *http;
    struct janitor janitor;
};

enum { TOKEN_FILE_MAX = 1 << 20 };

static int read_pem(const char *path, char **ret_text, struct ps_error *err)
{
    return path ? ps_read_file(path, 1 << 20, ret_text, NULL, err) : 0;
}

static void wipe(char **text)
{
    if (*text)
        explicit_bzero(*text, strlen(*text));
    free(*text);
    *text = NULL;
}

static int read_tokens(const char *path, char **ret_text, struct ps_error *err)
{
    struct ps_access *trial = ps_access_new();
    int code = trial ? ps_read_file(path, TOKEN_FILE_MAX, ret_text, NULL, err)
                     : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (!code)
        code = ps_access_load(trial, *ret_text, path, err);
    ps_access_free(trial);
    return code;
}

static int read_secrets(struct program *p, struct ps_error *err)
{
    int code = 0;
    const char *token = getenv("PARAMSYNC_TOKEN");
    if (p->settings.token_file)
        code = read_tokens(p->settings.token_file, &p->token, err);
    else if (token && *token && !(p->token = strdup(token)))
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (!code)
        code = read_pem(p->settings.tls_cert, &p->tls_cert, err);
    if (!code)
        code = read_pem(p->settings.tls_key, &p->tls_key, err);
    if (!code)
        code = read_pem(p->settings.tls_ca, &p->tls_ca, err);
    return code;
}

static int start_http(struct program *p, struct ps_error *err)
{
    enum { hosts_max = 32 };
    const char *hosts[hosts_max];
    size_t count = 0;
    if (p->settings.allow_host && !(p->hosts = strdup(p->settings.allow_host)))
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    char *rest = NULL;
    for (char *host = p->hosts ? strtok_r(p->hosts, ", ", &rest) : NULL; host;
         host = strtok_r(NULL, ", ", &rest)) {
        if (count == hosts_max)
            return ps_fail(err, PS_INVALID_ARGUMENT, "--allow-host: at most %d names", hosts_max);
        hosts[count++] = host;
    }
    struct ps_http_config http = {
        .service = p->service,
        .listen = p->settings.http_listen,
        .allowed_hosts = hosts,
        .allowed_host_count = count,
        .tls_cert = p->tls_cert,
        .tls_key = p->tls_key,
        .grpc_port = ps_rpc_server_port(p->rpc, 0),
    };
    return ps_http_start(&http, &p->http, err);
}

static int start(struct program *p, struct ps_error *err)
{
    struct ps_service_config service = {.data_dir = p->settings.data_dir,
                                        .token = p->token,
                                        .token_source = p->settings.token_file,
                                        .lost_after_s = p->settings.lost_after,
                                        .register_root = p->settings.register_root,
                                        .peer_calls_per_s = p->settings.peer_calls,
                                        .peer_bytes_per_s = p->peer_bytes_per_s,
                                        .keep_last = (uint32_t)p->settings.keep_last,
                                        .keep_best = (uint32_t)p->settings.keep_best,
                                        .roll_up_after_s = p->settings.rollup_after};
    int code = ps_service_open(&service, &p->service, err);
    if (code)
        return code;
    struct ps_rpc_server_config rpc = {
        .listen = &p->settings.grpc_listen,
        .listen_count = 1,
        .methods = ps_sidecar_methods,
        .method_count = ps_sidecar_method_count,
        .context = p->service,
        .intercept = ps_sidecar_intercept,
        .max_streams = 2048, /* ranks that wait for their rendezvous, watches, uploads */
        .workers = 16,       /* they mostly wait for the writer, which takes what waits together */
        .tls_cert = p->tls_cert,
        .tls_key = p->tls_key,
        .tls_ca = p->tls_ca,
    };
    code = ps_rpc_server_start(&rpc, &p->rpc, err);
    if (!code && strcmp(p->settings.http_listen, "none") != 0)
        code = start_http(p, err);
    if (!code)
        code = janitor_start(&p->janitor, p->service, p->rpc, p->settings.lost_after, err);
    return code;
}

/* "ADDR:PORT" with the port that was bound. */
static void print_address(const char *listen, int port)
{
    const char *colon = strrchr(listen, ':');
    if (port && colon)
        printf("%.*s:%d", (int)(colon - listen), listen, port);
    else
        printf("%s", listen);
}

static void announce(const struct program *p)
{
    printf("paramsyncd: ready: gRPC ");
    print_address(p->settings.grpc_listen, ps_rpc_server_port(p->rpc, 0));
    if (p->http) {
        printf(", HTTP ");
        print_address(p->settings.http_listen, ps_http_port(p->http));
    }
    printf(", store %s\n", p->settings.data_dir);
    fflush(stdout);
}

static void stop(struct program *p)
{
    if (p->service)
        p->service->draining = true;
    if (p->rpc)
        ps_rpc_server_stop(p->rpc, p->settings.grace);
    janitor_stop(&p->janitor);
    p->http = ps_http_free(p->http);
    p->rpc = ps_rpc_server_free(p->rpc);
    p->service = ps_service_free(p->service);
}

static void program_done(struct program *p)
{
    stop(p);
    ps_config_free(p->file);
    free(p->token);
    free(p->tls_cert);
    free(p->tls_key);
    free(p->tls_ca);
    free(p->hosts);
}

/* Reads the secrets again. All of them are looked at before any is taken; on a failure those before stay. */
static int reload(struct program *p, struct ps_error *err)
{
    struct program fresh = {.settings = p->settings};
    int code = read_secrets(&fresh, err);
    if (!code && p->settings.tls_cert)
        code = ps_rpc_server_reload_tls(p->rpc, fresh.tls_cert, fresh.tls_key, fresh.tls_ca, err);
    if (!code && p->settings.tls_cert && p->http)
        code = ps_http_reload_tls(p->http, fresh.tls_cert, fresh.tls_key, err);
    if (!code && p->settings.token_file)
        code = ps_access_load(p->service->access, fresh.token, p->settings.token_file, err);
    wipe(&fresh.token);
    wipe(&fresh.tls_key);
    free(fresh.tls_cert);
    free(fresh.tls_ca);
    return code;
}

/* What SIGHUP asks for; from a terminal that goes away it is no reason to stop recording. */
static void on_hangup(struct program *p)
{
    struct ps_error err = {0};
    if (!p->settings.token_file && !p->settings.tls_cert)
        return;
    if (reload(p, &err))
        ps_log_error("SIGHUP: %s; tokens and certificates stay as they are", err.message);
    else
        ps_log_notice("SIGHUP: tokens and certificates were read again");
}

static enum ps_log_level log_level(const char *name)
{
    static const char *const names[] = {"error", "warning", "notice", "info", "debug"};
    for (int i = 0; i < 5; i++)
        if (strcmp(names[i], name) == 0)
            return (enum ps_log_level)i;
    return PS_LOG_NOTICE;
}

int main(int argc, char **argv)
{
    static struct program program;
    struct ps_error err = {0};
    /* Before anything starts a thread, so that all inherit it. */
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    signal(SIGPIPE, SIG_IGN);

    int code = read_settings(&program.settings, argc, argv, &program.file, &err);
    if (!code && program.settings.help)
        return show_help();
    if (!code && program.settings.version) {
        printf("paramsyncd %s\n", PARAMSYNC_VERSION);
        return 0;
    }
    if (!code && ps_parse_bytes(program.settings.peer_rate, &program.peer_bytes_per_s))
        code = ps_fail(&err, PS_INVALID_ARGUMENT, "--peer-rate %.40s: must be bytes a second, such as 50M",
                       program.settings.peer_rate);
    if (!code)
        code = read_secrets(&program, &err);
    if (code) { /* what was asked for is wrong, whatever the system's reason */
        fprintf(stderr, "paramsyncd: %s\n", err.message);
        program_done(&program);
        return 2;
    }
    ps_log_threshold = log_level(program.settings.log_level);
    code = start(&program, &err);
    wipe(&program.token);
    if (code) {
        fprintf(stderr, "paramsyncd: %s\n", err.message);
        program_done(&program);
        return 1;
    }
    announce(&program);
    int number;
    for (;;) {
        if (sigwait(&signals, &number))
            number = SIGTERM;
        if (number != SIGHUP)
            break;
        on_hangup(&program);
    }
    ps_log_notice("stopping: %s", strsignal(number));
    program_done(&program);
    return 0;
}
