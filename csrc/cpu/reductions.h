// Sums and largest values of a row in the type computed in.
#pragma once

#include <algorithm>

#include "chunks.h"

namespace memkit::cpu {

// Side by side: the compiler keeps to the order of an addition, many round less than one, and an addition takes four cycles.
template <class Lanes, class T>
constexpr int kSums = std::max(32, 4 * Lanes::kBytes / int(sizeof(T)));

// One of n values. The compiler goes through memory for this, which short rows feel.
template <class Lanes, class T>
struct Fold {
  template <int n>
  MEMKIT_FN static T sum(T (&x)[n]) {
    for (int half = n / 2; half > 0; half /= 2)
      for (int k = 0; k < half; ++k) x[k] += x[k + half];
    return x[0];
  }
  template <int n>
  MEMKIT_FN static T most(T (&x)[n]) {
    for (int half = n / 2; half > 0; half /= 2)
      for (int k = 0; k < half; ++k) x[k] = select(x[k + half] > x[k], x[k + half], x[k]);
    return x[0];
  }
};
#if MEMKIT_X86
MEMKIT_TARGET_V3 inline float sum_of_lanes(__m256 x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
MEMKIT_TARGET_V3 inline double sum_of_lanes(__m256d x) {
  const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
  return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
}
MEMKIT_TARGET_V3 inline float most_of_lanes(__m256 x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
MEMKIT_TARGET_V3 inline double most_of_lanes(__m256d x) {
  const __m128d half = _mm_max_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
  return _mm_cvtsd_f64(_mm_max_sd(half, _mm_unpackhi_pd(half, half)));
}
MEMKIT_TARGET_V4 inline float sum_of_lanes(__m512 x) { return _mm512_reduce_add_ps(x); }
MEMKIT_TARGET_V4 inline double sum_of_lanes(__m512d x) { return _mm512_reduce_add_pd(x); }
MEMKIT_TARGET_V4 inline float most_of_lanes(__m512 x) { return _mm512_reduce_max_ps(x); }
MEMKIT_TARGET_V4 inline double most_of_lanes(__m512d x) { return _mm512_reduce_max_pd(x); }

// A target is an attribute of each function alone.
#define MEMKIT_FOLD(LANES, TARGET)                                                                        \
  template <class T>                                                                                      \
  struct Fold<LANES, T> {                                                                                 \
    typedef T Vector __attribute__((vector_size(LANES::kBytes)));                                         \
    typedef T Unaligned __attribute__((vector_size(LANES::kBytes), aligned(alignof(T)), may_alias));      \
    static constexpr int kLanes = LANES::kBytes / sizeof(T);                                              \
    template <int n>                                                                                      \
    TARGET static T sum(const T (&x)[n]) {                                                                \
      Vector all = *(const Unaligned*)x;                                                                  \
      _Pragma("GCC unroll 8") for (int k = kLanes; k < n; k += kLanes) all += *(const Unaligned*)(x + k); \
      return sum_of_lanes(all);                                                                           \
    }                                                                                                     \
    template <int n>                                                                                      \
    TARGET static T most(const T (&x)[n]) {                                                               \
      Vector all = *(const Unaligned*)x;                                                                  \
      _Pragma("GCC unroll 8") for (int k = kLanes; k < n; k += kLanes) {                                  \
        const Vector next = *(const Unaligned*)(x + k);                                                   \
        all = all > next ? all : next;                                                                    \
      }                                                                                                   \
      return most_of_lanes(all);                                                                          \
    }                                                                                                     \
  };
MEMKIT_FOLD(V3Lanes, MEMKIT_TARGET_V3)
MEMKIT_FOLD(V4Lanes, MEMKIT_TARGET_V4)
#undef MEMKIT_FOLD
#endif

// What comes before each run of x: asks for the elements so far `ahead`, as `for_kept` does.
template <class Lanes, class T>
MEMKIT_FN auto asks_for(const T* x, int64_t ahead) {
  ahead = std::max(ahead, kAhead<T>);
  return [=](int64_t i) MEMKIT_INLINE {
    if (!asks_ahead) return;
    for (int64_t k = 0; k < kSums<Lanes, T>; k += 64 / sizeof(T)) prefetch(x + ahead + i + k);
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

template <int size, class F, class... X>
MEMKIT_FN void vector_of(int64_t first, int lane, const F& f, const X*... x) {
  MEMKIT_ONE_LOOP
  for (int k = 0; k < size; ++k) f(first + k, lane + k, true, x[first + k]...);
}
template <int size, class F, class... X>
MEMKIT_FN void padded_vector(int64_t first, int lane, int left, const F& f, const Padded<X, size>&... x) {
  MEMKIT_ONE_LOOP
  for (int k = 0; k < size; ++k) f(first + k, lane + k, k < left, x.values[k]...);
}

// Elements of a vector of the narrowest of the types.
template <class Lanes, class... X>
constexpr int kVector = Lanes::kBytes / std::min({int(sizeof(X))...});

// f(i, k, here, x[i]...) for i in [0, n) and k = i % sums: whole runs, then whole vectors, as rows of few elements feel every
// loop over what is left. That is a vector, too, if elements can be loaded under a mask: past the end, where `here` is false,
// they are zeros. before(i) comes before each whole run.
template <class Lanes, int sums, class Before, class F, class... X>
MEMKIT_FN void in_runs(int64_t n, const Before& before, const F& f, const X*... x) {
  constexpr int size = kVector<Lanes, X...>;
  // A multiple of the size, as the compiler has to see: else it takes the last lanes for out of bounds.
  const auto lane = [](int64_t i) MEMKIT_INLINE { return int(uint64_t(i) / size % (sums / size)) * size; };
  int64_t i = 0;
  if constexpr (sums > size)
    for (; i + sums <= n; i += sums) {
      before(i);
      MEMKIT_LOOP
      for (int k = 0; k < sums; ++k) f(i + k, k, true, x[i + k]...);
    }
  for (; i + size <= n; i += size) vector_of<size>(i, lane(i), f, x...);
  if constexpr (Lanes::masked(Lanes::kBytes / size)) {
    if (i < n) padded_vector<size>(i, lane(i), int(n - i), f, Padded<X, size>(x + i, int(n - i))...);
  } else {
    for (; i < n; ++i) f(i, int(i % sums), true, x[i]...);
  }
}
MEMKIT_FN void nothing_before(int64_t) {}

// result(sums, n elements of x): of rows of few elements, one vector of sums, which stays in registers.
template <class Lanes, class T, class Result, class... X>
MEMKIT_FN auto with_sums(int64_t n, const Result& result, const X*...) {
  constexpr int size = kVector<Lanes, X...>, most = kSums<Lanes, T>;
  return n < 2 * most ? result(std::integral_constant<int, size>()) : result(std::integral_constant<int, most>());
}

// The largest of x, or so_far.
template <class Lanes, class T>
MEMKIT_FN T largest_of(const T* x, int64_t n, T so_far) {
  return with_sums<Lanes, T>(
      n,
      [&](auto sums) MEMKIT_INLINE {
        T most[sums];
        std::fill_n(most, int(sums), so_far);
        in_runs<Lanes, sums>(
            n, nothing_before,
            [&](int64_t, int k, bool here, T each) MEMKIT_INLINE {
              const T own = select(here, each, so_far);
              most[k] = select(own > most[k], own, most[k]);
            },
            x);
        return Fold<Lanes, T>::most(most);
      },
      x);
}

// The sum of term(i, here, x[i]...), which has to be 0 where `here` is false.
template <class Lanes, class T, class Before, class Term, class... X>
MEMKIT_FN T sum_with(int64_t n, const Before& before, const Term& term, const X*... x) {
  return with_sums<Lanes, T>(
      n,
      [&](auto sums) MEMKIT_INLINE {
        T total[sums] = {};
        in_runs<Lanes, sums>(
            n, before,
            [&](int64_t i, int k, bool here, X... each) MEMKIT_INLINE { total[k] += term(i, here, each...); }, x...);
        return Fold<Lanes, T>::sum(total);
      },
      x...);
}
template <class Lanes, class T, class Term, class... X>
MEMKIT_FN T sum_of(int64_t n, const Term& term, const X*... x) {
  return sum_with<Lanes, T>(n, nothing_before, term, x...);
}

// Two sums in one go: term(i, here, x[i]..., a, b) adds what belongs to i, nothing where `here` is false.
template <class T>
struct Sums {
  T a, b;
};
template <class Lanes, class T, class Before, class Term, class... X>
MEMKIT_FN Sums<T> sums_with(int64_t n, const Before& before, const Term& term, const X*... x) {
  return with_sums<Lanes, T>(
      n,
      [&](auto sums) MEMKIT_INLINE {
        T a[sums] = {}, b[sums] = {};
        in_runs<Lanes, sums>(
            n, before,
            [&](int64_t i, int k, bool here, X... each) MEMKIT_INLINE { term(i, here, each..., a[k], b[k]); }, x...);
        return Sums<T>{Fold<Lanes, T>::sum(a), Fold<Lanes, T>::sum(b)};
      },
      x...);
}
template <class Lanes, class T, class Term, class... X>
MEMKIT_FN Sums<T> sums_of(int64_t n, const Term& term, const X*... x) {
  return sums_with<Lanes, T>(n, nothing_before, term, x...);
}

}  // namespace memkit::cpu
