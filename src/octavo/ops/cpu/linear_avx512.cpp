// The products of linear.cpp with AVX-512 (vpdpbf16ps, vpdpbusd) and matrix tiles.
//
// Few rows of int4 and int8 use integer products (vpdpbusd): x is written as 16-bit integers times a scale a group, in
// two planes of 8 bits. That rounds x by at most 2^-16 of the largest value of its group, far below bfloat16's own
// 2^-9, and needs neither a table nor a conversion per weight. Many rows expand tiles to bfloat16 instead.
#include "amx.h"
#include "linear.h"

namespace octavo {

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
    for_row_blocks(t.rows, MAX_ROWS, [&](int64_t row, int64_t count) {
        with_rows(count, [&](auto mb) { dense_block<mb.value, NB>(t, row, tile, data, tile_bytes); });
    });
}

// ---------------------------------------------------------------- matrix tiles

static inline void write_int8(const Task& t, int64_t row, int64_t tile, __m512i sum) {
    const __m512i shifted = _mm512_sub_epi32(sum, _mm512_set1_epi32(128 * t.x_sum[row]));
    const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(t.x_scale[row]), _mm512_loadu_ps(t.w->row_scale + tile * 16));
    write(t, row, tile, _mm512_mul_ps(_mm512_cvtepi32_ps(shifted), scale));
}

// MT x NT tiles of 16 rows by 16 outputs, starting at `row` and `tile`.
template <bool INT, int MT, int NT>
static void amx_block(const Task& t, int64_t row, int64_t tile, const char* data, int64_t tile_bytes) {
    alignas(64) char sums[MT * NT * 1024];
    const int64_t row_bytes = t.w->k * (INT ? 1 : 2);
    const bool copied = t.last_rows && row + 16 * MT > t.rows;  // only the last block, which starts at a multiple of 32
    const char* x = copied ? t.last_rows : (INT ? (const char*)t.codes : (const char*)t.x) + row * row_bytes;
    multiply_tiles<INT, MT, NT>(x, row_bytes, data, tile_bytes, row_bytes / 64, sums);
    for (int i = 0; i < MT; i++) {
        for (int j = 0; j < NT; j++) {
            const char* sum = sums + (i * NT + j) * 1024;
            const int64_t first = row + 16 * i, count = std::min<int64_t>(16, t.rows - first);
            for (int64_t m = 0; m < count; m++) {
                if constexpr (INT)
                    write_int8(t, first + m, tile + j, _mm512_load_si512(sum + m * 64));
                else
                    write(t, first + m, tile + j, _mm512_load_ps(sum + m * 64));
            }
        }
    }
}

template <bool INT, int NT>
static void amx_rows(const Task& t, int64_t tile, const char* data, int64_t tile_bytes) {
    int64_t row = 0;
    for (; row + 16 < t.rows; row += 32) amx_block<INT, 2, NT>(t, row, tile, data, tile_bytes);
    if (row < t.rows) amx_block<INT, 1, NT>(t, row, tile, data, tile_bytes);
}

// All rows of 1, 2 or 4 tiles.
template <bool INT, int NB>
static void amx_tiles(const Task& t, int64_t tile, const char* data, int64_t tile_bytes) {
    constexpr int NT = NB > 1 ? 2 : 1;
    for (int n = 0; n < NB; n += NT) amx_rows<INT, NT>(t, tile + n, data + n * tile_bytes, tile_bytes);
}

static inline bool uses_amx(const Task& t) { return t.rows >= t.w->amx_from; }

// ---------------------------------------------------------------- 4 and 8 bits in groups

struct Int4 {
    static constexpr int QUADS = 2;  // vectors of 16 rows x 4 k in 64 bytes

    static __attribute__((always_inline)) void decode(const char* p, __m512i (&out)[QUADS]) {
        const __m512i low = _mm512_set1_epi8(15);
        const __m512i v = _mm512_loadu_si512(p);
        out[0] = _mm512_and_si512(v, low);
        out[1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
    }

    // Codes of k = i as float32; vpermps looks at the lowest 4 bits only.
    static __attribute__((always_inline)) __m512 value(__m512i v, int i) {
        const __m512 table = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        return _mm512_permutexvar_ps(_mm512_srli_epi32(v, 8 * (i % 4) + 4 * (i / 4)), table);
    }
};

struct Int8 {
    static constexpr int QUADS = 1;

    static __attribute__((always_inline)) void decode(const char* p, __m512i (&out)[QUADS]) {
        out[0] = _mm512_loadu_si512(p);
    }

    static __attribute__((always_inline)) __m512 value(__m512i v, int i) {
        return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(v, 8 * i), _mm512_set1_epi32(255)));
    }
};

// Fetches, for each of NB tiles, the group `ahead` groups later, or at the start of the next NB tiles: the processor's own
// prefetching does not see far enough along several short streams (a third of the time at one row).
template <int NB>
static inline void prefetch_group(const char* b, int64_t group, int64_t groups, int64_t ahead, int64_t block,
                                  int64_t tile_bytes) {
    const char* p = b + ahead * block + (group + ahead < groups ? 0 : (NB - 1) * tile_bytes);
    for (int n = 0; n < NB; n++, p += tile_bytes)
        for (int64_t i = 0; i < block; i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
}

// One row block: integer products inside a group, then the scales of weight and x, and the offset times the sum of x.
template <class Codec, int MB, int NB>
static void group_block(const Task& t, int64_t row, int64_t tile) {
    const Weight& w = *t.w;
    const int64_t quads = w.k / 4, groups = w.k / w.group, steps = w.group / (4 * Codec::QUADS);
    const int64_t header = w.has_offset ? 64 : 32, block = header + steps * 64;
    const int64_t ahead = std::max<int64_t>(1, 2048 / block);
    const int32_t* a = (const int32_t*)t.codes + row * quads * 2;
    const char* b = w.data + tile * w.tile_bytes;
    __m512 acc[MB][NB];
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) acc[m][n] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++, b += block) {
        prefetch_group<NB>(b, g, groups, ahead, block, w.tile_bytes);
        __m512i high[MB][NB], low[MB][NB];
        for (int m = 0; m < MB; m++)
            for (int n = 0; n < NB; n++) high[m][n] = low[m][n] = _mm512_setzero_si512();
        for (int64_t s = 0; s < steps; s++, a += 2 * Codec::QUADS) {
            for (int n = 0; n < NB; n++) {
                __m512i v[Codec::QUADS];
                Codec::decode(b + n * w.tile_bytes + header + s * 64, v);
                for (int j = 0; j < Codec::QUADS; j++) {
                    for (int m = 0; m < MB; m++) {
                        const int32_t* x = a + m * quads * 2 + 2 * j;
                        high[m][n] = _mm512_dpbusd_epi32(high[m][n], v[j], _mm512_set1_epi32(x[0]));
                        low[m][n] = _mm512_dpbusd_epi32(low[m][n], v[j], _mm512_set1_epi32(x[1]));
                    }
                }
            }
        }
        for (int n = 0; n < NB; n++) {
            const char* h = b + n * w.tile_bytes;
            const __m512 scale = load_half(h), offset = w.has_offset ? load_half(h + 32) : _mm512_setzero_ps();
            for (int m = 0; m < MB; m++) {
                const int64_t at = (row + m) * groups + g;
                const __m512 x_scale = _mm512_set1_ps(t.x_scale[at]);
                __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[m][n], 8), low[m][n]);
                sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(w.zero * t.x_sum[at]));
                __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
                if (w.has_offset) y = _mm512_fmadd_ps(_mm512_set1_ps(float(t.x_sum[at])), offset, y);
                acc[m][n] = _mm512_fmadd_ps(y, x_scale, acc[m][n]);
            }
        }
    }
    for (int n = 0; n < NB; n++) {
        __m512 scale = _mm512_loadu_ps(w.row_scale + (tile + n) * 16);
        for (int m = 0; m < MB; m++) write(t, row + m, tile + n, _mm512_mul_ps(acc[m][n], scale));
    }
}

// One group of x as 16-bit integers in two planes. A value that is not finite makes the scale NaN.
static void split_group(const bf16* x, int64_t group, int8_t* planes, float* scale, int32_t* sum) {
    __m512 largest = _mm512_setzero_ps(), total = _mm512_setzero_ps();
    for (int64_t j = 0; j < group; j += 16) {
        const __m512 v = load_bf16(x + j, group - j);
        largest = _mm512_max_ps(largest, _mm512_abs_ps(v));
        total = _mm512_add_ps(total, _mm512_sub_ps(v, v));
    }
    const float maximum = _mm512_reduce_max_ps(largest);
    *scale = maximum / 32639.0f + _mm512_reduce_add_ps(total);  // 32639 = 127 * 256 + 127
    const __m512 inverse = _mm512_set1_ps(maximum > 1e-30f ? 32639.0f / maximum : 0.0f);
    __m512i sums = _mm512_setzero_si512();
    for (int64_t j = 0; j < group; j += 16) {
        const __m512i q = _mm512_cvtps_epi32(load_bf16(x + j, group - j) * inverse);
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
        const __m512i low = _mm512_sub_epi32(q, _mm512_slli_epi32(high, 8));
        sums = _mm512_add_epi32(sums, q);
        const __m512i pairs = _mm512_castsi128_si512(_mm512_cvtepi32_epi8(high));
        const __m512i both = _mm512_inserti32x4(pairs, _mm512_cvtepi32_epi8(low), 1);
        const __m256i order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
        const __m256i out = _mm256_permutexvar_epi32(order, _mm512_castsi512_si256(both));
        _mm256_mask_storeu_epi32(planes + 2 * j, __mmask8((1u << std::min<int64_t>(8, (group - j) / 2)) - 1), out);
    }
    *sum = _mm512_reduce_add_epi32(sums);
}

static void split_row(const Weight& w, const bf16* x, int64_t row, int8_t* planes, float* scales, int32_t* sums) {
    const int64_t groups = w.k / w.group;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = row * w.k + g * w.group;
        split_group(x + at, w.group, planes + 2 * at, scales + row * groups + g, sums + row * groups + g);
    }
}

// Two vectors of float32 as bf16 pairs (even, odd), rounded to nearest with halves away from zero: 4 instructions for 32
// weights, where the conversion instruction and the interleaving would take twice as many.
static inline __m512i pack_pairs(__m512 even, __m512 odd) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    return _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_add_epi32(_mm512_castps_si512(odd), half));
}

// The weights of one tile as bf16 in the layout of a dense tile.
template <class Codec>
static void expand_tile(const Weight& w, int64_t tile, bf16* out) {
    const int64_t groups = w.k / w.group, steps = w.group / (4 * Codec::QUADS);
    const __m512 row_scale = _mm512_loadu_ps(w.row_scale + tile * 16);
    const char* b = w.data + tile * w.tile_bytes;
    for (int64_t g = 0; g < groups; g++) {
        const __m512 scale = _mm512_mul_ps(load_half(b), row_scale);
        __m512 offset = w.has_offset ? _mm512_mul_ps(load_half(b + 32), row_scale) : _mm512_setzero_ps();
        offset = _mm512_fnmadd_ps(scale, _mm512_set1_ps(float(w.zero)), offset);
        b += w.has_offset ? 64 : 32;
        for (int64_t s = 0; s < steps; s++, b += 64) {
            const __m512i v = _mm512_loadu_si512(b);
            for (int i = 0; i < 2 * Codec::QUADS; i++, out += 32) {
                const __m512 even = _mm512_fmadd_ps(Codec::value(v, 2 * i), scale, offset);
                const __m512 odd = _mm512_fmadd_ps(Codec::value(v, 2 * i + 1), scale, offset);
                _mm512_storeu_si512(out, pack_pairs(even, odd));
            }
        }
    }
}

// Rows of a block with two accumulators an output.
constexpr int GROUP_ROWS = 4;

template <class Codec>
static void group_tiles(const Task& t, int64_t first, int64_t last) {
    if (t.rows < t.w->expand_from) {
        for_vector_blocks(last - first, t.rows, [&](int64_t tile, auto nb) {
            auto block = [&](int64_t row, int64_t count) {
                with_rows(count, [&](auto mb) {
                    constexpr int MB = mb.value, NB = nb.value;
                    if constexpr (MB * NB <= 12) {
                        group_block<Codec, MB, NB>(t, row, first + tile);
                    } else if constexpr (MB <= GROUP_ROWS) {
                        group_block<Codec, MB, NB / 2>(t, row, first + tile);
                        group_block<Codec, MB, NB / 2>(t, row, first + tile + NB / 2);
                    }
                });
            };
            for_row_blocks(t.rows, GROUP_ROWS, block);
        });
        return;
    }
    static thread_local std::vector<bf16> buffer;
    const int64_t tile_size = t.w->k * 16;
    bf16* expanded = scratch(buffer, MAX_VECTORS * tile_size);
    auto expand = [&](int64_t tile, int count) {
        for (int n = 0; n < count; n++) expand_tile<Codec>(*t.w, tile + n, expanded + n * tile_size);
        return (const char*)expanded;
    };
    if (uses_amx(t)) {  // two tiles at a time: more would fall out of the first-level cache
        for (; first + 2 <= last; first += 2) amx_tiles<false, 2>(t, first, expand(first, 2), tile_size * 2);
        if (first < last) amx_tiles<false, 1>(t, first, expand(first, 1), tile_size * 2);
        return;
    }
    for_vector_blocks(last - first, t.rows, [&](int64_t tile, auto nb) {
        dense_rows<nb.value>(t, first + tile, expand(first + tile, nb.value), tile_size * 2);
    });
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
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) write_int8(t, row + m, tile + n, acc[m][n]);
}

// Symmetric int8 codes of one row: scale = max |x| / 127, codes = round(x / scale) clamped; and their sum.
static void quantize_row(const bf16* x, int64_t k, int8_t* codes, float* scale, int32_t* sum) {
    __m512 largest = _mm512_setzero_ps();
    for (int64_t j = 0; j < k; j += 16)
        largest = _mm512_max_ps(largest, _mm512_abs_ps(load_bf16(x + j, k - j)));
    *scale = std::max(_mm512_reduce_max_ps(largest) / 127.0f, 1.17549435e-38f);
    __m512 divisor = _mm512_set1_ps(*scale);
    __m512i total = _mm512_setzero_si512();
    for (int64_t j = 0; j < k; j += 16) {
        __m512i q = _mm512_cvtps_epi32(load_bf16(x + j, k - j) / divisor);
        q = _mm512_max_epi32(_mm512_min_epi32(q, _mm512_set1_epi32(127)), _mm512_set1_epi32(-128));
        total = _mm512_add_epi32(total, q);
        _mm_mask_storeu_epi8(codes + j, tail_mask(k - j), _mm512_cvtepi32_epi8(q));
    }
    *sum = _mm512_reduce_add_epi32(total);
}

// ---------------------------------------------------------------- entry

static void linear_row_block(const Task& t, int64_t first, int64_t last) {
    const Weight& w = *t.w;
    const bool amx = uses_amx(t);
    if (w.kind == INT4) return group_tiles<Int4>(t, first, last);
    if (w.kind == INT8) return group_tiles<Int8>(t, first, last);
    for_vector_blocks(last - first, t.rows, [&](int64_t tile, auto nb) {
        constexpr int NB = nb.value;
        const char* data = w.data + (first + tile) * w.tile_bytes;
        if (w.kind == BF16) {
            if (amx) return amx_tiles<false, NB>(t, first + tile, data, w.tile_bytes);
            return dense_rows<NB>(t, first + tile, data, w.tile_bytes);
        }
        if (amx) return amx_tiles<true, NB>(t, first + tile, data, w.tile_bytes);
        for_row_blocks(t.rows, MAX_ROWS, [&](int64_t row, int64_t count) {
            with_rows(count, [&](auto mb) { w8a8_block<mb.value, NB>(t, row, first + tile); });
        });
    });
}

// Bytes of x that stay in the second-level cache while the tiles pass by; many more rows are cut into blocks of this size.
constexpr int64_t ROW_BLOCK_BYTES = 1 << 20;

void linear_tiles(const Task& t, int64_t first, int64_t last) {
    const Weight& w = *t.w;
    const int64_t row_bytes = w.k * (w.kind == W8A8 ? 1 : 2);
    const int64_t most = std::max<int64_t>(256, ROW_BLOCK_BYTES / row_bytes);
    const int64_t blocks = (t.rows + most - 1) / most;
    const int64_t step = (t.rows / std::max<int64_t>(1, blocks) + 31) / 32 * 32;  // what last_rows counts in
    std::optional<TileRegisters> registers;
    if (uses_amx(t)) registers.emplace(false);
    if (blocks <= 1) return linear_row_block(t, first, last);
    for (int64_t row = 0, rows; row < t.rows; row += rows) {
        // No small rest: few rows would take another way through the kernels, for which x was not prepared.
        rows = t.rows - row < step * 3 / 2 ? t.rows - row : step;
        Task block = t;
        block.rows = rows;
        block.x = t.x + row * w.k;
        block.out = (char*)t.out + row * w.n * (t.out_float ? 4 : 2);
        if (w.kind == W8A8) {
            block.codes = t.codes + row * w.k;
            block.x_scale = t.x_scale + row;
            block.x_sum = t.x_sum + row;
        }
        linear_row_block(block, first, last);
    }
}

void reserve_input(Task& t, LinearScratch& memory) {
    const Weight& w = *t.w;
    if (!w.quantizes(t.rows)) return;
    const bool split = w.splits(t.rows);
    const int64_t groups = split ? w.k / w.group : 1;
    t.codes = scratch(memory.codes, padded_rows(t.rows) * w.k * (split ? 2 : 1));
    t.x_scale = scratch(memory.scales, t.rows * groups);
    t.x_sum = scratch(memory.sums, t.rows * groups);
}

void prepare_input(const Task& t, int64_t row) {
    const Weight& w = *t.w;
    if (w.splits(t.rows))
        split_row(w, t.x, row, t.codes, t.x_scale, t.x_sum);
    else
        quantize_row(t.x + row * w.k, w.k, t.codes + row * w.k, t.x_scale + row, t.x_sum + row);
}

}  // namespace octavo
