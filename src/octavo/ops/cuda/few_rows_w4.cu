// Products of few rows with 4-bit weights: y = x W^T, with W streamed through shared memory by bulk copies that never stop.
//
// One block a multiprocessor. One of its threads copies; its warps multiply, each its share of every stage of the ring, and
// their sums meet in shared memory. A block goes through its tiles of W in passes, and the copies for the next pass run on
// while the sums of the last one are added and written. Weights are asked for before the wait for the kernel ahead, which
// does not write them.
//
// Codes are multiplied as integers, because a code becomes a signed byte in one or two instructions and a bf16 number in
// four. For that a row of x is written as 256 high + low, two bytes a column and a scale a unit of 128 columns: 16 bits from
// the largest value of the unit down, where bf16 has 8. W is the large operand of mma.m16n8k32: 16 rows of W by 32
// columns; high and low bytes of up to four rows of x are the eight columns of the other. Which column of W is called which
// k is free as long as x says the same, so a lane takes 16 bytes of a row as they lie: lane (g, t) words 4 t .. 4 t + 3 of
// a unit, of rows g and g + 8. Step i multiplies the low and the high nibbles of words 4 t + i; nibble j of word i is column
// 16 j + i (see linear_w4).
//
// Compiled with NT (tiles of 4 rows of x), X_ROWS (rows of x that there is room for: 1 or 4 NT), MT (tiles of 16 rows of W a
// pass), KW (warps that multiply), STAGES (of KW units each), SPU (scales a unit: 1, 2, 4, or 0 for one scale a row),
// NORMED, GATED, OUT_FLOAT.

#include "hopper.cuh"

constexpr int UNIT = 64, COLUMNS = 128;                               // bytes of a row of W, and columns that they are
constexpr int X_UNIT = 2 * COLUMNS;                                   // bytes of a row of x
constexpr int MULTIPLIERS = 32 * KW;                                  // threads
static_assert(X_ROWS == 1 ? NT == 1 : X_ROWS == 4 * NT, "room for one row, or for all of the tiles");
constexpr int ROW_STRIDE = KW * UNIT;                                 // bytes from row to row of a stage
constexpr int SCALES = 16 * 4 * SPU;                                  // bytes of a unit's scales of a tile
constexpr int SCALE_STRIDE = KW * SCALES;
constexpr int BOX_BYTES = 16 * ROW_STRIDE;                            // of a tile in a stage; scales are behind all boxes
constexpr int STAGE_BYTES = (MT * (BOX_BYTES + SCALE_STRIDE) + 127) / 128 * 128;
constexpr int PASS_ROWS = MT * 16, SUM_STRIDE = PASS_ROWS + 4;        // from the sums of a row of x to the next
constexpr int SUMS = KW * X_ROWS * SUM_STRIDE;                        // of a pass, of all warps
constexpr int OUTPUTS = GATED ? PASS_ROWS / 2 : PASS_ROWS;            // columns of the result a pass
constexpr int GROUP_TILES = GATED ? MT / 2 : MT;                      // tiles of the result a pass
static_assert(!GATED || MT % 2 == 0, "a gate and what it gates are in one pass");

struct Sizes {
    int rows, n, units, first_unit, last_unit, first_tile, last_tile;  // tiles of the result, units of this part
    int passes, rounds;
};

__device__ __forceinline__ Sizes sizes_of(int rows, int n, int units, int units_a_part) {
    Sizes s;
    const int tiles = n / 16;
    s.rows = rows; s.n = n; s.units = units;
    s.first_unit = blockIdx.y * units_a_part;
    s.last_unit = min(s.first_unit + units_a_part, units);
    s.first_tile = (int)((u64)tiles * blockIdx.x / gridDim.x);
    s.last_tile = (int)((u64)tiles * (blockIdx.x + 1) / gridDim.x);
    s.passes = (s.last_tile - s.first_tile + GROUP_TILES - 1) / GROUP_TILES;
    s.rounds = (s.last_unit - s.first_unit + KW - 1) / KW;
    return s;
}

// Which tile of W is the i-th of a pass that begins with tile `first` of the result; -1 for one behind the last.
__device__ __forceinline__ int tile_of(const Sizes& s, int first, int i) {
    const int tile = first + i % GROUP_TILES;
    if (tile >= s.last_tile) return -1;
    return i < GROUP_TILES ? tile : tile + s.n / 16;
}

// One thread: the stages of all passes, one after the other, as fast as the others empty them.
__device__ __forceinline__ void copy_weights(const Sizes& s, const TensorMap* w, const u8* scales, u8* ring, u64* full,
                                             u64* empty) {
    int slot = 0;
    u32 parity = 1;  // the first wait for a slot that nobody has used yet comes back at once
    for (int pass = 0; pass < s.passes; pass++) {
        const int first = s.first_tile + pass * GROUP_TILES;
        const int count = min(GROUP_TILES, s.last_tile - first) * (GATED ? 2 : 1);
        for (int round = 0; round < s.rounds; round++) {
            const int unit = s.first_unit + round * KW, scaled = min(KW, s.units - unit) * SCALES;
            signal_wait(empty + slot, parity);
            signal_expect(full + slot, count * (BOX_BYTES + scaled));
#pragma unroll
            for (int i = 0; i < MT; i++) {
                const int tile = tile_of(s, first, i);
                if (tile < 0) continue;
                u8 *box = ring + slot * STAGE_BYTES + i * BOX_BYTES, *of_box = ring + slot * STAGE_BYTES + MT * BOX_BYTES;
                copy_box(box, w, unit * (UNIT / 4), tile * 16, full + slot);
                const u8* from = scales + ((u64)tile * s.units + unit) * SCALES;
                if (SPU) copy_bulk(of_box + i * SCALE_STRIDE, from, scaled, full + slot);
            }
            if (++slot == STAGES) {
                slot = 0;
                parity ^= 1;
            }
        }
    }
}

#include "inputs_w4.cuh"

// x: this lane's column of the unit; x_scale: of this lane's row.
__device__ __forceinline__ void multiply(const Words (&words)[MT][2], const u8* x, int stride, const u8* stage, int unit, int g,
                                         const float* x_scale, int units_a_part, float (&total)[MT][NT][2]) {
    constexpr int SETS = SPU ? SPU : 1;
    int sums[SETS][MT][NT][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Words b[NT];
#pragma unroll
        for (int m = 0; m < NT; m++) b[m] = *(const Words*)(x + m * 4 * stride + half * 128);
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
            for (int i = 0; i < MT; i++) {
                const u32 upper = words[i][0].w[2 * half + step], lower = words[i][1].w[2 * half + step];
                const u32 a[4] = {signed_codes(upper << 4), signed_codes(lower << 4), signed_codes(upper), signed_codes(lower)};
#pragma unroll
                for (int set = 0; set < SETS; set++) {  // a byte of a word of x belongs to one group of columns
                    const u32 mask = SETS == 1 ? 0xffffffffu : SETS == 2 ? 0xffffu << 16 * set : 0xffu << 8 * set;
#pragma unroll
                    for (int m = 0; m < NT; m++)
                        mma_int8(sums[set][i][m], a, b[m].w[2 * step] & mask, b[m].w[2 * step + 1] & mask);
                }
            }
    }
#pragma unroll
    for (int m = 0; m < NT; m++) {
        const float of_x = x_scale[m * 4 * units_a_part];
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                const float* scale = (const float*)(stage + MT * BOX_BYTES + i * SCALE_STRIDE + unit * SCALES) + set * 16;
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const float sum = 256 * sums[set][i][m][2 * c] + sums[set][i][m][2 * c + 1];
                    total[i][m][c] += sum * (SPU ? of_x * scale[g + 8 * c] : of_x);
                }
            }
    }
}
// A warp's sums as [X_ROWS][SUM_STRIDE] of its own.
__device__ __forceinline__ void store_sums(float* sums, const float (&total)[MT][NT][2], int g, int t) {
    if (X_ROWS == 1 && t > 0) return;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int m = 0; m < NT; m++)
#pragma unroll
            for (int c = 0; c < 2; c++) sums[(m * 4 + t) * SUM_STRIDE + i * 16 + g + 8 * c] = total[i][m][c];
}

__device__ __forceinline__ float activated(float gate, int activation) {
    if (activation == 0) return gate / (1.0f + exponential(-gate));
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);  // GELU's approximation by tanh
    return gate * (1.0f - 1.0f / (1.0f + exponential(2.0f * inner)));
}

// What belongs to the whole result: a scale a row of W, bias, activation, residual.
struct End {
    const float* row_scale;
    const u16 *bias, *residual;
    void* out;
    int activation;
};

__device__ __forceinline__ float finished(const End& end, float sum, int row) {
    if (end.row_scale) sum *= end.row_scale[row];
    return end.bias ? sum + from_bf16(end.bias[row]) : sum;
}

// Row m of x, column r of a pass that begins with tile `first`; `sums` gives the whole sum of a row of W.
template <typename Whole>
__device__ __forceinline__ void write(const Sizes& s, const End& end, int first, int m, int r, Whole whole) {
    const int column = first * 16 + r;
    if (column >= s.last_tile * 16) return;
    float y = finished(end, whole(r), column);
    if (GATED) y = activated(y, end.activation) * finished(end, whole(OUTPUTS + r), s.n + column);
    const u64 place = (u64)m * s.n + column;
    if (end.residual) y += from_bf16(end.residual[place]);
    if (OUT_FLOAT) ((float*)end.out)[place] = y;
    else ((u16*)end.out)[place] = to_bf16(y);
}

__device__ __forceinline__ float block_sum(const float* sums, int m, int r) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < KW; warp++) sum += sums[(warp * X_ROWS + m) * SUM_STRIDE + r];
    return sum;
}

// Whether this block is the last of those that share a pass; then `area` holds the sums of all parts of K.
__device__ __forceinline__ bool is_last_part(const float* sums, float* area, int size, int* counter, int thread, int* flag) {
    for (int p = thread; p < size; p += MULTIPLIERS) area[(u64)blockIdx.y * size + p] = block_sum(sums, p / PASS_ROWS, p % PASS_ROWS);
    sync_multipliers(MULTIPLIERS);
    if (thread == 0) {
        *flag = arrive(counter) == (int)gridDim.y - 1;
        if (*flag) *counter = 0;  // for the next product
    }
    sync_multipliers(MULTIPLIERS);
    return *flag;
}

// Adds the warps' sums, and where K is in parts those of the blocks in their order, and writes the results of a pass.
__device__ __forceinline__ void finish_pass(const Sizes& s, const End& end, const float* sums, float* partial, int* counters,
                                            int pass, int thread, int* flag) {
    const int first = s.first_tile + pass * GROUP_TILES, size = s.rows * PASS_ROWS, parts = gridDim.y;
    const int most_tiles = (s.n / 16 + gridDim.x - 1) / gridDim.x, most_passes = (most_tiles + GROUP_TILES - 1) / GROUP_TILES;
    const int job = blockIdx.x * most_passes + pass;
    float* area = partial + (u64)job * parts * size;
    if (parts > 1 && !is_last_part(sums, area, size, counters + job, thread, flag)) return;
    for (int p = thread; p < s.rows * OUTPUTS; p += MULTIPLIERS) {
        const int m = p / OUTPUTS;
        write(s, end, first, m, p % OUTPUTS, [&](int r) {
            if (parts == 1) return block_sum(sums, m, r);
            float sum = 0.0f;
            for (int part = 0; part < parts; part++) sum += load_partial(area + (u64)part * size + m * PASS_ROWS + r);
            return sum;
        });
    }
}

// w: boxes of 16 rows by KW units of a weight [N or 2 N, units] of 64 bytes. x [rows, k] bf16, scales float [N / 16 or twice,
// units, SPU, 16], row_scale float [N or 2 N], norm [k], out [rows, n]. Grid (blocks that share the tiles of W, parts of K).
// activation: 0 SiLU, 1 GELU by tanh. early: whether the kernel ahead may still run.
extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 32, 1)
few_rows_w4(const BY_VALUE TensorMap w, const u8* x, const u8* scales, const float* row_scale, const u8* norm,
                  const u16* bias, const u16* residual, void* out, float* partial, int* counters, int rows, int n, int units,
                  int units_a_part, int activation, float eps, int early) {
    DYNAMIC_SHARED(memory);
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ int flag;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const Sizes s = sizes_of(rows, n, units, units_a_part);
    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) {
            signal_init(full + i, 1);
            signal_init(empty + i, KW);
        }
        signals_ready();
    }
    __syncthreads();
    if (early) let_next_kernel_start();
    u8* ring = (u8*)memory;
    if (warp == KW) {
        if (lane == 0) {
            fetch_map(&w);
            copy_weights(s, &w, scales, ring, full, empty);
        }
        return;
    }
    float* sums = (float*)(memory + STAGES * STAGE_BYTES);
    u8* inputs = (u8*)(sums + 2 * SUMS);
    const int stride = units_a_part * X_UNIT;
    float* x_scales = (float*)(inputs + X_ROWS * stride);
    u8* factors = (u8*)(x_scales + (X_ROWS * units_a_part + 3) / 4 * 4);
    if (NORMED) load_norm(s, factors, norm, thread);
    if (early) wait_for_kernel_ahead();
    load_inputs(s, inputs, stride, x, thread);
    sync_multipliers(MULTIPLIERS);
    if (NORMED) {
        normalize(s, inputs, stride, factors, (float*)sums, eps, thread);
        sync_multipliers(MULTIPLIERS);
    }
    split_inputs(s, inputs, stride, x_scales, units_a_part, thread);
    sync_multipliers(MULTIPLIERS);
    const int row = X_ROWS == 1 ? 0 : g / 2;  // columns of the product are high and low bytes in turn
    const u8* own = inputs + row * stride + g % 2 * 64 + t * 16;
    const float* own_scale = x_scales + (X_ROWS == 1 ? 0 : t * units_a_part);
    const End end = {row_scale, bias, residual, out, activation};
    int slot = 0;
    u32 parity = 0;
    for (int pass = 0; pass < s.passes; pass++) {
        float total[MT][NT][2] = {};
        for (int round = 0; round < s.rounds; round++) {
            signal_wait(full + slot, parity);
            const int unit = round * KW + warp;
            if (unit < s.last_unit - s.first_unit) {
                const u8* stage = ring + slot * STAGE_BYTES;
                Words words[MT][2];
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        words[i][h] = *(const Words*)(stage + i * BOX_BYTES + (g + 8 * h) * ROW_STRIDE + warp * UNIT + t * 16);
                multiply(words, own + unit * X_UNIT, stride, stage, warp, g, own_scale + unit, units_a_part, total);
            }
            sync_warp();
            if (lane == 0) signal_arrive(empty + slot);
            if (++slot == STAGES) {
                slot = 0;
                parity ^= 1;
            }
        }
        float* mine = sums + (pass & 1) * SUMS;  // nobody still reads what the pass before the last one left here
        store_sums(mine + warp * X_ROWS * SUM_STRIDE, total, g, t);
        sync_multipliers(MULTIPLIERS);
        finish_pass(s, end, mine, partial, counters, pass, thread, &flag);
    }
}
