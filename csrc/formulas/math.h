// Scalar mathematics the formulas are written in: branch-free, so the CPU compiler vectorises the loop around it.
#pragma once

#include <cmath>

#if defined(__CUDACC__)
#define MEMKIT_FN __host__ __device__ __forceinline__
#else
#define MEMKIT_FN inline __attribute__((always_inline))
#endif

namespace memkit {

// Both arms are values already: a plain data select.
template <class T>
MEMKIT_FN T select(bool condition, T yes, T no) {
  return condition ? yes : no;
}

template <class T> MEMKIT_FN T exp(T x) { return std::exp(x); }
template <class T> MEMKIT_FN T expm1(T x) { return std::expm1(x); }
template <class T> MEMKIT_FN T log1p(T x) { return std::log1p(x); }
template <class T> MEMKIT_FN T tanh(T x) { return std::tanh(x); }
template <class T> MEMKIT_FN T sqrt(T x) { return std::sqrt(x); }
template <class T> MEMKIT_FN T sigmoid(T x) { return T(1) / (T(1) + std::exp(-x)); }
template <class T> MEMKIT_FN T normal_cdf(T x) { return T(0.5) * std::erfc(x * T(-0.70710678118654752440)); }
template <class T> MEMKIT_FN T normal_pdf(T x) { return T(0.39894228040143267794) * std::exp(T(-0.5) * x * x); }

}  // namespace memkit
