/* SPDX-License-Identifier: Apache-2.0
 * Collectives over Gloo's TCP transport.
 *
 * Gloo brings the connections, the matching of sends and receives and the event loop; the schedules are here,
 * over its unbound buffers, because Gloo's own collectives (gloo/allreduce.cc) keep their buffers to
 * themselves: nothing from outside can end a wait inside of them, Context::closeConnections called from
 * another thread leaves waiters where they are until the time-out, and the time-out counts anew for each of
 * many waits. Here every wait is on a buffer that abort() knows, and one deadline holds for the whole
 * collective.
 *
 * The all-reduce is the ring: W - 1 steps of reduce-scatter, W - 1 of all-gather, each chunk cut into
 * segments so that one travels while another is added (as in gloo/allreduce.cc). A chunk is summed along one
 * path and then handed on as bytes, so all ranks hold the same bits. */
#include "trainer/dist/gloo_module.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include <pthread.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#pragma GCC diagnostic ignored "-Wshadow"
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#pragma GCC diagnostic pop

namespace
{

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

struct Aborted : std::runtime_error {
    Aborted() : std::runtime_error("aborted")
    {
    }
};

struct Failure : std::runtime_error {
    int code;
    Failure(int failure_code, const std::string &text) : std::runtime_error(text), code(failure_code)
    {
    }
};

/* Gloo writes to sockets with writev, which raises SIGPIPE in the writing thread when the peer is gone.
 * Blocked while Gloo runs on this thread; one that was raised meanwhile is taken away. */
class NoSigpipe
{
  public:
    NoSigpipe()
    {
        sigset_t pending;
        sigemptyset(&pipe_);
        sigaddset(&pipe_, SIGPIPE);
        sigpending(&pending);
        was_pending_ = sigismember(&pending, SIGPIPE);
        pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
    }
    ~NoSigpipe()
    {
        if (!was_pending_) {
            const timespec now = {0, 0};
            while (sigtimedwait(&pipe_, nullptr, &now) == SIGPIPE) {
            }
        }
        pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    }

  private:
    sigset_t pipe_, before_;
    int was_pending_;
};

/* Threads that Gloo starts take no signals: these belong to one thread of the program. */
class NoSignals
{
  public:
    NoSignals()
    {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~NoSignals()
    {
        pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    }

  private:
    sigset_t before_;
};

class Store : public gloo::rendezvous::Store
{
  public:
    Store(const ps_gloo_store &store, Clock::time_point deadline) : store_(store), deadline_(deadline)
    {
    }
    void set(const std::string &key, const std::vector<char> &data) override
    {
        char message[600] = "";
        int code =
            store_.set(store_.context, name(key).c_str(), data.data(), data.size(), message, sizeof message);
        if (code < 0)
            throw Failure(code, message);
    }
    std::vector<char> get(const std::string &key) override
    {
        char message[600] = "", *data = nullptr;
        size_t size = 0;
        double left = std::chrono::duration<double>(deadline_ - Clock::now()).count();
        int code = store_.get(store_.context, name(key).c_str(), std::max(left, 0.0), &data, &size, message,
                              sizeof message);
        if (code < 0)
            throw Failure(code, message);
        std::vector<char> value(data, data + size);
        free(data);
        return value;
    }
    void wait(const std::vector<std::string> &keys) override
    {
        for (const auto &key : keys)
            get(key);
    }
    void wait(const std::vector<std::string> &keys, const milliseconds &) override
    {
        wait(keys);
    }

  private:
    static std::string name(const std::string &key)
    {
        return "gloo/" + key;
    }
    ps_gloo_store store_;
    Clock::time_point deadline_;
};

template <typename T> void add(void *__restrict to, const void *__restrict from, size_t bytes)
{
    T *a = static_cast<T *>(to);
    const T *b = static_cast<const T *>(from);
    for (size_t i = 0, n = bytes / sizeof(T); i < n; i++)
        a[i] += b[i];
}

enum Kind { ALL_REDUCE = 1, BROADCAST, ALL_GATHER };

} // namespace

struct ps_gloo {
    int rank, size;
    milliseconds timeout;
    std::shared_ptr<gloo::transport::Device> device;
    std::shared_ptr<gloo::rendezvous::Context> context;
    uint32_t calls = 0;
    std::vector<unsigned char> scratch;

    std::mutex lock; /* guards the two below: the buffers that the call in progress may wait on */
    bool aborted = false;
    std::vector<gloo::transport::UnboundBuffer *> waited;
};

namespace
{

/* One collective: its buffers, its deadline and its slot. A slot also carries kind and size, so that ranks
 * that call different things wait for their deadline instead of writing into each other's memory. */
class Call
{
  public:
    Call(ps_gloo *gloo, Kind kind, uint64_t bytes)
        : gloo_(gloo), deadline_(Clock::now() + gloo->timeout),
          slot_((uint64_t)++gloo->calls << 32 | (uint64_t)kind << 28 |
                ((bytes * UINT64_C(0x9E3779B97F4A7C15)) >> 36 & 0xfffffff))
    {
        if (is_aborted())
            throw Aborted();
    }
    ~Call()
    {
        /* Not to be waited on by abort any more; then the buffers go, and Gloo forgets what it had queued. */
        std::lock_guard<std::mutex> guard(gloo_->lock);
        gloo_->waited.clear();
    }
    gloo::transport::UnboundBuffer *buffer(void *data, size_t bytes)
    {
        auto made = gloo_->context->createUnboundBuffer(data, bytes);
        auto *raw = made.get();
        buffers_.push_back(std::move(made));
        std::lock_guard<std::mutex> guard(gloo_->lock);
        if (gloo_->aborted)
            throw Aborted();
        gloo_->waited.push_back(raw);
        return raw;
    }
    void send(gloo::transport::UnboundBuffer *b, int rank, size_t offset, size_t bytes)
    {
        b->send(rank, slot_, offset, bytes);
    }
    void recv(gloo::transport::UnboundBuffer *b, int rank, size_t offset, size_t bytes)
    {
        b->recv(rank, slot_, offset, bytes);
    }
    void sent(gloo::transport::UnboundBuffer *b)
    {
        if (!b->waitSend(left()) || is_aborted())
            throw Aborted();
    }
    void received(gloo::transport::UnboundBuffer *b)
    {
        if (!b->waitRecv(left()) || is_aborted())
            throw Aborted();
    }
    bool late() const
    {
        return Clock::now() >= deadline_;
    }

  private:
    bool is_aborted()
    {
        std::lock_guard<std::mutex> guard(gloo_->lock);
        return gloo_->aborted;
    }
    milliseconds left() const
    {
        /* Rounded up: a wait that ended before the deadline would not be told from a lost connection. */
        auto ms = std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now()) + milliseconds(1);
        return std::max(ms, milliseconds(1));
    }

    ps_gloo *gloo_;
    Clock::time_point deadline_;
    uint64_t slot_;
    std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>> buffers_;
};

int fail(char *message, size_t size, int code, const std::string &text)
{
    snprintf(message, size, "%s", text.c_str());
    for (char *c = message; *c; c++)
        if (*c == '\n' || *c == '\r')
            *c = ' ';
    return code;
}

/* Gloo puts "[/build/gloo/.../unbound_buffer.cc:66] " before its texts: of no use to our readers. */
std::string plain(const std::exception &e)
{
    std::string text = e.what();
    if (!text.empty() && text[0] == '[') {
        size_t end = text.find("] ");
        if (end != std::string::npos)
            text.erase(0, end + 2);
    }
    return text;
}

/* Runs body(call). After any failure the connections are closed, so that the neighbours do not wait for us.
 */
template <typename F>
int collective(ps_gloo *g, Kind kind, uint64_t bytes, char *message, size_t size, F body)
{
    NoSigpipe no_sigpipe;
    int code = PS_INTERNAL;
    bool late = false;
    try {
        Call call(g, kind, bytes);
        try {
            body(call);
            return 0;
        } catch (...) {
            late = call.late();
            throw;
        }
    } catch (const Aborted &) {
        code = fail(message, size, PS_ABORTED, "aborted");
    } catch (const std::bad_alloc &) {
        code = fail(message, size, PS_RESOURCE_EXHAUSTED, "out of memory");
    } catch (const gloo::IoException &e) {
        if (late) {
            char text[200];
            snprintf(
                text, sizeof text,
                "not finished within %.1f s: some rank is late, or the ranks called different collectives",
                (double)g->timeout.count() / 1000.0);
            code = fail(message, size, PS_DEADLINE_EXCEEDED, text);
        } else {
            code = fail(message, size, PS_UNAVAILABLE, plain(e));
        }
    } catch (const std::exception &e) {
        code = fail(message, size, PS_INTERNAL, plain(e));
    }
    try {
        g->context->closeConnections();
    } catch (const std::exception &) {
        /* they are as closed as they can be */
    }
    std::lock_guard<std::mutex> guard(g->lock);
    g->aborted = true;
    return code;
}

const size_t SEGMENT = 1 << 20; /* bytes; two of them and the sum stay in the caches */

void ring_all_reduce(ps_gloo *g, Call &call, void *data, size_t count, size_t element,
                     void (*sum)(void *, const void *, size_t))
{
    const int size = g->size, next = (g->rank + 1) % size, prev = (g->rank + size - 1) % size;
    const size_t chunk = (count + size - 1) / size; /* elements; the last chunks may be short or empty */
    /* At least two segments, else a segment would be sent on before it has been added. */
    const size_t segment = std::max<size_t>(1, std::min((chunk + 1) / 2, SEGMENT / element));
    const size_t segments = std::max<size_t>(2, (chunk + segment - 1) / segment);
    auto *bytes = static_cast<unsigned char *>(data);
    g->scratch.resize(2 * segment * element);
    auto *all = call.buffer(data, count * element);
    auto *incoming = call.buffer(g->scratch.data(), g->scratch.size());

    struct Range {
        size_t offset, length; /* bytes */
    };
    auto range = [&](long chunk_index, size_t segment_index) {
        size_t c = (size_t)((chunk_index % size + size) % size);
        size_t begin = std::min(c * chunk, count), end = std::min(begin + chunk, count);
        size_t from = std::min(begin + segment_index * segment, end), to = std::min(from + segment, end);
        return Range{from * element, (to - from) * element};
    };
    const size_t items = segments * (size_t)(size - 1);
    auto step = [&](size_t item) { return (long)(item / segments); };

    for (size_t i = 0; i <= items; i++) {
        if (i < items) {
            Range out = range(g->rank - step(i), i % segments),
                  in = range(g->rank - step(i) - 1, i % segments);
            if (in.length)
                call.recv(incoming, prev, (i & 1) * segment * element, in.length);
            if (out.length)
                call.send(all, next, out.offset, out.length);
        }
        if (i > 0) {
            size_t j = i - 1;
            Range out = range(g->rank - step(j), j % segments),
                  in = range(g->rank - step(j) - 1, j % segments);
            if (in.length) {
                call.received(incoming);
                sum(bytes + in.offset, g->scratch.data() + (j & 1) * segment * element, in.length);
            }
            if (out.length)
                call.sent(all);
        }
    }
    for (size_t i = 0; i <= items; i++) {
        if (i < items) {
            Range out = range(g->rank + 1 - step(i), i % segments),
                  in = range(g->rank - step(i), i % segments);
            if (in.length)
                call.recv(all, prev, in.offset, in.length);
            if (out.length)
                call.send(all, next, out.offset, out.length);
        }
        if (i > 0) {
            size_t j = i - 1;
            if (range(g->rank - step(j), j % segments).length)
                call.received(all);
            if (range(g->rank + 1 - step(j), j % segments).length)
                call.sent(all);
        }
    }
}

int all_reduce(ps_gloo *g, void *data, size_t count, ps_dtype type, char *message, size_t message_size)
{
    if (type != PS_F32 && type != PS_F64 && type != PS_I64)
        return fail(message, message_size, PS_INVALID_ARGUMENT, "sums are of float32, float64 or int64");
    if (count == 0)
        return 0;
    size_t element = type == PS_F32 ? 4 : 8;
    auto *sum = type == PS_F32 ? add<float> : type == PS_F64 ? add<double> : add<int64_t>;
    return collective(g, ALL_REDUCE, count * element, message, message_size,
                      [&](Call &call) { ring_all_reduce(g, call, data, count, element, sum); });
}

/* Along a chain from the root, in segments, so that a long vector is under way on all links at once. */
int broadcast(ps_gloo *g, void *data, size_t bytes, int root, char *message, size_t message_size)
{
    if (root < 0 || root >= g->size)
        return fail(message, message_size, PS_INVALID_ARGUMENT, "no such root");
    if (bytes == 0)
        return 0;
    return collective(g, BROADCAST, bytes, message, message_size, [&](Call &call) {
        auto *all = call.buffer(data, bytes);
        const int place = (g->rank - root + g->size) % g->size;
        const int next = (g->rank + 1) % g->size, prev = (g->rank + g->size - 1) % g->size;
        const bool first = place == 0, last = place == g->size - 1;
        const size_t segments = (bytes + SEGMENT - 1) / SEGMENT;
        auto length = [&](size_t i) { return std::min(SEGMENT, bytes - i * SEGMENT); };
        if (!first)
            call.recv(all, prev, 0, length(0));
        for (size_t i = 0; i < segments; i++) {
            if (!first) {
                if (i + 1 < segments)
                    call.recv(all, prev, (i + 1) * SEGMENT, length(i + 1));
                call.received(all);
            }
            if (!last) {
                call.send(all, next, i * SEGMENT, length(i));
                if (i > 0)
                    call.sent(all);
            }
        }
        if (!last)
            call.sent(all);
    });
}

int all_gather(ps_gloo *g, const void *data, size_t bytes, void *out, char *message, size_t message_size)
{
    if (bytes == 0)
        return 0;
    return collective(g, ALL_GATHER, bytes, message, message_size, [&](Call &call) {
        memmove(static_cast<unsigned char *>(out) + (size_t)g->rank * bytes, data, bytes);
        auto *all = call.buffer(out, bytes * (size_t)g->size);
        const int next = (g->rank + 1) % g->size, prev = (g->rank + g->size - 1) % g->size;
        for (int i = 0; i < g->size - 1; i++) {
            size_t give = (size_t)((g->rank - i + g->size) % g->size),
                   take = (size_t)((g->rank - i - 1 + g->size) % g->size);
            call.recv(all, prev, take * bytes, bytes);
            call.send(all, next, give * bytes, bytes);
            call.received(all);
            call.sent(all);
        }
    });
}

void abort_calls(ps_gloo *g)
{
    std::lock_guard<std::mutex> guard(g->lock);
    g->aborted = true;
    for (auto *buffer : g->waited) {
        buffer->abortWaitRecv();
        buffer->abortWaitSend();
    }
}

void destroy(ps_gloo *g)
{
    if (!g)
        return;
    NoSigpipe no_sigpipe;
    try {
        if (g->context)
            g->context->closeConnections();
    } catch (const std::exception &) {
        /* closing once more is all that is asked */
    }
    g->context.reset();
    g->device.reset();
    delete g;
}

int create(const ps_gloo_config *config, ps_gloo **ret, char *message, size_t message_size)
{
    NoSigpipe no_sigpipe;
    ps_gloo *g = nullptr;
    try {
        g = new ps_gloo;
        g->rank = config->rank;
        g->size = config->world_size;
        g->timeout = milliseconds((long)(config->collective_s * 1000.0));
        gloo::transport::tcp::attr attr;
        attr.hostname = config->address;
        {
            NoSignals no_signals;
            g->device = gloo::transport::tcp::CreateDevice(attr);
        }
        g->context = std::make_shared<gloo::rendezvous::Context>(g->rank, g->size);
        /* Gloo waits five times this long for each connection (Pair::waitUntil). */
        g->context->setTimeout(milliseconds(std::max(1L, (long)(config->connect_s * 200.0))));
        Store store(config->store, Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                      std::chrono::duration<double>(config->connect_s)));
        g->context->connectFullMesh(store, g->device);
        *ret = g;
        return 0;
    } catch (const Failure &e) {
        destroy(g);
        return fail(message, message_size, e.code, e.what());
    } catch (const gloo::IoException &e) {
        destroy(g);
        return fail(message, message_size, PS_UNAVAILABLE, plain(e));
    } catch (const std::exception &e) {
        destroy(g);
        return fail(message, message_size, PS_INTERNAL, plain(e));
    }
}

const ps_gloo_ops ops = {PS_GLOO_ABI, create, destroy, all_reduce, broadcast, all_gather, abort_calls};

} // namespace

extern "C" __attribute__((visibility("default"))) const ps_gloo_ops *ps_gloo_module(void)
{
    return &ops;
}
