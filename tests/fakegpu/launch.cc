/* SPDX-License-Identifier: Apache-2.0
 * Fibers that run a kernel's threads on the host. See fake_launch.h. */
#include "fake.h"
#include "fake_launch.h"

#include <csetjmp>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

namespace fake
{

__thread Index thread_index, block_index, block_size, grid_size;
__thread unsigned char *dynamic_shared;

namespace
{

enum State { READY, AT_BLOCK, AT_WARP, DONE };
constexpr size_t STACK = 128 << 10;

struct Fiber {
    ucontext_t context;
    jmp_buf place; /* where it goes on, once begun */
    bool begun = false;
    void *stack = nullptr;
    State state = DONE;
    Index index{};
    uint64_t value = 0, taken = 0;
    int source = 0;
    bool exchanging = false;
};

struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;
    jmp_buf scheduler;
    Fiber *now = nullptr;
    unsigned number = 0; /* of now */
    const std::function<void()> *body = nullptr;
};

Block &block()
{
    static thread_local Block it;
    return it;
}

/* Changes of context without a system call: swapcontext makes one each time. */
__attribute__((noinline)) void change(jmp_buf &from, jmp_buf &to)
{
    if (!_setjmp(from)) {
        _longjmp(to, 1);
    }
}

__attribute__((noinline)) void begin(jmp_buf &from, const ucontext_t &to)
{
    if (!_setjmp(from)) {
        setcontext(&to);
    }
}

void pause_as(State state)
{
    Block &b = block();
    b.now->state = state;
    change(b.now->place, b.scheduler);
}

void enter()
{
    for (;;) { /* a fiber serves one thread after another */
        (*block().body)();
        pause_as(DONE);
    }
}

__attribute__((noinline)) void prepare(Fiber &f)
{
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack;
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
}

void resume(Block &b, unsigned i)
{
    b.now = b.fibers[i].get();
    b.number = i;
    thread_index = b.now->index;
    if (b.now->begun) {
        change(b.scheduler, b.now->place);
    } else {
        b.now->begun = true;
        begin(b.scheduler, b.now->context);
    }
}

/* Lets the members in [from, to) go on if all that are left wait in the same way. */
bool release(Block &b, unsigned from, unsigned to, State state)
{
    unsigned waiting = 0;
    for (unsigned i = from; i < to; i++) {
        if (b.fibers[i]->state != DONE && b.fibers[i]->state != state) {
            return false;
        }
        waiting += b.fibers[i]->state == state;
    }
    for (unsigned i = from; i < to && waiting; i++) {
        Fiber *f = b.fibers[i].get();
        if (f->state == state) {
            f->state = READY;
            unsigned source = from + (unsigned)f->source;
            if (state == AT_WARP && f->exchanging) {
                f->taken = source < to ? b.fibers[source]->value : f->value;
            }
        }
    }
    return waiting > 0;
}

void run_block(Block &b, unsigned threads)
{
    for (unsigned i = 0; i < threads; i++) {
        if (i == b.fibers.size()) {
            b.fibers.push_back(std::make_unique<Fiber>());
            b.fibers[i]->stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        }
        Fiber *f = b.fibers[i].get();
        f->index = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
        f->state = READY;
        if (f->begun) {
            continue;
        }
        prepare(*f);
    }
    for (;;) {
        bool moved = false, left = false;
        for (unsigned i = 0; i < threads; i++) {
            if (b.fibers[i]->state == READY) {
                resume(b, i);
                moved = true;
            }
        }
        for (unsigned w = 0; w < threads; w += 32) {
            moved |= release(b, w, std::min(threads, w + 32), AT_WARP);
        }
        moved |= release(b, 0, threads, AT_BLOCK);
        for (unsigned i = 0; i < threads; i++) {
            left |= b.fibers[i]->state != DONE;
        }
        if (!left) {
            return;
        }
        if (!moved) {
            report("%s: threads of one block wait at different barriers", running ? running->name : "kernel");
            for (auto &f : b.fibers) {
                f->begun = false; /* left in the middle */
            }
            return;
        }
    }
}

std::mutex atomics;

} // namespace

void sync_block()
{
    pause_as(AT_BLOCK);
}

void sync_warp()
{
    block().now->exchanging = false;
    pause_as(AT_WARP);
}

uint64_t exchange(uint64_t value, int source_lane)
{
    Fiber *self = block().now;
    self->value = value;
    self->source = source_lane;
    self->exchanging = true;
    pause_as(AT_WARP);
    return self->taken;
}

int lane()
{
    return (int)(block().number % 32);
}

void atomic_apply(const std::function<void()> &change, const void *p, size_t bytes)
{
    touch(p, bytes, true);
    std::lock_guard<std::mutex> hold(atomics);
    change();
}

void run_grid(dim3 grid, dim3 size, size_t shared_bytes, const std::function<void()> &thread)
{
    Block &b = block();
    b.body = &thread;
    block_size = {size.x, size.y, size.z};
    grid_size = {grid.x, grid.y, grid.z};
    std::vector<uint64_t> shared(shared_bytes / 8 + 1);
    dynamic_shared = reinterpret_cast<unsigned char *>(shared.data());
    for (unsigned z = 0; z < grid.z; z++) {
        for (unsigned y = 0; y < grid.y; y++) {
            for (unsigned x = 0; x < grid.x; x++) {
                block_index = {x, y, z};
                run_block(b, size.x * size.y * size.z);
            }
        }
    }
}

cudaError_t launch(const char *name, dim3 grid, dim3 size, size_t shared_bytes, cudaStream_t stream,
                   std::function<void()> thread)
{
    size_t threads = (size_t)size.x * size.y * size.z;
    if (threads < 1 || threads > 1024 || size.z > 64 || grid.x < 1 || grid.y < 1 || grid.z < 1 ||
        grid.y > 65535 || grid.z > 65535 || shared_bytes > (227 << 10)) {
        report("%s: launch of %u x %u x %u blocks of %zu threads with %zu bytes shared is not possible", name,
               grid.x, grid.y, grid.z, threads, shared_bytes);
        return fail(cudaErrorInvalidConfiguration);
    }
    return submit(stream, name, [=]() { run_grid(grid, size, shared_bytes, thread); });
}

} // namespace fake

/* What -fsanitize=thread makes the compiler call. */
#define HOOK(size)                                                                                           \
    extern "C" void __tsan_read##size(void *p);                                                              \
    extern "C" void __tsan_read##size(void *p)                                                               \
    {                                                                                                        \
        fake::touch(p, size, false);                                                                         \
    }                                                                                                        \
    extern "C" void __tsan_write##size(void *p);                                                             \
    extern "C" void __tsan_write##size(void *p)                                                              \
    {                                                                                                        \
        fake::touch(p, size, true);                                                                          \
    }                                                                                                        \
    extern "C" void __tsan_unaligned_read##size(void *p);                                                    \
    extern "C" void __tsan_unaligned_read##size(void *p)                                                     \
    {                                                                                                        \
        fake::touch(p, size, false);                                                                         \
    }                                                                                                        \
    extern "C" void __tsan_unaligned_write##size(void *p);                                                   \
    extern "C" void __tsan_unaligned_write##size(void *p)                                                    \
    {                                                                                                        \
        fake::touch(p, size, true);                                                                          \
    }
HOOK(1)
HOOK(2)
HOOK(4)
HOOK(8)
HOOK(16)
extern "C" {
void __tsan_init(void);
void __tsan_init(void)
{
}
void __tsan_func_entry(void *);
void __tsan_func_entry(void *)
{
}
void __tsan_func_exit(void);
void __tsan_func_exit(void)
{
}
void __tsan_vptr_update(void **, void *);
void __tsan_vptr_update(void **, void *)
{
}
void __tsan_vptr_read(void **);
void __tsan_vptr_read(void **)
{
}
void __tsan_read_range(void *p, size_t n);
void __tsan_read_range(void *p, size_t n)
{
    fake::touch(p, n, false);
}
void __tsan_write_range(void *p, size_t n);
void __tsan_write_range(void *p, size_t n)
{
    fake::touch(p, n, true);
}
}
