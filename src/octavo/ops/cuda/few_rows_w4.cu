// Products of few rows with 4-bit weights: y = x W^T, reading W once from memory, straight into the registers from which
// the matrix units take it.
//
// The weight is the operand A of wgmma.m64nNk16, which may lie in registers: each of the four warps of a group has 16
// rows of W. The rows of x, padded to N = 8 NT, are B, in shared memory. With words in linear_w4's order (bits 4 j to
// 4 j + 3 of word i hold column 16 j + i of a unit of 128) what lane (g, t) needs of rows g and g + 8 in step j is nibble
// j of its words 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: what it loads once feeds eight steps. A code becomes a bf16 number by
// being set below the exponent of 128 (see linear_w4).
//
// A block takes ROWS rows of W and a part of K. Its warp groups share them: RG along rows, KG along units. x comes in
// chunks of CHUNK units through shared memory, and blocks begin with different chunks, because all of them asking for the
// same lines at once is what took longest. Where K is split over blocks, the last one to arrive adds all parts in order.
//
// Compiled with NT, RG, KG, AHEAD (units that a warp has asked for), CHUNK, GJ (steps that share a scale: 8, 4, 2, or 0
// for one scale a row), GATED, OUT_FLOAT.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#ifndef EMULATED
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

__device__ __forceinline__ void wait_for_kernel_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ uint2 load_words(const uint2* p) {
    uint2 r;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p));
    return r;
}

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
    u32 s = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(s), "l"(global) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// What was copied is there, for the matrix units as well.
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Where rows of x begin for wgmma: 128 bytes a row, 8 rows after each other, pieces of 16 bytes swizzled by the row.
__device__ __forceinline__ u64 describe(const void* shared) {
    const u64 address = (u32)__cvta_generic_to_shared(shared);
    return (address & 0x3ffff) >> 4 | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ u64 advanced(u64 description, int bytes) { return description + bytes / 16; }

#define OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(keep)
#define F4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])

// c [+]= the 64 rows of A by 16 columns, times x; `keep` says whether c is added to.
__device__ __forceinline__ void multiply(float (&c)[NT][4], const u32 (&a)[4], u64 x, int keep) {
#if NT == 1
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0; } "
                 : F4(0) : OPERANDS);
#elif NT == 2
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0; } "
                 : F4(0), F4(1) : OPERANDS);
#elif NT == 4
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, "
                 "p, 1, 1, 0; } "
                 : F4(0), F4(1), F4(2), F4(3) : OPERANDS);
#elif NT == 8
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
                 "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; } "
                 : F4(0), F4(1), F4(2), F4(3), F4(4), F4(5), F4(6), F4(7) : OPERANDS);
#endif
}

// Byte BYTE of both words, each twice: two halves whose low nibbles are one step's codes and the next ones the next's.
template <int BYTE> __device__ __forceinline__ u32 both_bytes(uint2 words) {
    constexpr u32 select = ((4 + BYTE) << 12) | ((4 + BYTE) << 8) | (BYTE << 4) | BYTE;
    return __byte_perm(words.x, words.y, select);
}

// Two codes of 4 bits (low nibble of each half) as bf16, less 8.
__device__ __forceinline__ u32 as_bf16(u32 halves) {
    u32 placed, r;
    asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(placed) : "r"(halves));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(placed), "r"(0x3f803f80u), "r"(0xc308c308u));
    return r;
}

__device__ __forceinline__ float from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ u16 to_bf16(float x) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ int arrive(int* counter) {
    __threadfence();
    return atomicAdd(counter, 1);
}
__device__ __forceinline__ float load_partial(const float* p) { return __ldcg(p); }
__device__ __forceinline__ float exponential(float x) { return __expf(x); }
#endif

constexpr int THREADS = 128 * RG * KG, ROWS = 64 * RG, BATCH = 8 * NT;
constexpr int HALF_UNIT = BATCH * 128;      // bytes of 64 columns of x
constexpr int BUFFER = CHUNK * 2 * HALF_UNIT;
constexpr int SUMS = ROWS + 4;              // floats from one row of the results to the next
constexpr int ROUNDS = CHUNK / KG;          // units of a chunk that a warp multiplies
static_assert(CHUNK % (KG * AHEAD) == 0, "a warp's units of a chunk must come round to the same registers");

// The row of W that row r of a block's tile is; with a gate the second half of a tile are the rows that are gated.
__device__ __forceinline__ int weight_row(int r, int tile, int n) {
    if (GATED) {
        const int half = r / (ROWS / 2);
        return min(tile * (ROWS / 2) + r % (ROWS / 2), n - 1) + half * n;
    }
    return min(tile * ROWS + r, n - 1);
}

// The words of two rows of a unit that a lane needs, and the scales of both.
struct Unit {
    uint2 words[2][2];
    float scale[2];
};

// Where in pairs of words a row of W begins, and how far its next unit is.
#ifdef TILED
constexpr int UNIT_STEP = 128;
__device__ __forceinline__ u32 word_place(u32 row, int units) { return row / 16 * units * 128 + row % 16 * 8; }
#else
constexpr int UNIT_STEP = 8;
__device__ __forceinline__ u32 word_place(u32 row, int units) { return row * units * 8; }
#endif

// Where a lane's rows begin: their words and their scales.
struct Places {
    u32 words[2], scale[2];
};

__device__ __forceinline__ void load_unit(Unit& u, const uint2* w, const float* scale, const Places& at, u32 unit,
                                          int group_shift) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint2* p = w + (at.words[h] + unit * UNIT_STEP);
        u.words[h][0] = load_words(p);
        u.words[h][1] = load_words(p + 4);
        if (GJ == 8) u.scale[h] = scale[at.scale[h] + (unit >> group_shift)];
    }
}

template <int BYTE> __device__ __forceinline__ void expand(u32 (&a)[8][4], const Unit& u) {
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const u32 halves = both_bytes<BYTE>(u.words[q % 2][q / 2]);
        a[2 * BYTE][q] = as_bf16(halves);
        a[2 * BYTE + 1][q] = as_bf16(halves >> 4);
    }
}

// total += scale * sums, with the scales of step j of a unit.
__device__ __forceinline__ void add_scaled(float (&total)[NT][4], const float (&sums)[NT][4], const Unit& u, const float* scale,
                                           const Places& at, u32 unit, int j) {
    float own[2];
#pragma unroll
    for (int h = 0; h < 2; h++) own[h] = GJ == 8 ? u.scale[h] : scale[at.scale[h] + (unit * 8 + j) / (GJ > 0 ? GJ : 1)];
#pragma unroll
    for (int tile = 0; tile < NT; tile++)
#pragma unroll
        for (int c = 0; c < 4; c++) total[tile][c] += sums[tile][c] * own[c / 2];
}

__device__ __forceinline__ void multiply_unit(const Unit& u, u64 x, float (&total)[NT][4], const float* scale,
                                              const Places& at, u32 unit) {
    u32 a[8][4];
    expand<0>(a, u);
    expand<1>(a, u);
    expand<2>(a, u);
    expand<3>(a, u);
    constexpr int STEPS = GJ ? GJ : 8;
    float sums[NT][4];
#pragma unroll
    for (int begin = 0; begin < 8; begin += STEPS) {
        products_begin();
#pragma unroll
        for (int j = begin; j < begin + STEPS; j++) {
            const u64 b = advanced(x, j / 4 * HALF_UNIT + j % 4 * 32);
            if (GJ) multiply(sums, a[j], b, j > begin);
            else multiply(total, a[j], b, 1);
        }
        products_end();
        if (GJ) add_scaled(total, sums, u, scale, at, unit, begin);
    }
}

// Rows of x from column 128 * first on; rows that are not there keep what was, which no other row of the result sees.
__device__ __forceinline__ void load_inputs(unsigned char* to, const u16* x, u32 first, u32 count, u32 rows, u32 k, u32 thread) {
    constexpr u32 PIECES = CHUNK * 16, ALL = BATCH * PIECES;  // of 16 bytes
#pragma unroll
    for (u32 i = 0; i < (ALL + THREADS - 1) / THREADS; i++) {
        const u32 p = i * THREADS + thread, row = p / PIECES, piece = p % PIECES;
        if ((ALL % THREADS == 0 || p < ALL) && row < rows && piece < count * 16)
            copy_async(to + piece / 8 * HALF_UNIT + row * 128 + (piece % 8 ^ row % 8) * 16, x + (row * k + first * 128 + piece * 8));
    }
    copies_commit();
}

// The sums of all warps of a block as [BATCH][SUMS] floats in shared memory, in the order of the parts of K.
__device__ __forceinline__ void gather_sums(float* shared, float (&total)[NT][4], int row, int part, int t) {
    for (int turn = 0; turn < KG; turn++) {
        __syncthreads();
        if (part != turn) continue;
#pragma unroll
        for (int tile = 0; tile < NT; tile++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float* cell = shared + (tile * 8 + 2 * t + c % 2) * SUMS + row + (c / 2) * 8;
                *cell = turn ? *cell + total[tile][c] : total[tile][c];
            }
    }
    __syncthreads();
}

__device__ __forceinline__ float activated(float gate, int activation) {
    if (activation == 0) return gate / (1.0f + exponential(-gate));
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);  // GELU's approximation by tanh
    return gate * (1.0f - 1.0f / (1.0f + exponential(2.0f * inner)));
}

__device__ __forceinline__ float with_scale_and_bias(float sum, int row, const float* scale, const u16* bias) {
    if (GJ == 0) sum *= scale[row];
    return bias ? sum + from_bf16(bias[row]) : sum;
}

__device__ __forceinline__ void write(const float* shared, const float* scale, const u16* bias, const u16* residual, void* out,
                                      int tile, int rows, int n, int activation, int thread) {
    constexpr int WIDTH = GATED ? ROWS / 2 : ROWS;
    for (int p = thread; p < BATCH * WIDTH; p += THREADS) {
        const int m = p / WIDTH, r = p % WIDTH, row = tile * WIDTH + r;
        if (m >= rows || row >= n) continue;
        float y = with_scale_and_bias(shared[m * SUMS + r], row, scale, bias);
        if (GATED) y = activated(y, activation) * with_scale_and_bias(shared[m * SUMS + WIDTH + r], n + row, scale, bias);
        const u64 place = (u64)m * n + row;
        if (residual) y += from_bf16(residual[place]);
        if (OUT_FLOAT) ((float*)out)[place] = y;
        else ((u16*)out)[place] = to_bf16(y);
    }
}

// Whether this block is the last of its tile; then shared memory holds the sums of all parts, added in their order.
__device__ __forceinline__ bool is_last_part(float* shared, float* partial, int* counters, int tile, int part, int parts,
                                             int thread, int* flag) {
    float* area = partial + (u64)tile * parts * (BATCH * ROWS);
    for (int p = thread; p < BATCH * ROWS; p += THREADS)
        area[(u64)part * (BATCH * ROWS) + p] = shared[p / ROWS * SUMS + p % ROWS];
    __syncthreads();
    if (thread == 0) {
        *flag = arrive(counters + tile) == parts - 1;
        if (*flag) counters[tile] = 0;  // for the next product
    }
    __syncthreads();
    if (!*flag) return false;
    for (int p = thread; p < BATCH * ROWS; p += THREADS) {
        float sum = 0.0f;
        for (int s = 0; s < parts; s++) sum += load_partial(area + (u64)s * (BATCH * ROWS) + p);
        shared[p / ROWS * SUMS + p % ROWS] = sum;
    }
    __syncthreads();
    return true;
}

// x [rows, k] bf16, w [N or 2 N, k / 128, 16] words, scale [.., groups] float, out [rows, n]. Grid (tiles of W, parts of
// K). group_shift: 2 ** group_shift units share a scale, where GJ is 8. activation: 0 SiLU, 1 GELU by tanh. early:
// whether the kernel ahead may still run.
extern "C" __global__ void __launch_bounds__(THREADS)
few_rows_w4(const u16* x, const uint2* w, const float* scale, const u16* bias, const u16* residual, void* out,
            float* partial, int* counters, int rows, int n, int k, int groups, int group_shift, int units_a_part,
            int activation, int early) {
    DYNAMIC_SHARED(memory);
    __shared__ int flag;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int tile = blockIdx.x, part = blockIdx.y, units = k / 128;
    const int first = part * units_a_part, last = min(first + units_a_part, units);
    const int row = warp / 4 % RG * 64 + warp % 4 * 16 + g, turn = KG == 1 ? 0 : warp / 4 / RG;
    Places at;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 of_w = weight_row(row + h * 8, tile, n);
        at.words[h] = word_place(of_w, units) + t;
        at.scale[h] = of_w * groups;
    }
    const int chunks = (last - first + CHUNK - 1) / CHUNK;
    int begin = first + tile % chunks * CHUNK;
    Unit ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {  // no kernel writes weights: they are asked for before the wait
        const int unit = begin + turn + i * KG;
        if (unit < last) load_unit(ahead[i], w, scale, at, unit, group_shift);
    }
    if (early) {
        wait_for_kernel_ahead();
        let_next_kernel_start();
    }
    float total[NT][4] = {};
    load_inputs(memory, x, begin, min(CHUNK, last - begin), rows, k, thread);
    unsigned char *here = memory, *there = memory + BUFFER;
    for (int chunk = 0; chunk < chunks; chunk++) {
        copies_wait();
        __syncthreads();  // this chunk is there, and nobody reads the one before any more
        const u64 inputs = describe(here);
        int next = begin + CHUNK < last ? begin + CHUNK : first;
        if (chunk + 1 == chunks) next = last;
        else load_inputs(there, x, next, min(CHUNK, last - next), rows, k, thread);
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            const int unit = begin + round * KG + turn;
            if (unit < last)
                multiply_unit(ahead[round % AHEAD], advanced(inputs, (round * KG + turn) * 2 * HALF_UNIT), total, scale, at, unit);
            const int wanted = (round + AHEAD < ROUNDS ? begin + (round + AHEAD) * KG : next + (round + AHEAD - ROUNDS) * KG) + turn;
            if (wanted < last) load_unit(ahead[round % AHEAD], w, scale, at, wanted, group_shift);
        }
        unsigned char* other = here;
        here = there;
        there = other;
        begin = next;
    }
    float* shared = (float*)memory;
    gather_sums(shared, total, row, turn, t);
    if (gridDim.y > 1 && !is_last_part(shared, partial, counters, tile, part, gridDim.y, thread, &flag)) return;
    write(shared, scale, bias, residual, out, tile, rows, n, activation, thread);
}
