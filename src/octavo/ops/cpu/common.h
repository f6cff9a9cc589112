// What the kernels share: sixteen lanes of float32, exponentials, blocks of registers, per-caller scratch memory.
//
// The same sources are built twice, for each OCTAVO_LEVEL: 1 for AVX2, 2 for AVX-512 (level.cpp). In libraries of their
// own, since the linker keeps one copy of a template of the standard library, whatever processor it was compiled for.
// Everything that includes this file may only be called where octavo_cpu_level() says so.
#pragma once

#include <omp.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#if OCTAVO_LEVEL >= 2
#include "vec_avx512.h"
#else
#include "vec_avx2.h"
#endif

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

namespace octavo {

inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// 2^x by a polynomial on [-1/2, 1/2] (relative error below 3e-7); below 2^-126 the result is 2^-126, not 0.
inline Vec exp2_of(Vec x) {
    x = minimum(maximum(x, splat(-126.0f)), splat(127.5f));
    const Vec n = nearest(x), f = x - n;
    Vec p = splat(1.5403530e-4f);
    p = fmadd(p, f, splat(1.3333558e-3f));
    p = fmadd(p, f, splat(9.6181291e-3f));
    p = fmadd(p, f, splat(5.5504109e-2f));
    p = fmadd(p, f, splat(2.4022651e-1f));
    p = fmadd(p, f, splat(6.9314718e-1f));
    p = fmadd(p, f, splat(1.0f));
    return times_power_of_2(p, n);
}
constexpr float LOG2E = 1.44269504f;
inline Vec exp_of(Vec x) { return exp2_of(x * splat(LOG2E)); }
inline Vec tanh_of(Vec x) {
    const Vec e = exp2_of(x * splat(2 * LOG2E)), one = splat(1.0f);
    return one - splat(2.0f) / (e + one);
}

// Memory that a calling thread reuses from call to call, so that a kernel allocates nothing.
template <class T>
T* scratch(std::vector<T>& buffer, size_t count) {
    if (buffer.size() < count) buffer.resize(count);
    return buffer.data();
}

constexpr int MAX_HEAD_DIM = 512;  // the wrappers in functions.py refuse more, and more than 48 query heads a key head

struct Cache {  // mirrored by octavo.ops.cpu.functions._CacheStruct; the interleaved order of octavo.ops.KVCache
    bf16 *k, *v;
    int64_t num_kv_heads, block_size, head_dim;
};

// Split `rows` into the fewest blocks of at most `limit`, as equal as possible, and call body(first, count).
template <class F>
inline void for_row_blocks(int64_t rows, int64_t limit, F body) {
    int64_t blocks = (rows + limit - 1) / limit;
    for (int64_t b = 0, first = 0; b < blocks; b++) {
        int64_t count = (rows - first + blocks - b - 1) / (blocks - b);
        body(first, count);
        first += count;
    }
}

// body(v, integral_constant<4 | 2 | 1>) over `vectors`, as many at once as a block of `rows` has registers for.
template <class F>
inline void for_vector_blocks(int64_t vectors, int64_t rows, F body) {
    const int widest = most_vectors(rows);
    int64_t v = 0;
    if (widest >= 4)
        for (; v + 4 <= vectors; v += 4) body(v, std::integral_constant<int, 4>());
    if (widest >= 2)
        for (; v + 2 <= vectors; v += 2) body(v, std::integral_constant<int, 2>());
    for (; v < vectors; v++) body(v, std::integral_constant<int, 1>());
}

// Call body(integral_constant<rows>) for rows 1..MAX_ROWS.
template <class F>
inline void with_rows(int64_t rows, F body) {
    switch (rows) {
        case 1: return body(std::integral_constant<int, 1>());
        case 2: return body(std::integral_constant<int, 2>());
        case 3: return body(std::integral_constant<int, 3>());
        case 4: return body(std::integral_constant<int, 4>());
        case 5: return body(std::integral_constant<int, 5>());
        default: return body(std::integral_constant<int, 6>());
    }
}

// body(row, v, integral_constant<rows>, integral_constant<vectors>) for blocks that fit in the registers.
template <class F>
inline void for_blocks(int64_t rows, int64_t vectors, F body) {
    for_vector_blocks(vectors, rows, [&](int64_t v, auto nb) {
        for_row_blocks(rows, most_rows(nb.value), [&](int64_t row, int64_t count) {
            with_rows(count, [&](auto mb) {
                if constexpr (mb.value <= most_rows(nb.value)) body(row, v, mb, nb);
            });
        });
    });
}

}  // namespace octavo
