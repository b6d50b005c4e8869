/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/backend/cpu/kernels.h"

const struct ps_kernels *ps_cpu_kernels(void)
{
#ifdef PS_KERNELS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &ps_kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &ps_kernels_avx2;
#endif
    return &ps_kernels_base;
}
