// The entries for norms, gated activations and rotary embedding with the KV write.
#include "rows.h"
#include "team.h"

namespace octavo {

constexpr int64_t PARALLEL_FROM = 32768;  // elements; below it a parallel region costs more than it saves

template <class F>
static void for_rows(int64_t rows, int64_t width, F body) {
    parallel(rows * width >= PARALLEL_FROM, [&](Team& team) {
        team.share(rows, 4, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) body(i);
        });
    });
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
    const int64_t d = cache->head_dim, width = (num_heads + 2 * cache->num_kv_heads) * d;
    const Rotary rotary{cos_sin, half, interleaved != 0, q_norm, k_norm, eps};
    for_rows(rows, width, [&](int64_t i) {
        bf16* q = q_out + i * num_heads * d;
        rotate_and_store_row(rotary, *cache, qkv + i * width, num_heads, positions[i], slots[i], q);
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

using Lanes = int64_t __attribute__((vector_size(32), aligned(8)));

// Reads a buffer once with all threads and returns a sum of it: the bandwidth that products of one row can have at most.
OCTAVO_EXPORT int64_t octavo_read(const char* data, int64_t num_bytes) {
    std::atomic<int64_t> total{0};
    parallel(true, [&](Team& team) {
        team.share(num_bytes / 65536, 16, [&](int64_t first, int64_t last) {
            Lanes sums[8] = {};
            for (const char* p = data + first * 65536; p < data + last * 65536; p += sizeof(sums))
                for (int i = 0; i < 8; i++) sums[i] += ((const Lanes*)p)[i];
            for (const Lanes& sum : sums) total += sum[0] + sum[1] + sum[2] + sum[3];
        });
    });
    return total;
}
