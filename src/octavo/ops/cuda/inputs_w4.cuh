// How few_rows_w4 brings x into shared memory: its rows, their RMS norm, and each number as two bytes.
#pragma once

// The weights of the norm, which no kernel writes.
__device__ __forceinline__ void load_norm(const Sizes& s, u8* to, const u8* norm, int thread) {
    for (int p = thread; p < s.units * (X_UNIT / 16); p += MULTIPLIERS) copy_async(to + p * 16, norm + p * 16);
}

// The part of x that this block multiplies, its rows one after the other. Blocks begin at different places: when all ask
// for the same lines at once, they wait for the one slice of the L2 cache that has them.
__device__ __forceinline__ void load_inputs(const Sizes& s, u8* to, int stride, const u8* x, int thread) {
    const int pieces = (s.last_unit - s.first_unit) * (X_UNIT / 16), turn = blockIdx.x / s.rows * 32 % pieces;
    const u64 row_bytes = (u64)s.units * X_UNIT;
    for (int i = 0; i < s.rows; i++) {
        const int row = (i + blockIdx.x) % s.rows;
        const u8* from = x + row * row_bytes + (u64)s.first_unit * X_UNIT;
        for (int p = thread; p < pieces; p += MULTIPLIERS) {
            const int piece = p + turn < pieces ? p + turn : p + turn - pieces;
            copy_async(to + row * stride + piece * 16, from + piece * 16);
        }
    }
    copies_wait();
}

// x * weight / rms(x) in bf16, in place; no part of K may be elsewhere.
// `norm` and the sums of squares, `parts` [rows, KW], are in shared memory.
__device__ __forceinline__ void normalize(const Sizes& s, u8* inputs, int stride, const u8* norm, float* parts, float eps,
                                          int thread) {
    const int pieces = s.units * (X_UNIT / 16), lane = thread % 32, warp = thread / 32;
    for (int row = 0; row < s.rows; row++) {
        float squares = 0.0f;
        for (int p = thread; p < pieces; p += MULTIPLIERS) {
            const Words x = *(const Words*)(inputs + row * stride + p * 16);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float low = from_bf16(x.w[i] & 0xffff), high = from_bf16(x.w[i] >> 16);
                squares += low * low + high * high;
            }
        }
        squares = warp_sum(squares);
        if (lane == 0) parts[row * KW + warp] = squares;
    }
    sync_multipliers(MULTIPLIERS);
    for (int row = 0; row < s.rows; row++) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < KW; i++) squares += parts[row * KW + i];
        const float inverse = reciprocal_root(squares / (s.units * COLUMNS) + eps);
        for (int p = thread; p < pieces; p += MULTIPLIERS) {
            Words* at = (Words*)(inputs + row * stride + p * 16);
            const Words weight = *(const Words*)(norm + p * 16);
            Words x = *at;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u16 low = to_bf16(from_bf16(x.w[i] & 0xffff) * inverse * from_bf16(weight.w[i] & 0xffff));
                const u16 high = to_bf16(from_bf16(x.w[i] >> 16) * inverse * from_bf16(weight.w[i] >> 16));
                x.w[i] = low | (u32)high << 16;
            }
            *at = x;
        }
    }
}

// x as 256 high + low times a scale, in place: each unit of a row becomes [half of the steps][high, low][t][two steps][low,
// high nibbles][4 columns], which is how lanes read it. scale: [X_ROWS][units of this part]. Four lanes share a unit.
__device__ __forceinline__ void split_inputs(const Sizes& s, u8* inputs, int stride, float* scale, int units_a_part,
                                             int thread) {
    const int units = s.last_unit - s.first_unit, tasks = s.rows * units, t = thread % 4;
    for (int first = 0; first < tasks; first += MULTIPLIERS / 4) {
        const int task = min(first + thread / 4, tasks - 1);  // idle lanes do the last one again: a warp has barriers
        const int row = task / units, unit = task % units;
        u8* at = inputs + row * stride + unit * X_UNIT;
        uint2 x[8];
        u32 largest = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            x[j] = *(const uint2*)(at + j * 32 + t * 8);
            largest = max(largest, max(x[j].x & 0x7fff0000u, x[j].y & 0x7fff0000u));
            largest = max(largest, max(x[j].x << 16 & 0x7fff0000u, x[j].y << 16 & 0x7fff0000u));
        }
        largest = quad_max(largest);  // as integers, which puts NaN above all
        const float most = number_of(largest), factor = largest ? 32512.0f / most : 0.0f;
        sync_warp();  // all four have read
        const bool mine = first + thread / 4 < tasks;
        if (mine && t == 0) scale[row * units_a_part + unit] = most * (1.0f / (32512.0f * 16.0f));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Words high, low;
#pragma unroll
            for (int k = 0; k < 4; k++) {  // step 2 half + k / 2, low (even j) or high (odd j) nibbles
                u32 q[4];
#pragma unroll
                for (int b = 0; b < 4; b++) {
                    const u32 pair = half ? x[2 * b + k % 2].y : x[2 * b + k % 2].x;
                    const float value = number_of(k / 2 ? pair & 0xffff0000u : pair << 16);
                    q[b] = bits_of(value * factor + 12583040.0f);  // 1.5 * 2^23 + 128: the low bits are the integer
                }
                high.w[k] = bytes_of<1>(q[0], q[1], q[2], q[3]);
                low.w[k] = bytes_of<0>(q[0], q[1], q[2], q[3]) ^ 0x80808080u;
            }
            if (mine) {
                *(Words*)(at + half * 128 + t * 16) = high;
                *(Words*)(at + half * 128 + 64 + t * 16) = low;
            }
        }
    }
}
