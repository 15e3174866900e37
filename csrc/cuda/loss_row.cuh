// One row of logits shared out among threads, and what a thread does with its part, without CUDA's runtime: a test plays the
// threads on the CPU.
#pragma once

#include "../formulas/loss.h"
#include "tile.cuh"

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

  // Calls f.one(element) and f.word(element): all of this thread's, neighbours to neighbouring threads.
  template <class F>
  MEMKIT_FN void each(int thread, int threads, F&& f) const {
    for (int64_t i = thread; i < head; i += threads) f.one(i);
    for (int64_t i = thread; i < words; i += threads) f.word(head + i * width);
    for (int64_t i = head + words * width + thread; i < n; i += threads) f.one(i);
  }
};

// A call in one dtype. Row and class name an element; `at` says where it lies.
template <class S>
struct LossRows {
  using T = typename ComputeType<S>::type;
  LossArgs args;
  Loss<T> op;

  explicit LossRows(const LossArgs& args) : args(args), op(args) {}

  MEMKIT_FN const S* x(int64_t at) const { return static_cast<const S*>(args.x) + at; }
  MEMKIT_FN S* out(int64_t at) const { return static_cast<S*>(args.out) + at; }
  MEMKIT_FN T& number(void* numbers, int64_t row) const { return static_cast<T*>(numbers)[row]; }
  MEMKIT_FN T weight(int64_t c) const { return args.weight ? static_cast<const T*>(args.weight)[c] : T(1); }
  MEMKIT_FN bool ignored(int64_t row) const { return args.index && args.index[row] == args.ignore_index; }
  MEMKIT_FN T value(S logit) const {
    const T x = widen(logit);
    return args.cap != 0 ? op.capped(x) : x;
  }

  // b of class c; the index target's part only where asked for.
  MEMKIT_FN T share(int64_t c, int64_t at) const {
    if (args.probabilities) {
      const T y = args.wide_probabilities ? static_cast<const T*>(args.probabilities)[at]
                                          : widen(static_cast<const S*>(args.probabilities)[at]);
      return op.share(y, weight(c));
    }
    return args.smoothing != 0 ? op.smooth * weight(c) : T(0);
  }
  // Adds an element not above the row's largest.
  MEMKIT_FN void add(LossState<T>& state, T x, int64_t c, int64_t at) const {
    if (args.one_class())
      state.add(x);
    else
      state.add(x, share(c, at));
  }
  MEMKIT_FN T hot(int64_t index) const { return op.kept * weight(index); }

  MEMKIT_FN void finish(int64_t row, int64_t first, const LossState<T>& state) const {
    T mass = state.mass, dot = state.dot;
    const T largest = Loss<T>::pivot(state.largest), log_sum = ::log(state.sum);
    if (args.index) {
      const int64_t t = args.index[row];
      mass = hot(t) + op.smooth_mass(args);
      dot += hot(t) * (value(*x(first + t * args.inner)) - largest);
    }
    number(args.loss, row) = op.loss(mass, dot, largest, log_sum);
    number(args.largest, row) = largest;
    number(args.factor, row) = op.factor(mass, state.sum, largest, log_sum);
  }
  MEMKIT_FN void finish_ignored(int64_t row) const {
    number(args.loss, row) = number(args.largest, row) = number(args.factor, row) = T(0);
  }

  // The gradient of one logit.
  struct Gradient {
    T largest, factor, grad;
    int64_t index;  // -1: none
  };
  MEMKIT_FN Gradient gradient_of(int64_t row) const {
    T grad = static_cast<const T*>(args.grad)[args.grad_a_row ? row : 0];
    if (args.total) grad /= *static_cast<const T*>(args.total);
    return {number(args.largest, row), number(args.factor, row), grad, args.index ? args.index[row] : -1};
  }
  MEMKIT_FN T gradient(const Gradient& g, int64_t c, int64_t at, S logit) const {
    const T x = value(logit);
    const T b = share(c, at) + (c == g.index ? hot(c) : T(0));
    const T plain = (exp_falling(x - g.largest) * g.factor - b) * g.grad;
    return args.cap != 0 ? plain * op.cap_slope(x) : plain;
  }
};

// A thread's part of a row's forward; `first` is the row's first element.
template <class S>
struct LossForward {
  const LossRows<S>& rows;
  int64_t first;
  LossState<typename LossRows<S>::T> state = {};

  MEMKIT_FN void one(int64_t c) {
    const auto x = rows.value(*rows.x(first + c));
    state.raise(x);
    rows.add(state, x, c, first + c);
  }
  MEMKIT_FN void word(int64_t c) {
    constexpr int width = RowWalk<S>::width;
    const Word word = *reinterpret_cast<const Word*>(rows.x(first + c));
    S raw[width];
    std::memcpy(raw, &word, sizeof(word));
    typename LossRows<S>::T x[width], most = rows.value(raw[0]);
    MEMKIT_UNROLL
    for (int k = 0; k < width; ++k) {
      x[k] = rows.value(raw[k]);
      most = select(x[k] > most, x[k], most);
    }
    state.raise(most);
    MEMKIT_UNROLL
    for (int k = 0; k < width; ++k) rows.add(state, x[k], c + k, first + c + k);
  }
};

// A thread's part of a row's gradient.
template <class S>
struct LossBackward {
  const LossRows<S>& rows;
  int64_t first;
  typename LossRows<S>::Gradient g;

  MEMKIT_FN void one(int64_t c) const {
    S pair[2];
    narrow(rows.gradient(g, c, first + c, *rows.x(first + c)), typename LossRows<S>::T(0), pair);
    *rows.out(first + c) = pair[0];
  }
  MEMKIT_FN void word(int64_t c) const {
    constexpr int width = RowWalk<S>::width;
    Word word = *reinterpret_cast<const Word*>(rows.x(first + c));
    S raw[width];
    std::memcpy(raw, &word, sizeof(word));
    MEMKIT_UNROLL
    for (int k = 0; k < width; k += 2)
      narrow(rows.gradient(g, c + k, first + c + k, raw[k]), rows.gradient(g, c + k + 1, first + c + k + 1, raw[k + 1]),
             raw + k);
    std::memcpy(&word, raw, sizeof(word));
    store_word(word, rows.out(first + c));
  }
};

// Of a row that is ignored.
template <class S>
struct LossZero {
  S* out;
  MEMKIT_FN void one(int64_t c) const { out[c] = S{}; }
  MEMKIT_FN void word(int64_t c) const { store_word(Word{}, out + c); }
};

}  // namespace memkit::cuda
