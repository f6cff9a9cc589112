// Norms, gated activations, rotary embedding with the KV write, a row at a time: bfloat16, float32 inside.
#pragma once

#include "common.h"

namespace octavo {

inline float inverse_rms(const bf16* x, int64_t n, float eps) {
    Vec squares = zeros();
    for (int64_t j = 0; j < n; j += 16) {
        const Vec v = load_bf16(x + j, n - j);
        squares = fmadd(v, v, squares);
    }
    return 1.0f / std::sqrt(sum(squares) / float(n) + eps);
}

inline void norm_row(const bf16* x, const bf16* weight, int64_t n, float eps, bf16* out) {
    const Vec scale = splat(inverse_rms(x, n, eps));
    for (int64_t j = 0; j < n; j += 16)
        store_bf16(out + j, load_bf16(x + j, n - j) * scale * load_bf16(weight + j, n - j), n - j);
}

inline void add_row(bf16* residual, const bf16* x, int64_t n) {
    for (int64_t j = 0; j < n; j += 16)
        store_bf16(residual + j, load_bf16(residual + j, n - j) + load_bf16(x + j, n - j), n - j);
}

// 1 / x for x >= 1, by one step of Newton's method from 12 or 14 bits: a third of the time of the division.
inline Vec reciprocal(Vec x) {
    const Vec y = rough_reciprocal(x);
    return y * fnmadd(x, y, splat(2.0f));
}

inline Vec silu(Vec x) { return x * reciprocal(splat(1.0f) + exp_of(zeros() - x)); }

inline Vec gelu_tanh(Vec x) {  // x / 2 (1 + tanh(y)) = x / (1 + e^(-2 y)), without cancellation
    const Vec y = splat(0.79788456f) * fmadd(x * x * x, splat(0.044715f), x);
    return x * reciprocal(splat(1.0f) + exp_of(splat(-2.0f) * y));
}

template <bool GELU>
inline void gate_row(const bf16* x, int64_t n, bf16* out) {
    for (int64_t j = 0; j < n; j += 16) {
        const Vec gate = load_bf16(x + j, n - j), up = load_bf16(x + n + j, n - j);
        store_bf16(out + j, (GELU ? gelu_tanh(gate) : silu(gate)) * up, n - j);
    }
}

// Channels of one key (or value) into the interleaved block that `slot` names.
inline void store_key(const Cache& c, const bf16* k, int64_t slot, int64_t head) {
    const int64_t page = (slot / c.block_size * c.num_kv_heads + head) * c.block_size * c.head_dim;
    int32_t* out = (int32_t*)(c.k + page) + slot % c.block_size;
    for (int64_t j = 0; j < c.head_dim / 2; j++) std::memcpy(out + j * c.block_size, k + 2 * j, 4);
}

inline void store_value(const Cache& c, const bf16* v, int64_t slot, int64_t head) {
    const int64_t page = (slot / c.block_size * c.num_kv_heads + head) * c.block_size * c.head_dim;
    const int64_t offset = slot % c.block_size;
    bf16* out = c.v + page + offset / 2 * 2 * c.head_dim + offset % 2;
    for (int64_t j = 0; j < c.head_dim; j++) out[2 * j] = v[j];
}

// Rotate the first 2 * half channels of a head in place; cos_sin holds `half` cosines, then `half` sines.
inline void rotate_row(float* x, const float* cos_sin, int64_t half, bool interleaved) {
    if (interleaved) {
        for (int64_t j = 0; j < half; j++) {
            const float a = x[2 * j], b = x[2 * j + 1], c = cos_sin[j], s = cos_sin[half + j];
            x[2 * j] = a * c - b * s;
            x[2 * j + 1] = b * c + a * s;
        }
        return;
    }
    for (int64_t j = 0; j < half; j++) {
        const float a = x[j], b = x[half + j], c = cos_sin[j], s = cos_sin[half + j];
        x[j] = a * c - b * s;
        x[half + j] = b * c + a * s;
    }
}

struct Rotary {
    const float* cos_sin;
    int64_t half;
    bool interleaved;
    const bf16 *q_norm, *k_norm;  // [D] or null
    float eps;
};

inline void rotate_head(const Rotary& r, const bf16* x, int64_t d, const bf16* norm, int64_t position, bf16* out) {
    alignas(64) bf16 normed[MAX_HEAD_DIM];
    alignas(64) float values[MAX_HEAD_DIM];
    if (norm) {
        norm_row(x, norm, d, r.eps, normed);
        x = normed;
    }
    for (int64_t j = 0; j < d; j += 16) store(values + j, load_bf16(x + j, d - j));
    rotate_row(values, r.cos_sin + position * 2 * r.half, r.half, r.interleaved);
    for (int64_t j = 0; j < d; j += 16) store_bf16(out + j, load(values + j), d - j);
}

// One token of qkv [(Hq + 2 Hkv) D]: q rotated to q_out, k rotated and v written to their slot.
inline void rotate_and_store_row(const Rotary& r, const Cache& c, const bf16* x, int64_t num_heads, int64_t position,
                                 int64_t slot, bf16* q_out) {
    const int64_t d = c.head_dim;
    alignas(64) bf16 key[MAX_HEAD_DIM];
    for (int64_t h = 0; h < num_heads; h++) rotate_head(r, x + h * d, d, r.q_norm, position, q_out + h * d);
    x += num_heads * d;
    for (int64_t h = 0; h < c.num_kv_heads; h++, x += d) {
        rotate_head(r, x, d, r.k_norm, position, key);
        store_key(c, key, slot, h);
        store_value(c, x + c.num_kv_heads * d, slot, h);
    }
}

}  // namespace octavo
