// The threads that share a kernel's work.
//
// OpenMP's runtime waits by spinning for milliseconds, which is fast on an idle machine; but with one other busy process
// its threads end up on the same core and a decoding step takes seconds instead of milliseconds (measured). A small team
// of our own spins briefly, then yields the processor while it waits, and sleeps when nothing comes for a millisecond.
// Loops are handed out in pieces, so that a thread that was interrupted does not hold up the others' work.
#pragma once

#include <atomic>
#include <cstdint>

#include "common.h"

namespace octavo {

constexpr int MAX_LOOPS = 32;  // loops in one parallel call

struct TeamState {
    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    };
    Counter loops[MAX_LOOPS];
    Counter arrived, generation;
};

// One thread's view of the team; every member runs the same loops and barriers in the same order.
class Team {
   public:
    Team(TeamState& state, int thread, int size) : thread_(thread), size_(size), state_(state) {}

    int size() const { return size_; }

    // Hand out 0 .. count in pieces, body(first, last): large ones first, multiples of `unit` but for the last few.
    template <class F>
    void share(int64_t count, int64_t unit, F body) {
        if (size_ == 1) {
            if (count > 0) body(int64_t(0), count);
            return;
        }
        std::atomic<int64_t>& next = state_.loops[next_loop_++].value;
        int64_t first = next.load(std::memory_order_relaxed);
        while (first < count) {
            int64_t piece = (count - first) / (2 * size_);
            piece = piece >= unit ? piece / unit * unit : std::max<int64_t>(1, unit / 2);
            const int64_t last = std::min(count, first + piece);
            if (!next.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
            body(first, last);
            first = next.load(std::memory_order_relaxed);
        }
    }

    // body(i) for 0 .. count, one at a time.
    template <class F>
    void each(int64_t count, F body) {
        if (size_ == 1) {
            for (int64_t i = 0; i < count; i++) body(i);
            return;
        }
        std::atomic<int64_t>& next = state_.loops[next_loop_++].value;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
    }

    void barrier();

    bool is_first() const { return thread_ == 0; }

   private:
    int thread_, size_, next_loop_ = 0;
    TeamState& state_;
};

using TeamFunction = void (*)(void* context, Team& team);

// Runs function(context, team) on `threads` threads, the caller's included. While another thread of the process is in
// such a call, or for one thread, it runs on the caller alone.
void run_team(int threads, TeamFunction function, void* context);

// body(team) on as many threads as torch uses (`torch.set_num_threads` sets the OpenMP maximum), or on the caller alone.
template <class F>
void parallel(bool worthwhile, F body) {
    run_team(worthwhile ? omp_get_max_threads() : 1, [](void* f, Team& team) { (*(F*)f)(team); }, &body);
}

}  // namespace octavo
