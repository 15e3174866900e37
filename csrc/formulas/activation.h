// Activation functions: value, slope, and slope from the output, once for every engine.
#pragma once

#include "math.h"

namespace memkit {

enum class Act : int {
  // Monotone: the slope follows from the output.
  relu, leaky_relu, elu, sigmoid, tanh, softplus, hardtanh, hardsigmoid, relu_squared,
  // One minimum: the slope follows from the output and the side of the minimum.
  gelu, gelu_tanh, quick_gelu, silu, mish, hardswish
};

// leaky_relu: a = negative_slope
// elu:        a = alpha, b = scale, c = input_scale; y = x > 0 ? b*x : b*a*expm1(c*x)
// softplus:   a = beta, b = threshold
// hardtanh:   a = min, b = max
// selu and celu are elu with other parameters; relu6 is hardtanh(0, 6).
struct ActParams {
  double a = 0, b = 0, c = 0;
};

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
  MEMKIT_FN T slope(T x) const { return select(x > T(0), scale, memkit::exp(x * input_scale) * negative * input_scale); }
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
    return select(z > threshold, x, memkit::log1p(memkit::exp(z)) / beta);
  }
  MEMKIT_FN T slope(T x) const {
    T z = x * beta;
    return select(z > threshold, T(1), memkit::sigmoid(z));
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
  MEMKIT_FN T value(T x) const {
    T y = select(x < low, low, x);
    return select(y > high, high, y);
  }
  MEMKIT_FN T slope(T x) const { return select((x <= low) | (x >= high), T(0), T(1)); }
  MEMKIT_FN T slope_from_output(T y) const { return slope(y); }
};

template <class T>
struct Hardsigmoid {
  static constexpr bool branch = false;
  MEMKIT_FN explicit Hardsigmoid(const ActParams&) {}
  MEMKIT_FN T value(T x) const {
    T y = x + T(3);
    y = select(y < T(0), T(0), y);
    y = select(y > T(6), T(6), y);
    return y / T(6);
  }
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

// f and its first two derivatives.
template <class T>
struct Jet {
  T f, d1, d2;
};

// Slope at the point of the given branch where op takes the value y: quadratic steps from the parabola at the minimum.
template <class T, class Op>
MEMKIT_FN T slope_at_output(const Op& op, T y, bool right) {
  T sign = select(right, T(1), T(-1));
  T above = select(y < T(Op::y0), T(0), y - T(Op::y0));
  T x = T(Op::x0) + sign * memkit::sqrt(above * T(2 / Op::curvature));
  x = select(x > T(20), T(20), x);
  for (int i = 0; i < 12; ++i) {
    Jet<T> j = op.jet(x);
    T miss = y - j.f;
    T radicand = j.d1 * j.d1 + T(2) * j.d2 * miss;
    T root = memkit::sqrt(select(radicand < T(0), T(0), radicand));
    T step = T(2) * miss / (j.d1 + sign * root + sign * T(1e-30));
    x = x + select(step > T(1), T(1), select(step < T(-1), T(-1), step));
  }
  T slope = op.jet(x).d1;
  return select(y > T(12), T(1), select(right, slope, select(y > T(-1e-8), y, slope)));
}

}  // namespace detail

template <class T>
struct Gelu {
  static constexpr bool branch = true;
  static constexpr double x0 = -0.75179152469356950, y0 = -0.16997120747990369, curvature = 0.43149369479000000;
  MEMKIT_FN explicit Gelu(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return x * memkit::normal_cdf(x); }
  MEMKIT_FN T slope(T x) const { return memkit::normal_cdf(x) + x * memkit::normal_pdf(x); }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN detail::Jet<T> jet(T x) const {
    T cdf = memkit::normal_cdf(x), pdf = memkit::normal_pdf(x);
    return {x * cdf, cdf + x * pdf, pdf * (T(2) - x * x)};
  }
  MEMKIT_FN T slope_from_output(T y, bool right) const { return detail::slope_at_output(*this, y, right); }
};

template <class T>
struct GeluTanh {
  static constexpr bool branch = true;
  static constexpr double x0 = -0.75246142207290260, y0 = -0.17004075057125412, curvature = 0.43083;
  MEMKIT_FN explicit GeluTanh(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return jet(x).f; }
  MEMKIT_FN T slope(T x) const { return jet(x).d1; }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN detail::Jet<T> jet(T x) const {
    constexpr T k = T(1.5957691216057307), c = T(0.044715);  // 2 sqrt(2/pi)
    T s = memkit::sigmoid(k * (x + c * x * x * x));
    T ds = s * (T(1) - s), u1 = k * (T(1) + T(3) * c * x * x), u2 = k * T(6) * c * x;
    return {x * s, s + x * ds * u1, T(2) * ds * u1 + x * ds * ((T(1) - T(2) * s) * u1 * u1 + u2)};
  }
  MEMKIT_FN T slope_from_output(T y, bool right) const { return detail::slope_at_output(*this, y, right); }
};

template <class T>
struct Silu {
  static constexpr bool branch = true;
  static constexpr double x0 = -1.2784645427610738, y0 = -0.27846454276107380, curvature = 0.21781210;
  MEMKIT_FN explicit Silu(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return x / (T(1) + memkit::exp(-x)); }
  MEMKIT_FN T slope(T x) const { return jet(x).d1; }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN detail::Jet<T> jet(T x) const {
    T s = memkit::sigmoid(x), ds = s * (T(1) - s);
    return {x * s, s + x * ds, ds * (T(2) + x * (T(1) - T(2) * s))};
  }
  MEMKIT_FN T slope_from_output(T y, bool right) const { return detail::slope_at_output(*this, y, right); }
};

template <class T>
struct QuickGelu {
  static constexpr bool branch = true;
  static constexpr double gain = 1.702;
  static constexpr double x0 = Silu<T>::x0 / gain, y0 = Silu<T>::y0 / gain, curvature = Silu<T>::curvature * gain;
  MEMKIT_FN explicit QuickGelu(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return x * memkit::sigmoid(T(gain) * x); }
  MEMKIT_FN T slope(T x) const { return Silu<T>(ActParams{}).slope(T(gain) * x); }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN T slope_from_output(T y, bool right) const { return Silu<T>(ActParams{}).slope_from_output(T(gain) * y, right); }
};

template <class T>
struct Mish {
  static constexpr bool branch = true;
  static constexpr double x0 = -1.1924312145154157, y0 = -0.30884341301725049, curvature = 0.266948;
  MEMKIT_FN explicit Mish(const ActParams&) {}
  MEMKIT_FN T value(T x) const { return jet(x).f; }
  MEMKIT_FN T slope(T x) const { return jet(x).d1; }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN detail::Jet<T> jet(T x) const {
    T e = memkit::exp(select(x > T(20), T(20), x));
    T n = e * (e + T(2)), w = n / (n + T(2)), s = e / (T(1) + e);
    T g = (T(1) - w * w) * s;  // w'
    T g1 = g * ((T(1) - s) - T(2) * w * s);
    return {x * w, w + x * g, T(2) * g + x * g1};
  }
  MEMKIT_FN T slope_from_output(T y, bool right) const { return detail::slope_at_output(*this, y, right); }
};

template <class T>
struct Hardswish {
  static constexpr bool branch = true;
  static constexpr double x0 = -1.5, y0 = -0.375, curvature = 1.0 / 3;
  MEMKIT_FN explicit Hardswish(const ActParams&) {}
  MEMKIT_FN T value(T x) const {
    T gate = x + T(3);
    gate = select(gate < T(0), T(0), gate);
    gate = select(gate > T(6), T(6), gate);
    return x * gate / T(6);
  }
  MEMKIT_FN T slope(T x) const {
    T inner = x / T(3) + T(0.5);
    return select(x <= T(-3), T(0), select(x >= T(3), T(1), inner));
  }
  MEMKIT_FN bool right(T x) const { return x >= T(x0); }
  MEMKIT_FN T slope_from_output(T y, bool right) const {
    T radicand = T(9) + T(24) * y;
    T root = memkit::sqrt(select(radicand < T(0), T(0), radicand)) / T(6);
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
