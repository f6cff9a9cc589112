// The products of linear.cpp with AVX2: a tile of 16 outputs is two registers.
//
// bfloat16 weights become float32 by a shift or a mask and are multiplied in float32, with x converted once. Codes stay
// integers: x is written as 16-bit integers times a scale (a group, or a row for int8 x int8), and vpmaddwd multiplies
// pairs exactly. For groups that rounds x by at most 2^-16 of the largest value of its group, as with AVX-512.
// A 16-bit word of a tile holds two or four codes of different k, which a shift and a mask bring out in the order of
// Codec::ORDER; x is stored in that order.
#include "linear.h"

namespace octavo {

static inline __m256i load_codes(const char* p) { return _mm256_loadu_si256((const __m256i*)p); }

// ---------------------------------------------------------------- bfloat16

template <int MB, int NB>
static void dense_block(const Task& t, int64_t row, int64_t tile) {
    const Weight& w = *t.w;
    const float* x = (const float*)t.codes + row * w.k;
    const char* b = w.data + tile * w.tile_bytes;
    __m256 acc[MB][2 * NB];
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < 2 * NB; n++) acc[m][n] = _mm256_setzero_ps();
    for (int64_t k = 0; k < w.k; k += 2, b += 64) {
        for (int odd = 0; odd < 2; odd++) {  // one after the other: both would not fit in the registers
            __m256 weights[2 * NB];
            for (int n = 0; n < 2 * NB; n++) {
                const __m256i pairs = load_codes(b + n / 2 * w.tile_bytes + n % 2 * 32);
                weights[n] = odd ? odd_of(pairs) : even_of(pairs);
            }
            for (int m = 0; m < MB; m++) {
                const __m256 factor = _mm256_broadcast_ss(x + m * w.k + k + odd);
                for (int n = 0; n < 2 * NB; n++) acc[m][n] = _mm256_fmadd_ps(weights[n], factor, acc[m][n]);
            }
        }
    }
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) write(t, row + m, tile + n, {acc[m][2 * n], acc[m][2 * n + 1]});
}

// ---------------------------------------------------------------- codes

// Bytes between the codes in hand and those fetched: the processor's own prefetching loses time at each tile.
constexpr int64_t AHEAD = 2048;

struct Int4 {
    static constexpr int WORDS = 4;  // vectors of 8 outputs x 2 k in 32 bytes
    static constexpr int ORDER[8] = {0, 2, 4, 6, 1, 3, 5, 7};

    template <int I>
    static __attribute__((always_inline)) __m256i pairs(__m256i v) {
        return I == 3 ? _mm256_srli_epi16(v, 12) : _mm256_and_si256(_mm256_srli_epi16(v, 4 * I), _mm256_set1_epi16(15));
    }
};

struct Int8 {
    static constexpr int WORDS = 2;
    static constexpr int ORDER[8] = {0, 2, 1, 3, 4, 6, 5, 7};

    template <int I>
    static __attribute__((always_inline)) __m256i pairs(__m256i v) {
        return I == 1 ? _mm256_srli_epi16(v, 8) : _mm256_and_si256(v, _mm256_set1_epi16(255));
    }
};

// sums[m][n] += products of word I of the codes v[n] with x[m].
template <class Codec, int I, int MB>
static __attribute__((always_inline)) inline void multiply_word(const __m256i (&v)[2], const int32_t* x, int64_t lda,
                                                                __m256i (&sums)[MB][2]) {
    const __m256i codes[2] = {Codec::template pairs<I>(v[0]), Codec::template pairs<I>(v[1])};
    for (int m = 0; m < MB; m++) {
        const __m256i pair = _mm256_set1_epi32(x[m * lda + I]);
        for (int n = 0; n < 2; n++) sums[m][n] = _mm256_add_epi32(sums[m][n], _mm256_madd_epi16(codes[n], pair));
    }
}

// Integer products of MB rows with one tile over `steps` of 64 bytes. x: pairs of int16, `lda` pairs a row.
template <class Codec, int MB, bool FETCH>
static __attribute__((always_inline)) inline void multiply_codes(const int32_t* x, int64_t lda, const char* b,
                                                                 int64_t steps, __m256i (&sums)[MB][2]) {
    for (int m = 0; m < MB; m++) sums[m][0] = sums[m][1] = _mm256_setzero_si256();
    for (int64_t s = 0; s < steps; s++, b += 64, x += Codec::WORDS) {
        if constexpr (FETCH) _mm_prefetch(b + AHEAD, _MM_HINT_T0);
        const __m256i v[2] = {load_codes(b), load_codes(b + 32)};
        multiply_word<Codec, 0>(v, x, lda, sums);
        multiply_word<Codec, 1>(v, x, lda, sums);
        if constexpr (Codec::WORDS == 4) {
            multiply_word<Codec, 2>(v, x, lda, sums);
            multiply_word<Codec, 3>(v, x, lda, sums);
        }
    }
}

static inline Vec to_floats(const __m256i (&sums)[2]) {
    return {_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])};
}

template <class Codec, int MB>
static void group_block(const Task& t, int64_t row, int64_t tile) {
    const Weight& w = *t.w;
    const int64_t groups = w.k / w.group, steps = w.group / (2 * Codec::WORDS), lda = w.k / 2;
    const int64_t header = w.has_offset ? 64 : 32, block = header + steps * 64;
    const int32_t* x = (const int32_t*)t.codes + row * lda;
    const char* b = w.data + tile * w.tile_bytes;
    Vec acc[MB];
    for (int m = 0; m < MB; m++) acc[m] = zeros();
    for (int64_t g = 0; g < groups; g++, b += block, x += w.group / 2) {
        __m256i sums[MB][2];
        for (int64_t i = 0; i < block; i += 64) _mm_prefetch(b + AHEAD + i, _MM_HINT_T0);
        multiply_codes<Codec, MB, false>(x, lda, b + header, steps, sums);
        const Vec scale = load_half(b);
        const Vec offset = fnmadd(splat(float(w.zero)), scale, w.has_offset ? load_half(b + 32) : zeros());
        for (int m = 0; m < MB; m++) {
            const int64_t at = (row + m) * groups + g;
            const Vec y = fmadd(to_floats(sums[m]), scale, splat(float(t.x_sum[at])) * offset);
            acc[m] = fmadd(y, splat(t.x_scale[at]), acc[m]);
        }
    }
    const Vec scale = load(w.row_scale + tile * 16);
    for (int m = 0; m < MB; m++) write(t, row + m, tile, acc[m] * scale);
}

// int8 x int8: the whole row is one group, and its codes are 128 more than their values.
template <int MB>
static void w8a8_block(const Task& t, int64_t row, int64_t tile) {
    const Weight& w = *t.w;
    __m256i sums[MB][2];
    const int32_t* x = (const int32_t*)t.codes + row * (w.k / 2);
    multiply_codes<Int8, MB, true>(x, w.k / 2, w.data + tile * w.tile_bytes, w.k / 4, sums);
    for (int m = 0; m < MB; m++) {
        const Vec scale = splat(t.x_scale[row + m]) * load(w.row_scale + tile * 16);
        const __m256i zero = _mm256_set1_epi32(128 * t.x_sum[row + m]);
        for (__m256i& sum : sums[m]) sum = _mm256_sub_epi32(sum, zero);
        write(t, row + m, tile, to_floats(sums[m]) * scale);
    }
}

// ---------------------------------------------------------------- inputs

// Eight values as int16 in the codec's order; the last `count` < 8 are 4, which no order of fours mixes with the rest.
template <class Codec>
static inline void store_words(int16_t* out, __m256i q, int64_t count) {
    const __m256i ordered = _mm256_permutevar8x32_epi32(q, _mm256_loadu_si256((const __m256i*)Codec::ORDER));
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
    if (count >= 8)
        _mm_storeu_si128((__m128i*)out, words);
    else
        _mm_storel_epi64((__m128i*)out, words);
}

static inline int32_t sum_of(__m256i x) {
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}

// x times `factor` or by `divisor`, rounded to integers within +-limit; returns their sum.
template <class Codec, class Scale>
static int32_t store_integers(const bf16* x, int64_t count, int16_t* out, Scale scaled) {
    __m256i total = _mm256_setzero_si256();
    for (int64_t j = 0; j < count; j += 16) {
        const Vec v = scaled(load_bf16(x + j, count - j));
        const __m256i lo = _mm256_cvtps_epi32(v.lo), hi = _mm256_cvtps_epi32(v.hi);
        total = _mm256_add_epi32(total, _mm256_add_epi32(lo, hi));
        store_words<Codec>(out + j, lo, count - j);
        if (count - j > 8) store_words<Codec>(out + j + 8, hi, count - j - 8);
    }
    return sum_of(total);
}

// One group of x as 16-bit integers. A value that is not finite makes the scale NaN.
template <class Codec>
static void scale_group(const bf16* x, int64_t group, int16_t* out, float* scale, int32_t* sum_of_x) {
    Vec most = zeros(), not_finite = zeros();
    for (int64_t j = 0; j < group; j += 16) {
        const Vec v = load_bf16(x + j, group - j);
        most = maximum(most, absolute(v));
        not_finite = not_finite + (v - v);
    }
    const float limit = 32639.0f, peak = largest(most);  // 127 * 256 + 127, as with AVX-512
    *scale = peak / limit + sum(not_finite);
    const Vec inverse = splat(peak > 1e-30f ? limit / peak : 0.0f);
    *sum_of_x = store_integers<Codec>(x, group, out, [&](Vec v) { return v * inverse; });
}

// Symmetric int8 codes of one row: scale = max |x| / 127, codes = round(x / scale) clamped; and their sum.
static void quantize_row(const bf16* x, int64_t k, int16_t* out, float* scale, int32_t* sum_of_x) {
    Vec most = zeros();
    for (int64_t j = 0; j < k; j += 16) most = maximum(most, absolute(load_bf16(x + j, k - j)));
    *scale = std::max(largest(most) / 127.0f, 1.17549435e-38f);
    const Vec divisor = splat(*scale);
    *sum_of_x = store_integers<Int8>(x, k, out, [&](Vec v) {
        return maximum(minimum(nearest(v / divisor), splat(127.0f)), splat(-128.0f));
    });
}

void reserve_input(Task& t, LinearScratch& memory) {
    const Weight& w = *t.w;
    const int64_t groups = w.kind == INT4 || w.kind == INT8 ? w.k / w.group : 1;
    t.codes = scratch(memory.codes, t.rows * w.k * (w.kind == BF16 ? sizeof(float) : sizeof(int16_t)));
    t.x_scale = scratch(memory.scales, t.rows * groups);
    t.x_sum = scratch(memory.sums, t.rows * groups);
}

void prepare_input(const Task& t, int64_t row) {
    const Weight& w = *t.w;
    const bf16* x = t.x + row * w.k;
    if (w.kind == BF16) {
        float* out = (float*)t.codes + row * w.k;
        for (int64_t j = 0; j < w.k; j += 16) store(out + j, load_bf16(x + j, w.k - j), w.k - j);
        return;
    }
    int16_t* out = (int16_t*)t.codes + row * w.k;
    if (w.kind == W8A8) return quantize_row(x, w.k, out, t.x_scale + row, t.x_sum + row);
    const int64_t groups = w.k / w.group;
    for (int64_t g = 0, at = row * groups; g < groups; g++, at++) {
        const int64_t j = g * w.group;
        if (w.kind == INT4)
            scale_group<Int4>(x + j, w.group, out + j, t.x_scale + at, t.x_sum + at);
        else
            scale_group<Int8>(x + j, w.group, out + j, t.x_scale + at, t.x_sum + at);
    }
}

// ---------------------------------------------------------------- all rows

// Rows of a block with two sums an output: 8 registers of sums, the others for codes and x.
constexpr int CODE_ROWS = 4;

template <class F>
static void for_code_rows(int64_t rows, F body) {
    for_row_blocks(rows, CODE_ROWS, [&](int64_t row, int64_t count) {
        with_rows(count, [&](auto mb) {
            if constexpr (mb.value <= CODE_ROWS) body(row, mb);
        });
    });
}

// Rows of the task first .. first + rows with tiles tile .. last.
static void multiply_rows(const Task& t, int64_t first, int64_t rows, int64_t tile, int64_t last) {
    if (t.w->kind == BF16) {
        for_blocks(rows, last - tile, [&](int64_t row, int64_t n, auto mb, auto nb) {
            dense_block<mb.value, nb.value>(t, first + row, tile + n);
        });
        return;
    }
    for (; tile < last; tile++) {
        for_code_rows(rows, [&](int64_t row, auto mb) {
            constexpr int MB = mb.value;
            if (t.w->kind == INT4) return group_block<Int4, MB>(t, first + row, tile);
            if (t.w->kind == INT8) return group_block<Int8, MB>(t, first + row, tile);
            w8a8_block<MB>(t, first + row, tile);
        });
    }
}

// Bytes of x that stay in the second-level cache while the tiles pass by.
constexpr int64_t ROW_BLOCK_BYTES = 1 << 18;

void linear_tiles(const Task& t, int64_t first, int64_t last) {
    const int64_t row_bytes = t.w->k * (t.w->kind == BF16 ? 4 : 2);
    const int64_t most = std::max<int64_t>(24, ROW_BLOCK_BYTES / row_bytes / 12 * 12);
    for_row_blocks(t.rows, most, [&](int64_t row, int64_t rows) { multiply_rows(t, row, rows, first, last); });
}

}  // namespace octavo
