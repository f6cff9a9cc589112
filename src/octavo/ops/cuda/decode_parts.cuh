// How parts of a pair of decode_attention.cu become its output: those of a block's warps, and those of blocks.

// Four neighbouring outputs out of `count` parts, the sum of their weights and what all of it is relative to.
struct Four { float total[4]; Stats stats; };

template <typename Part, typename Values>
__device__ __forceinline__ Four merged(int count, Part part, Values values) {
    Four all = {{}, {FLOOR, 0.0f}};
#pragma unroll
    for (int i = 0; i < count; i++) all.stats.maximum = max(all.stats.maximum, part(i).maximum);
#pragma unroll
    for (int i = 0; i < count; i++) {
        const Stats one = part(i);
        const float weight = power_of_2(one.maximum - all.stats.maximum);
        const Words bits = values(i);
        all.stats.sum += one.sum * weight;
#pragma unroll
        for (int c = 0; c < 4; c++) all.total[c] += number_of(bits.w[c]) * weight;
    }
    return all;
}

__device__ __forceinline__ void write(u16* out, const Four& all) {
    const float inverse = 1.0f / all.stats.sum;
    *(uint2*)out = {pair_of_bf16(all.total[0] * inverse, all.total[1] * inverse),
                    pair_of_bf16(all.total[2] * inverse, all.total[3] * inverse)};
}

// What the warps have of a pair, together: to `out`, or where other blocks have parts of it to memory, and the last of those
// adds them. A block has room for two parts, of a pair that began before its stretch and of one that begins in it.
__device__ __forceinline__ void finish(const Piece& p, int size, const float* sums, const Stats* stats, u16* out, float* parts,
                                       Stats* part_stats, int* arrived, int* flag, int thread) {
    const int owner = p.begin / size, count = (p.end - 1) / size - owner + 1;
    const int own = 2 * (p.first / size) + (p.first == p.begin ? 1 : 0);
    out += ((long long)p.request * KV_HEADS + p.head) * (GROUP * D);
    for (int i = 4 * thread; i < GROUP * D; i += 4 * MULTIPLIERS) {
        const int q = i / D;
        const Four all = merged(
            WARPS, [&](int w) { return stats[w * GROUP + q]; },
            [&](int w) { return *(const Words*)(sums + (w * GROUP + q) * SUM_STRIDE + i % D); });
        if (count == 1) {
            write(out + i, all);
            continue;
        }
#pragma unroll
        for (int c = 0; c < 4; c++) parts[own * (GROUP * D) + i + c] = all.total[c];
        if (i % D == 0) part_stats[own * GROUP + q] = all.stats;
    }
    if (count == 1) return;
    sync_multipliers(MULTIPLIERS);
    if (thread == 0) {
        *flag = arrive(arrived + owner) == count - 1;
        if (*flag) arrived[owner] = 0;  // for the next launch
    }
    sync_multipliers(MULTIPLIERS);
    if (!*flag) return;
    for (int i = 4 * thread; i < GROUP * D; i += 4 * MULTIPLIERS) {
        const auto of_part = [&](int part) { return 2 * (owner + part) + (part == 0 ? 1 : 0); };
        write(out + i, merged(
            count,
            [&](int part) {
                const float* from = (const float*)(part_stats + of_part(part) * GROUP + i / D);
                return Stats{load_partial(from), load_partial(from + 1)};
            },
            [&](int part) { return load_partials(parts + of_part(part) * (GROUP * D) + i); }));
    }
}
