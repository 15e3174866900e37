#include <algorithm>

#include "launch.cuh"
#include "pooling.h"
#include "pooling_pass.cuh"

namespace memkit::cuda {
namespace {

constexpr int kPoolThreads = 256;

template <class Pass>
__global__ void __launch_bounds__(kPoolThreads) max_pool_kernel(const PoolArgs args, int64_t items) {
  const int64_t stride = int64_t(gridDim.x) * kPoolThreads;
  for (int64_t i = int64_t(blockIdx.x) * kPoolThreads + threadIdx.x; i < items; i += stride) Pass::run(args, i);
}

template <class Pass>
cudaError_t launch_pool(const PoolArgs& args, cudaStream_t stream) {
  constexpr int64_t most = (int64_t(1) << 31) - 1;
  const int64_t items = Pass::items(args);
  if (items == 0) return cudaSuccess;
  const auto blocks = unsigned(std::min((items + kPoolThreads - 1) / kPoolThreads, most));
  launch_kernel(max_pool_kernel<Pass>, blocks, kPoolThreads, stream, args, items);
  return cudaGetLastError();
}

template <template <class, class> class Pass, class S>
cudaError_t launch_pool_of(const PoolArgs& args, cudaStream_t stream) {
  return args.wide ? launch_pool<Pass<S, int32_t>>(args, stream) : launch_pool<Pass<S, uint8_t>>(args, stream);
}

template <template <class, class> class Pass>
int launch_pool_pass(const PoolArgs& args, cudaStream_t stream) {
  switch (args.dtype) {
    case Dtype::float32: return launch_pool_of<Pass, float>(args, stream);
    case Dtype::float64: return launch_pool_of<Pass, double>(args, stream);
    case Dtype::float16: return launch_pool_of<Pass, Half>(args, stream);
    case Dtype::bfloat16: return launch_pool_of<Pass, Bfloat>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int max_pool_forward(const PoolArgs& args, CUstream_st* stream) {
  return launch_pool_pass<MaxPoolForward>(args, stream);
}

int max_pool_backward(const PoolArgs& args, CUstream_st* stream) {
  return launch_pool_pass<MaxPoolBackward>(args, stream);
}

}  // namespace memkit::cuda
