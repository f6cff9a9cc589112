// Attention over pages, for the threads of a team.
#pragma once

#include "team.h"

namespace octavo {

struct AttentionTask {
    const Cache* cache;
    const bf16* q;  // [T, Hq, D]
    bf16* out;      // [T, Hq * D]
    const int32_t *query_start, *seq_lens, *block_table;
    int64_t table_stride, num_requests, num_heads;
    float scale;
    float softcap;        // 0: none
    int64_t window;       // 0: none
    const float* sinks;   // [Hq] or null
    int64_t amx_from;     // query rows of a tile from which matrix tiles are used
    int64_t groups = 0;   // query heads a key head; set by plan_attention
};

struct Item {
    int32_t request, head;  // key head
    int32_t row, rows;      // query rows of the request
    int32_t first, last;    // keys
    int32_t part;           // index of the partial result, or -1 to write the output
};

struct Merge {
    int32_t request, head, first, count;  // parts of one request and key head
};

// Partial results of split contexts: for each, [rows of the group][head_dim] sums, then their maxima and weights.
struct Parts {
    float *sum, *maximum, *weight;
};

struct AttentionPlan {
    std::vector<Item> items;
    std::vector<Merge> merges;
    std::vector<float> memory;
    Parts parts{};
    int64_t num_parts = 0, max_rows = 0;
    double work = 0;  // multiply-adds
};

constexpr int STEP = 64;         // keys a step: 4 vectors of scores
constexpr int TILE_ROWS = 48;    // query rows of a work item, rounded down to whole groups

struct Tile {  // what a work item keeps between steps; about 50 KiB for a head size of 64
    alignas(64) float scores[TILE_ROWS][STEP];
    alignas(64) bf16 weights[TILE_ROWS][STEP];
    alignas(64) float maximum[TILE_ROWS], total[TILE_ROWS], correction[TILE_ROWS];
    alignas(64) bf16 q[TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) float sum[TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) bf16 tail[16 * MAX_HEAD_DIM];
};

// Completes the task and cuts it into items. By one thread.
void plan_attention(AttentionTask& t, AttentionPlan& plan);
// By all threads of a team; ends with a barrier.
void run_attention(const AttentionTask& t, const AttentionPlan& plan, Team& team);

}  // namespace octavo
