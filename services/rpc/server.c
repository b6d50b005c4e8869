/* SPDX-License-Identifier: Apache-2.0
 * A server's start, the acceptance of calls, its end. */
#include "services/rpc/server.h"

#include "services/base/log.h"
#include "services/base/pem.h"
#include "services/base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

extern const unsigned char ps_descriptor_set[];
extern const size_t ps_descriptor_set_size;

/* Requests posted per method and queue: that many calls may come in before the polling thread has posted the
 * next. */
enum { POSTED = 4, UNARY_QUEUE = 1024, BUILTIN_STREAMS = 64 };
/* Requests wait in memory while the workers are busy: this bounds it, whatever the size of a single one. */
enum { MAX_WAITING_BYTES = 64 << 20 };
static const double HANG_UP_S = 0.25;

/* ---- Accepting ---- */

static void accepted(struct ps_rpc_tag *tag, bool ok);

/* With the server's lock held. A request that cannot be posted for want of memory is left out: the others
 * remain. */
static void post(struct ps_rpc_registered *registered, struct ps_rpc_queue *queue)
{
    struct ps_rpc_server *server = registered->server;
    struct ps_rpc_call *call = ps_rpc_call_new(registered, queue);
    if (!call)
        return;
    atomic_store_explicit(&call->request_tag.fn, accepted, memory_order_release);
    grpc_call_error error;
    if (!registered->method)
        error = grpc_server_request_call(server->core, &call->core, &call->details, &call->metadata,
                                         queue->cq, queue->cq, &call->request_tag);
    else
        error = grpc_server_request_registered_call(
            server->core, registered->handle, &call->core, &call->deadline, &call->metadata,
            registered->method->kind == PS_RPC_UNARY || registered->method->kind == PS_RPC_SERVER_STREAM
                ? &call->payload
                : NULL,
            queue->cq, queue->cq, &call->request_tag);
    if (error == GRPC_CALL_OK) {
        server->posted++;
    } else {
        ps_log_debug("rpc: request not posted: %s", grpc_call_error_to_string(error));
        ps_rpc_call_free(call);
    }
}

static void refuse_unknown(struct ps_rpc_call *call)
{
    char *path = ps_rpc_slice_text(call->details.method);
    struct ps_error err = {0};
    ps_fail(&err, PS_UNIMPLEMENTED, "this server has no method %s", path ? path : "of that name");
    free(path);
    ps_rpc_call_finish(call, err.code, err.message);
}

/* A request alone passes at any size. */
static bool charge(struct ps_rpc_call *call)
{
    size_t size = call->payload ? grpc_byte_buffer_length(call->payload) : 0;
    size_t before = atomic_fetch_add(&call->server->payload_bytes, size);
    call->payload_size = size; /* given back when the call is freed */
    return before == 0 || before + size <= MAX_WAITING_BYTES;
}

static void accepted(struct ps_rpc_tag *tag, bool ok)
{
    struct ps_rpc_call *call = PS_RPC_OWNER(tag, struct ps_rpc_call, request_tag);
    struct ps_rpc_server *server = call->server;
    struct ps_rpc_registered *registered = (struct ps_rpc_registered *)call->registered;
    pthread_mutex_lock(&server->lock);
    server->posted--;
    if (!ok) { /* the server is shutting down; there is no call */
        ps_rpc_call_free(call);
        pthread_cond_broadcast(&server->idle);
        pthread_mutex_unlock(&server->lock);
        return;
    }
    if (!server->stopped)
        post(registered, call->queue);
    call->link = &server->calls;
    call->next = server->calls;
    if (call->next)
        call->next->link = &call->next;
    server->calls = call;
    server->call_count++;
    pthread_mutex_unlock(&server->lock);

    ps_rpc_call_begin(call);
    if (!registered->method) {
        refuse_unknown(call);
        return;
    }
    call->job.run = ps_rpc_call_run;
    if (!charge(call) || !ps_rpc_pool_submit(registered->pool, &call->job))
        ps_rpc_call_finish(call, PS_RESOURCE_EXHAUSTED,
                           "the server is busy with as many calls as it may take; try later");
}

void ps_rpc_server_forget(struct ps_rpc_call *call)
{
    struct ps_rpc_server *server = call->server;
    pthread_mutex_lock(&server->lock);
    *call->link = call->next;
    if (call->next)
        call->next->link = call->link;
    pthread_mutex_unlock(&server->lock);
    atomic_fetch_sub(&server->payload_bytes, call->payload_size);
    ps_rpc_call_free(call);
    pthread_mutex_lock(&server->lock);
    server->call_count--;
    pthread_cond_broadcast(&server->idle);
    pthread_mutex_unlock(&server->lock);
}

/* ---- Listening ---- */

static int lock_socket(const char *path, int *ret_fd, struct ps_error *err)
{
    struct sockaddr_un address;
    if (!*path || strlen(path) >= sizeof address.sun_path)
        return ps_fail(err, PS_INVALID_ARGUMENT, "unix:%s: a socket's path has 1 to %zu bytes", path,
                       sizeof address.sun_path - 1);
    char name[sizeof address.sun_path + 8];
    snprintf(name, sizeof name, "%s.lock", path);
    int fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return ps_fail_errno(err, errno, "cannot open %s", name);
    if (flock(fd, LOCK_EX | LOCK_NB)) {
        int errnum = errno;
        close(fd);
        if (errnum == EWOULDBLOCK)
            return ps_fail(err, PS_UNAVAILABLE,
                           "another server listens on unix:%s; stop it or choose another path", path);
        return ps_fail_errno(err, errnum, "cannot lock %s", name);
    }
    *ret_fd = fd;
    return 0;
}

/* The core says only that it could not bind: find out why. */
static int explain_bind(const char *listen_on, const char *host, int port, struct ps_error *err)
{
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *list;
    int status = getaddrinfo(*host ? host : NULL, service, &hints, &list);
    if (status)
        return ps_fail(err, PS_INVALID_ARGUMENT, "cannot listen on %s: %s", listen_on, gai_strerror(status));
    int errnum = 0;
    for (struct addrinfo *at = list; at && !errnum; at = at->ai_next) {
        int fd = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol), one = 1;
        if (fd < 0)
            continue;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(fd, at->ai_addr, at->ai_addrlen) || listen(fd, 1))
            errnum = errno;
        close(fd);
    }
    freeaddrinfo(list);
    if (errnum)
        return ps_fail_errno(err, errnum, "cannot listen on %s", listen_on);
    return ps_fail(err, PS_UNAVAILABLE, "cannot listen on %s", listen_on);
}

static int add_listener(struct ps_rpc_server *server, size_t index, const char *listen_on,
                        grpc_server_credentials *credentials, struct ps_error *err)
{
    if (!strncmp(listen_on, "unix:", 5)) {
        int code = lock_socket(listen_on + 5, &server->lock_fds[index], err);
        if (code < 0)
            return code;
        if (!grpc_server_add_http2_port(server->core, listen_on, credentials))
            return ps_fail(err, PS_UNAVAILABLE,
                           "cannot listen on %s: its folder must exist and be writable, and what "
                           "stands at the path must be a socket",
                           listen_on);
        return 0;
    }
    char host[256], address[300];
    int port;
    int code = ps_parse_host_port(listen_on, host, sizeof host, &port, err);
    if (code < 0)
        return code;
    bool v6 = strchr(host, ':') != NULL;
    snprintf(address, sizeof address, "%s%s%s:%d", v6 || !*host ? "[" : "",
             *host ? host : "::", v6 || !*host ? "]" : "", port);
    server->ports[index] = grpc_server_add_http2_port(server->core, address, credentials);
    return server->ports[index] ? 0 : explain_bind(listen_on, host, port, err);
}

/* What handshakes are made with. */
struct ps_rpc_server_tls {
    pthread_mutex_t lock;  /* guards everything here */
    char *cert, *key, *ca; /* PEM; ca NULL: clients need no certificate */
    uint64_t generation, given;
    bool shared; /* by several listeners, each of which has to be given what changed */
};

static void tls_free(struct ps_rpc_server_tls *tls)
{
    if (!tls)
        return;
    pthread_mutex_destroy(&tls->lock);
    free(tls->cert);
    free(tls->key);
    free(tls->ca);
    free(tls);
}

/* Asked by the core at the start of each handshake. */
static grpc_ssl_certificate_config_reload_status fetch_certificate(void *context,
                                                                   grpc_ssl_server_certificate_config **ret)
{
    struct ps_rpc_server_tls *tls = context;
    pthread_mutex_lock(&tls->lock);
    bool stale = tls->shared || tls->given != tls->generation;
    if (stale) {
        grpc_ssl_pem_key_cert_pair pair = {.private_key = tls->key, .cert_chain = tls->cert};
        /* gRPC 1.51 wants roots here also where no client is asked for a certificate: any text that parses.
         */
        *ret = grpc_ssl_server_certificate_config_create(tls->ca ? tls->ca : tls->cert, &pair, 1);
        tls->given = tls->generation;
    }
    pthread_mutex_unlock(&tls->lock);
    return stale ? GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW : GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
}

int ps_rpc_server_reload_tls(struct ps_rpc_server *server, const char *cert, const char *key, const char *ca,
                             struct ps_error *err)
{
    struct ps_rpc_server_tls *tls = server->tls;
    if (!tls)
        return ps_fail(err, PS_FAILED_PRECONDITION, "the server was started without TLS");
    if (!cert || !key)
        return ps_fail(err, PS_INVALID_ARGUMENT, "TLS needs both a certificate and its private key");
    if (!ca != !tls->ca) /* whether a client is asked for one is settled when the port is opened */
        return ps_fail(err, PS_FAILED_PRECONDITION,
                       "whether clients need certificates can only change with a restart");
    int code = ps_check_pem(cert, key, ca, err);
    if (code < 0)
        return code;
    char *texts[3] = {strdup(cert), strdup(key), ca ? strdup(ca) : NULL};
    if (!texts[0] || !texts[1] || (ca && !texts[2])) {
        for (int i = 0; i < 3; i++)
            free(texts[i]);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    pthread_mutex_lock(&tls->lock);
    char *old[3] = {tls->cert, tls->key, tls->ca};
    tls->cert = texts[0];
    tls->key = texts[1];
    tls->ca = texts[2];
    tls->generation++;
    pthread_mutex_unlock(&tls->lock);
    for (int i = 0; i < 3; i++)
        free(old[i]);
    return 0;
}

static int make_credentials(struct ps_rpc_server *server, const struct ps_rpc_server_config *config,
                            grpc_server_credentials **ret, struct ps_error *err)
{
    if (!config->tls_cert && !config->tls_key && !config->tls_ca) {
        *ret = grpc_insecure_server_credentials_create();
        return 0;
    }
    if (!config->tls_cert || !config->tls_key)
        return ps_fail(err, PS_INVALID_ARGUMENT, "TLS needs both a certificate and its private key");
    /* The library takes any text here and fails later without a reason. */
    int code = ps_check_pem(config->tls_cert, config->tls_key, config->tls_ca, err);
    if (code < 0)
        return code;
    struct ps_rpc_server_tls *tls = calloc(1, sizeof *tls);
    if (!tls)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    pthread_mutex_init(&tls->lock, NULL);
    server->tls = tls;
    tls->cert = strdup(config->tls_cert);
    tls->key = strdup(config->tls_key);
    tls->ca = config->tls_ca ? strdup(config->tls_ca) : NULL;
    tls->generation = 1;
    tls->shared = config->listen_count > 1;
    if (!tls->cert || !tls->key || (config->tls_ca && !tls->ca))
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    *ret = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(
            config->tls_ca ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                           : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
            fetch_certificate, tls));
    return *ret ? 0 : ps_fail(err, PS_INVALID_ARGUMENT, "the TLS certificate and key cannot be used");
}

/* ---- Start ---- */

static grpc_arg int_arg(const char *key, double value)
{
    return (grpc_arg){
        .type = GRPC_ARG_INTEGER, .key = (char *)key, .value.integer = (int)fmin(value, 0x7fffffff)};
}

static void create_core(struct ps_rpc_server *server, const struct ps_rpc_server_config *config)
{
    double keepalive_s = config->keepalive_s > 0 ? config->keepalive_s : 30;
    size_t receive = config->max_receive_bytes ? config->max_receive_bytes : PS_RPC_DEFAULT_RECEIVE_BYTES;
    grpc_arg args[] = {
        int_arg(GRPC_ARG_ALLOW_REUSEPORT,
                0), /* else a second server shares the port and takes half of the calls */
        int_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, (double)receive),
        int_arg(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, -1),
        int_arg(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive_s * 1e3),
        int_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, fmin(10, keepalive_s) * 1e3),
        int_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        int_arg(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        /* Per connection: far above what one client needs, far below what fills the memory. */
        int_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS, 2048),
        int_arg(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 20000),
        int_arg(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, fmin(5, keepalive_s / 2) * 1e3),
    };
    grpc_channel_args list = {.num_args = sizeof args / sizeof *args, .args = args};
    server->core = grpc_server_create(&list, NULL);
}

static int register_methods(struct ps_rpc_server *server, const struct ps_rpc_method *methods, size_t count,
                            struct ps_rpc_pool *unary, struct ps_rpc_pool *streams, void *context, bool open,
                            struct ps_error *err)
{
    for (size_t i = 0; i < count; i++) {
        bool one_request = methods[i].kind == PS_RPC_UNARY || methods[i].kind == PS_RPC_SERVER_STREAM;
        struct ps_rpc_registered *registered = &server->methods[server->method_count];
        *registered = (struct ps_rpc_registered){
            .server = server,
            .method = &methods[i],
            .handle = grpc_server_register_method(
                server->core, methods[i].path, NULL,
                one_request ? GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER : GRPC_SRM_PAYLOAD_NONE, 0),
            .context = context,
            .pool = methods[i].kind == PS_RPC_UNARY && !methods[i].waits ? unary : streams,
            .open = open,
        };
        if (!registered->handle)
            return ps_fail(err, PS_INVALID_ARGUMENT, "method table: %s stands there twice", methods[i].path);
        server->method_count++;
    }
    return 0;
}

static int prepare_services(struct ps_rpc_server *server, const struct ps_rpc_server_config *config,
                            struct ps_error *err)
{
    const unsigned char *set = config->descriptor_set ? config->descriptor_set : ps_descriptor_set;
    size_t set_size = config->descriptor_set ? config->descriptor_set_size : ps_descriptor_set_size;
    int code = ps_rpc_descriptors_read(set, set_size, &server->descriptors, err);
    if (code == 0)
        code = ps_rpc_descriptors_check(server->descriptors, config->methods, config->method_count, err);
    size_t workers = config->workers > 0 ? (size_t)config->workers : 4;
    size_t max_streams = config->max_streams > 0 ? (size_t)config->max_streams : 512;
    if (code == 0)
        code = ps_rpc_pool_init(&server->unary, "rpc-unary", workers, UNARY_QUEUE, err);
    if (code == 0)
        code = ps_rpc_pool_init(&server->streams, "rpc-stream", max_streams, 0, err);
    /* Health must answer while every other thread is busy: it has threads of its own. */
    if (code == 0)
        code = ps_rpc_pool_init(&server->builtin, "rpc-health", 1, UNARY_QUEUE, err);
    if (code == 0)
        code = ps_rpc_pool_init(&server->builtin_streams, "rpc-watch", BUILTIN_STREAMS, 0, err);
    server->methods = calloc(config->method_count + 5, sizeof *server->methods);
    if (code == 0 && !server->methods)
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (code == 0)
        code = ps_rpc_health_init(&server->health, config->methods, config->method_count, err);
    if (code == 0)
        code = register_methods(server, config->methods, config->method_count, &server->unary,
                                &server->streams, config->context, false, err);
    if (code == 0)
        code = register_methods(server, ps_rpc_health_methods, 2, &server->builtin, &server->builtin_streams,
                                &server->health, true, err);
    if (code == 0 && !config->no_reflection) {
        code = register_methods(server, ps_rpc_reflection_methods, 2, &server->builtin,
                                &server->builtin_streams, &server->reflection, false, err);
        if (code == 0)
            code = ps_rpc_reflection_init(&server->reflection, server->descriptors, server->methods,
                                          server->method_count, err);
    }
    if (code == 0) /* the catch-all: without it, calls of unknown methods hang until their deadline */
        server->methods[server->method_count++] = (struct ps_rpc_registered){.server = server};
    return code;
}

static int listen_all(struct ps_rpc_server *server, const struct ps_rpc_server_config *config,
                      struct ps_error *err)
{
    server->ports = calloc(config->listen_count + 1, sizeof *server->ports);
    server->lock_fds = malloc((config->listen_count + 1) * sizeof *server->lock_fds);
    if (!server->ports || !server->lock_fds)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    server->listen_count = config->listen_count;
    for (size_t i = 0; i < config->listen_count; i++)
        server->lock_fds[i] = -1;
    grpc_server_credentials *credentials;
    int code = make_credentials(server, config, &credentials, err);
    if (code < 0)
        return code;
    for (size_t i = 0; i < config->listen_count && code == 0; i++)
        code = add_listener(server, i, config->listen[i], credentials, err);
    grpc_server_credentials_release(credentials);
    return code;
}

int ps_rpc_server_start(const struct ps_rpc_server_config *config, struct ps_rpc_server **ret,
                        struct ps_error *err)
{
    struct ps_rpc_server *server = calloc(1, sizeof *server);
    if (!server)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    pthread_mutex_init(&server->lock, NULL);
    ps_rpc_cond_init(&server->idle);
    pthread_mutex_init(&server->health.lock, NULL);
    server->intercept = config->intercept;
    server->context = config->context;
    sigset_t signals;
    ps_rpc_block_signals(&signals);
    ps_rpc_core_up();
    int code = 0;
    for (int i = 0; i < PS_RPC_QUEUES && code == 0; i++)
        code = ps_rpc_queue_start(&server->queues[i], "rpc-queue", err);
    if (code == 0) {
        create_core(server, config);
        for (int i = 0; i < PS_RPC_QUEUES; i++)
            grpc_server_register_completion_queue(server->core, server->queues[i].cq, NULL);
        code = prepare_services(server, config, err);
    }
    if (code == 0)
        code = listen_all(server, config, err);
    if (code < 0) {
        ps_rpc_server_free(server);
        ps_rpc_restore_signals(&signals);
        return code;
    }
    grpc_server_start(server->core);
    pthread_mutex_lock(&server->lock);
    for (size_t i = 0; i < server->method_count; i++)
        for (int j = 0; j < PS_RPC_QUEUES * POSTED; j++)
            post(&server->methods[i], &server->queues[j % PS_RPC_QUEUES]);
    pthread_mutex_unlock(&server->lock);
    ps_rpc_restore_signals(&signals);
    ps_log_debug("rpc: gRPC core %s", grpc_version_string());
    *ret = server;
    return 0;
}

int ps_rpc_server_port(const struct ps_rpc_server *server, size_t listener)
{
    return listener < server->listen_count ? server->ports[listener] : 0;
}

void ps_rpc_server_set_serving(struct ps_rpc_server *server, const char *service, bool serving)
{
    ps_rpc_health_set(&server->health, service, serving);
}

/* ---- Stop ---- */

static void was_shut_down(struct ps_rpc_tag *tag, bool ok)
{
    (void)ok;
    struct ps_rpc_server *server = PS_RPC_OWNER(tag, struct ps_rpc_server, shutdown_tag);
    pthread_mutex_lock(&server->lock);
    server->shut_down = true;
    pthread_cond_broadcast(&server->idle);
    pthread_mutex_unlock(&server->lock);
}

static bool calls_over(const struct ps_rpc_server *server)
{
    return !server->call_count && !server->posted;
}

static bool all_over(const struct ps_rpc_server *server)
{
    return server->shut_down && calls_over(server);
}

/* With the lock held. False: until has passed before it was over. */
static bool wait_for(struct ps_rpc_server *server, bool (*over)(const struct ps_rpc_server *server),
                     const struct timespec *until)
{
    while (!over(server)) {
        if (!until)
            pthread_cond_wait(&server->idle, &server->lock);
        else if (pthread_cond_timedwait(&server->idle, &server->lock, until))
            return over(server);
    }
    return true;
}

void ps_rpc_server_stop(struct ps_rpc_server *server, double grace_s)
{
    struct timespec until = ps_rpc_at(grace_s);
    pthread_mutex_lock(&server->lock);
    bool stopped = server->stopped;
    server->stopped = true;
    pthread_mutex_unlock(&server->lock);
    if (stopped)
        return;
    ps_rpc_health_stop(&server->health);
    atomic_store(&server->draining, true);
    if (server->core) {
        atomic_store_explicit(&server->shutdown_tag.fn, was_shut_down, memory_order_release);
        grpc_server_shutdown_and_notify(server->core, server->queues[0].cq, &server->shutdown_tag);
        pthread_mutex_lock(&server->lock);
        for (struct ps_rpc_call *call = server->calls; call; call = call->next)
            ps_rpc_call_poke(call);
        /* The core waits for its connections too, and a client without calls may look at its own only every
         * few seconds. One that looks has had its last answer and hung up within the moment given here. */
        if (wait_for(server, calls_over, &until)) {
            until = ps_rpc_at(fmin(grace_s, HANG_UP_S));
            wait_for(server, all_over, &until);
        }
        if (!all_over(server)) {
            pthread_mutex_unlock(&server->lock);
            grpc_server_cancel_all_calls(server->core);
            pthread_mutex_lock(&server->lock);
            wait_for(server, all_over, NULL);
        }
        pthread_mutex_unlock(&server->lock);
    }
    ps_rpc_pool_done(&server->unary);
    ps_rpc_pool_done(&server->streams);
    ps_rpc_pool_done(&server->builtin);
    ps_rpc_pool_done(&server->builtin_streams);
    if (server->core)
        grpc_server_destroy(server->core);
    for (int i = 0; i < PS_RPC_QUEUES; i++)
        ps_rpc_queue_stop(&server->queues[i]);
    for (size_t i = 0; i < server->listen_count; i++)
        if (server->lock_fds[i] >= 0)
            close(server->lock_fds[i]);
    ps_rpc_core_down();
}

struct ps_rpc_server *ps_rpc_server_free(struct ps_rpc_server *server)
{
    if (!server)
        return NULL;
    ps_rpc_server_stop(server, 0);
    ps_rpc_health_done(&server->health);
    ps_rpc_reflection_done(&server->reflection);
    ps_rpc_descriptors_free(server->descriptors);
    free(server->methods);
    free(server->ports);
    free(server->lock_fds);
    tls_free(server->tls);
    pthread_cond_destroy(&server->idle);
    pthread_mutex_destroy(&server->lock);
    free(server);
    return NULL;
}
