// One row shared out among threads, without CUDA's runtime: a test plays the threads on the CPU.
#pragma once

#include <limits>
#include <type_traits>

#include "access.cuh"

namespace memkit::cuda {

// The elements [0, n) at `first`: single ones up to the first address that 16 divides, words, single ones. Where the other
// tensor lies at another offset from such addresses, all are single.
template <class S>
struct RowWalk {
  static constexpr int width = sizeof(Word) / sizeof(S);
  int64_t head, words, n;

  MEMKIT_FN RowWalk(const void* first, const void* other, int64_t n) : n(n) {
    const auto off = [](const void* p) { return unsigned(reinterpret_cast<uintptr_t>(p) % sizeof(Word)); };
    const int64_t before = (sizeof(Word) - off(first)) % sizeof(Word) / sizeof(S);
    const bool together = off(first) == off(other);
    head = together && before < n ? before : n;
    words = (n - head) / width;
  }

  // Aligned to a word, and words alone.
  MEMKIT_FN explicit RowWalk(int64_t n) : head(0), words(n / width), n(n) {}

  MEMKIT_FN int64_t element(int64_t word) const { return head + word * width; }
  // The words that begin before element `end`.
  MEMKIT_FN int64_t words_before(int64_t end) const {
    const int64_t before = end <= head ? 0 : (end - head + width - 1) / width;
    return before < words ? before : words;
  }

  // Calls f.one(element) for all of this thread's single elements, and f.batch(i) for W of its words: the words i,
  // i + threads, ..., as far as there are words.
  template <int W, class F>
  MEMKIT_FN void each(int thread, int threads, F&& f) const {
    for (int64_t i = thread; i < words; i += int64_t(W) * threads) f.batch(i);
    for (int64_t i = thread; i < n - words * width; i += threads) f.one(i < head ? i : i + words * width);
  }

  // Where the row is held: this thread's single element, of as many threads as there are; -1: none.
  MEMKIT_FN int64_t single(int thread) const {
    const int64_t i = thread < head ? thread : words * width + thread;
    return i < n ? i : -1;
  }
};

constexpr int kMostSingles = 16;  // of a row with words, a bound

// W words of a thread, which have been asked for before the first is used.
template <class S, int W>
struct RowWords {
  static constexpr int width = RowWalk<S>::width;
  Word word[W];

  // The words i, i + threads, ..., as far as they are below `end`. I: a type that numbers words.
  template <class I>
  MEMKIT_FN void load(const S* row, const RowWalk<S>& walk, I i, int threads, int64_t end) {
    MEMKIT_UNROLL
    for (int w = 0; w < W; ++w) {
      word[w] = Word{};
      const I at = i + w * threads;
      if (at < I(end)) word[w] = *reinterpret_cast<const Word*>(row + walk.element(at));
    }
  }
  // Between two looks at the values: the compiler would else keep them widened, in twice the registers.
  MEMKIT_FN void stay_narrow() {
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof(S) == 2) {
      MEMKIT_UNROLL
      for (Word& each : word) asm volatile("" : "+r"(each.x), "+r"(each.y), "+r"(each.z), "+r"(each.w));
    }
#endif
  }
  template <class T>
  MEMKIT_FN void values(int w, T (&x)[width]) const {
    S raw[width];
    std::memcpy(raw, &word[w], sizeof(raw));
    MEMKIT_UNROLL
    for (int k = 0; k < width; ++k) x[k] = widen(raw[k]);
  }
  // In place of the word that was loaded.
  template <class T>
  MEMKIT_FN void hold(int w, const T (&x)[width]) {
    S raw[width];
    narrow_all(x, raw);
    std::memcpy(&word[w], raw, sizeof(raw));
  }
};

template <class S, class T>
MEMKIT_FN void store_value(T x, S* to) {
  S pair[2];
  narrow(x, T(0), pair);
  *to = pair[0];
}

// e^x for x <= 0. Beside values of half a float's width the instruction alone will do: off by 2^-22 + |x| 2^-24.
template <class S, class T>
MEMKIT_FN T row_exp(T x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(S) == 2) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504088896340736f));
    return y;
  }
#endif
  return exp_falling(x);
}

// NaN has no part in it.
template <class T, int n>
MEMKIT_FN T largest_of(const T (&x)[n]) {
  T most = x[0];
  MEMKIT_UNROLL
  for (int k = 1; k < n; ++k) most = std::fmax(most, x[k]);
  return most;
}

// In a tree: as exact as it is short.
template <class T, int n>
MEMKIT_FN T sum_of(T (&x)[n]) {
  MEMKIT_UNROLL
  for (int half = n / 2; half > 0; half /= 2) {
    MEMKIT_UNROLL
    for (int k = 0; k < half; ++k) x[k] += x[k + half];
  }
  return x[0];
}

// A sum of which every digit counts: what it is subtracted from may be as large, and its logarithm near 0.
template <class S>
struct RowSum {
  using T = typename ComputeType<S>::type;
  T high = 0;

  MEMKIT_FN void add(T x) { high += x; }
  MEMKIT_FN void add_product(T a, T b) { high += a * b; }
  MEMKIT_FN T product_of(T a, T b) { return a * b; }
  template <int n>
  MEMKIT_FN void add_all(T (&x)[n]) {
    add(sum_of(x));
  }
  MEMKIT_FN void merge(const RowSum& other) { high += other.high; }
  MEMKIT_FN T rest() const { return T(0); }
};
// In float32 with what rounding has taken from it: that costs less time than memory takes.
template <>
struct RowSum<float> {
  float high = 0, low = 0;

  // a + b, and what rounding takes from it (Knuth 1969).
  MEMKIT_FN float sum_of_two(float a, float b) {
    const float sum = a + b, part = sum - a;
    low += (a - (sum - part)) + (b - part);
    return sum;
  }
  MEMKIT_FN void add(float x) { high = sum_of_two(high, x); }
  MEMKIT_FN void add_product(float a, float b) { add(product_of(a, b)); }
  MEMKIT_FN float product_of(float a, float b) {
    const float product = a * b;
    low += std::fma(a, b, -product);
    return product;
  }
  // In a tree: fewer sums that wait for another.
  template <int n>
  MEMKIT_FN void add_all(float (&x)[n]) {
    MEMKIT_UNROLL
    for (int half = n / 2; half > 0; half /= 2) {
      MEMKIT_UNROLL
      for (int k = 0; k < half; ++k) x[k] = sum_of_two(x[k], x[k + half]);
    }
    add(x[0]);
  }
  MEMKIT_FN void merge(const RowSum& other) {
    low += other.low;
    add(other.high);
  }
  // Of terms that are not finite the sum alone says something.
  MEMKIT_FN float rest() const { return select(low - low == 0.0f, low, 0.0f); }
};

}  // namespace memkit::cuda
