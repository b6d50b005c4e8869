/* SPDX-License-Identifier: Apache-2.0
 * Inside of the stand-ins for the CUDA runtime, cuDNN, cuBLAS and NCCL: what they share. Nothing here is ever
 * installed, and no figure that comes from it says anything about a GPU's speed.
 *
 * Device memory lies in one reserved range of addresses, never used twice. For every 4 bytes of it a shadow
 * keeps the last operation that wrote and the last that read; every operation carries a vector clock (one
 * count per stream). An access that is not ordered after the shadow's operation is a race, however lucky the
 * threads were this time. Kernels are compiled with -fsanitize=thread without its runtime: the hooks that the
 * compiler then calls on each access are answered here.
 *
 * Environment: PS_FAKE_GPU_COUNT (devices, 1), PS_FAKE_GPU_SEED (random delays in the streams),
 * PS_FAKE_GPU_LOG (file that gets each report as a line), PS_FAKE_GPU_STRICT=1 (exit status 86 after any
 * report, leaks included), PS_FAKE_GPU_FAIL_ALLOC=n (n-th device allocation fails), PS_FAKE_GPU_SHARED=1 (all
 * devices are one card, as for processes with the same CUDA_VISIBLE_DEVICES).
 */
#ifndef PARAMSYNC_FAKEGPU_FAKE_H
#define PARAMSYNC_FAKEGPU_FAKE_H

#include <array>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <functional>

namespace fake
{

constexpr int MAX_STREAMS = 64;
using Clock = std::array<uint32_t, MAX_STREAMS>;

/* What is running now on a stream's thread. */
struct Running {
    const char *name;
    int stream;
    uint32_t sequence;
    Clock clock;
};
extern __thread const Running *running;

/* A finding: one line on standard error and in the log. */
void report(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Queues work on a stream, or records it while the stream is captured. */
cudaError_t submit(cudaStream_t stream, const char *name, std::function<void()> work);
bool stream_alive(cudaStream_t stream);
int current_device();
/* Keeps the error for cudaGetLastError and gives it back. */
cudaError_t fail(cudaError_t error);

/* At the call: is [p, p + bytes) device memory that lives, on the current device? Reports if not. */
bool device_range(const void *p, size_t bytes, const char *what);
/* In work on a stream: this range is read or written. Host memory is passed over. */
void touch(const void *p, size_t bytes, bool write);
long environment(const char *name, long otherwise);

/* Runs the threads of a grid (launch.cc). */
void run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &thread);

} // namespace fake

/* For the tests of the stand-ins. */
extern "C" {
int ps_fake_reports(void);
const char *ps_fake_last_report(void);
void ps_fake_clear_reports(void);
}

#endif
