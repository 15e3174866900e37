// Softmax: where a row's elements are neighbours, as many threads a row as hold it in registers, from one to a block, and a
// block that walks it twice where it is longer; else a thread a row.
#include "softmax.h"
#include "softmax_row.cuh"
#include "team.cuh"

namespace memkit::cuda {
namespace {

constexpr int kBeside = 512;  // threads of a block where a thread does a row

// Words of a thread, as many as 64 registers have room for beside the arithmetic: of a row that is held, and at a time where
// it is not.
template <class S>
constexpr int kHeldWords = sizeof(S) == 8   ? 2
                           : sizeof(S) == 2 ? 4
                                            : 8;
// Where a row is else too long to be held.
template <class S, bool masked>
constexpr int kLongWords = sizeof(S) == 2 && !masked ? 8 : kHeldWords<S>;
// At the least, where rows are few.
template <class S>
constexpr int kFewWords = sizeof(S) == 4 ? 4 : 2;
template <class S>
constexpr int kHeldBackWords = sizeof(S) == 8 ? 2 : 4;
template <class S, bool masked>
constexpr int kWalkWords = sizeof(S) == 8 ? 1
                           : masked       ? 2
                                          : 4;
template <class S>
constexpr int kWalkBackWords = sizeof(S) == 8 ? 1 : 2;

template <class S, int W, bool log, bool masked>
__global__ void __launch_bounds__(kTeamMost) forward_held(const SoftmaxArgs args) {
  const int64_t i = team_row();
  SoftmaxHeld<S, W, log, masked> held(args, i, i < args.rows, int(threadIdx.x), int(blockDim.x));
  const auto largest = team_largest(held.load());
  const auto sum = team_merge(held.sum(softmax_pivot(largest)));
  held.write(SoftmaxEnd<S, log>(largest, sum, masked));
}

template <class S, bool log, bool masked>
__global__ void __launch_bounds__(kTeamMost) forward_walk(const SoftmaxArgs args) {
  using T = typename ComputeType<S>::type;
  const int64_t i = team_row();
  const bool real = i < args.rows;
  const int thread = int(threadIdx.x), threads = int(blockDim.x);
  const SoftmaxRow<S, masked> row(args, real ? i : 0);
  const RowWalk<S> looking(row.x, row.y, real ? row.seen : 0), writing(row.x, row.y, real ? args.columns : 0);
  constexpr int W = kWalkWords<S, masked>;
  SoftmaxLook<S, W, masked> look{row, looking, threads};
  looking.template each<W>(thread, threads, look);
  look.state.raise(team_largest(look.state.largest));
  RowSum<S> sum;
  sum.high = look.state.sum;
  sum = team_merge(sum);  // all have looked before one writes
  const SoftmaxEnd<S, log> end(look.state.largest, sum, masked);
  writing.template each<W>(thread, threads, SoftmaxWrite<S, W, log, masked>{row, writing, threads, end});
}

template <class S, int W, bool log>
__global__ void __launch_bounds__(kTeamMost) backward_held(const SoftmaxArgs args) {
  const int64_t i = team_row();
  const bool real = i < args.rows;
  const int thread = int(threadIdx.x), threads = int(blockDim.x);
  const SoftmaxBack<S, log> back(args, real ? i * args.columns : 0);
  const RowWalk<S> walk = back.walk(real ? args.columns : 0);
  RowWords<S, W> g, y;
  g.load(back.grad, walk, thread, threads, walk.words);
  y.load(back.y, walk, thread, threads, walk.words);
  const int64_t single = walk.single(thread);
  typename SoftmaxBack<S, log>::template Sum<W> sum{back, walk, threads};
  if (single >= 0) sum.one(single);
  sum.words(g, y, thread);
  const typename SoftmaxBack<S, log>::template Write<W> write{back, walk, threads, team_merge(sum.sum)};
  if (single >= 0) write.one(single);
  g.stay_narrow();
  y.stay_narrow();
  write.words(g, y, thread);
}

template <class S, bool log>
__global__ void __launch_bounds__(kTeamMost) backward_walk(const SoftmaxArgs args) {
  constexpr int W = kWalkBackWords<S>;
  const int64_t i = team_row();
  const bool real = i < args.rows;
  const int thread = int(threadIdx.x), threads = int(blockDim.x);
  const SoftmaxBack<S, log> back(args, real ? i * args.columns : 0);
  const RowWalk<S> walk = back.walk(real ? args.columns : 0);
  typename SoftmaxBack<S, log>::template Sum<W> sum{back, walk, threads};
  walk.template each<W>(thread, threads, sum);
  walk.template each<W>(thread, threads,
                        typename SoftmaxBack<S, log>::template Write<W>{back, walk, threads, team_merge(sum.sum)});
}

// Neighbouring threads do neighbouring rows, whose elements of a column are neighbours.
template <class S, bool log>
__global__ void __launch_bounds__(kBeside) forward_beside(const SoftmaxArgs args) {
  using T = typename ComputeType<S>::type;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; row < args.rows; row += step) {
    const int64_t first = row / args.inner * args.columns * args.inner + row % args.inner;
    const S* x = static_cast<const S*>(args.x) + first;
    SoftmaxState<T> state;
    for (int64_t c = 0; c < args.columns; ++c) {
      const T z = widen(x[c * args.inner]) * T(args.scale);
      state.raise(z);
      state.add(z);
    }
    const SoftmaxEnd<S, log> output(state.largest, RowSum<S>{state.sum}, args.masked);
    for (int64_t c = 0; c < args.columns; ++c)
      store_value(output.value(widen(x[c * args.inner]) * T(args.scale)),
                  static_cast<S*>(args.y) + first + c * args.inner);
  }
}

template <class S, bool log>
__global__ void __launch_bounds__(kBeside) backward_beside(const SoftmaxArgs args) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; row < args.rows; row += step) {
    const SoftmaxBack<S, log> back(args, row / args.inner * args.columns * args.inner + row % args.inner);
    RowSum<S> sum;
    for (int64_t c = 0; c < args.columns; ++c)
      back.add(sum, widen(back.grad[c * args.inner]), widen(back.y[c * args.inner]));
    for (int64_t c = 0; c < args.columns; ++c) {
      const int64_t at = c * args.inner;
      store_value(back.value(widen(back.grad[at]), widen(back.y[at]), sum), back.out + at);
    }
  }
}

using Kernel = void (*)(SoftmaxArgs);

template <class S, bool log, bool masked>
Kernel forward_kernel(const TeamShape& shape) {
  if constexpr (!(log && masked)) {  // the logarithm behind a mask is rare: short rows are read twice too
    constexpr int most = kLongWords<S, masked>;
    if (shape.held)
      return shape.words == 2   ? forward_held<S, 2, log, masked>
             : shape.words == 4 ? forward_held<S, std::min(4, most), log, masked>
                                : forward_held<S, most, log, masked>;
  }
  return forward_walk<S, log, masked>;
}
template <class S, bool log>
Kernel backward_kernel(const TeamShape& shape) {
  if (!shape.held) return backward_walk<S, log>;
  return shape.words == 2 ? backward_held<S, 2, log> : backward_held<S, kHeldBackWords<S>, log>;
}

template <class S, bool log>
cudaError_t launch(const SoftmaxArgs& args, bool backward, cudaStream_t stream) {
  if (args.inner > 1) {
    constexpr int64_t most = (int64_t(1) << 31) - 1;
    const auto blocks = unsigned(std::min((args.rows + kBeside - 1) / kBeside, most));
    launch_kernel(backward ? backward_beside<S, log> : forward_beside<S, log>, blocks, kBeside, stream, args);
    return cudaGetLastError();
  }
  constexpr int64_t width = RowWalk<S>::width;
  const auto off = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % sizeof(Word); };
  const uintptr_t at = off(args.y);
  const bool alike = backward ? off(args.grad) == at && off(args.grad_input) == at : off(args.x) == at;
  const bool singles = at != 0 || args.columns % width != 0;
  const int64_t words = alike ? args.columns / width : args.columns;
  const int longest = args.masked ? kLongWords<S, true> : kLongWords<S, false>;
  const int least = backward ? 2 : kFewWords<S>;
  const int most = backward ? kHeldBackWords<S> : words > int64_t(kTeamMost) * kHeldWords<S> ? longest : kHeldWords<S>;
  TeamShape shape;
  if (const cudaError_t error = team_shape(args.rows, words, singles, least, most, kTeamMost, shape)) return error;
  shape.held = shape.held && alike;
  const Kernel kernel = backward      ? backward_kernel<S, log>(shape)
                        : args.masked ? forward_kernel<S, log, true>(shape)
                                      : forward_kernel<S, log, false>(shape);
  launch_kernel(kernel, shape.grid, shape.block, stream, args);
  return cudaGetLastError();
}

template <class S>
cudaError_t launch(const SoftmaxArgs& args, bool backward, cudaStream_t stream) {
  return args.log ? launch<S, true>(args, backward, stream) : launch<S, false>(args, backward, stream);
}

int run(const SoftmaxArgs& args, bool backward, cudaStream_t stream) {
  switch (args.dtype) {
    case Dtype::float32: return launch<float>(args, backward, stream);
    case Dtype::float64: return launch<double>(args, backward, stream);
    case Dtype::float16: return launch<Half>(args, backward, stream);
    case Dtype::bfloat16: return launch<Bfloat>(args, backward, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int softmax_forward(const SoftmaxArgs& args, CUstream_st* stream) { return run(args, false, stream); }

int softmax_backward(const SoftmaxArgs& args, CUstream_st* stream) { return run(args, true, stream); }

}  // namespace memkit::cuda
