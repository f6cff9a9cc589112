// The two products of attention.cpp by matrix tiles, 16 query rows at a time; rows past the last hold anything and are not
// used.
#pragma once

#include "amx.h"
#include "attention.h"

namespace octavo {

static void amx_score_step(const AttentionTask& t, Tile& tile, const char* const (&k)[4], int64_t vectors,
                           int64_t rows) {
    const int64_t d = t.cache->head_dim, stride = t.cache->block_size * 4;
    for (int64_t row = 0; row < rows; row += 16)
        score_tiles((const char*)(tile.q + row * d), d * 2, k, vectors, stride, (char*)tile.scores[row]);
}

static void amx_value_step(const AttentionTask& t, Tile& tile, const bf16* const (&v)[4], int64_t keys, int64_t rows) {
    const int64_t d = t.cache->head_dim, vectors = (keys + 15) / 16, rest = keys % 16;
    const bf16* values[4];
    for (int64_t i = 0; i < vectors; i++) values[i] = v[i];
    if (rest) {  // keys past the last hold anything, even NaN: multiply with zeros instead
        std::memset(tile.tail, 0, 16 * d * sizeof(bf16));
        std::memcpy(tile.tail, v[vectors - 1], rest / 2 * 2 * d * sizeof(bf16));
        const int64_t odd = rest / 2 * 2 * d;
        if (rest % 2) copy_even(tile.tail + odd, v[vectors - 1] + odd, 2 * d);
        values[vectors - 1] = tile.tail;
    }
    for (int64_t r = 0; r < rows; r++) {
        if (tile.correction[r] == 1.0f) continue;
        const Vec factor = splat(tile.correction[r]);
        for (int64_t j = 0; j < d; j += 16) store(tile.sum + r * d + j, load(tile.sum + r * d + j) * factor);
    }
    for_vector_blocks(d / 16, rows, [&](int64_t column, auto nb) {
        const char* b[4];
        for (int64_t i = 0; i < vectors; i++) b[i] = (const char*)(values[i] + column * 32);
        for (int64_t row = 0; row < rows; row += 16)
            value_tiles<nb.value>((const char*)tile.weights[row], b, vectors, d * 4,
                                  (char*)(tile.sum + row * d + column * 16), d * 4);
    });
}

}  // namespace octavo
