// The moments of a chunk: sums of distances from about its mean.
#pragma once

#include "../formulas/norm.h"
#include "reductions.h"

namespace memkit::cpu {

template <class Lanes, class T>
MEMKIT_FN T mean_of(const T* x, int64_t n) {
  return sum_of<Lanes, T>(n, [](int64_t, bool, T each) MEMKIT_INLINE { return each; }, x) / T(n);
}

// Of n elements `about` a value near their mean. Asks for what lies `ahead` in memory, unless that is 0.
template <class Lanes, class T>
MEMKIT_FN Sums<T> distances_from(T about, const T* x, int64_t n, int64_t ahead) {
  const auto add = [&](int64_t, bool here, T each, T& a, T& b) MEMKIT_INLINE {
    const T d = select(here, each - about, T(0));
    a += d;
    b += d * d;
  };
  return ahead ? sums_with<Lanes, T>(n, asks_for<Lanes>(x, ahead), add, x) : sums_of<Lanes, T>(n, add, x);
}

// In one pass if the first elements' mean serves, with a second one about the mean if it does not. In R, which may hold more
// than T: the rounding of the mean is made up for.
template <class Lanes, class R, class T>
MEMKIT_FN Moments<R> moments_of(const T* x, int64_t n, int64_t ahead) {
  constexpr int64_t kFirst = kSums<Lanes, T>;
  const auto about = [&](T mean, const Sums<T>& sums) {
    return Moments<R>::from_sums(R(n), R(mean), R(sums.a), R(sums.b));
  };
  if (n >= 4 * kFirst) {
    const T first = mean_of<Lanes>(x, kFirst);
    const Sums<T> sums = distances_from<Lanes>(first, x, n, ahead);
    if (is_near_mean(T(n), sums.a, sums.b)) return about(first, sums);
    ahead = 0;
  }
  const T mean = mean_of<Lanes>(x, n);
  return about(mean, distances_from<Lanes>(mean, x, n, ahead));
}

}  // namespace memkit::cpu
