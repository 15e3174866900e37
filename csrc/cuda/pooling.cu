#include "launch.cuh"
#include "pooling.h"
#include "pooling_pass.cuh"

namespace memkit::cuda {
namespace {

constexpr int kPoolThreads = 128;

template <class Pass, class Call>
__global__ void __launch_bounds__(kPoolThreads) max_pool_kernel(const __grid_constant__ Call call) {
  const int64_t i = int64_t(blockIdx.x) * kPoolThreads + threadIdx.x;
  if (i < call.items) Pass::run(call, i);
}

template <class Pass>
cudaError_t launch_pool(const PoolArgs& args, cudaStream_t stream) {
  constexpr int64_t most = (int64_t(1) << 31) - 1;  // blocks of a grid; no memory holds as many
  const auto call = Pass::call(args);
  if (call.items == 0) return cudaSuccess;
  const int64_t blocks = (call.items + kPoolThreads - 1) / kPoolThreads;
  if (blocks > most) return cudaErrorInvalidValue;
  launch_kernel(max_pool_kernel<Pass, std::decay_t<decltype(call)>>, unsigned(blocks), kPoolThreads, stream, call);
  return cudaGetLastError();
}

template <class S>
cudaError_t launch_pool_pass(const PoolArgs& args, bool backward, cudaStream_t stream) {
  const auto launch = [&](auto pass) { return launch_pool<decltype(pass)>(args, stream); };
  using Passes = MaxPoolPasses<S>;
  return backward ? Passes::Backward::with_first_fit(args, launch) : Passes::Forward::with_first_fit(args, launch);
}

int launch_max_pool(const PoolArgs& args, bool backward, cudaStream_t stream) {
  if (args.results() == 0) return cudaSuccess;
  switch (args.dtype) {
    case Dtype::float32: return launch_pool_pass<float>(args, backward, stream);
    case Dtype::float64: return launch_pool_pass<double>(args, backward, stream);
    case Dtype::float16: return launch_pool_pass<Half>(args, backward, stream);
    case Dtype::bfloat16: return launch_pool_pass<Bfloat>(args, backward, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int max_pool_forward(const PoolArgs& args, CUstream_st* stream) { return launch_max_pool(args, false, stream); }

int max_pool_backward(const PoolArgs& args, CUstream_st* stream) { return launch_max_pool(args, true, stream); }

}  // namespace memkit::cuda
