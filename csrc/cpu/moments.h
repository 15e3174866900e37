// The moments of a chunk in two passes: a mean, and sums of distances from it.
#pragma once

#include "../formulas/norm.h"
#include "reductions.h"

namespace memkit::cpu {

template <class Lanes, class T>
MEMKIT_FN T about_of(const T* x, int64_t n) {
  return sum_of<Lanes, T>(n, [](int64_t, bool, T each) MEMKIT_INLINE { return each; }, x) / T(n);
}

// Makes up for the rounding of `about`, in R, which may hold more than T. Asks for what lies `ahead` in memory, unless that is 0.
template <class Lanes, class R, class T>
MEMKIT_FN Moments<R> moments_about(const T* x, int64_t n, T about, int64_t ahead) {
  const auto add = [&](int64_t, bool here, T each, T& a, T& b) MEMKIT_INLINE {
    const T d = select(here, each - about, T(0));
    a += d;
    b += d * d;
  };
  const Sums<T> rest = ahead ? sums_with<Lanes, T>(n, asks_for<Lanes>(x, ahead), add, x) : sums_of<Lanes, T>(n, add, x);
  return Moments<R>::from_sums(R(n), R(about), R(rest.a), R(rest.b));
}

}  // namespace memkit::cpu
