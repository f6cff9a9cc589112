// Attention over a paged KV cache in the interleaved order of octavo.ops.KVCache, bfloat16 with float32 sums.
//
// Decode and prefill are one kernel: a work item is a tile of query rows of one request that share a key head (all the
// query heads of its group), against a range of keys; it walks the keys in steps of 64 with an online softmax
// (FlashAttention-2, arXiv 2307.08691). Long contexts of single rows are cut into ranges of SPLIT keys, whose partial
// results are merged afterwards (Flash-Decoding); the cuts depend on positions only, not on the batch or the threads.
#include "attention.h"

#include "amx.h"

namespace octavo {

constexpr int STEP = 64;         // keys a step: 4 vectors of scores
constexpr int TILE_ROWS = 48;    // query rows of a work item, rounded down to whole groups
constexpr int SPLIT = 512;       // keys of a work item of a single query row

struct Tile {  // what a work item keeps between steps; about 50 KiB for a head size of 64
    alignas(64) float scores[TILE_ROWS][STEP];
    alignas(64) bf16 weights[TILE_ROWS][STEP];
    alignas(64) float maximum[TILE_ROWS], total[TILE_ROWS], correction[TILE_ROWS];
    alignas(64) bf16 q[TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) float sum[TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) bf16 tail[16 * MAX_HEAD_DIM];
};

// scores[rows][16 vectors] = q . k for the keys from `start` on.
static void score_step(const AttentionTask& t, Tile& tile, const char* const (&k)[4], int64_t vectors, int64_t rows) {
    const int64_t d = t.cache->head_dim, stride = t.cache->block_size * 4;
    for_vector_blocks(vectors, [&](int64_t v, auto nb) {
        for_row_blocks(rows, [&](int64_t row, int64_t count) {
            with_rows(count, [&](auto mb) {
                constexpr int MB = mb.value, NB = nb.value;
                const char* b[NB];
                __m512 acc[MB][NB];
                for (int n = 0; n < NB; n++) b[n] = k[v + n];
                for (int m = 0; m < MB; m++)
                    for (int n = 0; n < NB; n++) acc[m][n] = _mm512_setzero_ps();
                multiply_panel<MB, NB>((const int32_t*)(tile.q + row * d), d / 2, b, stride, d / 2, acc);
                for (int m = 0; m < MB; m++)
                    for (int n = 0; n < NB; n++) _mm512_store_ps(&tile.scores[row + m][(v + n) * 16], acc[m][n]);
            });
        });
    });
}

// Turn the scores of one row into weights 2^(score - maximum); keys outside lo .. hi (relative to the step) weigh 0.
static void softmax_row(const AttentionTask& t, Tile& tile, int64_t row, int64_t lo, int64_t hi, int64_t vectors) {
    float* scores = tile.scores[row];
    const __m512 scale = _mm512_set1_ps(t.scale);
    __m512 largest = _mm512_set1_ps(-INFINITY);
    __mmask16 masks[4];
    __m512 s[4];
    for (int64_t v = 0; v < vectors; v++) {
        const int64_t base = v * 16;
        const int64_t below = std::min<int64_t>(std::max<int64_t>(lo - base, 0), 16);
        masks[v] = hi <= base ? __mmask16(0) : __mmask16(tail_mask(hi - base) & ~((1u << below) - 1));
        s[v] = _mm512_mul_ps(_mm512_load_ps(scores + base), scale);
        if (t.softcap > 0) {
            const float cap = t.softcap * LOG2E;
            s[v] = _mm512_mul_ps(tanh_ps(_mm512_div_ps(s[v], _mm512_set1_ps(cap))), _mm512_set1_ps(cap));
        }
        largest = _mm512_mask_max_ps(largest, masks[v], largest, s[v]);
    }
    const float old_maximum = tile.maximum[row];
    const float maximum = std::max(old_maximum, _mm512_reduce_max_ps(largest));
    // A row that saw no key yet keeps sums of 0; any finite maximum will do for it.
    const __m512 shift = _mm512_set1_ps(maximum == -INFINITY ? 0.0f : maximum);
    __m512 total = _mm512_setzero_ps();
    for (int64_t v = 0; v < vectors; v++) {
        __m512 p = _mm512_maskz_mov_ps(masks[v], exp2_ps(_mm512_sub_ps(s[v], shift)));
        total = _mm512_add_ps(total, p);
        store_bf16(tile.weights[row] + v * 16, p);
    }
    tile.maximum[row] = maximum;
    const float factor = maximum == old_maximum ? 1.0f : std::exp2(old_maximum - maximum);
    tile.correction[row] = factor;
    tile.total[row] = tile.total[row] * factor + _mm512_reduce_add_ps(total);
}

// The same two products by matrix tiles, 16 query rows at a time; rows past the last hold anything and are not used.
static void amx_score_step(const AttentionTask& t, Tile& tile, const char* const (&k)[4], int64_t vectors,
                           int64_t rows) {
    const int64_t d = t.cache->head_dim, stride = t.cache->block_size * 4;
    for (int64_t row = 0; row < rows; row += 16)
        score_tiles((const char*)(tile.q + row * d), d * 2, k, vectors, stride, (char*)tile.scores[row]);
}

static void amx_value_step(const AttentionTask& t, Tile& tile, const bf16* const (&v)[4], int64_t keys, int64_t rows) {
    const int64_t d = t.cache->head_dim, vectors = (keys + 15) / 16, rest = keys % 16;
    const bf16* values[4];
    for (int64_t i = 0; i < vectors; i++) values[i] = v[i];
    if (rest) {  // keys past the last hold anything, even NaN: multiply with zeros instead
        std::memset(tile.tail, 0, 16 * d * sizeof(bf16));
        std::memcpy(tile.tail, v[vectors - 1], rest / 2 * 2 * d * sizeof(bf16));
        const int64_t odd = rest / 2 * 2 * d;
        for (int64_t j = 0; rest % 2 && j < 2 * d; j += 32)
            _mm512_storeu_si512(tile.tail + odd + j, _mm512_maskz_loadu_epi16(0x55555555u, v[vectors - 1] + odd + j));
        values[vectors - 1] = tile.tail;
    }
    for (int64_t r = 0; r < rows; r++) {
        if (tile.correction[r] == 1.0f) continue;
        const __m512 factor = _mm512_set1_ps(tile.correction[r]);
        for (int64_t j = 0; j < d; j += 16)
            _mm512_store_ps(tile.sum + r * d + j, _mm512_mul_ps(_mm512_load_ps(tile.sum + r * d + j), factor));
    }
    for_vector_blocks(d / 16, [&](int64_t column, auto nb) {
        const char* b[4];
        for (int64_t i = 0; i < vectors; i++) b[i] = (const char*)(values[i] + column * 32);
        for (int64_t row = 0; row < rows; row += 16)
            value_tiles<nb.value>((const char*)tile.weights[row], b, vectors, d * 4,
                                  (char*)(tile.sum + row * d + column * 16), d * 4);
    });
}

// sum = sum * correction + weights . v over the keys of the step.
static void value_step(const AttentionTask& t, Tile& tile, const bf16* const (&v)[4], int64_t keys, int64_t rows) {
    const int64_t d = t.cache->head_dim;
    const bool odd = keys % 2;
    if (odd) {  // the partner of the last key belongs to nobody yet: it may hold anything, even NaN
        const bf16* last = v[keys / 16] + keys % 16 / 2 * 2 * d;
        for (int64_t j = 0; j < 2 * d; j += 32)
            _mm512_store_si512(tile.tail + j, _mm512_maskz_loadu_epi16(0x55555555u, last + j));
    }
    for_vector_blocks(d / 16, [&](int64_t column, auto nb) {
        for_row_blocks(rows, [&](int64_t row, int64_t count) {
            with_rows(count, [&](auto mb) {
                constexpr int MB = mb.value, NB = nb.value;
                const char* b[NB];
                __m512 acc[MB][NB];
                for (int m = 0; m < MB; m++)
                    for (int n = 0; n < NB; n++)
                        acc[m][n] = _mm512_mul_ps(_mm512_set1_ps(tile.correction[row + m]),
                                                  _mm512_load_ps(tile.sum + (row + m) * d + (column + n) * 16));
                const int32_t* weights = (const int32_t*)tile.weights[row];
                for (int64_t key = 0; key + 1 < keys; key += 16) {
                    for (int n = 0; n < NB; n++) b[n] = (const char*)(v[key / 16] + (column + n) * 32);
                    const int64_t pairs = std::min<int64_t>(8, (keys - key) / 2);
                    multiply_panel<MB, NB>(weights + key / 2, STEP / 2, b, d * 4, pairs, acc);
                }
                if (odd) {
                    for (int n = 0; n < NB; n++) b[n] = (const char*)(tile.tail + (column + n) * 32);
                    multiply_panel<MB, NB>(weights + keys / 2, STEP / 2, b, 0, 1, acc);
                }
                for (int m = 0; m < MB; m++)
                    for (int n = 0; n < NB; n++)
                        _mm512_store_ps(tile.sum + (row + m) * d + (column + n) * 16, acc[m][n]);
            });
        });
    });
}

static void start_tile(const AttentionTask& t, const Item& item, Tile& tile) {
    const int64_t d = t.cache->head_dim, rows = item.rows * t.groups;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t token = t.query_start[item.request] + item.row + r / t.groups;
        const int64_t head = item.head * t.groups + r % t.groups;
        std::memcpy(tile.q + r * d, t.q + (token * t.num_heads + head) * d, d * sizeof(bf16));
        const bool sink = t.sinks && item.first == 0;
        tile.maximum[r] = sink ? t.sinks[head] * LOG2E : -INFINITY;
        tile.total[r] = sink ? 1.0f : 0.0f;
    }
    std::memset(tile.sum, 0, rows * d * sizeof(float));
}

static void finish_tile(const AttentionTask& t, const Item& item, const Tile& tile, const Parts& parts) {
    const int64_t d = t.cache->head_dim, rows = item.rows * t.groups;
    if (item.part >= 0) {
        std::memcpy(parts.sum + item.part * t.groups * d, tile.sum, rows * d * sizeof(float));
        std::memcpy(parts.maximum + item.part * t.groups, tile.maximum, rows * sizeof(float));
        std::memcpy(parts.weight + item.part * t.groups, tile.total, rows * sizeof(float));
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t token = t.query_start[item.request] + item.row + r / t.groups;
        const int64_t head = item.head * t.groups + r % t.groups;
        const __m512 inverse = _mm512_set1_ps(1.0f / tile.total[r]);
        bf16* out = t.out + (token * t.num_heads + head) * d;
        for (int64_t j = 0; j < d; j += 16)
            store_bf16(out + j, _mm512_mul_ps(_mm512_load_ps(tile.sum + r * d + j), inverse));
    }
}

static void run_item(const AttentionTask& t, const Item& item, Tile& tile, const Parts& parts) {
    const Cache& c = *t.cache;
    const int64_t d = c.head_dim, rows = item.rows * t.groups, block = c.block_size;
    const int64_t length = t.seq_lens[item.request];
    const int64_t query_rows = t.query_start[item.request + 1] - t.query_start[item.request];
    const int64_t position = length - query_rows + item.row;  // of the first row of the tile
    const int32_t* table = t.block_table + item.request * t.table_stride;
    const bool amx = rows >= t.amx_from;
    start_tile(t, item, tile);
    // Blocks before the window are null blocks: start at the first block that a row of the tile sees.
    const int64_t visible = std::max<int64_t>(item.first, position - t.window + 1);
    for (int64_t start = visible / block * block; start < item.last; start += STEP) {
        const int64_t keys = std::min<int64_t>(STEP, item.last - start), vectors = (keys + 15) / 16;
        const char* k[4] = {};
        const bf16* v[4] = {};
        for (int64_t i = 0; i < vectors; i++) {
            const int64_t key = start + 16 * i, offset = key % block;
            const int64_t page = (table[key / block] * c.num_kv_heads + item.head) * block * d;
            k[i] = (const char*)(c.k + page + offset * 2);
            v[i] = c.v + page + offset * d;
        }
        if (amx)
            amx_score_step(t, tile, k, vectors, rows);
        else
            score_step(t, tile, k, vectors, rows);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t p = position + r / t.groups;
            const int64_t lo = std::max<int64_t>(item.first, p - t.window + 1) - start;
            const int64_t hi = std::min<int64_t>(item.last, p + 1) - start;
            softmax_row(t, tile, r, std::max<int64_t>(lo, 0), std::max<int64_t>(hi, 0), vectors);
        }
        if (amx)
            amx_value_step(t, tile, v, keys, rows);
        else
            value_step(t, tile, v, keys, rows);
    }
    finish_tile(t, item, tile, parts);
}

// Merge the parts first .. first + count of one request and key head.
static void merge_parts(const AttentionTask& t, const Parts& parts, int64_t request, int64_t head, int64_t first,
                        int64_t count) {
    const int64_t d = t.cache->head_dim;
    const int64_t token = t.query_start[request];
    for (int64_t g = 0; g < t.groups; g++) {
        float maximum = -INFINITY, total = 0;
        for (int64_t p = first; p < first + count; p++) maximum = std::max(maximum, parts.maximum[p * t.groups + g]);
        bf16* out = t.out + (token * t.num_heads + head * t.groups + g) * d;
        for (int64_t p = first; p < first + count; p++)
            total += parts.weight[p * t.groups + g] * std::exp2(parts.maximum[p * t.groups + g] - maximum);
        for (int64_t j = 0; j < d; j += 16) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t p = first; p < first + count; p++) {
                const float factor = std::exp2(parts.maximum[p * t.groups + g] - maximum) / total;
                sum = _mm512_fmadd_ps(_mm512_loadu_ps(parts.sum + (p * t.groups + g) * d + j), _mm512_set1_ps(factor),
                                      sum);
            }
            store_bf16(out + j, sum);
        }
    }
}

static void add_decode(const AttentionTask& t, int32_t request, AttentionPlan& plan) {
    const int32_t length = t.seq_lens[request];
    const int32_t start = int32_t(std::max<int64_t>(0, length - t.window));
    const int32_t first = start / SPLIT, last = (length + SPLIT - 1) / SPLIT;
    const bool split = last - first > 1;
    plan.max_rows = std::max<int64_t>(plan.max_rows, 1);
    plan.work += 2.0 * (length - start) * t.num_heads * t.cache->head_dim;
    for (int32_t h = 0; h < t.cache->num_kv_heads; h++) {
        if (split) plan.merges.push_back({request, h, int32_t(plan.num_parts), last - first});
        for (int32_t s = first; s < last; s++) {
            const int32_t begin = s == first ? 0 : s * SPLIT, end = std::min(length, (s + 1) * SPLIT);
            plan.items.push_back({request, h, 0, 1, begin, end, split ? int32_t(plan.num_parts++) : -1});
        }
    }
}

static void add_prefill(const AttentionTask& t, int32_t request, int32_t rows, AttentionPlan& plan) {
    const int32_t length = t.seq_lens[request];
    const int32_t step = std::max<int32_t>(1, TILE_ROWS / int32_t(t.groups));
    plan.max_rows = std::max<int64_t>(plan.max_rows, std::min(step, rows));
    plan.work += 2.0 * rows * (length - rows / 2) * t.num_heads * t.cache->head_dim;
    for (int32_t row = (rows - 1) / step * step; row >= 0; row -= step) {  // the longest first
        const int32_t count = std::min(step, rows - row);
        for (int32_t h = 0; h < t.cache->num_kv_heads; h++)
            plan.items.push_back({request, h, row, count, 0, length - rows + row + count, -1});
    }
}

void plan_attention(AttentionTask& t, AttentionPlan& plan) {
    const int64_t d = t.cache->head_dim;
    t.groups = t.num_heads / t.cache->num_kv_heads;
    t.scale *= LOG2E;
    if (t.window <= 0) t.window = INT32_MAX;
    if (d % 32) t.amx_from = INT64_MAX;
    plan.items.clear();
    plan.merges.clear();
    plan.num_parts = plan.max_rows = 0;
    plan.work = 0;
    for (int32_t s = 0; s < t.num_requests; s++) {
        const int32_t rows = t.query_start[s + 1] - t.query_start[s];
        if (rows == 1)
            add_decode(t, s, plan);
        else if (rows > 1)
            add_prefill(t, s, rows, plan);
    }
    const int64_t part_rows = plan.num_parts * t.groups;
    float* memory = scratch(plan.memory, part_rows * (d + 2));
    plan.parts = {memory, memory + part_rows * d, memory + part_rows * (d + 1)};
}

void run_attention(const AttentionTask& t, const AttentionPlan& plan, Team& team) {
    static thread_local std::vector<Tile> tile;
    if (tile.empty()) tile.resize(1);
    std::optional<TileRegisters> registers;
    if (plan.max_rows * t.groups >= t.amx_from) registers.emplace(true);
    team.each(plan.items.size(), [&](int64_t i) { run_item(t, plan.items[i], tile[0], plan.parts); });
    team.barrier();
    if (plan.merges.empty()) return;
    team.each(plan.merges.size(), [&](int64_t i) {
        const Merge& m = plan.merges[i];
        merge_parts(t, plan.parts, m.request, m.head, m.first, m.count);
    });
    team.barrier();
}

}  // namespace octavo

using namespace octavo;

OCTAVO_EXPORT void octavo_paged_attention(const Cache* cache, const bf16* q, bf16* out, const int32_t* query_start,
                                          const int32_t* seq_lens, const int32_t* block_table, int64_t table_stride,
                                          int64_t num_requests, int64_t num_heads, float scale, int64_t window,
                                          float softcap, const float* sinks, int64_t amx_from) {
    static thread_local AttentionPlan memory;
    AttentionPlan& plan = memory;  // the name of a thread_local would mean another object in each thread
    AttentionTask t{cache,     q,      out,     query_start, seq_lens, block_table, table_stride, num_requests,
                    num_heads, scale, softcap, window,      sinks,    amx_from};
    plan_attention(t, plan);
    parallel(plan.items.size() > 1 && plan.work > 1e5, [&](Team& team) { run_attention(t, plan, team); });
}
