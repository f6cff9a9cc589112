// Sixteen float32 lanes as two AVX2 registers; the same names as vec_avx512.h.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#pragma GCC target("avx2,fma,f16c")

namespace octavo {

using bf16 = uint16_t;

struct Vec {
    __m256 lo, hi;
};
struct Mask {
    __m256 lo, hi;  // all bits of a lane or none
};

inline Vec operator+(Vec a, Vec b) { return {a.lo + b.lo, a.hi + b.hi}; }
inline Vec operator-(Vec a, Vec b) { return {a.lo - b.lo, a.hi - b.hi}; }
inline Vec operator*(Vec a, Vec b) { return {a.lo * b.lo, a.hi * b.hi}; }
inline Vec operator/(Vec a, Vec b) { return {a.lo / b.lo, a.hi / b.hi}; }

// Lanes first .. first + 8 that are in lo .. hi.
inline __m256 lanes_within(int first, int64_t lo, int64_t hi) {
    const __m256i lane = _mm256_add_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32(first));
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(std::min<int64_t>(std::max<int64_t>(lo, 0), 16))), lane);
    const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(std::min<int64_t>(std::max<int64_t>(hi, 0), 16))), lane);
    return _mm256_castsi256_ps(_mm256_andnot_si256(below, inside));
}
// Lanes lo .. hi, of 0 .. 16.
inline Mask range_mask(int64_t lo, int64_t hi) { return {lanes_within(0, lo, hi), lanes_within(8, lo, hi)}; }

inline Vec zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
inline void store(float* y, Vec x) { _mm256_storeu_ps(y, x.lo), _mm256_storeu_ps(y + 8, x.hi); }
inline void store(float* y, Vec x, int64_t count) {
    if (count >= 16) return store(y, x);
    float values[16];
    store(values, x);
    std::memcpy(y, values, count * sizeof(float));
}
inline __m256 half8(const char* x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x)); }
inline Vec load_half(const char* x) { return {half8(x), half8(x + 16)}; }

inline __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline Vec load_bf16(const bf16* x) {
    return {widen(_mm_loadu_si128((const __m128i*)x)), widen(_mm_loadu_si128((const __m128i*)(x + 8)))};
}
inline Vec load_bf16(const bf16* x, int64_t count) {
    if (count >= 16) return load_bf16(x);
    bf16 values[16] = {};
    std::memcpy(values, x, count * sizeof(bf16));
    return load_bf16(values);
}

// Rounded to the nearest bf16, halves to even, in the low half of each lane; a NaN stays one.
inline __m256i round_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), nan, is_nan);
}
inline void store_bf16(bf16* y, Vec x) {
    const __m256i both = _mm256_packus_epi32(round_bf16(x.lo), round_bf16(x.hi));
    _mm256_storeu_si256((__m256i*)y, _mm256_permute4x64_epi64(both, 0xd8));
}
inline void store_bf16(bf16* y, Vec x, int64_t count) {
    if (count >= 16) return store_bf16(y, x);
    bf16 values[16];
    store_bf16(values, x);
    std::memcpy(y, values, count * sizeof(bf16));
}
inline bf16 to_bf16(float x) { return bf16(_mm256_extract_epi16(round_bf16(_mm256_set1_ps(x)), 0)); }

inline Vec fmadd(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Vec fnmadd(Vec a, Vec b, Vec c) {
    return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec minimum(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec maximum(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec absolute(Vec x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.lo), _mm256_andnot_ps(sign, x.hi)};
}
inline Vec nearest(Vec x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.lo, mode), _mm256_round_ps(x.hi, mode)};
}
// x in 0.5 .. 2, the exponent whole, x times its power a normal number: the exponent is added to that of x.
inline __m256 times_power_of_2(__m256 x, __m256 exponent) {
    const __m256i shifted = _mm256_slli_epi32(_mm256_cvtps_epi32(exponent), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), shifted));
}
inline Vec times_power_of_2(Vec x, Vec exponent) {
    return {times_power_of_2(x.lo, exponent.lo), times_power_of_2(x.hi, exponent.hi)};
}
inline Vec rough_reciprocal(Vec x) { return {_mm256_rcp_ps(x.lo), _mm256_rcp_ps(x.hi)}; }  // 12 bits
inline float sum(Vec x) {
    const __m256 eight = x.lo + x.hi;
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
inline float largest(Vec x) {
    const __m256 eight = _mm256_max_ps(x.lo, x.hi);
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
// The larger of a and b in the lanes of the mask, a in the others; x in the lanes of the mask, 0 in the others.
inline Vec maximum_within(Mask mask, Vec a, Vec b) {
    return {_mm256_blendv_ps(a.lo, _mm256_max_ps(a.lo, b.lo), mask.lo),
            _mm256_blendv_ps(a.hi, _mm256_max_ps(a.hi, b.hi), mask.hi)};
}
inline Vec zero_outside(Mask mask, Vec x) { return {_mm256_and_ps(mask.lo, x.lo), _mm256_and_ps(mask.hi, x.hi)}; }

// Copies `count` (a multiple of 32) bf16, every second one as 0.
inline void copy_even(bf16* y, const bf16* x, int64_t count) {
    const __m256i even = _mm256_set1_epi32(0xffff);
    for (int64_t j = 0; j < count; j += 16)
        _mm256_storeu_si256((__m256i*)(y + j), _mm256_and_si256(even, _mm256_loadu_si256((const __m256i*)(x + j))));
}

// Rows of a register block of `vectors`: 16 registers hold 6 x 1 or 3 x 2 accumulators of two, or 1 x 4.
constexpr int MAX_ROWS = 6, MAX_VECTORS = 4;
constexpr int most_rows(int vectors) { return vectors > 2 ? 1 : 6 / vectors; }
constexpr int most_vectors(int64_t rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

// The even and the odd ones of eight pairs of bf16, as float32.
inline __m256 even_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odd_of(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))));
}

// acc[m][n] += sum over `steps` of the pair products of row m of a and column vector n of b.
// a: row-major bf16 pairs, `lda` pairs a row. b[n]: 16 columns x 2 bf16 = 64 bytes a step, `stride` bytes between steps.
template <int MB, int NB>
__attribute__((always_inline)) inline void multiply_panel(const int32_t* a, int64_t lda, const char* const (&b)[NB],
                                                          int64_t stride, int64_t steps, Vec (&acc)[MB][NB]) {
    for (int64_t s = 0; s < steps; s++) {
        for (int half = 0; half < 2; half++) {
            __m256 w[NB][2];
            for (int n = 0; n < NB; n++) {
                const __m256i pairs = _mm256_loadu_si256((const __m256i*)(b[n] + s * stride) + half);
                w[n][0] = even_of(pairs), w[n][1] = odd_of(pairs);
            }
            for (int m = 0; m < MB; m++) {
                const __m256i pair = _mm256_set1_epi32(a[m * lda + s]);
                for (int n = 0; n < NB; n++) {
                    __m256& sum = half ? acc[m][n].hi : acc[m][n].lo;
                    sum = _mm256_fmadd_ps(w[n][0], even_of(pair), sum);
                    sum = _mm256_fmadd_ps(w[n][1], odd_of(pair), sum);
                }
            }
        }
    }
}

}  // namespace octavo
