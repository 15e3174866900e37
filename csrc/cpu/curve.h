// The slope of a function with one minimum from its output, as polynomials whose coefficients lie in registers.
//
// The formula for it takes a logarithm, a root and a quotient of long polynomials. In s = sqrt(y - y0), negative left of the
// minimum, the slope is smooth, so that short polynomials over 32 pieces of s do: of w = shift + scale s, an eighth of an
// octave each between 1/16 and 1, and bits of w are the number of the piece. They are made from the formula in double when
// first asked for. At the left end, where y is nearly 0, the slope goes as y log y: the formula stays.
#pragma once

#include <cmath>

#include "../formulas/activation.h"
#include "lanes.h"

namespace memkit::cpu {

// Functions with one minimum that are smooth around it.
template <class Op>
inline constexpr bool has_curve = Op::branch;
template <class T, bool coarse>
inline constexpr bool has_curve<Hardswish<T, coarse>> = false;

constexpr int kPieces = 32, kPiecesAnOctave = 8;

// Error of the slope: 1.5e-7, or 1e-4 where `coarse`, for values of two bytes.
template <class Op>
struct Curve;
template <template <class, bool> class Formula, bool coarse>
struct Curve<Formula<float, coarse>> {
  using Exact = Formula<double, false>;
  static constexpr int kDegree = coarse ? 3 : 5;
  static constexpr float kFirst = 0.0625f;  // w where the pieces begin

  alignas(64) float coefficients[kDegree + 1][kPieces];  // in w - the piece's least w
  float scale, shift;

  static const Curve& made() {
    static const Curve curve;
    return curve;
  }

 private:
  Curve() {
    const double end = std::sqrt(-Exact::y0), cut = coarse ? 0.005 : 0.0165;  // of s + end
    const double per_s = (1 - kFirst) / (Exact::reach + end - cut), at_minimum = 1 - per_s * Exact::reach;
    scale = float(per_s), shift = float(at_minimum);
    const Exact formula{ActParams{}};
    for (int k = 0; k < kPieces; ++k) {
      const double octave = kFirst * double(1 << k / kPiecesAnOctave), width = octave / kPiecesAnOctave;
      const double low = octave + width * (k % kPiecesAnOctave);
      double at[kDegree + 1], values[kDegree + 1], sum[kDegree + 1] = {};
      for (int i = 0; i <= kDegree; ++i) {  // Chebyshev's points
        at[i] = width / 2 * (1 - std::cos(3.14159265358979323846 * (i + 0.5) / (kDegree + 1)));
        const double s = (low + at[i] - at_minimum) / per_s;
        values[i] = formula.slope_from_output(Exact::y0 + s * s, s >= 0);
      }
      for (int order = 1; order <= kDegree; ++order)  // Newton's divided differences, then powers
        for (int i = kDegree; i >= order; --i) values[i] = (values[i] - values[i - 1]) / (at[i] - at[i - order]);
      for (int i = kDegree; i >= 0; --i) {
        for (int power = kDegree; power > 0; --power) sum[power] = sum[power - 1] - at[i] * sum[power];
        sum[0] = values[i] - at[i] * sum[0];
      }
      for (int power = 0; power <= kDegree; ++power) coefficients[power][piece(float(low))] = float(sum[power]);
    }
  }
  static uint32_t piece(float w) { return detail::bits_of(w) >> 20 & (kPieces - 1); }
};

// The loop over it, for the lanes that have one.
template <class Lanes, class Op, class T>
struct OnCurve {
  static constexpr bool exists = false;
};

#if MEMKIT_X86

template <class Op>
struct OnCurve<V4Lanes, Op, float> {
  static constexpr bool exists = has_curve<Op>;
  using Made = Curve<Op>;

  // out = grad * slope; bit k of the bits is set where element k was right of the minimum.
  template <bool ahead>
  MEMKIT_TARGET_V4 static void gradient(const float* y, const uint8_t* bits, const float* grad, float* out, int64_t n) {
    const Made& curve = Made::made();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      if constexpr (ahead) {
        prefetch(y + i + kAhead<float>);
        prefetch(grad + i + kAhead<float>);
      }
      const __m512 slope = slopes(curve, _mm512_loadu_ps(y + i), __mmask16(bits[i / 8] | bits[i / 8 + 1] << 8));
      _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_loadu_ps(grad + i), slope));
    }
    if (i == n) return;
    const __mmask16 own = __mmask16((1 << (n - i)) - 1);
    const __m512 rest = _mm512_mask_loadu_ps(_mm512_setzero_ps(), own, y + i);
    const __mmask16 right = __mmask16(~own | bits[i / 8] | (n - i > 8 ? bits[i / 8 + 1] << 8 : 0));
    const __m512 slope = slopes(curve, rest, right);
    _mm512_mask_storeu_ps(out + i, own, _mm512_mul_ps(_mm512_maskz_loadu_ps(own, grad + i), slope));
  }

 private:
  MEMKIT_TARGET_V4 static __m512 slopes(const Made& curve, __m512 y, __mmask16 right) {
    constexpr float high = float(Op::y0), low = float((Op::y0 - double(high)) + Op::y0_rest);  // as above_minimum
    const __m512 above = _mm512_sub_ps(_mm512_sub_ps(y, _mm512_set1_ps(high)), _mm512_set1_ps(low));
    const __m512 s = _mm512_sqrt_ps(_mm512_max_ps(_mm512_setzero_ps(), above));  // NaN stays, here and in min
    const __m512 scale = _mm512_set1_ps(curve.scale), shift = _mm512_set1_ps(curve.shift);
    __m512 w = _mm512_mask_fnmadd_ps(s, __mmask16(~right), scale, shift);
    w = _mm512_mask_mov_ps(_mm512_fmadd_ps(s, scale, shift), __mmask16(~right), w);
    w = _mm512_min_ps(_mm512_set1_ps(0x1.fffffep-1f), w);
    const __m512i at = _mm512_castps_si512(w), piece = _mm512_srli_epi32(at, 20);
    const __m512 least = _mm512_castsi512_ps(_mm512_and_si512(at, _mm512_set1_epi32(int(0xfff00000))));
    const __m512 t = _mm512_sub_ps(w, least);
    __m512 slope = look_up(curve.coefficients[Made::kDegree], piece);
#pragma GCC unroll 8
    for (int power = Made::kDegree - 1; power >= 0; --power)
      slope = _mm512_fmadd_ps(slope, t, look_up(curve.coefficients[power], piece));
    const __mmask16 beyond = _mm512_cmp_ps_mask(w, _mm512_set1_ps(Made::kFirst), _CMP_LT_OQ);
    if (__builtin_expect(beyond, 0)) slope = _mm512_mask_mov_ps(slope, beyond, by_formula(y));
    return slope;
  }
  MEMKIT_TARGET_V4 static __m512 look_up(const float* table, __m512i piece) {
    return _mm512_permutex2var_ps(_mm512_load_ps(table), piece, _mm512_load_ps(table + 16));
  }
  // Of elements left of the minimum.
  MEMKIT_OUTLINE MEMKIT_TARGET_V4 static __m512 by_formula(__m512 y) {
    const Op op{ActParams{}};
    alignas(64) float at[16];
    _mm512_store_ps(at, y);
    MEMKIT_LOOP
    for (int i = 0; i < 16; ++i) at[i] = op.slope_from_output(at[i], false);
    return _mm512_load_ps(at);
  }
};

#endif

}  // namespace memkit::cpu
