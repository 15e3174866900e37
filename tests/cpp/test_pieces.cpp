// Polynomials in pieces: slopes from outputs against the formulas in double, over outputs of both sides.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/pieces.h"

using namespace memkit;
using namespace memkit::cpu;

namespace {

#if MEMKIT_X86

// The curve lies this near to the slope; the formula in double is compared with long double in test_formulas.
template <class Lanes, template <class, bool> class Formula, bool coarse>
void check(const char* name) {
  using Op = Formula<float, coarse>;
  const Formula<double, false> exact{ActParams{}};
  std::vector<float> y;
  for (int i = 0; i <= 200000; ++i)
    y.push_back(float(Op::y0 + std::pow(i / 200000.0, 2) * 30));            // dense at the minimum
  for (int i = 0; i <= 20000; ++i) y.push_back(float(Op::y0 * i / 20000));  // and up to 0
  for (float each : {0.f, -0.f, -1e-20f, 1e10f, 3e38f, INFINITY}) y.push_back(each);
  const int64_t n = int64_t(y.size());
  std::vector<float> grad(y.size()), out(y.size());
  std::mt19937 random(1);
  double worst = 0;
  for (bool right : {false, true}) {
    std::vector<uint8_t> bits(y.size() / 8 + 2, right ? 0xff : 0);
    for (float& g : grad) g = float(int(random() % 5)) - 2;
    OnCurve<Lanes, Op, float>::template gradient<true>(y.data(), bits.data(), grad.data(), out.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      if (!right && y[i] > 0) continue;  // no output
      const double want = std::isinf(y[i]) ? 1 : exact.slope_from_output(y[i], right);
      // What y holds of the distance to the minimum limits every way to compute it (test_formulas); beyond that, the fit.
      const double root = std::sqrt(std::max(y[i] - Op::y0, 0.0)), rounding = root < 1e-3 ? 1e-5 : 0;
      const double error = std::abs(out[i] - grad[i] * want);
      if (rounding == 0) worst = std::max(worst, error / std::max(1.f, std::abs(grad[i])));
      CHECK(error <= std::abs(grad[i]) * ((coarse ? 1.5e-4 : 4e-7) + rounding),
            "%s%s: gradient at y = %.9g, %s, is %.9g, not %.9g", name, coarse ? ", coarse" : "", double(y[i]),
            right ? "right" : "left", double(out[i]), grad[i] * want);
    }
  }
  std::printf("%-12s %s error of the slope %.1e\n", name, coarse ? "coarse" : "      ", worst);
}

// Each length, so that the last vector is part of one; sides mixed; NaN; in the place of the gradient.
template <class Lanes, template <class, bool> class Formula>
void check_lengths(const char* name) {
  using Op = Formula<float, false>;
  const Op op{ActParams{}};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, 3);
  for (int64_t n = 0; n <= 70; ++n) {
    std::vector<float> y(size_t(n) + 1), grad(size_t(n) + 1), want(size_t(n) + 1);
    std::vector<uint8_t> bits(size_t(n + 7) / 8);  // no more than there are: the address sanitizer looks on
    for (int64_t i = 0; i < n; ++i) {
      const float x = normal(random);
      y[i] = i % 11 == 10 ? nan : op.value(x);
      grad[i] = normal(random);
      bits[i / 8] |= uint8_t(op.right(x)) << i % 8;
      want[i] = grad[i] * op.slope_from_output(y[i], op.right(x));
    }
    grad[n] = 7;  // not to be touched
    OnCurve<Lanes, Op, float>::template gradient<false>(y.data(), bits.data(), grad.data(), grad.data(), n);
    for (int64_t i = 0; i < n; ++i)
      CHECK(std::isnan(y[i]) ? std::isnan(grad[i]) : std::abs(grad[i] - want[i]) <= 1e-4f * (1 + std::abs(want[i])),
            "%s: element %ld of %ld is %g, not %g", name, long(i), long(n), double(grad[i]), double(want[i]));
    CHECK(grad[n] == 7, "%s: wrote behind %ld elements", name, long(n));
  }
}

template <class Lanes, template <class, bool> class Formula>
void check_one(const char* name) {
  check<Lanes, Formula, false>(name);
  check<Lanes, Formula, true>(name);
  check_lengths<Lanes, Formula>(name);
}

template <class Lanes>
void check_all(const char* lanes) {
  std::printf("%s\n", lanes);
  check_one<Lanes, Gelu>("gelu");
  check_one<Lanes, GeluTanh>("gelu_tanh");
  check_one<Lanes, QuickGelu>("quick_gelu");
  check_one<Lanes, Silu>("silu");
  check_one<Lanes, Mish>("mish");
}

#endif

}  // namespace

int main() {
#if MEMKIT_X86
  if (isa() == Isa::v4) {
    check_all<V4Lanes>("vectors of 16");
    check_one<V4Lanes, Hardswish>("hardswish");
  }
  if (isa() != Isa::base) check_all<V3Lanes>("vectors of 8");
#endif
  return finish("test_pieces");
}
