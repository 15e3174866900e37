// Cross entropy of one row of logits x with a target distribution b that need not sum to 1:
//
//   loss      = sum b (lse - x) + z lse^2,     lse = log sum e^x
//   d loss/dx = (sum b + 2 z lse) softmax(x) - b
//
//   class index t:  b = w_t (1 - smoothing) at t, and w_c smoothing / classes everywhere
//   probabilities:  b = w_c ((1 - smoothing) y_c + smoothing / classes)
//
// with class weights w, and x = cap tanh(logit / cap) where there is a softcap. Everything is taken relative to the row's
// largest value, so that logits far from 0 lose no digits. Two numbers a row are enough for the gradient: that value, and
// what softmax's numerators e^(x - largest) are multiplied by.
#pragma once

#include <limits>

#include "arguments.h"
#include "math.h"

namespace memkit {

// The dense view of one call. Row r is the elements (r / inner) * classes * inner + r % inner, inner apart. "wide" is the
// type computed in: float64 for float64, else float32.
struct LossArgs {
  Dtype dtype = Dtype::float32;  // of the logits and their gradient
  int64_t rows = 0, classes = 0, inner = 1;
  const void* x = nullptr;
  // The target: an index a row, or probabilities in the order of x.
  const int64_t* index = nullptr;
  const void* probabilities = nullptr;
  bool wide_probabilities = false;  // else of `dtype`
  int64_t ignore_index = -100;
  double smoothing = 0, z = 0, cap = 0;  // cap 0: none
  const void* weight = nullptr;          // wide, [classes]; with it its sum, where smoothing asks for that
  const void* weight_sum = nullptr;
  // Wide, a number a row: what the forward writes, and the backward reads but for the loss.
  void* loss = nullptr;
  void* largest = nullptr;
  void* factor = nullptr;
  // The backward: wide; the gradient of the loss, one a row or one for all, over what the losses' sum was divided by.
  const void* grad = nullptr;  // null: constant_grad
  double constant_grad = 1;
  bool grad_a_row = false;
  const void* total = nullptr;  // null: 1
  void* out = nullptr;          // the logits' gradient; may be x
  // On CUDA, of `dtype` instead of wide.
  bool narrow_loss = false, narrow_grad = false;

  // All of b lies on the target's class: -infinity elsewhere has no part in the loss.
  MEMKIT_FN bool one_class() const { return index && smoothing == 0; }
  // The target of a row where that is an index, else -1; whether there is nothing to say of a row with this one; and what
  // such a row adds to what a mean is divided by.
  MEMKIT_FN int64_t index_of(int64_t row) const { return index ? index[row] : -1; }
  MEMKIT_FN bool ignores(int64_t target) const { return index && target == ignore_index; }
  template <class T>
  MEMKIT_FN double row_weight(int64_t target) const {
    if (ignores(target)) return 0;
    return index && weight ? double(static_cast<const T*>(weight)[target]) : 1;
  }
};

// Sums over rows, in double, or the losses' sum would be rounded more than they are.
struct LossSum {
  double loss = 0, total = 0;

  MEMKIT_FN void merge(const LossSum& other) { loss += other.loss, total += other.total; }
};

enum class LossPass { forward, backward, both };

// The formula's constants, and what of it is done a row or an element.
template <class T>
struct Loss {
  T kept, smooth, z, cap, inverse_cap;

  MEMKIT_FN explicit Loss(const LossArgs& args)
      : kept(T(1 - args.smoothing)),
        smooth(T(args.classes > 0 ? args.smoothing / double(args.classes) : 0)),
        z(T(args.z)),
        cap(T(args.cap)),
        inverse_cap(T(args.cap != 0 ? 1 / args.cap : 0)) {}

  MEMKIT_FN T capped(T logit) const { return cap * memkit::tanh<false>(logit * inverse_cap); }
  // d x / d logit, from x.
  MEMKIT_FN T cap_slope(T x) const {
    T u = x * inverse_cap;
    return T(1) - u * u;
  }
  // b of a class by its probability.
  MEMKIT_FN T share(T probability, T weight) const { return (kept * probability + smooth) * weight; }

  // The mass of b beside its part for an index target.
  MEMKIT_FN T smooth_mass(const LossArgs& args) const {
    if (args.smoothing == 0) return T(0);
    return smooth * (args.weight ? *static_cast<const T*>(args.weight_sum) : T(args.classes));
  }

  // mass: sum b; dot: sum b (x - largest); sum: sum e^(x - largest).
  MEMKIT_FN T loss(T mass, T dot, T largest, T log_sum) const {
    T lse = largest + log_sum, value = mass * log_sum - dot;
    return z == T(0) ? value : value + z * lse * lse;
  }
  MEMKIT_FN T factor(T mass, T sum, T largest, T log_sum) const {
    return (z == T(0) ? mass : mass + T(2) * z * (largest + log_sum)) / sum;
  }

  // What e^(x - largest) is taken of; a row of -infinity alone has no softmax and ends as NaN, as a NaN does.
  MEMKIT_FN static T pivot(T largest) { return largest == -std::numeric_limits<T>::infinity() ? T(0) : largest; }
};

// What is known of a row, or of a part of it, after one look at each element.
template <class T>
struct LossState {
  T largest = -std::numeric_limits<T>::infinity(), sum = 0, mass = 0, dot = 0;

  // Makes all relative to a value at least as large as the candidate.
  MEMKIT_FN void raise(T candidate) {
    T next = select(candidate > largest, candidate, largest);
    T from = Loss<T>::pivot(largest), to = Loss<T>::pivot(next);
    sum *= memkit::exp_falling(largest - to);
    dot += mass * (from - to);
    largest = next;
  }
  // An element not above the largest; its b, where there is one.
  MEMKIT_FN void add(T x) { sum += memkit::exp_falling(x - Loss<T>::pivot(largest)); }
  MEMKIT_FN void add(T x, T b) {
    add(x);
    mass += b;
    dot += b * (x - Loss<T>::pivot(largest));
  }
  MEMKIT_FN void merge(const LossState& other) {
    raise(other.largest);
    T to = Loss<T>::pivot(largest);
    sum += other.sum * memkit::exp_falling(other.largest - to);
    mass += other.mass;
    dot += other.dot + other.mass * (Loss<T>::pivot(other.largest) - to);
  }
};

}  // namespace memkit
