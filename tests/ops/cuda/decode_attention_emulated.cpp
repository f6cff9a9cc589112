#include "emulator.h"
#include "decode_attention.cu"

extern "C" int shared_bytes() { return 1024 + STAGES * STAGE_BYTES + 2 * SUMS * 4; }

extern "C" void run(int blocks, const u8* k_cache, const u8* v_cache, long long rows, const u16* q, const float* scales,
                    const float* columns, const long long* positions, const long long* slots, const float* cos_sin,
                    const u16* q_norm, const u16* k_norm, const int* tables, const int* seq_lens, const int* counts, u16* out,
                    float* parts, float* part_stats, int* arrived, int requests, int least, int table_stride, int q_stride,
                    float scale, float eps) {
    const TensorMap k_map = {k_cache, (uint64_t)rows, D * 2, 128}, v_map = {v_cache, (uint64_t)rows, D * 2, 128};
    const Pointers given = {q, scales, columns, positions, slots, cos_sin, q_norm, k_norm, (u16*)k_cache, (u16*)v_cache};
    emulator::launch({blocks, 1, 1}, MULTIPLIERS + 64, shared_bytes(), [=] {
        decode_attention(k_map, v_map, given, tables, seq_lens, counts, out, parts, (Stats*)part_stats, arrived, requests, least,
                         table_stride, q_stride, scale, eps, 1);
    });
}
