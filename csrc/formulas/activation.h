// Activation functions: value, slope, and slope from the output, once for every engine.
#pragma once

#include <limits>

#include "inverse.h"

namespace memkit {

enum class Act : int {
  identity,
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
template <bool coarse, class T>
MEMKIT_FN Logistic<T> logistic(T z) {
  T e = memkit::exp_falling<coarse>(-memkit::absolute(z));
  T small = divide(e, T(1) + e), large = T(1) - small;
  bool negative = z < T(0);
  return {select(negative, small, large), select(negative, large, small), small * large};
}

}  // namespace detail

template <class T, bool coarse = false>
struct Identity {
  static constexpr bool branch = false;
  MEMKIT_FN explicit Identity(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return x; }
  MEMKIT_FN T slope(T) const { return T(1); }
  MEMKIT_FN T slope_from_output(T) const { return T(1); }
};

template <class T, bool coarse = false>
struct Relu {
  static constexpr bool branch = false;
  MEMKIT_FN explicit Relu(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return select(x < T(0), T(0), x); }
  MEMKIT_FN T slope(T x) const { return select(x <= T(0), T(0), T(1)); }
  MEMKIT_FN T slope_from_output(T y) const { return select(y <= T(0), T(0), T(1)); }
  MEMKIT_FN T slope_where(bool active) const { return select(active, T(1), T(0)); }
  MEMKIT_FN bool active(T x) const { return !flat(x); }
  MEMKIT_FN bool flat(T x) const { return x <= T(0); }
  MEMKIT_FN bool flat_from_output(T y) const { return y <= T(0); }
};

template <class T, bool coarse = false>
struct LeakyRelu {
  static constexpr bool branch = false;
  T a;
  MEMKIT_FN explicit LeakyRelu(const ActParams& p) : a(T(p.a)) {}
  MEMKIT_FN T value(T x) const { return select(x > T(0), x, x * a); }
  MEMKIT_FN T slope(T x) const { return select(x > T(0), T(1), a); }
  MEMKIT_FN T slope_from_output(T y) const { return select(y > T(0), T(1), a); }
  MEMKIT_FN T slope_where(bool active) const { return select(active, T(1), a); }
  MEMKIT_FN bool active(T x) const { return x > T(0); }
};

template <class T, bool coarse = false>
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

template <class T, bool coarse = false>
struct Sigmoid {
  static constexpr bool branch = false;
  MEMKIT_FN explicit Sigmoid(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return memkit::times_sigmoid<coarse>(T(1), x); }
  MEMKIT_FN T slope(T x) const { return slope_from_output(value(x)); }
  MEMKIT_FN T slope_from_output(T y) const { return (T(1) - y) * y; }
};

template <class T, bool coarse = false>
struct Tanh {
  static constexpr bool branch = false;
  MEMKIT_FN explicit Tanh(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return memkit::tanh<coarse>(x); }
  MEMKIT_FN T slope(T x) const { return slope_from_output(value(x)); }
  MEMKIT_FN T slope_from_output(T y) const { return T(1) - y * y; }
};

template <class T, bool coarse = false>
struct Softplus {
  static constexpr bool branch = false;
  T beta, inverse_beta, threshold;
  MEMKIT_FN explicit Softplus(const ActParams& p) : beta(T(p.a)), inverse_beta(T(1 / p.a)), threshold(T(p.b)) {}
  MEMKIT_FN T value(T x) const {
    T z = x * beta;
    T soft = at_least(z, T(0)) + memkit::log1p_unit(memkit::exp_falling<coarse>(-memkit::absolute(z)));
    return select(z > threshold, x, soft * inverse_beta);
  }
  MEMKIT_FN T slope(T x) const {
    T z = x * beta;
    return select(z > threshold, T(1), detail::logistic<coarse>(z).s);
  }
  MEMKIT_FN T slope_from_output(T y) const {
    T z = y * beta;
    return select(z > threshold, T(1), -memkit::expm1(-z));
  }
};

template <class T, bool coarse = false>
struct Hardtanh {
  static constexpr bool branch = false;
  T low, high;
  MEMKIT_FN explicit Hardtanh(const ActParams& p) : low(T(p.a)), high(T(p.b)) {}
  MEMKIT_FN T value(T x) const { return at_most(at_least(x, low), high); }
  MEMKIT_FN T slope(T x) const { return select(flat(x), T(0), T(1)); }
  MEMKIT_FN T slope_from_output(T y) const { return slope(y); }
  MEMKIT_FN T slope_where(bool active) const { return select(active, T(1), T(0)); }
  MEMKIT_FN bool active(T x) const { return !flat(x); }
  MEMKIT_FN bool flat(T x) const { return (x <= low) | (x >= high); }
  MEMKIT_FN bool flat_from_output(T y) const { return flat(y); }
};

template <class T, bool coarse = false>
struct Hardsigmoid {
  static constexpr bool branch = false;
  MEMKIT_FN explicit Hardsigmoid(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return at_most(at_least(x + T(3), T(0)), T(6)) * (T(1) / T(6)); }
  MEMKIT_FN T slope(T x) const { return select(flat(x), T(0), T(1) / T(6)); }
  MEMKIT_FN T slope_from_output(T y) const { return select(flat_from_output(y), T(0), T(1) / T(6)); }
  MEMKIT_FN T slope_where(bool active) const { return select(active, T(1) / T(6), T(0)); }
  MEMKIT_FN bool active(T x) const { return !flat(x); }
  MEMKIT_FN bool flat(T x) const { return !((x > T(-3)) & (x < T(3))); }
  MEMKIT_FN bool flat_from_output(T y) const { return !((y > T(0)) & (y < T(1))); }
};

template <class T, bool coarse = false>
struct ReluSquared {
  static constexpr bool branch = false;
  MEMKIT_FN explicit ReluSquared(const ActParams&) {}
  MEMKIT_FN T value(T x) const {
    T y = at_least(x, T(0));
    return y * y;
  }
  MEMKIT_FN T slope(T x) const { return T(2) * at_least(x, T(0)); }
  MEMKIT_FN T slope_from_output(T y) const { return T(2) * memkit::near_sqrt(y); }
  MEMKIT_FN bool flat(T x) const { return x <= T(0); }
  MEMKIT_FN bool flat_from_output(T y) const { return y <= T(0); }
};

template <class T, bool coarse = false>
struct Gelu : detail::GeluInverse {
  static constexpr bool branch = true;
  MEMKIT_FN explicit Gelu(const ActParams&) {}
  MEMKIT_FN T value(T x) const {
    Tail v(x);
    return at_least(x, T(0)) - v.t * v.area;
  }
  MEMKIT_FN T slope(T x) const { return jet(x).d1; }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN T slope_from_output(T y, bool right) const {
    return detail::slope_at_output<coarse, Gelu>(y, detail::above_minimum<Gelu>(y), right);
  }

  MEMKIT_FN static detail::Jet<T> jet(T x) {
    Tail v(x);
    return {at_least(x, T(0)) - v.t * v.area, select(x < T(0), v.slope, T(1) - v.slope), v.density * (T(2) - x * x)};
  }

 private:
  // Phi(-t) and gelu'(-t), t = |x|; bounded above alone on the right, so that -infinity gives NaN as 0 times infinity.
  struct Tail {
    T t, density, area, slope;
    MEMKIT_FN explicit Tail(T x) : t(memkit::absolute(at_most(x, normal_end<T>))) {
      constexpr T peak = T(0.39894228040143267794);  // 1 / sqrt(2 pi)
      T e = memkit::bell<coarse>(t), ratio = memkit::normal_tail_ratio<coarse>(t);
      bool beyond = t > normal_end<T>;
      density = select(beyond, T(0), peak * e);
      area = select(beyond, T(0), e * ratio);
      slope = select(beyond, T(0), e * (ratio - peak * t));
    }
  };
};

// x (1 + tanh(z / 2)) / 2 = x sigmoid(z), z = sqrt(8 / pi) (x + 0.044715 x^3)
template <class T, bool coarse = false>
struct GeluTanh : detail::GeluTanhInverse {
  static constexpr bool branch = true;
  static constexpr T k = T(1.59576912160573071176), kc = T(1.59576912160573071176 * 0.044715);
  MEMKIT_FN explicit GeluTanh(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return memkit::times_sigmoid<coarse>(x, x * (k + kc * x * x)); }
  MEMKIT_FN T slope(T x) const { return jet(x).d1; }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN T slope_from_output(T y, bool right) const {
    return detail::slope_at_output<coarse, GeluTanh>(y, detail::above_minimum<GeluTanh>(y), right);
  }

  MEMKIT_FN static detail::Jet<T> jet(T x) {
    x = at_least(at_most(x, T(22)), T(-22));  // sigmoid is 0 or 1 outside
    T xx = x * x, z1 = k + T(3) * kc * xx, z2 = T(6) * kc * x;
    detail::Logistic<T> v = detail::logistic<coarse>(x * (k + kc * xx));
    return {x * v.s, v.s + x * z1 * v.sr, v.sr * (T(2) * z1 + x * (z1 * z1 * (v.r - v.s) + z2))};
  }
};

template <class T, bool coarse = false>
struct Silu : detail::SiluInverse {
  static constexpr bool branch = true;
  MEMKIT_FN explicit Silu(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return memkit::times_sigmoid<coarse>(x, x); }
  MEMKIT_FN T slope(T x) const { return jet(x).d1; }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN T slope_from_output(T y, bool right) const {
    return detail::slope_at_output<coarse, Silu>(y, detail::above_minimum<Silu>(y), right);
  }

  MEMKIT_FN static detail::Jet<T> jet(T x) {
    detail::Logistic<T> v = detail::logistic<coarse>(x);
    return {x * v.s, v.s + x * v.sr, v.sr * (T(2) + x * (v.r - v.s))};
  }
};

template <class T, bool coarse = false>
struct QuickGelu {  // silu(g x) / g
  static constexpr bool branch = true;
  static constexpr double gain = 1.702;
  static constexpr double x0 = Silu<T>::x0 / gain, y0 = Silu<T>::y0 / gain, y0_rest = 0;
  static constexpr double reach = Silu<T>::reach / 1.30460724;  // sqrt(gain)
  MEMKIT_FN explicit QuickGelu(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return memkit::times_sigmoid<coarse>(x, T(gain) * x); }
  MEMKIT_FN T slope(T x) const {  // gain * x must not overflow: infinity times 0
    return Silu<T, coarse>::jet(T(gain) * at_least(at_most(x, T(1e30)), T(-1e30))).d1;
  }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN T slope_from_output(T y, bool right) const {
    // Scaled after the subtraction: a rounding before it would cost digits next to the minimum.
    return detail::slope_at_output<coarse, Silu<T, coarse>>(T(gain) * y, T(gain) * detail::above_minimum<QuickGelu>(y),
                                                            right);
  }
};

template <class T, bool coarse = false>
struct Mish : detail::MishInverse {  // x tanh(log(1 + e)) = x n / (n + 2), e = e^x, n = e (e + 2)
  static constexpr bool branch = true;
  static constexpr T flat = std::is_same<T, float>::value ? T(20) : T(40);  // tanh(log(1 + e^x)) is 1 from here on
  MEMKIT_FN explicit Mish(const ActParams&) {}
  MEMKIT_FN T value(T x) const {
    T e = memkit::exp_falling<coarse>(at_most(x, flat)), n = e * (e + T(2));
    return x * detail::divide(n, n + T(2));
  }
  MEMKIT_FN T slope(T x) const { return jet(x).d1; }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN T slope_from_output(T y, bool right) const {
    return detail::slope_at_output<coarse, Mish>(y, detail::above_minimum<Mish>(y), right);
  }

  MEMKIT_FN static detail::Jet<T> jet(T x) {
    T z = at_most(x, flat), e = memkit::exp_falling<coarse>(z);
    T n = e * (e + T(2)), a = e * (e + T(1)), u = detail::divide(T(1), n + T(2));
    T w = n * u, w1 = T(4) * a * u * u, w2 = T(4) * u * u * (a + e * e - T(4) * a * u * a);
    return {x * w, w + z * w1, T(2) * w1 + z * w2};
  }
};

template <class T, bool coarse = false>
struct Hardswish {
  static constexpr bool branch = true;
  static constexpr double x0 = -1.5, y0 = -0.375;
  MEMKIT_FN explicit Hardswish(const ActParams&) {}
  MEMKIT_FN T value(T x) const {
    T bent = x * at_most(at_least(x + T(3), T(0)), T(6)) * (T(1) / T(6));
    return select(x >= T(3), x, bent);  // exact there, whatever 1/6 rounds to
  }
  MEMKIT_FN T slope(T x) const {
    T inner = (coarse ? x * (T(1) / T(3)) : x / T(3)) + T(0.5);
    return select(flat(x), T(0), select(x < T(3), inner, T(1)));
  }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN T slope_from_output(T y, bool right) const {
    T root = detail::near_sqrt_of_normal(at_least(T(9) + T(24) * y, T(0))) * (T(1) / T(6));
    T steep = select(y >= T(3), T(1), detail::signed_by(right, root));
    return select(flat_from_output(y, right), T(0), steep);
  }
  MEMKIT_FN bool flat(T x) const { return x <= T(-3); }
  MEMKIT_FN bool flat_from_output(T y, bool right) const {
    constexpr T never = std::numeric_limits<T>::quiet_NaN();
    return y >= detail::choose(detail::mask_of<T>(right), never, T(0));
  }
};

// Whether a function's coarse form differs from the exact one.
template <template <class, bool> class Formula>
inline constexpr bool has_coarse = true;
template <>
inline constexpr bool has_coarse<Identity> = false;
template <>
inline constexpr bool has_coarse<Relu> = false;
template <>
inline constexpr bool has_coarse<LeakyRelu> = false;
template <>
inline constexpr bool has_coarse<Elu> = false;
template <>
inline constexpr bool has_coarse<Hardtanh> = false;
template <>
inline constexpr bool has_coarse<Hardsigmoid> = false;
template <>
inline constexpr bool has_coarse<ReluSquared> = false;

// Calls f.template operator()<Op>(args...) with the struct of the kind. On the host f may be the host's alone.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class F, class... Args>
MEMKIT_FN auto visit(Act kind, F&& f, Args&&... args) {
  switch (kind) {
    case Act::identity: return f.template operator()<Identity>(args...);
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
