/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/backend/cpu/parallel.h"

#ifdef _OPENMP
#include <omp.h>
#endif

void ps_parallel_threads(int threads)
{
#ifdef _OPENMP
    omp_set_num_threads(threads);
#else
    (void)threads;
#endif
}

void ps_parallel_for(int threads, int count, ps_parallel_function function, void *context)
{
    if (threads <= 1 || count <= 1) {
        for (int i = 0; i < count; i++)
            function(context, i);
        return;
    }
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads)
#endif
    for (int i = 0; i < count; i++)
        function(context, i);
}
