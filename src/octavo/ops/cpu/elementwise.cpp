// Norms, gated activations, rotary embedding with the KV write: bfloat16 in and out, float32 inside.
#include "common.h"

namespace octavo {

constexpr int64_t PARALLEL_FROM = 32768;  // elements; below it a parallel region costs more than it saves

static float inverse_rms(const bf16* x, int64_t n, float eps) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < n; j += 16) {
        __m512 v = load_bf16(x + j, tail_mask(n - j));
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / float(n) + eps);
}

static void norm_row(const bf16* x, const bf16* weight, int64_t n, float eps, bf16* out) {
    const __m512 scale = _mm512_set1_ps(inverse_rms(x, n, eps));
    for (int64_t j = 0; j < n; j += 16) {
        const __mmask16 mask = tail_mask(n - j);
        const __m512 y = _mm512_mul_ps(_mm512_mul_ps(load_bf16(x + j, mask), scale), load_bf16(weight + j, mask));
        store_bf16(out + j, y, mask);
    }
}

static void add_row(bf16* residual, const bf16* x, int64_t n) {
    for (int64_t j = 0; j < n; j += 16) {
        const __mmask16 mask = tail_mask(n - j);
        store_bf16(residual + j, _mm512_add_ps(load_bf16(residual + j, mask), load_bf16(x + j, mask)), mask);
    }
}

static inline __m512 silu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

static inline __m512 gelu_tanh(__m512 x) {  // x / 2 (1 + tanh(y)) = x / (1 + e^(-2 y)), without cancellation
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    const __m512 y = _mm512_mul_ps(_mm512_set1_ps(0.79788456f), _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x));
    const __m512 power = exp_ps(_mm512_mul_ps(_mm512_set1_ps(-2.0f), y));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), power));
}

template <bool GELU>
static void gate_row(const bf16* x, int64_t n, bf16* out) {
    for (int64_t j = 0; j < n; j += 16) {
        const __mmask16 mask = tail_mask(n - j);
        const __m512 gate = load_bf16(x + j, mask), up = load_bf16(x + n + j, mask);
        store_bf16(out + j, _mm512_mul_ps(GELU ? gelu_tanh(gate) : silu(gate), up), mask);
    }
}

template <class F>
static void for_rows(int64_t rows, int64_t width, F body) {
    if (rows * width < PARALLEL_FROM) {
        for (int64_t i = 0; i < rows; i++) body(i);
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) body(i);
}

// Channels of one key (or value) into the interleaved block that `slot` names.
static void store_key(const Cache& c, const bf16* k, int64_t slot, int64_t head) {
    const int64_t page = (slot / c.block_size * c.num_kv_heads + head) * c.block_size * c.head_dim;
    int32_t* out = (int32_t*)(c.k + page) + slot % c.block_size;
    for (int64_t j = 0; j < c.head_dim / 2; j++) std::memcpy(out + j * c.block_size, k + 2 * j, 4);
}

static void store_value(const Cache& c, const bf16* v, int64_t slot, int64_t head) {
    const int64_t page = (slot / c.block_size * c.num_kv_heads + head) * c.block_size * c.head_dim;
    const int64_t offset = slot % c.block_size;
    bf16* out = c.v + page + offset / 2 * 2 * c.head_dim + offset % 2;
    for (int64_t j = 0; j < c.head_dim; j++) out[2 * j] = v[j];
}

// Rotate the first 2 * half channels of a head in place; cos_sin holds `half` cosines, then `half` sines.
static void rotate_row(float* x, const float* cos_sin, int64_t half, bool interleaved) {
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
    float eps;
};

static void rotate_head(const Rotary& r, const bf16* x, int64_t d, const bf16* norm, int64_t position, bf16* out) {
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

}  // namespace octavo

using namespace octavo;

OCTAVO_EXPORT void octavo_rms_norm(const bf16* x, const bf16* weight, bf16* out, int64_t rows, int64_t n, float eps) {
    for_rows(rows, n, [&](int64_t i) { norm_row(x + i * n, weight, n, eps, out + i * n); });
}

OCTAVO_EXPORT void octavo_add_rms_norm(const bf16* x, bf16* residual, const bf16* weight, bf16* out, int64_t rows,
                                       int64_t n, float eps) {
    for_rows(rows, n, [&](int64_t i) {
        add_row(residual + i * n, x + i * n, n);
        norm_row(residual + i * n, weight, n, eps, out + i * n);
    });
}

OCTAVO_EXPORT void octavo_silu_mul(const bf16* x, bf16* out, int64_t rows, int64_t n) {
    for_rows(rows, 2 * n, [&](int64_t i) { gate_row<false>(x + 2 * i * n, n, out + i * n); });
}

OCTAVO_EXPORT void octavo_gelu_tanh_mul(const bf16* x, bf16* out, int64_t rows, int64_t n) {
    for_rows(rows, 2 * n, [&](int64_t i) { gate_row<true>(x + 2 * i * n, n, out + i * n); });
}

OCTAVO_EXPORT void octavo_rotary_and_store(const Cache* cache, const bf16* qkv, const int64_t* positions,
                                           const float* cos_sin, const int64_t* slots, bf16* q_out, int64_t rows,
                                           int64_t num_heads, int64_t half, const bf16* q_norm, const bf16* k_norm,
                                           float eps, int32_t interleaved) {
    const int64_t d = cache->head_dim, heads = cache->num_kv_heads, width = (num_heads + 2 * heads) * d;
    const Rotary rotary{cos_sin, half, interleaved != 0, eps};
    for_rows(rows, width, [&](int64_t i) {
        alignas(64) bf16 key[MAX_HEAD_DIM];
        const bf16* x = qkv + i * width;
        for (int64_t h = 0; h < num_heads; h++)
            rotate_head(rotary, x + h * d, d, q_norm, positions[i], q_out + (i * num_heads + h) * d);
        for (int64_t h = 0; h < heads; h++) {
            rotate_head(rotary, x + (num_heads + h) * d, d, k_norm, positions[i], key);
            store_key(*cache, key, slots[i], h);
            store_value(*cache, x + (num_heads + heads + h) * d, slots[i], h);
        }
    });
}

// k, v: [rows, Hkv, head_dim], `stride` elements between rows.
OCTAVO_EXPORT void octavo_store_kv(const Cache* cache, const bf16* k, int64_t k_stride, const bf16* v, int64_t v_stride,
                                   const int64_t* slots, int64_t rows) {
    const int64_t d = cache->head_dim, heads = cache->num_kv_heads;
    for_rows(rows, heads * d, [&](int64_t i) {
        for (int64_t h = 0; h < heads; h++) {
            store_key(*cache, k + i * k_stride + h * d, slots[i], h);
            store_value(*cache, v + i * v_stride + h * d, slots[i], h);
        }
    });
}
