// Products of a few to many rows with a packed weight: bfloat16, 4-bit and 8-bit groups, and int8 x int8.
//
// Every layout is made of tiles of 16 output rows, so that a vector register holds one output a lane and no sum across
// lanes is needed. Within a tile the factors of one instruction's inner product (2 bf16 or 4 int8 along k) are adjacent.
//   bf16  tile: [K / 2][16][2] bf16
//   int4  tile: groups of {scale fp16 [16], offset fp16 [16] if there are offsets, codes [group / 8][16] uint32};
//         nibble j of the low half of a word is k = 8 i + 2 j, of the high half k = 8 i + 2 j + 1
//   int8  tile: groups of {scale, offset as above, codes int8 [group / 2][16][2]}
//   w8a8  tile: [K / 4][16][4] uint8, code + 128 (the instruction wants one unsigned factor)
// Outputs are multiplied by row_scale [N rounded up to 16] float32 in the end (not for bf16).
#include "common.h"

namespace octavo {

enum Kind : int32_t { BF16 = 0, INT4 = 1, INT8 = 2, W8A8 = 3 };

struct Weight {  // mirrored by octavo.ops.cpu.weights._WeightStruct
    int64_t n, k;
    int64_t group;       // k a scale
    int64_t tile_bytes;  // bytes of 16 rows
    const char* data;
    const float* row_scale;
    int32_t kind;
    int32_t has_offset;
    int32_t code_base;  // 4-bit: value of code 0 (-8 for symmetric weights, then without offsets)
    int32_t dequantize_from;  // quantized weights: from this many rows on, expand tiles to bf16 first
};

struct Task {
    const Weight* w;
    const bf16* x;  // [M, K]
    int64_t rows;
    void* out;  // [M, N] bf16 or float
    bool out_float;
    const bf16* bias;
    const float* sums;     // [M, groups], sums of x over each group; for offsets
    const int8_t* codes;   // W8A8: the quantized x [M, K]
    const float* x_scale;  // W8A8: [M]
    const int32_t* x_sum;  // W8A8: [M]
};

static inline void write(const Task& t, int64_t row, int64_t tile, __m512 y) {
    int64_t n = tile * 16;
    __mmask16 mask = tail_mask(t.w->n - n);
    if (t.bias) y = _mm512_add_ps(y, load_bf16(t.bias + n, mask));
    if (t.out_float)
        _mm512_mask_storeu_ps((float*)t.out + row * t.w->n + n, mask, y);
    else
        store_bf16((bf16*)t.out + row * t.w->n + n, y, mask);
}

// ---------------------------------------------------------------- bfloat16

// Rows row .. row + MB of the output for NB tiles whose bf16 factors start at `data`.
template <int MB, int NB>
static void dense_block(const Task& t, int64_t row, int64_t tile, const char* data, int64_t tile_bytes) {
    const char* b[NB];
    for (int n = 0; n < NB; n++) b[n] = data + n * tile_bytes;
    __m512 acc[MB][NB];
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) acc[m][n] = _mm512_setzero_ps();
    int64_t pairs = t.w->k / 2;
    multiply_panel<MB, NB>((const int32_t*)(t.x + row * t.w->k), pairs, b, 64, pairs, acc);
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) write(t, row + m, tile + n, acc[m][n]);
}

template <int NB>
static void dense_rows(const Task& t, int64_t tile, const char* data, int64_t tile_bytes) {
    for_row_blocks(t.rows, [&](int64_t row, int64_t count) {
        with_rows(count, [&](auto mb) { dense_block<mb.value, NB>(t, row, tile, data, tile_bytes); });
    });
}

// ---------------------------------------------------------------- 4 and 8 bits in groups

struct Int4 {
    static constexpr int PAIRS = 4;   // pairs of k a step
    static constexpr int BYTES = 64;  // of a tile a step
    __m512i table;                    // bf16 values by code, twice: vpermw takes 5 bits and the fifth is a neighbour's
    __m512 float_table;               // vpermps takes 4 bits

    explicit Int4(const Weight& w) {
        alignas(64) bf16 values[32];
        alignas(64) float floats[16];
        for (int i = 0; i < 16; i++) {
            floats[i] = float(w.code_base + i);
            values[i] = values[i + 16] = to_bf16(floats[i]);
        }
        table = _mm512_load_si512(values);
        float_table = _mm512_load_ps(floats);
    }
    __attribute__((always_inline)) void decode(const char* p, __m512i (&out)[PAIRS]) const {
        __m512i v = _mm512_loadu_si512(p);
        out[0] = _mm512_permutexvar_epi16(v, table);
        out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), table);
        out[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), table);
        out[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), table);
    }
    // The weights scale * code + offset of one step as bf16 pairs.
    void expand(const char* p, __m512 scale, __m512 offset, bf16* out) const {
        __m512i v = _mm512_loadu_si512(p);
        for (int j = 0; j < PAIRS; j++) {
            __m512 even = _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4 * j), float_table);
            __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4 * j + 16), float_table);
            even = _mm512_fmadd_ps(even, scale, offset);
            odd = _mm512_fmadd_ps(odd, scale, offset);
            __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
            __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd)), 16);
            _mm512_storeu_si512(out + 32 * j, _mm512_or_si512(low, high));
        }
    }
};

struct Int8 {
    static constexpr int PAIRS = 1;
    static constexpr int BYTES = 32;

    explicit Int8(const Weight&) {}
    static __attribute__((always_inline)) void load(const char* p, __m512& low, __m512& high) {
        low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
        high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p + 1)));
    }
    __attribute__((always_inline)) void decode(const char* p, __m512i (&out)[PAIRS]) const {
        __m512 low, high;
        load(p, low, high);
        out[0] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
    void expand(const char* p, __m512 scale, __m512 offset, bf16* out) const {
        const __m512i first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        __m512 low, high;
        load(p, low, high);
        low = _mm512_fmadd_ps(low, _mm512_permutexvar_ps(first, scale), _mm512_permutexvar_ps(first, offset));
        high = _mm512_fmadd_ps(high, _mm512_permutexvar_ps(second, scale), _mm512_permutexvar_ps(second, offset));
        _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
};

static inline __m512 load_half(const char* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

// One row block: products of the codes inside a group, then the group's scale, and its offset times the sum of x.
template <class Codec, int MB, int NB>
static void group_block(const Task& t, const Codec& codec, int64_t row, int64_t tile) {
    const Weight& w = *t.w;
    const int64_t pairs = w.k / 2, groups = w.k / w.group, steps = w.group / (2 * Codec::PAIRS);
    const int64_t header = w.has_offset ? 64 : 32, block = header + steps * Codec::BYTES;
    const int32_t* a = (const int32_t*)(t.x + row * w.k);
    const char* b = w.data + tile * w.tile_bytes;
    __m512 acc[MB][NB];
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) acc[m][n] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++, b += block) {
        __m512 part[MB][NB];
        for (int m = 0; m < MB; m++)
            for (int n = 0; n < NB; n++) part[m][n] = _mm512_setzero_ps();
        for (int64_t s = 0; s < steps; s++, a += Codec::PAIRS) {
            for (int n = 0; n < NB; n++) {
                __m512i v[Codec::PAIRS];
                codec.decode(b + n * w.tile_bytes + header + s * Codec::BYTES, v);
                for (int j = 0; j < Codec::PAIRS; j++)
                    for (int m = 0; m < MB; m++)
                        part[m][n] = _mm512_dpbf16_ps(part[m][n], (__m512bh)v[j],
                                                      (__m512bh)_mm512_set1_epi32(a[m * pairs + j]));
            }
        }
        for (int n = 0; n < NB; n++) {
            const char* h = b + n * w.tile_bytes;
            __m512 scale = load_half(h);
            for (int m = 0; m < MB; m++) acc[m][n] = _mm512_fmadd_ps(part[m][n], scale, acc[m][n]);
            if (!w.has_offset) continue;
            __m512 offset = load_half(h + 32);
            for (int m = 0; m < MB; m++)
                acc[m][n] = _mm512_fmadd_ps(_mm512_set1_ps(t.sums[(row + m) * groups + g]), offset, acc[m][n]);
        }
    }
    for (int n = 0; n < NB; n++) {
        __m512 scale = _mm512_loadu_ps(w.row_scale + (tile + n) * 16);
        for (int m = 0; m < MB; m++) write(t, row + m, tile + n, _mm512_mul_ps(acc[m][n], scale));
    }
}

// The weights of one tile as bf16 in the layout of a dense tile.
template <class Codec>
static void expand_tile(const Weight& w, const Codec& codec, int64_t tile, bf16* out) {
    const int64_t groups = w.k / w.group, steps = w.group / (2 * Codec::PAIRS);
    const int64_t header = w.has_offset ? 64 : 32;
    const char* b = w.data + tile * w.tile_bytes;
    const __m512 row_scale = _mm512_loadu_ps(w.row_scale + tile * 16);
    for (int64_t g = 0; g < groups; g++) {
        __m512 scale = _mm512_mul_ps(load_half(b), row_scale);
        __m512 offset = w.has_offset ? _mm512_mul_ps(load_half(b + 32), row_scale) : _mm512_setzero_ps();
        b += header;
        for (int64_t s = 0; s < steps; s++, b += Codec::BYTES, out += 32 * Codec::PAIRS)
            codec.expand(b, scale, offset, out);
    }
}

template <class Codec>
static void group_tiles(const Task& t, int64_t first, int64_t last) {
    const Codec codec(*t.w);
    if (t.rows < t.w->dequantize_from) {
        for_vector_blocks(last - first, [&](int64_t tile, auto nb) {
            for_row_blocks(t.rows, [&](int64_t row, int64_t count) {
                with_rows(count, [&](auto mb) { group_block<Codec, mb.value, nb.value>(t, codec, row, first + tile); });
            });
        });
        return;
    }
    static thread_local std::vector<bf16> buffer;
    const int64_t tile_size = t.w->k * 16;
    bf16* expanded = scratch(buffer, MAX_VECTORS * tile_size);
    for_vector_blocks(last - first, [&](int64_t tile, auto nb) {
        for (int n = 0; n < nb.value; n++) expand_tile(*t.w, codec, first + tile + n, expanded + n * tile_size);
        dense_rows<nb.value>(t, first + tile, (const char*)expanded, tile_size * 2);
    });
}

// sums[m, g] of x over each group.
static void group_sums(const bf16* x, int64_t rows, int64_t k, int64_t group, float* sums) {
    for (int64_t i = 0; i < rows * k / group; i++, x += group) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t j = 0; j < group; j += 16) sum = _mm512_add_ps(sum, load_bf16(x + j, tail_mask(group - j)));
        sums[i] = _mm512_reduce_add_ps(sum);
    }
}

// ---------------------------------------------------------------- int8 x int8

template <int MB, int NB>
static void w8a8_block(const Task& t, int64_t row, int64_t tile) {
    const Weight& w = *t.w;
    const int64_t quads = w.k / 4;
    const int32_t* a = (const int32_t*)(t.codes + row * w.k);
    const char* b = w.data + tile * w.tile_bytes;
    __m512i acc[MB][NB];
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) acc[m][n] = _mm512_setzero_si512();
    for (int64_t s = 0; s < quads; s++) {
        __m512i v[NB];
        for (int n = 0; n < NB; n++) v[n] = _mm512_loadu_si512(b + n * w.tile_bytes + s * 64);
        for (int m = 0; m < MB; m++) {
            __m512i x = _mm512_set1_epi32(a[m * quads + s]);
            for (int n = 0; n < NB; n++) acc[m][n] = _mm512_dpbusd_epi32(acc[m][n], v[n], x);
        }
    }
    for (int m = 0; m < MB; m++) {
        __m512i shift = _mm512_set1_epi32(128 * t.x_sum[row + m]);
        __m512 x_scale = _mm512_set1_ps(t.x_scale[row + m]);
        for (int n = 0; n < NB; n++) {
            __m512 y = _mm512_cvtepi32_ps(_mm512_sub_epi32(acc[m][n], shift));
            __m512 scale = _mm512_mul_ps(x_scale, _mm512_loadu_ps(w.row_scale + (tile + n) * 16));
            write(t, row + m, tile + n, _mm512_mul_ps(y, scale));
        }
    }
}

// Symmetric int8 codes of one row: scale = max |x| / 127.5, codes = round(x / scale) clamped; and their sum.
static void quantize_row(const bf16* x, int64_t k, int8_t* codes, float* scale, int32_t* sum) {
    __m512 largest = _mm512_setzero_ps();
    for (int64_t j = 0; j < k; j += 16)
        largest = _mm512_max_ps(largest, _mm512_abs_ps(load_bf16(x + j, tail_mask(k - j))));
    *scale = std::max(_mm512_reduce_max_ps(largest) / 127.5f, 1.17549435e-38f);
    __m512 divisor = _mm512_set1_ps(*scale);
    __m512i total = _mm512_setzero_si512();
    for (int64_t j = 0; j < k; j += 16) {
        __mmask16 mask = tail_mask(k - j);
        __m512i q = _mm512_cvtps_epi32(_mm512_div_ps(load_bf16(x + j, mask), divisor));
        q = _mm512_max_epi32(_mm512_min_epi32(q, _mm512_set1_epi32(127)), _mm512_set1_epi32(-128));
        total = _mm512_add_epi32(total, q);
        _mm_mask_storeu_epi8(codes + j, mask, _mm512_cvtepi32_epi8(q));
    }
    *sum = _mm512_reduce_add_epi32(total);
}

// ---------------------------------------------------------------- entry

// Tiles first .. last of the product.
static void linear_tiles(const Task& t, int64_t first, int64_t last) {
    const Weight& w = *t.w;
    switch (w.kind) {
        case BF16:
            for_vector_blocks(last - first, [&](int64_t tile, auto nb) {
                dense_rows<nb.value>(t, first + tile, w.data + (first + tile) * w.tile_bytes, w.tile_bytes);
            });
            return;
        case INT4: return group_tiles<Int4>(t, first, last);
        case INT8: return group_tiles<Int8>(t, first, last);
        case W8A8:
            for_vector_blocks(last - first, [&](int64_t tile, auto nb) {
                for_row_blocks(t.rows, [&](int64_t row, int64_t count) {
                    with_rows(count, [&](auto mb) { w8a8_block<mb.value, nb.value>(t, row, first + tile); });
                });
            });
            return;
    }
}

struct LinearScratch {
    std::vector<float> sums, scales;
    std::vector<int8_t> codes;
    std::vector<int32_t> code_sums;
};

}  // namespace octavo

using namespace octavo;

OCTAVO_EXPORT void octavo_linear(const Weight* w, const bf16* x, int64_t rows, void* out, int32_t out_float,
                                 const bf16* bias) {
    static thread_local LinearScratch memory;
    Task t{w, x, rows, out, out_float != 0, bias, nullptr, nullptr, nullptr, nullptr};
    const int64_t tiles = (w->n + 15) / 16;
    const bool grouped = w->kind == INT4 || w->kind == INT8;
    if (grouped && w->has_offset && rows < w->dequantize_from) {
        float* sums = scratch(memory.sums, rows * (w->k / w->group));
        group_sums(x, rows, w->k, w->group, sums);
        t.sums = sums;
    }
    int8_t* codes = nullptr;
    float* scales = nullptr;
    int32_t* code_sums = nullptr;
    if (w->kind == W8A8) {
        t.codes = codes = scratch(memory.codes, rows * w->k);
        t.x_scale = scales = scratch(memory.scales, rows);
        t.x_sum = code_sums = scratch(memory.code_sums, rows);
    }
#pragma omp parallel
    {
        if (codes) {
#pragma omp for schedule(static)
            for (int64_t m = 0; m < rows; m++)
                quantize_row(x + m * w->k, w->k, codes + m * w->k, scales + m, code_sums + m);
        }
        int64_t first, last;
        thread_share(tiles, omp_get_thread_num(), omp_get_num_threads(), first, last);
        linear_tiles(t, first, last);
    }
}

// out[i, :] = row ids[i] of the weight, dequantized; rows outside 0 .. n are zero.
OCTAVO_EXPORT void octavo_rows(const Weight* w, const int64_t* ids, int64_t count, void* out, int32_t out_float) {
    const int64_t k = w->k;
    const int64_t header = w->has_offset ? 64 : 32;
    const int64_t block = w->kind == INT4 ? header + w->group * 8 : header + w->group * 16;
#pragma omp parallel for schedule(static) if (count >= 64)
    for (int64_t i = 0; i < count; i++) {
        const int64_t lane = ids[i] & 15;
        const char* tile = w->data + (ids[i] >> 4) * w->tile_bytes;
        const bool valid = ids[i] >= 0 && ids[i] < w->n;
        for (int64_t j = 0; j < k; j++) {
            float value = 0;
            if (!valid) {
            } else if (w->kind == BF16) {
                value = to_float(((const bf16*)tile)[(j / 2) * 32 + lane * 2 + j % 2]);
            } else if (w->kind == W8A8) {
                int code = ((const uint8_t*)tile)[(j / 4) * 64 + lane * 4 + j % 4];
                value = float(code - 128) * w->row_scale[ids[i]];
            } else {
                const char* b = tile + (j / w->group) * block;
                const int64_t g = j % w->group;
                float scale = _cvtsh_ss(((const uint16_t*)b)[lane]);
                float offset = w->has_offset ? _cvtsh_ss(((const uint16_t*)b)[16 + lane]) : 0.0f;
                float code;
                if (w->kind == INT8) {
                    code = float(((const int8_t*)(b + header))[(g / 2) * 32 + lane * 2 + g % 2]);
                } else {
                    uint32_t word = ((const uint32_t*)(b + header))[(g / 8) * 16 + lane];
                    code = float(w->code_base + int((word >> (16 * (g % 2) + 4 * (g % 8 / 2))) & 15));
                }
                value = (scale * code + offset) * w->row_scale[ids[i]];
            }
            if (out_float)
                ((float*)out)[i * k + j] = value;
            else
                ((bf16*)out)[i * k + j] = to_bf16(value);
        }
    }
}
