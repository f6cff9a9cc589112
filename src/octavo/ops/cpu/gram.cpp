// Products of matrices over their rows, total += left' right: what calibration gathers of a layer's inputs.
#include "shared_loop.h"

namespace octavo {

constexpr int64_t TOKENS = 1024;  // rows of the inputs that are packed at a time
constexpr int64_t TALL = 6, WIDE = 4, PANEL = WIDE * 16;
constexpr int64_t ROWS_A_TASK = 16 * TALL;
#if OCTAVO_LEVEL >= 2
constexpr int BLOCK_ROWS = 6, BLOCK_VECTORS = 4;
#else
constexpr int BLOCK_ROWS = 3, BLOCK_VECTORS = 2;
#endif
constexpr int64_t TOGETHER = 32;  // rows that are packed by one thread at a time

inline int64_t blocks(int64_t count, int64_t size) { return (count + size - 1) / size; }

inline int32_t pair(bf16 first, bf16 second) { return int32_t(uint32_t(first) | uint32_t(second) << 16); }

// Up to TOKENS rows of both sides as pairs of rows: `left` has the pairs of a column one after the other, `right` those
// of PANEL columns. Columns and rows that are missing are zeros.
struct Packed {
    std::vector<int32_t> left, right;
    int64_t left_columns, right_columns, pairs;

    Packed(int64_t left_columns, int64_t right_columns, int64_t tokens)
        : left_columns(left_columns), right_columns(right_columns), pairs(blocks(std::min(tokens, TOKENS), 2)) {
        left.resize(blocks(left_columns, TALL) * TALL * pairs);
        right.resize(blocks(right_columns, PANEL) * PANEL * pairs);
    }

    void put_left(const bf16* rows, int64_t first, int64_t count) {
        for (int64_t i = 0; i < left_columns; i++)
            for (int64_t s = 0; s < count; s++)
                left[i * pairs + first + s] = pair(rows[2 * s * left_columns + i], rows[(2 * s + 1) * left_columns + i]);
    }

    void put_right(const bf16* rows, int64_t first, int64_t count) {
        for (int64_t s = 0; s < count; s++) {
            const bf16 *even = rows + 2 * s * right_columns, *odd = even + right_columns;
            for (int64_t j = 0; j < right_columns; j += PANEL) {
                int32_t* out = &right[(j * pairs) + (first + s) * PANEL];
                for (int64_t c = 0; c < std::min(PANEL, right_columns - j); c++) out[c] = pair(even[j + c], odd[j + c]);
            }
        }
    }
};

// `count` rows of x, less those of `minus` if there are any (non-finite differences as 0), in `out`; then rows of zeros
// up to TOGETHER.
inline void take_rows(const bf16* x, const bf16* minus, int64_t count, int64_t columns, bf16* out) {
    for (int64_t j = 0; j < count * columns; j += 16) {
        const int64_t some = std::min<int64_t>(16, count * columns - j);
        float values[16];
        store(values, minus ? load_bf16(x + j, some) - load_bf16(minus + j, some) : load_bf16(x + j, some));
        if (minus)
            for (float& value : values) value = std::fabs(value) <= 3.0e38f ? value : 0.0f;
        store_bf16(out + j, load(values), some);
    }
    std::fill(out + count * columns, out + TOGETHER * columns, bf16(0));
}

// Adds the block of TALL rows from `i` and PANEL columns from `j` to total [left_columns, right_columns].
inline void add_block(const Packed& packed, int64_t i, int64_t j, float* total) {
    const int64_t columns = packed.right_columns;
    for (int64_t row = i; row < std::min(i + TALL, packed.left_columns); row += BLOCK_ROWS) {
        for (int64_t column = j; column < std::min(j + PANEL, columns); column += 16 * BLOCK_VECTORS) {
            const char* b[BLOCK_VECTORS];
            Vec acc[BLOCK_ROWS][BLOCK_VECTORS];
            for (int n = 0; n < BLOCK_VECTORS; n++) {
                b[n] = (const char*)&packed.right[j * packed.pairs + column - j + n * 16];
                for (auto& sums : acc) sums[n] = zeros();
            }
            multiply_panel(&packed.left[row * packed.pairs], packed.pairs, b, PANEL * 4, packed.pairs, acc);
            for (int64_t m = 0; m < std::min<int64_t>(BLOCK_ROWS, packed.left_columns - row); m++) {
                for (int64_t n = 0; n < BLOCK_VECTORS && column + n * 16 < columns; n++) {
                    float values[16], *out = total + (row + m) * columns + column + n * 16;
                    store(values, acc[m][n]);
                    for (int64_t c = 0; c < std::min<int64_t>(16, columns - column - n * 16); c++) out[c] += values[c];
                }
            }
        }
    }
}

}  // namespace octavo

using namespace octavo;

// total [m, n] += (left - minus)' right with left, minus (or null): [tokens, m], right: [tokens, n]; with `is_lower` only
// what is on the diagonal and below it is defined.
OCTAVO_EXPORT void octavo_add_product(float* total, const bf16* left, const bf16* minus, const bf16* right,
                                      int64_t tokens, int64_t m, int64_t n, int32_t is_lower) {
    Packed packed(m, n, tokens);
    const int64_t tall = blocks(m, ROWS_A_TASK), panels = blocks(n, PANEL);
    for (int64_t start = 0; start < tokens; start += TOKENS) {
        const int64_t count = std::min(TOKENS, tokens - start);
        if (count < std::min(TOKENS, tokens)) packed = Packed(m, n, count);
        shared_loop(count, TOGETHER, true, [&](int64_t first, int64_t last) {
            thread_local std::vector<bf16> buffer;
            bf16* rows = scratch(buffer, TOGETHER * std::max(m, n));
            const int64_t some = last - first, at = start + first;
            take_rows(left + at * m, minus ? minus + at * m : nullptr, some, m, rows);
            packed.put_left(rows, first / 2, blocks(some, 2));
            take_rows(right + at * n, nullptr, some, n, rows);
            packed.put_right(rows, first / 2, blocks(some, 2));
        });
        shared_loop(tall * panels, 1, true, [&](int64_t task, int64_t) {
            const int64_t j = task / tall * PANEL, top = task % tall * ROWS_A_TASK;
            for (int64_t i = top; i < std::min(top + ROWS_A_TASK, m); i += TALL)
                if (!is_lower || i + TALL > j) add_block(packed, i, j, total);
        });
    }
}
