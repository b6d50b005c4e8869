/* SPDX-License-Identifier: Apache-2.0
 * The stand-in for NCCL, between processes and within one, and its checks. Each case runs in processes of its
 * own, made before any of them touches the stand-ins. */
#include "check.h"

#include <atomic>
#include <nccl.h>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

struct Rank {
    ncclComm_t comm;
    cudaStream_t stream;
    float *data;
    int rank, size;
};

constexpr size_t COUNT = 150000; /* more than one round */
static std::atomic<int> *shared;

static Rank join(const ncclUniqueId &id, int rank, int size, int device)
{
    Rank r{};
    r.rank = rank, r.size = size;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    CHECK(!cudaSetDevice(device) && !cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    CHECK(!cudaMalloc((void **)&r.data, COUNT * 4));
    CHECK(ncclCommInitRankConfig(&r.comm, size, id, rank, &config) == ncclInProgress);
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) {
        CHECK(!ncclCommGetAsyncError(r.comm, &state));
        std::this_thread::yield();
    }
    if (state) {
        CHECK(!ncclCommAbort(r.comm));
        r.comm = nullptr;
    }
    return r;
}

static void leave(Rank &r, bool abort)
{
    CHECK(!r.comm || (abort ? !ncclCommAbort(r.comm) : !ncclCommDestroy(r.comm)));
    CHECK(!cudaStreamDestroy(r.stream) && !cudaFree(r.data));
}

static ncclResult_t settled(Rank &r)
{
    ncclResult_t state = ncclSuccess;
    CHECK(!cudaStreamSynchronize(r.stream) && !ncclCommGetAsyncError(r.comm, &state));
    return state;
}

static void sums(const ncclUniqueId &id, int rank, int size)
{
    Rank r = join(id, rank, size, rank);
    std::vector<float> v(COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        v[i] = (float)(i % 100) + (float)rank;
    }
    CHECK(!cudaMemcpyAsync(r.data, v.data(), COUNT * 4, cudaMemcpyHostToDevice, r.stream));
    CHECK(!ncclAllReduce(r.data, r.data, COUNT, ncclFloat32, ncclSum, r.comm, r.stream));
    CHECK(!cudaMemcpyAsync(v.data(), r.data, COUNT * 4, cudaMemcpyDeviceToHost, r.stream) &&
          settled(r) == ncclSuccess);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK(v[i] == (float)(size * (int)(i % 100) + size * (size - 1) / 2));
    }
    float mine = (float)rank, all[8] = {0};
    CHECK(!cudaMemcpyAsync(r.data + 8, &mine, 4, cudaMemcpyHostToDevice, r.stream));
    CHECK(!ncclAllGather(r.data + 8, r.data, 1, ncclFloat32, r.comm, r.stream));
    CHECK(!ncclBroadcast(r.data + 8, r.data + 9, 1, ncclFloat32, size - 1, r.comm, r.stream));
    CHECK(!cudaMemcpyAsync(all, r.data, 16, cudaMemcpyDeviceToHost, r.stream));
    CHECK(!cudaMemcpyAsync(all + 4, r.data + 9, 4, cudaMemcpyDeviceToHost, r.stream) &&
          settled(r) == ncclSuccess);
    for (int i = 0; i < size; i++) {
        CHECK(all[i] == (float)i);
    }
    CHECK(all[4] == (float)(size - 1) && !ps_fake_reports());
    leave(r, false);
}

static void mismatch(const ncclUniqueId &id, int rank, int size)
{
    Rank r = join(id, rank, size, rank);
    CHECK(!ncclAllReduce(r.data, r.data, rank ? 10 : 20, ncclFloat32, ncclSum, r.comm, r.stream));
    CHECK(settled(r) == ncclInvalidUsage && strstr(ps_fake_last_report(), "of 10") &&
          strstr(ps_fake_last_report(), "of 20"));
    FIRES("collective 1 differs");
    leave(r, true);
}

static void asynchronous(const ncclUniqueId &id, int rank, int size)
{
    setenv("PS_FAKE_NCCL_ERROR", "1:2", 1);
    Rank r = join(id, rank, size, rank);
    CHECK(!ncclAllReduce(r.data, r.data, 10, ncclFloat32, ncclSum, r.comm, r.stream) &&
          settled(r) == ncclSuccess);
    CHECK(!ncclAllReduce(r.data, r.data, 10, ncclFloat32, ncclSum, r.comm, r.stream));
    if (rank == 1) {
        CHECK(settled(r) == ncclRemoteError);
        shared[0]++;
    } else {
        while (!shared[0]) {
            std::this_thread::yield();
        }
        CHECK(cudaStreamQuery(r.stream) == cudaErrorNotReady); /* waits for a rank that will not come */
    }
    leave(r, true);
}

static void hang(const ncclUniqueId &id, int rank, int size)
{
    setenv("PS_FAKE_NCCL_HANG", "0:1", 1);
    Rank r = join(id, rank, size, rank);
    CHECK(!ncclAllReduce(r.data, r.data, 10, ncclFloat32, ncclSum, r.comm, r.stream));
    CHECK(cudaStreamQuery(r.stream) == cudaErrorNotReady);
    leave(r, true);
}

static void duplicate(const ncclUniqueId &id, int rank, int size)
{
    Rank r = join(id, rank, size, 0);
    CHECK(!r.comm);
    FIRES("Duplicate GPU");
    leave(r, false);
}

/* A broadcast that does not wait for the work that fills its memory. */
static void unordered(const ncclUniqueId &id, int rank, int size)
{
    Rank r = join(id, rank, size, rank);
    cudaStream_t other;
    CHECK(!cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) &&
          !cudaMemsetAsync(r.data, 0, 40, other));
    CHECK(!ncclAllReduce(r.data, r.data, 10, ncclFloat32, ncclSum, r.comm, r.stream) &&
          settled(r) == ncclSuccess);
    CHECK(!cudaStreamDestroy(other));
    FIRES("race: ");
    leave(r, false);
}

static void one_process()
{
    ncclComm_t c[2];
    cudaStream_t s[2];
    double *p[2], v[2] = {1, 2};
    CHECK(!ncclCommInitAll(c, 2, nullptr));
    for (int d = 0; d < 2; d++) {
        CHECK(!cudaSetDevice(d) && !cudaStreamCreate(&s[d]) && !cudaMalloc((void **)&p[d], 8));
        CHECK(!cudaMemcpyAsync(p[d], &v[d], 8, cudaMemcpyHostToDevice, s[d]));
    }
    CHECK(!ncclGroupStart());
    for (int d = 0; d < 2; d++) {
        CHECK(!cudaSetDevice(d) && !ncclAllReduce(p[d], p[d], 1, ncclFloat64, ncclSum, c[d], s[d]));
    }
    CHECK(!ncclGroupEnd());
    for (int d = 0; d < 2; d++) {
        CHECK(!cudaSetDevice(d) && !cudaMemcpyAsync(&v[d], p[d], 8, cudaMemcpyDeviceToHost, s[d]));
        CHECK(!cudaStreamSynchronize(s[d]) && v[d] == 3);
        CHECK(!ncclCommDestroy(c[d]) && ncclCommDestroy(c[d]) == ncclInvalidArgument);
        FIRES("destroyed");
        CHECK(!cudaStreamDestroy(s[d]) && !cudaFree(p[d]));
    }
}

static void processes(const char *name, int size, void (*run)(const ncclUniqueId &, int, int))
{
    ncclUniqueId id;
    CHECK(!ncclGetUniqueId(&id));
    shared[0] = 0;
    for (int rank = 0; rank < size; rank++) {
        if (fork() == 0) {
            run(id, rank, size);
            exit(0);
        }
    }
    for (int rank = 0; rank < size; rank++) {
        int status;
        CHECK(wait(&status) > 0);
        if (status) {
            fprintf(stderr, "%s: a rank ended with status %d\n", name, status);
            _exit(1);
        }
    }
}

int main()
{
    setenv("PS_FAKE_GPU_COUNT", "4", 1);
    shared =
        (std::atomic<int> *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    processes("sums of 1", 1, sums);
    processes("sums of 2", 2, sums);
    processes("sums of 4", 4, sums);
    processes("mismatch", 2, mismatch);
    processes("asynchronous error", 2, asynchronous);
    processes("hang", 2, hang);
    processes("duplicate", 2, duplicate);
    processes("unordered", 2, unordered);
    one_process();
    printf("NCCL's stand-in holds, and its checks fire\n");
    return 0;
}
