// Cross entropy: where a row's classes are neighbours, as many threads a row as hold it in registers, from one to a block,
// which walk it where it is longer; else a thread a row. Then the sums over rows, in an order that is always the same.
#include "loss.h"
#include "loss_row.cuh"
#include "team.cuh"

namespace memkit::cuda {
namespace {

constexpr int kBeside = 512;  // threads of a block where a thread does a row

// Beside the largest, over the threads of a row.
template <class T>
struct LossSums {
  T sum = 0, mass = 0, dot = 0;
  MEMKIT_FN void merge(const LossSums& other) { sum += other.sum, mass += other.mass, dot += other.dot; }
};

template <bool plain, class T>
__device__ LossState<T> merged(LossState<T> state) {
  state.raise(team_largest(state.largest));
  if constexpr (plain) {
    TeamSum<T> sum;
    sum.value = state.sum;
    state.sum = team_merge(sum).value;
    state.mass = state.dot = T(0);
  } else {
    LossSums<T> sums;
    sums.sum = state.sum, sums.mass = state.mass, sums.dot = state.dot;
    sums = team_merge(sums);
    state.sum = sums.sum, state.mass = sums.mass, state.dot = sums.dot;
  }
  return state;
}

__device__ int64_t checked_index(const LossArgs& args, int64_t row) {
  const int64_t index = args.index_of(row);
  if (args.index && !args.ignores(index) && uint64_t(index) >= uint64_t(args.classes)) __trap();
  return index;
}

// Threads of a block: what registers have room for, and what is wanted. Only what reads a row for two ends needs to hold it.
template <class S>
constexpr int kRoom = sizeof(S) == 8 ? kTeamMost / 2 : kTeamMost;
template <class S, bool both>
constexpr int kMost = both ? kRoom<S> : kTeamMost / 2;

template <class S, bool forward, bool backward, int W, bool plain, bool held = false>
__global__ void __launch_bounds__(kRoom<S>) rows_kernel(const LossRows<S> rows) {
  const LossArgs& args = rows.args;
  const int64_t row = team_row(), first = row * args.classes;
  const bool real = row < args.rows;
  const int thread = int(threadIdx.x), threads = int(blockDim.x);
  const int64_t index = real ? checked_index(args, row) : -1;
  const bool ignored = args.ignores(index);
  const RowWalk<S> walk(rows.x(first), backward ? rows.out(first) : rows.x(first), real ? args.classes : 0);
  typename LossRows<S>::Numbers numbers{};
  LossForward<S, W, plain> part(rows, walk, first, threads);
  if constexpr (forward) {
    // Asked for with the row, and before another thread writes the gradient there.
    S target{};
    if (real && !ignored && thread == 0) target = rows.target(first, index);
    if (ignored) {
    } else if constexpr (held) {
      part.hold(thread);
    } else {
      walk.template each<W>(thread, threads, part);
    }
    const auto state = merged<plain>(part.state);
    if (real && !ignored) numbers = rows.finish(state, index, target);
    if (real && thread == 0) rows.store(row, numbers);
    if (backward) __syncwarp();  // a block has met in merged()
  }
  if constexpr (backward) {
    if (!real) return;
    const auto g =
        forward ? rows.gradient_of(row, index, numbers.largest, numbers.factor) : rows.gradient_of(row, index);
    LossBackward<S, W, plain> back(part, g, ignored);
    if constexpr (held)
      back.finish(thread);
    else
      walk.template each<W>(thread, threads, back);
  }
}

// Neighbouring threads do neighbouring rows, whose elements of a class are neighbours.
template <class S, bool forward, bool backward>
__global__ void __launch_bounds__(kBeside) columns_kernel(const LossRows<S> rows) {
  using T = typename LossRows<S>::T;
  const LossArgs& args = rows.args;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; row < args.rows; row += step) {
    const int64_t index = checked_index(args, row);
    const int64_t first = row / args.inner * args.classes * args.inner + row % args.inner;
    const bool ignored = args.ignores(index);
    if (forward && ignored) {
      rows.store(row, {});
    } else if (forward) {
      LossState<T> state;
      for (int64_t c = 0; c < args.classes; ++c) {
        const int64_t at = first + c * args.inner;
        const T x = rows.value(*rows.x(at));
        state.raise(x);
        rows.add(state, x, c, at);
      }
      rows.store(row, rows.finish(state, index, rows.target(first, index)));
    }
    if (!backward) continue;
    const auto g = rows.gradient_of(row, index);
    for (int64_t c = 0; c < args.classes; ++c) {
      const int64_t at = first + c * args.inner;
      store_value(ignored ? T(0) : rows.gradient(g, c, at, *rows.x(at)), rows.out(at));
    }
  }
}

constexpr int kTogether = 4;  // rows of a thread, asked for before the first is used

template <class T>
__device__ void store_result(const LossSum& sum, const LossResult& to) {
  const T total = T(sum.total);
  if (to.total) *static_cast<T*>(to.total) = total;
  if (!to.loss) return;
  const double loss = to.total ? sum.loss / double(total) : sum.loss;
  switch (to.dtype) {
    case Dtype::float32: *static_cast<float*>(to.loss) = float(loss); break;
    case Dtype::float64: *static_cast<double*>(to.loss) = loss; break;
    case Dtype::float16: narrow(float(loss), static_cast<Half*>(to.loss)); break;
    case Dtype::bfloat16: narrow(float(loss), static_cast<Bfloat*>(to.loss)); break;
  }
}

template <class T>
__global__ void __launch_bounds__(kTeamMost) reduce_kernel(const LossArgs args, const LossResult to) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  LossSum sum;
  for (int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; first < args.rows; first += kTogether * step) {
    int64_t index[kTogether];
    T loss[kTogether] = {};
    MEMKIT_UNROLL
    for (int k = 0; k < kTogether; ++k) {
      const int64_t row = first + k * step;
      if (row >= args.rows) continue;
      if (to.total) index[k] = checked_index(args, row);
      if (to.loss) loss[k] = static_cast<const T*>(args.loss)[row];
    }
    MEMKIT_UNROLL
    for (int k = 0; k < kTogether; ++k) {
      sum.loss += double(loss[k]);
      if (to.total && first + k * step < args.rows) sum.total += args.row_weight<T>(index[k]);
    }
  }
  sum = team_merge(sum);
  if (threadIdx.x != 0) return;
  if (gridDim.x > 1)
    to.parts[blockIdx.x] = sum;
  else
    store_result<T>(sum, to);
}

template <class T>
__global__ void __launch_bounds__(kTeamMost) reduce_parts_kernel(const LossResult to, int parts) {
  LossSum sum;
  if (int(threadIdx.x) < parts) sum = to.parts[threadIdx.x];
  sum = team_merge(sum);
  if (threadIdx.x == 0) store_result<T>(sum, to);
}

// Whole warps, at least one.
unsigned reducing_threads(int64_t wanted) {
  return unsigned(std::clamp<int64_t>((wanted + kLanes - 1) / kLanes * kLanes, kLanes, kTeamMost));
}

template <class T>
cudaError_t reduce(const LossArgs& args, const LossResult& to, cudaStream_t stream) {
  const int blocks = reducing_blocks(args.rows);
  const unsigned threads = reducing_threads((args.rows + kTogether - 1) / kTogether);
  launch_kernel(reduce_kernel<T>, unsigned(blocks), threads, stream, args, to);
  if (blocks > 1) launch_kernel(reduce_parts_kernel<T>, 1, reducing_threads(blocks), stream, to, blocks);
  return cudaGetLastError();
}

template <class S, bool forward, bool backward>
cudaError_t launch(const LossArgs& args, cudaStream_t stream) {
  const LossRows<S> rows(args);
  if (args.inner > 1) {
    constexpr int64_t most = (int64_t(1) << 31) - 1;
    const int64_t blocks = std::min((args.rows + kBeside - 1) / kBeside, most);
    launch_kernel(columns_kernel<S, forward, backward>, unsigned(blocks), kBeside, stream, rows);
    return cudaGetLastError();
  }
  constexpr bool both = forward && backward;
  // Words of a thread at a time, as many as registers have room for; in double precision few.
  constexpr int most = sizeof(S) == 8 ? 2 : forward ? 8 : 4;
  const bool plain = sizeof(S) < 8 && rows.plain();
  constexpr int walked = both ? 4 : most, threads = kMost<S, both>;
  TeamShape shape;
  const int64_t words = args.classes / RowWalk<S>::width;
  if (const cudaError_t error = team_shape(args.rows, words, true, 2, plain ? most : 2, threads, shape)) return error;
  auto kernel = rows_kernel<S, forward, backward, 2, false>;
  if constexpr (sizeof(S) < 8) {
    const bool together = !both || uintptr_t(args.x) % sizeof(Word) == uintptr_t(args.out) % sizeof(Word);
    if (plain && !(shape.held && together))
      kernel = rows_kernel<S, forward, backward, walked, true>;
    else if (plain)
      kernel = shape.words == 2   ? rows_kernel<S, forward, backward, 2, true, both>
               : shape.words == 4 ? rows_kernel<S, forward, backward, 4, true, both>
                                  : rows_kernel<S, forward, backward, most, true, both>;
  }
  launch_kernel(kernel, shape.grid, shape.block, stream, rows);
  return cudaGetLastError();
}

template <class S>
cudaError_t launch(LossPass pass, const LossArgs& args, cudaStream_t stream) {
  switch (pass) {
    case LossPass::forward: return launch<S, true, false>(args, stream);
    case LossPass::backward: return launch<S, false, true>(args, stream);
    case LossPass::both: return launch<S, true, true>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int reduce_losses(const LossArgs& args, const LossResult& result, cudaStream_t stream) {
  return args.dtype == Dtype::float64 ? reduce<double>(args, result, stream) : reduce<float>(args, result, stream);
}

int cross_entropy(LossPass pass, const LossArgs& args, cudaStream_t stream) {
  switch (args.dtype) {
    case Dtype::float32: return launch<float>(pass, args, stream);
    case Dtype::float64: return launch<double>(pass, args, stream);
    case Dtype::float16: return launch<Half>(pass, args, stream);
    case Dtype::bfloat16: return launch<Bfloat>(pass, args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace memkit::cuda
