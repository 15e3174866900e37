// The norms' formulas and CPU passes: against sums in long double, in any split of the work, in place, and with nothing
// written outside a share.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include "../../csrc/cpu/channel_norm.h"
#include "../../csrc/cpu/row_norm.h"
#include "check.h"

namespace {

using namespace memkit;

// Between -1 and 1, another sequence for each seed.
double value_at(int64_t i, int seed) {
  return double((uint64_t(i) * 2654435761u + uint64_t(seed) * 40503u) % 8191) / 4095.5 - 1;
}
template <class T>
std::vector<T> values(int64_t n, int seed, double mean = 0, double scale = 1) {
  std::vector<T> x(n);
  for (int64_t i = 0; i < n; ++i) x[i] = T(mean + scale * value_at(i, seed));
  return x;
}

bool close(double got, double want, double tolerance) {
  return std::fabs(got - want) <= tolerance * (1 + std::fabs(want));
}

void test_moments() {
  for (double mean : {0.0, 1e4}) {
    const auto x = values<double>(1000, 1, mean);
    Moments<float> all;
    for (int64_t first = 0; first < 1000; first += 130) {
      const int64_t n = std::min<int64_t>(130, 1000 - first);
      float sum = 0, squares = 0;
      const float about = float(x[first]);
      for (int64_t i = first; i < first + n; ++i) {
        const float d = float(x[i]) - about;
        sum += d, squares += d * d;
      }
      all.add(Moments<float>::from_sums(float(n), about, sum, squares));
    }
    long double sum = 0, squares = 0;
    for (double v : x) sum += float(v);
    for (double v : x) squares += (float(v) - sum / 1000) * (float(v) - sum / 1000);
    CHECK(all.count == 1000, "%g", double(all.count));
    CHECK(close(all.mean, double(sum / 1000), 1e-6), "%g", double(all.mean));
    CHECK(close(all.m2, double(squares), 2e-4), "%g, not %g", double(all.m2), double(squares));
  }
  Moments<float> none;
  none.add(Moments<float>());
  CHECK(none.count == 0 && none.mean == 0 && none.m2 == 0, "nothing and nothing is nothing");
  CHECK((Moments<float>::from_sums(2, 0, 2, 1.5f).m2 == 0), "no negative variance");
  CHECK((Moments<float>::from_sums(4, 0, 3e38f, INFINITY).m2 == INFINITY), "infinite squares, not their difference");
  // 100 values of deviation 1, seen from half of it away and from more.
  CHECK(is_near_mean(100., 50., 125.) && is_near_mean(100., -50., 125.), "off by half of the deviation");
  CHECK(!is_near_mean(100., 60., 136.), "off by more");
  CHECK(is_near_mean(100., 0., 0.) && !is_near_mean(100., 1., std::nan("")), "equal values, and a NaN");
  CHECK(!is_near_mean(4., 1., double(INFINITY)), "nothing is told by infinite squares");
}

// The projection against differences of the reciprocal, and where a row has no deviation or little beside eps.
void test_denominators() {
  RowNormArgs args;
  args.columns = 10, args.eps = 1e-2;
  const double root = args.columns;
  for (auto [denominator, divisor] : {std::pair{Denominator::root, root},
                                      {Denominator::deviation, root},
                                      {Denominator::sample_deviation, root - 1},
                                      {Denominator::norm, 1.0}}) {
    args.denominator = denominator;
    for (double squares : {1e-6, 1e-4, 0.3, 4e4}) {
      const double size = std::sqrt(squares / divisor), eps = args.eps;
      const double want = denominator == Denominator::root   ? 1 / std::sqrt(size * size + eps)
                          : denominator == Denominator::norm ? 1 / std::max(size, eps)
                                                             : 1 / (size + eps);
      const double rstd = args.reciprocal(squares), step = 1e-6 * squares;
      CHECK(close(rstd, want, 1e-12), "%d of %g: %g, not %g", int(denominator), squares, rstd, want);
      if (denominator == Denominator::norm && squares == 1e-4) continue;  // the kink
      // By the variance, which is squares over columns.
      const double by_variance =
          (args.reciprocal(squares + step) - args.reciprocal(squares - step)) / (2 * step) * double(args.columns);
      const double want_projection = -2 * by_variance / (rstd * rstd * rstd) * 0.7 / double(args.columns);
      const double got = args.projection(0.7, rstd);
      CHECK(std::fabs(got - want_projection) <= 1e-5 * (1 + want_projection), "%d of %g: %g, not %g", int(denominator),
            squares, got, want_projection);
    }
    if (denominator == Denominator::root) continue;
    CHECK(args.projection(1.0f, args.reciprocal(0.0f)) == 0, "%d: a slope without deviation", int(denominator));
    CHECK(args.projection(1e-13f, args.reciprocal(1e-30f)) < 1e-5f, "%d: a slope without digits", int(denominator));
  }
}

void test_weight_check() {
  const WeightCheck<float> half = weight_check<float>(Dtype::float16, 1024);
  const float infinity = INFINITY, nan = NAN;
  CHECK(half.flaws(1, 0) == 0 && half.flaws(-1, 1) == 0, "good");
  CHECK(half.flaws(1, 1.01f) == kIllConditioned, "a bias larger than the weight");
  CHECK(half.flaws(1e-5f, 0) == kIllConditioned, "subnormal outputs");
  CHECK(half.flaws(3000, 0) == kIllConditioned, "outputs up to 96000");
  CHECK(weight_check<float>(Dtype::bfloat16, 1024).flaws(3000, 0) == 0, "which bfloat16 holds");
  for (float bad : {0.0f, -0.0f, infinity, nan}) CHECK(half.flaws(bad, 0) == 3, "%g", double(bad));
  CHECK(half.flaws(1, nan) == 3 && half.flaws(1, infinity) == 3, "a bias of no number");
  CHECK(inverse_weight(0.0f) == 0 && inverse_weight(4.0f) == 0.25f, "inverse");
}

// Gradients of LayerNorm or RMSNorm over all rows, in long double.
template <class T>
struct Expected {
  std::vector<long double> y, dx, dw, db;

  Expected(bool centered, int64_t rows, int64_t columns, double eps, const std::vector<T>& x, const std::vector<T>& g,
           const std::vector<T>& w, const std::vector<T>& b)
      : y(rows * columns), dx(rows * columns), dw(columns), db(columns) {
    for (int64_t r = 0; r < rows; ++r) {
      const T *row = x.data() + r * columns, *gradient = g.data() + r * columns;
      long double mean = 0, variance = 0, a = 0, c = 0;
      for (int64_t i = 0; i < columns && centered; ++i) mean += static_cast<long double>(row[i]) / columns;
      for (int64_t i = 0; i < columns; ++i) variance += (row[i] - mean) * (row[i] - mean) / columns;
      const long double rstd = 1 / std::sqrt(variance + static_cast<long double>(eps));
      for (int64_t i = 0; i < columns; ++i) {
        const long double x_hat = (row[i] - mean) * rstd, gw = static_cast<long double>(gradient[i]) * w[i];
        y[r * columns + i] = x_hat * w[i] + (centered ? b[i] : T(0));
        if (centered) a += gw / columns;
        c += gw * x_hat / columns;
        dw[i] += gradient[i] * x_hat, db[i] += gradient[i];
      }
      for (int64_t i = 0; i < columns; ++i)
        dx[r * columns + i] = rstd * (static_cast<long double>(gradient[i]) * w[i] - a - (row[i] - mean) * rstd * c);
    }
  }
};

// Row by row, with columns next to each other, as they lie `inner` apart.
template <class X>
std::vector<X> laid_out(const std::vector<X>& from, int64_t rows, int64_t columns, int64_t inner) {
  std::vector<X> to(from.size());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      to[r / inner * inner * columns + c * inner + r % inner] = from[r * columns + c];
  return to;
}

template <class T>
void test_rows(Dtype dtype, double tolerance, int64_t rows, int64_t columns, int64_t inner) {
  constexpr int64_t kMargin = 16;
  const int64_t size = rows * columns;
  for (bool centered : {true, false}) {
    const auto rows_of_x = values<T>(size, 1, 0.5), rows_of_g = values<T>(size, 2);
    const auto w = values<T>(columns, 3, 2), b = values<T>(columns, 4);
    const Expected<T> want(centered, rows, columns, 1e-3, rows_of_x, rows_of_g, w, b);
    const auto laid = [&](const auto& from) { return laid_out(from, rows, columns, inner); };
    const auto x = laid(rows_of_x), g = laid(rows_of_g);
    const auto want_y = laid(want.y), want_dx = laid(want.dx);
    for (int64_t step : {inner, 4 * inner - (inner > 1), rows}) {
      std::vector<T> y(size + 2 * kMargin, T(77)), mean(rows), rstd(rows), dw(columns), db(columns);
      RowNormArgs args;
      args.rows = rows, args.columns = columns, args.inner = inner, args.centered = centered, args.eps = 1e-3;
      args.dtype = args.out_dtype = args.weight_dtype = dtype;
      args.weight = w.data(), args.bias = centered ? b.data() : nullptr;
      args.mean = mean.data(), args.rstd = rstd.data(), args.x = x.data(), args.y = y.data() + kMargin;
      for (int64_t r = 0; r < rows; r += step) cpu::row_norm_forward(args, r, std::min(r + step, rows));
      for (int64_t i = 0; i < kMargin; ++i) CHECK(y[i] == 77 && y[y.size() - 1 - i] == 77, "margin %d", int(i));
      for (int64_t i = 0; i < size; ++i)
        CHECK(close(y[kMargin + i], double(want_y[i]), tolerance), "y %d of %d columns", int(i), int(columns));

      // From the input and from the output, into the gradient's own memory.
      for (bool from_output : {false, true}) {
        std::vector<T> gradient = g;
        std::vector<double> partial(2 * columns * rows);
        args.from_output = from_output;
        args.saved = from_output ? y.data() + kMargin : x.data();
        args.grad = args.grad_input = gradient.data();
        int64_t parts = 0;
        for (int64_t r = 0; r < rows; r += step, ++parts) {
          args.partial = partial.data() + parts * 2 * columns;
          cpu::row_norm_backward(args, r, std::min(r + step, rows));
        }
        cpu::row_norm_reduce(args, partial.data(), parts, dw.data(), db.data(), 0, columns / 2);
        cpu::row_norm_reduce(args, partial.data(), parts, dw.data(), db.data(), columns / 2, columns);
        for (int64_t i = 0; i < size; ++i)
          CHECK(close(gradient[i], double(want_dx[i]), 20 * tolerance), "dx %d of %d columns, from %d: %g, not %g",
                int(i), int(columns), from_output, double(gradient[i]), double(want_dx[i]));
        for (int64_t i = 0; i < columns; ++i) {
          CHECK(close(dw[i], double(want.dw[i]), 20 * tolerance), "dw %d of %d", int(i), int(columns));
          CHECK(!centered || close(db[i], double(want.db[i]), 20 * tolerance), "db %d of %d", int(i), int(columns));
        }
      }
    }
  }
}

template <class T>
void test_all_rows(Dtype dtype, double tolerance) {
  for (int64_t columns : {1, 3, 31, 32, 33, 2048, 2049, 5000})
    test_rows<T>(dtype, tolerance, columns > 1000 ? 3 : 19, columns, 1);
  // Of two images.
  test_rows<T>(dtype, tolerance, 6, 1, 3);
  test_rows<T>(dtype, tolerance, 4, 3, 2);
  test_rows<T>(dtype, tolerance, 600, 17, 300);
  test_rows<T>(dtype, tolerance, 2048, 5, 1024);
  test_rows<T>(dtype, tolerance, 70, 1100, 35);
}

// x + residual into either's memory, and the gradient of the sum on top.
void test_residual() {
  const int64_t rows = 5, columns = 300;
  const auto x = values<float>(rows * columns, 1), r = values<float>(rows * columns, 2);
  const auto g = values<float>(rows * columns, 3), more = values<float>(rows * columns, 4);
  std::vector<float> sum(r), want(rows * columns), rstd(rows), y(rows * columns), dx(more);
  for (size_t i = 0; i < want.size(); ++i) want[i] = x[i] + r[i];
  RowNormArgs args;
  args.rows = rows, args.columns = columns, args.centered = false, args.eps = 1e-5;
  args.dtype = args.out_dtype = args.weight_dtype = Dtype::float32;
  args.rstd = rstd.data(), args.x = x.data(), args.residual = args.sum = sum.data(), args.y = y.data();
  cpu::row_norm_forward(args, 0, rows);
  CHECK(sum == want, "the sum");
  args.saved = sum.data(), args.grad = g.data(), args.grad_sum = args.grad_input = dx.data();
  cpu::row_norm_backward(args, 0, rows);
  std::vector<float> plain(rows * columns);
  args.grad_sum = nullptr, args.grad_input = plain.data();
  cpu::row_norm_backward(args, 0, rows);
  for (size_t i = 0; i < want.size(); ++i)
    CHECK(close(dx[i], double(plain[i]) + double(more[i]), 1e-6), "dx %d", int(i));
}

// Batch norm and silu by hand, against both layouts and any split.
void test_channels() {
  const int64_t outer = 6, channels = 5;
  for (int64_t inner : {1, 7, 2500}) {
    const int64_t n = outer * channels * inner;
    const auto x = values<float>(n, 1, 3), g = values<float>(n, 2);
    const std::vector<float> weight{1, -0.5f, 2, 0.1f, -3}, bias{0, 1, -1, 0.5f, 2};
    std::vector<double> mean(channels), variance(channels);
    ChannelStatistics<float> s;
    s.statistics = s.stride = s.channels = channels;
    s.size = outer * inner, s.eps = 1e-3;
    s.weight = weight.data(), s.bias = bias.data(), s.mean = mean.data(), s.variance = variance.data();
    ChannelArgs args;
    args.outer = outer, args.channels = args.sets = channels, args.inner = inner;
    args.has_act = true, args.act = Act::silu;
    args.dtype = args.out_dtype = Dtype::float32;
    args.x = x.data();
    const int64_t ways = 2;  // ranges of rows, in the layout of columns
    const int64_t parts = args.columns() ? ways * channels : args.planes();
    std::vector<double> first(parts), second(parts);
    const auto by_parts = [&](auto&& pass) {
      if (args.columns()) {
        for (int64_t way = 0; way < ways; ++way)
          pass(outer * way / ways, outer * (way + 1) / ways, first.data() + way * channels,
               second.data() + way * channels);
      } else {
        for (int64_t plane = 0; plane < args.planes(); plane += 4)
          pass(plane, std::min(plane + 4, args.planes()), first.data(), second.data());
      }
    };
    s.count = parts / channels;
    by_parts([&](int64_t begin, int64_t end, double* a, double* b) { cpu::channel_moments(args, begin, end, a, b); });
    for (int64_t c = 0; c < channels; ++c) s.finish_moments(c, first.data(), second.data());

    // The truth.
    std::vector<long double> z(n), want(n), m1(channels), m2(channels);
    for (int64_t c = 0; c < channels; ++c) {
      long double sum = 0, squares = 0;
      const auto each = [&](auto&& f) {
        for (int64_t o = 0; o < outer; ++o)
          for (int64_t i = 0; i < inner; ++i) f((o * channels + c) * inner + i);
      };
      each([&](int64_t i) { sum += x[i]; });
      sum /= s.size;
      each([&](int64_t i) { squares += (x[i] - sum) * (x[i] - sum); });
      squares /= s.size;
      CHECK(close(mean[c], double(sum), 1e-7) && close(variance[c], double(squares), 1e-6), "channel %d", int(c));
      const long double rstd = 1 / std::sqrt(squares + 1e-3L);
      std::vector<long double> dz(n);
      each([&](int64_t i) {
        z[i] = (x[i] - sum) * rstd * weight[c] + bias[c];
        const long double sigmoid = 1 / (1 + std::exp(-z[i]));
        dz[i] = g[i] * sigmoid * (1 + z[i] * (1 - sigmoid));
        m1[c] += dz[i], m2[c] += dz[i] * (x[i] - sum) * rstd;
      });
      each([&](int64_t i) {
        want[i] = weight[c] * rstd * (dz[i] - m1[c] / s.size - (x[i] - sum) * rstd * m2[c] / s.size);
      });
    }

    std::vector<float> terms(5 * channels), y(n), dx(g);
    std::vector<double> c1(channels), c2(channels), dw(channels), db(channels);
    const TermArrays<float> arrays{terms.data(), channels};
    args.terms = terms.data(), args.y = y.data(), args.grad = args.grad_input = dx.data();
    const auto by_elements = [&](auto&& pass) {
      for (int64_t i = 0; i < n; i += 1000) pass(i, std::min(i + 1000, n));
    };
    for (int64_t c = 0; c < channels; ++c) arrays.put(c, s.terms(c, nullptr, nullptr));
    by_elements([&](int64_t begin, int64_t end) { cpu::channel_forward(args, begin, end); });
    by_parts([&](int64_t begin, int64_t end, double* a, double* b) { cpu::channel_sums(args, begin, end, a, b); });
    for (int64_t c = 0; c < channels; ++c) {
      s.finish_sums(c, s.sums_of(c, first.data(), second.data()), c1.data(), c2.data());
      const auto sums = s.normalised(s.sums_of(c, first.data(), second.data()), mean[c], s.rstd(c));
      db[c] = sums.dz, dw[c] = sums.distance;
      CHECK(close(db[c], double(m1[c]), 1e-5) && close(dw[c], double(m2[c]), 1e-5), "gradients of channel %d", int(c));
      arrays.put(c, s.terms(c, c1.data(), c2.data()));
    }
    by_elements([&](int64_t begin, int64_t end) { cpu::channel_backward(args, begin, end); });
    for (int64_t i = 0; i < n; ++i) {
      CHECK(close(y[i], double(z[i] / (1 + std::exp(-z[i]))), 2e-6), "y %d", int(i));
      CHECK(close(dx[i], double(want[i]), 1e-5), "dx %d: %g, not %g", int(i), double(dx[i]), double(want[i]));
    }
  }
}

// Group norm's statistics as the formulas have them one by one, groups of any width; terms of all samples and of one.
template <class T>
void test_groups(int64_t width, bool with_weight) {
  const int64_t samples = 3, groups = 2, channels = groups * width, parts = samples * channels;
  const auto weight = values<T>(channels, 1), bias = values<T>(channels, 2);
  const auto one = values<double>(parts, 3), other = values<double>(parts, 4);
  std::vector<double> mean(samples * groups), variance(mean), want_mean(mean), want_variance(mean), roots(mean);
  std::vector<double> c1(mean), c2(mean), want_c1(mean), want_c2(mean);
  ChannelStatistics<T> s, want;
  s.statistics = samples * groups, s.step = s.count = width, s.size = 7 * width, s.eps = 1e-3;
  s.channels = channels, s.groups = groups;
  if (with_weight) s.weight = weight.data(), s.bias = bias.data();
  want = s;
  s.mean = mean.data(), s.variance = variance.data();
  want.mean = want_mean.data(), want.variance = want_variance.data();
  std::vector<double> squares(other);
  for (double& each : squares) each = each * each;
  cpu::group_moments(s, 0, s.statistics, one.data(), squares.data());
  for (int64_t i = 0; i < s.statistics; ++i) want.finish_moments(i, one.data(), squares.data());
  cpu::channel_roots(variance.data(), s.eps, s.statistics, roots.data());
  s.roots = roots.data();
  cpu::group_sums(s, 0, s.statistics, one.data(), other.data(), c1.data(), c2.data());
  for (int64_t i = 0; i < s.statistics; ++i) {
    want.finish_sums(i, want.sums_of(i, one.data(), other.data()), want_c1.data(), want_c2.data());
    CHECK(close(mean[i], want_mean[i], 1e-14) && close(variance[i], want_variance[i], 1e-14), "moments %d", int(i));
    CHECK(close(c1[i], want_c1[i], 1e-14) && close(c2[i], want_c2[i], 1e-14), "sums %d", int(i));
  }
  std::vector<double> db(channels, 9), dw(channels, 9);
  cpu::group_parameters(s, one.data(), other.data(), db.data(), dw.data());
  for (int64_t c = 0; c < channels; ++c) {
    const auto sums = want.parameter_sums(c, parts, one.data(), other.data());
    CHECK(close(db[c], sums.dz, 1e-14) && close(dw[c], sums.distance, 1e-14), "parameters %d", int(c));
  }
  const double tolerance = sizeof(T) == 8 ? 1e-14 : 1e-6;
  for (const double* first : {static_cast<const double*>(nullptr), static_cast<const double*>(c1.data())}) {
    std::vector<T> all(5 * parts), own(5 * channels);
    const TermArrays<T> of_all{all.data(), parts}, of_one{own.data(), channels};
    cpu::group_terms<T>(s, 0, s.statistics, first, c2.data(), of_all);
    for (int64_t sample = 0; sample < samples; ++sample) {
      cpu::group_terms<T>(s, sample * groups, (sample + 1) * groups, first, c2.data(), of_one);
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t k = sample * channels + c;
        const ChannelTerms<T> a = of_all.at(k), b = of_one.at(c), w = want.terms(k, first, c2.data());
        for (const ChannelTerms<T>& each : {a, b})
          CHECK(close(each.center, w.center, tolerance) && close(each.scale, w.scale, tolerance) &&
                    close(each.shift, w.shift, tolerance) && close(each.offset, w.offset, tolerance) &&
                    close(each.slope, w.slope, tolerance),
                "terms %d of %d channels", int(k), int(width));
      }
    }
  }
}

}  // namespace

int main() {
  test_moments();
  test_denominators();
  test_weight_check();
  test_all_rows<float>(Dtype::float32, 2e-6);
  test_all_rows<double>(Dtype::float64, 1e-14);
  test_residual();
  test_channels();
  for (int64_t width : {1, 2, 3, 7, 8, 9, 16, 31, 40})
    for (bool with_weight : {false, true})
      test_groups<float>(width, with_weight), test_groups<double>(width, with_weight);
  return finish("norms");
}
