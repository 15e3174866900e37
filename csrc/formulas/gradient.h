// The gradient of an activation's input from that of its output.
#pragma once

#include "activation.h"

namespace memkit {

// Functions that are flat somewhere: there the gradient is 0 whatever arrives, an infinity or NaN too, as in stock.
template <class Op>
inline constexpr bool has_flats = false;
template <class T, bool coarse>
inline constexpr bool has_flats<Relu<T, coarse>> = true;
template <class T, bool coarse>
inline constexpr bool has_flats<ReluSquared<T, coarse>> = true;
template <class T, bool coarse>
inline constexpr bool has_flats<Hardtanh<T, coarse>> = true;
template <class T, bool coarse>
inline constexpr bool has_flats<Hardsigmoid<T, coarse>> = true;
template <class T, bool coarse>
inline constexpr bool has_flats<Hardswish<T, coarse>> = true;

// Functions whose slope has two values: a bit, whether the input was where they are active, is all that backward needs.
template <class Op>
inline constexpr bool has_two_slopes = false;
template <class T, bool coarse>
inline constexpr bool has_two_slopes<Relu<T, coarse>> = true;
template <class T, bool coarse>
inline constexpr bool has_two_slopes<LeakyRelu<T, coarse>> = true;
template <class T, bool coarse>
inline constexpr bool has_two_slopes<Hardtanh<T, coarse>> = true;
template <class T, bool coarse>
inline constexpr bool has_two_slopes<Hardsigmoid<T, coarse>> = true;

template <class Op, class T>
MEMKIT_FN T gradient_at_input(const Op& op, T grad, T x) {
  T product = grad * op.slope(x);
  if constexpr (has_flats<Op>) return select(op.flat(x), T(0), product);
  return product;
}

// `side`: which one of the minimum the input was on, for functions that have one.
template <class Op, class T, class... Side>
MEMKIT_FN T gradient_at_output(const Op& op, T grad, T y, Side... side) {
  T product = grad * op.slope_from_output(y, side...);
  if constexpr (has_flats<Op>) return select(op.flat_from_output(y, side...), T(0), product);
  return product;
}

template <class Op, class T>
MEMKIT_FN T gradient_where(const Op& op, T grad, bool active) {
  T product = grad * op.slope_where(active);
  if constexpr (has_flats<Op>) return select(active, product, T(0));
  return product;
}

}  // namespace memkit
