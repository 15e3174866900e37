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

// value(x) of a vector.
template <class Op>
struct Function {
  static constexpr bool exists = false;
};
struct Exists {
  static constexpr bool exists = true;
};

template <bool coarse>
struct Function<Sigmoid<float, coarse>> : Exists {
  MEMKIT_TARGET_V4 __m512 value(__m512 x) const { return gated(_mm512_set1_ps(1), x); }
};

template <bool coarse>
struct Function<Silu<float, coarse>> : Exists {
  MEMKIT_TARGET_V4 __m512 value(__m512 x) const { return gated(x, x); }
};

template <bool coarse>
struct Function<QuickGelu<float, coarse>> : Exists {
  MEMKIT_TARGET_V4 __m512 value(__m512 x) const {
    return gated(x, _mm512_mul_ps(_mm512_set1_ps(float(QuickGelu<float>::gain)), x));
  }
};

template <bool coarse>
struct Function<GeluTanh<float, coarse>> : Exists {
  MEMKIT_TARGET_V4 __m512 value(__m512 x) const {
    using Op = GeluTanh<float>;
    const __m512 xx = _mm512_mul_ps(x, x);
    return gated(x, _mm512_mul_ps(x, _mm512_fmadd_ps(_mm512_set1_ps(Op::kc), xx, _mm512_set1_ps(Op::k))));
  }
};

template <bool coarse>
struct Function<Mish<float, coarse>> : Exists {
  MEMKIT_TARGET_V4 __m512 value(__m512 x) const {
    const __m512 two = _mm512_set1_ps(2), at_most = _mm512_min_ps(_mm512_set1_ps(Mish<float>::flat), x);
    const __m512 e = exponential<1>(at_most, detail::Format<float>::lowest);
    const __m512 n = _mm512_mul_ps(e, _mm512_add_ps(e, two));
    return _mm512_mul_ps(x, quotient(n, _mm512_add_ps(n, two)));
  }
};

// max(x, 0) - |x| Phi(-|x|), Phi over 31 pieces of equal width up to 12.8, where the value is 2e-36 and from where on it is 0.
// Relative error 2 ulp from -3 on, 4e-7 at -4, 1e-5 at -6, 3e-4 at -8 and 3e-2 at the end.
template <bool coarse>
class Function<Gelu<float, coarse>> : public Exists {
  static constexpr int kDegree = 6, kPieces = 31;
  static constexpr float kWidth = 0.42f;
  struct Table {
    alignas(64) float coefficients[kDegree + 1][32] = {};  // of Phi(-t) in t - k kWidth; the last are 0
    Table() {
      for (int k = 0; k < kPieces; ++k) {
        const double middle = k * double(kWidth);
        const auto fit = fitted<kDegree>(
            -kWidth / 2, kWidth, [&](double d) { return 0.5 * std::erfc((middle + d) * 0.70710678118654752440); });
        for (int power = 0; power <= kDegree; ++power) coefficients[power][k] = float(fit[power]);
      }
    }
  };
  static const Table& made() {
    static const Table table;
    return table;
  }
  const Table& table = made();

 public:
  MEMKIT_TARGET_V4 __m512 value(__m512 x) const {
    // |min(x, end)|, so that -infinity gives NaN as 0 times infinity, as in stock; end for NaN, which stays in `positive`.
    const __m512 end = _mm512_set1_ps(kPieces * kWidth), size = _mm512_range_ps(x, end, 0b1000);
    const __m512 t = _mm512_min_ps(size, end), positive = _mm512_max_ps(_mm512_set1_ps(-0.f), x);
    const __m512 round = _mm512_set1_ps(detail::Format<float>::round);
    const __m512 shifted = _mm512_fmadd_ps(t, _mm512_set1_ps(1 / kWidth), round), k = _mm512_sub_ps(shifted, round);
    const __m512 d = _mm512_fnmadd_ps(k, _mm512_set1_ps(kWidth), t);
    const __m512i piece = _mm512_castps_si512(shifted);
    __m512 tail = look_up(table.coefficients[kDegree], piece);
#pragma GCC unroll 8
    for (int power = kDegree - 1; power >= 0; --power)
      tail = _mm512_fmadd_ps(tail, d, look_up(table.coefficients[power], piece));
    return _mm512_fnmadd_ps(size, tail, positive);
  }
};

// tanh of float for sixteen at a time: 1 ulp. Over 32 pieces of |x| up to 9.1, where it is 1, tanh(x) is tanh(edge) + d Q(d),
// d = |x| - edge, with edges for which the first term is a float.
template <bool coarse>
class Function<Tanh<float, coarse>> : public Exists {
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
class Values<V4Lanes, Op> {
  sixteen::Function<Op> function;

 public:
  static constexpr bool exists = sixteen::Function<Op>::exists;

  // Here and below, pointers may be the same.
  MEMKIT_TARGET_V4 void tile(const float* x, float* y) const {
    for (int i = 0; i < kTile; i += 16) _mm512_storeu_ps(y + i, function.value(_mm512_loadu_ps(x + i)));
  }

  template <bool ahead>
  MEMKIT_TARGET_V4 static void write(const float* x, float* y, int64_t n) {
    const Values values{};
    int64_t i = 0;
    for (; i + kTile <= n; i += kTile) {
      if constexpr (ahead) {
        prefetch_tile(x + i);
        prefetch_tile(y + i);
      }
      values.tile(x + i, y + i);
    }
    if (i == n) return;
    alignas(64) float rest[kTile] = {};
    std::copy_n(x + i, n - i, rest);
    values.tile(rest, rest);
    std::copy_n(rest, n - i, y + i);
  }
};

#endif

}  // namespace memkit::cpu
