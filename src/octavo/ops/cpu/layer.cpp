// A whole decoder layer in one call and one parallel call: norm, q k v product, rotation and KV write, attention, output
// product, norm, gate and up product, gated activation, down product.
//
// The same functions as the single operations, so the same results. What it saves is nine calls and nine thread
// starts, which at one row cost as much as reading the weights of a small model.
#include "attention.h"
#include "linear.h"
#include "rows.h"

namespace octavo {

struct Projection {
    const Weight* weight;
    const bf16* bias;
};

struct Layer {  // mirrored by octavo.ops.cpu.decoder._LayerStruct
    Projection qkv, output, gate_up, down;
    const bf16 *input_norm, *post_norm, *q_norm, *k_norm;
    int64_t hidden, inner, num_heads, window, gelu, amx_from;
    float eps, head_eps, scale, softcap;
};

struct Step {  // mirrored by octavo.ops.cpu.decoder._StepStruct: the tokens of a step and what they are
    const int64_t *positions, *slots;
    const float* cos_sin;
    const int32_t *query_start, *seq_lens, *block_table;
    int64_t rows, half, table_stride, num_requests;
};

// Up to this many rows every thread computes norms, activations and quantized inputs of all rows for itself, into memory
// of its own: that costs less than the barriers that sharing them would need.
constexpr int64_t PRIVATE_ROWS = 4;

struct LayerMemory {
    std::vector<bf16> normed, residual, gated;  // a thread's own when private
    std::vector<bf16> qkv, q, attended, projected, gate_up;
    LinearScratch quantized[4];
    AttentionPlan plan;
};

// A product whose input all threads have; each computes some of the outputs. Ends with a barrier.
static void project(const Projection& p, const bf16* x, int64_t rows, bf16* out, LinearScratch& memory, bool own,
                    Team& team) {
    Task t{p.weight, x, rows, out, false, p.bias, nullptr, nullptr, nullptr, nullptr};
    reserve_input(t, memory);  // shared memory was reserved before, so that this only finds it
    if (t.codes && own) {
        for (int64_t m = 0; m < rows; m++) prepare_input(t, m);
    } else if (t.codes) {
        team.each(rows, [&](int64_t m) { prepare_input(t, m); });
        team.barrier();
    }
    team.share(p.weight->tiles(), MAX_VECTORS, [&](int64_t first, int64_t last) { linear_tiles(t, first, last); });
    team.barrier();
}

// body(row) for all rows: by every thread where memory is its own, else shared out, with a barrier.
template <class F>
static void for_rows(int64_t rows, bool own, Team& team, F body) {
    if (own) {
        for (int64_t i = 0; i < rows; i++) body(i);
        return;
    }
    team.share(rows, 4, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) body(i);
    });
    team.barrier();
}

static void reserve_own(const Layer& l, int64_t rows, LayerMemory& m) {
    const int64_t padded = padded_rows(rows);
    scratch(m.normed, padded * l.hidden);
    scratch(m.residual, rows * l.hidden);
    scratch(m.gated, padded * l.inner);
}

static void reserve_shared(const Layer& l, int64_t rows, LayerMemory& m) {
    const int64_t padded = padded_rows(rows);
    scratch(m.qkv, rows * l.qkv.weight->n);
    scratch(m.q, rows * l.output.weight->k);
    scratch(m.attended, padded * l.output.weight->k);
    scratch(m.projected, rows * l.hidden);
    scratch(m.gate_up, rows * 2 * l.inner);
    const Projection* projections[4] = {&l.qkv, &l.output, &l.gate_up, &l.down};
    for (int i = 0; i < 4; i++) {
        Task t{projections[i]->weight, nullptr, rows, nullptr, false, nullptr, nullptr, nullptr, nullptr, nullptr};
        reserve_input(t, m.quantized[i]);
    }
}

static void run_layer(const Layer& l, const Step& s, const Cache& c, const AttentionTask& attention, bf16* x,
                      bf16* residual, bool first, LayerMemory& shared, Team& team) {
    static thread_local LayerMemory own_memory;
    const int64_t rows = s.rows, hidden = l.hidden;
    const bool own = rows <= PRIVATE_ROWS;
    if (own) reserve_own(l, rows, own_memory);
    LayerMemory& m = own ? own_memory : shared;
    // Where memory is own, the caller's x and residual are only read until the last product.
    bf16* sum = own ? m.residual.data() : residual;
    bf16* normed = m.normed.data();

    for_rows(rows, own, team, [&](int64_t i) {
        bf16* row = sum + i * hidden;
        if (first || own) std::memcpy(row, (first ? x : residual) + i * hidden, hidden * sizeof(bf16));
        if (!first) add_row(row, x + i * hidden, hidden);
        norm_row(row, l.input_norm, hidden, l.eps, normed + i * hidden);
    });
    bf16* qkv = shared.qkv.data();
    project(l.qkv, normed, rows, qkv, m.quantized[0], own, team);
    const int64_t q_width = l.output.weight->k, width = l.qkv.weight->n;
    const Rotary rotary{s.cos_sin, s.half, false, l.q_norm, l.k_norm, l.head_eps};
    team.share(rows, 4, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            bf16* q = shared.q.data() + i * q_width;
            rotate_and_store_row(rotary, c, qkv + i * width, l.num_heads, s.positions[i], s.slots[i], q);
        }
    });
    team.barrier();
    run_attention(attention, shared.plan, team);
    project(l.output, shared.attended.data(), rows, shared.projected.data(), m.quantized[1], own, team);
    for_rows(rows, own, team, [&](int64_t i) {
        add_row(sum + i * hidden, shared.projected.data() + i * hidden, hidden);
        norm_row(sum + i * hidden, l.post_norm, hidden, l.eps, normed + i * hidden);
    });
    project(l.gate_up, normed, rows, shared.gate_up.data(), m.quantized[2], own, team);
    for_rows(rows, own, team, [&](int64_t i) {
        const bf16* row = shared.gate_up.data() + 2 * i * l.inner;
        if (l.gelu)
            gate_row<true>(row, l.inner, m.gated.data() + i * l.inner);
        else
            gate_row<false>(row, l.inner, m.gated.data() + i * l.inner);
    });
    project(l.down, m.gated.data(), rows, x, m.quantized[3], own, team);
    if (own && team.is_first()) std::memcpy(residual, sum, rows * hidden * sizeof(bf16));
}

}  // namespace octavo

using namespace octavo;

// x [T, H] is what the layer before added to the residual [T, H]; both are replaced by this layer's. `first`: there is no
// residual yet, x is the embedding.
OCTAVO_EXPORT void octavo_decoder_layer(const Layer* layer, const Step* step, const Cache* cache, bf16* x,
                                        bf16* residual, int32_t first) {
    static thread_local LayerMemory memory;
    LayerMemory& shared = memory;  // the name of a thread_local would mean another object in each thread
    const Layer& l = *layer;
    const Step& s = *step;
    reserve_shared(l, s.rows, shared);
    if (s.rows > PRIVATE_ROWS) reserve_own(l, s.rows, shared);
    AttentionTask attention{cache,          shared.q.data(), shared.attended.data(), s.query_start, s.seq_lens,
                            s.block_table,  s.table_stride,  s.num_requests,         l.num_heads,   l.scale,
                            l.softcap,      l.window,        nullptr,                l.amx_from};
    plan_attention(attention, shared.plan);
    parallel(true, [&](Team& team) { run_layer(l, s, *cache, attention, x, residual, first != 0, shared, team); });
}
