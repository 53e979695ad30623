// The built-ins of CUDA's device compiler, for a host compiler: a kernel becomes a function that runs a grid.
//
// Blocks run one after another. The threads of a block are coroutines, so barriers and shuffles are real; they are
// scheduled in random order. A coroutine starts as a context and is reused from block to block; switches are long
// jumps, because each swap of contexts is a system call.
//
// It is compiled with each kernel, so it includes little: most headers of the standard library take longer than a kernel.

#pragma once

#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <utility>

#define __device__
#define __shared__ static
#define __launch_bounds__(...)

// What kernels call of <cmath>.
extern "C" {
double exp(double), fabs(double), fmax(double, double), log(double), sin(double), sqrt(double);
float fabsf(float), fmaf(float, float, float), fmaxf(float, float), sqrtf(float);
}

struct FakeIndex { unsigned x, y, z; };

namespace fake {

enum State { READY, BARRIER, SHUFFLE, DONE };

struct Thread {
    jmp_buf turn;
    char* stack;
    FakeIndex index;
    State state;
    unsigned generation;
};

constexpr size_t STACK = 64 * 1024;
// As many as a block may have.
constexpr size_t THREADS = 1024;

inline jmp_buf scheduler;
inline Thread threads[THREADS];
inline Thread* running;
inline FakeIndex block_index, block_size, grid_size;
inline uint64_t slots[32][2][32];
inline void (*entry)(void**);
inline void** parameters;

inline void yield(State state) {
    running->state = state;
    if (!_setjmp(running->turn)) _longjmp(scheduler, 1);
}

inline void body() {
    for (;;) {
        entry(parameters);
        yield(DONE);
    }
}

// Runs a thread until it yields.
inline void resume(Thread& thread) {
    running = &thread;
    if (_setjmp(scheduler)) return;
    if (thread.stack) _longjmp(thread.turn, 1);
    thread.stack = static_cast<char*>(malloc(STACK));
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = thread.stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, body, 0);
    setcontext(&context);
}

inline void release(size_t first, size_t last, State from) {
    for (size_t i = first; i < last; i++) if (threads[i].state == from) threads[i].state = READY;
}

inline bool all(size_t first, size_t last, State state) {
    bool any = false;
    for (size_t i = first; i < last; i++) {
        if (threads[i].state != state && threads[i].state != DONE) return false;
        any |= threads[i].state == state;
    }
    return any;
}

inline void run_block(const char* name, uint64_t& random) {
    size_t count = block_size.x;
    if (count > THREADS) abort();
    unsigned order[THREADS];
    for (unsigned i = 0; i < count; i++) {
        order[i] = i;
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        unsigned& other = order[(random >> 33) % (i + 1)];
        order[i] = other;
        other = i;
        Thread& thread = threads[i];
        thread.index = {i, 0, 0};
        thread.state = READY;
        thread.generation = 0;
    }
    for (;;) {
        bool moved = false, left = false;
        for (size_t place = 0; place < count; place++) {
            Thread& thread = threads[order[place]];
            left |= thread.state != DONE;
            if (thread.state != READY) continue;
            resume(thread);
            moved = true;
        }
        if (!left) return;
        for (size_t warp = 0; warp < count; warp += 32) {
            size_t last = warp + 32 < count ? warp + 32 : count;
            if (all(warp, last, SHUFFLE)) {
                release(warp, last, SHUFFLE);
                moved = true;
            }
        }
        if (all(0, count, BARRIER)) {
            release(0, count, BARRIER);
            moved = true;
        }
        if (!moved) {
            fprintf(stderr, "fake CUDA: threads of a block of %s wait for different things\n", name);
            abort();
        }
    }
}

template <class R> R shuffle_down(R value, unsigned delta) {
    unsigned lane = running->index.x % 32, warp = running->index.x / 32, turn = running->generation++ % 2;
    memcpy(&slots[warp][turn][lane], &value, sizeof value);
    yield(SHUFFLE);
    if (lane + delta < 32) memcpy(&value, &slots[warp][turn][lane + delta], sizeof value);
    return value;
}

template <class... P, size_t... I>
void call(void (*kernel)(P...), void** values, std::index_sequence<I...>) {
    kernel(*static_cast<P*>(values[I])...);
}

template <auto Kernel> struct Caller;
template <class... P, void (*Kernel)(P...)> struct Caller<Kernel> {
    static void enter(void** values) { call(Kernel, values, std::index_sequence_for<P...>()); }

    static size_t sizes(size_t* to) {
        size_t count = 0;
        ((to[count++] = sizeof(P)), ...);
        return count;
    }

    static void run(const char* name, const unsigned* grid, const unsigned* block, void** values, uint64_t random) {
        grid_size = {grid[0], grid[1], grid[2]};
        block_size = {block[0], block[1], block[2]};
        entry = enter;
        parameters = values;
        for (unsigned y = 0; y < grid[1]; y++) {
            for (unsigned x = 0; x < grid[0]; x++) {
                block_index = {x, y, 0};
                run_block(name, random);
            }
        }
    }
};

}  // namespace fake

#define FAKE_KERNEL(name) \
    extern "C" void fake_run_##name(const unsigned* grid, const unsigned* block, void** values, uint64_t random) { \
        fake::Caller<&name>::run(#name, grid, block, values, random); \
    } \
    extern "C" size_t fake_sizes_##name(size_t* to) { return fake::Caller<&name>::sizes(to); }

#define threadIdx (fake::running->index)
#define blockIdx (fake::block_index)
#define blockDim (fake::block_size)
#define gridDim (fake::grid_size)

inline void __syncthreads() { fake::yield(fake::BARRIER); }

template <class R> R __shfl_down_sync(unsigned, R value, unsigned delta) { return fake::shuffle_down(value, delta); }

inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
    unsigned long long old = *to;
    *to += value;
    return old;
}

template <class To, class From> To fake_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

inline unsigned __float_as_uint(float value) { return fake_bits<unsigned>(value); }
inline float __uint_as_float(unsigned value) { return fake_bits<float>(value); }
inline long long __double_as_longlong(double value) { return fake_bits<long long>(value); }
inline double __longlong_as_double(long long value) { return fake_bits<double>(value); }
inline int __clzll(long long value) { return value == 0 ? 64 : __builtin_clzll((unsigned long long)value); }
