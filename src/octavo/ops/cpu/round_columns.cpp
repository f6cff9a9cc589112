// The inner loop of GPTQ: columns of a weight are rounded one after the other, those after them make good the error.
#include "shared_loop.h"

namespace octavo {

constexpr int64_t SLICE = 64;  // rows of the weight, which do not depend on each other, that are worked on together
constexpr int64_t VECTORS = SLICE / 16;

// A weight on its side; see `Columns` in octavo.ops.gptq_columns. zeros and keep may be null.
struct Columns {
    float *work, *levels, *errors;
    const float* factor;
    const int32_t* groups;
    const float *steps, *zeros;
    const bool* keep;
    int64_t rows, factor_row, factor_column;  // the last two: floats between the factor's rows and columns
};

inline Vec load_some(const float* x, int64_t count) {
    if (count >= 16) return load(x);
    float values[16] = {};
    if (count > 0) std::memcpy(values, x, count * sizeof(float));
    return load(values);
}
inline void store_some(float* y, Vec x, int64_t count) {
    if (count > 0) store(y, x, std::min<int64_t>(count, 16));
}

// Columns start .. stop of the rows from `first` on, in `tile` [stop - start, SLICE]; `factor` has their part of the
// factor, [stop - start, stop - start].
inline void round_slice(const Columns& c, const float* factor, int64_t start, int64_t stop, int64_t first, float low,
                        float high, float* tile) {
    const int64_t count = std::min(SLICE, c.rows - first);
    for (int64_t k = start; k < stop; k++)
        for (int64_t v = 0; v < VECTORS; v++)
            store(tile + (k - start) * SLICE + v * 16, load_some(c.work + k * c.rows + first + v * 16, count - v * 16));
    for (int64_t k = start; k < stop; k++) {
        const float* shares = factor + (k - start) * (stop - start);
        const int64_t group = c.groups[k] * c.rows + first, at = k * c.rows + first;
        const Vec diagonal = splat(shares[k - start]);
        Vec error[VECTORS];
        for (int64_t v = 0; v < VECTORS; v++) {
            const int64_t left = count - v * 16, j = v * 16;
            const Vec value = load(tile + (k - start) * SLICE + j);
            const Vec step = left > 0 ? load_some(c.steps + group + j, left) : splat(1.0f);
            const Vec zero = c.zeros && left > 0 ? load_some(c.zeros + group + j, left) : zeros();
            Vec level = nearest(minimum(maximum(value / step + zero, splat(low)), splat(high))) - zero;
            if (c.keep) {
                float kept[16];
                for (int64_t i = 0; i < 16; i++) kept[i] = i < left && c.keep[at + j + i] ? 1.0f : 0.0f;
                level = level * load(kept);
            }
            error[v] = fnmadd(level, step, value) / diagonal;
            store_some(c.levels + at + j, level, left);
            store_some(c.errors + at + j, error[v], left);
        }
        for (int64_t later = k + 1; later < stop; later++) {
            const Vec share = splat(shares[later - start]);
            float* values = tile + (later - start) * SLICE;
            for (int64_t v = 0; v < VECTORS; v++)
                store(values + v * 16, fnmadd(share, error[v], load(values + v * 16)));
        }
    }
}

}  // namespace octavo

using namespace octavo;

OCTAVO_EXPORT void octavo_round_columns(const Columns* columns, int64_t start, int64_t stop, float low, float high) {
    const int64_t size = stop - start;
    std::vector<float> factor(size * size);
    for (int64_t i = 0; i < size; i++)
        for (int64_t j = i; j < size; j++)
            factor[i * size + j] =
                columns->factor[(start + i) * columns->factor_row + (start + j) * columns->factor_column];
    shared_loop((columns->rows + SLICE - 1) / SLICE, 1, true, [&](int64_t slice, int64_t) {
        thread_local std::vector<float> buffer;
        float* tile = scratch(buffer, size * SLICE);
        round_slice(*columns, factor.data(), start, stop, slice * SLICE, low, high, tile);
    });
}
