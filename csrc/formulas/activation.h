// Activation functions: value, slope, and slope from the output, once for every engine.
#pragma once

#include "math.h"

namespace memkit {

enum class Act : int {
  // Monotone: the slope follows from the output.
  relu,
  leaky_relu,
  elu,
  sigmoid,
  tanh,
  softplus,
  hardtanh,
  hardsigmoid,
  relu_squared,
  // One minimum: the slope follows from the output and the side of the minimum.
  gelu,
  gelu_tanh,
  quick_gelu,
  silu,
  mish,
  hardswish
};

// leaky_relu: a = negative_slope
// elu:        a = alpha, b = scale, c = input_scale; y = x > 0 ? b*x : b*a*expm1(c*x)
// softplus:   a = beta, b = threshold
// hardtanh:   a = min, b = max
// selu and celu are elu with other parameters; relu6 is hardtanh(0, 6).
struct ActParams {
  double a = 0, b = 0, c = 0;
};

namespace detail {

// sigmoid(z), 1 - sigmoid(z) and their product, each to its own relative precision.
template <class T>
struct Logistic {
  T s, r, sr;
};
template <class T>
MEMKIT_FN Logistic<T> logistic(T z) {
  T e = memkit::exp_falling(-memkit::absolute(z));
  T small = divide(e, T(1) + e), large = T(1) - small;
  bool negative = z < T(0);
  return {select(negative, small, large), select(negative, large, small), small * large};
}

}  // namespace detail

template <class T>
struct Relu {
  static constexpr bool branch = false;
  MEMKIT_FN explicit Relu(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return select(x < T(0), T(0), x); }
  MEMKIT_FN T slope(T x) const { return select(x <= T(0), T(0), T(1)); }
  MEMKIT_FN T slope_from_output(T y) const { return select(y <= T(0), T(0), T(1)); }
};

template <class T>
struct LeakyRelu {
  static constexpr bool branch = false;
  T a;
  MEMKIT_FN explicit LeakyRelu(const ActParams& p) : a(T(p.a)) {}
  MEMKIT_FN T value(T x) const { return select(x > T(0), x, x * a); }
  MEMKIT_FN T slope(T x) const { return select(x > T(0), T(1), a); }
  MEMKIT_FN T slope_from_output(T y) const { return select(y > T(0), T(1), a); }
};

template <class T>
struct Elu {
  static constexpr bool branch = false;
  T scale, input_scale, negative;
  MEMKIT_FN explicit Elu(const ActParams& p) : scale(T(p.b)), input_scale(T(p.c)), negative(T(p.a * p.b)) {}
  MEMKIT_FN T value(T x) const { return select(x > T(0), x * scale, memkit::expm1(x * input_scale) * negative); }
  MEMKIT_FN T slope(T x) const {
    return select(x > T(0), scale, memkit::exp(x * input_scale) * negative * input_scale);
  }
  MEMKIT_FN T slope_from_output(T y) const { return select(y > T(0), scale, (y + negative) * input_scale); }
};

template <class T>
struct Sigmoid {
  static constexpr bool branch = false;
  MEMKIT_FN explicit Sigmoid(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return memkit::sigmoid(x); }
  MEMKIT_FN T slope(T x) const { return slope_from_output(value(x)); }
  MEMKIT_FN T slope_from_output(T y) const { return (T(1) - y) * y; }
};

template <class T>
struct Tanh {
  static constexpr bool branch = false;
  MEMKIT_FN explicit Tanh(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return memkit::tanh(x); }
  MEMKIT_FN T slope(T x) const { return slope_from_output(value(x)); }
  MEMKIT_FN T slope_from_output(T y) const { return T(1) - y * y; }
};

template <class T>
struct Softplus {
  static constexpr bool branch = false;
  T beta, inverse_beta, threshold;
  MEMKIT_FN explicit Softplus(const ActParams& p) : beta(T(p.a)), inverse_beta(T(1 / p.a)), threshold(T(p.b)) {}
  MEMKIT_FN T value(T x) const {
    T z = x * beta;
    T soft = at_least(z, T(0)) + memkit::log1p_unit(memkit::exp_falling(-memkit::absolute(z)));
    return select(z > threshold, x, soft * inverse_beta);
  }
  MEMKIT_FN T slope(T x) const {
    T z = x * beta;
    return select(z > threshold, T(1), detail::logistic(z).s);
  }
  MEMKIT_FN T slope_from_output(T y) const {
    T z = y * beta;
    return select(z > threshold, T(1), -memkit::expm1(-z));
  }
};

template <class T>
struct Hardtanh {
  static constexpr bool branch = false;
  T low, high;
  MEMKIT_FN explicit Hardtanh(const ActParams& p) : low(T(p.a)), high(T(p.b)) {}
  MEMKIT_FN T value(T x) const { return at_most(at_least(x, low), high); }
  MEMKIT_FN T slope(T x) const { return select((x > low) & (x < high), T(1), T(0)); }
  MEMKIT_FN T slope_from_output(T y) const { return slope(y); }
};

template <class T>
struct Hardsigmoid {
  static constexpr bool branch = false;
  MEMKIT_FN explicit Hardsigmoid(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return at_most(at_least(x + T(3), T(0)), T(6)) * (T(1) / T(6)); }
  MEMKIT_FN T slope(T x) const { return select((x > T(-3)) & (x < T(3)), T(1) / T(6), T(0)); }
  MEMKIT_FN T slope_from_output(T y) const { return select((y > T(0)) & (y < T(1)), T(1) / T(6), T(0)); }
};

template <class T>
struct ReluSquared {
  static constexpr bool branch = false;
  MEMKIT_FN explicit ReluSquared(const ActParams&) {}
  MEMKIT_FN T value(T x) const {
    T y = select(x < T(0), T(0), x);
    return y * y;
  }
  MEMKIT_FN T slope(T x) const { return select(x < T(0), T(0), x + x); }
  MEMKIT_FN T slope_from_output(T y) const { return T(2) * memkit::sqrt(y); }
};

namespace detail {

// f, f' and f''.
template <class T>
struct Jet {
  T f, d1, d2;
};

// A function of u, one for each side of the minimum. Coefficients are chosen by bit mask, so one evaluation serves
// both: a select would do too, but GCC splits the code by it and evaluates both sides, divisions and roots included.
template <class T>
struct Start {
  using Bits = typename Format<T>::Bits;
  Bits mask;  // all ones right of the minimum
  T u;
  MEMKIT_FN explicit Start(bool right) : mask(Bits(0) - Bits(right)), u(0) {}
  MEMKIT_FN T pick(T on_right, T on_left) const {
    return from_bits<T>(bits_of(on_left) ^ (mask & (bits_of(on_right) ^ bits_of(on_left))));
  }
  MEMKIT_FN T ratio(T p0, T p1, T p2, T p3, T q1, T q2, T q3) const {
    return divide(u * polynomial(u, p0, p1, p2, p3), polynomial(u, T(1), q1, q2, q3));
  }
};

// u of the function Op at `above` = y - y0: sqrt(y - y0) right of the minimum, sqrt(log(y0 / y)) left of it. In u the
// inverse and the slope are smooth on either side.
template <bool fine, class Op, class T>
MEMKIT_FN Start<T> smooth_variable(T y, T above, bool right) {
  constexpr T inverse_y0 = T(1 / Op::y0);
  above = at_least(above, T(0));
  T left = -memkit::log_near_one<fine>(at_least(y * inverse_y0, T(1e-34)), above * inverse_y0);
  Start<T> s(right);
  s.u = memkit::sqrt(s.pick(above, at_least(left, T(0))));
  return s;
}

// The slope where Op takes the value y on the given side of its minimum; `above` is y - y0.
//
// In float the slope itself is a rational function of u (Op::slope_fit; left of the minimum, of which y is a factor).
// In double Op::start gives x - x0 from u by a small one, and two Newton steps follow: x moves by dx = (y - f) / f',
// the last time as f'' dx in the slope. Next to the minimum that quotient is rounding noise while the start is exact
// in relative terms, so there the start stands.
template <class Op>
MEMKIT_FN float slope_at_output(float y, float above, bool right) {
  Start<float> s = smooth_variable<true, Op>(y, above, right);
  s.u = at_most(s.u, s.pick(Op::reach, 5));  // 1 from here on; below 1e-10
  float factor = s.u * s.pick(1, y);
  s.u = s.u - s.pick(Op::centre, 0);
  return Op::slope_fit(s, factor);
}

template <class Op>
MEMKIT_FN double slope_at_output(double y, double above, bool right) {
  constexpr double settled = 1e-12;
  y = at_most(y, 64.);
  double x = select(y > Op::far, y, Op::x0 + Op::start(smooth_variable<false, Op>(y, above, right)));
  Jet<double> j = Op::jet(x);
  x = x + select(above < settled, 0., (y - j.f) / j.d1);
  j = Op::jet(x);
  return j.d1 + j.d2 * select(above < settled, 0., (y - j.f) / j.d1);
}

// y - y0, where y0 has more digits than T.
template <class Op, class T>
MEMKIT_FN T above_minimum(T y) {
  constexpr T high = T(Op::y0), low = T((Op::y0 - double(high)) + Op::y0_rest);
  return (y - high) - low;
}

}  // namespace detail

template <class T>
struct Gelu {
  static constexpr bool branch = true;
  static constexpr double x0 = -0.75179152469356445746, y0 = -0.16997120747990366169, y0_rest = -4.06e-18;
  static constexpr double curvature = 0.431493992314, far = 5.9;
  static constexpr double reach = 2.4798, centre = 1.24;
  MEMKIT_FN explicit Gelu(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return x * parts(x).cdf; }
  MEMKIT_FN T slope(T x) const { return parts(x).slope; }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN T slope_from_output(T y, bool right) const {
    return detail::slope_at_output<Gelu<T>>(y, detail::above_minimum<Gelu>(y), right);
  }

  MEMKIT_FN static detail::Jet<T> jet(T x) {
    Parts v = parts(x);
    return {x * v.cdf, v.slope, v.pdf * (T(2) - x * x)};
  }
  // Fit: fit.py; root of the slope error 3.7e-4 right (x <= 6), 4.4e-6 left (x >= -13).
  MEMKIT_FN static T start(const detail::Start<T>& s) {
    return s.ratio(s.pick(2.1447287, -0.88768269), s.pick(0.42744428, -0.8866131), s.pick(-0.85098497, -0.32876368),
                   s.pick(0.35486587, 0), s.pick(0.81073497, 0.73406345), s.pick(-0.84643, 0.23397035),
                   s.pick(0.22822859, 0));
  }
  // Fit: fit.py; error of the slope 1.3e-07 right, 6.1e-11 left.
  MEMKIT_FN static T slope_fit(const detail::Start<T>& s, T factor) {
    T p = detail::polynomial(s.u, s.pick(0.909879773, 2.25327753), s.pick(-2.0795077, 2.41324586),
                             s.pick(2.96144848, 1.59955885), s.pick(-1.01824941, 0.552142185),
                             s.pick(-0.322073469, 0.0984734832), s.pick(0.966712786, 0), s.pick(-0.202756069, 0),
                             s.pick(-0.0276986635, 0), s.pick(0.0203698029, 0));
    T q = detail::polynomial(s.u, T(1), s.pick(-1.43551485, 1.60346872), s.pick(2.14878803, 1.08670886),
                             s.pick(-0.243843427, 0.392483838), s.pick(0.471308614, 0.0694962052),
                             s.pick(0.54807896, 0), s.pick(0.155111222, 0), s.pick(0.0622333813, 0));
    return detail::divide(factor * p, q);
  }

 private:
  struct Parts {
    T cdf, pdf, slope;
  };
  MEMKIT_FN static Parts parts(T x) {
    constexpr T peak = T(0.39894228040143267794);  // 1 / sqrt(2 pi)
    T t = at_most(memkit::absolute(x), normal_end<T>);
    T e = memkit::exp_falling(T(-0.5) * t * t), ratio = memkit::normal_tail_ratio(t);
    T tail = e * ratio, below = e * (ratio - peak * t);  // Phi(-t) and gelu'(-t)
    bool negative = x < T(0);
    return {select(negative, tail, T(1) - tail), peak * e, select(negative, below, T(1) - below)};
  }
};

template <class T>
struct GeluTanh {  // x (1 + tanh(z / 2)) / 2 = x sigmoid(z), z = sqrt(8 / pi) (x + 0.044715 x^3)
  static constexpr bool branch = true;
  static constexpr double x0 = -0.75246142207101625849, y0 = -0.17004075057125405064, y0_rest = 1.17e-17;
  static constexpr double curvature = 0.430400091025, far = 5.9;
  static constexpr double reach = 2.3855, centre = 1.19;
  MEMKIT_FN explicit GeluTanh(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return detail::divide(x, T(2) * memkit::half_exp(-x * (k + kc * x * x)) + T(1)); }
  MEMKIT_FN T slope(T x) const { return jet(x).d1; }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN T slope_from_output(T y, bool right) const {
    return detail::slope_at_output<GeluTanh<T>>(y, detail::above_minimum<GeluTanh>(y), right);
  }

  MEMKIT_FN static detail::Jet<T> jet(T x) {
    x = at_least(at_most(x, T(22)), T(-22));  // sigmoid is 0 or 1 outside
    T xx = x * x, z1 = k + T(3) * kc * xx, z2 = T(6) * kc * x;
    detail::Logistic<T> v = detail::logistic(x * (k + kc * xx));
    return {x * v.s, v.s + x * z1 * v.sr, v.sr * (T(2) * z1 + x * (z1 * z1 * (v.r - v.s) + z2))};
  }
  // Fit: fit.py; root of the slope error 2.9e-4 right (x <= 6), 3.1e-5 left (x >= -10).
  MEMKIT_FN static T start(const detail::Start<T>& s) {
    return s.ratio(s.pick(2.1500056, -0.88935786), s.pick(0.5585279, -0.37296676), s.pick(-0.96844669, -0.044393662),
                   s.pick(0.39241485, 0), s.pick(0.88791645, 0.15669086), s.pick(-0.90920342, 0.066508569),
                   s.pick(0.24568823, 0));
  }
  // Fit: fit.py; error of the slope 1.7e-07 right, 1.4e-08 left.
  MEMKIT_FN static T slope_fit(const detail::Start<T>& s, T factor) {
    T p = detail::polynomial(s.u, s.pick(0.948202737, 2.24996583), s.pick(-2.4337083, -0.130673693),
                             s.pick(3.03741196, 0.624167214), s.pick(-0.895096156, -0.0465223586),
                             s.pick(-0.988303587, 0.102551324), s.pick(1.10638509, 0), s.pick(-0.178777721, 0),
                             s.pick(-0.127685088, 0), s.pick(0.0442389355, 0));
    T q = detail::polynomial(s.u, T(1), s.pick(-1.77045621, 0.475554863), s.pick(2.0072795, 0.0513712117),
                             s.pick(-0.392392326, 0.112474395), s.pick(-0.0822120082, 0.0300722958),
                             s.pick(0.369666826, 0), s.pick(-0.00989512593, 0), s.pick(0.000735681597, 0));
    return detail::divide(factor * p, q);
  }

 private:
  static constexpr T k = T(1.59576912160573071176), kc = T(1.59576912160573071176 * 0.044715);
};

template <class T>
struct Silu {
  static constexpr bool branch = true;
  static constexpr double x0 = -1.2784645427610737951, y0 = -0.27846454276107379511, y0_rest = 1.55e-18;
  static constexpr double curvature = 0.21781170572, far = 19.9;
  static constexpr double reach = 4.5007, centre = 1.58;
  MEMKIT_FN explicit Silu(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return detail::divide(x, T(2) * memkit::half_exp(-x) + T(1)); }
  MEMKIT_FN T slope(T x) const { return jet(x).d1; }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN T slope_from_output(T y, bool right) const {
    return detail::slope_at_output<Silu<T>>(y, detail::above_minimum<Silu>(y), right);
  }

  MEMKIT_FN static detail::Jet<T> jet(T x) {
    detail::Logistic<T> v = detail::logistic(x);
    return {x * v.s, v.s + x * v.sr, v.sr * (T(2) + x * (v.r - v.s))};
  }
  // Fit: fit.py; root of the slope error 5.1e-4 right (x <= 20), 1.4e-4 left (x >= -85).
  MEMKIT_FN static T start(const detail::Start<T>& s) {
    return s.ratio(s.pick(3.0236385, -1.6028421), s.pick(1.285931, -0.59365307), s.pick(-0.56287499, -0.10951746),
                   s.pick(0.34332345, 0), s.pick(1.0889993, 0.03149967), s.pick(-0.37494881, 0.0048442616),
                   s.pick(0.089853072, 0));
  }
  // Fit: fit.py; error of the slope 2.2e-07 right, 4.9e-08 left.
  MEMKIT_FN static T slope_fit(const detail::Start<T>& s, T factor) {
    T p = detail::polynomial(s.u, s.pick(0.696093044, 1.25076578), s.pick(0.0587394868, -0.405398719),
                             s.pick(0.378987349, 0.338912347), s.pick(0.320063225, -0.00376485057),
                             s.pick(0.0744313149, -0.000790096943), s.pick(0.0450927645, 0), s.pick(0.0103399991, 0),
                             s.pick(-0.00105411587, 0), s.pick(9.76220505e-05, 0));
    T q = detail::polynomial(s.u, T(1), s.pick(0.721211508, 0.393945693), s.pick(0.936011194, 0.0852135195),
                             s.pick(0.722671663, 0.242537792), s.pick(0.421372497, 0), s.pick(0.187209522, 0),
                             s.pick(0.0514446511, 0), s.pick(0.00716342993, 0));
    return detail::divide(factor * p, q);
  }
};

template <class T>
struct QuickGelu {  // silu(g x) / g
  static constexpr bool branch = true;
  static constexpr double gain = 1.702;
  static constexpr double x0 = Silu<T>::x0 / gain, y0 = Silu<T>::y0 / gain, y0_rest = 0;
  static constexpr double curvature = Silu<T>::curvature * gain;
  MEMKIT_FN explicit QuickGelu(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return detail::divide(x, T(2) * memkit::half_exp(T(-gain) * x) + T(1)); }
  MEMKIT_FN T slope(T x) const {  // gain * x must not overflow: infinity times 0
    return Silu<T>::jet(T(gain) * at_least(at_most(x, T(1e30)), T(-1e30))).d1;
  }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN T slope_from_output(T y, bool right) const {
    // Scaled after the subtraction: a rounding before it would cost digits next to the minimum.
    return detail::slope_at_output<Silu<T>>(T(gain) * y, T(gain) * detail::above_minimum<QuickGelu>(y), right);
  }
};

template <class T>
struct Mish {  // x tanh(log(1 + e)) = x n / (n + 2), e = e^x, n = e (e + 2)
  static constexpr bool branch = true;
  static constexpr double x0 = -1.1924312145154952121, y0 = -0.30884341301725040663, y0_rest = 2.78e-17;
  static constexpr double curvature = 0.26694791405, far = 11.9;
  static constexpr double reach = 3.2654, centre = 1.63;
  MEMKIT_FN explicit Mish(const ActParams&) {}
  MEMKIT_FN T value(T x) const {
    T e = memkit::exp_falling(at_most(x, flat)), n = e * (e + T(2));
    return x * detail::divide(n, n + T(2));
  }
  MEMKIT_FN T slope(T x) const { return jet(x).d1; }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN T slope_from_output(T y, bool right) const {
    return detail::slope_at_output<Mish<T>>(y, detail::above_minimum<Mish>(y), right);
  }

  MEMKIT_FN static detail::Jet<T> jet(T x) {
    T z = at_most(x, flat), e = memkit::exp_falling(z);
    T n = e * (e + T(2)), a = e * (e + T(1)), u = detail::divide(T(1), n + T(2));
    T w = n * u, w1 = T(4) * a * u * u, w2 = T(4) * u * u * (a + e * e - T(4) * a * u * a);
    return {x * w, w + z * w1, T(2) * w1 + z * w2};
  }
  // Fit: fit.py; root of the slope error 4.5e-4 right (x <= 12), 7.5e-5 left (x >= -85).
  MEMKIT_FN static T start(const detail::Start<T>& s) {
    return s.ratio(s.pick(2.7337115, -1.5231509), s.pick(0.64474263, -0.76014502), s.pick(-0.75244069, -0.17362158),
                   s.pick(0.4675683, 0), s.pick(0.93246328, 0.1227528), s.pick(-0.57706259, 0.0032767741),
                   s.pick(0.17353503, 0));
  }
  // Fit: fit.py; error of the slope 1.5e-07 right, 4.6e-08 left.
  MEMKIT_FN static T slope_fit(const detail::Start<T>& s, T factor) {
    T p = detail::polynomial(s.u, s.pick(0.642508146, 1.31481135), s.pick(0.296628592, -0.135432045),
                             s.pick(1.55955085, 0.281185089), s.pick(0.680543884, -0.00422544539),
                             s.pick(0.666459493, -0.000437443114), s.pick(0.263853734, 0), s.pick(0.0053387777, 0),
                             s.pick(0.00980280279, 0), s.pick(-0.00113068342, 0));
    T q = detail::polynomial(s.u, T(1), s.pick(1.23611322, 0.675011989), s.pick(2.82519342, 0.243171372),
                             s.pick(2.46034363, 0.203556683), s.pick(2.04835711, 0), s.pick(0.943746662, 0),
                             s.pick(0.293187663, 0), s.pick(0.0375275425, 0));
    return detail::divide(factor * p, q);
  }

 private:
  static constexpr T flat = std::is_same<T, float>::value ? T(20) : T(40);  // tanh(log(1 + e^x)) is 1 from here on
};

template <class T>
struct Hardswish {
  static constexpr bool branch = true;
  static constexpr double x0 = -1.5, y0 = -0.375, curvature = 1.0 / 3;
  MEMKIT_FN explicit Hardswish(const ActParams&) {}
  MEMKIT_FN T value(T x) const {
    T bent = x * at_most(at_least(x + T(3), T(0)), T(6)) * (T(1) / T(6));
    return select(x >= T(3), x, bent);  // exact there, whatever 1/6 rounds to
  }
  MEMKIT_FN T slope(T x) const {
    T inner = x / T(3) + T(0.5);
    return select(x <= T(-3), T(0), select(x >= T(3), T(1), inner));
  }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN T slope_from_output(T y, bool right) const {
    T root = memkit::sqrt(at_least(T(9) + T(24) * y, T(0))) * (T(1) / T(6));
    T rising = select(y >= T(3), T(1), root);
    T falling = select(y >= T(0), T(0), -root);
    return select(right, rising, falling);
  }
};

// Calls f.template operator()<Op>(args...) with the struct of the kind.
template <class F, class... Args>
auto visit(Act kind, F&& f, Args&&... args) {
  switch (kind) {
    case Act::relu: return f.template operator()<Relu>(args...);
    case Act::leaky_relu: return f.template operator()<LeakyRelu>(args...);
    case Act::elu: return f.template operator()<Elu>(args...);
    case Act::sigmoid: return f.template operator()<Sigmoid>(args...);
    case Act::tanh: return f.template operator()<Tanh>(args...);
    case Act::softplus: return f.template operator()<Softplus>(args...);
    case Act::hardtanh: return f.template operator()<Hardtanh>(args...);
    case Act::hardsigmoid: return f.template operator()<Hardsigmoid>(args...);
    case Act::relu_squared: return f.template operator()<ReluSquared>(args...);
    case Act::gelu: return f.template operator()<Gelu>(args...);
    case Act::gelu_tanh: return f.template operator()<GeluTanh>(args...);
    case Act::quick_gelu: return f.template operator()<QuickGelu>(args...);
    case Act::silu: return f.template operator()<Silu>(args...);
    case Act::mish: return f.template operator()<Mish>(args...);
    case Act::hardswish: break;
  }
  return f.template operator()<Hardswish>(args...);
}

}  // namespace memkit
