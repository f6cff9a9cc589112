// What the pairs of decode_attention.cu begin with; a lane has channels lane, lane + 32, ...

constexpr int CHANNELS = D / 32;  // a lane
constexpr int HEADS = GROUP * KV_HEADS, ROTARY_HALF = ROTARY / 2;

// The angles of a lane's channels, signed as x cos + partner sin wants them; 1 and 0 where nothing turns.
struct Angles { float cosine[CHANNELS], sine[CHANNELS]; };

__device__ __forceinline__ bool is_first_of_pair(int d) { return INTERLEAVED ? d % 2 == 0 : d < ROTARY_HALF; }
__device__ __forceinline__ int partner_of(int d) {
    return INTERLEAVED ? d ^ 1 : d < ROTARY_HALF ? d + ROTARY_HALF : d - ROTARY_HALF;
}

__device__ __forceinline__ Angles angles_of(const float* row, int lane) {
    Angles angles;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        const int d = lane + 32 * i, pair = INTERLEAVED ? d / 2 : d % (ROTARY_HALF ? ROTARY_HALF : 1);
        const bool turns = d < ROTARY;
        angles.cosine[i] = turns ? row[pair] : 1.0f;
        const float sine = turns ? row[ROTARY_HALF + pair] : 0.0f;
        angles.sine[i] = is_first_of_pair(d) ? -sine : sine;
    }
    return angles;
}

// A row's number as the projection means it.
__device__ __forceinline__ float projected(const u16* row, int column, float factor, const float* columns) {
    const float x = from_bf16(row[column]) * factor;
    return columns ? x * columns[column] : x;
}

// A head that begins at `column`, normed and rotated in float32.
template <bool NORMED>
__device__ __forceinline__ void turn(float (&out)[CHANNELS], const u16* row, int column, float factor, const float* columns,
                                     const u16* norm, const Angles& angles, float eps, int lane) {
    float own[CHANNELS], other[CHANNELS], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        const int d = lane + 32 * i;
        own[i] = projected(row, column + d, factor, columns);
        other[i] = d < ROTARY ? projected(row, column + partner_of(d), factor, columns) : 0.0f;
        squares += own[i] * own[i];
    }
    const float inverse = NORMED ? reciprocal_root(warp_sum(squares) / D + eps) : 1.0f;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        const int d = lane + 32 * i;
        if (NORMED) {
            own[i] *= inverse * from_bf16(norm[d]);
            if (d < ROTARY) other[i] *= inverse * from_bf16(norm[partner_of(d)]);
        }
        out[i] = own[i] * angles.cosine[i] + other[i] * angles.sine[i];
    }
}

// The newest key and value to their page, where they have one, and to what the pair begins with.
__device__ __forceinline__ void take_newest(Query& query, const Piece& p, const Pointers& given, const u16* row, float factor,
                                            const Angles& angles, const float (&q)[GROUP][CHANNELS], float scale, float eps,
                                            int lane) {
    float key[CHANNELS];
    turn<K_NORM>(key, row, (HEADS + p.head) * D, factor, given.columns, given.k_norm, angles, eps, lane);
    const long long slot = given.slots[p.request];
    const long long to = (slot / BLOCK_SIZE * KV_HEADS + p.head) * (BLOCK_SIZE * D) + slot % BLOCK_SIZE * D;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        const int d = lane + 32 * i;
        const u16 k = to_bf16(key[i]), v = to_bf16(projected(row, (HEADS + KV_HEADS + p.head) * D + d, factor, given.columns));
        if (slot >= 0) {
            given.k_cache[to + d] = k;
            given.v_cache[to + d] = v;
        }
        key[i] = from_bf16(k);
        query.value[d] = from_bf16(v);
    }
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < CHANNELS; i++) score += q[h][i] * key[i];
        score = warp_sum(score) * scale;
        if (lane == 0) query.scores[h] = score;
    }
}

// One warp, a few pairs ahead of those that multiply.
__device__ __forceinline__ void prepare_queries(Walk walk, const int* lengths, Query* queries, u64* ready, u64* used,
                                                const Pointers& given, int q_stride, float scale, float eps, int early, int lane) {
    int slot = 0;
    u32 parity = 1;
    Piece p;
    for (bool waited = false; advance(walk, lengths, p); waited = true) {
        Angles angles;
        if (FUSED) angles = angles_of(given.cos_sin + given.positions[p.request] * ROTARY, lane);
        if (early && !waited) wait_for_kernel_ahead();
        signal_wait(used + slot, parity);
        Query& query = queries[slot];
        const u16* row = given.q + (long long)p.request * q_stride;
        const float factor = given.scales ? given.scales[p.request] : 1.0f;
        float q[GROUP][CHANNELS];
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            const int column = (p.head * GROUP + h) * D;
            if (FUSED) turn<Q_NORM>(q[h], row, column, factor, given.columns, given.q_norm, angles, eps, lane);
#pragma unroll
            for (int i = 0; i < CHANNELS; i++) {
                const int d = lane + 32 * i;
                const u16 rounded = FUSED ? to_bf16(q[h][i]) : row[column + d];
                query.q[h * Q_STRIDE + d] = rounded;
                q[h][i] = from_bf16(rounded);
            }
        }
        if (FUSED && p.first == p.begin && p.length > 0) take_newest(query, p, given, row, factor, angles, q, scale, eps, lane);
        sync_warp();
        if (lane == 0) signal_arrive(ready + slot);
        if (++slot == SLOTS) {
            slot = 0;
            parity ^= 1;
        }
    }
}
