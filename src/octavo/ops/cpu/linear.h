// A packed weight and the product with it, for one thread of a parallel region.
#pragma once

#include "team.h"

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
    int32_t zero;         // code that means 0: 8 for 4-bit symmetric weights, 128 for 8 bits, else 0
    int32_t expand_from;  // 4 and 8 bits: from this many rows on, expand tiles to bf16 first
    int32_t amx_from;     // from this many rows on, use matrix tiles (INT32_MAX where there are none)
    int32_t padding;

    int64_t tiles() const { return (n + 15) / 16; }
    bool splits(int64_t rows) const { return (kind == INT4 || kind == INT8) && rows < expand_from; }
    bool quantizes(int64_t rows) const { return kind == W8A8 || splits(rows); }
};

struct Task {
    const Weight* w;
    const bf16* x;  // [M, K]
    int64_t rows;
    void* out;  // [M, N] bf16 or float
    bool out_float;
    const bf16* bias;
    // What prepare_input makes of x, as the kernels of this level read it; null where they read x itself.
    // AVX-512: W8A8 [M, K] int8; few rows of groups [M, K / 4, 2, 4], high and low plane.
    // AVX2: float32 [M, K] for bf16 weights, else int16 [M, K] in the order of linear_avx2.cpp.
    int8_t* codes;
    float* x_scale;  // W8A8 [M]; groups [M, groups]
    int32_t* x_sum;  // sums of the quantized x, same shape as x_scale
    const char* last_rows;  // AMX: a copy of the last rows % 32 rows of x filled up, or null if x may be read past
};

// Rows that matrix tiles read: whole tiles of 16.
inline int64_t padded_rows(int64_t rows) { return (rows + 15) / 16 * 16; }

struct LinearScratch {
    std::vector<float> scales;
    std::vector<int8_t> codes;
    std::vector<int32_t> sums;
    std::vector<char> last_rows;
};

// Points the task to memory for the prepared x, if it needs some. Not for several threads at once.
void reserve_input(Task& t, LinearScratch& memory);
// Quantizes or converts one row of x.
void prepare_input(const Task& t, int64_t row);
// The outputs of tiles first .. last.
void linear_tiles(const Task& t, int64_t first, int64_t last);

inline void write(const Task& t, int64_t row, int64_t tile, Vec y) {
    const int64_t n = tile * 16, count = t.w->n - n;
    if (t.bias) y = y + load_bf16(t.bias + n, count);
    if (t.out_float)
        store((float*)t.out + row * t.w->n + n, y, count);
    else
        store_bf16((bf16*)t.out + row * t.w->n + n, y, count);
}

}  // namespace octavo
