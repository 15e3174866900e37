// Cross entropy: a warp or a block a row where its classes are neighbours, else a thread a row.
#include <algorithm>

#include "launch.cuh"
#include "loss.h"
#include "loss_row.cuh"

namespace memkit::cuda {
namespace {

constexpr int kWarpClasses = 2048;  // up to here a warp does a row
constexpr int kBlock = 512, kRowsABlock = 4;

template <class T>
__device__ LossState<T> from_lane(const LossState<T>& state, int distance) {
  constexpr unsigned all = 0xffffffffu;
  LossState<T> other;
  other.largest = __shfl_xor_sync(all, state.largest, distance);
  other.sum = __shfl_xor_sync(all, state.sum, distance);
  other.mass = __shfl_xor_sync(all, state.mass, distance);
  other.dot = __shfl_xor_sync(all, state.dot, distance);
  return other;
}

// The state of the whole row, in all threads; a row has blockDim.x of them, one warp or the whole block.
template <class T>
__device__ LossState<T> merged(LossState<T> state) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) state.merge(from_lane(state, distance));
  if (blockDim.x == kLanes) return state;
  __shared__ T largest[kLanes], sum[kLanes], mass[kLanes], dot[kLanes];
  const unsigned warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  if (lane == 0) largest[warp] = state.largest, sum[warp] = state.sum, mass[warp] = state.mass, dot[warp] = state.dot;
  __syncthreads();
  state = LossState<T>();
  if (lane < blockDim.x / kLanes) state = {largest[lane], sum[lane], mass[lane], dot[lane]};
  for (int distance = kLanes / 2; distance > 0; distance /= 2) state.merge(from_lane(state, distance));
  __syncthreads();  // before the next row writes there
  return state;
}

__device__ void check_index(const LossArgs& args, int64_t row) {
  if (args.index && args.index[row] != args.ignore_index && uint64_t(args.index[row]) >= uint64_t(args.classes))
    __trap();
}

template <class S, bool forward, bool backward>
__global__ void __launch_bounds__(kBlock) rows_kernel(const LossRows<S> rows) {
  const LossArgs& args = rows.args;
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < args.rows; row += step) {
    check_index(args, row);
    const int64_t first = row * args.classes;
    const bool ignored = rows.ignored(row);
    if constexpr (forward) {
      if (ignored) {
        if (threadIdx.x == 0) rows.finish_ignored(row);
      } else {
        LossForward<S> part{rows, first};
        RowWalk<S>(rows.x(first), rows.x(first), args.classes).each(threadIdx.x, blockDim.x, part);
        const auto state = merged(part.state);
        if (threadIdx.x == 0) rows.finish(row, first, state);
      }
    }
    if constexpr (backward) {
      if constexpr (forward) {  // thread 0 has written the row's numbers, having read its logits
        if (blockDim.x == kLanes)
          __syncwarp();
        else
          __syncthreads();
      }
      const RowWalk<S> walk(rows.x(first), rows.out(first), args.classes);
      if (ignored)
        walk.each(threadIdx.x, blockDim.x, LossZero<S>{rows.out(first)});
      else
        walk.each(threadIdx.x, blockDim.x, LossBackward<S>{rows, first, rows.gradient_of(row)});
    }
  }
}

// Neighbouring threads do neighbouring rows, whose elements of a class are neighbours.
template <class S, bool forward, bool backward>
__global__ void __launch_bounds__(kBlock) columns_kernel(const LossRows<S> rows) {
  using T = typename LossRows<S>::T;
  const LossArgs& args = rows.args;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; row < args.rows; row += step) {
    check_index(args, row);
    const int64_t first = row / args.inner * args.classes * args.inner + row % args.inner;
    const bool ignored = rows.ignored(row);
    if (forward && ignored) {
      rows.finish_ignored(row);
    } else if (forward) {
      LossState<T> state;
      for (int64_t c = 0; c < args.classes; ++c) {
        const int64_t at = first + c * args.inner;
        const T x = rows.value(*rows.x(at));
        state.raise(x);
        rows.add(state, x, c, at);
      }
      rows.finish(row, first, state);
    }
    if (!backward) continue;
    const auto g = rows.gradient_of(row);
    for (int64_t c = 0; c < args.classes; ++c) {
      const int64_t at = first + c * args.inner;
      S pair[2] = {};
      if (!ignored) narrow(rows.gradient(g, c, at, *rows.x(at)), T(0), pair);
      *rows.out(at) = pair[0];
    }
  }
}

template <class S, bool forward, bool backward>
cudaError_t launch(const LossArgs& args, cudaStream_t stream) {
  const LossRows<S> rows(args);
  constexpr int64_t most = (int64_t(1) << 31) - 1;
  if (args.inner > 1) {
    const int64_t blocks = std::min((args.rows + kBlock - 1) / kBlock, most);
    launch_kernel(columns_kernel<S, forward, backward>, unsigned(blocks), kBlock, stream, rows);
  } else {
    const bool warps = args.classes <= kWarpClasses;
    const dim3 block = warps ? dim3(kLanes, kRowsABlock) : dim3(kBlock);
    const int64_t blocks = std::min((args.rows + block.y - 1) / block.y, most);
    launch_kernel(rows_kernel<S, forward, backward>, unsigned(blocks), block, stream, rows);
  }
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
