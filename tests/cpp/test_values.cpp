// Values for sixteen floats at a time: against long double, and the formula's where nothing is to round.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/values.h"

using namespace memkit;
using namespace memkit::cpu;

namespace {

#if MEMKIT_X86

long double logistic(long double z) { return 1 / (1 + expl(-z)); }
long double value(Sigmoid<float>, long double x) { return logistic(x); }
long double value(Tanh<float>, long double x) { return tanhl(x); }
long double value(Silu<float>, long double x) { return x * logistic(x); }
long double value(QuickGelu<float>, long double x) { return x * logistic(1.702L * x); }
long double value(GeluTanh<float>, long double x) {
  return x * logistic(2 * sqrtl(2 / 3.14159265358979323846L) * (x + 0.044715L * x * x * x));
}
long double value(Mish<float>, long double x) { return x * tanhl(log1pl(expl(x))); }
long double value(Gelu<float>, long double x) { return x * erfcl(-x / sqrtl(2)) / 2; }

// Units that the rounding of what the exponential is taken of adds left of 0; gelu's tail is a fit by steps that grow steeper.
template <class Op>
double slack(Op, double) {
  return 0;
}
double slack(QuickGelu<float>, double x) { return -2 * 1.702 * x; }
double slack(GeluTanh<float>, double x) { return -3 * 1.596 * (x + 0.044715 * x * x * x); }
double slack(Gelu<float>, double x) { return x * x + std::pow(x, 8) / 1000; }

// Errors in units of float's rounding, 2^-24 of the value. Values of which a factor is below the normal numbers may be 0.
template <template <class, bool> class Formula>
void check(const char* name, double most) {
  using Op = Formula<float, false>;
  const Op op{ActParams{}};
  std::vector<float> x;
  for (uint32_t bits = 0x2f000000; bits < 0x42d00000; bits += 499) {  // 1e-10 to 104
    x.push_back(memkit::detail::from_bits<float>(bits));
    x.push_back(-x.back());
  }
  for (int k = -31; k <= 31; ++k)  // the ends of gelu's pieces, and what lies on either side
    for (int side = -2; side <= 2; ++side) {
      float edge = float(k - 0.5) * 0.42f;
      for (int step = 0; step < std::abs(side); ++step) edge = std::nextafter(edge, side < 0 ? -100.f : 100.f);
      x.push_back(edge);
    }
  std::vector<float> y(x.size() + 1, 7.f);
  Values<V4Lanes, Op>::template write<true>(x.data(), y.data(), int64_t(x.size()));
  CHECK(y.back() == 7, "%s: wrote behind its elements", name);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const long double want = value(op, x[i]);
    const double size = double(fabsl(want)), allowed = most + (x[i] < 0 ? slack(op, x[i]) : 0);
    if (x[i] < -1 && size < 200 * std::numeric_limits<float>::min() && fabsl(y[i] - want) <= 1.001L * fabsl(want))
      continue;
    const double error = double(fabsl(y[i] - want)) / (size * 0x1p-24);
    worst = std::max(worst, error / allowed);
    CHECK(error <= allowed, "%s(%.9g) is %.9g, %.2f units off", name, double(x[i]), double(y[i]), error);
  }
  std::printf("%-12s error at most %.2f of what is allowed\n", name, worst);
}

// Values that are exact, infinite or NaN, and the sign of 0.
template <template <class, bool> class Formula>
void check_ends(const char* name) {
  using Op = Formula<float, false>;
  const Op op{ActParams{}};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> x{0.f,   -0.f,   0x1p-100f, -0x1p-100f, 200.f,    -200.f,    1e10f, -1e10f,
                       1e30f, -1e30f, 3e38f,     -3e38f,     INFINITY, -INFINITY, nan};
  std::vector<float> y(x.size());
  Values<V4Lanes, Op>::template write<false>(x.data(), y.data(), int64_t(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    const float want = op.value(x[i]);
    CHECK(std::isnan(want) ? std::isnan(y[i]) : y[i] == want && (x[i] != 0 || std::signbit(y[i]) == std::signbit(want)),
          "%s(%g) is %g, not %g", name, double(x[i]), double(y[i]), double(want));
  }
}

// Each length, so that the last vector is part of one; in place; the same value wherever an element lies.
template <template <class, bool> class Formula>
void check_lengths(const char* name) {
  using Op = Formula<float, false>;
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, 4);
  std::vector<float> x(70), all(70);
  for (float& each : x) each = normal(random);
  Values<V4Lanes, Op>::template write<false>(x.data(), all.data(), 70);
  for (int64_t n = 0; n < 70; ++n) {
    std::vector<float> some(x.begin(), x.begin() + n);  // no more: the address sanitizer looks on
    Values<V4Lanes, Op>::template write<false>(some.data(), some.data(), n);
    for (int64_t i = 0; i < n; ++i)
      CHECK(some[i] == all[i], "%s: element %ld of %ld is %g, not %g", name, long(i), long(n), double(some[i]),
            double(all[i]));
  }
}

template <template <class, bool> class Formula>
void check_all(const char* name, double most) {
  check<Formula>(name, most);
  check_ends<Formula>(name);
  check_lengths<Formula>(name);
}

#endif

}  // namespace

int main() {
#if MEMKIT_X86
  if (isa() == Isa::v4) {
    check_all<Sigmoid>("sigmoid", 4);
    check_all<Tanh>("tanh", 2);
    check_all<Silu>("silu", 4);
    check_all<QuickGelu>("quick_gelu", 4);
    check_all<GeluTanh>("gelu_tanh", 4);
    check_all<Mish>("mish", 6);
    check_all<Gelu>("gelu", 5);
  }
#endif
  return finish("test_values");
}
