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

// A head's numbers before norm and rotation, and those of their partners.
struct Raw { float own[CHANNELS], other[CHANNELS]; };

__device__ __forceinline__ Raw load_head(const u16* row, int column, float factor, const float* columns, int lane) {
    Raw raw;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        const int d = lane + 32 * i;
        raw.own[i] = projected(row, column + d, factor, columns);
        raw.other[i] = d < ROTARY ? projected(row, column + partner_of(d), factor, columns) : 0.0f;
    }
    return raw;
}

// A head normed and rotated in float32, rounded.
template <bool NORMED>
__device__ __forceinline__ void turn(u16 (&out)[CHANNELS], Raw raw, const u16* norm, const Angles& angles, float eps, int lane) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) squares += raw.own[i] * raw.own[i];
    const float inverse = NORMED ? reciprocal_root(warp_sum(squares) / D + eps) : 1.0f;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        const int d = lane + 32 * i;
        if (NORMED) {
            raw.own[i] *= inverse * from_bf16(norm[d]);
            if (d < ROTARY) raw.other[i] *= inverse * from_bf16(norm[partner_of(d)]);
        }
        out[i] = to_bf16(raw.own[i] * angles.cosine[i] + raw.other[i] * angles.sine[i]);
    }
}

// What a pair begins with, as it is read: all of it before any is used, so that the latency of memory counts once.
struct Given {
    Raw q[GROUP], k;
    float v[CHANNELS];
    long long slot;
};

__device__ __forceinline__ Given load_pair(const Pointers& from, const Piece& p, int q_stride, bool has_newest, int lane) {
    Given given;
    const u16* row = from.q + (long long)p.request * q_stride;
    const float factor = from.scales ? from.scales[p.request] : 1.0f;
#pragma unroll
    for (int h = 0; h < GROUP; h++) given.q[h] = load_head(row, (p.head * GROUP + h) * D, factor, from.columns, lane);
    if (!has_newest) return given;
    given.slot = from.slots[p.request];
    given.k = load_head(row, (HEADS + p.head) * D, factor, from.columns, lane);
#pragma unroll
    for (int i = 0; i < CHANNELS; i++)
        given.v[i] = projected(row, (HEADS + KV_HEADS + p.head) * D + lane + 32 * i, factor, from.columns);
    return given;
}

// The newest key and value to their page, where they have one, and to what the pair begins with.
__device__ __forceinline__ void take_newest(Query& query, const Piece& p, const Pointers& to, const Given& given,
                                            const Angles& angles, const u16 (&q)[GROUP][CHANNELS], float scale, float eps,
                                            int lane) {
    u16 k[CHANNELS];
    turn<K_NORM>(k, given.k, to.k_norm, angles, eps, lane);
    const long long place = (given.slot / BLOCK_SIZE * KV_HEADS + p.head) * (BLOCK_SIZE * D) + given.slot % BLOCK_SIZE * D;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        const int d = lane + 32 * i;
        const u16 v = to_bf16(given.v[i]);
        if (given.slot >= 0) {
            to.k_cache[place + d] = k[i];
            to.v_cache[place + d] = v;
        }
        query.value[d] = from_bf16(v);
    }
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < CHANNELS; i++) score += from_bf16(q[h][i]) * from_bf16(k[i]);
        score = warp_sum(score) * scale;
        if (lane == 0) query.scores[h] = score;
    }
}

// One warp, a few pairs ahead of those that multiply.
__device__ __forceinline__ void prepare_queries(Walk walk, const int* lengths, Query* queries, u64* ready, u64* used,
                                                const Pointers& from, int q_stride, float scale, float eps, int early, int lane) {
    int slot = 0, request = -1;
    u32 parity = 1;
    bool waited = !early;
    Angles angles;
    Piece p;
    while (advance(walk, lengths, p)) {
        if (FUSED && p.request != request) angles = angles_of(from.cos_sin + from.positions[p.request] * ROTARY, lane);
        request = p.request;
        if (!waited) wait_for_kernel_ahead();
        waited = true;
        const bool has_newest = FUSED && p.first == p.begin;
        const Given given = load_pair(from, p, q_stride, has_newest, lane);
        signal_wait(used + slot, parity);
        Query& query = queries[slot];
        u16 q[GROUP][CHANNELS];
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            if (FUSED) turn<Q_NORM>(q[h], given.q[h], from.q_norm, angles, eps, lane);
#pragma unroll
            for (int i = 0; i < CHANNELS; i++) {
                if (!FUSED) q[h][i] = to_bf16(given.q[h].own[i]);
                query.q[h * Q_STRIDE + lane + 32 * i] = q[h][i];
            }
        }
        if (has_newest) take_newest(query, p, from, given, angles, q, scale, eps, lane);
        sync_warp();
        if (lane == 0) signal_arrive(ready + slot);
        if (++slot == SLOTS) {
            slot = 0;
            parity ^= 1;
        }
    }
}
