/* SPDX-License-Identifier: Apache-2.0
 * Stand-in for the CUDA runtime: memory, streams on threads, events, graphs. See fake.h. */
#include "fake.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

using fake::Clock;
using Work = std::function<void()>;

namespace
{

struct Node {
    const char *name;
    Work work;
    int branch; /* which captured stream */
    std::vector<int> after;
};

struct Place { /* the sequence-th operation of a stream */
    int stream;
    uint32_t sequence;
};

struct Operation {
    fake::Running what;
    Work work;
    std::vector<Place> after;
};

} // namespace

struct CUgraph_st {
    std::vector<Node> nodes;
    std::vector<cudaStream_t> branches; /* captured streams; [0] is the origin */
    bool broken = false;
};

struct CUgraphExec_st {
    std::vector<Node> nodes;
    std::vector<cudaStream_t> streams; /* [0] is null: the stream it is launched on */
};

struct CUstream_st {
    int id = 0, device = 0;
    bool blocking = true, closing = false;
    Clock clock{};
    uint32_t last = 0; /* queued */
    std::vector<Place> pending;
    std::deque<Operation> queue;
    cudaGraph_t capture = nullptr;
    int branch = 0;
    std::vector<int> frontier; /* nodes that the next captured one comes after */
    std::thread thread;
};

struct CUevent_st {
    int device = 0;
    bool recorded = false, timed = true;
    Place place{};
    Clock clock{};
    cudaGraph_t capture = nullptr;
    std::vector<int> frontier;
    std::shared_ptr<double> time;
};

namespace
{

constexpr size_t ARENA = 64ull << 30;
constexpr size_t PAGE = 4096;
constexpr uint32_t NONE = 0xffffffffu;

struct Allocation {
    size_t bytes;
    int device;
    bool host;
};

struct World {
    std::mutex lock; /* all below */
    std::condition_variable changed;
    unsigned char *arena;
    uint32_t *writers, *readers;
    size_t used = PAGE;
    std::map<uintptr_t, Allocation> memory;
    std::set<uintptr_t> freed;
    std::set<cudaStream_t> streams;
    std::set<cudaEvent_t> events;
    std::set<cudaGraph_t> graphs;
    std::set<cudaGraphExec_t> execs;
    std::array<bool, fake::MAX_STREAMS> ids{};
    std::array<uint32_t, fake::MAX_STREAMS> done{}, queued{};
    std::array<std::map<uint32_t, const char *>, fake::MAX_STREAMS> names;
    Clock host{};
    std::map<int, cudaStream_t> legacy;
    std::map<int, size_t> in_use;
    long allocations = 0;
    size_t captures = 0;

    std::mutex report_lock; /* the two below */
    int reports = 0;
    std::string last;
    std::set<std::string> said;

    World()
    {
        auto reserve = [](int protection) {
            void *p = mmap(nullptr, ARENA, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) {
                fprintf(stderr, "fakegpu: cannot reserve addresses\n");
                abort();
            }
            return p;
        };
        arena = static_cast<unsigned char *>(reserve(PROT_NONE));
        writers = static_cast<uint32_t *>(reserve(PROT_READ | PROT_WRITE));
        readers = static_cast<uint32_t *>(reserve(PROT_READ | PROT_WRITE));
    }
};

World &world();

void at_end()
{
    World &w = world();
    for (auto &m : w.memory) {
        if (!m.second.host) {
            fake::report("leak: %zu bytes of device %d were never freed", m.second.bytes, m.second.device);
        }
    }
    if (!w.events.empty()) {
        fake::report("leak: %zu events were never destroyed", w.events.size());
    }
    if (w.reports && fake::environment("PS_FAKE_GPU_STRICT", 0)) {
        fflush(nullptr);
        _exit(86);
    }
}

World &world()
{
    static World *it = []() {
        fprintf(stderr,
                "fakegpu: this is a stand-in that computes on the host; its times say nothing about a GPU\n");
        atexit(at_end);
        return new World;
    }();
    return *it;
}

thread_local int device;
thread_local cudaError_t last_error = cudaSuccess;

using Hold = std::unique_lock<std::mutex>;

void join(Clock &into, const Clock &from)
{
    for (int i = 0; i < fake::MAX_STREAMS; i++) {
        into[i] = std::max(into[i], from[i]);
    }
}

void serve(cudaStream_t s)
{
    World &w = world();
    std::mt19937 random((unsigned)fake::environment("PS_FAKE_GPU_SEED", 0) * 977 + (unsigned)s->id);
    bool delays = fake::environment("PS_FAKE_GPU_SEED", 0) != 0;
    device = s->device;
    Hold hold(w.lock);
    for (;;) {
        w.changed.wait(hold, [&]() { return s->closing || !s->queue.empty(); });
        if (s->queue.empty()) {
            return;
        }
        Operation op = std::move(s->queue.front());
        s->queue.pop_front();
        w.changed.wait(hold, [&]() {
            for (const Place &p : op.after) {
                if (w.done[p.stream] < p.sequence) {
                    return false;
                }
            }
            return true;
        });
        hold.unlock();
        if (delays && random() % 4 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
        }
        fake::running = &op.what;
        op.work();
        fake::running = nullptr;
        op.work = nullptr;
        hold.lock();
        w.done[s->id] = op.what.sequence;
        w.changed.notify_all();
    }
}

cudaStream_t open_stream(World &w, bool blocking, int on)
{ /* locked */
    for (int id = 0; id < fake::MAX_STREAMS; id++) {
        if (!w.ids[id]) {
            w.ids[id] = true;
            cudaStream_t s = new CUstream_st;
            s->id = id;
            s->device = on;
            s->blocking = blocking;
            s->last = w.queued[id];
            w.streams.insert(s);
            s->thread = std::thread(serve, s);
            return s;
        }
    }
    return nullptr;
}

/* The stream behind a handle; null if there is none. */
cudaStream_t resolve(World &w, cudaStream_t s)
{ /* locked */
    if (s == nullptr || s == cudaStreamLegacy) {
        cudaStream_t &legacy = w.legacy[device];
        if (!legacy) {
            legacy = open_stream(w, true, device);
        }
        return legacy;
    }
    return w.streams.count(s) ? s : nullptr;
}

uint32_t queue(World &w, cudaStream_t s, const char *name, Work work)
{ /* locked */
    join(s->clock, w.host);
    std::vector<Place> after = std::move(s->pending);
    s->pending.clear();
    bool legacy = w.legacy.count(s->device) && w.legacy[s->device] == s;
    for (cudaStream_t other :
         w.streams) { /* the default stream waits for the blocking ones and they for it */
        bool other_legacy = w.legacy.count(s->device) && w.legacy[s->device] == other;
        if (other != s && other->device == s->device && other->blocking && s->blocking &&
            (legacy || other_legacy)) {
            after.push_back({other->id, other->last});
            join(s->clock, other->clock);
        }
    }
    s->last = ++w.queued[s->id];
    s->clock[s->id] = s->last;
    auto &names = w.names[s->id];
    names[s->last] = name;
    if (names.size() > 4096) {
        names.erase(names.begin());
    }
    s->queue.push_back({{name, s->id, s->last, s->clock}, std::move(work), std::move(after)});
    w.changed.notify_all();
    return s->last;
}

void wait(World &w, Hold &hold, int id, uint32_t sequence, const Clock &clock)
{
    w.changed.wait(hold, [&]() { return w.done[id] >= sequence; });
    join(w.host, clock);
}

/* Calls that may not be made while a stream is captured. */
bool refused_in_capture(World &w, cudaStream_t s, const char *call)
{ /* locked */
    if (s ? s->capture == nullptr : w.captures == 0) {
        return false;
    }
    for (cudaStream_t t : w.streams) {
        if (t->capture && (!s || t->capture == s->capture)) {
            t->capture->broken = true;
        }
    }
    fake::report("%s is not possible while a stream is captured", call);
    return true;
}

const char *name_of(World &w, uint32_t id)
{
    Hold hold(w.lock);
    auto &names = w.names[id >> 26];
    auto found = names.find(id & 0x3ffffff);
    return found == names.end() ? "an earlier operation" : found->second;
}

void say_race(World &w, const char *what, uint32_t before, size_t offset)
{
    const char *other = name_of(w, before);
    std::string key = std::string(what) + fake::running->name + other;
    {
        Hold hold(w.report_lock);
        if (!w.said.insert(key).second) {
            return;
        }
    }
    fake::report("race: %s %s (stream %d) without waiting for %s (stream %u), at offset %zu of device memory",
                 fake::running->name, what, fake::running->stream, other, before >> 26, offset);
}

cudaError_t allocate(void **ret, size_t bytes, bool host)
{
    World &w = world();
    *ret = nullptr;
    Hold hold(w.lock);
    if (refused_in_capture(w, nullptr, "allocating")) {
        return fake::fail(cudaErrorStreamCaptureUnsupported);
    }
    if (!bytes) {
        return cudaSuccess;
    }
    if (host) {
        void *p = aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
        if (!p) {
            return fake::fail(cudaErrorMemoryAllocation);
        }
        w.memory[(uintptr_t)p] = {bytes, device, true};
        *ret = p;
        return cudaSuccess;
    }
    size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    if (++w.allocations == fake::environment("PS_FAKE_GPU_FAIL_ALLOC", -1) || w.used + whole + PAGE > ARENA) {
        return fake::fail(cudaErrorMemoryAllocation);
    }
    unsigned char *p = w.arena + w.used;
    if (mprotect(p, whole, PROT_READ | PROT_WRITE)) {
        return fake::fail(cudaErrorMemoryAllocation);
    }
    memset(p, 0xff, whole); /* NaN: what is read before it is written shows */
    for (size_t i = (bytes + 3) / 4; i < whole / 4; i++) {
        w.writers[w.used / 4 + i] = NONE;
    }
    w.used += whole + PAGE;
    w.memory[(uintptr_t)p] = {bytes, device, false};
    w.in_use[device] += bytes;
    *ret = p;
    return cudaSuccess;
}

void drain(World &w, Hold &hold)
{
    for (cudaStream_t s : std::set<cudaStream_t>(w.streams)) {
        if (w.streams.count(s) && s->device == device) {
            wait(w, hold, s->id, s->last, s->clock);
        }
    }
}

cudaError_t release(void *p, bool host, bool immediately)
{
    World &w = world();
    if (!p) {
        return cudaSuccess;
    }
    Hold hold(w.lock);
    if (immediately) {
        drain(w, hold);
    }
    auto found = w.memory.find((uintptr_t)p);
    if (found == w.memory.end() || found->second.host != host) {
        fake::report(
            w.freed.count((uintptr_t)p) ? "double free of %p" : "free of %p, which was never allocated", p);
        return fake::fail(cudaErrorInvalidValue);
    }
    w.freed.insert((uintptr_t)p);
    Allocation gone = found->second;
    w.memory.erase(found);
    if (host) {
        free(p);
        w.freed.erase((uintptr_t)p);
        return cudaSuccess;
    }
    w.in_use[gone.device] -= gone.bytes;
    size_t whole = (gone.bytes + PAGE - 1) / PAGE * PAGE, at = (size_t)((unsigned char *)p - w.arena);
    for (size_t i = 0; i < whole / 4; i++) {
        w.writers[at / 4 + i] = NONE;
    }
    madvise(p, whole, MADV_DONTNEED);
    mprotect(p, whole, PROT_NONE);
    return cudaSuccess;
}

bool in_arena(const void *p)
{
    World &w = world();
    return (const unsigned char *)p >= w.arena && (const unsigned char *)p < w.arena + ARENA;
}

} // namespace

namespace fake
{

__thread const Running *running;

long environment(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

void report(const char *format, ...)
{
    World &w = world();
    char line[512];
    va_list list;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    Hold hold(w.report_lock);
    w.reports++;
    w.last = line;
    fprintf(stderr, "fakegpu: %s\n", line);
    if (const char *path = getenv("PS_FAKE_GPU_LOG")) {
        if (FILE *f = fopen(path, "ae")) {
            fprintf(f, "%d %s\n", (int)getpid(), line);
            fclose(f);
        }
    }
}

cudaError_t fail(cudaError_t error)
{
    last_error = error;
    return error;
}

int current_device()
{
    return device;
}

cudaError_t submit(cudaStream_t stream, const char *name, Work work)
{
    World &w = world();
    Hold hold(w.lock);
    cudaStream_t s = resolve(w, stream);
    if (!s) {
        report("%s on a stream that was destroyed or never made", name);
        return fail(cudaErrorInvalidResourceHandle);
    }
    if (s->device != device) {
        report("%s: the stream belongs to device %d, the current one is %d", name, s->device, device);
        return fail(cudaErrorInvalidResourceHandle);
    }
    if (s->capture) {
        s->capture->nodes.push_back({name, std::move(work), s->branch, s->frontier});
        s->frontier = {(int)s->capture->nodes.size() - 1};
        return cudaSuccess;
    }
    if (stream == nullptr && refused_in_capture(w, nullptr, "work on the default stream")) {
        return fail(cudaErrorStreamCaptureImplicit);
    }
    queue(w, s, name, std::move(work));
    return cudaSuccess;
}

bool stream_alive(cudaStream_t stream)
{
    World &w = world();
    Hold hold(w.lock);
    return stream == nullptr || w.streams.count(stream);
}

bool device_range(const void *p, size_t bytes, const char *what)
{
    World &w = world();
    Hold hold(w.lock);
    auto after = w.memory.upper_bound((uintptr_t)p);
    if (after != w.memory.begin()) {
        auto m = std::prev(after);
        if ((uintptr_t)p + bytes <= m->first + m->second.bytes && !m->second.host) {
            if (m->second.device == device) {
                return true;
            }
            hold.unlock();
            report("%s: memory of device %d used on device %d", what, m->second.device, device);
            return false;
        }
    }
    hold.unlock();
    report("%s: [%p, +%zu) is not live device memory", what, p, bytes);
    return false;
}

void touch(const void *p, size_t bytes, bool write)
{
    World &w = world();
    size_t at = (size_t)((const unsigned char *)p - w.arena);
    if (at >= ARENA || !bytes) {
        return;
    }
    if (!running) {
        report("the host touches device memory at %p", p);
        return;
    }
    uint32_t self = (uint32_t)running->stream << 26 | (running->sequence & 0x3ffffff);
    auto ordered = [&](uint32_t before) {
        int s = (int)(before >> 26);
        return !before || s == running->stream || running->clock[s] >= (before & 0x3ffffff);
    };
    for (size_t g = at / 4; g <= (at + bytes - 1) / 4; g++) {
        uint32_t writer = __atomic_load_n(&w.writers[g], __ATOMIC_RELAXED);
        if (writer == NONE) {
            report("%s %s device memory out of bounds or after free, at %p", running->name,
                   write ? "writes" : "reads", (const void *)p);
            return;
        }
        /* First leaves its mark, then looks: of two accesses at the same moment one sees the other's. */
        if (write) {
            writer = __atomic_exchange_n(&w.writers[g], self, __ATOMIC_SEQ_CST);
            uint32_t reader = __atomic_load_n(&w.readers[g], __ATOMIC_SEQ_CST);
            if (!ordered(reader)) {
                say_race(w, "overwrites what is read", reader, g * 4);
            }
        } else {
            __atomic_exchange_n(&w.readers[g], self, __ATOMIC_SEQ_CST);
            writer = __atomic_load_n(&w.writers[g], __ATOMIC_SEQ_CST);
        }
        if (!ordered(writer)) {
            say_race(w, write ? "overwrites what is written" : "reads what is written", writer, g * 4);
        }
    }
}

} // namespace fake

using namespace fake;

extern "C" {

int ps_fake_reports(void)
{
    return world().reports;
}
const char *ps_fake_last_report(void)
{
    return world().last.c_str();
}
void ps_fake_clear_reports(void)
{
    world().reports = 0;
    world().last.clear();
    world().said.clear();
}

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = (int)environment("PS_FAKE_GPU_COUNT", 1);
    return *n > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int d)
{
    if (d < 0 || d >= environment("PS_FAKE_GPU_COUNT", 1)) {
        return fail(cudaErrorInvalidDevice);
    }
    device = d;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *d)
{
    *d = device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d)
{
    if (d < 0 || d >= environment("PS_FAKE_GPU_COUNT", 1)) {
        return fail(cudaErrorInvalidDevice);
    }
    *p = {};
    snprintf(p->name, sizeof p->name, "Stand-in GPU (host)");
    p->uuid.bytes[0] = 'f', p->uuid.bytes[15] = (char)(d + 1);
    p->totalGlobalMem = ARENA / 8;
    p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = 227 << 10;
    p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->multiProcessorCount = 4;
    p->major = 9, p->minor = 0, p->pciBusID = d + 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d)
{
    struct cudaDeviceProp p;
    cudaError_t e = cudaGetDeviceProperties(&p, d);
    if (e) {
        return e;
    }
    switch (a) {
    case cudaDevAttrComputeCapabilityMajor:
        *v = 9;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *v = 0;
        break;
    case cudaDevAttrMultiProcessorCount:
        *v = p.multiProcessorCount;
        break;
    case cudaDevAttrWarpSize:
        *v = 32;
        break;
    case cudaDevAttrMaxThreadsPerBlock:
        *v = 1024;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *v = 227 << 10;
        break;
    case cudaDevAttrMemoryPoolsSupported:
        *v = 1;
        break;
    default:
        return fail(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int d)
{
    snprintf(text, (size_t)size, "0000:%02x:00.0", environment("PS_FAKE_GPU_SHARED", 0) ? 1 : d + 1);
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *v)
{
    *v = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *v)
{
    *v = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *left, size_t *total)
{
    World &w = world();
    Hold hold(w.lock);
    *total = ARENA / 8;
    *left = *total - std::min(*total, w.in_use[device]);
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void)
{
    World &w = world();
    Hold hold(w.lock);
    if (refused_in_capture(w, nullptr, "cudaDeviceSynchronize")) {
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    drain(w, hold);
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int)
{
    *can = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0, *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, enum cudaFuncAttribute, int)
{
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t n)
{
    return allocate(p, n, false);
}
cudaError_t cudaMallocHost(void **p, size_t n)
{
    return allocate(p, n, true);
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned)
{
    return allocate(p, n, true);
}
cudaError_t cudaFree(void *p)
{
    return release(p, false, true);
}
cudaError_t cudaFreeHost(void *p)
{
    return release(p, true, true);
}
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t)
{
    return allocate(p, n, false);
}
cudaError_t cudaFreeAsync(void *p, cudaStream_t s)
{
    return submit(s, "cudaFreeAsync", [=]() { release(p, false, false); });
}
cudaError_t cudaHostRegister(void *, size_t, unsigned)
{
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *)
{
    return cudaSuccess;
}

static cudaError_t copy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s)
{
    bool device_to = in_arena(to), device_from = in_arena(from);
    bool right = kind == cudaMemcpyDefault ||
                 (device_to == (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) &&
                  device_from == (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice));
    if (!right) {
        report("cudaMemcpy: its direction %d does not fit the pointers", (int)kind);
        return fail(cudaErrorInvalidValue);
    }
    if ((device_to && !device_range(to, n, "cudaMemcpy to")) ||
        (device_from && !device_range(from, n, "cudaMemcpy from"))) {
        return fail(cudaErrorInvalidValue);
    }
    if (!device_from &&
        device_to) { /* pageable memory is staged: the caller may reuse it at once; pinned is not */
        World &w = world();
        Hold hold(w.lock);
        auto after = w.memory.upper_bound((uintptr_t)from);
        bool pinned = after != w.memory.begin() &&
                      (uintptr_t)from < std::prev(after)->first + std::prev(after)->second.bytes;
        cudaStream_t real = resolve(w, s);
        hold.unlock();
        if (!pinned && real && !real->capture) {
            auto staged = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + n);
            return submit(s, "cudaMemcpy", [=]() { touch(to, n, true), memcpy(to, staged->data(), n); });
        }
    }
    return submit(s, "cudaMemcpy",
                  [=]() { touch(from, n, false), touch(to, n, true), memmove(to, from, n); });
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s)
{
    return n ? copy(to, from, n, kind, s) : cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind)
{
    cudaError_t e = n ? copy(to, from, n, kind, nullptr) : cudaSuccess;
    return e ? e : cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s)
{
    if (!n) {
        return cudaSuccess;
    }
    if (!device_range(p, n, "cudaMemset")) {
        return fail(cudaErrorInvalidValue);
    }
    return submit(s, "cudaMemset", [=]() { touch(p, n, true), memset(p, v, n); });
}
cudaError_t cudaMemset(void *p, int v, size_t n)
{
    return cudaMemsetAsync(p, v, n, nullptr);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *ret, unsigned flags, int)
{
    World &w = world();
    Hold hold(w.lock);
    *ret = open_stream(w, !(flags & cudaStreamNonBlocking), device);
    return *ret ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *ret, unsigned flags)
{
    return cudaStreamCreateWithPriority(ret, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *ret)
{
    return cudaStreamCreateWithPriority(ret, 0, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    World &w = world();
    Hold hold(w.lock);
    if (!w.streams.count(s)) {
        report("cudaStreamDestroy of a stream that was destroyed or never made");
        return fail(cudaErrorInvalidResourceHandle);
    }
    wait(w, hold, s->id, s->last, s->clock);
    s->closing = true;
    w.streams.erase(s);
    w.changed.notify_all();
    hold.unlock();
    s->thread.join();
    hold.lock();
    w.ids[s->id] = false;
    delete s;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
    World &w = world();
    Hold hold(w.lock);
    cudaStream_t s = resolve(w, handle);
    if (!s) {
        report("cudaStreamSynchronize of a stream that was destroyed or never made");
        return fail(cudaErrorInvalidResourceHandle);
    }
    if (refused_in_capture(w, s, "cudaStreamSynchronize")) {
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    wait(w, hold, s->id, s->last, Clock(s->clock));
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    World &w = world();
    Hold hold(w.lock);
    cudaStream_t s = resolve(w, handle);
    if (!s) {
        return fail(cudaErrorInvalidResourceHandle);
    }
    if (w.done[s->id] < s->last) {
        return cudaErrorNotReady;
    }
    join(w.host, s->clock);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *context)
{
    return submit(s, "host function", [=]() { f(context); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ret, unsigned flags)
{
    World &w = world();
    Hold hold(w.lock);
    *ret = new CUevent_st;
    (*ret)->device = device;
    (*ret)->timed = !(flags & cudaEventDisableTiming);
    w.events.insert(*ret);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *ret)
{
    return cudaEventCreateWithFlags(ret, 0);
}
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    World &w = world();
    Hold hold(w.lock);
    if (!w.events.erase(e)) {
        report("cudaEventDestroy of an event that was destroyed or never made");
        return fail(cudaErrorInvalidResourceHandle);
    }
    delete e;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t handle)
{
    World &w = world();
    Hold hold(w.lock);
    cudaStream_t s = resolve(w, handle);
    if (!s || !w.events.count(e) || e->device != s->device) {
        report("cudaEventRecord: the stream or the event does not live, or they are of two devices");
        return fail(cudaErrorInvalidResourceHandle);
    }
    e->recorded = true;
    e->capture = s->capture;
    if (s->capture) {
        e->frontier = s->frontier;
        e->frontier.push_back(-1 - s->branch);
        return cudaSuccess;
    }
    auto time = e->time = std::make_shared<double>(0);
    e->place = {
        s->id, queue(w, s, "cudaEventRecord", [=]() {
            *time =
                std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
        })};
    e->clock = s->clock;
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t e, unsigned)
{
    World &w = world();
    Hold hold(w.lock);
    cudaStream_t s = resolve(w, handle);
    if (!s || !w.events.count(e)) {
        report("cudaStreamWaitEvent: the stream or the event does not live");
        return fail(cudaErrorInvalidResourceHandle);
    }
    if (!e->recorded) {
        return cudaSuccess;
    }
    if (e->capture) {
        if (s->capture && s->capture != e->capture) {
            e->capture->broken = s->capture->broken = true;
            return fail(cudaErrorStreamCaptureMerge);
        }
        if (!s->capture) {
            if (!w.graphs.count(e->capture)) {
                return fail(cudaErrorInvalidValue);
            }
            s->capture = e->capture;
            s->branch = (int)e->capture->branches.size();
            e->capture->branches.push_back(s);
        }
        s->frontier.insert(s->frontier.end(), e->frontier.begin(), e->frontier.end());
        return cudaSuccess;
    }
    if (s->capture) {
        s->capture->broken = true;
        report("a captured stream waits for an event from outside the capture");
        return fail(cudaErrorStreamCaptureIsolation);
    }
    s->pending.push_back(e->place);
    join(s->clock, e->clock);
    return cudaSuccess;
}
static cudaError_t event_state(cudaEvent_t e, bool block)
{
    World &w = world();
    Hold hold(w.lock);
    if (!w.events.count(e)) {
        report("an event was used that was destroyed or never made");
        return fail(cudaErrorInvalidResourceHandle);
    }
    if (e->recorded && e->capture) {
        report("the host waits for an event recorded in a capture");
        return fail(cudaErrorCapturedEvent);
    }
    if (!e->recorded) {
        return cudaSuccess;
    }
    Place place = e->place;
    Clock clock = e->clock;
    if (!block && w.done[place.stream] < place.sequence) {
        return cudaErrorNotReady;
    }
    wait(w, hold, place.stream, place.sequence, clock);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    return event_state(e, true);
}
cudaError_t cudaEventQuery(cudaEvent_t e)
{
    return event_state(e, false);
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b)
{
    if (!a->timed || !b->timed || !a->recorded || !b->recorded || a->capture || b->capture) {
        return fail(cudaErrorInvalidResourceHandle);
    }
    cudaError_t e = event_state(b, false);
    if (e || (e = event_state(a, false))) {
        return e;
    }
    *ms = (float)((*b->time - *a->time) * 1e3);
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}
const char *cudaGetErrorName(cudaError_t e)
{
    return e ? "cudaError (stand-in)" : "cudaSuccess";
}
const char *cudaGetErrorString(cudaError_t e)
{
    static thread_local char text[64];
    switch (e) {
    case cudaSuccess:
        return "no error";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidValue:
        return "invalid argument";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorNoDevice:
        return "no CUDA-capable device is detected";
    case cudaErrorNotReady:
        return "device not ready";
    default:
        snprintf(text, sizeof text, "error %d of the stand-in", (int)e);
        return text;
    }
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode)
{
    World &w = world();
    Hold hold(w.lock);
    if (!s || !w.streams.count(s) || s->capture) {
        report("cudaStreamBeginCapture: not on the default stream, nor one destroyed or captured already");
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    s->capture = new CUgraph_st;
    s->capture->branches = {s};
    s->branch = 0;
    s->frontier.clear();
    w.graphs.insert(s->capture);
    w.captures++;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *ret)
{
    World &w = world();
    Hold hold(w.lock);
    *ret = !s || !s->capture    ? cudaStreamCaptureStatusNone
           : s->capture->broken ? cudaStreamCaptureStatusInvalidated
                                : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *)
{
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *ret)
{
    World &w = world();
    Hold hold(w.lock);
    *ret = nullptr;
    if (!w.streams.count(s) || !s->capture || s->branch != 0) {
        return fail(cudaErrorIllegalState);
    }
    cudaGraph_t g = s->capture;
    /* What the origin's end comes after. A branch is joined if its last node, or its mere fork, is among it.
     */
    std::set<int> reached;
    std::vector<int> todo = s->frontier;
    while (!todo.empty()) {
        int n = todo.back();
        todo.pop_back();
        if (reached.insert(n).second && n >= 0) {
            reached.insert(-1 - g->nodes[(size_t)n].branch);
            todo.insert(todo.end(), g->nodes[(size_t)n].after.begin(), g->nodes[(size_t)n].after.end());
        }
    }
    bool joined = true;
    for (cudaStream_t b : g->branches) {
        for (int n : b->frontier) {
            joined &= b == s || reached.count(n) > 0;
        }
        joined &= b == s || reached.count(-1 - b->branch) > 0;
    }
    for (cudaStream_t b : g->branches) {
        b->capture = nullptr;
        b->frontier.clear();
    }
    w.captures--;
    if (g->broken || !joined) {
        w.graphs.erase(g);
        if (!joined) {
            report("a stream that the capture forked was not joined before its end");
        }
        cudaError_t e = g->broken ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnjoined;
        delete g;
        return fail(e);
    }
    *ret = g;
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *, size_t *n)
{
    *n = g->nodes.size();
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret, cudaGraph_t g, unsigned long long)
{
    World &w = world();
    Hold hold(w.lock);
    if (!w.graphs.count(g)) {
        return fail(cudaErrorInvalidValue);
    }
    cudaGraphExec_t x = new CUgraphExec_st;
    x->nodes = g->nodes;
    x->streams.push_back(nullptr);
    for (size_t i = 1; i < g->branches.size(); i++) {
        x->streams.push_back(open_stream(w, false, device));
    }
    w.execs.insert(x);
    *ret = x;
    return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t)
{
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t handle)
{
    World &w = world();
    Hold hold(w.lock);
    cudaStream_t origin = resolve(w, handle);
    if (!origin || !w.execs.count(x) || origin->capture) {
        report("cudaGraphLaunch: the graph or the stream does not live");
        return fail(cudaErrorInvalidResourceHandle);
    }
    Place start = {origin->id, queue(w, origin, "graph start", []() {})};
    Clock start_clock = origin->clock;
    std::vector<Place> places;
    std::vector<Clock> clocks;
    for (const Node &n : x->nodes) {
        cudaStream_t s = n.branch ? x->streams[(size_t)n.branch] : origin;
        s->pending.push_back(start);
        join(s->clock, start_clock);
        for (int a : n.after) {
            if (a >= 0) {
                s->pending.push_back(places[(size_t)a]);
                join(s->clock, clocks[(size_t)a]);
            }
        }
        places.push_back({s->id, queue(w, s, n.name, n.work)});
        clocks.push_back(s->clock);
    }
    for (size_t i = 1; i < x->streams.size(); i++) { /* each was joined, or the capture would have failed */
        origin->pending.push_back({x->streams[i]->id, x->streams[i]->last});
        join(origin->clock, x->streams[i]->clock);
    }
    queue(w, origin, "graph end", []() {});
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    World &w = world();
    Hold hold(w.lock);
    if (!w.graphs.erase(g)) {
        report("cudaGraphDestroy of a graph that was destroyed or never made");
        return fail(cudaErrorInvalidValue);
    }
    delete g;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x)
{
    World &w = world();
    Hold hold(w.lock);
    if (!w.execs.erase(x)) {
        report("cudaGraphExecDestroy of a graph that was destroyed or never made");
        return fail(cudaErrorInvalidValue);
    }
    hold.unlock();
    for (size_t i = 1; i < x->streams.size(); i++) {
        cudaStreamDestroy(x->streams[i]);
    }
    delete x;
    return cudaSuccess;
}

} // extern "C"
