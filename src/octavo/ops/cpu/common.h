// What the kernels share: bfloat16 and exponential helpers, the register-blocked product, per-caller scratch memory.
//
// Everything that includes this file is compiled for AVX-512 with BF16 and VNNI and may only be called where
// octavo_cpu_level() (level.cpp, compiled for any x86-64) says so.
#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma,f16c")

namespace octavo {

using bf16 = uint16_t;

inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

inline __mmask16 tail_mask(int64_t count) { return count >= 16 ? __mmask16(0xffff) : __mmask16((1u << count) - 1); }

inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m512 load_bf16(const bf16* x) { return widen(_mm256_loadu_si256((const __m256i*)x)); }
inline __m512 load_bf16(const bf16* x, __mmask16 m) { return widen(_mm256_maskz_loadu_epi16(m, x)); }
inline void store_bf16(bf16* y, __m512 x) { _mm256_storeu_si256((__m256i*)y, (__m256i)_mm512_cvtneps_pbh(x)); }
inline void store_bf16(bf16* y, __m512 x, __mmask16 m) {
    _mm256_mask_storeu_epi16(y, m, (__m256i)_mm512_cvtneps_pbh(x));
}
inline bf16 to_bf16(float x) { return bf16(_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)), 0)); }

// 2^x by a polynomial on [-1/2, 1/2] (relative error below 3e-7); below 2^-126 the result is 2^-126, not 0.
inline __m512 exp2_ps(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-126.0f)), _mm512_set1_ps(127.5f));
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.5403530e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3333558e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}
constexpr float LOG2E = 1.44269504f;
inline __m512 exp_ps(__m512 x) { return exp2_ps(_mm512_mul_ps(x, _mm512_set1_ps(LOG2E))); }
inline __m512 tanh_ps(__m512 x) {
    __m512 e = exp2_ps(_mm512_mul_ps(x, _mm512_set1_ps(2 * LOG2E)));
    __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
}

// acc[m][n] += sum over `steps` of the pair products of row m of a and column vector n of b.
// a: row-major bf16 pairs, `lda` pairs a row. b[n]: 16 columns x 2 bf16 = 64 bytes a step, `stride` bytes between steps.
template <int MB, int NB>
__attribute__((always_inline)) inline void multiply_panel(const int32_t* a, int64_t lda, const char* const (&b)[NB],
                                                          int64_t stride, int64_t steps, __m512 (&acc)[MB][NB]) {
    for (int64_t s = 0; s < steps; s++) {
        __m512i w[NB];
        for (int n = 0; n < NB; n++) w[n] = _mm512_loadu_si512(b[n] + s * stride);
        for (int m = 0; m < MB; m++) {
            __m512bh x = (__m512bh)_mm512_set1_epi32(a[m * lda + s]);
            for (int n = 0; n < NB; n++) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], (__m512bh)w[n], x);
        }
    }
}

// Memory that a calling thread reuses from call to call, so that a kernel allocates nothing.
template <class T>
T* scratch(std::vector<T>& buffer, size_t count) {
    if (buffer.size() < count) buffer.resize(count);
    return buffer.data();
}

constexpr int MAX_HEAD_DIM = 512;  // the wrappers in functions.py refuse more, and more than 48 query heads a key head

struct Cache {  // mirrored by octavo.ops.cpu.functions._CacheStruct; the interleaved order of octavo.ops.KVCache
    bf16 *k, *v;
    int64_t num_kv_heads, block_size, head_dim;
};

constexpr int MAX_ROWS = 6;    // rows of a register block: 6 x 4 accumulators, 4 weights and a broadcast fill 29 of 32
constexpr int MAX_VECTORS = 4;

// Split `rows` into the fewest blocks of at most `limit`, as equal as possible, and call body(first, count).
template <class F>
inline void for_row_blocks(int64_t rows, F body, int64_t limit = MAX_ROWS) {
    int64_t blocks = (rows + limit - 1) / limit;
    for (int64_t b = 0, first = 0; b < blocks; b++) {
        int64_t count = (rows - first + blocks - b - 1) / (blocks - b);
        body(first, count);
        first += count;
    }
}

// body(first, integral_constant<4 | 2 | 1>) over `vectors`.
template <class F>
inline void for_vector_blocks(int64_t vectors, F body) {
    int64_t v = 0;
    for (; v + 4 <= vectors; v += 4) body(v, std::integral_constant<int, 4>());
    if (vectors - v >= 2) body(v, std::integral_constant<int, 2>()), v += 2;
    if (v < vectors) body(v, std::integral_constant<int, 1>());
}

// Call body(integral_constant<rows>) for rows 1..MAX_ROWS.
template <class F>
inline void with_rows(int64_t rows, F body) {
    switch (rows) {
        case 1: return body(std::integral_constant<int, 1>());
        case 2: return body(std::integral_constant<int, 2>());
        case 3: return body(std::integral_constant<int, 3>());
        case 4: return body(std::integral_constant<int, 4>());
        case 5: return body(std::integral_constant<int, 5>());
        default: return body(std::integral_constant<int, 6>());
    }
}

}  // namespace octavo
