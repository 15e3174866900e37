// From an activation call to the launch of its kernel. Each .cu file instantiates one pass, so that they build in parallel.
#pragma once

#include <algorithm>

#include "activation_pass.cuh"
#include "launch.cuh"

namespace memkit::cuda {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kLanes;
// On a multiprocessor at least: 64, 80 or 96 registers a thread, with which nothing spills.
template <class Tile>
constexpr int kResidentBlocks = Tile::values > 16  ? 5
                                : Tile::values > 8 ? 6
                                                   : 8;
// Many more blocks than fit at a time: the hardware's scheduler evens out the end.
constexpr int kBlocksPerProcessor = 128;

struct FromPeer {
  __device__ unsigned operator()(unsigned value, int distance) const {
    return distance == 0 ? value : __shfl_xor_sync(0xffffffffu, value, distance);
  }
};

template <class Pass>
__global__ void __launch_bounds__(kThreads, kResidentBlocks<typename Pass::Tile>) activation_kernel(const Call call) {
  const int lane = threadIdx.x % kLanes;
  const unsigned warps = gridDim.x * kWarps;
  // The same for all lanes of a warp, which work on a tile together.
  for (int64_t tile = int64_t(blockIdx.x) * kWarps + threadIdx.x / kLanes; tile < call.tiles; tile += warps)
    Pass::run(call, typename Pass::Tile(tile, lane, call.numel, call.aligned), FromPeer{});
}

template <class Pass>
cudaError_t launch_pass(const ActivationArgs& args, cudaStream_t stream) {
  if (args.numel == 0) return cudaSuccess;
  int processors = 0;
  if (const cudaError_t error = processor_count(processors)) return error;
  const Call call = Call::of<typename Pass::Tile>(args);
  const int64_t blocks =
      std::min<int64_t>((call.tiles + kWarps - 1) / kWarps, int64_t(processors) * kBlocksPerProcessor);
  launch_kernel(activation_kernel<Pass>, unsigned(blocks), kThreads, stream, call);
  return cudaGetLastError();
}

template <template <class> class Pass>
int launch(const ActivationArgs& args, cudaStream_t stream) {
  switch (args.dtype) {
    case Dtype::float32: return launch_pass<Pass<float>>(args, stream);
    case Dtype::float64: return launch_pass<Pass<double>>(args, stream);
    case Dtype::float16: return launch_pass<Pass<Half>>(args, stream);
    case Dtype::bfloat16: return launch_pass<Pass<Bfloat>>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace memkit::cuda
