/* SPDX-License-Identifier: Apache-2.0
 * Stand-in for NCCL: ranks in one process or in several on this machine meet in shared memory named by the
 * unique id. Collectives run in stream order. Like the real one it waits without end for a rank that is gone:
 * ncclCommAbort ends the wait.
 *
 * All ranks' call number n must be the same collective with the same count, type, operation and root; else
 * each rank reports both and its asynchronous error becomes ncclInvalidUsage.
 *
 * Environment: PS_FAKE_NCCL_ERROR=rank:n (asynchronous error at the rank's n-th collective),
 * PS_FAKE_NCCL_HANG= rank:n (never arrives there), PS_FAKE_NCCL_DELAY_US (each collective takes that much
 * longer).
 */
#include "fake.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_bf16.h>
#include <fcntl.h>
#include <mutex>
#include <nccl.h>
#include <set>
#include <string>
#include <sys/mman.h>
#include <sys/random.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace
{

constexpr int MAX_RANKS = 64;
constexpr size_t CHUNK = 256 << 10;

struct Call { /* what the ranks must agree on */
    int kind, type, op, root;
    size_t count;
};

/* In shared memory, zero at first. A rank's round r data may be read when ready >= r; it may be overwritten
 * when everyone's done >= r. */
struct Slot {
    std::atomic<int> joined; /* device + 1 */
    std::atomic<uint64_t> ready, done;
    Call call;
    size_t pieces;
    unsigned char data[CHUNK];
};

const char *const KINDS[] = {"AllReduce", "Broadcast", "AllGather", "Reduce"};

size_t width(int type)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 4;
    }
}

} // namespace

struct ncclComm {
    int rank, size, device;
    Slot *slots = nullptr;
    std::atomic<bool> aborted{false};
    std::atomic<int> state{ncclInProgress};
    std::thread starter;
    uint64_t round = 0; /* of the stream's thread */
    long calls = 0;     /* of the stream's thread */
    cudaStream_t stream = nullptr;
};

namespace
{

std::mutex guard; /* comms */
std::set<ncclComm_t> comms;
thread_local int depth;
thread_local std::vector<std::function<ncclResult_t()>> grouped;
thread_local std::vector<ncclComm_t> starting;

bool lives(ncclComm_t c, const char *call)
{
    std::lock_guard<std::mutex> hold(guard);
    if (!comms.count(c)) {
        fake::report("%s: a communicator that was destroyed or never made", call);
        return false;
    }
    return true;
}

/* Waits for every rank; false after an abort. */
template <typename F> bool all(ncclComm_t c, F reached)
{
    for (int r = 0; r < c->size; r++) {
        for (int spins = 0; !reached(c->slots[r]); spins++) {
            if (c->aborted) {
                return false;
            }
            if (spins > 100) {
                std::this_thread::sleep_for(std::chrono::microseconds(50));
            }
        }
    }
    return true;
}

void start(ncclComm_t c, std::string name)
{
    int fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    size_t bytes = sizeof(Slot) * (size_t)c->size;
    void *p = fd < 0 || ftruncate(fd, (off_t)bytes)
                  ? MAP_FAILED
                  : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) {
        close(fd);
    }
    if (p == MAP_FAILED) {
        c->state = ncclSystemError;
        return;
    }
    c->slots = static_cast<Slot *>(p);
    int nobody = 0;
    if (!c->slots[c->rank].joined.compare_exchange_strong(nobody, c->device + 1)) {
        fake::report("ncclCommInitRank: rank %d is there twice", c->rank);
        c->state = ncclInvalidUsage;
        return;
    }
    if (!all(c, [](Slot &s) { return s.joined.load() != 0; })) {
        shm_unlink(name.c_str());
        return;
    }
    shm_unlink(name.c_str());
    for (int r = 0; r < c->size; r++) {
        if (r != c->rank && c->slots[r].joined == c->device + 1) {
            fake::report("Duplicate GPU detected: rank %d and rank %d both on device %d",
                         std::min(r, c->rank), std::max(r, c->rank), c->device);
            c->state = ncclInvalidUsage;
            return;
        }
    }
    c->state = ncclSuccess;
}

bool injected(const char *name, ncclComm_t c)
{
    const char *text = getenv(name);
    int rank;
    long n;
    return text && sscanf(text, "%d:%ld", &rank, &n) == 2 && rank == c->rank && n == c->calls;
}

double number(const unsigned char *p, size_t i, int type)
{
    switch (type) {
    case ncclInt8:
        return ((const int8_t *)p)[i];
    case ncclUint8:
        return p[i];
    case ncclInt32:
        return ((const int32_t *)p)[i];
    case ncclUint32:
        return ((const uint32_t *)p)[i];
    case ncclFloat64:
        return ((const double *)p)[i];
    case ncclBfloat16:
        return __bfloat162float(((const __nv_bfloat16 *)p)[i]);
    default:
        return ((const float *)p)[i];
    }
}

template <typename T> void reduce_exact(ncclComm_t c, unsigned char *out, size_t n, int op)
{
    for (size_t i = 0; i < n; i++) {
        T sum = ((const T *)c->slots[0].data)[i];
        for (int r = 1; r < c->size; r++) {
            T v = ((const T *)c->slots[r].data)[i];
            sum = op == ncclMax    ? std::max(sum, v)
                  : op == ncclMin  ? std::min(sum, v)
                  : op == ncclProd ? sum * v
                                   : sum + v;
        }
        ((T *)out)[i] = op == ncclAvg ? (T)(sum / (T)c->size) : sum;
    }
}

/* In the order of the ranks, so that all get the same bits. */
void reduce(ncclComm_t c, unsigned char *out, size_t n, int type, int op)
{
    switch (type) {
    case ncclFloat32:
        reduce_exact<float>(c, out, n, op);
        return;
    case ncclFloat64:
        reduce_exact<double>(c, out, n, op);
        return;
    case ncclInt32:
        reduce_exact<int32_t>(c, out, n, op);
        return;
    case ncclInt64:
        reduce_exact<int64_t>(c, out, n, op);
        return;
    case ncclUint64:
        reduce_exact<uint64_t>(c, out, n, op);
        return;
    case ncclUint8:
        reduce_exact<uint8_t>(c, out, n, op);
        return;
    default:
        break;
    }
    for (size_t i = 0; i < n; i++) { /* bfloat16: summed in float32, rounded once */
        float sum = 0;
        for (int r = 0; r < c->size; r++) {
            float v = (float)number(c->slots[r].data, i, type);
            sum = !r ? v : op == ncclMax ? std::max(sum, v) : op == ncclMin ? std::min(sum, v) : sum + v;
        }
        ((__nv_bfloat16 *)out)[i] = __float2bfloat16_rn(op == ncclAvg ? sum / (float)c->size : sum);
    }
}

void perform(ncclComm_t c, Call call, const void *from, void *to)
{
    c->calls++;
    if (c->aborted || c->state != ncclSuccess) {
        return;
    }
    if (injected("PS_FAKE_NCCL_ERROR", c)) {
        c->state = ncclRemoteError;
        return;
    }
    while (injected("PS_FAKE_NCCL_HANG", c) && !c->aborted) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    long delay = fake::environment("PS_FAKE_NCCL_DELAY_US", 0);
    if (delay > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(delay));
    }
    size_t one = width(call.type), total = call.count * one, ranks = (size_t)c->size;
    bool root = c->rank == call.root, sends = call.kind != 1 || root, receives = call.kind != 3 || root;
    if (sends) {
        fake::touch(from, total, false);
    }
    if (receives) {
        fake::touch(to, call.kind == 2 ? total * ranks : total, true);
    }
    Slot &mine = c->slots[c->rank];
    for (size_t at = 0; at < total || at == 0; at += CHUNK) {
        size_t n = std::min(CHUNK, total - at);
        uint64_t round = ++c->round;
        mine.call = call;
        if (sends) {
            memcpy(mine.data, (const unsigned char *)from + at, n);
        }
        mine.ready = round;
        if (!all(c, [=](Slot &s) { return s.ready.load() >= round; })) {
            return;
        }
        for (int r = 0; r < c->size; r++) {
            const Call &o = c->slots[r].call;
            if (o.kind != call.kind || o.type != call.type || o.op != call.op || o.root != call.root ||
                o.count != call.count) {
                fake::report("collective %ld differs: rank %d calls %s of %zu (type %d, op %d, root %d), "
                             "rank %d calls %s "
                             "of %zu (type %d, op %d, root %d)",
                             c->calls, c->rank, KINDS[call.kind], call.count, call.type, call.op, call.root,
                             r, KINDS[o.kind], o.count, o.type, o.op, o.root);
                c->state = ncclInvalidUsage;
                mine.done = round;
                return;
            }
        }
        unsigned char *out = (unsigned char *)to + at;
        if (call.kind == 0 || (call.kind == 3 && root)) {
            reduce(c, out, n / one, call.type, call.op);
        } else if (call.kind == 1) {
            memcpy(out, c->slots[call.root].data, n);
        } else if (call.kind == 2) {
            for (size_t r = 0; r < ranks; r++) {
                memcpy(out + r * total, c->slots[r].data, n);
            }
        }
        mine.done = round;
        if (!all(c, [=](Slot &s) { return s.done.load() >= round; })) {
            return;
        }
    }
}

ncclResult_t collective(ncclComm_t c, Call call, const void *from, void *to, cudaStream_t stream)
{
    if (!lives(c, KINDS[call.kind])) {
        return ncclInvalidArgument;
    }
    if (c->aborted || (c->state != ncclSuccess && c->state != ncclInProgress)) {
        return ncclInvalidUsage;
    }
    if (c->state == ncclInProgress) {
        fake::report("nccl%s before the communicator is ready", KINDS[call.kind]);
        return ncclInvalidUsage;
    }
    size_t total = call.count * width(call.type), whole = call.kind == 2 ? total * (size_t)c->size : total;
    bool root = c->rank == call.root;
    if (call.root < 0 || call.root >= c->size || call.type == ncclFloat16 || call.type < 0 ||
        call.type > ncclBfloat16) {
        fake::report("nccl%s: bad root or type", KINDS[call.kind]);
        return ncclInvalidArgument;
    }
    if (c->device != fake::current_device() ||
        (total && (((call.kind != 1 || root) && !fake::device_range(from, total, KINDS[call.kind])) ||
                   ((call.kind != 3 || root) && !fake::device_range(to, whole, KINDS[call.kind]))))) {
        return ncclInvalidArgument;
    }
    auto issue = [=]() {
        cudaSetDevice(c->device);
        return fake::submit(stream, KINDS[call.kind], [=]() { perform(c, call, from, to); })
                   ? ncclUnhandledCudaError
                   : ncclSuccess;
    };
    if (depth) {
        grouped.push_back(issue);
        return ncclSuccess;
    }
    return issue();
}

ncclResult_t begin(ncclComm_t *ret, int size, ncclUniqueId id, int rank, int blocking)
{
    *ret = nullptr;
    if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size || memcmp(id.internal, "/psfakenccl-", 12)) {
        fake::report("ncclCommInitRank: rank %d of %d, or an id that ncclGetUniqueId did not give", rank,
                     size);
        return ncclInvalidArgument;
    }
    id.internal[sizeof id.internal - 1] = 0;
    ncclComm_t c = new ncclComm;
    c->rank = rank, c->size = size, c->device = fake::current_device();
    {
        std::lock_guard<std::mutex> hold(guard);
        comms.insert(c);
    }
    *ret = c;
    c->starter = std::thread(start, c, std::string(id.internal));
    if (!blocking) {
        return ncclInProgress;
    }
    if (depth) {
        starting.push_back(c);
        return ncclSuccess;
    }
    c->starter.join();
    return (ncclResult_t)c->state.load();
}

ncclResult_t end(ncclComm_t c, const char *call, bool abort)
{
    if (!lives(c, call)) {
        return ncclInvalidArgument;
    }
    if (abort) {
        c->aborted = true;
    }
    if (c->starter.joinable()) {
        c->starter.join();
    }
    int before = fake::current_device();
    cudaSetDevice(c->device);
    cudaDeviceSynchronize(); /* nothing in flight uses it any more */
    cudaSetDevice(before);
    {
        std::lock_guard<std::mutex> hold(guard);
        comms.erase(c);
    }
    if (c->slots) {
        munmap(c->slots, sizeof(Slot) * (size_t)c->size);
    }
    delete c;
    return ncclSuccess;
}

} // namespace

extern "C" {

ncclResult_t ncclGetVersion(int *v)
{
    *v = NCCL_VERSION_CODE;
    return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    unsigned char random[16];
    memset(id, 0, sizeof *id);
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) {
        return ncclSystemError;
    }
    char *p = id->internal + sprintf(id->internal, "/psfakenccl-");
    for (unsigned char b : random) {
        p += sprintf(p, "%02x", b);
    }
    return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *ret, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    if (config && config->magic != 0xcafebeef) {
        fake::report("ncclCommInitRankConfig: the configuration was not initialised");
        return ncclInvalidArgument;
    }
    return begin(ret, size, id, rank, !config || config->blocking != 0);
}
ncclResult_t ncclCommInitRank(ncclComm_t *ret, int size, ncclUniqueId id, int rank)
{
    return begin(ret, size, id, rank, 1);
}
ncclResult_t ncclCommInitAll(ncclComm_t *ret, int n, const int *devices)
{
    ncclUniqueId id;
    int before = fake::current_device();
    ncclResult_t result = ncclGetUniqueId(&id);
    ncclGroupStart();
    for (int i = 0; i < n && !result; i++) {
        cudaSetDevice(devices ? devices[i] : i);
        result = begin(&ret[i], n, id, i, 1);
    }
    cudaSetDevice(before);
    ncclResult_t ended = ncclGroupEnd();
    return result ? result : ended;
}
ncclResult_t ncclCommFinalize(ncclComm_t c)
{
    return lives(c, "ncclCommFinalize") ? ncclSuccess : ncclInvalidArgument;
}
ncclResult_t ncclCommDestroy(ncclComm_t c)
{
    return end(c, "ncclCommDestroy", false);
}
ncclResult_t ncclCommAbort(ncclComm_t c)
{
    return end(c, "ncclCommAbort", true);
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *ret)
{
    if (!lives(c, "ncclCommGetAsyncError")) {
        return ncclInvalidArgument;
    }
    *ret = (ncclResult_t)c->state.load();
    return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t c, int *ret)
{
    *ret = c->size;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *ret)
{
    *ret = c->rank;
    return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t c, int *ret)
{
    *ret = c->device;
    return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t c, void *p, size_t n, void **handle)
{
    *handle = p;
    return lives(c, "ncclCommRegister") && fake::device_range(p, n, "ncclCommRegister") ? ncclSuccess
                                                                                        : ncclInvalidArgument;
}
ncclResult_t ncclCommDeregister(const ncclComm_t c, void *)
{
    return lives(c, "ncclCommDeregister") ? ncclSuccess : ncclInvalidArgument;
}
ncclResult_t ncclMemAlloc(void **p, size_t n)
{
    return cudaMalloc(p, n) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclMemFree(void *p)
{
    return cudaFree(p) ? ncclUnhandledCudaError : ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t r)
{
    switch (r) {
    case ncclSuccess:
        return "no error";
    case ncclInProgress:
        return "NCCL operation in progress";
    case ncclInvalidUsage:
        return "invalid usage";
    case ncclInvalidArgument:
        return "invalid argument";
    case ncclRemoteError:
        return "remote process exited or there was a network error";
    default:
        return "NCCL error of the stand-in";
    }
}
const char *ncclGetLastError(ncclComm_t)
{
    return ps_fake_last_report();
}
ncclResult_t ncclGroupStart(void)
{
    depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void)
{
    if (depth < 1) {
        fake::report("ncclGroupEnd without ncclGroupStart");
        return ncclInvalidUsage;
    }
    if (--depth) {
        return ncclSuccess;
    }
    ncclResult_t result = ncclSuccess;
    for (ncclComm_t c : starting) {
        c->starter.join();
        result = result ? result : (ncclResult_t)c->state.load();
    }
    starting.clear();
    int before = fake::current_device();
    for (auto &issue : grouped) {
        ncclResult_t one = issue();
        result = result ? result : one;
    }
    cudaSetDevice(before);
    grouped.clear();
    return result;
}
ncclResult_t ncclAllReduce(const void *from, void *to, size_t n, ncclDataType_t t, ncclRedOp_t op,
                           ncclComm_t c, cudaStream_t s)
{
    return collective(c, {0, t, op, 0, n}, from, to, s);
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t n, ncclDataType_t t, int root, ncclComm_t c,
                           cudaStream_t s)
{
    return collective(c, {1, t, 0, root, n}, from, to, s);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t n, ncclDataType_t t, ncclComm_t c,
                           cudaStream_t s)
{
    return collective(c, {2, t, 0, 0, n}, from, to, s);
}
ncclResult_t ncclReduce(const void *from, void *to, size_t n, ncclDataType_t t, ncclRedOp_t op, int root,
                        ncclComm_t c, cudaStream_t s)
{
    return collective(c, {3, t, op, root, n}, from, to, s);
}

} // extern "C"
