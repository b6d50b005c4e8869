/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/dist/nccl_module.h"

#include "services/base/clock.h"

#include <cuda_runtime_api.h>
#include <errno.h>
#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Checked as in trainer/backend/cuda/check.h. */
#define PS_TRY(expression)                                                                                   \
    do {                                                                                                     \
        const int try_code = (expression);                                                                   \
        if (try_code < 0)                                                                                    \
            return try_code;                                                                                 \
    } while (0)
#define PS_CUDA(call) cuda_result((call), #call, err)
#define PS_NCCL(n, call) nccl_result((n), (call), #call, err)

enum { STAGE = 4 << 20, MARKS = 16 };
static const double abort_s = 1, finalize_s = 5;
static const long wait_ns = 50000; /* between two looks at the device */

struct mark {
    cudaEvent_t event;
    double since_s;
};

struct ps_nccl {
    struct ps_nccl_config config;
    ncclComm_t comm;
    cudaStream_t stream; /* of all collectives: one order */
    cudaEvent_t ready, done, staged;
    void *device_stage, *host_stage; /* 2 * STAGE each */
    atomic_bool aborted;
    bool failed; /* the main thread has seen an error */

    pthread_mutex_t calls; /* held in calls that use comm; guards comm, which break_off takes away */
    pthread_mutex_t lock;  /* guards the marks */
    pthread_cond_t changed;
    struct mark marks[MARKS];
    int first_mark, mark_count;
};

static int cuda_result(cudaError_t result, const char *call, struct ps_error *err)
{
    if (result == cudaSuccess)
        return 0;
    (void)cudaGetLastError();
    return ps_fail(err, PS_INTERNAL, "%.*s: %s", (int)strcspn(call, "("), call, cudaGetErrorString(result));
}

/* Waits a moment, or until an abort. */
static void pause_short(struct ps_nccl *n)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += wait_ns;
    if (until.tv_nsec >= PS_NS_PER_S) {
        until.tv_nsec -= PS_NS_PER_S;
        until.tv_sec++;
    }
    pthread_mutex_lock(&n->lock);
    if (!atomic_load(&n->aborted))
        pthread_cond_timedwait(&n->changed, &n->lock, &until);
    pthread_mutex_unlock(&n->lock);
}

static int say(struct ps_nccl *n, ncclResult_t result, const char *call, struct ps_error *err)
{
    const char *last = n && n->comm ? ncclGetLastError(n->comm) : NULL;
    if (n)
        n->failed = true;
    return ps_fail(err, result == ncclRemoteError ? PS_UNAVAILABLE : PS_INTERNAL, "%.*s: %s%s%.300s",
                   (int)strcspn(call, "("), call, ncclGetErrorString(result), last && *last ? ": " : "",
                   last ? last : "");
}

/* Waits until what a non-blocking communicator was told is done on the host's side. */
static int settle(struct ps_nccl *n, const char *call, double deadline_s, struct ps_error *err)
{
    const double end = ps_monotonic_s() + deadline_s;
    for (;;) {
        ncclResult_t state = ncclSuccess;
        if (atomic_load(&n->aborted)) {
            n->failed = true;
            return ps_fail(err, PS_ABORTED, "aborted");
        }
        ncclResult_t asked = ncclCommGetAsyncError(n->comm, &state);
        if (asked == ncclSuccess && state == ncclSuccess)
            return 0;
        if (asked != ncclSuccess || state != ncclInProgress)
            return say(n, asked != ncclSuccess ? asked : state, call, err);
        if (ps_monotonic_s() > end) {
            n->failed = true;
            return ps_fail(err, PS_DEADLINE_EXCEEDED, "%.*s: not done after %g s", (int)strcspn(call, "("),
                           call, deadline_s);
        }
        pause_short(n);
    }
}

static int nccl_result(struct ps_nccl *n, ncclResult_t result, const char *call, struct ps_error *err)
{
    if (result == ncclSuccess)
        return 0;
    if (result == ncclInProgress && n)
        return settle(n, call, n->config.collective_s, err);
    return say(n, result, call, err);
}

static int module_unique_id(void *ret_id, struct ps_error *err)
{
    ncclUniqueId id;
    _Static_assert(sizeof id == PS_NCCL_ID, "the size of NCCL's id");
    PS_TRY(PS_NCCL(NULL, ncclGetUniqueId(&id)));
    memcpy(ret_id, &id, sizeof id);
    return 0;
}

/* The machine's boot and the card's place on its bus: containers of one machine have the boot in common. */
static int module_gpu(int device, char *ret_text, size_t size, struct ps_error *err)
{
    char boot[40] = "", bus[32];
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, boot, sizeof boot - 4) < 1) {
        if (fd >= 0)
            close(fd);
        return ps_fail_errno(err, errno, "/proc/sys/kernel/random/boot_id");
    }
    close(fd);
    PS_TRY(PS_CUDA(cudaDeviceGetPCIBusId(bus, sizeof bus, device)));
    snprintf(ret_text, size, "%s %s", bus, boot);
    return 0;
}

/* ncclCommAbort on a thread of its own, because it may never return. */
struct aborter {
    pthread_mutex_t lock; /* guards the two flags */
    pthread_cond_t changed;
    ncclComm_t comm;
    int device;
    bool over, left; /* the call came back; nobody waits for it any more */
};

static void aborter_free(struct aborter *a)
{
    pthread_cond_destroy(&a->changed);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

static void *run_abort(void *context)
{
    struct aborter *a = context;
    cudaSetDevice(a->device);
    ncclCommAbort(a->comm);
    pthread_mutex_lock(&a->lock);
    a->over = true;
    pthread_cond_signal(&a->changed);
    const bool left = a->left;
    pthread_mutex_unlock(&a->lock);
    if (left)
        aborter_free(a);
    return NULL;
}

static bool abort_comm(ncclComm_t comm, int device)
{
    pthread_t thread;
    pthread_condattr_t attributes;
    struct aborter *a = calloc(1, sizeof *a);
    if (!a)
        return false;
    a->comm = comm;
    a->device = device;
    pthread_mutex_init(&a->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&a->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    if (pthread_create(&thread, NULL, run_abort, a)) {
        aborter_free(a);
        return false;
    }
    pthread_detach(thread);
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)abort_s;
    pthread_mutex_lock(&a->lock);
    int waited = 0;
    while (!a->over && waited == 0)
        waited = pthread_cond_timedwait(&a->changed, &a->lock, &until);
    const bool over = a->over;
    a->left = !over;
    pthread_mutex_unlock(&a->lock);
    if (over)
        aborter_free(a);
    return over;
}

static int module_destroy(struct ps_nccl *n)
{
    if (!n)
        return 0;
    struct ps_error unsaid = {0}, *err = &unsaid;
    if (cudaSetDevice(n->config.device) != cudaSuccess)
        (void)cudaGetLastError();
    if (n->comm) {
        bool failed = n->failed || atomic_load(&n->aborted);
        if (!failed) {
            ncclResult_t result = ncclCommFinalize(n->comm);
            failed = result != ncclSuccess &&
                     (result != ncclInProgress || settle(n, "ncclCommFinalize", finalize_s, err) < 0);
        }
        if (!failed)
            (void)PS_NCCL(NULL, ncclCommDestroy(n->comm)); /* nothing is left to be done about it */
        else if (!abort_comm(n->comm, n->config.device))
            return PS_DEADLINE_EXCEEDED;
    }
    for (int i = 0; i < MARKS; i++)
        if (n->marks[i].event)
            cudaEventDestroy(n->marks[i].event);
    cudaEvent_t const events[] = {n->ready, n->done, n->staged};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        if (events[i])
            cudaEventDestroy(events[i]);
    if (n->device_stage)
        cudaFree(n->device_stage);
    if (n->host_stage)
        cudaFreeHost(n->host_stage);
    if (n->stream)
        cudaStreamDestroy(n->stream);
    pthread_cond_destroy(&n->changed);
    pthread_mutex_destroy(&n->lock);
    pthread_mutex_destroy(&n->calls);
    free(n);
    return 0;
}

static int build(struct ps_nccl *n, struct ps_error *err)
{
    int least = 0, greatest = 0;
    PS_TRY(PS_CUDA(cudaSetDevice(n->config.device)));
    PS_TRY(PS_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest)));
    PS_TRY(PS_CUDA(cudaStreamCreateWithPriority(&n->stream, cudaStreamNonBlocking, greatest)));
    cudaEvent_t *const events[] = {&n->ready, &n->done, &n->staged};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        PS_TRY(PS_CUDA(cudaEventCreateWithFlags(events[i], cudaEventDisableTiming)));
    for (int i = 0; i < MARKS; i++)
        PS_TRY(PS_CUDA(cudaEventCreateWithFlags(&n->marks[i].event, cudaEventDisableTiming)));
    PS_TRY(PS_CUDA(cudaMalloc(&n->device_stage, 2 * (size_t)STAGE)));
    return PS_CUDA(cudaMallocHost(&n->host_stage, 2 * (size_t)STAGE));
}

static int module_create(const struct ps_nccl_config *config, struct ps_nccl **ret, struct ps_error *err)
{
    pthread_condattr_t attributes;
    struct ps_nccl *n = calloc(1, sizeof *n);
    if (!n)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    n->config = *config;
    pthread_mutex_init(&n->lock, NULL);
    pthread_mutex_init(&n->calls, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&n->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    int code = build(n, err);
    if (code) {
        module_destroy(n);
        return code;
    }
    *ret = n;
    return 0;
}

static int module_connect(struct ps_nccl *n, struct ps_error *err)
{
    ncclConfig_t options = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    options.blocking = 0;
    memcpy(&id, n->config.id, sizeof id);
    PS_TRY(PS_CUDA(cudaSetDevice(n->config.device)));
    const ncclResult_t result =
        ncclCommInitRankConfig(&comm, n->config.world_size, id, n->config.rank, &options);
    n->comm = comm;
    if (result != ncclSuccess && result != ncclInProgress)
        return say(n, result, "ncclCommInitRankConfig", err);
    return comm ? settle(n, "ncclCommInitRankConfig", n->config.init_s, err)
                : ps_fail(err, PS_INTERNAL, "ncclCommInitRankConfig gave no communicator");
}

static int enter(struct ps_nccl *n, struct ps_error *err)
{
    if (n->failed || atomic_load(&n->aborted) || !n->comm)
        return ps_fail(err, PS_ABORTED, "aborted");
    return PS_CUDA(cudaSetDevice(n->config.device));
}

/* The host waits for the collectives' stream. */
static int wait_stage(struct ps_nccl *n, const char *what, struct ps_error *err)
{
    const double end = ps_monotonic_s() + n->config.collective_s;
    PS_TRY(PS_CUDA(cudaEventRecord(n->staged, n->stream)));
    for (;;) {
        const cudaError_t state = cudaEventQuery(n->staged);
        ncclResult_t asynchronous = ncclSuccess;
        if (state != cudaErrorNotReady && state != cudaSuccess) {
            n->failed = true;
            return cuda_result(state, what, err);
        }
        if (atomic_load(&n->aborted)) {
            n->failed = true;
            return ps_fail(err, PS_ABORTED, "aborted");
        }
        /* Also where the stream has come to its end: after an error NCCL leaves the memory as it is. */
        if (ncclCommGetAsyncError(n->comm, &asynchronous) != ncclSuccess ||
            (asynchronous != ncclSuccess && asynchronous != ncclInProgress))
            return say(n, asynchronous, what, err);
        if (state == cudaSuccess)
            return 0;
        if (ps_monotonic_s() > end) {
            n->failed = true;
            return ps_fail(err, PS_DEADLINE_EXCEEDED, "%s: not done after %g s (--collective_timeout)", what,
                           n->config.collective_s);
        }
        pause_short(n);
    }
}

static int to_device(struct ps_nccl *n, const void *from, size_t bytes, struct ps_error *err)
{
    memcpy(n->host_stage, from, bytes);
    return PS_CUDA(cudaMemcpyAsync(n->device_stage, n->host_stage, bytes, cudaMemcpyHostToDevice, n->stream));
}

static int from_device(struct ps_nccl *n, size_t at, size_t bytes, const char *what, struct ps_error *err)
{
    char *device = n->device_stage, *host = n->host_stage;
    PS_TRY(PS_CUDA(cudaMemcpyAsync(host + at, device + at, bytes, cudaMemcpyDeviceToHost, n->stream)));
    return wait_stage(n, what, err);
}

static int all_reduce_now(struct ps_nccl *n, void *data, size_t count, enum ps_dtype type,
                          struct ps_error *err)
{
    static const struct {
        ncclDataType_t type;
        size_t size;
    } types[] = {[PS_F32] = {ncclFloat32, 4},
                 [PS_F64] = {ncclFloat64, 8},
                 [PS_I64] = {ncclInt64, 8},
                 [PS_U8] = {ncclUint8, 1}};
    const size_t one = types[type].size, piece = STAGE / one;
    char *host = data;
    PS_TRY(enter(n, err));
    for (size_t at = 0; at < count; at += piece) {
        const size_t part = count - at < piece ? count - at : piece;
        PS_TRY(to_device(n, host + at * one, part * one, err));
        PS_TRY(PS_NCCL(n, ncclAllReduce(n->device_stage, n->device_stage, part, types[type].type, ncclSum,
                                        n->comm, n->stream)));
        PS_TRY(from_device(n, 0, part * one, "all-reduce", err));
        memcpy(host + at * one, n->host_stage, part * one);
    }
    return 0;
}

static int broadcast_now(struct ps_nccl *n, void *data, size_t bytes, int root, struct ps_error *err)
{
    char *host = data;
    PS_TRY(enter(n, err));
    for (size_t at = 0; at < bytes; at += STAGE) {
        const size_t part = bytes - at < STAGE ? bytes - at : STAGE;
        PS_TRY(to_device(n, host + at, part, err));
        PS_TRY(PS_NCCL(
            n, ncclBroadcast(n->device_stage, n->device_stage, part, ncclUint8, root, n->comm, n->stream)));
        PS_TRY(from_device(n, 0, part, "broadcast", err));
        memcpy(host + at, n->host_stage, part);
    }
    return 0;
}

static int all_gather_now(struct ps_nccl *n, const void *data, size_t bytes, void *out, struct ps_error *err)
{
    const size_t ranks = (size_t)n->config.world_size, piece = STAGE / ranks;
    PS_TRY(enter(n, err));
    for (size_t at = 0; at < bytes; at += piece) {
        const size_t part = bytes - at < piece ? bytes - at : piece;
        PS_TRY(to_device(n, (const char *)data + at, part, err));
        PS_TRY(PS_NCCL(n, ncclAllGather(n->device_stage, (char *)n->device_stage + STAGE, part, ncclUint8,
                                        n->comm, n->stream)));
        PS_TRY(from_device(n, STAGE, part * ranks, "all-gather", err));
        for (size_t r = 0; r < ranks; r++)
            memcpy((char *)out + r * bytes + at, (char *)n->host_stage + STAGE + r * part, part);
    }
    return 0;
}

static int queue_sum_now(struct ps_nccl *n, float *data, size_t count, struct ps_error *err)
{
    PS_TRY(enter(n, err));
    PS_TRY(PS_CUDA(cudaEventRecord(n->ready, n->config.stream)));
    PS_TRY(PS_CUDA(cudaStreamWaitEvent(n->stream, n->ready, 0)));
    return PS_NCCL(n, ncclAllReduce(data, data, count, ncclFloat32, ncclSum, n->comm, n->stream));
}

static int module_all_reduce(struct ps_nccl *n, void *data, size_t count, enum ps_dtype type,
                             struct ps_error *err)
{
    pthread_mutex_lock(&n->calls);
    const int code = all_reduce_now(n, data, count, type, err);
    pthread_mutex_unlock(&n->calls);
    return code;
}

static int module_broadcast(struct ps_nccl *n, void *data, size_t bytes, int root, struct ps_error *err)
{
    pthread_mutex_lock(&n->calls);
    const int code = broadcast_now(n, data, bytes, root, err);
    pthread_mutex_unlock(&n->calls);
    return code;
}

static int module_all_gather(struct ps_nccl *n, const void *data, size_t bytes, void *out,
                             struct ps_error *err)
{
    pthread_mutex_lock(&n->calls);
    const int code = all_gather_now(n, data, bytes, out, err);
    pthread_mutex_unlock(&n->calls);
    return code;
}

static int module_queue_sum(struct ps_nccl *n, float *data, size_t count, struct ps_error *err)
{
    pthread_mutex_lock(&n->calls);
    const int code = queue_sum_now(n, data, count, err);
    pthread_mutex_unlock(&n->calls);
    return code;
}

static int module_queue_join(struct ps_nccl *n, struct ps_error *err)
{
    PS_TRY(enter(n, err));
    PS_TRY(PS_CUDA(cudaEventRecord(n->done, n->stream)));
    return PS_CUDA(cudaStreamWaitEvent(n->config.stream, n->done, 0));
}

static int module_queue_mark(struct ps_nccl *n, struct ps_error *err)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    int code = enter(n, err);
    if (!code)
        code = PS_CUDA(cudaStreamIsCapturing(n->config.stream, &capture));
    if (code || capture != cudaStreamCaptureStatusNone) /* recorded, not queued: nothing runs yet */
        return code;
    pthread_mutex_lock(&n->lock);
    if (n->mark_count < MARKS) { /* else the older ones say enough */
        struct mark *m = &n->marks[(n->first_mark + n->mark_count) % MARKS];
        code = PS_CUDA(cudaEventRecord(m->event, n->config.stream));
        m->since_s = ps_monotonic_s();
        n->mark_count += code == 0;
    }
    pthread_mutex_unlock(&n->lock);
    return code;
}

static void module_abort(struct ps_nccl *n)
{
    atomic_store(&n->aborted, true);
    pthread_mutex_lock(&n->lock);
    pthread_cond_broadcast(&n->changed);
    pthread_mutex_unlock(&n->lock);
}

static void module_break_off(struct ps_nccl *n)
{
    module_abort(n);
    pthread_mutex_lock(&n->calls); /* what holds it sees the abort */
    if (n->comm && abort_comm(n->comm, n->config.device))
        n->comm = NULL;
    pthread_mutex_unlock(&n->calls);
}

static int module_poll(struct ps_nccl *n, struct ps_error *err)
{
    ncclResult_t state = ncclSuccess;
    int code = 0;
    if (atomic_load(&n->aborted) || cudaSetDevice(n->config.device) != cudaSuccess)
        return 0;
    if (ncclCommGetAsyncError(n->comm, &state) == ncclSuccess && state != ncclSuccess &&
        state != ncclInProgress) {
        const char *last = ncclGetLastError(n->comm);
        return ps_fail(err, PS_UNAVAILABLE, "NCCL: %s%s%.300s", ncclGetErrorString(state),
                       last && *last ? ": " : "", last ? last : "");
    }
    pthread_mutex_lock(&n->lock);
    while (n->mark_count && code == 0) {
        const struct mark *m = &n->marks[n->first_mark];
        const cudaError_t done = cudaEventQuery(m->event);
        if (done == cudaErrorNotReady) {
            if (ps_monotonic_s() - m->since_s > n->config.collective_s)
                code = ps_fail(err, PS_DEADLINE_EXCEEDED,
                               "a step's sums over the ranks are not done after %g s (--collective_timeout)",
                               n->config.collective_s);
            break;
        }
        code = cuda_result(done, "a step on the GPU", err);
        n->first_mark = (n->first_mark + 1) % MARKS;
        n->mark_count--;
    }
    pthread_mutex_unlock(&n->lock);
    return code;
}

static const struct ps_nccl_ops table = {
    .abi = PS_NCCL_ABI,
    .unique_id = module_unique_id,
    .gpu = module_gpu,
    .create = module_create,
    .connect = module_connect,
    .destroy = module_destroy,
    .all_reduce = module_all_reduce,
    .broadcast = module_broadcast,
    .all_gather = module_all_gather,
    .queue_sum = module_queue_sum,
    .queue_join = module_queue_join,
    .queue_mark = module_queue_mark,
    .abort = module_abort,
    .poll = module_poll,
    .break_off = module_break_off,
};

__attribute__((visibility("default"))) const struct ps_nccl_ops *ps_nccl_module(void)
{
    return &table;
}
