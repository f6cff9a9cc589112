// Which tiles of decode_attention.cu a block has. They form one sequence, of which a block takes a stretch: by request, key head
// and position, with a unit more a pair of a request and a key head than it has tiles, for its beginning.

// Where in the sequence a block is and where it stops; the request there and where that begins.
struct Run { int at, last, request, begin; };

// A block's stretch, in two runs: the pair that its end cuts comes first, so that nobody waits for parts at the end.
struct Walk { Run now, next; int size; };

// A stretch's share of a pair: first..stop of begin..end; tiles are counted from the context's beginning.
struct Piece { int request, head, length, begin, end, first, stop, first_tile, end_tile; };

__device__ __forceinline__ int keys_of(int length) { return max(length - FUSED, 0); }  // in memory
__device__ __forceinline__ int units_of(int length) { return length ? (keys_of(length) + KEYS - 1) / KEYS + 1 : 0; }

// One warp finds what lies at a place of the sequence.
__device__ __forceinline__ Run find(const int* lengths, int requests, int at, int last, int lane) {
    Run run = {at, last, 0, 0};
    for (int base = 0; base < requests; base += 32) {
        const int end = run.begin + warp_scan(base + lane < requests ? units_of(lengths[base + lane]) * KV_HEADS : 0);
        const bool is_before = base + lane < requests && end <= at;
        const int count = warp_sum(is_before ? 1 : 0);
        run.begin = warp_max(is_before ? end : run.begin);
        run.request += count;
        if (count < 32) break;
    }
    return run;
}

__device__ __forceinline__ Walk deal(const int* lengths, int requests, int least, int lane) {
    int total = 0;
    for (int r = lane; r < requests; r += 32) total += units_of(lengths[r]);
    total = warp_sum(total) * KV_HEADS;
    Walk walk;
    walk.size = max((total + (int)gridDim.x - 1) / (int)gridDim.x, least);
    const int first = min((int)blockIdx.x * walk.size, total), last = min(first + walk.size, total);
    walk.next = find(lengths, requests, first, last, lane);
    walk.now = first < last ? find(lengths, requests, last - 1, last, lane) : walk.next;
    if (first < last) {
        const int units = units_of(lengths[walk.now.request]);
        walk.now.at = max(walk.now.begin + (last - 1 - walk.now.begin) / units * units, first);
    }
    walk.next.last = walk.now.at;
    return walk;
}

__device__ __forceinline__ bool advance(Walk& walk, const int* lengths, Piece& p) {
    if (walk.now.at >= walk.now.last) {
        walk.now = walk.next;
        walk.next.at = walk.next.last;
    }
    Run& run = walk.now;
    if (run.at >= run.last) return false;
    while (lengths[run.request] == 0) run.request++;  // it has no tiles
    p.length = lengths[run.request];
    const int units = units_of(p.length);
    p.request = run.request;
    p.head = (run.at - run.begin) / units;
    p.begin = run.begin + p.head * units;
    p.end = p.begin + units;
    p.first = run.at;
    p.stop = min(p.end, run.last);
    p.first_tile = max(p.first - p.begin - 1, 0);
    p.end_tile = p.stop - p.begin - 1;
    run.at = p.stop;
    if (p.stop == run.begin + KV_HEADS * units) {
        run.request++;
        run.begin = p.stop;
    }
    return true;
}
