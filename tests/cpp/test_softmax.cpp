// Softmax without torch: both engines against plain sums in long double, forward and back, masked and not, in place and not, at
// every alignment; the CUDA kernels' threads played one after the other.
#include <cmath>
#include <vector>

#include "../../csrc/cpu/softmax.h"
#include "../../csrc/cuda/softmax_row.cuh"
#include "check.h"
#include "random.h"

namespace {

using namespace memkit;

struct Case {
  int64_t rows, columns, inner;
  bool log, causal, in_place;
  SoftmaxMask::Kind mask;
  int64_t shift;  // elements that the rows lie off an alignment
};

// As the kernels of csrc/cuda/softmax.cu; threads 0: as many as hold a row.
template <class S, bool log, bool masked>
void play_forward(const SoftmaxArgs& args, int threads) {
  using T = typename cpu::ComputeType<S>::type;
  constexpr int W = 2;
  for (int64_t i = 0; i < args.rows; ++i) {
    if (threads == 0) {
      const int team = std::max(cuda::kMostSingles, int(args.columns / (W * cuda::RowWalk<S>::width)) + 1);
      std::vector<cuda::SoftmaxHeld<S, W, log, masked>> held;
      T largest = -std::numeric_limits<T>::infinity();
      cuda::RowSum<S> sum;
      for (int t = 0; t < team; ++t) {
        held.emplace_back(args, i, true, t, team);
        largest = std::fmax(largest, held[t].load());
      }
      for (auto& each : held) sum.merge(each.sum(softmax_pivot(largest)));
      for (auto& each : held) each.write(cuda::SoftmaxEnd<S, log>(largest, sum, masked));
      continue;
    }
    const cuda::SoftmaxRow<S, masked> row(args, i);
    const cuda::RowWalk<S> looking(row.x, row.y, row.seen), writing(row.x, row.y, args.columns);
    SoftmaxState<T> state;
    for (int t = 0; t < threads; ++t) {
      cuda::SoftmaxLook<S, W, masked> look{row, looking, threads};
      looking.template each<W>(t, threads, look);
      state.merge(look.state);
    }
    const cuda::SoftmaxEnd<S, log> end(state.largest, {state.sum}, masked);
    for (int t = 0; t < threads; ++t)
      writing.template each<W>(t, threads, cuda::SoftmaxWrite<S, W, log, masked>{row, writing, threads, end});
  }
}
template <class S, bool log>
void play_forward(const SoftmaxArgs& args, int threads) {
  args.masked ? play_forward<S, log, true>(args, threads) : play_forward<S, log, false>(args, threads);
}

template <class S, bool log>
void play_backward(const SoftmaxArgs& args, int threads) {
  constexpr int W = 2;
  using Back = cuda::SoftmaxBack<S, log>;
  for (int64_t i = 0; i < args.rows; ++i) {
    const Back back(args, i * args.columns);
    const cuda::RowWalk<S> walk = back.walk(args.columns);
    cuda::RowSum<S> sum;
    for (int t = 0; t < threads; ++t) {
      typename Back::template Sum<W> part{back, walk, threads};
      walk.template each<W>(t, threads, part);
      sum.merge(part.sum);
    }
    for (int t = 0; t < threads; ++t)
      walk.template each<W>(t, threads, typename Back::template Write<W>{back, walk, threads, sum});
  }
}

template <class S>
void test(const Case& c, Dtype dtype, double tolerance) {
  using T = typename cpu::ComputeType<S>::type;
  using Wide = long double;
  const int64_t numel = c.rows * c.columns, heads = 2, queries = c.rows / heads;
  const auto at = [&](int64_t row, int64_t column) {
    return c.shift + (row / c.inner * c.columns + column) * c.inner + row % c.inner;
  };
  std::vector<S> x(numel + 8), g(numel + 8);
  for (S& each : x) cpu::from_compute(T(3 * normal()), each);
  for (S& each : g) cpu::from_compute(T(normal()), each);
  // Shared by the heads; the second query sees nothing.
  std::vector<uint8_t> keep(queries * c.columns);
  std::vector<T> added(keep.size());
  for (size_t i = 0; i < keep.size(); ++i) {
    keep[i] = int64_t(i) / c.columns != 1 && generator() % 4 != 0;
    added[i] = keep[i] ? T(normal()) : -std::numeric_limits<T>::infinity();
  }
  SoftmaxArgs args;
  args.dtype = dtype;
  args.rows = c.rows, args.columns = c.columns, args.inner = c.inner;
  args.log = c.log, args.scale = 0.75;
  args.masked = c.causal || c.mask != SoftmaxMask::Kind::none;
  if (c.causal) args.queries = queries;
  args.mask.kind = c.mask;
  args.mask.dtype = sizeof(T) == 8 ? Dtype::float64 : Dtype::float32;
  args.mask.data = c.mask == SoftmaxMask::Kind::boolean ? static_cast<const void*>(keep.data()) : added.data();
  args.mask.sizes[1] = heads, args.mask.sizes[2] = queries, args.mask.strides[2] = c.columns;

  const Wide nothing = -std::numeric_limits<Wide>::infinity();
  for (int engine = 0; engine < (c.inner == 1 ? 4 : 1); ++engine) {
    std::vector<S> in = x, out(numel + 8), grad = g, grad_input(numel + 8);
    args.x = in.data() + c.shift;
    args.y = (c.in_place ? in : out).data() + c.shift;
    args.grad = grad.data() + c.shift;
    args.grad_input = (c.in_place ? grad : grad_input).data() + c.shift;
    const bool together = (cuda::RowWalk<S>(args.x, args.y, c.columns).head < c.columns);
    const int threads = engine == 1 ? 32 : engine == 2 || !together ? 7 : 0;
    if (engine == 0) {
      for (int64_t row = 0; row < c.rows; row += 3) cpu::softmax_forward(args, row, std::min(row + 3, c.rows));
    } else {
      c.log ? play_forward<S, true>(args, threads) : play_forward<S, false>(args, threads);
    }
    const std::vector<S> y = c.in_place ? in : out;
    if (engine == 0) {
      for (int64_t row = 0; row < c.rows; row += 3) cpu::softmax_backward(args, row, std::min(row + 3, c.rows));
    } else {
      c.log ? play_backward<S, true>(args, threads + 1) : play_backward<S, false>(args, threads + 1);
    }
    const std::vector<S>& dx = c.in_place ? grad : grad_input;

    for (int64_t row = 0; row < c.rows; ++row) {
      std::vector<Wide> z(c.columns);
      Wide largest = nothing, sum = 0, total = 0;
      for (int64_t k = 0; k < c.columns; ++k) {
        const int64_t m = row % queries * c.columns + k;
        z[k] = Wide(0.75) * cpu::to_compute(x[at(row, k)]);
        if (c.mask == SoftmaxMask::Kind::boolean && !keep[m]) z[k] = nothing;
        if (c.mask == SoftmaxMask::Kind::additive) z[k] += added[m];
        if (c.causal && k > row % queries) z[k] = nothing;
        largest = std::max(largest, z[k]);
      }
      if (largest == nothing) largest = 0;
      for (Wide each : z) sum += std::exp(each - largest);
      const auto compare = [&](double got, Wide want, double room, const char* what, int64_t k) {
        CHECK((std::isinf(want) && got == double(want)) ||
                  std::abs(got - double(want)) <= room * (1 + std::abs(double(want))),
              "%s %d of %d columns, inner %d, log %d, mask %d, causal %d, engine %d: %g, not %g", what, int(k),
              int(c.columns), int(c.inner), c.log, int(c.mask), c.causal, engine, got, double(want));
      };
      for (int64_t k = 0; k < c.columns; ++k) {
        const Wide share = sum == 0 ? 0 : std::exp(z[k] - largest) / sum;
        const Wide want = !c.log ? share : z[k] == nothing ? nothing : z[k] - largest - std::log(sum);
        compare(cpu::to_compute(y[at(row, k)]), want, tolerance, "y", k);
        const Wide own = cpu::to_compute(y[at(row, k)]), gradient = cpu::to_compute(g[at(row, k)]);
        total += c.log ? gradient : gradient * own;
      }
      for (int64_t k = 0; k < c.columns; ++k) {
        const Wide own = cpu::to_compute(y[at(row, k)]), gradient = cpu::to_compute(g[at(row, k)]);
        Wide want = Wide(0.75) * (c.log ? gradient - std::exp(own) * total : own * (gradient - total));
        if (c.log && own == nothing) want = 0;
        compare(cpu::to_compute(dx[at(row, k)]), want, 20 * tolerance, "dx", k);
      }
    }
  }
}

}  // namespace

int main() {
  using Kind = SoftmaxMask::Kind;
  for (int64_t columns : {1, 5, 32, 75, 2100, 33000}) {
    for (int bits = 0; bits < 8; ++bits) {
      for (Kind mask : {Kind::none, Kind::boolean, Kind::additive}) {
        const bool log = bits & 1, causal = bits & 2, in_place = bits & 4;
        const Case c{columns > 1000 ? 4 : 20, columns, 1, log, causal, in_place, mask, bits % 3};
        test<float>(c, Dtype::float32, 3e-6);
        if (columns < 30000) test<double>(c, Dtype::float64, 1e-13);
        test<cpu::Bfloat>(c, Dtype::bfloat16, 8e-3);
      }
    }
    for (int64_t inner : {2, 300}) {
      if (columns > 1000) continue;
      for (int bits = 0; bits < 4; ++bits) {
        const Case c{2 * inner, columns, inner, (bits & 1) != 0, false, (bits & 2) != 0, Kind::none, bits};
        test<float>(c, Dtype::float32, 3e-6);
        test<cpu::Bfloat>(c, Dtype::bfloat16, 8e-3);
      }
    }
  }
  return finish("softmax");
}
