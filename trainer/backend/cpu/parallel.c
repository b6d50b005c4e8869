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

#if defined(__SANITIZE_THREAD__)
/* libgomp is not instrumented, so ThreadSanitizer does not see how it hands work over and waits for its end:
 * say it. */
void __tsan_acquire(void *address);
void __tsan_release(void *address);
#define BEFORE_WORK(address) __tsan_acquire(address)
#define AFTER_WORK(address) __tsan_release(address)
#define UNSEEN __attribute__((no_sanitize_thread))
#else
#define BEFORE_WORK(address) ((void)(address))
#define AFTER_WORK(address) ((void)(address))
#define UNSEEN
#endif

static char hand_over; /* an address, no data */

static void __attribute__((noinline)) work(ps_parallel_function function, void *context, int index)
{
    BEFORE_WORK(&hand_over);
    function(context, index);
    AFTER_WORK(&hand_over);
}

UNSEEN void ps_parallel_for(int threads, int count, ps_parallel_function function, void *context)
{
    if (threads <= 1 || count <= 1) {
        for (int i = 0; i < count; i++)
            function(context, i);
        return;
    }
    AFTER_WORK(&hand_over);
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads)
#endif
    for (int i = 0; i < count; i++)
        work(function, context, i);
    BEFORE_WORK(&hand_over);
}
