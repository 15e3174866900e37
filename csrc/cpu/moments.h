// The moments of a chunk.
#pragma once

#include "../formulas/norm.h"
#include "reductions.h"

namespace memkit::cpu {

// In two passes, the second of which makes up for the rounding of the first one's mean: in R, which may hold more than T.
template <class Lanes, class R, class T>
MEMKIT_FN Moments<R> moments_of(const T* x, int64_t n) {
  T total[kSums] = {}, a[kSums] = {}, b[kSums] = {};
  in_runs(n, [&](int64_t, int k, bool, T each) MEMKIT_INLINE { total[k] += each; }, x);
  const T about = Fold<Lanes, T>::sum(total) / T(n);
  in_runs(
      n,
      [&](int64_t, int k, bool here, T each) MEMKIT_INLINE {
        const T d = select(here, each - about, T(0));
        a[k] += d;
        b[k] += d * d;
      },
      x);
  return Moments<R>::from_sums(R(n), R(about), R(Fold<Lanes, T>::sum(a)), R(Fold<Lanes, T>::sum(b)));
}

}  // namespace memkit::cpu
