// Values of functions for sixteen floats at a time, by what AVX-512 has and a loop over a formula does not reach: tables in
// registers, a reciprocal to 14 bits and powers of two. A division of sixteen floats alone takes as long as all the rest.
#pragma once

#include "pieces.h"

namespace memkit::cpu {

// The values of a function, for the lanes that have a loop of their own for them.
template <class Lanes, class Op>
struct Values {
  static constexpr bool exists = false;
};

#if MEMKIT_X86

namespace sixteen {

// e^(sign x): 1 ulp, or 2.7e-6 where `coarse`; for an exponent below `least` that of it, -87 as numbers below the normal ones
// take a hundred times as long. NaN stays, here and in what follows.
template <int sign, bool coarse = false>
MEMKIT_TARGET_V4 inline __m512 exponential(__m512 x, float least = -87) {
  using F = detail::Format<float>;
  constexpr double log2_e = sign * 1.44269504088896340736;
  const float low = sign > 0 ? least : -F::highest, high = sign > 0 ? F::highest : -least;
  const __m512 t = _mm512_max_ps(_mm512_set1_ps(low), _mm512_min_ps(_mm512_set1_ps(high), x));
  const __m512 factor = _mm512_set1_ps(float(log2_e)), round = _mm512_set1_ps(F::round);
  const __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(t, factor, round), round);
  const __m512 rest = _mm512_set1_ps(float(log2_e - float(log2_e)));
  const __m512 r = _mm512_fmadd_ps(t, rest, _mm512_fmsub_ps(t, factor, n));
  constexpr int degree = coarse ? 4 : 6;
  float c[degree + 1];  // constants, all told
  const auto take = [&](auto... coefficients) MEMKIT_INLINE {
    int power = 0;
    ((c[power++] = coefficients), ...);
  };
  detail::with_exp2_coefficients<coarse>(take);
  __m512 sum = _mm512_set1_ps(c[degree]);
#pragma GCC unroll 8
  for (int power = degree - 1; power >= 0; --power) sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(c[power]));
  return _mm512_scalef_ps(sum, n);
}

// a / b: 1 ulp. Where nothing is left to correct, or it is NaN from an infinity, what was estimated stands.
MEMKIT_TARGET_V4 inline __m512 quotient(__m512 a, __m512 b) {
  const __m512 inverse = _mm512_rcp14_ps(b), y = _mm512_mul_ps(a, inverse), rest = _mm512_fnmadd_ps(b, y, a);
  return _mm512_mask3_fmadd_ps(rest, inverse, y, _mm512_cmp_ps_mask(rest, _mm512_setzero_ps(), _CMP_NEQ_OQ));
}

// a / (1 + e^-z)
MEMKIT_TARGET_V4 inline __m512 gated(__m512 a, __m512 z) {
  return quotient(a, _mm512_add_ps(exponential<-1>(z), _mm512_set1_ps(1)));
}

// tile(x, y): the values of a tile; x and y may be the same.
template <class Op>
struct Function {
  static constexpr bool exists = false;
};

// Of a function with value(vector).
template <class Op>
struct EachVector {
  static constexpr bool exists = true;
  MEMKIT_TARGET_V4 void tile(const float* x, float* y) const {
    const auto& function = static_cast<const Function<Op>&>(*this);
    for (int i = 0; i < kTile; i += 16) _mm512_storeu_ps(y + i, function.value(_mm512_loadu_ps(x + i)));
  }
};

template <bool coarse>
struct Function<Sigmoid<float, coarse>> : EachVector<Sigmoid<float, coarse>> {
  MEMKIT_TARGET_V4 __m512 value(__m512 x) const { return gated(_mm512_set1_ps(1), x); }
};

template <bool coarse>
struct Function<Silu<float, coarse>> : EachVector<Silu<float, coarse>> {
  MEMKIT_TARGET_V4 __m512 value(__m512 x) const { return gated(x, x); }
};

template <bool coarse>
struct Function<QuickGelu<float, coarse>> : EachVector<QuickGelu<float, coarse>> {
  MEMKIT_TARGET_V4 __m512 value(__m512 x) const {
    return gated(x, _mm512_mul_ps(_mm512_set1_ps(float(QuickGelu<float>::gain)), x));
  }
};

template <bool coarse>
struct Function<GeluTanh<float, coarse>> : EachVector<GeluTanh<float, coarse>> {
  MEMKIT_TARGET_V4 __m512 value(__m512 x) const {
    using Op = GeluTanh<float>;
    const __m512 xx = _mm512_mul_ps(x, x);
    return gated(x, _mm512_mul_ps(x, _mm512_fmadd_ps(_mm512_set1_ps(Op::kc), xx, _mm512_set1_ps(Op::k))));
  }
};

template <bool coarse>
struct Function<Mish<float, coarse>> : EachVector<Mish<float, coarse>> {
  MEMKIT_TARGET_V4 __m512 value(__m512 x) const {
    const __m512 two = _mm512_set1_ps(2), at_most = _mm512_min_ps(_mm512_set1_ps(Mish<float>::flat), x);
    const __m512 e = exponential<1>(at_most, detail::Format<float>::lowest);
    const __m512 n = _mm512_mul_ps(e, _mm512_add_ps(e, two));
    return _mm512_mul_ps(x, quotient(n, _mm512_add_ps(n, two)));
  }
};

// x Phi(x), Phi over 32 pieces of equal width from -6.5 to 5.4, from where on it is 1; before them the density times a
// polynomial. Relative error 2 ulp from -4 on, 1e-6 at -5 and 1e-3 below -6.5, where the value is at most 3e-10.
template <bool coarse>
class Function<Gelu<float, coarse>> {
  static constexpr int kDegree = 6, kTail = 4, kFirst = -17;
  static constexpr float kWidth = 0.375f, kStart = (kFirst - 0.4f) * kWidth, kEnd = 5.43f, kVanishes = -12.9f;
  struct Table {
    alignas(64) float coefficients[kDegree + 1][32];
    float tail[kTail + 1];  // of Phi(x) e^(x^2 / 2) in kStart - x
    Table() {
      const auto normal = [](double x) { return 0.5 * std::erfc(x * -0.70710678118654752440); };
      for (int k = kFirst; k < kFirst + 32; ++k) {
        const auto fit = fitted<kDegree>(-kWidth / 2, kWidth, [&](double d) { return normal(k * double(kWidth) + d); });
        for (int power = 0; power <= kDegree; ++power) coefficients[power][k & 31] = float(fit[power]);
      }
      const auto fit = fitted<kTail>(0, kStart - kVanishes, [&](double d) {
        return normal(kStart - d) * std::exp((d - kStart) * (d - kStart) / 2);
      });
      std::copy(fit.begin(), fit.end(), tail);
    }
  };
  static const Table& made() {
    static const Table table;
    return table;
  }
  const Table& table = made();

  MEMKIT_TARGET_V4 __m512 normal(__m512 x) const {
    const __m512 t = _mm512_min_ps(_mm512_set1_ps(kEnd), x), round = _mm512_set1_ps(detail::Format<float>::round);
    const __m512 shifted = _mm512_fmadd_ps(t, _mm512_set1_ps(1 / kWidth), round), n = _mm512_sub_ps(shifted, round);
    const __m512 d = _mm512_fnmadd_ps(n, _mm512_set1_ps(kWidth), t);
    const __m512i piece = _mm512_castps_si512(shifted);
    __m512 sum = look_up(table.coefficients[kDegree], piece);
#pragma GCC unroll 8
    for (int power = kDegree - 1; power >= 0; --power)
      sum = _mm512_fmadd_ps(sum, d, look_up(table.coefficients[power], piece));
    return sum;
  }
  MEMKIT_TARGET_V4 __m512 normal_tail(__m512 x) const {
    const __m512 d = _mm512_sub_ps(_mm512_set1_ps(kStart), _mm512_max_ps(_mm512_set1_ps(kVanishes), x));
    __m512 sum = _mm512_set1_ps(table.tail[kTail]);
#pragma GCC unroll 8
    for (int power = kTail - 1; power >= 0; --power) sum = _mm512_fmadd_ps(sum, d, _mm512_set1_ps(table.tail[power]));
    const __m512 density = exponential<-1, true>(_mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.5f)));
    return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(kVanishes), _CMP_NLT_UQ), sum, density);
  }
  // A tile with elements before the pieces.
  MEMKIT_OUTLINE MEMKIT_TARGET_V4 void mixed(const float* x, float* y) const {
    for (int i = 0; i < kTile; i += 16) {
      const __m512 at = _mm512_loadu_ps(x + i);
      const __mmask16 before = _mm512_cmp_ps_mask(at, _mm512_set1_ps(kStart), _CMP_LT_OQ);
      __m512 phi = normal_tail(at);
      if (before != 0xffff) phi = _mm512_mask_mov_ps(normal(at), before, phi);
      _mm512_storeu_ps(y + i, _mm512_mul_ps(at, phi));
    }
  }

 public:
  static constexpr bool exists = true;
  MEMKIT_TARGET_V4 void tile(const float* x, float* y) const {
    __m512 least = _mm512_setzero_ps();
    for (int i = 0; i < kTile; i += 16) least = _mm512_min_ps(_mm512_loadu_ps(x + i), least);  // none from NaN
    if (_mm512_cmp_ps_mask(least, _mm512_set1_ps(kStart), _CMP_LT_OQ)) return mixed(x, y);
    for (int i = 0; i < kTile; i += 16) {
      const __m512 at = _mm512_loadu_ps(x + i);
      _mm512_storeu_ps(y + i, _mm512_mul_ps(at, normal(at)));
    }
  }
};

// tanh of float for sixteen at a time: 1 ulp. Over 32 pieces of |x| up to 9.1, where it is 1, tanh(x) is tanh(edge) + d Q(d),
// d = |x| - edge, with edges for which the first term is a float.
template <bool coarse>
class Function<Tanh<float, coarse>> : public EachVector<Tanh<float, coarse>> {
  using Pieces = Octaves<32>;
  static constexpr int kDegree = 4;  // of Q
  static constexpr float kEnd = 9.1f, kScale = (0.99999f - Pieces::kFirst) / kEnd;

  struct Table {
    alignas(64) float edges[32], first[32], quotient[kDegree + 1][32];
    Table() {
      Pieces::visit([&](double low, double width) {
        const uint32_t at = Pieces::piece(low);
        const double start = (low - Pieces::kFirst) / kScale, span = width / kScale;
        const float edge = exact_near(float(start), float(span));
        const double value = std::tanh(double(edge)), scale = std::cosh(double(edge));
        const auto fit = fitted<kDegree>(start - edge, span, [&](double d) {  // (tanh(edge + d) - tanh(edge)) / d
          return (d == 0 ? 1 : std::sinh(d) / d) / (scale * std::cosh(edge + d));
        });
        edges[at] = edge, first[at] = float(value);
        for (int power = 0; power <= kDegree; ++power) quotient[power][at] = float(fit[power]);
      });
    }
  };
  static const Table& made() {
    static const Table table;
    return table;
  }
  // Of the first half of a piece, or of 0, a float whose tanh is one, or nearly.
  static float exact_near(float start, float span) {
    float best = start;
    double least = 1;
    for (int k = 0; k < 512 && least > 0; ++k) {
      const float next = start + span * float(k) / 1024;
      const double value = std::tanh(double(next)), off = std::abs(value - float(value)) / value;
      if (!(off >= least)) best = next, least = next == 0 ? 0 : off;
    }
    return best;
  }

  const Table& table = made();

 public:
  MEMKIT_TARGET_V4 __m512 value(__m512 x) const {
    const __m512 t = _mm512_min_ps(_mm512_set1_ps(kEnd), _mm512_abs_ps(x));  // NaN stays
    const __m512 w = _mm512_fmadd_ps(t, _mm512_set1_ps(kScale), _mm512_set1_ps(Pieces::kFirst));
    const __m512i piece = _mm512_srli_epi32(_mm512_castps_si512(w), Pieces::kShift);
    const __m512 d = _mm512_sub_ps(t, look_up(table.edges, piece));
    __m512 q = look_up(table.quotient[kDegree], piece);
#pragma GCC unroll 8
    for (int power = kDegree - 1; power >= 0; --power) q = _mm512_fmadd_ps(q, d, look_up(table.quotient[power], piece));
    const __m512 y = _mm512_fmadd_ps(q, d, look_up(table.first, piece));
    const __m512i sign = _mm512_set1_epi32(int(0x80000000));
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(y), _mm512_castps_si512(x), sign, 0xd8));
  }
};

}  // namespace sixteen

template <class Op>
struct Values<V4Lanes, Op> {
  static constexpr bool exists = sixteen::Function<Op>::exists;

  // Pointers may be the same.
  template <bool ahead>
  MEMKIT_TARGET_V4 static void write(const float* x, float* y, int64_t n) {
    const sixteen::Function<Op> function;
    int64_t i = 0;
    for (; i + kTile <= n; i += kTile) {
      if constexpr (ahead) {
        prefetch_tile(x + i);
        prefetch_tile(y + i);
      }
      function.tile(x + i, y + i);
    }
    if (i == n) return;
    alignas(64) float rest[kTile] = {};
    std::copy_n(x + i, n - i, rest);
    function.tile(rest, rest);
    std::copy_n(rest, n - i, y + i);
  }
};

#endif

}  // namespace memkit::cpu
