// The moments of a chunk.
#pragma once

#include "../formulas/norm.h"
#include "reductions.h"

namespace memkit::cpu {

// In two passes, the second of which makes up for the rounding of the first one's mean: in R, which may hold more than T.
template <class Lanes, class R, class T>
MEMKIT_FN Moments<R> moments_of(const T* x, int64_t n, bool in_memory) {
  const T about = sum_of<Lanes, T>(n, [](int64_t, bool, T each) MEMKIT_INLINE { return each; }, x) / T(n);
  const auto add = [&](bool here, T each, T& a, T& b) MEMKIT_INLINE {
    const T d = select(here, each - about, T(0));
    a += d;
    b += d * d;
  };
  const Sums<T> rest = in_memory ? sums_with<Lanes, T>(n, asks_for(x, n), add, x) : sums_of<Lanes, T>(n, add, x);
  return Moments<R>::from_sums(R(n), R(about), R(rest.a), R(rest.b));
}

}  // namespace memkit::cpu
