// Attention of one new token a request over its pages, in equal shares for all multiprocessors whatever the lengths.
//
// The tiles of 16 keys of all pairs of a request and a key head form one sequence, by request, head and position, and each
// block takes an equal stretch of it. A pair counts a tile more than it has, for its beginning; a pair that a stretch's end
// cuts has parts in several blocks, and the last of them to finish merges all, in the order of positions (split-KV decoding
// after Dao et al., "Flash-Decoding for long-context inference", 2023; equal shares as in Stream-K, Osama et al., 2023).
// Every block finds its stretch out of the lengths, so that a CUDA graph stays valid.
//
// One warp copies pages through a ring that never runs empty between pairs, one prepares the queries of the pairs to come,
// and the others multiply, each its own tiles with its own softmax (online, Milakov and Gimelshein, 2018); what they have of
// a pair meets in shared memory. Keys are the large operand of mma.m16n8k16 and up to eight query heads the columns, so the
// scores come out transposed; movmatrix turns them for the second product, in which rows are channels of V.
//
// With FUSED the queries and the newest key and value are taken out of the row of the projection, normed, rotated, and
// written to their page by the block that begins the pair, whose softmax begins with them. Then nothing that is copied is
// written by the kernel ahead, and copies begin before it ends.
//
// Compiled with D (channels of a head: 64 or 128), GROUP (query heads a key head, up to 8), KV_HEADS, BLOCK_SIZE (keys a
// page), WARPS (that multiply), STAGES (tiles in the ring), FUSED, ROTARY (channels that turn), INTERLEAVED, Q_NORM, K_NORM.

#include "hopper.cuh"

constexpr int KEYS = 16;                                     // a tile
constexpr int TILE_BYTES = KEYS * D * 2, STAGE_BYTES = 2 * TILE_BYTES;
constexpr int MULTIPLIERS = 32 * WARPS, STEPS = D / 16;
constexpr int Q_STRIDE = D + 8, SUM_STRIDE = D + 4;          // so that neighbouring rows lie in other banks
constexpr int SLOTS = 4;                                     // pairs whose queries are prepared
constexpr int SUMS = WARPS * GROUP * SUM_STRIDE;             // of a pair, of all warps
constexpr int MOST_REQUESTS = 1024;
constexpr float FLOOR = -1e30f;                              // the maximum before any score: finite, so no inf - inf
static_assert(GROUP <= 8 && (D == 64 || D == 128) && BLOCK_SIZE % KEYS == 0, "see above");
static_assert(STAGES % WARPS == 0, "a stage is always the same warp's, which cannot take one turn of it for the next but one");

// What a pair begins with: its queries [8][Q_STRIDE], and with FUSED the newest key's scores and its value.
struct alignas(16) Query {
    u16 q[8 * Q_STRIDE];
    float scores[8], value[D];
};

struct Stats { float maximum, sum; };

struct Pointers {
    const u16* q;                                            // [T, Hq, D], or with FUSED rows of q, k and v
    const float *scales, *columns;                           // of rows and columns of those, or null
    const long long *positions, *slots;
    const float* cos_sin;                                    // [positions, ROTARY]: cosines, then sines
    const u16 *q_norm, *k_norm;
    u16 *k_cache, *v_cache;
};

#include "decode_shares.cuh"
#include "decode_queries.cuh"

// Pages of the 32 tiles of a piece from `tile` on, a lane each.
__device__ __forceinline__ int pages_of(const Piece& p, const int* tables, long long stride, int tile, int lane) {
    return tile + lane < p.end_tile ? tables[p.request * stride + (tile + lane) * KEYS / BLOCK_SIZE] : 0;
}

// One warp: the tiles of the whole stretch, as fast as the others empty the ring. Pages are known a piece ahead.
__device__ __forceinline__ void copy_tiles(Walk walk, const int* lengths, const int* tables, long long stride,
                                           const TensorMap* k_map, const TensorMap* v_map, u8* ring, u64* full, u64* empty,
                                           int lane) {
    Piece now, next;
    bool more = advance(walk, lengths, now);
    int pages = more ? pages_of(now, tables, stride, now.first_tile, lane) : 0, stage = 0;
    u32 parity = 1;  // the first wait for a stage that nobody has used yet comes back at once
    while (more) {
        more = advance(walk, lengths, next);
        const int next_pages = more ? pages_of(next, tables, stride, next.first_tile, lane) : 0;
        for (int base = now.first_tile; base < now.end_tile; base += 32) {
            const int following = pages_of(now, tables, stride, base + 32, lane);
            for (int i = 0; i < min(32, now.end_tile - base); i++) {
                const int page = from_lane(pages, i);
                if (lane == 0) {
                    const int row = (page * KV_HEADS + now.head) * BLOCK_SIZE + (base + i) * KEYS % BLOCK_SIZE;
                    u8* to = ring + stage * STAGE_BYTES;
                    signal_wait(empty + stage, parity);
                    signal_expect(full + stage, STAGE_BYTES);
                    copy_columns(to, k_map, row, full + stage);
                    copy_columns(to + TILE_BYTES, v_map, row, full + stage);
                }
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
            pages = following;
        }
        now = next;
        pages = next_pages;
    }
}

// Of the columns 2 t and 2 t + 1, which are query heads: maximum in units of log2, and this lane's part of the sum.
struct Softmax {
    float maximum[2], sum[2], acc[STEPS][4];  // acc: channels 16 i + g and + 8, columns 2 t and + 1
};

__device__ __forceinline__ float infinity() { return number_of(0x7f800000u); }

// Where 16 bytes of a row begin, in a tile as it was copied: columns of 128 bytes, in which 16 bytes change places by row.
__device__ __forceinline__ const u8* place(const u8* tile, int row, int chunk) {
    return tile + chunk / 8 * (KEYS * 128) + row * 128 + ((chunk ^ row) & 7) * 16;
}

// keys: how many of the tile's 16 count. Those behind may be anything, so they are taken out of both products.
__device__ __forceinline__ void attend_tile(Softmax& s, const u32 (&q)[STEPS][2], const u8* k, const u8* v, int keys, float scale,
                                            int lane) {
    const int g = lane / 4, t = lane % 4;
    float scores[2][4] = {};  // two sums, so that products do not wait for each other
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        u32 a[4];
        load_matrices(a, place(k, lane % 16, 2 * i + lane / 16));
        mma_bf16(scores[i % 2], a, q[i][0], q[i][1]);
    }
    u32 weights[2];
    float shrink[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float low = (scores[0][c] + scores[1][c]) * scale, high = (scores[0][c + 2] + scores[1][c + 2]) * scale;
        if (g >= keys) low = -infinity();
        if (g + 8 >= keys) high = -infinity();
        const float maximum = max(s.maximum[c], column_max(max(low, high)));
        shrink[c] = power_of_2(s.maximum[c] - maximum);
        s.maximum[c] = maximum;
        scores[0][c] = power_of_2(low - maximum);
        scores[0][c + 2] = power_of_2(high - maximum);
        s.sum[c] = s.sum[c] * shrink[c] + scores[0][c] + scores[0][c + 2];
    }
    weights[0] = turned_matrix(pair_of_bf16(scores[0][0], scores[0][1]));
    weights[1] = turned_matrix(pair_of_bf16(scores[0][2], scores[0][3]));
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        u32 a[4];
        load_matrices_turned(a, place(v, lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
        if (keys < KEYS) {
#pragma unroll
            for (int part = 0; part < 4; part++) {  // keys 2 t and 2 t + 1, or 8 more
                const int key = 2 * t + part / 2 * 8;
                a[part] &= key + 1 < keys ? 0xffffffffu : key < keys ? 0xffffu : 0u;
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) s.acc[i][c] *= shrink[c % 2];
        mma_bf16(s.acc[i], a, weights[0], weights[1]);
    }
}

__device__ __forceinline__ void begin(Softmax& s, const Query& query, bool has_newest, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        s.maximum[c] = has_newest ? query.scores[2 * t + c] : FLOOR;
        s.sum[c] = has_newest && g == 0 ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) s.acc[i][c] = has_newest ? query.value[16 * i + g + c / 2 * 8] : 0.0f;
}

// A warp's sums of a pair, [GROUP][SUM_STRIDE], and what they are relative to.
__device__ __forceinline__ void store_sums(const Softmax& s, float* sums, Stats* stats, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const float sum = column_sum(s.sum[c]);
        if (2 * t + c >= GROUP) continue;
        if (g == 0) stats[2 * t + c] = {s.maximum[c], sum};
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                sums[(2 * t + c) * SUM_STRIDE + 16 * i + g + 8 * half] = s.acc[i][c + 2 * half];
    }
}

#include "decode_parts.cuh"

// Zeros for requests of length 0, which pad the batch: all blocks share them, as there may be many one after the other.
__device__ __forceinline__ void clear_padding(const int* lengths, int requests, u16* out, int thread) {
    constexpr int WIDTH = KV_HEADS * GROUP * D;
    for (int r = blockIdx.x; r < requests; r += gridDim.x)
        for (int i = thread; lengths[r] == 0 && i < WIDTH; i += MULTIPLIERS) out[(long long)r * WIDTH + i] = 0;
}

// The warps that multiply: tile i of the stretch is that of warp i % WARPS.
__device__ __forceinline__ void multiply(Walk walk, const int* lengths, const Query* queries, u64* ready, u64* used, const u8* ring,
                                         u64* full, u64* empty, float* sums, Stats* stats, u16* out, float* parts,
                                         Stats* part_stats, int* arrived, int* flag, float scale, int thread) {
    const int lane = thread % 32, warp = thread / 32;
    int stage = warp, tiles = 0, slot = 0, turn = 0;
    u32 parity = 0, slot_parity = 0;
    Piece p;
    while (advance(walk, lengths, p)) {
        signal_wait(ready + slot, slot_parity);
        u32 q[STEPS][2];
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                q[i][half] = *(const u32*)(queries[slot].q + lane / 4 * Q_STRIDE + 16 * i + 8 * half + lane % 4 * 2);
        Softmax s;
        begin(s, queries[slot], FUSED && warp == 0 && p.first == p.begin, lane);
        sync_warp();
        if (lane == 0) signal_arrive(used + slot);
        if (++slot == SLOTS) {
            slot = 0;
            slot_parity ^= 1;
        }
        for (int i = p.first_tile + (warp + WARPS - tiles % WARPS) % WARPS; i < p.end_tile; i += WARPS) {
            const u8* tile = ring + stage * STAGE_BYTES;
            signal_wait(full + stage, parity);
            attend_tile(s, q, tile, tile + TILE_BYTES, keys_of(p.length) - i * KEYS, scale, lane);
            sync_warp();
            if (lane == 0) signal_arrive(empty + stage);
            stage += WARPS;
            if (stage >= STAGES) {
                stage -= STAGES;
                parity ^= 1;
            }
        }
        tiles += max(p.end_tile - p.first_tile, 0);
        float* own = sums + turn * SUMS;  // nobody still reads what the pair before the last one left here
        Stats* own_stats = stats + turn * WARPS * GROUP;
        store_sums(s, own + warp * GROUP * SUM_STRIDE, own_stats + warp * GROUP, lane);
        sync_multipliers(MULTIPLIERS);
        finish(p, walk.size, own, own_stats, out, parts, part_stats, arrived, flag, thread);
        turn ^= 1;
    }
}

// k_map, v_map: a layer's pages as rows of D channels, by columns of 128 bytes. counts: how many requests there are, or null
// where `requests` tells; they have the first rows. tables [requests, table_stride], out [T, Hq * D]. parts [2 grid, GROUP, D].
// least: tiles that a block takes where there are any. scale holds log2(e). early: whether the kernel ahead may still run.
extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 64, 1)
decode_attention(const BY_VALUE TensorMap k_map, const BY_VALUE TensorMap v_map, const BY_VALUE Pointers given,
                 const int* tables, const int* seq_lens, const int* counts, u16* out, float* parts, Stats* part_stats, int* arrived,
                 int requests, int least, int table_stride, int q_stride, float scale, float eps, int early) {
    DYNAMIC_SHARED(memory);
    __shared__ u64 full[STAGES], empty[STAGES], ready[SLOTS], used[SLOTS];
    __shared__ int lengths[MOST_REQUESTS], flag;
    __shared__ Walk stretch;
    __shared__ Query queries[SLOTS];
    __shared__ Stats stats[2 * WARPS * GROUP];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    u8* ring = memory + (1024 - shared_address(memory) % 1024) % 1024;  // places are exchanged by bits of the address
    float* sums = (float*)(ring + STAGES * STAGE_BYTES);
    if (counts) requests = *counts;
    for (int r = thread; r < requests; r += MULTIPLIERS + 64) lengths[r] = seq_lens[r];
    for (int i = thread; i < SLOTS * (8 - GROUP) * Q_STRIDE; i += MULTIPLIERS + 64)  // columns without a query head
        queries[i / ((8 - GROUP) * Q_STRIDE)].q[GROUP * Q_STRIDE + i % ((8 - GROUP) * Q_STRIDE)] = 0;
    if (thread == 0) {
        fetch_map(&k_map);
        fetch_map(&v_map);
        for (int i = 0; i < STAGES; i++) {
            signal_init(full + i, 1);
            signal_init(empty + i, 1);
        }
        for (int i = 0; i < SLOTS; i++) {
            signal_init(ready + i, 1);
            signal_init(used + i, WARPS);
        }
        signals_ready();
    }
    __syncthreads();
    if (early) let_next_kernel_start();
    if (warp == 0) {
        const Walk walk = deal(lengths, requests, least, lane);
        if (lane == 0) stretch = walk;
    }
    __syncthreads();
    const Walk walk = stretch;
    if (warp == WARPS) {
        if (early && !FUSED) wait_for_kernel_ahead();  // it wrote the newest keys
        copy_tiles(walk, lengths, tables, table_stride, &k_map, &v_map, ring, full, empty, lane);
        if (early && FUSED) wait_for_kernel_ahead();
    } else if (warp == WARPS + 1) {
        prepare_queries(walk, lengths, queries, ready, used, given, q_stride, scale, eps, early, lane);
    } else {
        if (early) wait_for_kernel_ahead();
        clear_padding(lengths, requests, out, thread);
        multiply(walk, lengths, queries, ready, used, ring, full, empty, sums, stats, out, parts, part_stats, arrived, &flag, scale,
                 thread);
    }
}
