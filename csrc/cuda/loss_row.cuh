// What a thread does with its part of a row of logits, without CUDA's runtime: a test plays the threads on the CPU.
#pragma once

#include "../formulas/loss.h"
#include "row.cuh"

namespace memkit::cuda {

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

  // What is known of a row in the end.
  struct Numbers {
    T loss, largest, factor;
  };
  // The logit of the target, where that is an index.
  MEMKIT_FN S target(int64_t first, int64_t index) const { return args.index ? *x(first + index * args.inner) : S{}; }
  MEMKIT_FN Numbers finish(const LossState<T>& state, int64_t index, S target) const {
    T mass = state.mass, dot = state.dot;
    const T largest = Loss<T>::pivot(state.largest), log_sum = ::log(state.sum);
    if (args.index) {
      mass = hot(index) + op.smooth_mass(args);
      dot = std::fma(hot(index), value(target) - largest, dot);
    }
    return {op.loss(mass, dot, largest, log_sum), largest, op.factor(mass, state.sum, largest, log_sum)};
  }
  MEMKIT_FN void store(int64_t row, const Numbers& numbers) const {
    if (args.narrow_loss)
      store_value(numbers.loss, static_cast<S*>(args.loss) + row);
    else
      number(args.loss, row) = numbers.loss;
    number(args.largest, row) = numbers.largest;
    number(args.factor, row) = numbers.factor;
  }

  // The gradient of one logit.
  struct Gradient {
    T largest, factor, grad;
    int64_t index;  // -1: none
  };
  MEMKIT_FN Gradient gradient_of(int64_t row, int64_t index, T largest, T factor) const {
    const int64_t at = args.grad_a_row ? row : 0;
    T grad = !args.grad         ? T(args.constant_grad)
             : args.narrow_grad ? widen(static_cast<const S*>(args.grad)[at])
                                : static_cast<const T*>(args.grad)[at];
    if (args.total) grad /= *static_cast<const T*>(args.total);
    return {largest, factor, grad, index};
  }
  MEMKIT_FN Gradient gradient_of(int64_t row, int64_t index) const {
    return gradient_of(row, index, number(args.largest, row), number(args.factor, row));
  }
  MEMKIT_FN T gradient(const Gradient& g, int64_t c, int64_t at, S logit) const {
    const T x = value(logit);
    const T b = share(c, at) + (c == g.index ? hot(c) : T(0));
    const T plain = std::fma(row_exp<S>(x - g.largest), g.factor, -b) * g.grad;
    return args.cap != 0 ? plain * op.cap_slope(x) : plain;
  }

  // Whether b is 1 at the target and 0 elsewhere, and logits are values.
  bool plain() const { return args.one_class() && !args.weight && args.cap == 0; }
};

// A thread's part of a row, W words at a time; `first` is the row's first element. plain: as above.
template <class S, int W, bool plain>
struct LossPart {
  using T = typename ComputeType<S>::type;
  static constexpr int width = RowWalk<S>::width;
  const LossRows<S>& rows;
  const RowWalk<S>& walk;
  int64_t first;
  int threads;
  RowWords<S, W> words;

  MEMKIT_FN LossPart(const LossRows<S>& rows, const RowWalk<S>& walk, int64_t first, int threads)
      : rows(rows), walk(walk), first(first), threads(threads) {}

  template <class I>
  MEMKIT_FN void load(I i) {
    words.load(rows.x(first), walk, i, threads, walk.words);
  }
  MEMKIT_FN T value(S logit) const {
    if constexpr (plain) return widen(logit);
    return rows.value(logit);
  }
  MEMKIT_FN void values(int w, T (&x)[width]) const {
    S raw[width];
    std::memcpy(raw, &words.word[w], sizeof(raw));
    MEMKIT_UNROLL
    for (int k = 0; k < width; ++k) x[k] = value(raw[k]);
  }
};

// Of the forward.
template <class S, int W, bool plain>
struct LossForward : LossPart<S, W, plain> {
  using Part = LossPart<S, W, plain>;
  using Part::width;
  using typename Part::T;
  LossState<T> state = {};

  using Part::Part;

  MEMKIT_FN void one(int64_t c) {
    const T x = this->value(*this->rows.x(this->first + c));
    state.raise(x);
    this->rows.add(state, x, c, this->first + c);
  }
  MEMKIT_FN void batch(int64_t i) {
    this->load(i);
    look(i);
  }
  template <class I>
  MEMKIT_FN void look(I i) {
    T most = state.largest;
    MEMKIT_UNROLL
    for (int w = 0; w < W; ++w) {
      if (I(i + w * this->threads) >= I(this->walk.words)) continue;
      T x[width];
      this->values(w, x);
      most = std::fmax(most, largest_of(x));
    }
    if (most > state.largest) state.raise(most);
    this->words.stay_narrow();
    const T pivot = Loss<T>::pivot(state.largest);
    MEMKIT_UNROLL
    for (int w = 0; w < W; ++w) {
      const I at = i + w * this->threads;
      if (at >= I(this->walk.words)) continue;
      T x[width];
      this->values(w, x);
      T e[width];
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) e[k] = row_exp<S>(x[k] -= pivot);
      state.sum += sum_of(e);
      if (plain || this->rows.args.one_class()) continue;
      const int64_t c = this->walk.element(at);
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) {
        e[k] = this->rows.share(c + k, this->first + c + k);
        x[k] *= e[k];
      }
      state.mass += sum_of(e);
      state.dot += sum_of(x);
    }
  }
  // Of a row that is held: all of the thread's part at once.
  MEMKIT_FN void hold(int thread) {
    const int64_t single = this->walk.single(thread);
    this->load(thread);
    if (single >= 0) one(single);
    look(thread);
  }
};

// Of the gradient, of a row that is ignored too.
template <class S, int W, bool plain>
struct LossBackward : LossPart<S, W, plain> {
  using Part = LossPart<S, W, plain>;
  using Part::width;
  using typename Part::T;
  typename LossRows<S>::Gradient g;
  bool ignored;

  MEMKIT_FN LossBackward(const Part& part, const typename LossRows<S>::Gradient& g, bool ignored)
      : Part(part), g(g), ignored(ignored) {}

  MEMKIT_FN T gradient(int64_t c, S logit) const {
    return ignored ? T(0) : this->rows.gradient(g, c, this->first + c, logit);
  }
  MEMKIT_FN void one(int64_t c) const {
    store_value(gradient(c, *this->rows.x(this->first + c)), this->rows.out(this->first + c));
  }
  MEMKIT_FN void batch(int64_t i) {
    if (!ignored) this->load(i);
    write(i);
  }
  // Of a row that is held.
  MEMKIT_FN void finish(int thread) {
    this->words.stay_narrow();
    const int64_t single = this->walk.single(thread);
    if (single >= 0) one(single);
    write(thread);
  }
  // The gradients of the words that are loaded.
  template <class I>
  MEMKIT_FN void write(I i) const {
    MEMKIT_UNROLL
    for (int w = 0; w < W; ++w) {
      const I at = i + w * this->threads;
      if (at >= I(this->walk.words)) continue;
      const int64_t c = this->walk.element(at);
      T x[width] = {};
      if (!ignored) gradients(w, c, x);
      store_values(x, this->rows.out(this->first + c));
    }
  }

 private:
  MEMKIT_FN void gradients(int w, int64_t c, T (&x)[width]) const {
    if constexpr (plain) {
      this->values(w, x);
      const int64_t from_here = g.index - c;
      const int hot = from_here >= 0 && from_here < width ? int(from_here) : -1;
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) x[k] = std::fma(row_exp<S>(x[k] - g.largest), g.factor, -T(k == hot)) * g.grad;
    } else {
      S raw[width];
      std::memcpy(raw, &this->words.word[w], sizeof(raw));
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) x[k] = gradient(c + k, raw[k]);
    }
  }
};

}  // namespace memkit::cuda
