// Attention over a paged KV cache in the interleaved order of octavo.ops.KVCache, bfloat16 with float32 sums.
//
// Decode and prefill are one kernel: a work item is a tile of query rows of one request that share a key head (all the
// query heads of its group), against a range of keys; it walks the keys in steps of 64 with an online softmax
// (FlashAttention-2, arXiv 2307.08691). Long contexts of single rows are cut into ranges of SPLIT keys, whose partial
// results are merged afterwards (Flash-Decoding); the cuts depend on positions only, not on the batch or the threads.
#include "attention.h"

#if OCTAVO_LEVEL >= 2
#include "attention_amx.h"
#endif

namespace octavo {

constexpr int SPLIT = 512;       // keys of a work item of a single query row

// scores[rows][16 vectors] = q . k for the keys from `start` on.
static void score_step(const AttentionTask& t, Tile& tile, const char* const (&k)[4], int64_t vectors, int64_t rows) {
#if OCTAVO_LEVEL >= 2
    if (rows >= t.amx_from) return amx_score_step(t, tile, k, vectors, rows);
#endif
    const int64_t d = t.cache->head_dim, stride = t.cache->block_size * 4;
    for_blocks(rows, vectors, [&](int64_t row, int64_t v, auto mb, auto nb) {
        constexpr int MB = mb.value, NB = nb.value;
        const char* b[NB];
        Vec acc[MB][NB];
        for (int n = 0; n < NB; n++) b[n] = k[v + n];
        for (int m = 0; m < MB; m++)
            for (int n = 0; n < NB; n++) acc[m][n] = zeros();
        multiply_panel<MB, NB>((const int32_t*)(tile.q + row * d), d / 2, b, stride, d / 2, acc);
        for (int m = 0; m < MB; m++)
            for (int n = 0; n < NB; n++) store(&tile.scores[row + m][(v + n) * 16], acc[m][n]);
    });
}

// Turn the scores of one row into weights 2^(score - maximum); keys outside lo .. hi (relative to the step) weigh 0.
static void softmax_row(const AttentionTask& t, Tile& tile, int64_t row, int64_t lo, int64_t hi, int64_t vectors) {
    float* scores = tile.scores[row];
    const Vec scale = splat(t.scale);
    Vec most = splat(-INFINITY);
    Mask masks[4];
    Vec s[4];
    for (int64_t v = 0; v < vectors; v++) {
        masks[v] = range_mask(lo - v * 16, hi - v * 16);
        s[v] = load(scores + v * 16) * scale;
        if (t.softcap > 0) {
            const Vec cap = splat(t.softcap * LOG2E);
            s[v] = tanh_of(s[v] / cap) * cap;
        }
        most = maximum_within(masks[v], most, s[v]);
    }
    const float old_maximum = tile.maximum[row];
    const float new_maximum = std::max(old_maximum, largest(most));
    // A row that saw no key yet keeps sums of 0; any finite maximum will do for it.
    const Vec shift = splat(new_maximum == -INFINITY ? 0.0f : new_maximum);
    Vec total = zeros();
    for (int64_t v = 0; v < vectors; v++) {
        const Vec p = zero_outside(masks[v], exp2_of(s[v] - shift));
        total = total + p;
        store_bf16(tile.weights[row] + v * 16, p);
    }
    tile.maximum[row] = new_maximum;
    const float factor = new_maximum == old_maximum ? 1.0f : std::exp2(old_maximum - new_maximum);
    tile.correction[row] = factor;
    tile.total[row] = tile.total[row] * factor + sum(total);
}

// sum = sum * correction + weights . v over the keys of the step.
static void value_step(const AttentionTask& t, Tile& tile, const bf16* const (&v)[4], int64_t keys, int64_t rows) {
#if OCTAVO_LEVEL >= 2
    if (rows >= t.amx_from) return amx_value_step(t, tile, v, keys, rows);
#endif
    const int64_t d = t.cache->head_dim;
    const bool odd = keys % 2;
    // The partner of the last key belongs to nobody yet: it may hold anything, even NaN.
    if (odd) copy_even(tile.tail, v[keys / 16] + keys % 16 / 2 * 2 * d, 2 * d);
    for_blocks(rows, d / 16, [&](int64_t row, int64_t column, auto mb, auto nb) {
        constexpr int MB = mb.value, NB = nb.value;
        const char* b[NB];
        Vec acc[MB][NB];
        for (int m = 0; m < MB; m++)
            for (int n = 0; n < NB; n++)
                acc[m][n] = splat(tile.correction[row + m]) * load(tile.sum + (row + m) * d + (column + n) * 16);
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
            for (int n = 0; n < NB; n++) store(tile.sum + (row + m) * d + (column + n) * 16, acc[m][n]);
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
        const Vec inverse = splat(1.0f / tile.total[r]);
        bf16* out = t.out + (token * t.num_heads + head) * d;
        for (int64_t j = 0; j < d; j += 16) store_bf16(out + j, load(tile.sum + r * d + j) * inverse);
    }
}

static void run_item(const AttentionTask& t, const Item& item, Tile& tile, const Parts& parts) {
    const Cache& c = *t.cache;
    const int64_t d = c.head_dim, rows = item.rows * t.groups, block = c.block_size;
    const int64_t length = t.seq_lens[item.request];
    const int64_t query_rows = t.query_start[item.request + 1] - t.query_start[item.request];
    const int64_t position = length - query_rows + item.row;  // of the first row of the tile
    const int32_t* table = t.block_table + item.request * t.table_stride;
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
        score_step(t, tile, k, vectors, rows);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t p = position + r / t.groups;
            const int64_t lo = std::max<int64_t>(item.first, p - t.window + 1) - start;
            const int64_t hi = std::min<int64_t>(item.last, p + 1) - start;
            softmax_row(t, tile, r, std::max<int64_t>(lo, 0), std::max<int64_t>(hi, 0), vectors);
        }
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
            Vec values = zeros();
            for (int64_t p = first; p < first + count; p++) {
                const float factor = std::exp2(parts.maximum[p * t.groups + g] - maximum) / total;
                values = fmadd(load(parts.sum + (p * t.groups + g) * d + j), splat(factor), values);
            }
            store_bf16(out + j, values);
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
#if OCTAVO_LEVEL >= 2
    std::optional<TileRegisters> registers;
    if (plan.max_rows * t.groups >= t.amx_from) registers.emplace(true);
#endif
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
