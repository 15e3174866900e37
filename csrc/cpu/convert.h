// Blocks of any dtype in and out of the type the formulas compute in.
#pragma once

#include <cstdint>
#include <cstring>

#include "../formulas/math.h"
#include "isa.h"

#if MEMKIT_X86
#include <immintrin.h>
#endif

namespace memkit::cpu {

// Storage of the half types: bit patterns, so that no compiler support for them is needed.
struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

template <class S>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};

template <class To, class From>
MEMKIT_FN To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

MEMKIT_FN float to_compute(float x) { return x; }
MEMKIT_FN double to_compute(double x) { return x; }
MEMKIT_FN float to_compute(Bfloat x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

// binary16 without hardware: shift the exponent by a multiplication, which also makes subnormals come out right.
MEMKIT_FN float to_compute(Half x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  const float scaled = bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t special = bit_cast<uint32_t>(scaled) | 0x7f800000u;  // inf and NaN keep an exponent of all ones
  const uint32_t value = magnitude >= 0x0f800000u ? special : bit_cast<uint32_t>(scaled);
  return bit_cast<float>(value | uint32_t(x.bits & 0x8000) << 16);
}

MEMKIT_FN void from_compute(float x, float& y) { y = x; }
MEMKIT_FN void from_compute(double x, double& y) { y = x; }

// Round to nearest, ties to even; a NaN stays a NaN.
MEMKIT_FN void from_compute(float x, Bfloat& y) {
  const uint32_t u = bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16;
  y.bits = uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

MEMKIT_FN void from_compute(float x, Half& y) {
  const uint32_t u = bit_cast<uint32_t>(x);
  const uint32_t sign = u >> 16 & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  // Below 2^-14 the result is subnormal: adding 0.5 lets the float adder round at bit 2^-24.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  uint32_t h = magnitude < 0x38800000u ? subnormal : normal;
  h = magnitude >= 0x477ff000u ? 0x7c00u : h;
  h = magnitude > 0x7f800000u ? 0x7e00u : h;
  y.bits = uint16_t(h | sign);
}

template <class S, class T>
MEMKIT_FN void load(const S* x, T* y, int64_t n) {
  MEMKIT_LOOP
  for (int64_t i = 0; i < n; ++i) y[i] = to_compute(x[i]);
}

template <class T, class S>
MEMKIT_FN void store(const T* x, S* y, int64_t n) {
  MEMKIT_LOOP
  for (int64_t i = 0; i < n; ++i) from_compute(x[i], y[i]);
}

}  // namespace memkit::cpu
