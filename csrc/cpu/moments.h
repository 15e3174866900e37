// The moments of a chunk.
#pragma once

#include "../formulas/norm.h"
#include "chunks.h"

namespace memkit::cpu {

// In two passes, the second of which makes up for the rounding of the first one's mean.
template <class T>
MEMKIT_FN Moments<T> moments_of(const T* x, int64_t n) {
  const T about = sums<T>(n, [&](int64_t i, T& a, T&) MEMKIT_INLINE { a += x[i]; }).a / T(n);
  const Sums<T> s = sums<T>(n, [&](int64_t i, T& a, T& b) MEMKIT_INLINE {
    const T d = x[i] - about;
    a += d;
    b += d * d;
  });
  return Moments<T>::from_sums(T(n), about, s.a, s.b);
}

}  // namespace memkit::cpu
