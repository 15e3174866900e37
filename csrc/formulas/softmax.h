// Softmax of a row z = scale x + mask, or its logarithm:
//
//   y = e^(z - largest) / sum,         dx = scale y (g - sum g y)
//   y = (z - largest) - log sum,       dx = scale (g - e^y sum g)
//
// Where a mask leaves nothing of a row the softmax is 0 and its logarithm -infinity, and the gradient 0.
#pragma once

#include <limits>

#include "arguments.h"

namespace memkit {

// What takes part, or what is added; the element of column c lies at row(r) + c.
struct SoftmaxMask {
  enum class Kind : int { none, boolean, additive };
  Kind kind = Kind::none;
  Dtype dtype = Dtype::float32;  // additive: any but float64, or float64 beside float64
  const void* data = nullptr;
  int64_t sizes[3] = {1, 1, 1}, strides[3] = {0, 0, 0};  // of what numbers the rows, the last one innermost

  MEMKIT_FN int64_t row(int64_t r) const {
    const int64_t middle = r / sizes[2];
    return r % sizes[2] * strides[2] + middle % sizes[1] * strides[1] + middle / sizes[1] * strides[0];
  }
};

// The dense view of one call. Row r is the elements (r / inner) * columns * inner + r % inner, inner apart; a mask only where
// inner is 1.
struct SoftmaxArgs {
  Dtype dtype = Dtype::float32;
  int64_t rows = 0, columns = 0, inner = 1;
  bool log = false;
  bool masked = false;  // by a mask or causally
  double scale = 1;
  int64_t queries = 0;  // causal: row r sees the columns up to r % queries; 0: all
  SoftmaxMask mask;
  const void* x = nullptr;     // forward
  const void* grad = nullptr;  // backward
  void* y = nullptr;           // forward: the output, may be x; backward: the saved output
  void* grad_input = nullptr;  // backward; may be grad

  MEMKIT_FN int64_t seen(int64_t row) const {
    const int64_t most = queries ? row % queries + 1 : columns;
    return most < columns ? most : columns;
  }
};

// What e^(z - largest) is taken of; a row of -infinity alone has no softmax and ends as NaN, or as nothing where masked.
template <class T>
MEMKIT_FN T softmax_pivot(T largest) {
  return largest == -std::numeric_limits<T>::infinity() ? T(0) : largest;
}

// What is known of a row, or of a part of it, after one look at each element.
template <class T>
struct SoftmaxState {
  T largest = -std::numeric_limits<T>::infinity(), sum = 0;

  MEMKIT_FN void raise(T candidate) {
    const T next = select(candidate > largest, candidate, largest);
    sum *= exp_falling(largest - softmax_pivot(next));
    largest = next;
  }
  // An element not above the largest.
  MEMKIT_FN void add(T z) { sum += exp_falling(z - softmax_pivot(largest)); }
  MEMKIT_FN void merge(const SoftmaxState& other) {
    raise(other.largest);
    sum += other.sum * exp_falling(other.largest - softmax_pivot(largest));
  }
};

// The outputs of a row, of which the largest element and the sum are known.
template <class T, bool log>
struct SoftmaxOutput {
  T pivot, last;  // last: 1 / sum, or log sum

  MEMKIT_FN SoftmaxOutput(T largest, T sum, bool masked) : pivot(softmax_pivot(largest)) {
    const bool nothing = masked && sum == T(0);
    if constexpr (log)
      last = nothing ? T(0) : T(std::log(sum));
    else
      last = nothing ? T(0) : T(1) / sum;
  }
  MEMKIT_FN T value(T z) const {
    if constexpr (log) return (z - pivot) - last;
    return exp_falling(z - pivot) * last;
  }
  // From e^(z - pivot), or from z for the logarithm.
  MEMKIT_FN T finish(T z) const {
    if constexpr (log) return (z - pivot) - last;
    return z * last;
  }
};

template <class T, bool log>
struct SoftmaxGradient {
  T scale;
  bool masked;

  MEMKIT_FN explicit SoftmaxGradient(const SoftmaxArgs& args) : scale(T(args.scale)), masked(args.masked) {}
  MEMKIT_FN static T term(T g, T y) { return log ? g : g * y; }
  MEMKIT_FN T value(T g, T y, T sum) const {
    if constexpr (log) {
      const T dx = scale * (g - exp_falling(y) * sum);
      return select(masked && y == -std::numeric_limits<T>::infinity(), T(0), dx);
    }
    return scale * (y * (g - sum));
  }
};

}  // namespace memkit
