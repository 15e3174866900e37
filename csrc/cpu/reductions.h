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

// What comes before each run of x: asks for the elements so far `ahead`, as `for_kept` does.
template <class T>
MEMKIT_FN auto asks_for(const T* x, int64_t ahead) {
  ahead = std::max(ahead, kAhead<T>);
  return [=](int64_t i) MEMKIT_INLINE {
    for (int64_t k = 0; k < kSums; k += 64 / sizeof(T)) prefetch(x + ahead + i + k);
  };
}

// The first n < size elements, then zeros.
template <class T, int size>
struct Padded {
  T values[size];
  MEMKIT_FN Padded(const T* x, int n) {
    MEMKIT_ONE_LOOP
    for (int k = 0; k < size; ++k) {
      T value{};
      if (k < n) value = x[k];
      values[k] = value;
    }
  }
};

template <int size, class F, class... T>
MEMKIT_FN void vector_of(int64_t first, const F& f, const T*... x) {
  const int lane = int(first % kSums);
  MEMKIT_ONE_LOOP
  for (int k = 0; k < size; ++k) f(first + k, lane + k, true, x[first + k]...);
}
template <int size, class F, class... T>
MEMKIT_FN void padded_vector(int64_t first, int left, const F& f, const Padded<T, size>&... x) {
  const int lane = int(first % kSums);
  MEMKIT_ONE_LOOP
  for (int k = 0; k < size; ++k) f(first + k, lane + k, k < left, x.values[k]...);
}

// f(i, k, here, x[i]...) for i in [0, n) and k = i % kSums: whole runs, then whole vectors, as rows of few elements feel every
// loop over what is left. That is a vector, too, if elements can be loaded under a mask: past the end, where `here` is false,
// they are zeros. before(i) comes
// before each whole run.
template <class Lanes, class Before, class F, class... T>
MEMKIT_FN void in_runs_with(int64_t n, const Before& before, const F& f, const T*... x) {
  constexpr int bytes = std::min({int(sizeof(T))...}), size = Lanes::kBytes / bytes;
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    before(i);
    MEMKIT_LOOP
    for (int k = 0; k < kSums; ++k) f(i + k, k, true, x[i + k]...);
  }
  for (; i + size <= n; i += size) vector_of<size>(i, f, x...);
  if constexpr (Lanes::masked(bytes)) {
    if (i < n) padded_vector<size>(i, int(n - i), f, Padded<T, size>(x + i, int(n - i))...);
  } else {
    for (; i < n; ++i) f(i, int(i % kSums), true, x[i]...);
  }
}
template <class Lanes, class F, class... T>
MEMKIT_FN void in_runs(int64_t n, const F& f, const T*... x) {
  in_runs_with<Lanes>(n, [](int64_t) MEMKIT_INLINE {}, f, x...);
}

// The largest of x, or so_far.
template <class Lanes, class T>
MEMKIT_FN T largest_of(const T* x, int64_t n, T so_far) {
  T most[kSums];
  std::fill_n(most, kSums, so_far);
  in_runs<Lanes>(
      n,
      [&](int64_t, int k, bool here, T each) MEMKIT_INLINE {
        const T own = select(here, each, so_far);
        most[k] = select(own > most[k], own, most[k]);
      },
      x);
  return Fold<Lanes, T>::most(most);
}

// The sum of term(i, here, x[i]...), which has to be 0 where `here` is false.
template <class Lanes, class T, class Before, class Term, class... X>
MEMKIT_FN T sum_with(int64_t n, const Before& before, const Term& term, const X*... x) {
  T total[kSums] = {};
  in_runs_with<Lanes>(
      n, before, [&](int64_t i, int k, bool here, X... each) MEMKIT_INLINE { total[k] += term(i, here, each...); },
      x...);
  return Fold<Lanes, T>::sum(total);
}
template <class Lanes, class T, class Term, class... X>
MEMKIT_FN T sum_of(int64_t n, const Term& term, const X*... x) {
  return sum_with<Lanes, T>(n, [](int64_t) MEMKIT_INLINE {}, term, x...);
}

// Two sums in one go: term(here, x[i]..., a, b) adds what belongs to i, nothing where `here` is false.
template <class T>
struct Sums {
  T a, b;
};
template <class Lanes, class T, class Before, class Term, class... X>
MEMKIT_FN Sums<T> sums_with(int64_t n, const Before& before, const Term& term, const X*... x) {
  T a[kSums] = {}, b[kSums] = {};
  in_runs_with<Lanes>(
      n, before, [&](int64_t, int k, bool here, X... each) MEMKIT_INLINE { term(here, each..., a[k], b[k]); }, x...);
  return {Fold<Lanes, T>::sum(a), Fold<Lanes, T>::sum(b)};
}
template <class Lanes, class T, class Term, class... X>
MEMKIT_FN Sums<T> sums_of(int64_t n, const Term& term, const X*... x) {
  return sums_with<Lanes, T>(n, [](int64_t) MEMKIT_INLINE {}, term, x...);
}

}  // namespace memkit::cpu
