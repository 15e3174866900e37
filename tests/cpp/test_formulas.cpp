// The activation formulas against long double, with neither torch nor CUDA: value, slope, and slope from the output.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "check.h"
#include "formulas/gradient.h"
#include "formulas/random.h"

using memkit::Act;
using memkit::ActParams;

namespace {

using Real = long double;
constexpr Real kInf = std::numeric_limits<Real>::infinity();

// The definitions, as in the papers and in torch.nn's documentation; not the way the formulas compute them.
struct Truth {
  Real value, slope;
};

Real sigmoid(Real x) { return 1 / (1 + expl(-x)); }

Truth swish(Real x, Real gain) {
  const Real s = sigmoid(gain * x);
  return {x * s, s + gain * x * s * (1 - s)};
}

Truth truth(Act act, const ActParams& p, Real x) {
  const Real root2pi = sqrtl(2 * acosl(-1));
  switch (act) {
    case Act::identity: return {x, 1};
    case Act::relu: return {x > 0 ? x : 0, Real(x > 0)};
    case Act::leaky_relu: return {x > 0 ? x : x * p.a, x > 0 ? 1 : Real(p.a)};
    case Act::elu:
      return {x > 0 ? p.b * x : p.b * p.a * expm1l(p.c * x), x > 0 ? Real(p.b) : p.b * p.a * p.c * expl(p.c * x)};
    case Act::sigmoid: return {sigmoid(x), sigmoid(x) * sigmoid(-x)};
    case Act::tanh: return {tanhl(x), 1 / (coshl(x) * coshl(x))};
    case Act::softplus: return x * p.a > p.b ? Truth{x, 1} : Truth{log1pl(expl(p.a * x)) / p.a, sigmoid(p.a * x)};
    case Act::hardtanh: return {std::min(std::max(x, Real(p.a)), Real(p.b)), Real(x > p.a && x < p.b)};
    case Act::hardsigmoid: return {std::min(std::max(x + 3, Real(0)), Real(6)) / 6, x > -3 && x < 3 ? Real(1) / 6 : 0};
    case Act::relu_squared: return {x > 0 ? x * x : 0, x > 0 ? 2 * x : 0};
    case Act::gelu: {
      const Real cdf = erfcl(-x / sqrtl(2)) / 2;
      return {x * cdf, cdf + x * expl(-x * x / 2) / root2pi};
    }
    case Act::gelu_tanh: {
      const Real k = sqrtl(8 / acosl(-1)), c = 0.044715L, s = sigmoid(k * (x + c * x * x * x));
      return {x * s, s + x * s * sigmoid(-k * (x + c * x * x * x)) * k * (1 + 3 * c * x * x)};
    }
    case Act::quick_gelu: return swish(x, 1.702L);
    case Act::silu: return swish(x, 1);
    case Act::mish: {
      const Real t = tanhl(log1pl(expl(x)));
      return {x * t, t + x * sigmoid(x) * (1 - t * t)};
    }
    case Act::hardswish: {
      const Real inner = (2 * x + 3) / 6;
      return {x * std::min(std::max(x + 3, Real(0)), Real(6)) / 6, x <= -3 ? 0 : x >= 3 ? 1 : inner};
    }
  }
  return {};
}

// What a half keeps of a float: its leading bits, rounded to nearest even (float16 as such only where it is normal).
float round_to(int mantissa_bits, float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const int drop = 23 - mantissa_bits;
  u = (u + (1u << (drop - 1)) - 1 + (u >> drop & 1)) >> drop << drop;
  std::memcpy(&x, &u, 4);
  return x;
}

template <class T>
std::vector<T> points(double minimum) {
  std::vector<T> x;
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  for (int i = 0; i <= 60000; ++i) x.push_back(T(-30 + 0.001 * i));
  for (int i = 0; i < 60000; ++i) x.push_back(T(normal(random)));
  for (int i = 0; i < 20000; ++i) x.push_back(T(minimum + 1e-3 * normal(random)));
  for (int i = 0; i < 300; ++i) {
    x.push_back(T(std::pow(10.0, -30 + 0.1 * i)));
    x.push_back(-x.back());
  }
  return x;
}

struct Bounds {
  double value, slope;                         // in units of the last place, see `units`
  double from_output, from_half, from_bfloat;  // absolute
};

// The error in units of epsilon, relative down to `floor` and absolute below.
template <class T>
double units(T got, Real want, Real floor) {
  const Real scale = std::max(fabsl(want), floor) * std::numeric_limits<T>::epsilon();
  return double(fabsl(Real(got) - want) / scale);
}

template <template <class, bool> class Formula, class T>
void check(const char* name, Act act, const ActParams& params, const Bounds& bounds) {
  using Op = Formula<T, false>;
  const Op op(params);
  const Formula<T, true> coarse(params);  // for dtypes of two bytes
  double minimum = 0;
  if constexpr (Op::branch) minimum = Op::x0;
  double value = 0, slope = 0, output = 0, half = 0, bfloat = 0, coarse_value = 0, coarse_slope = 0;
  const auto from_output = [](const auto& op, T y, T x) {
    if constexpr (Op::branch)
      return op.slope_from_output(y, op.right(x));
    else
      return (void)x, op.slope_from_output(y);
  };
  for (T x : points<T>(minimum)) {
    const Truth want = truth(act, params, Real(x));
    value = std::max(value, units(op.value(x), want.value, 0.01L));
    slope = std::max(slope, units(op.slope(x), want.slope, 1));
    if constexpr (memkit::has_two_slopes<Op>)
      CHECK(op.slope_where(op.active(x)) == op.slope(x), "%s: slope at %g from the bit is %g", name, double(x),
            double(op.slope_where(op.active(x))));
    const T y = T(want.value);  // rounded once: what is left is the inverse's own error and the conditioning
    output = std::max(output, double(fabsl(Real(from_output(op, y, x)) - want.slope)));
    if constexpr (std::is_same_v<T, float>) {
      if (std::abs(x) > 60000) continue;
      // A half's input is a half too.
      const float xh = round_to(10, x), xb = round_to(7, x);
      const Truth th = truth(act, params, xh), tb = truth(act, params, xb);
      const float yh = round_to(10, float(th.value)), yb = round_to(7, float(tb.value));
      if (std::abs(yh) >= 6.2e-5f) half = std::max(half, double(fabsl(from_output(coarse, yh, xh) - th.slope)));
      bfloat = std::max(bfloat, double(fabsl(from_output(coarse, yb, xb) - tb.slope)));
      coarse_value = std::max(coarse_value, units(coarse.value(x), want.value, 1e-3L));
      coarse_slope = std::max(coarse_slope, units(coarse.slope(x), want.slope, 1));
    }
  }
  const char* type = std::is_same_v<T, float> ? "float" : "double";
  std::printf("%-12s %-6s value %.2f eps, slope %.2f eps, from output %.1e, float16 %.1e, bfloat16 %.1e\n", name, type,
              value, slope, output, half, bfloat);
  CHECK(value <= bounds.value, "%s %s: value off by %.2f eps, bound %.2f", name, type, value, bounds.value);
  CHECK(slope <= bounds.slope, "%s %s: slope off by %.2f eps, bound %.2f", name, type, slope, bounds.slope);
  const double allowed = std::is_same_v<T, float> ? bounds.from_output : 1e-8;
  CHECK(output <= allowed, "%s %s: slope from output off by %.2e, bound %.2e", name, type, output, allowed);
  // A hundredth of float16's own rounding.
  CHECK(coarse_value <= 82 && coarse_slope <= 82, "%s: coarse value %.0f eps, slope %.0f eps", name, coarse_value,
        coarse_slope);
  CHECK(half <= bounds.from_half, "%s: slope from a float16 output off by %.2e", name, half);
  CHECK(bfloat <= bounds.from_bfloat, "%s: slope from a bfloat16 output off by %.2e", name, bfloat);
}

template <class Op, class T>
void check_specials(const char* name, const ActParams& params) {
  const Op op(params);
  const T nan = std::numeric_limits<T>::quiet_NaN(), inf = std::numeric_limits<T>::infinity();
  const T largest = std::numeric_limits<T>::max(), tiny = std::numeric_limits<T>::denorm_min();
  CHECK(std::isnan(op.value(nan)), "%s(nan) is not nan", name);
  CHECK(!(op.value(inf) < 1), "%s(inf) is %g", name, double(op.value(inf)));
  for (T x : {largest, -largest, tiny, -tiny, T(0), -T(0), inf, -inf, nan}) {
    (void)op.slope(x);  // the sanitizers look on
    if constexpr (memkit::has_two_slopes<Op>)
      for (T grad : {T(1), T(0), inf, nan}) {
        const T got = memkit::gradient_where(op, grad, op.active(x)), want = memkit::gradient_at_input(op, grad, x);
        CHECK(got == want || (std::isnan(got) && std::isnan(want)), "%s: gradient of %g at %g is %g from the bit", name,
              double(grad), double(x), double(got));
      }
    if constexpr (Op::branch) {
      for (bool right : {false, true}) {
        if (x < Op::y0) continue;  // no output
        const T slope = op.slope_from_output(x, right);
        CHECK(std::isnan(slope) == std::isnan(x) || std::isinf(x), "%s: slope from %g is %g", name, double(x),
              double(slope));
      }
      CHECK(std::isnan(op.slope_from_output(nan, true)), "%s: slope from nan", name);
    } else {
      (void)op.slope_from_output(x);
    }
  }
}

struct CheckOne {
  template <template <class, bool> class Op>
  void operator()(const char* name, Act act, ActParams params, Bounds bounds) const {
    check<Op, float>(name, act, params, bounds);
    check<Op, double>(name, act, params, bounds);
    check_specials<Op<float, false>, float>(name, params);
    check_specials<Op<float, true>, float>(name, params);
    check_specials<Op<double, false>, double>(name, params);
  }
};

// Known answers: the first of the paper's own (Random123, kat_vectors); the others by an independent implementation.
void check_philox() {
  struct {
    uint64_t counter, key;
    uint32_t words[4];
  } const known[] = {
      {0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {0xffffffffffffffff, 0xffffffffffffffff, {0x4d18d7d2, 0x430ac65a, 0xbd2fa22a, 0x0afae10d}},
      {0x85a308d3243f6a88, 0x299f31d0a4093822, {0xe69c9c31, 0xb5a3d762, 0xe733bfc1, 0x341a787c}},
  };
  for (const auto& each : known)
    for (int k = 0; k < 4; ++k)
      CHECK(memkit::philox(each.counter, each.key).at[k] == each.words[k], "philox(%llx, %llx) word %d",
            (unsigned long long)each.counter, (unsigned long long)each.key, k);
}

}  // namespace

int main() {
  check_philox();
  struct Case {
    const char* name;
    Act act;
    ActParams params;
    Bounds bounds;
  };
  // Bounds: about 1.5 times what was measured; where exact, exact. The slope from the output near a minimum is limited
  // by sqrt(2 f'' eps |y0|), whatever the algorithm.
  const Case cases[] = {
      {"identity", Act::identity, {}, {0, 0, 0, 0, 0}},
      {"relu", Act::relu, {}, {0, 0, 0, 0, 0}},
      {"leaky_relu", Act::leaky_relu, {0.2, 0, 0}, {1, 1, 2e-8, 2e-8, 2e-8}},
      {"elu", Act::elu, {1.0, 1.0, 1.0}, {2, 1.5, 1e-7, 5e-4, 4e-3}},
      {"selu", Act::elu, {1.6732632423543772, 1.0507009873554805, 1.0}, {2, 1.5, 2e-7, 8e-4, 6e-3}},
      {"celu", Act::elu, {2.0, 1.0, 0.5}, {2, 1.5, 1e-7, 4e-4, 3e-3}},
      {"sigmoid", Act::sigmoid, {}, {1.5, 1.5, 5e-8, 4e-4, 3e-3}},
      {"tanh", Act::tanh, {}, {2.5, 4, 1.5e-7, 8e-4, 6e-3}},
      {"softplus", Act::softplus, {1.0, 20.0, 0}, {3.5, 1.5, 1e-7, 3e-4, 2e-3}},
      {"hardtanh", Act::hardtanh, {-1.0, 1.0, 0}, {0, 0, 0, 0, 0}},
      // The slope is lost where the output rounds to a bound; no point here comes that near.
      {"hardsigmoid", Act::hardsigmoid, {}, {1.5, 0.5, 1e-8, 1e-8, 1e-8}},
      {"relu_squared", Act::relu_squared, {}, {1, 0, 1e-20, 2e-2, 0.13}},
      {"gelu", Act::gelu, {}, {5.5, 2.5, 8e-5, 9e-3, 2.4e-2}},
      {"gelu_tanh", Act::gelu_tanh, {}, {9, 2.5, 8e-5, 9e-3, 2.4e-2}},
      {"quick_gelu", Act::quick_gelu, {}, {5, 2.5, 1e-4, 9e-3, 2.4e-2}},
      {"silu", Act::silu, {}, {2, 2.5, 9e-5, 9e-3, 2.4e-2}},
      {"mish", Act::mish, {}, {3.5, 2.5, 1e-4, 9e-3, 2.4e-2}},
      {"hardswish", Act::hardswish, {}, {2.5, 1, 1.5e-4, 9e-3, 2.4e-2}},
  };
  std::printf("errors; float16 and bfloat16: of the slope from an output and an input rounded to them\n");
  for (const Case& c : cases) memkit::visit(c.act, CheckOne{}, c.name, c.act, c.params, c.bounds);
  return finish("test_formulas");
}
