/* SPDX-License-Identifier: Apache-2.0
 * The only file that knows libmicrohttpd. */
#include "services/sidecar/http.h"

#include "services/base/buf.h"
#include "services/base/clock.h"
#include "services/base/log.h"
#include "services/base/text.h"
#include "services/sidecar/http_host.h"
#include "services/sidecar/http_range.h"
#include "services/sidecar/http_stream.h"
#include "services/sidecar/web_api.h"
#include "services/sidecar/web_assets.h"
#include "services/sidecar/web_metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    URI_MAX = 4096,          /* bytes of path and query together */
    HEADERS_MAX = 32 * 1024, /* memory of one connection: the request's headers must fit */
    BODY_MAX = 128 * 1024,   /* of a request: notes, written in JSON */
    METRICS_MAX = 64 * 1024,
    IDLE_S = 60,
    STREAM_BLOCK = 16 * 1024,
};

static const char session_cookie[] = "paramsync_session";

struct ps_http {
    struct ps_service *service;
    struct ps_web_api *api;
    struct ps_http_stream *stream;
    struct MHD_Daemon *daemon;
    char *bound; /* host part of listen */
    char **allowed;
    size_t allowed_count;
    unsigned threads, connections;
    bool tls;
    int listener; /* the daemon's; closed with it */
    /* Daemons of certificates before this one, which only serve the connections they have. Of the thread that
     * reloads and frees. */
    struct MHD_Daemon **retired;
    size_t retired_count;
    char (*etags)[24];
    int port;
};

/* One request; made when its first line is read, freed when it is over. */
struct request {
    struct ps_http *http;
    struct MHD_Connection *connection;
    bool too_long, has_nul, begun;
    struct ps_buf body;
    struct ps_http_reader *reader;
};

/* ---- Answers ---- */

static void add(struct MHD_Response *response, const char *name, const char *value)
{
    MHD_add_response_header(response, name, value);
}

/* Queues and drops the response. */
static enum MHD_Result queue(struct request *request, unsigned status, struct MHD_Response *response)
{
    if (!response)
        return MHD_NO;
    add(response, "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
    add(response, "X-Content-Type-Options", "nosniff");
    add(response, "X-Frame-Options", "DENY");
    add(response, "Referrer-Policy", "no-referrer");
    add(response, "Cross-Origin-Opener-Policy", "same-origin");
    add(response, "Cross-Origin-Resource-Policy", "same-origin");
    enum MHD_Result result = MHD_queue_response(request->connection, status, response);
    MHD_destroy_response(response);
    return result;
}

/* text is malloc'd and becomes the server's. */
static struct MHD_Response *owned(char *text, size_t size, const char *type)
{
    struct MHD_Response *response =
        text ? MHD_create_response_from_buffer(size, text, MHD_RESPMEM_MUST_FREE) : NULL;
    if (!response) {
        free(text);
        return NULL;
    }
    add(response, "Content-Type", type);
    add(response, "Cache-Control", "no-store");
    return response;
}

static struct MHD_Response *json_response(json_t *json)
{
    /* 17 digits bring every double back bit for bit. */
    char *text = json ? json_dumps(json, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(json);
    return owned(text, text ? strlen(text) : 0, "application/json");
}

static struct MHD_Response *error_response(const char *code, const char *message)
{
    json_t *text = json_string(message); /* NULL if a message quotes bytes that are not UTF-8 */
    return json_response(json_pack("{s:{s:s,s:o}}", "error", "code", code, "message",
                                   text ? text : json_string("the request cannot be answered")));
}

static enum MHD_Result fail_as(struct request *request, unsigned status, const char *code,
                               const char *message)
{
    return queue(request, status, error_response(code, message));
}

static enum MHD_Result fail(struct request *request, const struct ps_error *err)
{
    return fail_as(request, (unsigned)ps_code_to_http(err->code), ps_code_name(err->code), err->message);
}

static const char *header(struct request *request, const char *name)
{
    return MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, name);
}

static const char *argument(void *context, const char *name)
{
    struct request *request = context;
    return MHD_lookup_connection_value(request->connection, MHD_GET_ARGUMENT_KIND, name);
}

/* Whether a list of entity tags (If-None-Match) names this one. */
static bool tag_matches(const char *list, const char *tag)
{
    if (!list)
        return false;
    size_t length = strlen(tag);
    for (const char *at = list; (at = strstr(at, tag)); at += length) {
        char after = at[length];
        if (after == '\0' || after == ',' || after == ' ')
            return true;
    }
    return list[strspn(list, " ")] == '*';
}

/* ---- The page ---- */

static enum MHD_Result serve_asset(struct request *request, size_t index)
{
    const struct ps_web_asset *asset = &ps_web_assets[index];
    const char *tag = request->http->etags[index];
    const char *encodings = header(request, "Accept-Encoding");
    bool packed =
        *asset->packed_size && encodings && strstr(encodings, "gzip") && !strstr(encodings, "gzip;q=0");
    struct MHD_Response *response;
    unsigned status = MHD_HTTP_OK;
    if (tag_matches(header(request, "If-None-Match"), tag)) {
        response = MHD_create_response_from_buffer(0, (void *)"", MHD_RESPMEM_PERSISTENT);
        status = MHD_HTTP_NOT_MODIFIED;
    } else {
        response = MHD_create_response_from_buffer(packed ? *asset->packed_size : *asset->plain_size,
                                                   (void *)(packed ? asset->packed : asset->plain),
                                                   MHD_RESPMEM_PERSISTENT);
    }
    if (!response)
        return MHD_NO;
    add(response, "Content-Type", asset->type);
    add(response, "Cache-Control", "no-cache");
    add(response, "Vary", "Accept-Encoding");
    add(response, "ETag", tag);
    if (packed && status == MHD_HTTP_OK)
        add(response, "Content-Encoding", "gzip");
    return queue(request, status, response);
}

/* ---- Token ---- */

/* The bearer token of the request, or NULL. */
static const char *bearer(struct request *request)
{
    const char *value = header(request, "Authorization");
    return value && !strncasecmp(value, "Bearer ", 7) ? value + 7 : NULL;
}

static enum ps_role role_of(struct request *request)
{
    struct ps_access *access = request->http->service->access;
    enum ps_role by_session = ps_access_session_role(
        access, MHD_lookup_connection_value(request->connection, MHD_COOKIE_KIND, session_cookie));
    enum ps_role by_token = ps_access_role(access, bearer(request));
    return by_session > by_token ? by_session : by_token;
}

static enum MHD_Result refuse_login(struct request *request)
{
    struct MHD_Response *response = error_response(
        "UNAUTHENTICATED", "a token is needed: log in, or send it as Authorization: Bearer TOKEN");
    if (response)
        add(response, "WWW-Authenticate", "Bearer");
    return queue(request, MHD_HTTP_UNAUTHORIZED, response);
}

/* GET: whether the caller is logged in. POST with the token as bearer: sets the cookie. The header cannot be
 * sent from another site without our consent, which is never given, so no further guard against forged
 * requests is needed. The cookie has no Path: it then covers the folder of this route, which holds all that
 * needs it, under any sub-path. */
static enum MHD_Result serve_session(struct request *request, bool post)
{
    struct ps_access *access = request->http->service->access;
    const bool open = ps_access_is_open(access);
    char session[PS_SHA256_HEX] = "";
    enum ps_role role = post ? ps_access_role(access, bearer(request)) : role_of(request);
    if (role == PS_ROLE_NONE || (post && !open && !ps_access_session(access, bearer(request), session)))
        return refuse_login(request);
    struct MHD_Response *response = json_response(
        json_pack("{s:b,s:b,s:s}", "logged_in", 1, "token_required", !open, "role", ps_role_name(role)));
    if (response && *session) {
        char cookie[256];
        snprintf(cookie, sizeof cookie, "%s=%s; HttpOnly; SameSite=Strict%s", session_cookie, session,
                 request->http->tls ? "; Secure" : "");
        add(response, "Set-Cookie", cookie);
    }
    return queue(request, MHD_HTTP_OK, response);
}

/* ---- Checkpoints ---- */

static void safe_filename(const char *name, char *out, size_t size)
{
    size_t length = 0;
    for (; *name && length + 1 < size; name++) {
        char c = *name;
        bool good = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_' ||
                    c == '-' || (c == '.' && length > 0);
        out[length++] = good ? c : '_';
    }
    out[length] = '\0';
    if (!length)
        snprintf(out, size, "checkpoint");
}

static enum MHD_Result serve_checkpoint(struct request *request, const char *sha256)
{
    struct ps_error err = {0};
    struct ps_blob blob;
    char *filename = NULL;
    if (!ps_sha256_hex_valid(sha256))
        return fail_as(request, MHD_HTTP_NOT_FOUND, "NOT_FOUND", "there is no such checkpoint");
    if (ps_store_get_blob(request->http->service->store, sha256, &blob, &filename, &err) < 0)
        return fail(request, &err);
    char tag[PS_SHA256_HEX + 2], name[200], disposition[256];
    snprintf(tag, sizeof tag, "\"%s\"", blob.sha256);
    safe_filename(filename ? filename : "checkpoint", name, sizeof name);
    free(filename);
    snprintf(disposition, sizeof disposition, "attachment; filename=\"%s\"", name);

    struct MHD_Response *response;
    unsigned status = MHD_HTTP_OK;
    char range[96] = "";
    if (tag_matches(header(request, "If-None-Match"), tag)) {
        response = MHD_create_response_from_buffer(0, (void *)"", MHD_RESPMEM_PERSISTENT);
        status = MHD_HTTP_NOT_MODIFIED;
    } else {
        uint64_t first = 0, count = blob.size;
        const char *if_range = header(request, "If-Range");
        enum ps_range kind = if_range && strcmp(if_range, tag) != 0
                                 ? PS_RANGE_NONE
                                 : ps_http_range(header(request, "Range"), blob.size, &first, &count);
        if (kind == PS_RANGE_UNSATISFIABLE) {
            response = error_response("OUT_OF_RANGE", "the range lies outside the file");
            status = MHD_HTTP_RANGE_NOT_SATISFIABLE;
            snprintf(range, sizeof range, "bytes */%" PRIu64, blob.size);
        } else {
            int fd;
            if (ps_service_read_blob(request->http->service, blob.sha256, blob.size, true, &fd, &err) < 0)
                return fail(request, &err);
            response = MHD_create_response_from_fd_at_offset64(count, fd, first); /* sendfile; closes fd */
            if (!response)
                close(fd);
            if (kind == PS_RANGE_ONE) {
                status = MHD_HTTP_PARTIAL_CONTENT;
                snprintf(range, sizeof range, "bytes %" PRIu64 "-%" PRIu64 "/%" PRIu64, first,
                         first + count - 1, blob.size);
            }
        }
    }
    if (!response)
        return MHD_NO;
    if (*range)
        add(response, "Content-Range", range);
    if (status != MHD_HTTP_RANGE_NOT_SATISFIABLE) {
        add(response, "Content-Type", "application/octet-stream");
        add(response, "Content-Disposition", disposition);
        add(response, "Cache-Control",
            "private, max-age=31536000, immutable"); /* the address is the content */
        add(response, "ETag", tag);
    }
    add(response, "Accept-Ranges", "bytes");
    return queue(request, status, response);
}

/* ---- Event streams ---- */

static void park(void *context)
{
    struct request *request = context;
    MHD_suspend_connection(request->connection);
}

static void wake(void *context)
{
    struct request *request = context;
    MHD_resume_connection(request->connection);
}

static ssize_t read_events(void *context, uint64_t position, char *data, size_t size)
{
    (void)position;
    struct request *request = context;
    ssize_t count = ps_http_reader_read(request->reader, data, size);
    return count < 0 ? MHD_CONTENT_READER_END_OF_STREAM : count;
}

static enum MHD_Result serve_events(struct request *request, bool head)
{
    struct ps_error err = {0};
    int64_t since = -1;
    const char *text =
        header(request, "Last-Event-ID"); /* set by browsers that come again; newer than the address */
    if (!text)
        text = argument(request, "since");
    if (text && *text && ps_parse_int64(text, 0, INT64_MAX, &since))
        return fail_as(request, MHD_HTTP_BAD_REQUEST, "INVALID_ARGUMENT",
                       "since: the id of an event is wanted");
    struct MHD_Response *response;
    if (head) {
        response = MHD_create_response_from_buffer(0, (void *)"", MHD_RESPMEM_PERSISTENT);
    } else {
        if (ps_http_reader_open(request->http->stream, since < 0 ? PS_STREAM_NOW : (uint64_t)since, park,
                                wake, request, &request->reader, &err) < 0)
            return fail(request, &err);
        response =
            MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK, read_events, request, NULL);
    }
    if (!response)
        return MHD_NO;
    add(response, "Content-Type", "text/event-stream");
    add(response, "Cache-Control", "no-store");
    add(response, "X-Accel-Buffering", "no"); /* nginx would hold events back */
    return queue(request, MHD_HTTP_OK, response);
}

/* ---- Health ---- */

static enum MHD_Result serve_health(struct request *request)
{
    struct ps_store_stats stats;
    struct ps_error err = {0};
    bool good = ps_store_get_stats(request->http->service->store, &stats, &err) == 0;
    const char *reason = !good ? err.message : stats.disk_full ? "the disk is full" : stats.last_error;
    json_t *o = json_pack("{s:s}", "status", good && !*reason ? "ok" : "degraded");
    if (o && *reason)
        json_object_set_new(o, "reason", json_string(reason));
    return queue(request, MHD_HTTP_OK, json_response(o));
}

static enum MHD_Result serve_ready(struct request *request)
{
    struct ps_error err = {0};
    if (ps_service_ready(request->http->service, &err) < 0)
        return fail_as(request, MHD_HTTP_SERVICE_UNAVAILABLE, "UNAVAILABLE", err.message);
    return queue(request, MHD_HTTP_OK, json_response(json_pack("{s:s}", "status", "ready")));
}

static enum MHD_Result serve_metrics(struct request *request)
{
    struct ps_error err = {0};
    struct ps_buf buf = PS_BUF_INIT(METRICS_MAX);
    size_t size = 0;
    if (ps_web_metrics(request->http->service, ps_http_stream_readers(request->http->stream), &buf, &err) <
        0) {
        ps_buf_done(&buf);
        return fail(request, &err);
    }
    char *text = ps_buf_take(&buf, &size);
    return queue(request, MHD_HTTP_OK, owned(text, size, "text/plain; version=0.0.4; charset=utf-8"));
}

/* ---- Routing ---- */

static enum MHD_Result serve_api(struct request *request, const char *path)
{
    struct ps_error err = {0};
    struct ps_web_request ask = {.path = path,
                                 .parameter = argument,
                                 .context = request,
                                 .streams = ps_http_stream_readers(request->http->stream)};
    json_t *json = NULL;
    if (ps_web_api_get(request->http->api, &ask, &json, &err) < 0)
        return fail(request, &err);
    return queue(request, MHD_HTTP_OK, json_response(json));
}

/* Whether a change comes from one of our own pages, or from no page at all. Browsers tell where a request
 * comes from in headers that no page can set: Sec-Fetch-Site over TLS and on loopback, else Origin. */
static bool from_here(struct request *request, const char *host)
{
    const char *site = header(request, "Sec-Fetch-Site"), *origin = header(request, "Origin");
    if (site)
        return !strcmp(site, "same-origin") || !strcmp(site, "none");
    if (!origin)
        return true;
    const char *authority = strstr(origin, "://");
    return authority && !strcasecmp(authority + 3, host);
}

static enum MHD_Result serve_change(struct request *request, const char *method, const char *path,
                                    const char *host)
{
    struct ps_error err = {0};
    json_t *json = NULL;
    const bool removing = !strcmp(method, MHD_HTTP_METHOD_DELETE);
    const char *type = header(request, MHD_HTTP_HEADER_CONTENT_TYPE);
    if (role_of(request) < PS_ROLE_READ)
        return refuse_login(request);
    if (role_of(request) < (removing ? PS_ROLE_ADMIN : PS_ROLE_WRITE))
        return fail_as(request, MHD_HTTP_FORBIDDEN, "PERMISSION_DENIED",
                       removing ? "this token may not delete" : "this token may only look");
    if (!from_here(request, host))
        return fail_as(request, MHD_HTTP_FORBIDDEN, "PERMISSION_DENIED",
                       "changes are taken from the sidecar's own pages only; behind a proxy, pass the Host "
                       "header on");
    if (!removing && (!type || strncasecmp(type, "application/json", 16) != 0))
        return fail_as(request, MHD_HTTP_UNSUPPORTED_MEDIA_TYPE, "INVALID_ARGUMENT",
                       "Content-Type: application/json is wanted");
    if (ps_web_api_change(request->http->api, method, path, request->body.data ? request->body.data : "",
                          request->body.size, &json, &err) < 0)
        return fail(request, &err);
    return queue(request, MHD_HTTP_OK, json_response(json));
}

static enum MHD_Result route(struct request *request, const char *url, const char *method)
{
    struct ps_http *http = request->http;
    bool head = !strcmp(method, MHD_HTTP_METHOD_HEAD), post = !strcmp(method, MHD_HTTP_METHOD_POST);
    bool session = !strcmp(url, "/api/v1/session");
    const char *host = header(request, "Host");
    if (!host)
        return fail_as(request, MHD_HTTP_BAD_REQUEST, "INVALID_ARGUMENT", "the Host header is missing");
    if (!ps_http_host_ok(host, http->bound, (const char *const *)http->allowed, http->allowed_count))
        return fail_as(request, MHD_HTTP_FORBIDDEN, "PERMISSION_DENIED",
                       "this name is not one of the sidecar's; add it with --allow-host if it should be");
    if (request->too_long)
        return fail_as(request, MHD_HTTP_URI_TOO_LONG, "INVALID_ARGUMENT", "the address is too long");
    if (request->has_nul)
        return fail_as(request, MHD_HTTP_NOT_FOUND, "NOT_FOUND", "there is no such page");
    bool run = !strncmp(url, "/api/v1/runs/", 13) && url[13] && !strchr(url + 13, '/');
    if (run && (!strcmp(method, MHD_HTTP_METHOD_PATCH) || !strcmp(method, MHD_HTTP_METHOD_DELETE)))
        return serve_change(request, method, url + 8, host);
    if (!head && strcmp(method, MHD_HTTP_METHOD_GET) != 0 && !(post && session)) {
        struct MHD_Response *response =
            error_response("UNIMPLEMENTED", "only GET and HEAD are answered here");
        if (response)
            add(response, "Allow",
                session ? "GET, HEAD, POST"
                : run   ? "GET, HEAD, PATCH, DELETE"
                        : "GET, HEAD");
        return queue(request, MHD_HTTP_METHOD_NOT_ALLOWED, response);
    }
    for (size_t i = 0; i < ps_web_asset_count; i++)
        if (!strcmp(url, ps_web_assets[i].path))
            return serve_asset(request, i);
    if (!strcmp(url, "/healthz"))
        return serve_health(request);
    if (!strcmp(url, "/readyz"))
        return serve_ready(request);
    if (session)
        return serve_session(request, post);
    if (strncmp(url, "/api/v1/", 8) != 0 && strcmp(url, "/metrics") != 0)
        return fail_as(request, MHD_HTTP_NOT_FOUND, "NOT_FOUND", "there is no such page");
    if (role_of(request) < PS_ROLE_READ)
        return refuse_login(request);
    if (!strcmp(url, "/metrics"))
        return serve_metrics(request);
    if (!strcmp(url, "/api/v1/events"))
        return serve_events(request, head);
    if (!strncmp(url, "/api/v1/checkpoints/", 20))
        return serve_checkpoint(request, url + 20);
    return serve_api(request, url + 8);
}

static enum MHD_Result on_request(void *context, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *upload_size, void **request_context)
{
    (void)context;
    (void)version;
    struct request *request = *request_context;
    if (!request)
        return MHD_NO;
    request->connection = connection;
    if (!request->begun) {
        request->begun = true;
        const char *length = header(request, MHD_HTTP_HEADER_CONTENT_LENGTH);
        int64_t size;
        if (length && (ps_parse_int64(length, 0, INT64_MAX, &size) || size > BODY_MAX))
            return fail_as(request, MHD_HTTP_CONTENT_TOO_LARGE, "INVALID_ARGUMENT", "the body is too large");
        if (length || header(request, MHD_HTTP_HEADER_TRANSFER_ENCODING))
            return MHD_YES; /* the body comes next */
    } else if (*upload_size) {
        int rc = ps_buf_append(&request->body, upload, *upload_size);
        *upload_size = 0;
        return rc < 0 ? MHD_NO : MHD_YES;
    }
    return route(request, url, method);
}

static void *on_uri(void *context, const char *uri, struct MHD_Connection *connection)
{
    struct request *request = calloc(1, sizeof *request);
    if (!request)
        return NULL;
    request->http = context;
    request->connection = connection;
    request->body = (struct ps_buf)PS_BUF_INIT(BODY_MAX);
    request->too_long = strnlen(uri, URI_MAX + 1) > URI_MAX;
    /* Decoded, it would end the path early and make two addresses one. */
    request->has_nul = !request->too_long && strstr(uri, "%00");
    return request;
}

static void on_completed(void *context, struct MHD_Connection *connection, void **request_context,
                         enum MHD_RequestTerminationCode code)
{
    (void)context;
    (void)connection;
    (void)code;
    struct request *request = *request_context;
    if (request) {
        ps_http_reader_close(request->reader);
        ps_buf_done(&request->body);
        free(request);
    }
    *request_context = NULL;
}

static void on_log(void *context, const char *format, va_list arguments)
{
    (void)context;
    char text[512];
    vsnprintf(text, sizeof text, format, arguments);
    text[strcspn(text, "\n")] = '\0';
    ps_log_debug("http: %s", text);
}

/* ---- Start and end ---- */

static int bind_one(const struct addrinfo *address, bool dual)
{
    int on = 1, off = 0;
    int fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (address->ai_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, dual ? &off : &on, sizeof on);
    if (bind(fd, address->ai_addr, address->ai_addrlen) == 0 && listen(fd, 128) == 0)
        return fd;
    int errnum = errno;
    close(fd);
    errno = errnum;
    return -1;
}

static int open_listener(const char *text, char *host, size_t host_size, int *ret_fd, int *ret_port,
                         struct ps_error *err)
{
    int port, rc = ps_parse_host_port(text, host, host_size, &port, err);
    if (rc < 0)
        return ps_error_prefix(err, "http listen address");
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    bool every = !*host;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV},
                    *list = NULL;
    int failed = getaddrinfo(every ? "::" : host, service, &hints, &list);
    if (failed && every)
        failed = getaddrinfo("0.0.0.0", service, &hints, &list);
    if (failed)
        return ps_fail(err, PS_INVALID_ARGUMENT, "http listen address '%s': %s", text, gai_strerror(failed));
    int fd = -1, errnum = 0;
    for (const struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        fd = bind_one(a, every);
        errnum = errno;
    }
    freeaddrinfo(list);
    if (fd < 0 && every && errnum == EAFNOSUPPORT && getaddrinfo("0.0.0.0", service, &hints, &list) == 0) {
        fd = bind_one(list, false);
        errnum = errno;
        freeaddrinfo(list);
    }
    if (fd < 0)
        return ps_fail_errno(err, errnum, "cannot listen for HTTP on %s", text);
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } bound = {0};
    socklen_t size = sizeof bound;
    if (getsockname(fd, &bound.any, &size)) {
        errnum = errno;
        close(fd);
        return ps_fail_errno(err, errnum, "cannot listen for HTTP on %s", text);
    }
    in_port_t network_order = bound.any.sa_family == AF_INET6 ? bound.v6.sin6_port : bound.v4.sin_port;
    *ret_port = ntohs(network_order);
    *ret_fd = fd;
    return 0;
}

static int copy_config(struct ps_http *http, const struct ps_http_config *config, struct ps_error *err)
{
    http->allowed = calloc(config->allowed_host_count + 1, sizeof *http->allowed);
    http->etags = calloc(ps_web_asset_count + 1, sizeof *http->etags);
    bool good = http->allowed && http->etags;
    for (size_t i = 0; good && i < config->allowed_host_count; i++, http->allowed_count++)
        good = (http->allowed[i] = strdup(config->allowed_hosts[i]));
    if (!good)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < ps_web_asset_count; i++)
        snprintf(http->etags[i], sizeof *http->etags, "\"%016" PRIx64 "\"",
                 ps_hash64(ps_web_assets[i].plain, *ps_web_assets[i].plain_size, 0));
    return 0;
}

/* Listens on fd, which is the daemon's from then on and closed when this fails. */
static int start_daemon(struct ps_http *http, int fd, const char *tls_cert, const char *tls_key,
                        struct MHD_Daemon **ret_daemon, struct ps_error *err)
{
    struct MHD_OptionItem tls[] = {
        {MHD_OPTION_HTTPS_MEM_CERT, 0, (void *)tls_cert},
        {MHD_OPTION_HTTPS_MEM_KEY, 0, (void *)tls_key},
        {MHD_OPTION_END, 0, NULL},
    };
    *ret_daemon = MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_USE_SUSPEND_RESUME | MHD_USE_ERROR_LOG |
            (tls_cert ? (unsigned)MHD_USE_TLS : 0u),
        0, NULL, NULL, on_request, http, MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL, MHD_OPTION_LISTEN_SOCKET,
        fd, MHD_OPTION_THREAD_POOL_SIZE, http->threads, MHD_OPTION_CONNECTION_LIMIT, http->connections,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HEADERS_MAX, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)IDLE_S, MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_URI_LOG_CALLBACK, on_uri, http,
        MHD_OPTION_NOTIFY_COMPLETED, on_completed, NULL, tls_cert ? MHD_OPTION_ARRAY : MHD_OPTION_END, tls,
        MHD_OPTION_END);
    if (*ret_daemon)
        return 0;
    return tls_cert ? ps_fail(err, PS_INVALID_ARGUMENT,
                              "the HTTP server does not start: check the TLS certificate and key")
                    : ps_fail(err, PS_INTERNAL, "the HTTP server does not start");
}

int ps_http_start(const struct ps_http_config *config, struct ps_http **ret_http, struct ps_error *err)
{
    if (!config->tls_cert != !config->tls_key)
        return ps_fail(err, PS_INVALID_ARGUMENT, "HTTP over TLS needs both a certificate and its key");
    struct ps_http *http = calloc(1, sizeof *http);
    if (!http)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    http->service = config->service;
    char host[256];
    int fd = -1;
    int rc = copy_config(http, config, err);
    if (rc == 0)
        rc = open_listener(config->listen, host, sizeof host, &fd, &http->port, err);
    if (rc < 0)
        goto failed;
    http->bound = strdup(host);
    http->api = ps_web_api_new(config->service, config->grpc_port);
    if (!http->bound || !http->api) {
        rc = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        goto failed;
    }
    rc = ps_http_stream_start(config->service, http->api, config->heartbeat_s > 0 ? config->heartbeat_s : 15,
                              config->max_streams ? config->max_streams : 256, &http->stream, err);
    if (rc < 0)
        goto failed;
    http->threads = config->threads > 0 ? (unsigned)config->threads : 4;
    http->connections = config->max_connections ? config->max_connections : 512;
    if (http->connections < http->threads)
        http->connections = http->threads;
    http->tls = config->tls_cert != NULL;
    rc = start_daemon(http, fd, config->tls_cert, config->tls_key, &http->daemon, err);
    http->listener = fd;
    fd = -1; /* the daemon's, and on failure already closed by it */
    if (rc < 0)
        goto failed;
    *ret_http = http;
    return 0;
failed:
    if (fd >= 0)
        close(fd);
    ps_http_free(http);
    return rc;
}

int ps_http_port(const struct ps_http *http)
{
    return http->port;
}

int ps_http_reload_tls(struct ps_http *http, const char *tls_cert, const char *tls_key, struct ps_error *err)
{
    if (!http->tls)
        return ps_fail(err, PS_FAILED_PRECONDITION, "the HTTP server was started without TLS");
    size_t kept = 0;
    for (size_t i = 0; i < http->retired_count; i++) {
        const union MHD_DaemonInfo *info =
            MHD_get_daemon_info(http->retired[i], MHD_DAEMON_INFO_CURRENT_CONNECTIONS);
        if (info && info->num_connections == 0)
            MHD_stop_daemon(http->retired[i]);
        else
            http->retired[kept++] = http->retired[i];
    }
    http->retired_count = kept;
    struct MHD_Daemon **larger = realloc(http->retired, (kept + 1) * sizeof(struct MHD_Daemon *)), *fresh;
    int fd = fcntl(http->listener, F_DUPFD_CLOEXEC, 0); /* both daemons close theirs */
    if (larger)
        http->retired = larger;
    if (!larger || fd < 0) {
        if (fd >= 0)
            close(fd);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "no memory or descriptor for the new certificate");
    }
    int code = start_daemon(http, fd, tls_cert, tls_key, &fresh, err);
    if (code)
        return code;
    int old = (int)MHD_quiesce_daemon(http->daemon);
    if (old >= 0)
        close(old); /* a daemon that was quiesced leaves its listener to us */
    http->retired[http->retired_count++] = http->daemon;
    http->daemon = fresh;
    http->listener = fd;
    return 0;
}

struct ps_http *ps_http_free(struct ps_http *http)
{
    if (!http)
        return NULL;
    /* No connection may be suspended when the daemon stops: stop wakes every parked reader and lets none
     * park. */
    if (http->stream)
        ps_http_stream_stop(http->stream);
    if (http->daemon)
        MHD_stop_daemon(http->daemon);
    for (size_t i = 0; i < http->retired_count; i++)
        MHD_stop_daemon(http->retired[i]);
    free(http->retired);
    ps_http_stream_free(http->stream);
    ps_web_api_free(http->api);
    for (size_t i = 0; i < http->allowed_count; i++)
        free(http->allowed[i]);
    free(http->allowed);
    free(http->etags);
    free(http->bound);
    free(http);
    return NULL;
}
