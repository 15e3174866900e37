// Functions as polynomials in pieces, whose coefficients lie in registers: a table that a vector looks up in at once.
//
// The slope of a function with one minimum from its output: the formula takes a logarithm, a root and a quotient of long
// polynomials. In s = sqrt(y - y0), negative left of the minimum, the slope is smooth, so that short polynomials over 32 or
// 16 pieces of s do: of w = shift + scale s, four octaves between 1/16 and 1 in as many pieces each, so that bits of w are
// the number of the piece. They are made from the formula in double when first asked for. At the left end, where y is nearly
// 0, the slope goes as y log y: the formula stays.
#pragma once

#include <array>
#include <cmath>

#include "../formulas/activation.h"
#include "lanes.h"

namespace memkit::cpu {

// The polynomial in d that is f(d) at Chebyshev's points of [low, low + width].
template <int kDegree, class F>
std::array<double, kDegree + 1> fitted(double low, double width, const F& f) {
  double at[kDegree + 1], values[kDegree + 1];
  std::array<double, kDegree + 1> sum{};
  for (int i = 0; i <= kDegree; ++i) {
    at[i] = low + width / 2 * (1 - std::cos(3.14159265358979323846 * (i + 0.5) / (kDegree + 1)));
    values[i] = f(at[i]);
  }
  for (int order = 1; order <= kDegree; ++order)  // Newton's divided differences, then powers
    for (int i = kDegree; i >= order; --i) values[i] = (values[i] - values[i - 1]) / (at[i] - at[i - order]);
  for (int i = kDegree; i >= 0; --i) {
    for (int power = kDegree; power > 0; --power) sum[power] = sum[power - 1] - at[i] * sum[power];
    sum[0] = values[i] - at[i] * sum[0];
  }
  return sum;
}

// `kPieces` of w, a quarter of them in each octave from 1/16 to 1.
template <int kPieces>
struct Octaves {
  static constexpr int kShift = kPieces == 16 ? 21 : 20;            // bits of w below the piece's number
  static constexpr float kFirst = 0.0625f, kLast = 0x1.fffffep-1f;  // of w
  static constexpr int kEach = kPieces / 4;
  static uint32_t piece(double w) { return detail::bits_of(float(w)) >> kShift & (kPieces - 1); }
  // f(low, width) for each piece.
  template <class F>
  static void visit(const F& f) {
    for (int k = 0; k < kPieces; ++k) {
      const double octave = kFirst * double(1 << k / kEach), width = octave / kEach;
      f(octave + width * (k % kEach), width);
    }
  }
};

// Functions with one minimum that are smooth around it.
template <class Op>
inline constexpr bool has_curve = Op::branch;
template <class T, bool coarse>
inline constexpr bool has_curve<Hardswish<T, coarse>> = false;

// Error of the fits: 1.6e-7, or 1e-4 where `coarse`, for values of two bytes.
template <class Op, int kPieces>
struct Curve;
template <template <class, bool> class Formula, bool coarse, int kPieces>
struct Curve<Formula<float, coarse>, kPieces> : Octaves<kPieces> {
  using Exact = Formula<double, false>;
  using Octaves<kPieces>::kFirst;
  static constexpr int kDegree = (coarse ? 3 : 5) + (kPieces == 32 ? 0 : coarse ? 1 : 2);

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
    this->visit([&](double low, double width) {
      const auto fit = fitted<kDegree>(0, width, [&](double d) {
        const double s = (low + d - at_minimum) / per_s;
        return formula.slope_from_output(Exact::y0 + s * s, s >= 0);
      });
      for (int power = 0; power <= kDegree; ++power) coefficients[power][this->piece(low)] = float(fit[power]);
    });
  }
};

// The loop over a curve, for the lanes that have one.
template <class Lanes, class Op, class T>
struct OnCurve {
  static constexpr bool exists = false;
};

#if MEMKIT_X86

// Each lane's entry of a table of 16 or 32.
MEMKIT_TARGET_V3 inline __m256 look_up(const float* table, __m256i piece) {
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), piece);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), piece);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(piece, 28)));
}
MEMKIT_TARGET_V4 inline __m512 look_up(const float* table, __m512i piece) {
  return _mm512_permutex2var_ps(_mm512_load_ps(table), piece, _mm512_load_ps(table + 16));
}

template <class Op>
struct OnCurve<V3Lanes, Op, float> {
  static constexpr bool exists = has_curve<Op>;

  // out = grad * slope; bit k of the bits is set where element k was right of the minimum.
  template <bool ahead>
  MEMKIT_TARGET_V3 static void gradient(const float* y, const uint8_t* bits, const float* grad, float* out, int64_t n) {
    const Made& curve = Made::made();
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      if (ahead && asks_ahead) {
        prefetch(y + i + kAhead<float>);
        prefetch(grad + i + kAhead<float>);
      }
      const __m256 slope = slopes(curve, _mm256_loadu_ps(y + i), bits[i / 8]);
      _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(grad + i), slope));
    }
    if (i == n) return;
    float rest[8] = {}, result[8];
    std::copy_n(y + i, n - i, rest);
    _mm256_storeu_ps(result, slopes(curve, _mm256_loadu_ps(rest), bits[i / 8]));
    for (int64_t k = 0; i + k < n; ++k) out[i + k] = grad[i + k] * result[k];
  }

 private:
  using Made = Curve<Op, 16>;

  MEMKIT_TARGET_V3 static __m256 slopes(const Made& curve, __m256 y, int right) {
    using Minimum = detail::Minimum<Op, float>;
    const __m256 above = _mm256_sub_ps(_mm256_sub_ps(y, _mm256_set1_ps(Minimum::high)), _mm256_set1_ps(Minimum::low));
    const __m256 root = _mm256_sqrt_ps(_mm256_max_ps(_mm256_setzero_ps(), above));  // NaN stays, here and in min
    const __m256i place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i left = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(right), place), _mm256_setzero_si256());
    const __m256 s = _mm256_xor_ps(root, _mm256_and_ps(_mm256_castsi256_ps(left), _mm256_set1_ps(-0.f)));
    __m256 w = _mm256_fmadd_ps(s, _mm256_set1_ps(curve.scale), _mm256_set1_ps(curve.shift));
    w = _mm256_min_ps(_mm256_set1_ps(Made::kLast), w);
    const __m256i at = _mm256_castps_si256(w), piece = _mm256_srli_epi32(at, Made::kShift);
    const __m256 least = _mm256_castsi256_ps(_mm256_and_si256(at, _mm256_set1_epi32(int(~0u << Made::kShift))));
    const __m256 t = _mm256_sub_ps(w, least);
    __m256 slope = look_up(curve.coefficients[Made::kDegree], piece);
#pragma GCC unroll 8
    for (int power = Made::kDegree - 1; power >= 0; --power)
      slope = _mm256_fmadd_ps(slope, t, look_up(curve.coefficients[power], piece));
    const __m256 beyond = _mm256_cmp_ps(w, _mm256_set1_ps(Made::kFirst), _CMP_LT_OQ);
    if (__builtin_expect(_mm256_movemask_ps(beyond), 0)) slope = _mm256_blendv_ps(slope, by_formula(y), beyond);
    return slope;
  }
  // Of elements left of the minimum.
  MEMKIT_OUTLINE MEMKIT_TARGET_V3 static __m256 by_formula(__m256 y) {
    const Op op{ActParams{}};
    alignas(32) float at[8];
    _mm256_store_ps(at, y);
    MEMKIT_LOOP
    for (int i = 0; i < 8; ++i) at[i] = op.slope_from_output(at[i], false);
    return _mm256_load_ps(at);
  }
};

// out = gradient(y, whether y was right of the minimum, grad) for all elements, sixteen at a time.
template <bool ahead, class F>
MEMKIT_TARGET_V4 inline void for_sides(const F& gradient, const float* y, const uint8_t* bits, const float* grad,
                                       float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    if (ahead && asks_ahead) {
      prefetch(y + i + kAhead<float>);
      prefetch(grad + i + kAhead<float>);
    }
    const __mmask16 right = __mmask16(bits[i / 8] | bits[i / 8 + 1] << 8);
    _mm512_storeu_ps(out + i, gradient(_mm512_loadu_ps(y + i), right, _mm512_loadu_ps(grad + i)));
  }
  if (i == n) return;
  const __mmask16 own = __mmask16((1 << (n - i)) - 1);
  const __mmask16 right = __mmask16(~own | bits[i / 8] | (n - i > 8 ? bits[i / 8 + 1] << 8 : 0));
  const __m512 rest = _mm512_maskz_loadu_ps(own, y + i), arrived = _mm512_maskz_loadu_ps(own, grad + i);
  _mm512_mask_storeu_ps(out + i, own, gradient(rest, right, arrived));
}

template <class Op>
class OnCurve<V4Lanes, Op, float> {
  using Made = Curve<Op, 32>;
  const Made& curve = Made::made();

 public:
  static constexpr bool exists = has_curve<Op>;

  // As above.
  template <bool ahead>
  MEMKIT_TARGET_V4 static void gradient(const float* y, const uint8_t* bits, const float* grad, float* out, int64_t n) {
    for_sides<ahead>(OnCurve(), y, bits, grad, out, n);
  }

  MEMKIT_TARGET_V4 __m512 operator()(__m512 y, __mmask16 right, __m512 grad) const {
    using Minimum = detail::Minimum<Op, float>;
    const __m512 above = _mm512_sub_ps(_mm512_sub_ps(y, _mm512_set1_ps(Minimum::high)), _mm512_set1_ps(Minimum::low));
    const __m512 s = _mm512_sqrt_ps(_mm512_max_ps(_mm512_setzero_ps(), above));  // NaN stays, here and in min
    const __m512 scale = _mm512_set1_ps(curve.scale), shift = _mm512_set1_ps(curve.shift);
    __m512 w = _mm512_mask_fnmadd_ps(s, __mmask16(~right), scale, shift);
    w = _mm512_mask_mov_ps(_mm512_fmadd_ps(s, scale, shift), __mmask16(~right), w);
    w = _mm512_min_ps(_mm512_set1_ps(Made::kLast), w);
    const __m512i at = _mm512_castps_si512(w), piece = _mm512_srli_epi32(at, Made::kShift);
    const __m512 least = _mm512_castsi512_ps(_mm512_and_si512(at, _mm512_set1_epi32(int(~0u << Made::kShift))));
    const __m512 t = _mm512_sub_ps(w, least);
    __m512 slope = look_up(curve.coefficients[Made::kDegree], piece);
#pragma GCC unroll 8
    for (int power = Made::kDegree - 1; power >= 0; --power)
      slope = _mm512_fmadd_ps(slope, t, look_up(curve.coefficients[power], piece));
    const __mmask16 beyond = _mm512_cmp_ps_mask(w, _mm512_set1_ps(Made::kFirst), _CMP_LT_OQ);
    if (__builtin_expect(beyond, 0)) slope = _mm512_mask_mov_ps(slope, beyond, by_formula(y));
    return _mm512_mul_ps(grad, slope);
  }

 private:
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

// Hardswish: the formula with a root from 14 bits of its inverse, one correction and, as sixteen roots take as long as all the
// rest, none for a y of two bytes. No curve, but its loop.
template <bool coarse>
struct OnCurve<V4Lanes, Hardswish<float, coarse>, float> {
  static constexpr bool exists = true;

  template <bool ahead>
  MEMKIT_TARGET_V4 static void gradient(const float* y, const uint8_t* bits, const float* grad, float* out, int64_t n) {
    for_sides<ahead>(OnCurve(), y, bits, grad, out, n);
  }

  MEMKIT_TARGET_V4 __m512 operator()(__m512 y, __mmask16 right, __m512 grad) const {
    const __m512 square = _mm512_fmadd_ps(_mm512_set1_ps(24), y, _mm512_set1_ps(9));
    const __m512 above = _mm512_max_ps(_mm512_set1_ps(1e-30f), square);  // NaN stays
    const __m512 inverse = _mm512_rsqrt14_ps(above);
    __m512 root = _mm512_mul_ps(above, inverse);
    if constexpr (!coarse) {
      const __m512 rest = _mm512_fnmadd_ps(root, root, above);
      root = _mm512_fmadd_ps(_mm512_mul_ps(rest, _mm512_set1_ps(0.5f)), inverse, root);
    }
    __m512 slope = _mm512_mul_ps(root, _mm512_mask_blend_ps(right, _mm512_set1_ps(-1 / 6.f), _mm512_set1_ps(1 / 6.f)));
    slope = _mm512_mask_mov_ps(slope, _mm512_cmp_ps_mask(y, _mm512_set1_ps(3), _CMP_GE_OQ), _mm512_set1_ps(1));
    const __mmask16 flat = _mm512_mask_cmp_ps_mask(__mmask16(~right), y, _mm512_setzero_ps(), _CMP_GE_OQ);
    return _mm512_maskz_mul_ps(__mmask16(~flat), grad, slope);
  }
};

#endif

}  // namespace memkit::cpu
