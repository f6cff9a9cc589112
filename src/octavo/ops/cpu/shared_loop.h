// Loops that are shared out between torch's own threads, for kernels that run between torch's operations.
//
// After an operation of torch its threads go on spinning for a while. A team of other threads (team.h) would have to get
// the processor from them: that made a kernel of 1 ms take 6 ms between two matrix products (measured).
#pragma once

#include "common.h"

namespace octavo {

// body(first, last) for pieces of 0 .. count, multiples of `unit` but for the last; by one thread unless `worthwhile`.
template <class F>
void shared_loop(int64_t count, int64_t unit, bool worthwhile, F body) {
    const int64_t pieces = (count + unit - 1) / unit;
#pragma omp parallel for schedule(dynamic) if (worthwhile && pieces > 1)
    for (int64_t piece = 0; piece < pieces; piece++) body(piece * unit, std::min(count, (piece + 1) * unit));
}

}  // namespace octavo
