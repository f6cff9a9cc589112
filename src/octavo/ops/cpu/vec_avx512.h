// Sixteen float32 lanes as one AVX-512 register; the same names as vec_avx2.h.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma,f16c")

namespace octavo {

using bf16 = uint16_t;
using Vec = __m512;  // + - * / are the compiler's own
using Mask = __mmask16;

inline Mask tail_mask(int64_t count) { return count >= 16 ? Mask(0xffff) : Mask((1u << count) - 1); }
// Lanes lo .. hi, of 0 .. 16.
inline Mask range_mask(int64_t lo, int64_t hi) {
    const int64_t below = std::min<int64_t>(std::max<int64_t>(lo, 0), 16);
    return hi <= 0 ? Mask(0) : Mask(tail_mask(hi) & ~((1u << below) - 1));
}

inline Vec zeros() { return _mm512_setzero_ps(); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* x) { return _mm512_loadu_ps(x); }
inline void store(float* y, Vec x) { _mm512_storeu_ps(y, x); }
inline void store(float* y, Vec x, int64_t count) { _mm512_mask_storeu_ps(y, tail_mask(count), x); }
inline Vec load_half(const char* x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x)); }

inline Vec widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline Vec load_bf16(const bf16* x) { return widen(_mm256_loadu_si256((const __m256i*)x)); }
inline Vec load_bf16(const bf16* x, int64_t count) { return widen(_mm256_maskz_loadu_epi16(tail_mask(count), x)); }
inline void store_bf16(bf16* y, Vec x) { _mm256_storeu_si256((__m256i*)y, (__m256i)_mm512_cvtneps_pbh(x)); }
inline void store_bf16(bf16* y, Vec x, int64_t count) {
    _mm256_mask_storeu_epi16(y, tail_mask(count), (__m256i)_mm512_cvtneps_pbh(x));
}
inline bf16 to_bf16(float x) { return bf16(_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)), 0)); }

inline Vec fmadd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fnmadd(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
inline Vec minimum(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec absolute(Vec x) { return _mm512_abs_ps(x); }
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_power_of_2(Vec x, Vec exponent) { return _mm512_scalef_ps(x, exponent); }
inline Vec rough_reciprocal(Vec x) { return _mm512_rcp14_ps(x); }  // 14 bits
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }
// The larger of a and b in the lanes of the mask, a in the others; x in the lanes of the mask, 0 in the others.
inline Vec maximum_within(Mask mask, Vec a, Vec b) { return _mm512_mask_max_ps(a, mask, a, b); }
inline Vec zero_outside(Mask mask, Vec x) { return _mm512_maskz_mov_ps(mask, x); }

// Copies `count` (a multiple of 32) bf16, every second one as 0.
inline void copy_even(bf16* y, const bf16* x, int64_t count) {
    for (int64_t j = 0; j < count; j += 32)
        _mm512_storeu_si512(y + j, _mm512_maskz_loadu_epi16(0x55555555u, x + j));
}

// Rows of a register block of `vectors`: 6 x 4 accumulators, 4 weights and a broadcast fill 29 of 32 registers.
constexpr int MAX_ROWS = 6, MAX_VECTORS = 4;
constexpr int most_rows(int) { return MAX_ROWS; }
constexpr int most_vectors(int64_t) { return MAX_VECTORS; }

// acc[m][n] += sum over `steps` of the pair products of row m of a and column vector n of b.
// a: row-major bf16 pairs, `lda` pairs a row. b[n]: 16 columns x 2 bf16 = 64 bytes a step, `stride` bytes between steps.
template <int MB, int NB>
__attribute__((always_inline)) inline void multiply_panel(const int32_t* a, int64_t lda, const char* const (&b)[NB],
                                                          int64_t stride, int64_t steps, Vec (&acc)[MB][NB]) {
    for (int64_t s = 0; s < steps; s++) {
        __m512i w[NB];
        for (int n = 0; n < NB; n++) w[n] = _mm512_loadu_si512(b[n] + s * stride);
        for (int m = 0; m < MB; m++) {
            __m512bh x = (__m512bh)_mm512_set1_epi32(a[m * lda + s]);
            for (int n = 0; n < NB; n++) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], (__m512bh)w[n], x);
        }
    }
}

}  // namespace octavo
