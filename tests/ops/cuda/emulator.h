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
#define BY_VALUE
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
inline std::vector<int> turns;      // products that a thread has taken part in
inline std::vector<int> arrived, released;  // by barrier: one a warp, one for the block, one for part of it
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

inline std::vector<std::function<void()>> copies;  // under way: they arrive later, and not in order
inline unsigned luck = 1;
inline void land() {
    for (size_t i = 0; i < copies.size();) {
        luck = luck * 1664525 + 1013904223;
        if (luck >> 28) {  // most of them not yet, so that who must wait for one does
            i++;
            continue;
        }
        copies[i]();
        copies.erase(copies.begin() + i);
    }
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
    arrived.assign(threads / 32 + 2, 0);
    released.assign(threads / 32 + 2, 0);
    for (int i = 0; i < threads; i++) {
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = &stacks[i * STACK];
        fibers[i].uc_stack.ss_size = STACK;
        fibers[i].uc_link = &scheduler;
        makecontext(&fibers[i], enter, 0);
    }
    for (int left = threads; left > 0;) {
        left = 0;
        land();
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

inline void __syncthreads() { emulator::barrier((int)emulator::released.size() - 2, (int)emulator::fibers.size()); }
inline void sync_multipliers(int threads) { emulator::barrier((int)emulator::released.size() - 1, threads); }
inline void sync_warp() { emulator::barrier(emulator::thread.x / 32, 32); }
inline void wait_for_kernel_ahead() {}
inline void let_next_kernel_start() {}
inline void copy_async(void* to, const void* from) { std::memcpy(to, from, 16); }

// An mbarrier: arrivals of a phase that are awaited and still to come, bytes on their way, and which phase it is.
struct Signal { uint16_t awaited, left, phase; int16_t bytes; };
static_assert(sizeof(Signal) == 8, "an mbarrier has 8 bytes");
inline void signal_turn(Signal* s) {
    if (s->left || s->bytes) return;
    s->left = s->awaited;
    s->phase ^= 1;
}
inline void signal_init(unsigned long long* s, uint32_t arrivals) { *(Signal*)s = {(uint16_t)arrivals, (uint16_t)arrivals, 0, 0}; }
inline void signals_ready() {}
inline void signal_arrive(unsigned long long* p) {
    Signal* s = (Signal*)p;
    if (!s->left) std::abort();
    s->left--;
    signal_turn(s);
}
inline void signal_expect(unsigned long long* p, uint32_t bytes) {
    ((Signal*)p)->bytes += bytes / 16;
    signal_arrive(p);
}
inline void signal_wait(unsigned long long* p, uint32_t parity) {
    while (((Signal*)p)->phase == parity) emulator::yield();
}
inline void signal_bring(unsigned long long* p, uint32_t bytes) {
    ((Signal*)p)->bytes -= bytes / 16;
    signal_turn((Signal*)p);
}
inline void copy_bulk(void* to, const void* from, uint32_t bytes, unsigned long long* p) {
    if (bytes % 16 || (uintptr_t)from % 16) std::abort();  // what the hardware refuses
    emulator::copies.push_back([=] {
        std::memcpy(to, from, bytes);
        signal_bring(p, bytes);
    });
}
// A tensor of rows, of which boxes of 16 rows by `box` bytes are copied; the address in shared memory is a multiple of 128.
struct TensorMap { const unsigned char* data; uint64_t rows, row_bytes, box; };
inline uint32_t shared_address(const void* p) { return (uint32_t)(uintptr_t)p; }
inline void fetch_map(const TensorMap*) {}
inline void copy_box(void* to, const TensorMap* map, int word, int row, unsigned long long* p) {
    if (((unsigned char*)to - emulator::shared.data()) % 128) std::abort();
    const TensorMap tensor = *map;
    emulator::copies.push_back([=] {
        for (int r = 0; r < 16; r++)
            for (uint64_t i = 0; i < tensor.box; i++) {
                const uint64_t byte = 4 * word + i;
                const bool inside = row + r < (int)tensor.rows && byte < tensor.row_bytes;
                ((unsigned char*)to)[r * tensor.box + i] = inside ? tensor.data[(row + r) * tensor.row_bytes + byte] : 0;
            }
        signal_bring(p, 16 * tensor.box);
    });
}
// Boxes of 16 rows and all columns of 128 bytes, one behind the other; 16 bytes change places by three bits of the row.
inline void copy_columns(void* to, const TensorMap* map, int row, unsigned long long* p) {
    if (shared_address(to) % 1024 || row < 0 || row + 16 > (int)map->rows) std::abort();
    const TensorMap tensor = *map;
    emulator::copies.push_back([=] {
        for (int r = 0; r < 16; r++)
            for (uint64_t chunk = 0; chunk < tensor.row_bytes / 16; chunk++)
                std::memcpy((unsigned char*)to + chunk / 8 * 2048 + r * 128 + (chunk % 8 ^ r % 8) * 16,
                            tensor.data + (row + r) * tensor.row_bytes + chunk * 16, 16);
        signal_bring(p, 16 * tensor.row_bytes);
    });
}
inline void copies_wait() {}
inline float reciprocal_root(float x) { return 1.0f / std::sqrt(x); }
inline float from_bf16(uint16_t x) { return emulator::bf16(x, 0); }
inline uint16_t to_bf16(float x) { return emulator::rounded(x); }
inline int arrive(int* counter) { return (*counter)++; }
inline float load_partial(const float* p) { return *p; }
inline Words load_partials(const float* p) { return *(const Words*)p; }
inline float exponential(float x) { return std::exp(x); }

// What the lanes of a warp hold, once all have brought it.
template <typename T> inline const T* of_warp(T value) {
    static T values[2][1024];
    const int me = emulator::thread.x;
    T* bank = values[emulator::turns[me]++ % 2];
    bank[me] = value;
    emulator::barrier(me / 32, 32);
    emulator::thread.x = me;
    return bank + me / 32 * 32;
}
template <typename T> inline T warp_sum(T value) {
    const T* all = of_warp(value);
    T sum = 0;
    for (int lane = 0; lane < 32; lane++) sum += all[lane];
    return sum;
}
inline int warp_max(int value) {
    const int* all = of_warp(value);
    return *std::max_element(all, all + 32);
}
inline int from_lane(int value, int lane) { return of_warp(value)[lane]; }
inline int warp_scan(int value) {
    const int *all = of_warp(value), lane = emulator::thread.x % 32;
    int sum = 0;
    for (int i = 0; i <= lane; i++) sum += all[i];
    return sum;
}
inline float column_max(float value) {
    const float* all = of_warp(value);
    for (int lane = emulator::thread.x % 4; lane < 32; lane += 4) value = max(value, all[lane]);
    return value;
}
inline float column_sum(float value) {
    const float* all = of_warp(value);
    float sum = 0.0f;
    for (int lane = emulator::thread.x % 4; lane < 32; lane += 4) sum += all[lane];
    return sum;
}
inline void load_matrices(uint32_t (&out)[4], const void* row) {
    const auto rows = of_warp((const uint32_t*)row);
    const int lane = emulator::thread.x % 32;
    for (int i = 0; i < 4; i++) out[i] = rows[8 * i + lane / 4][lane % 4];
}
inline void load_matrices_turned(uint32_t (&out)[4], const void* row) {
    const auto rows = of_warp((const uint16_t*)row);
    const int lane = emulator::thread.x % 32, first = lane % 4 * 2;
    for (int i = 0; i < 4; i++) out[i] = rows[8 * i + first][lane / 4] | (uint32_t)rows[8 * i + first + 1][lane / 4] << 16;
}
inline uint32_t turned_matrix(uint32_t value) {
    const uint32_t* all = of_warp(value);
    const int lane = emulator::thread.x % 32, row = lane % 4 * 2, column = lane / 4;
    const auto cell = [&](int r) { return all[4 * r + column / 2] >> column % 2 * 16 & 0xffff; };
    return cell(row) | cell(row + 1) << 16;
}
inline uint32_t pair_of_bf16(float a, float b) { return to_bf16(a) | (uint32_t)to_bf16(b) << 16; }
inline float power_of_2(float x) { return std::exp2(x); }
inline uint32_t quad_max(uint32_t value) {
    const uint32_t* first = of_warp(value) + emulator::thread.x % 32 / 4 * 4;
    return *std::max_element(first, first + 4);
}
template <int SELECT> inline uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const auto byte = [](uint32_t word) { return word >> 8 * SELECT & 255; };
    return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
}
inline uint32_t signed_codes(uint32_t word) { return (word ^ 0x88888888u) & 0xf0f0f0f0u; }
inline uint32_t bits_of(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
inline float number_of(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }

// mma, as PTX lays out its fragments: lane 4 g + t has rows g and g + 8 of A and column g of B, `a_word` numbers a register.
template <typename Sum, typename Number>
inline void multiply_matrices(Sum* c, const uint32_t* a, uint32_t b0, uint32_t b1, int a_word, Number number) {
    const emulator::Lane* warp = of_warp(emulator::Lane{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int lane = emulator::thread.x % 32;
    for (int cell = 0; cell < 4; cell++)
        for (int k = 0; k < 8 * a_word; k++) {
            const int owner = k % (4 * a_word) / a_word, upper = k / (4 * a_word), column = lane % 4 * 2 + cell % 2;
            c[cell] += number(warp[lane / 4 * 4 + owner].a[2 * upper + cell / 2], k % a_word) *
                       number(warp[4 * column + owner].b[upper], k % a_word);
        }
}
inline void mma_int8(int* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
    multiply_matrices(c, a, b0, b1, 4, [](uint32_t word, int i) { return (int)(int8_t)(word >> 8 * i & 255); });
}
inline void mma_bf16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
    multiply_matrices(c, a, b0, b1, 2, emulator::bf16);
}
