// Sums and largest values of a row in the type computed in.
#pragma once

#include <algorithm>

#include "chunks.h"

namespace memkit::cpu {

constexpr int kSums = 32;  // side by side: the compiler keeps to the order of an addition, and 32 round less than one

// One of kSums values. The compiler goes through memory for this, which short rows feel.
template <class Lanes, class T>
struct Fold {
  MEMKIT_FN static T sum(T (&x)[kSums]) {
    for (int half = kSums / 2; half > 0; half /= 2)
      for (int k = 0; k < half; ++k) x[k] += x[k + half];
    return x[0];
  }
  MEMKIT_FN static T most(T (&x)[kSums]) {
    for (int half = kSums / 2; half > 0; half /= 2)
      for (int k = 0; k < half; ++k) x[k] = select(x[k + half] > x[k], x[k + half], x[k]);
    return x[0];
  }
};
#if MEMKIT_X86
template <>
struct Fold<V4Lanes, float> {
  MEMKIT_TARGET_V4 static float sum(const float (&x)[kSums]) {
    return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)));
  }
  MEMKIT_TARGET_V4 static float most(const float (&x)[kSums]) {
    return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)));
  }
};
#endif

template <class Lanes, class T>
MEMKIT_FN T largest_of(const T* z, int64_t n, T so_far) {
  T most[kSums];
  std::fill_n(most, kSums, so_far);
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    MEMKIT_LOOP
    for (int k = 0; k < kSums; ++k) most[k] = select(z[i + k] > most[k], z[i + k], most[k]);
  }
  for (int k = 0; i + k < n; ++k) most[k] = select(z[i + k] > most[k], z[i + k], most[k]);
  return Fold<Lanes, T>::most(most);
}

// The sum of term(i).
template <class Lanes, class T, class Term>
MEMKIT_FN T sum_of(int64_t n, const Term& term) {
  T total[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    MEMKIT_LOOP
    for (int k = 0; k < kSums; ++k) total[k] += term(i + k);
  }
  if (i < n) {
    MEMKIT_LOOP
    for (int k = 0; k < int(n - i); ++k) total[k] += term(i + k);
  }
  return Fold<Lanes, T>::sum(total);
}

// Two sums in one go: term(i, a, b) adds what belongs to i.
template <class T>
struct Sums {
  T a, b;
};
template <class Lanes, class T, class Term>
MEMKIT_FN Sums<T> sums_of(int64_t n, const Term& term) {
  T a[kSums] = {}, b[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    MEMKIT_LOOP
    for (int k = 0; k < kSums; ++k) term(i + k, a[k], b[k]);
  }
  if (i < n) {
    MEMKIT_LOOP
    for (int k = 0; k < int(n - i); ++k) term(i + k, a[k], b[k]);
  }
  return {Fold<Lanes, T>::sum(a), Fold<Lanes, T>::sum(b)};
}

// The first n < kSums elements, then zeros.
template <class T>
struct Padded {
  T values[kSums];
  MEMKIT_FN Padded(const T* x, int n) {
    MEMKIT_LOOP
    for (int k = 0; k < kSums; ++k) {
      T value = 0;
      if (k < n) value = x[k];
      values[k] = value;
    }
  }
};

template <class F, class... T>
MEMKIT_FN void padded_run(int64_t first, int left, const F& f, const Padded<T>&... x) {
  MEMKIT_LOOP
  for (int k = 0; k < kSums; ++k) f(first + k, k, k < left, x.values[k]...);
}

// f(i, k, here, x[i]...) for i in [0, n) and k = i % kSums, in whole runs, as rows of few elements feel every loop over what
// is left: past the end, where `here` is false, the elements are zeros.
template <class F, class... T>
MEMKIT_FN void in_runs(int64_t n, const F& f, const T*... x) {
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    MEMKIT_LOOP
    for (int k = 0; k < kSums; ++k) f(i + k, k, true, x[i + k]...);
  }
  if (i < n) padded_run(i, int(n - i), f, Padded<T>(x + i, int(n - i))...);
}

}  // namespace memkit::cpu
