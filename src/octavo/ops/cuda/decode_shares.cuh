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

// What a lane of the warp that deals has: the requests first..last, whose units are begin..end of the sequence.
struct Portion { int first, last, begin, end; };

// Where a place of the sequence lies, which one lane's requests hold.
__device__ __forceinline__ Run find(const Portion& own, const int* lengths, int at, int last, int lane) {
    int request = own.first, begin = own.begin;
    const bool is_here = own.begin <= at && at < own.end;
    for (; is_here; request++) {
        const int units = units_of(lengths[request]) * KV_HEADS;
        if (begin + units > at) break;
        begin += units;
    }
    const int owner = warp_max(is_here ? lane : 0);
    return {at, last, from_lane(request, owner), from_lane(begin, owner)};
}

// One warp finds the block's stretch.
__device__ __forceinline__ Walk deal(const int* lengths, int requests, int least, int lane) {
    const int each = (requests + 31) / 32;
    Portion own = {min(lane * each, requests), min((lane + 1) * each, requests), 0, 0};
    int units = 0;
    for (int r = own.first; r < own.last; r++) units += units_of(lengths[r]) * KV_HEADS;
    own.end = warp_scan(units);
    own.begin = own.end - units;
    const int total = from_lane(own.end, 31);
    Walk walk;
    walk.size = max((total + (int)gridDim.x - 1) / (int)gridDim.x, least);
    const int first = min((int)blockIdx.x * walk.size, total), last = min(first + walk.size, total);
    walk.next = find(own, lengths, first, last, lane);
    walk.now = find(own, lengths, max(last - 1, 0), last, lane);
    const int pair = max(units_of(lengths[walk.now.request]), 1);
    walk.now.at = max(walk.now.begin + (walk.now.at - walk.now.begin) / pair * pair, first);  // a stretch may be empty
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
