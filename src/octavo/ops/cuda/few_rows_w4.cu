// Products of few rows with 4-bit weights: y = x W^T, reading W once from memory, with tensor cores and no detour
// through shared memory.
//
// The weight is the large operand of mma.m16n8k16: 16 rows of W by 16 columns, times up to 8 rows of x. Which column of
// W is called which k of the product is free as long as x says the same. With words in linear_w4's order (bits 4 j to
// 4 j + 3 of word i hold column 16 j + i of a unit of 128) step j gives lane (g, t) columns 16 j + 4 t .. + 3, which are
// nibble j of its words 4 t .. 4 t + 3: one load of 16 bytes feeds eight steps of a row, and four lanes read 64
// neighbouring bytes. A code becomes a bf16 number by being set below the exponent of 128 (see linear_w4).
//
// A block takes ROWS rows of W and a part of K. Its warps share them: RW along rows, KW along units. x comes in chunks
// of CHUNK units through shared memory, and blocks begin with different chunks: when all ask for the same lines at once,
// that takes longer than the weights. Where K is split over blocks, the last one to arrive adds all parts in order.
//
// Compiled with NT (tiles of 8 rows of x), MT (tiles of 16 rows of W a warp), RW, KW, AHEAD (units that a warp has asked
// for), CHUNK, GJ (steps that share a scale: 8, 4, 2, or 0 for one scale a row), NORMED, GATED, OUT_FLOAT.
//
// An RMS norm of x needs no pass of its own: x * weight enters the product, the squares of x are summed beside it, and the
// rows of the result are scaled at the end.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#ifndef EMULATED
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
struct __align__(16) Words { u32 w[4]; };

__device__ __forceinline__ void wait_for_kernel_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ Words load_words(const Words* p) {
    Words r;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3]) : "l"(p));
    return r;
}

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
    u32 s = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(s), "l"(global) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Byte SELECT of both words, each twice: two halves whose low nibbles are one step's codes and the next ones the next's.
template <int BYTE> __device__ __forceinline__ u32 both_bytes(u32 first, u32 second) {
    constexpr u32 select = ((4 + BYTE) << 12) | ((4 + BYTE) << 8) | (BYTE << 4) | BYTE;
    return __byte_perm(first, second, select);
}

// Two codes of 4 bits (low nibble of each half) as bf16, less 8.
__device__ __forceinline__ u32 as_bf16(u32 halves) {
    u32 placed, r;
    asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(placed) : "r"(halves));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(placed), "r"(0x3f803f80u), "r"(0xc308c308u));
    return r;
}

__device__ __forceinline__ u32 times(u32 x, u32 y) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
}
__device__ __forceinline__ float reciprocal_root(float x) { return rsqrtf(x); }
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

constexpr int WARPS = RW * KW, THREADS = 32 * WARPS, ROWS = RW * MT * 16, BATCH = 8 * NT;
constexpr int STRIDE = CHUNK * 128 + 16;  // halves from one row of x in shared memory to the next: 32 bytes of offset
constexpr int INPUTS = (BATCH + NORMED) * STRIDE;  // halves of a chunk of x, and of the norm's weight behind it
constexpr int SUMS = ROWS + 4;            // floats from one row of the results to the next
constexpr int ROUNDS = CHUNK / KW;  // units of a chunk that a warp multiplies
static_assert(CHUNK % (KW * AHEAD) == 0, "a warp's units of a chunk must come round to the same registers");

// The row of W that row r of a block's tile is; with a gate the second half of a tile are the rows that are gated.
__device__ __forceinline__ int weight_row(int r, int tile, int n) {
    if (GATED) {
        const int half = r / (ROWS / 2);
        return min(tile * (ROWS / 2) + r % (ROWS / 2), n - 1) + half * n;
    }
    return min(tile * ROWS + r, n - 1);
}

struct Unit {
    Words words[MT][2];
    float scale[MT][2];
};

// Where the rows of a lane begin: their words (of a lane's t) and their scales.
struct Places {
    u32 words[MT][2], scale[MT][2];
};

__device__ __forceinline__ void load_unit(Unit& u, const Words* w, const float* scale, const Places& at, u32 unit,
                                          int group_shift) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u.words[i][h] = load_words(w + (at.words[i][h] + unit * 4));
            if (GJ == 8) u.scale[i][h] = scale[at.scale[i][h] + (unit >> group_shift)];
        }
}

__device__ __forceinline__ float square_sum(u32 pair) {
    const float low = from_bf16(pair & 0xffff), high = from_bf16(pair >> 16);
    return low * low + high * high;
}

// `counts`: whether this warp adds up the squares of x.
template <int BYTE>
__device__ __forceinline__ void two_steps(const Unit& u, const u16* x, const u16* norm, float (&squares)[NT], bool counts,
                                          float (&sums)[MT][NT][4]) {
    u32 pairs[MT][4];
#pragma unroll
    for (int i = 0; i < MT; i++) {
        pairs[i][0] = both_bytes<BYTE>(u.words[i][0].w[0], u.words[i][0].w[1]);
        pairs[i][1] = both_bytes<BYTE>(u.words[i][1].w[0], u.words[i][1].w[1]);
        pairs[i][2] = both_bytes<BYTE>(u.words[i][0].w[2], u.words[i][0].w[3]);
        pairs[i][3] = both_bytes<BYTE>(u.words[i][1].w[2], u.words[i][1].w[3]);
    }
#pragma unroll
    for (int step = 0; step < 2; step++) {
        u32 a[MT][4];
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int q = 0; q < 4; q++) a[i][q] = as_bf16(step ? pairs[i][q] >> 4 : pairs[i][q]);
#pragma unroll
        for (int tile = 0; tile < NT; tile++) {
            uint2 b = *(const uint2*)(x + tile * 8 * STRIDE + (2 * BYTE + step) * 16);
            if (NORMED) {
                if (counts) squares[tile] += square_sum(b.x) + square_sum(b.y);
                const uint2 weight = *(const uint2*)(norm + (2 * BYTE + step) * 16);
                b.x = times(b.x, weight.x);
                b.y = times(b.y, weight.y);
            }
#pragma unroll
            for (int i = 0; i < MT; i++) mma(sums[i][tile], a[i], b.x, b.y);
        }
    }
}

__device__ __forceinline__ void scale_sums(float (&total)[MT][NT][4], float (&sums)[MT][NT][4], const float (&scale)[MT][2]) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int tile = 0; tile < NT; tile++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                total[i][tile][c] += sums[i][tile][c] * scale[i][c / 2];
                sums[i][tile][c] = 0.0f;
            }
}

// Scales of step j of a unit, where a unit has several.
__device__ __forceinline__ void load_scales(float (&out)[MT][2], const float* scale, const Places& at, u32 unit, int j) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) out[i][h] = scale[at.scale[i][h] + (unit * 8 + j) / (GJ > 0 ? GJ : 1)];
}

__device__ __forceinline__ void multiply_unit(const Unit& u, const u16* x, const u16* norm, float (&squares)[NT],
                                              bool counts, float (&total)[MT][NT][4],
                                              float (&sums)[MT][NT][4], const float* scale, const Places& at,
                                              u32 unit) {
    float own[MT][2];
    two_steps<0>(u, x, norm, squares, counts, GJ ? sums : total);
    if (GJ == 2) { load_scales(own, scale, at, unit, 0); scale_sums(total, sums, own); }
    two_steps<1>(u, x, norm, squares, counts, GJ ? sums : total);
    if (GJ == 2 || GJ == 4) { load_scales(own, scale, at, unit, 2); scale_sums(total, sums, own); }
    two_steps<2>(u, x, norm, squares, counts, GJ ? sums : total);
    if (GJ == 2) { load_scales(own, scale, at, unit, 4); scale_sums(total, sums, own); }
    two_steps<3>(u, x, norm, squares, counts, GJ ? sums : total);
    if (GJ == 2 || GJ == 4) { load_scales(own, scale, at, unit, 6); scale_sums(total, sums, own); }
    if (GJ == 8) scale_sums(total, sums, u.scale);
}

// Rows of x from column 128 * first on; rows that are not there keep what was, which no other row of the result sees.
__device__ __forceinline__ void load_inputs(u16* to, const u16* x, const u16* norm, u32 first, u32 count, u32 rows, u32 k,
                                            u32 thread) {
    constexpr u32 PIECES = CHUNK * 16, ALL = BATCH * PIECES;  // of 16 bytes
#pragma unroll
    for (u32 i = 0; i < (ALL + THREADS - 1) / THREADS; i++) {
        const u32 p = i * THREADS + thread, row = p / PIECES, piece = p % PIECES;
        if ((ALL % THREADS == 0 || p < ALL) && row < rows && piece < count * 16)
            copy_async(to + row * STRIDE + piece * 8, x + (row * k + first * 128 + piece * 8));
    }
    if (NORMED && thread < count * 16) copy_async(to + BATCH * STRIDE + thread * 8, norm + (first * 128 + thread * 8));
    copies_commit();
}

// The sums of all warps of a block as [BATCH][SUMS] floats in shared memory, in the order of the parts of K.
__device__ __forceinline__ void gather_sums(float* shared, float (&total)[MT][NT][4], const float (&squares)[NT], int row,
                                            int part, int g, int t) {
    for (int turn = 0; turn < KW; turn++) {
        __syncthreads();
        if (part != turn) continue;
        if (NORMED && row == 0) {
#pragma unroll
            for (int tile = 0; tile < NT; tile++) shared[BATCH * SUMS + (part * 4 + t) * BATCH + tile * 8 + g] = squares[tile];
        }
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int tile = 0; tile < NT; tile++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float* cell = shared + (tile * 8 + 2 * t + c % 2) * SUMS + row + i * 16 + g + (c / 2) * 8;
                    *cell = turn ? *cell + total[i][tile][c] : total[i][tile][c];
                }
    }
    __syncthreads();
}

// The sums of squares of the rows of x, which warps left in parts, in the place of the first part.
__device__ __forceinline__ void add_squares(float* shared, int thread) {
    float sum = 0.0f;
    if (thread < BATCH)
        for (int i = 0; i < 4 * KW; i++) sum += shared[BATCH * SUMS + i * BATCH + thread];
    __syncthreads();
    if (thread < BATCH) shared[BATCH * SUMS + thread] = sum;
    __syncthreads();
}

__device__ __forceinline__ float activated(float gate, int activation) {
    if (activation == 0) return gate / (1.0f + exponential(-gate));
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);  // GELU's approximation by tanh
    return gate * (1.0f - 1.0f / (1.0f + exponential(2.0f * inner)));
}

__device__ __forceinline__ float with_scale_and_bias(float sum, float inverse, int row, const float* scale, const u16* bias) {
    if (NORMED) sum *= inverse;
    if (GJ == 0) sum *= scale[row];
    return bias ? sum + from_bf16(bias[row]) : sum;
}

__device__ __forceinline__ void write(const float* shared, const float* scale, const u16* bias, const u16* residual, void* out,
                                      int tile, int rows, int n, int k, int activation, float eps, int thread) {
    constexpr int WIDTH = GATED ? ROWS / 2 : ROWS;
    for (int p = thread; p < BATCH * WIDTH; p += THREADS) {
        const int m = p / WIDTH, r = p % WIDTH, row = tile * WIDTH + r;
        if (m >= rows || row >= n) continue;
        const float inverse = NORMED ? reciprocal_root(shared[BATCH * SUMS + m] / k + eps) : 1.0f;
        float y = with_scale_and_bias(shared[m * SUMS + r], inverse, row, scale, bias);
        if (GATED) y = activated(y, activation) * with_scale_and_bias(shared[m * SUMS + WIDTH + r], inverse, n + row, scale, bias);
        const u64 place = (u64)m * n + row;
        if (residual) y += from_bf16(residual[place]);
        if (OUT_FLOAT) ((float*)out)[place] = y;
        else ((u16*)out)[place] = to_bf16(y);
    }
}

__device__ __forceinline__ int place_of(int p) {
    return p < BATCH * ROWS ? p / ROWS * SUMS + p % ROWS : BATCH * SUMS + p - BATCH * ROWS;
}

// Whether this block is the last of its tile; then shared memory holds the sums of all parts, added in their order.
__device__ __forceinline__ bool is_last_part(float* shared, float* partial, int* counters, int tile, int part, int parts,
                                             int thread, int* flag) {
    constexpr int SIZE = BATCH * (ROWS + NORMED);  // of a part: the sums, and the squares behind them
    float* area = partial + (u64)tile * parts * SIZE;
    for (int p = thread; p < SIZE; p += THREADS) area[(u64)part * SIZE + p] = shared[place_of(p)];
    __syncthreads();
    if (thread == 0) {
        *flag = arrive(counters + tile) == parts - 1;
        if (*flag) counters[tile] = 0;  // for the next product
    }
    __syncthreads();
    if (!*flag) return false;
    for (int p = thread; p < SIZE; p += THREADS) {
        float sum = 0.0f;
        for (int s = 0; s < parts; s++) sum += load_partial(area + (u64)s * SIZE + p);
        shared[place_of(p)] = sum;
    }
    __syncthreads();
    return true;
}

// x [rows, k] bf16, w [N or 2 N, k / 128, 4] words, scale [.., groups] float, norm [k], out [rows, n]. Grid (tiles of W, parts of
// K). group_shift: 2 ** group_shift units share a scale, where GJ is 8. activation: 0 SiLU, 1 GELU by tanh. early:
// whether the kernel ahead may still run.
extern "C" __global__ void __launch_bounds__(THREADS, 65536 / 128 / THREADS)
few_rows_w4(const u16* x, const Words* w, const float* scale, const u16* norm, const u16* bias, const u16* residual,
            void* out, float* partial, int* counters, int rows, int n, int k, int groups, int group_shift, int units_a_part,
            int activation, float eps, int early) {
    DYNAMIC_SHARED(memory);
    __shared__ int flag;
    u16* inputs = (u16*)memory;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int tile = blockIdx.x, part = blockIdx.y, units = k / 128;
    const int first = part * units_a_part, last = min(first + units_a_part, units);
    const int row = warp % RW * MT * 16, turn = KW == 1 ? 0 : warp / RW;
    Places at;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 of_w = weight_row(row + i * 16 + h * 8 + g, tile, n);
            at.words[i][h] = of_w * units * 4 + t;
            at.scale[i][h] = of_w * groups;
        }
    const int chunks = (last - first + CHUNK - 1) / CHUNK;
    int begin = first + tile % chunks * CHUNK;
    Unit ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {  // no kernel writes weights: they are asked for before the wait
        const int unit = begin + turn + i * KW;
        if (unit < last) load_unit(ahead[i], w, scale, at, unit, group_shift);
    }
    if (early) {
        wait_for_kernel_ahead();
        let_next_kernel_start();
    }
    float total[MT][NT][4] = {}, sums[MT][NT][4] = {}, squares[NT] = {};
    load_inputs(inputs, x, norm, begin, min(CHUNK, last - begin), rows, k, thread);
    int slot = 0;
    for (int chunk = 0; chunk < chunks; chunk++) {
        copies_wait();
        __syncthreads();  // this chunk is there, and nobody reads the one before any more
        const u16 *here = inputs + slot * INPUTS + g * STRIDE + 4 * t, *factors = inputs + slot * INPUTS + BATCH * STRIDE + 4 * t;
        slot ^= 1;
        int next = begin + CHUNK < last ? begin + CHUNK : first;
        if (chunk + 1 == chunks) next = last;
        else load_inputs(inputs + slot * INPUTS, x, norm, next, min(CHUNK, last - next), rows, k, thread);
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            const int unit = begin + round * KW + turn;
            if (unit < last)
                multiply_unit(ahead[round % AHEAD], here + (round * KW + turn) * 128, factors + (round * KW + turn) * 128,
                              squares, row == 0, total, sums, scale, at, unit);
            const int wanted = (round + AHEAD < ROUNDS ? begin + (round + AHEAD) * KW : next + (round + AHEAD - ROUNDS) * KW) + turn;
            if (wanted < last) load_unit(ahead[round % AHEAD], w, scale, at, wanted, group_shift);
        }
        begin = next;
    }
    float* shared = (float*)memory;
    gather_sums(shared, total, squares, row, turn, g, t);
    if (NORMED) add_squares(shared, thread);
    if (gridDim.y > 1 && !is_last_part(shared, partial, counters, tile, part, gridDim.y, thread, &flag)) return;
    write(shared, scale, bias, residual, out, tile, rows, n, k, activation, eps, thread);
}
