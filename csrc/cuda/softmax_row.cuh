// A thread's part of a row of softmax, without CUDA's runtime: a test plays the threads on the CPU.
#pragma once

#include "../formulas/softmax.h"
#include "loss_row.cuh"

namespace memkit::cuda {

// How a thread moves elements, one or a word of them from each array.
template <class S, int arrays>
struct SoftmaxElements {
  using T = typename ComputeType<S>::type;
  static constexpr int width = RowWalk<S>::width;

  // Reads `width` elements of each array from `c` on.
  MEMKIT_FN static void load(const S* const (&from)[arrays], int64_t c, T (&values)[arrays][width]) {
    MEMKIT_UNROLL
    for (int a = 0; a < arrays; ++a) {
      const Word word = *reinterpret_cast<const Word*>(from[a] + c);
      S raw[width];
      std::memcpy(raw, &word, sizeof(word));
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) values[a][k] = widen(raw[k]);
    }
  }
  MEMKIT_FN static void store(const T (&values)[width], S* to) {
    S raw[width];
    MEMKIT_UNROLL
    for (int k = 0; k < width; k += 2) narrow(values[k], values[k + 1], raw + k);
    Word word;
    std::memcpy(&word, raw, sizeof(word));
    store_word(word, to);
  }
  MEMKIT_FN static void store(T value, S* to) {
    S pair[2];
    narrow(value, T(0), pair);
    *to = pair[0];
  }
};

// z of one row.
template <class S>
struct SoftmaxRow {
  using T = typename ComputeType<S>::type;
  const SoftmaxArgs& args;
  const S* x;
  S* y;
  int64_t mask, seen;
  T scale;

  MEMKIT_FN SoftmaxRow(const SoftmaxArgs& args, int64_t row)
      : args(args),
        x(static_cast<const S*>(args.x) + row * args.columns),
        y(static_cast<S*>(args.y) + row * args.columns),
        mask(args.mask.kind == SoftmaxMask::Kind::none ? 0 : args.mask.row(row)),
        seen(args.seen(row)),
        scale(T(args.scale)) {}

  MEMKIT_FN T z(T value, int64_t c) const {
    const T none = -std::numeric_limits<T>::infinity();
    if (c >= seen) return none;
    if (args.mask.kind == SoftmaxMask::Kind::boolean)
      return static_cast<const uint8_t*>(args.mask.data)[mask + c] ? value * scale : none;
    return args.mask.kind == SoftmaxMask::Kind::additive ? value * scale + added(mask + c) : value * scale;
  }

 private:
  MEMKIT_FN T added(int64_t i) const {
    if constexpr (sizeof(T) == 8) {
      return static_cast<const double*>(args.mask.data)[i];
    } else {
      if (args.mask.dtype == Dtype::float32) return static_cast<const float*>(args.mask.data)[i];
      if (args.mask.dtype == Dtype::float16) return widen(static_cast<const Half*>(args.mask.data)[i]);
      return widen(static_cast<const Bfloat*>(args.mask.data)[i]);
    }
  }
};

// First walk of the forward: over the columns seen.
template <class S>
struct SoftmaxLook : SoftmaxElements<S, 1> {
  using typename SoftmaxElements<S, 1>::T;
  using SoftmaxElements<S, 1>::width;
  const SoftmaxRow<S>& row;
  SoftmaxState<T> state = {};

  MEMKIT_FN explicit SoftmaxLook(const SoftmaxRow<S>& row) : row(row) {}
  MEMKIT_FN void one(int64_t c) {
    const T z = row.z(widen(row.x[c]), c);
    state.raise(z);
    state.add(z);
  }
  MEMKIT_FN void word(int64_t c) {
    T z[1][width];
    this->load({row.x}, c, z);
    T most = -std::numeric_limits<T>::infinity();
    MEMKIT_UNROLL
    for (int k = 0; k < width; ++k) {
      z[0][k] = row.z(z[0][k], c + k);
      most = select(z[0][k] > most, z[0][k], most);
    }
    state.raise(most);
    MEMKIT_UNROLL
    for (int k = 0; k < width; ++k) state.add(z[0][k]);
  }
};

// Second walk of the forward: over all columns.
template <class S, bool log>
struct SoftmaxWrite : SoftmaxElements<S, 1> {
  using typename SoftmaxElements<S, 1>::T;
  using SoftmaxElements<S, 1>::width;
  const SoftmaxRow<S>& row;
  SoftmaxOutput<T, log> output;

  MEMKIT_FN SoftmaxWrite(const SoftmaxRow<S>& row, const SoftmaxState<T>& state)
      : row(row), output(state.largest, state.sum, row.args.masked) {}
  MEMKIT_FN void one(int64_t c) const { this->store(output.value(row.z(widen(row.x[c]), c)), row.y + c); }
  MEMKIT_FN void word(int64_t c) const {
    T z[1][width];
    this->load({row.x}, c, z);
    MEMKIT_UNROLL
    for (int k = 0; k < width; ++k) z[0][k] = output.value(row.z(z[0][k], c + k));
    this->store(z[0], row.y + c);
  }
};

// The walks of the backward: the sum, then the gradient.
template <class S, bool log>
struct SoftmaxBack : SoftmaxElements<S, 2> {
  using typename SoftmaxElements<S, 2>::T;
  using SoftmaxElements<S, 2>::width;
  const S* grad;
  const S* y;
  S* out;
  SoftmaxGradient<T, log> gradient;
  T sum = 0;

  MEMKIT_FN SoftmaxBack(const SoftmaxArgs& args, int64_t first)
      : grad(static_cast<const S*>(args.grad) + first),
        y(static_cast<const S*>(args.y) + first),
        out(static_cast<S*>(args.grad_input) + first),
        gradient(args) {}
};

template <class S, bool log>
struct SoftmaxSum : SoftmaxBack<S, log> {
  using typename SoftmaxBack<S, log>::T;
  using SoftmaxBack<S, log>::SoftmaxBack;
  MEMKIT_FN void one(int64_t c) { this->sum += this->gradient.term(widen(this->grad[c]), widen(this->y[c])); }
  MEMKIT_FN void word(int64_t c) {
    T v[2][SoftmaxBack<S, log>::width];
    this->load({this->grad, this->y}, c, v);
    MEMKIT_UNROLL
    for (int k = 0; k < SoftmaxBack<S, log>::width; ++k) this->sum += this->gradient.term(v[0][k], v[1][k]);
  }
};

template <class S, bool log>
struct SoftmaxBackWrite : SoftmaxBack<S, log> {
  using typename SoftmaxBack<S, log>::T;
  MEMKIT_FN SoftmaxBackWrite(const SoftmaxBack<S, log>& back, T sum) : SoftmaxBack<S, log>(back) { this->sum = sum; }
  MEMKIT_FN void one(int64_t c) const {
    this->store(this->gradient.value(widen(this->grad[c]), widen(this->y[c]), this->sum), this->out + c);
  }
  MEMKIT_FN void word(int64_t c) const {
    T v[2][SoftmaxBack<S, log>::width];
    this->load({this->grad, this->y}, c, v);
    MEMKIT_UNROLL
    for (int k = 0; k < SoftmaxBack<S, log>::width; ++k) v[0][k] = this->gradient.value(v[0][k], v[1][k], this->sum);
    this->store(v[0], this->out + c);
  }
};

}  // namespace memkit::cuda
