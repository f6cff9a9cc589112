// Runs a CUDA kernel on a CPU, thread by thread: each is a fiber that goes on until it meets a barrier or a product of
// its warp, so that every index of a kernel can be tested without a GPU. Blocks run one after the other.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define EMULATED
#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(name) unsigned char* name = emulator::shared.data()

using std::max;
using std::min;

namespace emulator {
struct Dim { int x = 0, y = 0, z = 0; };
struct Lane { uint32_t a[4], b[2]; };

inline Dim thread, block, grid;
inline std::vector<unsigned char> shared;
inline std::vector<ucontext_t> fibers;
inline std::vector<char> done;
inline std::vector<Lane> lanes[2];  // what each thread brought to its warp's product, alternately
inline std::vector<int> turns;      // products that a thread has taken part in
inline std::vector<int> arrived, released;  // by barrier: one a warp, the last for the block
inline ucontext_t scheduler;
inline int current;

inline void yield() { swapcontext(&fibers[current], &scheduler); }

inline void barrier(int which, int members) {
    const int turn = released[which];
    if (++arrived[which] == members) {
        arrived[which] = 0;
        released[which]++;
        return;
    }
    while (released[which] == turn) yield();
}

inline float bf16(uint32_t word, int half) {
    const uint32_t bits = (half ? word >> 16 : word & 0xffff) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint16_t rounded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline std::function<void()> body;
inline void enter() {
    body();
    done[current] = 1;
    yield();
}

inline void run_block(int threads) {
    constexpr size_t STACK = 1 << 17;
    static std::vector<char> stacks;
    stacks.resize(threads * STACK);
    fibers.assign(threads, {});
    done.assign(threads, 0);
    turns.assign(threads, 0);
    for (auto& bank : lanes) bank.assign(threads, {});
    arrived.assign(threads / 32 + 1, 0);
    released.assign(threads / 32 + 1, 0);
    for (int i = 0; i < threads; i++) {
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = &stacks[i * STACK];
        fibers[i].uc_stack.ss_size = STACK;
        fibers[i].uc_link = &scheduler;
        makecontext(&fibers[i], enter, 0);
    }
    for (int left = threads; left > 0;) {
        left = 0;
        for (current = 0; current < threads; current++) {
            if (done[current]) continue;
            left++;
            thread.x = current;
            swapcontext(&scheduler, &fibers[current]);
        }
    }
}

inline void launch(Dim blocks, int threads, size_t bytes, std::function<void()> kernel) {
    body = kernel;
    grid = blocks;
    for (block.y = 0; block.y < blocks.y; block.y++)
        for (block.x = 0; block.x < blocks.x; block.x++) {
            shared.assign(bytes, 0xff);  // NaN: what nobody wrote shows
            run_block(threads);
        }
}
}  // namespace emulator

#define threadIdx emulator::thread
#define blockIdx emulator::block
#define gridDim emulator::grid

struct alignas(16) Words { uint32_t w[4]; };
struct uint2 { uint32_t x, y; };

inline void __syncthreads() { emulator::barrier((int)emulator::released.size() - 1, (int)emulator::fibers.size()); }
inline void wait_for_kernel_ahead() {}
inline void let_next_kernel_start() {}
inline Words load_words(const Words* p) { return *p; }
inline void copy_async(void* to, const void* from) { std::memcpy(to, from, 16); }
inline void copies_commit() {}
inline void copies_wait() {}
inline float reciprocal_root(float x) { return 1.0f / std::sqrt(x); }
inline uint32_t times(uint32_t x, uint32_t y) {
    using namespace emulator;
    return rounded(bf16(x, 0) * bf16(y, 0)) | (uint32_t)rounded(bf16(x, 1) * bf16(y, 1)) << 16;
}
inline float from_bf16(uint16_t x) { return emulator::bf16(x, 0); }
inline uint16_t to_bf16(float x) { return emulator::rounded(x); }
inline int arrive(int* counter) { return (*counter)++; }
inline float load_partial(const float* p) { return *p; }
inline float exponential(float x) { return std::exp(x); }

// Each half holds a code of 4 bits in its low nibble.
inline uint32_t as_bf16(uint32_t halves) {
    const uint32_t low = emulator::rounded(float(halves & 15) - 8.0f);
    const uint32_t high = emulator::rounded(float(halves >> 16 & 15) - 8.0f);
    return low | high << 16;
}

template <int BYTE> inline uint32_t both_bytes(uint32_t first, uint32_t second) {
    const uint32_t a = first >> 8 * BYTE & 255, b = second >> 8 * BYTE & 255;
    return a | a << 8 | b << 16 | b << 24;
}

// mma.m16n8k16, as PTX lays out its fragments: lane 4 g + t has rows g and g + 8 of A, column g of B.
inline void mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
    using namespace emulator;
    const int me = thread.x, warp = me / 32, lane = me % 32, g = lane / 4, t = lane % 4;
    auto& bank = lanes[turns[me]++ % 2];
    bank[me] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    barrier(warp, 32);
    thread.x = me;
    for (int cell = 0; cell < 4; cell++) {
        const int high = cell / 2, column = 2 * t + cell % 2;
        for (int k = 0; k < 16; k++) {
            const int owner = k % 8 / 2, upper = k / 8, half = k % 2;
            const Lane& row = bank[warp * 32 + 4 * g + owner];
            const Lane& other = bank[warp * 32 + 4 * column + owner];
            c[cell] += bf16(row.a[2 * upper + high], half) * bf16(other.b[upper], half);
        }
    }
}
