// Normalisation: moments that stay exact for a large mean, the normalised value and its gradients, once for every engine.
//
//   x_hat = (x - mean) rstd          rstd = 1 / sqrt(variance + eps); RMS norm: mean = 0, the variance about 0
//   y     = x_hat w + b
//   dx    = rstd (w g - mean(w g) - x_hat mean(w g x_hat))      means over what was normalised together
//   dw    = sum of g x_hat, db = sum of g                       (Ba et al. 2016, Zhang and Sennrich 2019)
//
// Other denominators are s + eps or max(s, eps), where s^2 = sum of (x - mean)^2 / divisor. With 1 / rstd instead of the root,
//   dx    = rstd (w g - mean(w g) - c x_hat mean(w g x_hat))    c = -2 (d rstd / d variance) / rstd^3
#pragma once

#include "arguments.h"

namespace memkit {

// Of `count` values: their mean and the sum of squared distances from it.
template <class T>
struct Moments {
  T count = 0, mean = 0, m2 = 0;

  // Of both sets of values together (Chan et al. 1979).
  MEMKIT_FN void add(const Moments& other) {
    const T both = count + other.count;
    if (both == T(0)) return;
    const T delta = other.mean - mean, share = other.count / both;
    mean += delta * share;
    m2 += other.m2 + delta * delta * count * share;
    count = both;
  }

  // From the sums of x - about and of its square, `about` being near the mean: its rounding is made up for. Squares that
  // overflow stay infinite, whatever the sum's would do.
  MEMKIT_FN static Moments from_sums(T count, T about, T sum, T squares) {
    const T shift = sum / count, centred = at_least(squares - sum * shift, T(0));
    return {count, about + shift, select(squares < std::numeric_limits<T>::infinity(), centred, squares)};
  }
};

// Whether the sums of x - about and of its square tell the variance nearly as well as those about the mean would: `about` is
// off by 0.58 of a deviation at most, by which the squares are a third larger.
template <class T>
MEMKIT_FN bool is_near_mean(T count, T sum, T squares) {
  const T most = squares * T(0.25);
  return sum / count * sum <= most && most < std::numeric_limits<T>::infinity();
}

template <class T>
MEMKIT_FN T reciprocal_root(T variance, T eps) {
  return T(1) / std::sqrt(variance + eps);
}

template <class T>
MEMKIT_FN T normalised(T x, T mean, T rstd) {
  return (x - mean) * rstd;
}

// What an output was before weight and bias: `inverse` is 1 / weight, or 0 where the weight is 0 and nothing is left.
template <class T>
MEMKIT_FN T inverse_weight(T weight) {
  return select(weight == T(0), T(0), T(1) / weight);
}
template <class T>
MEMKIT_FN T from_output(T y, T inverse, T bias) {
  return (y - bias) * inverse;
}

// What is wrong with a weight and bias from whose output the input shall follow. Rounding y by u costs
// u |y / weight| <= u (|x_hat| + |bias / weight|) in x_hat. With |bias| <= |weight| the gradients stay within twice the
// error that rounding them makes anyway, if no output overflows (|x_hat| is at most the root of the number of columns) or
// sinks into subnormal numbers.
constexpr int kIllConditioned = 1, kNotInvertible = 2;

template <class T>
struct WeightCheck {
  T highest, lowest, largest_x_hat;  // the largest and the smallest normal number of the output's dtype

  MEMKIT_FN int flaws(T weight, T bias) const {
    const T size = std::fabs(weight), offset = std::fabs(bias);
    // Without branches, which would keep the loop over columns from being vectorised.
    const int good = int(offset <= size) & int(size >= lowest) & int(size * largest_x_hat + offset <= highest);
    const int possible = int(size > T(0)) & int(size - size == T(0)) & int(offset - offset == T(0));
    return (1 - good) * kIllConditioned + (1 - possible) * kNotInvertible;
  }
};

// gw: gradient times weight; the means are those of gw and of gw x_hat.
template <class T>
MEMKIT_FN T norm_gradient(T gw, T x_hat, T rstd, T mean_gw, T mean_gw_x_hat) {
  return rstd * ((gw - mean_gw) - x_hat * mean_gw_x_hat);
}

// The check for outputs of a dtype.
template <class T>
MEMKIT_FN WeightCheck<T> weight_check(Dtype dtype, int64_t columns) {
  const double highest[] = {3.4028234663852886e38, 1.7976931348623157e308, 65504, 3.3895313892515355e38};
  const double lowest[] = {1.1754943508222875e-38, 2.2250738585072014e-308, 6.103515625e-5, 1.1754943508222875e-38};
  return {T(highest[int(dtype)]), T(lowest[int(dtype)]), std::sqrt(T(columns))};
}

// What a row is divided by: the root of its variance and eps; its deviation, that of a sample (of columns - 1), or its 2-norm.
enum class Denominator : int { root, deviation, sample_deviation, norm };

// One call of a norm over rows of `columns` elements, `inner` apart, as the channels of images are: element c of row r is then
// element c * inner of what starts at r / inner * inner * columns + r % inner. Statistics and partial sums are of the type computed
// in: double where dtype is float64, else float.
struct RowNormArgs {
  int64_t rows = 0, columns = 0;
  int64_t inner = 1;         // 1: next to each other; else on the CPU alone, and without a residual
  bool centered = true;      // layer norm; else RMS norm
  bool from_output = false;  // backward: `saved` is the output
  double eps = 0;
  Denominator denominator = Denominator::root;
  Dtype dtype;                   // of the input, the residual, their sum and their gradients
  Dtype out_dtype;               // of the output and its gradient
  Dtype weight_dtype;            // of weight and bias
  const void* weight = nullptr;  // null: 1
  const void* bias = nullptr;    // null: 0
  void* mean = nullptr;          // one a row; null where not needed
  void* rstd = nullptr;          // one a row; forward: null where not needed

  // Forward. The output may be in the input's or the sum's memory, the sum in that of either summand.
  const void* x = nullptr;
  const void* residual = nullptr;  // added to the input, where there is one, and the sum written to `sum`
  void* sum = nullptr;
  void* y = nullptr;

  // Backward. grad_input may be in the memory of grad or grad_sum.
  const void* saved = nullptr;
  const void* grad = nullptr;
  const void* grad_sum = nullptr;  // of the sum, where there is one; added
  void* grad_input = nullptr;      // null: not wanted
  void* partial = nullptr;  // sums of g x_hat and of g over some rows, `columns` each, on the CPU in double; null:
                            // not wanted

  // rstd, of the sum of a row's squared distances from its mean.
  template <class T>
  MEMKIT_FN T reciprocal(T squares) const {
    if (denominator == Denominator::root) return reciprocal_root(squares / T(columns), T(eps));
    const T size = std::sqrt(squares / T(divisor()));
    return T(1) / (denominator == Denominator::norm ? at_least(size, T(eps)) : size + T(eps));
  }
  // The mean of gw x_hat times c, of their sum and rstd. Where nothing is left of 1 - eps rstd, x_hat is no more than its
  // rounding.
  template <class T>
  MEMKIT_FN T projection(T sum, T rstd) const {
    if (denominator == Denominator::root) return sum / T(columns);
    const bool by_norm = denominator == Denominator::norm;
    const T left = by_norm ? select(rstd < T(1) / T(eps), T(1), T(0)) : T(1) - T(eps) * rstd;
    return left > T(0) ? sum / (T(divisor()) * left) : T(0);
  }

 private:
  MEMKIT_FN int64_t divisor() const {
    if (denominator == Denominator::norm) return 1;
    return denominator == Denominator::sample_deviation ? columns - 1 : columns;
  }
};

}  // namespace memkit
