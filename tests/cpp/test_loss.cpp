// Cross entropy without torch: both engines' rows and columns against plain sums in double, in place and not, at every
// alignment; the CUDA kernels' threads played one after the other.
#include <cmath>
#include <vector>

#include "../../csrc/cpu/loss.h"
#include "../../csrc/cuda/loss_row.cuh"
#include "check.h"
#include "random.h"

namespace {

using namespace memkit;

template <class S>
struct Type;
template <>
struct Type<float> {
  static constexpr Dtype dtype = Dtype::float32;
  static constexpr double loss = 3e-6, gradient = 3e-6;
};
template <>
struct Type<double> {
  static constexpr Dtype dtype = Dtype::float64;
  static constexpr double loss = 1e-13, gradient = 1e-13;
};
template <>
struct Type<cpu::Bfloat> {
  static constexpr Dtype dtype = Dtype::bfloat16;
  static constexpr double loss = 3e-6, gradient = 8e-3;
};

struct Case {
  int64_t rows, classes, inner;
  bool soft, weighted, wide;
  double smoothing, z, cap;
  bool in_place;
  int64_t shift;  // elements that the logits lie off an alignment
};

// As the kernels of csrc/cuda/loss.cu, with `threads` threads a row.
template <class S, int W, bool plain>
void play_rows(const LossArgs& args, int threads) {
  const cuda::LossRows<S> rows(args);
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t first = row * args.classes;
    const int64_t index = args.index_of(row);
    const bool ignored = args.ignores(index);
    const cuda::RowWalk<S> walk(rows.x(first), rows.out(first), args.classes);
    const bool held =
        threads >= cuda::kMostSingles && walk.words <= W * threads && walk.n - walk.words * walk.width <= threads;
    std::vector<cuda::LossForward<S, W, plain>> parts;
    LossState<typename cuda::LossRows<S>::T> whole;
    const S target = ignored ? S{} : rows.target(first, index);
    for (int thread = 0; thread < threads; ++thread) {
      parts.emplace_back(rows, walk, first, threads);
      if (ignored) continue;
      if (held)
        parts[thread].hold(thread);
      else
        walk.template each<W>(thread, threads, parts[thread]);
      whole.merge(parts[thread].state);
    }
    rows.store(row, {});
    if (!ignored) rows.store(row, rows.finish(whole, index, target));
    for (int thread = 0; thread < threads; ++thread) {
      cuda::LossBackward<S, W, plain> back(parts[thread], rows.gradient_of(row, index), ignored);
      if (held)
        back.finish(thread);
      else
        walk.template each<W>(thread, threads, back);
    }
  }
}
template <class S>
void play_columns(const LossArgs& args) {
  const cuda::LossRows<S> rows(args);
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t first = row / args.inner * args.classes * args.inner + row % args.inner;
    const int64_t index = args.index_of(row);
    const bool ignored = args.ignores(index);
    LossState<typename cuda::LossRows<S>::T> state;
    for (int64_t c = 0; c < args.classes; ++c) {
      const auto x = rows.value(*rows.x(first + c * args.inner));
      state.raise(x);
      rows.add(state, x, c, first + c * args.inner);
    }
    rows.store(row, {});
    if (!ignored) rows.store(row, rows.finish(state, index, rows.target(first, index)));
    const auto g = rows.gradient_of(row, index);
    for (int64_t c = 0; c < args.classes; ++c) {
      const int64_t at = first + c * args.inner;
      cuda::store_value(ignored ? decltype(g.grad)(0) : rows.gradient(g, c, at, *rows.x(at)), rows.out(at));
    }
  }
}
template <class S>
void play_cuda(const LossArgs& args, int threads) {
  if (args.inner > 1)
    play_columns<S>(args);
  else if (cuda::LossRows<S>(args).plain())
    play_rows<S, 4, true>(args, threads);
  else
    play_rows<S, 2, false>(args, threads);
}

template <class S>
void compare(const Case& c, bool on_cuda) {
  using T = typename cuda::ComputeType<S>::type;
  const int64_t n = c.rows * c.classes, margin = 32;
  std::vector<S> x(n + 2 * margin), out(n + 2 * margin);
  std::vector<T> soft(n), weight(c.classes), loss(c.rows), largest(c.rows), factor(c.rows), grad(c.rows);
  std::vector<int64_t> index(c.rows);
  S* logits = x.data() + margin + c.shift;
  for (int64_t i = 0; i < n; ++i) {
    cpu::from_compute(T(normal() * 4 + 20), logits[i]);
    soft[i] = T(std::abs(normal()) / double(c.classes));
  }
  const std::vector<S> before = x;
  double weight_sum = 0;
  for (T& w : weight) w = T(0.5 + std::abs(normal())), weight_sum += double(w);
  for (T& g : grad) g = T(normal());
  for (int64_t& t : index) t = generator() % 5 == 0 ? -7 : int64_t(generator() % uint64_t(c.classes));
  const T total = T(3), sum = T(weight_sum);

  LossArgs args;
  args.dtype = Type<S>::dtype;
  args.rows = c.rows, args.classes = c.classes, args.inner = c.inner;
  args.x = logits;
  if (c.soft) args.probabilities = soft.data(), args.wide_probabilities = true;
  if (!c.soft) args.index = index.data();
  args.ignore_index = -7;
  args.smoothing = c.smoothing, args.z = c.z, args.cap = c.cap;
  if (c.weighted) args.weight = weight.data(), args.weight_sum = &sum;
  args.loss = loss.data(), args.largest = largest.data(), args.factor = factor.data();
  args.grad = grad.data(), args.grad_a_row = true, args.total = &total;
  S* result = c.in_place ? logits : out.data() + margin;
  args.out = result;
  if (on_cuda) {
    play_cuda<S>(args, c.rows % 2 ? 64 : 16);
  } else {
    cpu::cross_entropy(c.rows % 2 ? LossPass::both : LossPass::forward, args, 0, c.rows);
    if (c.rows % 2 == 0) cpu::cross_entropy(LossPass::backward, args, 0, c.rows);
  }

  for (int64_t row = 0; row < c.rows; ++row) {
    const auto at = [&](int64_t k) { return (row / c.inner * c.classes + k) * c.inner + row % c.inner; };
    const bool ignored = !c.soft && index[row] == -7;
    std::vector<double> value(c.classes), b(c.classes);
    double lse = 0, mass = 0, want = 0;
    for (int64_t k = 0; k < c.classes; ++k) {
      const double logit = double(cpu::to_compute(before[margin + c.shift + at(k)]));
      value[k] = c.cap != 0 ? c.cap * std::tanh(logit / c.cap) : logit;
      lse += std::exp(value[k]);
      const double q = c.soft ? double(soft[at(k)]) : double(index[row] == k);
      b[k] = (c.weighted ? double(weight[k]) : 1) * (q * (1 - c.smoothing) + c.smoothing / double(c.classes));
      mass += b[k];
    }
    lse = std::log(lse);
    for (int64_t k = 0; k < c.classes; ++k) want += b[k] * (lse - value[k]);
    want = ignored ? 0 : want + c.z * lse * lse;
    CHECK(std::abs(double(loss[row]) - want) <= Type<S>::loss * (1 + std::abs(want)), "%g, expected %g; row %lld",
          double(loss[row]), want, (long long)row);
    for (int64_t k = 0; k < c.classes; ++k) {
      const double slope = c.cap != 0 ? 1 - value[k] / c.cap * (value[k] / c.cap) : 1;
      const double p = std::exp(value[k] - lse), g = double(grad[row]) / 3;
      const double expected = ignored ? 0 : ((mass + 2 * c.z * lse) * p - b[k]) * slope * g;
      const double got = double(cpu::to_compute(result[at(k)]));
      CHECK(std::abs(got - expected) <= Type<S>::gradient * std::abs(expected) + Type<S>::loss * std::abs(g),
            "%g, expected %g; row %lld class %lld of %lld, inner %lld, cuda %d", got, expected, (long long)row,
            (long long)k, (long long)c.classes, (long long)c.inner, on_cuda);
    }
  }
  const S* untouched = c.in_place ? x.data() : out.data();
  const int64_t begin = result - untouched;
  bool kept = true;
  for (int64_t i = 0; i < n + 2 * margin; ++i)
    if (i < begin || i >= begin + n) kept = kept && cpu::to_compute(untouched[i]) == 0;
  CHECK(kept, "written outside; %lld elements", (long long)n);
}

// Every element once, whatever the alignment and the number of threads.
template <class S>
void walks() {
  alignas(16) static char memory[64];
  struct Count {
    std::vector<int>& seen;
    const cuda::RowWalk<S>& walk;
    int threads;
    void one(int64_t i) { ++seen[i]; }
    void batch(int64_t i) {
      for (int64_t at : {i, i + threads})
        for (int k = 0; at < walk.words && k < cuda::RowWalk<S>::width; ++k) ++seen[walk.element(at) + k];
    }
  };
  for (int64_t n : {1, 2, 7, 8, 9, 33, 255, 1000})
    for (int off : {0, 1, 3, 7})
      for (int other : {0, 1}) {
        const char* first = memory + off * sizeof(S);
        const cuda::RowWalk<S> walk(first, first + other * sizeof(S), n);
        CHECK(other == 0 || sizeof(S) == 16 || walk.words == 0, "words where the other tensor is not aligned");
        CHECK((reinterpret_cast<uintptr_t>(first) + walk.head * sizeof(S)) % 16 == 0 || walk.words == 0, "unaligned");
        for (int threads : {1, 32, 512}) {
          std::vector<int> seen(n);
          for (int thread = 0; thread < threads; ++thread)
            walk.template each<2>(thread, threads, Count{seen, walk, threads});
          for (int64_t i = 0; i < n; ++i) CHECK(seen[i] == 1, "element %lld %d times", (long long)i, seen[i]);
          if (other || threads < cuda::kMostSingles) continue;
          for (int thread = 0; thread < threads; ++thread)
            if (walk.single(thread) >= 0) ++seen[walk.single(thread)];
          for (int64_t i = 0; i < n; ++i) {
            const bool word = i >= walk.head && i < walk.element(walk.words);
            CHECK(seen[i] == 2 - word, "element %lld held %d times", (long long)i, seen[i] - 1);
          }
        }
      }
}

template <class S>
void all() {
  walks<S>();
  for (int64_t classes : {1, 5, 40, 1100})
    for (int64_t inner : {1, 3, 300})
      for (bool soft : {false, true})
        for (int options = 0; options < 8; ++options) {
          const int64_t rows = inner == 1 ? 3 + options % 2 : 2 * inner;
          if (rows * classes > 5000 && options % 4 != 3) continue;
          const Case c{rows,
                       classes,
                       inner,
                       soft,
                       (options & 1) != 0,
                       true,
                       options & 2 ? 0.1 : 0,
                       options & 4 ? 0.01 : 0,
                       options & 4 ? 30.0 : 0,
                       (options & 1) != 0,
                       options % 4};
          compare<S>(c, false);
          compare<S>(c, true);
        }
}

}  // namespace

int main() {
  all<float>();
  all<double>();
  all<cpu::Bfloat>();
  return finish("loss");
}
