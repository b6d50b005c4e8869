/* SPDX-License-Identifier: Apache-2.0
 * The one place where this module's own code uses OpenMP (oneDNN uses it too, the same pool of threads). */
#ifndef PARAMSYNC_BACKEND_CPU_PARALLEL_H
#define PARAMSYNC_BACKEND_CPU_PARALLEL_H

typedef void (*ps_parallel_function)(void *context, int index);

/* How many threads the calling thread's parallel work uses from now on, oneDNN's included. */
void ps_parallel_threads(int threads);
/* function(context, 0 .. count - 1) on `threads` threads, in contiguous shares that depend on count and
 * threads alone. Returns when all are done. */
void ps_parallel_for(int threads, int count, ps_parallel_function function, void *context);

#endif
