// Softmax: a warp or a block a row where its elements are neighbours, else a thread a row. The second look at a row finds it in
// the cache.
#include <algorithm>

#include "softmax.h"
#include "softmax_row.cuh"
#include "vector.cuh"

namespace memkit::cuda {
namespace {

constexpr int kWarpColumns = 2048;  // up to here a warp does a row
constexpr int kBlock = 512, kRowsABlock = 4;

template <class T>
__device__ SoftmaxState<T> merged_lanes(SoftmaxState<T> state) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    SoftmaxState<T> other;
    other.largest = __shfl_xor_sync(0xffffffffu, state.largest, distance);
    other.sum = __shfl_xor_sync(0xffffffffu, state.sum, distance);
    state.merge(other);
  }
  return state;
}

// The state of the whole row, in all threads; a row has blockDim.x of them, one warp or the whole block.
template <class T>
__device__ SoftmaxState<T> merged(SoftmaxState<T> state) {
  state = merged_lanes(state);
  if (blockDim.x == kLanes) return state;
  __shared__ T largest[kLanes], sum[kLanes];
  const unsigned warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  __syncthreads();  // the last row's have been read
  if (lane == 0) largest[warp] = state.largest, sum[warp] = state.sum;
  __syncthreads();
  state = SoftmaxState<T>();
  if (lane < blockDim.x / kLanes) state.largest = largest[lane], state.sum = sum[lane];
  return merged_lanes(state);
}

template <class S, bool log>
__global__ void __launch_bounds__(kBlock) forward_rows(const SoftmaxArgs args) {
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; i < args.rows; i += step) {
    const SoftmaxRow<S> row(args, i);
    SoftmaxLook<S> look(row);
    RowWalk<S>(row.x, row.x, row.seen).each(threadIdx.x, blockDim.x, look);
    const auto state = merged(look.state);  // all have looked before one writes
    RowWalk<S>(row.x, row.y, args.columns).each(threadIdx.x, blockDim.x, SoftmaxWrite<S, log>(row, state));
  }
}

template <class S, bool log>
__global__ void __launch_bounds__(kBlock) backward_rows(const SoftmaxArgs args) {
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; i < args.rows; i += step) {
    SoftmaxSum<S, log> sum(args, i * args.columns);
    RowWalk<S>(sum.grad, sum.y, args.columns).each(threadIdx.x, blockDim.x, sum);
    using T = typename SoftmaxSum<S, log>::T;
    const T total = block_sum(Pair<T>{sum.sum, T(0)}).a;
    const RowWalk<S> reading(sum.grad, sum.y, args.columns), writing(sum.grad, sum.out, args.columns);
    // Words only where all three lie alike: else one of the walks has a head alone.
    (reading.head < writing.head ? writing : reading)
        .each(threadIdx.x, blockDim.x, SoftmaxBackWrite<S, log>(sum, total));
  }
}

// Neighbouring threads do neighbouring rows, whose elements of a column are neighbours.
template <class S, bool log>
__global__ void __launch_bounds__(kBlock) forward_beside(const SoftmaxArgs args) {
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
    const SoftmaxOutput<T, log> output(state.largest, state.sum, args.masked);
    for (int64_t c = 0; c < args.columns; ++c)
      SoftmaxElements<S, 1>::store(output.value(widen(x[c * args.inner]) * T(args.scale)),
                                   static_cast<S*>(args.y) + first + c * args.inner);
  }
}

template <class S, bool log>
__global__ void __launch_bounds__(kBlock) backward_beside(const SoftmaxArgs args) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; row < args.rows; row += step) {
    SoftmaxSum<S, log> sum(args, row / args.inner * args.columns * args.inner + row % args.inner);
    for (int64_t c = 0; c < args.columns; ++c) sum.one(c * args.inner);
    const SoftmaxBackWrite<S, log> write(sum, sum.sum);
    for (int64_t c = 0; c < args.columns; ++c) write.one(c * args.inner);
  }
}

template <class S, bool log>
cudaError_t launch(const SoftmaxArgs& args, bool backward, cudaStream_t stream) {
  constexpr int64_t most = (int64_t(1) << 31) - 1;
  const bool beside = args.inner > 1, warps = args.columns <= kWarpColumns;
  const dim3 block = warps && !beside ? dim3(kLanes, kRowsABlock) : dim3(kBlock);
  const int64_t rows_a_block = beside ? kBlock : block.y;
  const auto blocks = unsigned(std::min((args.rows + rows_a_block - 1) / rows_a_block, most));
  const auto kernel = beside ? (backward ? backward_beside<S, log> : forward_beside<S, log>)
                             : (backward ? backward_rows<S, log> : forward_rows<S, log>);
  launch_kernel(kernel, blocks, block, stream, args);
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
