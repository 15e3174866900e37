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

template <class Op, class T>
MEMKIT_FN T input_gradient(T grad, T slope) {
  if constexpr (has_flats<Op>) return select(slope == T(0), T(0), grad * slope);
  return grad * slope;
}

}  // namespace memkit
