// Products of a few to many rows with a packed weight: bfloat16, 4-bit and 8-bit groups, and int8 x int8.
//
// Every layout is made of tiles of 16 output rows, so that a vector register holds one output a lane and no sum across
// lanes is needed. Within a tile the factors of one instruction's inner product (2 bf16 or 4 int8 along k) are adjacent.
//   bf16  tile: [K / 2][16][2] bf16
//   int4  tile: groups of {scale fp16 [16], offset fp16 [16] if there are offsets, codes [group / 8][16] uint32};
//         byte i of a word holds k = 8 j + i in its low and k = 8 j + 4 + i in its high half
//   int8  tile: groups of {scale, offset as above, codes [group / 4][16][4] uint8, code + 128}
//   w8a8  tile: [K / 4][16][4] uint8, code + 128 (the instruction wants one unsigned factor)
// Outputs are multiplied by row_scale [N rounded up to 16] float32 in the end (not for bf16).
// The products themselves are in linear_avx512.cpp and linear_avx2.cpp.
#include "linear.h"

namespace octavo {

// The last rows % 32 rows, `row_bytes` each, filled up to 16 or 32: the caller's tensor must not be read past its end.
static const char* copy_last_rows(const char* x, int64_t rows, int64_t row_bytes, std::vector<char>& buffer) {
    const int64_t count = rows % 32, padded = padded_rows(count);
    if (count == padded) return nullptr;
    char* copy = scratch(buffer, padded * row_bytes);
    std::memcpy(copy, x + (rows - count) * row_bytes, count * row_bytes);
    std::memset(copy + count * row_bytes, 0, (padded - count) * row_bytes);
    return copy;
}

// Element j of the row that is `lane` of a tile, before the row's scale.
static float element(const Weight& w, const char* tile, int64_t lane, int64_t j) {
    if (w.kind == BF16) return to_float(((const bf16*)tile)[j / 2 * 32 + lane * 2 + j % 2]);
    if (w.kind == W8A8) return float(((const uint8_t*)tile)[j / 4 * 64 + lane * 4 + j % 4] - 128);
    const int64_t header = w.has_offset ? 64 : 32;
    const char* group = tile + j / w.group * (header + w.group * (w.kind == INT4 ? 8 : 16));
    const uint16_t* halves = (const uint16_t*)group;
    const uint8_t* codes = (const uint8_t*)group + header;
    j %= w.group;
    int code;
    if (w.kind == INT8) {
        code = codes[j / 4 * 64 + lane * 4 + j % 4];
    } else {
        code = codes[j / 8 * 64 + lane * 4 + j % 4];
        code = j % 8 < 4 ? code & 15 : code >> 4;
    }
    return _cvtsh_ss(halves[lane]) * float(code - w.zero) + (w.has_offset ? _cvtsh_ss(halves[16 + lane]) : 0.0f);
}

}  // namespace octavo

using namespace octavo;

OCTAVO_EXPORT void octavo_linear(const Weight* w, const bf16* x, int64_t rows, void* out, int32_t out_float,
                                 const bf16* bias) {
    static thread_local LinearScratch memory;
    Task t{w, x, rows, out, out_float != 0, bias, nullptr, nullptr, nullptr, nullptr};
    reserve_input(t, memory);
    const bool early = rows < 8;  // a barrier costs more than what the threads would share
    if (t.codes && early)
        for (int64_t m = 0; m < rows; m++) prepare_input(t, m);
    if (rows >= w->amx_from && w->kind != W8A8)
        t.last_rows = copy_last_rows((const char*)x, rows, w->k * 2, memory.last_rows);
    parallel(w->n * w->k > 8192, [&](Team& team) {
        if (t.codes && !early) {
            team.each(rows, [&](int64_t m) { prepare_input(t, m); });
            team.barrier();
        }
        team.share(w->tiles(), MAX_VECTORS, [&](int64_t first, int64_t last) { linear_tiles(t, first, last); });
    });
}

// out[i, :] = row ids[i] of the weight, dequantized; rows outside 0 .. n are zero.
OCTAVO_EXPORT void octavo_rows(const Weight* w, const int64_t* ids, int64_t count, void* out, int32_t out_float) {
    const int64_t k = w->k;
    auto row = [&](int64_t i) {
        const bool valid = ids[i] >= 0 && ids[i] < w->n;
        const char* tile = w->data + (ids[i] >> 4) * w->tile_bytes;
        const float scale = valid && w->row_scale ? w->row_scale[ids[i]] : 1.0f;
        for (int64_t j = 0; j < k; j++) {
            const float value = valid ? element(*w, tile, ids[i] & 15, j) * scale : 0.0f;
            if (out_float)
                ((float*)out)[i * k + j] = value;
            else
                ((bf16*)out)[i * k + j] = to_bf16(value);
        }
    };
    parallel(count >= 64, [&](Team& team) { team.each(count, row); });
}
