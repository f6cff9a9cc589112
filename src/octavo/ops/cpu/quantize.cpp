// Symmetric integer grids for weights: the scale of a group that leaves the least weighed squared error, and that error.
#include "shared_loop.h"

namespace octavo {

constexpr int64_t LANES = 16;
constexpr int64_t PARALLEL_FROM = 32768;  // values; below it a team costs more than it saves

inline int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

inline Vec clamped(Vec x, Vec low, Vec high) { return minimum(maximum(x, low), high); }

// The values of a group as they are looked through, and the weights of their errors; zeros up to whole vectors.
struct Group {
    const float* values;
    const float* importance;
    int64_t size;  // a multiple of LANES

    // The value of the largest magnitude.
    float peak() const {
        Vec most = zeros(), least = zeros();
        for (int64_t j = 0; j < size; j += LANES) {
            most = maximum(most, load(values + j));
            least = minimum(least, load(values + j));
        }
        const float high = largest(most), low = -largest(zeros() - least);
        return high >= -low ? high : low;
    }
};

struct Levels {
    float low, high;
    const float* starts;  // scales to start from are peak / start
    int64_t count;
};

// For each start, with either sign, the values are rounded to levels q; the best scale for those is
// sum(h v q) / sum(h q q), which leaves sum(h v v) - sum(h v q)^2 / sum(h q q).
inline float best_scale(const Group& group, float peak, const Levels& levels) {
    if (peak == 0) return 0;
    const Vec low = splat(levels.low), high = splat(levels.high);
    float best = peak / levels.low, best_gain = -1;
    for (int64_t i = 0; i < levels.count; i++) {
        const Vec factor = splat(levels.starts[i] / peak);
        Vec cross[2] = {zeros(), zeros()}, energy[2] = {zeros(), zeros()};
        for (int64_t j = 0; j < group.size; j += LANES) {
            const Vec v = load(group.values + j), h = load(group.importance + j), hv = h * v, x = v * factor;
            const Vec q[2] = {nearest(clamped(x, low, high)), nearest(clamped(zeros() - x, low, high))};
            for (int s = 0; s < 2; s++) {
                cross[s] = fmadd(hv, q[s], cross[s]);
                energy[s] = fmadd(h * q[s], q[s], energy[s]);
            }
        }
        for (int s = 0; s < 2; s++) {
            const float c = sum(cross[s]), e = std::max(sum(energy[s]), 1e-30f), gain = c * c / e;
            if (gain > best_gain) best_gain = gain, best = c / e;
        }
    }
    return best;
}

// What a thread works on: a group's values, and the importance of all inputs, group by group, padded.
struct Buffers {
    std::vector<float> values, importance;

    // importance in units of factors^2; if it is null, all values count the same as they are rounded.
    void weigh(const float* given, const float* factors, int64_t count, int64_t width) {
        const int64_t step = padded(width);
        importance.assign((count + width - 1) / width * step, 0.0f);
        for (int64_t j = 0; j < count; j++) {
            const float f = factors ? factors[j] : 1.0f;
            importance[j / width * step + j % width] = given ? given[j] / (f * f) : 1.0f;
        }
        values.assign(step, 0.0f);
    }
};

constexpr float LEAST_SCALE = 1.1920929e-7f;  // float32's epsilon, in place of zero

// out = (rounded(v) / f - w) for a group of weights w with v = w f, its magnitudes cut to `cut` of the largest.
inline void round_group(const float* w, const float* f, float* out, int64_t count, const float* importance, float cut,
                        const Levels& levels, float* values) {
    for (int64_t j = 0; j < count; j++) values[j] = f ? w[j] * f[j] : w[j];
    std::fill(values + count, values + padded(count), 0.0f);
    const Group group{values, importance, padded(count)};
    float peak = group.peak();
    if (cut < 1) {
        const float bound = cut * std::fabs(peak);
        for (int64_t j = 0; j < count; j++) values[j] = std::min(std::max(values[j], -bound), bound);
        peak *= cut;
    }
    const float best = best_scale(group, peak, levels), scale = best == 0 ? LEAST_SCALE : best;
    const Vec step = splat(scale), low = splat(levels.low), high = splat(levels.high);
    for (int64_t j = 0; j < count; j += LANES)
        store(values + j, nearest(clamped(load(values + j) / step, low, high)) * step);
    for (int64_t j = 0; j < count; j++) out[j] = (f ? values[j] / f[j] : values[j]) - w[j];
}

#if OCTAVO_LEVEL >= 2
constexpr int TRIED = 6, VECTORS = 4;  // rows and columns of a register block
#else
constexpr int TRIED = 3, VECTORS = 2;
#endif

// energy[m] += sum over NB vectors of columns, from `first` on, of (q C) q for each of TRIED rows q [size] of levels.
template <int NB>
inline void add_energy(const float* levels, const float* corner, int64_t size, int64_t first, Vec (&energy)[TRIED]) {
    Vec product[TRIED][NB];
    for (auto& row : product)
        for (Vec& x : row) x = zeros();
    for (int64_t k = 0; k < size; k++) {
        Vec c[NB];
        for (int n = 0; n < NB; n++) c[n] = load(corner + k * size + first + n * LANES);
        for (int m = 0; m < TRIED; m++) {
            const Vec q = splat(levels[m * size + k]);
            for (int n = 0; n < NB; n++) product[m][n] = fmadd(q, c[n], product[m][n]);
        }
    }
    for (int m = 0; m < TRIED; m++)
        for (int n = 0; n < NB; n++)
            energy[m] = fmadd(product[m][n], load(levels + m * size + first + n * LANES), energy[m]);
}

// Of scales s to try for a group's values, the one with the least s q C q' s - 2 s q wanted', q the levels of values / s.
// values, wanted: [size], corner: [size, size], levels: room for TRIED x size; size a multiple of LANES.
inline float least_error(const float* values, const float* wanted, const float* corner, int64_t size,
                         const float* scales, int64_t count, float low, float high, float* levels) {
    float best = scales[0], least = HUGE_VALF;
    for (int64_t first = 0; first < count; first += TRIED) {
        Vec energy[TRIED], cross[TRIED];
        for (int m = 0; m < TRIED; m++) {
            energy[m] = cross[m] = zeros();
            const Vec step = splat(scales[std::min(first + m, count - 1)]);
            for (int64_t j = 0; j < size; j += LANES) {
                const Vec q = nearest(clamped(load(values + j) / step, splat(low), splat(high)));
                store(levels + m * size + j, q);
                cross[m] = fmadd(q, load(wanted + j), cross[m]);
            }
        }
        int64_t j = 0;
        for (; j + VECTORS * LANES <= size; j += VECTORS * LANES) add_energy<VECTORS>(levels, corner, size, j, energy);
        for (; j < size; j += LANES) add_energy<1>(levels, corner, size, j, energy);
        for (int m = 0; m < TRIED && first + m < count; m++) {
            const float s = scales[first + m], error = (sum(energy[m]) * s - 2 * sum(cross[m])) * s;
            if (error < least) least = error, best = s;
        }
    }
    return best;
}

// Rows of `columns` floats to where they are `size` floats apart.
inline float* spread(const float* x, int64_t rows, int64_t columns, int64_t size, float* out) {
    for (int64_t i = 0; i < rows; i++) std::memcpy(out + i * size, x + i * columns, columns * sizeof(float));
    return out;
}

}  // namespace octavo

using namespace octavo;

// values: [groups, width], importance: [width] or null; scales: [groups]. starts: `count` of them, as in Levels.
OCTAVO_EXPORT void octavo_fit_scales(const float* values, const float* importance, float* scales, int64_t groups,
                                     int64_t width, float low, float high, const float* starts, int64_t count) {
    shared_loop(groups, 64, groups * width >= PARALLEL_FROM, [&](int64_t first, int64_t last) {
        thread_local Buffers buffers;
        buffers.weigh(importance, nullptr, width, width);
        for (int64_t i = first; i < last; i++) {
            std::memcpy(buffers.values.data(), values + i * width, width * sizeof(float));
            const Group group{buffers.values.data(), buffers.importance.data(), padded(width)};
            scales[i] = best_scale(group, group.peak(), {low, high, starts, count});
        }
    });
}

// weight, out: [rows, columns], importance, factors: [columns] or null, groups of `width` columns.
OCTAVO_EXPORT void octavo_rounding_difference(const float* weight, const float* importance, const float* factors,
                                              float* out, int64_t rows, int64_t columns, int64_t width, float cut,
                                              float low, float high, const float* starts, int64_t count) {
    shared_loop(rows, 16, rows * columns >= PARALLEL_FROM, [&](int64_t first, int64_t last) {
        thread_local Buffers buffers;
        buffers.weigh(importance, factors, columns, width);
        for (int64_t i = first; i < last; i++) {
            for (int64_t j = 0; j < columns; j += width) {
                const int64_t at = i * columns + j;
                round_group(weight + at, factors ? factors + j : nullptr, out + at, std::min(width, columns - j),
                            buffers.importance.data() + j / width * padded(width), cut, {low, high, starts, count},
                            buffers.values.data());
            }
        }
    });
}

// values, wanted: [rows, width], corner: [width, width], scales: [rows, count] to try; best: [rows].
OCTAVO_EXPORT void octavo_pick_scales(const float* values, const float* wanted, const float* corner,
                                      const float* scales, float* best, int64_t rows, int64_t width, int64_t count,
                                      float low, float high) {
    const int64_t size = padded(width);
    std::vector<float> square(size * size, 0.0f);
    spread(corner, width, width, size, square.data());
    shared_loop(rows, 16, rows * width * width >= PARALLEL_FROM, [&](int64_t first, int64_t last) {
        thread_local std::vector<float> buffer;
        buffer.assign((2 + TRIED) * size, 0.0f);
        float *v = buffer.data(), *w = v + size, *levels = w + size;
        for (int64_t i = first; i < last; i++) {
            spread(values + i * width, 1, width, size, v);
            spread(wanted + i * width, 1, width, size, w);
            best[i] = least_error(v, w, square.data(), size, scales + i * count, count, low, high, levels);
        }
    });
}
