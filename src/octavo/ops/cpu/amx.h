// Matrix tiles (AMX) for products of many rows: a tile instruction multiplies 16 rows of x with 16 output rows at once.
//
// The layouts of linear.cpp and of the KV cache are AMX's own: 16 steps of 64 bytes of a weight tile, or 16 pairs of
// channels of 16 keys, are one tile register. In products: 0-3 sums (two tiles of rows times two of outputs), 4-5 rows of
// x, 6-7 weights. In attention: 0-3 sums, 4 queries, 5 keys, 6 weights of 16 keys, 7 their values.
#pragma once

#include "common.h"

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,amx-int8")

namespace octavo {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// The compiler does not know that tile instructions read memory, so it must have written everything before them.
static inline void finish_stores() { asm volatile("" ::: "memory"); }

// Each thread owns its tile registers; it sets them up before the first tile instruction and gives them back.
struct TileRegisters {
    explicit TileRegisters(bool attention) {
        TileConfig config;
        for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
        if (attention) config.row_bytes[6] = 32, config.rows[7] = 8;
        finish_stores();
        _tile_loadconfig(&config);
    }
    ~TileRegisters() { _tile_release(); }
};

// The compiler's tile operations are macros that take literal register numbers.
#define OCTAVO_MULTIPLY(c, a, b)    \
    do {                            \
        if constexpr (INT)          \
            _tile_dpbsud(c, a, b);  \
        else                        \
            _tile_dpbf16ps(c, a, b); \
    } while (0)

// sums[i * NT + j] [16][16] = rows of a (i: 16 rows, `lda` bytes a row) times b[j], over `steps` of 64 bytes a row.
// INT: a holds signed and b unsigned bytes, else both bfloat16 pairs.
template <bool INT, int MT, int NT>
void multiply_tiles(const char* a, int64_t lda, const char* b, int64_t ldb, int64_t steps, char* sums) {
    finish_stores();
    _tile_zero(0);
    if constexpr (NT == 2) _tile_zero(1);
    if constexpr (MT == 2) _tile_zero(2);
    if constexpr (MT == 2 && NT == 2) _tile_zero(3);
    for (int64_t s = 0; s < steps; s++) {
        _tile_loadd(4, a + s * 64, lda);
        _tile_loadd(6, b + s * 1024, 64);
        OCTAVO_MULTIPLY(0, 4, 6);
        if constexpr (NT == 2) {
            _tile_loadd(7, b + ldb + s * 1024, 64);
            OCTAVO_MULTIPLY(1, 4, 7);
        }
        if constexpr (MT == 2) {
            _tile_loadd(5, a + 16 * lda + s * 64, lda);
            OCTAVO_MULTIPLY(2, 5, 6);
            if constexpr (NT == 2) OCTAVO_MULTIPLY(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 64);
    if constexpr (NT == 2) _tile_stored(1, sums + 1024, 64);
    if constexpr (MT == 2) _tile_stored(2, sums + NT * 1024, 64);
    if constexpr (MT == 2 && NT == 2) _tile_stored(3, sums + 3072, 64);
}

#undef OCTAVO_MULTIPLY

// scores[16 rows][64 keys] = q[16 rows, `row_bytes` each] . k[i] of up to 4 vectors of 16 keys; row_bytes is 2 head_dim.
static inline void score_tiles(const char* q, int64_t row_bytes, const char* const (&k)[4], int64_t vectors,
                               int64_t k_stride, char* scores) {
#define OCTAVO_SCORE(i)                                                     \
    if (i < vectors) {                                                      \
        _tile_zero(i);                                                      \
        for (int64_t s = 0; s < row_bytes; s += 64) {                       \
            _tile_loadd(4, q + s, row_bytes);                               \
            _tile_loadd(5, k[i] + s / 4 * k_stride, k_stride);              \
            _tile_dpbf16ps(i, 4, 5);                                        \
        }                                                                   \
        _tile_stored(i, scores + 64 * i, 256);                              \
    }
    finish_stores();
    OCTAVO_SCORE(0)
    OCTAVO_SCORE(1)
    OCTAVO_SCORE(2)
    OCTAVO_SCORE(3)
#undef OCTAVO_SCORE
}

// sums[16 rows][16 columns], `sum_stride` bytes a row, += weights[16 rows][64 keys] . v[i]; for columns 0 .. 16 * COLUMNS.
template <int COLUMNS>
void value_tiles(const char* weights, const char* const (&v)[4], int64_t vectors, int64_t v_stride, char* sums,
                 int64_t sum_stride) {
    finish_stores();
    _tile_loadd(0, sums, sum_stride);
    if constexpr (COLUMNS > 1) _tile_loadd(1, sums + 64, sum_stride);
    if constexpr (COLUMNS > 2) _tile_loadd(2, sums + 128, sum_stride);
    if constexpr (COLUMNS > 2) _tile_loadd(3, sums + 192, sum_stride);
    for (int64_t i = 0; i < vectors; i++) {
        _tile_loadd(6, weights + 32 * i, 128);
        _tile_loadd(7, v[i], v_stride);
        _tile_dpbf16ps(0, 6, 7);
        if constexpr (COLUMNS > 1) {
            _tile_loadd(7, v[i] + 64, v_stride);
            _tile_dpbf16ps(1, 6, 7);
        }
        if constexpr (COLUMNS > 2) {
            _tile_loadd(7, v[i] + 128, v_stride);
            _tile_dpbf16ps(2, 6, 7);
            _tile_loadd(7, v[i] + 192, v_stride);
            _tile_dpbf16ps(3, 6, 7);
        }
    }
    _tile_stored(0, sums, sum_stride);
    if constexpr (COLUMNS > 1) _tile_stored(1, sums + 64, sum_stride);
    if constexpr (COLUMNS > 2) _tile_stored(2, sums + 128, sum_stride);
    if constexpr (COLUMNS > 2) _tile_stored(3, sums + 192, sum_stride);
}

}  // namespace octavo

#pragma GCC pop_options
