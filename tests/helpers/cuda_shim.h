// Runs CUDA kernels on the CPU, from their unchanged source: for tests of what they compute, on machines without a GPU.
//
//     #include "cuda_shim.h"
//     #include "kernels.cu"
//     shim::launch(grid, block, kernel, args);       // args: 64-bit integers, addresses among them
//
// A CUDA thread is a fibre with a stack of its own; the blocks of a grid run one after another. __syncthreads, __ballot_sync and the
// shuffles are rendezvous: a fibre goes on when all of its block or warp have arrived. If the threads of a warp meet for different
// purposes, or some wait for ever, the program aborts with a message. Even blocks run their threads in ascending order, odd ones in
// descending order, so that a missing barrier shows. What it does not know: alignment, memory order, speed, half warps, dimensions y and z.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>
#include <ucontext.h>

#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __builtin_assume(...)

struct Index { unsigned x; };
static Index blockIdx, blockDim, threadIdx;

namespace shim {

constexpr unsigned WARP = 32;
constexpr size_t STACK = 64 << 10;

enum Scope { BLOCK, OF_WARP };
enum Purpose { BARRIER, BALLOT, SHUFFLE };
struct Gift { Purpose purpose; unsigned long long value; };

struct Fibre {
    std::unique_ptr<char[]> stack{new char[STACK]};
    ucontext_t context;
    bool ended;
    unsigned long met[2];  // rendezvous reached so far, of the block and of the warp
    Gift gifts[2];         // what it brought to the last two of the warp: nobody can be two ahead
};

static std::vector<Fibre> fibres;
static ucontext_t scheduler;
static std::function<void()> body;
static bool progress;

[[noreturn]] static void die(const char* what)
{
    std::fprintf(stderr, "cuda_shim: block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, what);
    std::abort();
}

static Fibre& self() { return fibres[threadIdx.x]; }
static unsigned warp() { return threadIdx.x / WARP * WARP; }

// Returns when all fibres of the block or warp have met as often as this one.
static void meet(Scope scope)
{
    unsigned first = scope == BLOCK ? 0 : warp(), end = scope == BLOCK ? blockDim.x : first + WARP, i = first;
    unsigned long number = ++self().met[scope];
    while (i < end) {
        if (fibres[i].met[scope] >= number) i++;
        else if (fibres[i].ended) die("waits for a thread that has ended");
        else swapcontext(&self().context, &scheduler);
    }
    progress = true;
}

// Brings a value to a rendezvous of the warp; returns the function lane -> what it brought.
template <class T>
auto trade(unsigned mask, Purpose purpose, T value)
{
    static_assert(sizeof(T) <= sizeof(Gift::value));
    if (mask != 0xffffffff) die("only full warps, please");
    unsigned slot = (self().met[OF_WARP] + 1) % 2;
    self().gifts[slot] = {purpose, 0};
    std::memcpy(&self().gifts[slot].value, &value, sizeof value);
    meet(OF_WARP);
    return [=](unsigned lane) {
        const Gift& gift = fibres[warp() + lane % WARP].gifts[slot];
        if (gift.purpose != purpose) die("the threads of its warp meet for different purposes");
        T result;
        std::memcpy(&result, &gift.value, sizeof result);
        return result;
    };
}

static void run_fibre()
{
    body();
    self().ended = progress = true;
    swapcontext(&self().context, &scheduler);
}

static void run_block()
{
    unsigned threads = blockDim.x, running = threads;
    for (Fibre& fibre : fibres) {
        fibre.ended = false;
        fibre.met[BLOCK] = fibre.met[OF_WARP] = 0;
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.get();
        fibre.context.uc_stack.ss_size = STACK;
        makecontext(&fibre.context, run_fibre, 0);
    }
    for (progress = true; running;) {
        if (!progress) die("waits for ever");
        progress = false;
        for (unsigned i = 0; i < threads; i++) {
            threadIdx.x = blockIdx.x % 2 ? threads - 1 - i : i;
            if (self().ended) continue;
            unsigned me = threadIdx.x;
            swapcontext(&scheduler, &self().context);
            running -= fibres[me].ended;
        }
    }
}

template <class P>
P parameter(long long bits)
{
    if constexpr (std::is_pointer_v<P>) return reinterpret_cast<P>(bits);
    else return static_cast<P>(bits);
}

template <class... P, size_t... I>
void run_grid(unsigned grid, void (*kernel)(P...), const long long* args, std::index_sequence<I...>)
{
    body = [=] { kernel(parameter<P>(args[I])...); };
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) run_block();
}

template <class... P>
void launch(unsigned grid, unsigned block, void (*kernel)(P...), const long long* args)
{
    blockDim.x = block;
    fibres.resize(block);
    run_grid(grid, kernel, args, std::index_sequence_for<P...>{});
}

}  // namespace shim

static inline void __syncthreads() { shim::meet(shim::BLOCK); }

static inline unsigned __ballot_sync(unsigned mask, int flag)
{
    auto of = shim::trade(mask, shim::BALLOT, flag);
    unsigned word = 0;
    for (unsigned lane = 0; lane < shim::WARP; lane++) word |= unsigned(of(lane) != 0) << lane;
    return word;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) { return shim::trade(mask, shim::SHUFFLE, value)(lane); }

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance)
{
    unsigned lane = threadIdx.x % shim::WARP, from = lane + distance < shim::WARP ? lane + distance : lane;
    return shim::trade(mask, shim::SHUFFLE, value)(from);
}

template <class T>
T atomicAdd(T* at, T value) { return std::exchange(*at, *at + value); }

template <class To, class From>
To shim_bits(From from)
{
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}

static inline unsigned __float_as_uint(float x) { return shim_bits<unsigned>(x); }
static inline float __uint_as_float(unsigned x) { return shim_bits<float>(x); }
