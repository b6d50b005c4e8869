/* SPDX-License-Identifier: Apache-2.0
 * The stand-in for the CUDA runtime does what the real one does, and each of its checks fires. Compiled as a
 * kernel source is. */
#include "check.h"
#include "fake_launch.h"

__global__ void add(float *x, float v, int n)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) {
        x[i] += v;
    }
}

__global__ void sum(const float *x, float *out, int n)
{
    __shared__ float part[32];
    PS_DYNAMIC_SHARED(float, all);
    float v = 0;
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) {
        v += x[i];
    }
    all[threadIdx.x] = v;
    for (int m = 16; m; m /= 2) {
        v += __shfl_xor_sync(0xffffffffu, v, m);
    }
    if (threadIdx.x % 32 == 0) {
        part[threadIdx.x / 32] = v;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0, other = 0;
        for (unsigned w = 0; w < blockDim.x / 32; w++) {
            total += part[w];
        }
        for (unsigned t = 0; t < blockDim.x; t++) {
            other += all[t];
        }
        out[0] = total;
        out[1] = other;
    }
    atomicAdd(&out[2], 1.0f);
}

__global__ void crooked()
{
    if (threadIdx.x % 2) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

static void kernels(cudaStream_t s)
{
    float *x, *out, host[3] = {0};
    CHECK(!cudaMalloc((void **)&x, 1000 * 4) && !cudaMalloc((void **)&out, 12));
    CHECK(!cudaMemsetAsync(x, 0, 4000, s) && !cudaMemsetAsync(out, 0, 12, s));
    PS_LAUNCH(add, 4, 256, 0, s, x, 2.0f, 1000);
    PS_LAUNCH(sum, 1, 128, 512, s, x, out, 1000);
    CHECK(!cudaMemcpyAsync(host, out, 12, cudaMemcpyDeviceToHost, s) && !cudaStreamSynchronize(s));
    CHECK(host[0] == 2000 && host[1] == 2000 && host[2] == 128 && !ps_fake_reports());
    PS_LAUNCH(crooked, 1, 64, 0, s);
    CHECK(!cudaStreamSynchronize(s));
    FIRES("different barriers");
    PS_LAUNCH(add, 1, 2048, 0, s, x, 1.0f, 1);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() == cudaSuccess);
    FIRES("not possible");
    PS_LAUNCH(add, 4, 256, 0, s, x, 1.0f, 1001); /* one too many */
    CHECK(!cudaStreamSynchronize(s));
    FIRES("out of bounds");
    CHECK(!cudaFree(x) && !cudaFree(out));
}

static void memory()
{
    void *p;
    CHECK(!cudaMalloc(&p, 64) && !cudaFree(p) && cudaFree(p) == cudaErrorInvalidValue);
    FIRES("double free");
    CHECK(cudaFree(&p) == cudaErrorInvalidValue);
    FIRES("never allocated");
    char host[64];
    CHECK(cudaMemcpy(host, p, 64, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    FIRES("not live");
    CHECK(!cudaMalloc(&p, 64) && cudaMemcpy(host, p, 65, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    FIRES("not live");
    CHECK(cudaMemcpy(p, host, 64, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    FIRES("direction");
    CHECK(!cudaSetDevice(1) && cudaMemset(p, 0, 64) == cudaErrorInvalidValue && !cudaSetDevice(0));
    FIRES("used on device 1");
    add((float *)p, 1, 0); /* touches nothing */
    CHECK(!ps_fake_reports());
    add((float *)p, 1, 1); /* a kernel's code run by the host */
    FIRES("the host touches");
    CHECK(!cudaFree(p) && cudaSetDevice(2) == cudaErrorInvalidDevice);
    setenv("PS_FAKE_GPU_FAIL_ALLOC", "6", 1);
    int failed = 0;
    for (int i = 0; i < 8; i++) {
        failed += cudaMalloc(&p, 8) == cudaErrorMemoryAllocation;
        cudaFree(p);
    }
    CHECK(failed == 1 && !ps_fake_reports());
    unsetenv("PS_FAKE_GPU_FAIL_ALLOC");
}

static void order(cudaStream_t a, cudaStream_t b)
{
    float *x, host = 0;
    cudaEvent_t e;
    CHECK(!cudaMalloc((void **)&x, 4) && !cudaEventCreate(&e) && !cudaMemset(x, 0, 4) &&
          !cudaDeviceSynchronize());
    PS_LAUNCH(add, 1, 1, 0, a, x, 1.0f, 1);
    CHECK(!cudaEventRecord(e, a) && !cudaStreamWaitEvent(b, e, 0));
    PS_LAUNCH(add, 1, 1, 0, b, x, 1.0f, 1);
    CHECK(!cudaDeviceSynchronize() && !ps_fake_reports());
    PS_LAUNCH(add, 1, 1, 0, a, x, 1.0f, 1);
    PS_LAUNCH(add, 1, 1, 0, b, x, 1.0f, 1); /* no wait */
    CHECK(!cudaDeviceSynchronize());
    FIRES("race: add");
    CHECK(!cudaMemcpyAsync(&host, x, 4, cudaMemcpyDeviceToHost, a) && !cudaMemsetAsync(x, 0, 4, b));
    CHECK(!cudaDeviceSynchronize());
    FIRES("race: cudaMem");
    CHECK(!cudaEventDestroy(e) && cudaEventQuery(e) == cudaErrorInvalidResourceHandle);
    FIRES("destroyed");
    CHECK(!cudaFree(x));
}

static void graphs(cudaStream_t a, cudaStream_t b)
{
    float *x, host = 0;
    cudaEvent_t fork, join;
    cudaGraph_t g;
    cudaGraphExec_t run;
    CHECK(!cudaMalloc((void **)&x, 4) && !cudaEventCreate(&fork) && !cudaEventCreate(&join) &&
          !cudaMemset(x, 0, 4) && !cudaDeviceSynchronize());
    for (int joined = 0; joined < 2; joined++) {
        CHECK(!cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
        PS_LAUNCH(add, 1, 1, 0, a, x, 1.0f, 1);
        CHECK(!cudaEventRecord(fork, a) && !cudaStreamWaitEvent(b, fork, 0));
        PS_LAUNCH(add, 1, 1, 0, b, x, 10.0f, 1);
        CHECK(!cudaEventRecord(join, b) && (!joined || !cudaStreamWaitEvent(a, join, 0)));
        cudaError_t ended = cudaStreamEndCapture(a, &g);
        CHECK(ended == (joined ? cudaSuccess : cudaErrorStreamCaptureUnjoined));
        if (!joined) {
            FIRES("not joined");
        }
    }
    CHECK(!cudaGraphInstantiate(&run, g, 0) && !cudaGraphDestroy(g));
    for (int i = 0; i < 3; i++) {
        CHECK(!cudaGraphLaunch(run, a));
    }
    CHECK(!cudaMemcpyAsync(&host, x, 4, cudaMemcpyDeviceToHost, a) && !cudaStreamSynchronize(a));
    CHECK(host == 33 && !ps_fake_reports());
    CHECK(!cudaGraphExecDestroy(run) && cudaGraphLaunch(run, a) == cudaErrorInvalidResourceHandle);
    FIRES("does not live");
    void *p;
    CHECK(!cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    CHECK(cudaMalloc(&p, 4) == cudaErrorStreamCaptureUnsupported);
    FIRES("allocating");
    CHECK(cudaStreamEndCapture(a, &g) == cudaErrorStreamCaptureInvalidated);
    CHECK(!cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    CHECK(cudaStreamSynchronize(a) == cudaErrorStreamCaptureUnsupported);
    FIRES("captured");
    CHECK(cudaStreamEndCapture(a, &g) == cudaErrorStreamCaptureInvalidated);
    CHECK(!cudaEventDestroy(fork) && !cudaEventDestroy(join) && !cudaFree(x));
}

int main()
{
    cudaStream_t a, b;
    setenv("PS_FAKE_GPU_COUNT", "2", 1);
    memory();
    CHECK(!cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking) &&
          !cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    kernels(a);
    order(a, b);
    graphs(a, b);
    CHECK(!cudaStreamDestroy(a) && !cudaStreamDestroy(b) &&
          cudaStreamSynchronize(a) == cudaErrorInvalidResourceHandle);
    FIRES("destroyed");
    printf("the runtime's stand-in holds, and its checks fire\n");
    return 0;
}
