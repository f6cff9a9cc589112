// Norms, gated activations, rotary embedding with the KV write, a row at a time: bfloat16, float32 inside.
#pragma once

#include "common.h"

namespace octavo {

inline float inverse_rms(const bf16* x, int64_t n, float eps) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < n; j += 16) {
        __m512 v = load_bf16(x + j, tail_mask(n - j));
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / float(n) + eps);
}

inline void norm_row(const bf16* x, const bf16* weight, int64_t n, float eps, bf16* out) {
    const __m512 scale = _mm512_set1_ps(inverse_rms(x, n, eps));
    for (int64_t j = 0; j < n; j += 16) {
        const __mmask16 mask = tail_mask(n - j);
        const __m512 y = _mm512_mul_ps(_mm512_mul_ps(load_bf16(x + j, mask), scale), load_bf16(weight + j, mask));
        store_bf16(out + j, y, mask);
    }
}

inline void add_row(bf16* residual, const bf16* x, int64_t n) {
    for (int64_t j = 0; j < n; j += 16) {
        const __mmask16 mask = tail_mask(n - j);
        store_bf16(residual + j, _mm512_add_ps(load_bf16(residual + j, mask), load_bf16(x + j, mask)), mask);
    }
}

// 1 / x for x >= 1, by one step of Newton's method from 14 bits: a third of the time of the division.
inline __m512 reciprocal(__m512 x) {
    const __m512 y = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(y, _mm512_fnmadd_ps(x, y, _mm512_set1_ps(2.0f)));
}

inline __m512 silu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_mul_ps(x, reciprocal(_mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x)))));
}

inline __m512 gelu_tanh(__m512 x) {  // x / 2 (1 + tanh(y)) = x / (1 + e^(-2 y)), without cancellation
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    const __m512 y = _mm512_mul_ps(_mm512_set1_ps(0.79788456f), _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x));
    const __m512 power = exp_ps(_mm512_mul_ps(_mm512_set1_ps(-2.0f), y));
    return _mm512_mul_ps(x, reciprocal(_mm512_add_ps(_mm512_set1_ps(1.0f), power)));
}

template <bool GELU>
inline void gate_row(const bf16* x, int64_t n, bf16* out) {
    for (int64_t j = 0; j < n; j += 16) {
        const __mmask16 mask = tail_mask(n - j);
        const __m512 gate = load_bf16(x + j, mask), up = load_bf16(x + n + j, mask);
        store_bf16(out + j, _mm512_mul_ps(GELU ? gelu_tanh(gate) : silu(gate), up), mask);
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
    for (int64_t j = 0; j < d; j += 16) _mm512_store_ps(values + j, load_bf16(x + j, tail_mask(d - j)));
    rotate_row(values, r.cos_sin + position * 2 * r.half, r.half, r.interleaved);
    for (int64_t j = 0; j < d; j += 16) store_bf16(out + j, _mm512_load_ps(values + j), tail_mask(d - j));
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
