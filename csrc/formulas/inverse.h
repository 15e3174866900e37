// The inverses of the functions with one minimum: the slope from the output and the side of the minimum.
#pragma once

#include "math.h"

namespace memkit::detail {

// f, f' and f''.
template <class T>
struct Jet {
  T f, d1, d2;
};

// Coefficients of 1, u, u^2, ...
template <int n>
struct Series {
  float c[n];
};
template <class... C>
Series(C...) -> Series<int(sizeof...(C))>;

// A function of u, one for each side of the minimum. On the CPU coefficients are chosen, so that one evaluation serves both;
// a GPU's instruction holds a constant but chooses between none, so there both are evaluated.
template <class T>
struct Start {
  using Bits = typename Format<T>::Bits;
  Bits mask;  // all ones right of the minimum
  T u;
  MEMKIT_FN explicit Start(bool right) : mask(mask_of<T>(right)), u(0) {}
  MEMKIT_FN T pick(T on_right, T on_left) const { return choose(mask, on_right, on_left); }
  template <int n, int m>
  MEMKIT_FN float series(const Series<n>& right, const Series<m>& left) const {
    static_assert(m <= n);
#if defined(MEMKIT_DEVICE)
    return select(mask != 0, from<0>(right), from<0>(left));
#else
    return from<0>(right, left);
#endif
  }
  MEMKIT_FN T ratio(T p0, T p1, T p2, T p3, T q1, T q2, T q3) const {
    return divide(u * polynomial(u, p0, p1, p2, p3), polynomial(u, T(1), q1, q2, q3));
  }

 private:
  template <int k, int n>
  MEMKIT_FN float from(const Series<n>& all) const {
    if constexpr (k + 1 < n) return all.c[k] + u * from<k + 1>(all);
    return all.c[k];
  }
  template <int k, int n, int m>
  MEMKIT_FN float from(const Series<n>& right, const Series<m>& left) const {
    const float c = pick(right.c[k], k < m ? left.c[k < m ? k : 0] : 0.f);
    if constexpr (k + 1 < n) return c + u * from<k + 1>(right, left);
    return c;
  }
};

// u of the function Op at `above` = y - y0: sqrt(y - y0) right of the minimum, sqrt(log(y0 / y)) left of it. In u the
// inverse and the slope are smooth on either side.
template <bool fine, class Op, class T>
MEMKIT_FN Start<T> smooth_variable(T y, T above, bool right) {
  constexpr T inverse_y0 = T(1 / Op::y0);
  T log = memkit::log_near_one<fine>(at_least(y * inverse_y0, T(1e-34)), above * inverse_y0);
  Start<T> s(right);
  s.u = near_sqrt_of_normal(at_least(s.pick(above, -log), T(0)));
  return s;
}

// The slope where Op takes the value y on the given side of its minimum; `above` is y - y0.
//
// In float the slope itself is a rational function of u (Op::slope_fit; left of the minimum, of which y is a factor).
// Coarse, for a y of 2 bytes, it is one of s = sqrt(y - y0), negative on the left, in which both sides are one smooth
// function but for the end of the left side (Op::coarse_fit; 0 at s = 0 and at -coarse_end, where y = 0).
// In double Op::start gives x - x0 from u by a small one, and two Newton steps follow: x moves by dx = (y - f) / f',
// the last time as f'' dx in the slope. Next to the minimum that quotient is rounding noise while the start is exact
// in relative terms, so there the start stands.
template <bool coarse, class Op>
MEMKIT_FN float slope_at_output(float y, float above, bool right) {
  if constexpr (coarse) {
    float u = at_most(near_sqrt_of_normal(at_least(above, 0.f)), Op::coarse_reach);
    float s = signed_by(right, u);
    float slope = Op::coarse_fit(s - Op::coarse_centre, s * (s + Op::coarse_end));
    return select(u >= Op::coarse_reach, 1.f, slope);
  }
  Start<float> s = smooth_variable<true, Op>(y, above, right);
  s.u = at_most(s.u, s.pick(Op::reach, 5));  // 1 from here on; below 1e-10
  float factor = s.u * s.pick(1, y);
  s.u = s.u - s.pick(Op::centre, 0);
  return Op::slope_fit(s, factor);
}

template <bool, class Op>
MEMKIT_FN double slope_at_output(double y, double above, bool right) {
  constexpr double settled = 1e-12;
  y = at_most(y, 64.);
  double x = select(y > Op::far, y, Op::x0 + Op::start(smooth_variable<false, Op>(y, above, right)));
  Jet<double> j = Op::jet(x);
  x = x + select(above < settled, 0., (y - j.f) / j.d1);
  j = Op::jet(x);
  return j.d1 + j.d2 * select(above < settled, 0., (y - j.f) / j.d1);
}

// y0 in two parts, as it has more digits than T; and y - y0.
template <class Op, class T>
struct Minimum {
  static constexpr T high = T(Op::y0), low = T((Op::y0 - double(high)) + Op::y0_rest);
};
template <class Op, class T>
MEMKIT_FN T above_minimum(T y) {
  constexpr T high = Minimum<Op, T>::high, low = Minimum<Op, T>::low;
  return (y - high) - low;
}

struct GeluInverse {
  static constexpr double x0 = -0.75179152469356445746, y0 = -0.16997120747990366169, y0_rest = -4.06e-18;
  static constexpr double far = 5.9;
  static constexpr double reach = 2.4798, centre = 1.24;
  static constexpr float coarse_reach = 2.3173f, coarse_end = 0.41227565f, coarse_centre = 0.95f;
  // Fit: fit.py; root of the slope error 3.7e-4 right (x <= 6), 4.4e-6 left (x >= -13).
  template <class T>
  MEMKIT_FN static T start(const Start<T>& s) {
    return s.ratio(s.pick(2.1447287, -0.88768269), s.pick(0.42744428, -0.8866131), s.pick(-0.85098497, -0.32876368),
                   s.pick(0.35486587, 0), s.pick(0.81073497, 0.73406345), s.pick(-0.84643, 0.23397035),
                   s.pick(0.22822859, 0));
  }
  // Fit: fit.py; error of the slope 1.3e-07 right, 6.1e-11 left.
  MEMKIT_FN static float slope_fit(const Start<float>& s, float factor) {
    float p = s.series(Series{0.909879773f, -2.0795077f, 2.96144848f, -1.01824941f, -0.322073469f, 0.966712786f,
                              -0.202756069f, -0.0276986635f, 0.0203698029f},
                       Series{2.25327753f, 2.41324586f, 1.59955885f, 0.552142185f, 0.0984734832f});
    float q = s.series(
        Series{1.f, -1.43551485f, 2.14878803f, -0.243843427f, 0.471308614f, 0.54807896f, 0.155111222f, 0.0622333813f},
        Series{1.f, 1.60346872f, 1.08670886f, 0.392483838f, 0.0694962052f});
    return divide(factor * p, q);
  }
  // Fit: fit.py; error of the slope 1.3e-4.
  MEMKIT_FN static float coarse_fit(float s, float factor) {
    return divide(factor * polynomial(s, 0.81506691f, -0.88953703f, -0.017443327f, 0.95304077f, -0.23274523f,
                                      -0.16028845f, 0.077235628f),
                  polynomial(s, 1.f, 0.15128128f, -0.24599283f, 0.811111f, 0.61989968f, 0.13640976f, 0.034810999f));
  }
};

struct GeluTanhInverse {
  static constexpr double x0 = -0.75246142207101625849, y0 = -0.17004075057125405064, y0_rest = 1.17e-17;
  static constexpr double far = 5.9;
  static constexpr double reach = 2.3855, centre = 1.19;
  static constexpr float coarse_reach = 2.2738f, coarse_end = 0.41235998f, coarse_centre = 0.93f;
  // Fit: fit.py; root of the slope error 2.9e-4 right (x <= 6), 3.1e-5 left (x >= -10).
  template <class T>
  MEMKIT_FN static T start(const Start<T>& s) {
    return s.ratio(s.pick(2.1500056, -0.88935786), s.pick(0.5585279, -0.37296676), s.pick(-0.96844669, -0.044393662),
                   s.pick(0.39241485, 0), s.pick(0.88791645, 0.15669086), s.pick(-0.90920342, 0.066508569),
                   s.pick(0.24568823, 0));
  }
  // Fit: fit.py; error of the slope 1.7e-07 right, 1.4e-08 left.
  MEMKIT_FN static float slope_fit(const Start<float>& s, float factor) {
    float p = s.series(Series{0.948202737f, -2.4337083f, 3.03741196f, -0.895096156f, -0.988303587f, 1.10638509f,
                              -0.178777721f, -0.127685088f, 0.0442389355f},
                       Series{2.24996583f, -0.130673693f, 0.624167214f, -0.0465223586f, 0.102551324f});
    float q = s.series(Series{1.f, -1.77045621f, 2.0072795f, -0.392392326f, -0.0822120082f, 0.369666826f,
                              -0.00989512593f, 0.000735681597f},
                       Series{1.f, 0.475554863f, 0.0513712117f, 0.112474395f, 0.0300722958f});
    return divide(factor * p, q);
  }
  // Fit: fit.py; error of the slope 1.4e-4.
  MEMKIT_FN static float coarse_fit(float s, float factor) {
    return divide(
        factor *
            polynomial(s, 0.83517328f, -0.90368975f, -0.15370408f, 1.0113011f, -0.24513831f, -0.2150501f, 0.093940703f),
        polynomial(s, 1.f, 0.14647329f, -0.40947812f, 0.66704095f, 0.49877312f, 0.009691829f, -0.0046561611f));
  }
};

struct SiluInverse {
  static constexpr double x0 = -1.2784645427610737951, y0 = -0.27846454276107379511, y0_rest = 1.55e-18;
  static constexpr double far = 19.9;
  static constexpr double reach = 4.5007, centre = 1.58;
  static constexpr float coarse_reach = 3.8443f, coarse_end = 0.5276974f, coarse_centre = 1.66f;
  // Fit: fit.py; root of the slope error 5.1e-4 right (x <= 20), 1.4e-4 left (x >= -85).
  template <class T>
  MEMKIT_FN static T start(const Start<T>& s) {
    return s.ratio(s.pick(3.0236385, -1.6028421), s.pick(1.285931, -0.59365307), s.pick(-0.56287499, -0.10951746),
                   s.pick(0.34332345, 0), s.pick(1.0889993, 0.03149967), s.pick(-0.37494881, 0.0048442616),
                   s.pick(0.089853072, 0));
  }
  // Fit: fit.py; error of the slope 2.2e-07 right, 4.9e-08 left.
  MEMKIT_FN static float slope_fit(const Start<float>& s, float factor) {
    float p = s.series(Series{0.696093044f, 0.0587394868f, 0.378987349f, 0.320063225f, 0.0744313149f, 0.0450927645f,
                              0.0103399991f, -0.00105411587f, 9.76220505e-05f},
                       Series{1.25076578f, -0.405398719f, 0.338912347f, -0.00376485057f, -0.000790096943f});
    float q = s.series(Series{1.f, 0.721211508f, 0.936011194f, 0.722671663f, 0.421372497f, 0.187209522f, 0.0514446511f,
                              0.00716342993f},
                       Series{1.f, 0.393945693f, 0.0852135195f, 0.242537792f});
    return divide(factor * p, q);
  }
  // Fit: fit.py; error of the slope 2.3e-5.
  MEMKIT_FN static float coarse_fit(float s, float factor) {
    return divide(factor * polynomial(s, 0.30215358f, -0.089948564f, 0.18499903f, 0.039888674f, -0.015565342f,
                                      0.008616415f, -0.0010863554f),
                  polynomial(s, 1.f, 0.81327364f, 0.86962893f, 0.61382355f, 0.24685685f, 0.065115678f, 0.0062617883f));
  }
};

struct MishInverse {
  static constexpr double x0 = -1.1924312145154952121, y0 = -0.30884341301725040663, y0_rest = 2.78e-17;
  static constexpr double far = 11.9;
  static constexpr double reach = 3.2654, centre = 1.63;
  static constexpr float coarse_reach = 2.8825f, coarse_end = 0.55573682f, coarse_centre = 1.16f;
  // Fit: fit.py; root of the slope error 4.5e-4 right (x <= 12), 7.5e-5 left (x >= -85).
  template <class T>
  MEMKIT_FN static T start(const Start<T>& s) {
    return s.ratio(s.pick(2.7337115, -1.5231509), s.pick(0.64474263, -0.76014502), s.pick(-0.75244069, -0.17362158),
                   s.pick(0.4675683, 0), s.pick(0.93246328, 0.1227528), s.pick(-0.57706259, 0.0032767741),
                   s.pick(0.17353503, 0));
  }
  // Fit: fit.py; error of the slope 1.5e-07 right, 4.6e-08 left.
  MEMKIT_FN static float slope_fit(const Start<float>& s, float factor) {
    float p = s.series(Series{0.642508146f, 0.296628592f, 1.55955085f, 0.680543884f, 0.666459493f, 0.263853734f,
                              0.0053387777f, 0.00980280279f, -0.00113068342f},
                       Series{1.31481135f, -0.135432045f, 0.281185089f, -0.00422544539f, -0.000437443114f});
    float q = s.series(
        Series{1.f, 1.23611322f, 2.82519342f, 2.46034363f, 2.04835711f, 0.943746662f, 0.293187663f, 0.0375275425f},
        Series{1.f, 0.675011989f, 0.243171372f, 0.203556683f});
    return divide(factor * p, q);
  }
  // Fit: fit.py; error of the slope 3.6e-5.
  MEMKIT_FN static float coarse_fit(float s, float factor) {
    return divide(factor * polynomial(s, 0.53890034f, -0.56819895f, 0.62836181f, 0.1253242f, -0.1146954f, 0.077345004f,
                                      -0.012223031f),
                  polynomial(s, 1.f, 0.17236211f, 0.97381008f, 0.94890314f, 0.54005532f, 0.27995981f, 0.03380055f));
  }
};

}  // namespace memkit::detail
