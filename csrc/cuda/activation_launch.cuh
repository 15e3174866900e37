// From an activation call to the launch of its kernel. Each .cu file instantiates one pass, so that they build in parallel.
#pragma once

#include <algorithm>

#include "activation_pass.cuh"
#include "launch.cuh"

namespace memkit::cuda {

template <class Pass>
constexpr bool kOnly = !std::is_same_v<typename Pass::Known, Any>;
template <class Pass>
constexpr int kThreads = kOnly<Pass> && Pass::Tile::rows == 1 ? 256 : 128;
template <class Pass>
constexpr int kWarps = kThreads<Pass> / kLanes;
// On a multiprocessor at least: of a kernel for every activation 64, 80 or 96 registers a thread, with which nothing spills;
// of one for a single activation as many as it takes.
template <class Pass>
constexpr int kResidentBlocks = kOnly<Pass>               ? 1
                                : Pass::Tile::values > 16 ? 5
                                : Pass::Tile::values > 8  ? 6
                                                          : 8;
// Of a kernel for every activation many more blocks than fit at a time: the hardware's scheduler evens out the end.
constexpr int kBlocksPerProcessor = 128;

struct FromPeer {
  __device__ unsigned operator()(unsigned value, int distance) const {
    return distance == 0 ? value : __shfl_xor_sync(0xffffffffu, value, distance);
  }
};

template <class Pass>
__global__ void __launch_bounds__(kThreads<Pass>, kResidentBlocks<Pass>) activation_kernel(const Call call) {
  const auto run = [&](int64_t tile) {
    Pass::run(call, typename Pass::Tile(tile, threadIdx.x % kLanes, call.numel, call.aligned), FromPeer{});
  };
  // The same for all lanes of a warp, which work on a tile together.
  int64_t tile = int64_t(blockIdx.x) * kWarps<Pass> + threadIdx.x / kLanes;
  if constexpr (kOnly<Pass>) {
    if (tile < call.tiles) run(tile);
  } else {
    for (const unsigned warps = gridDim.x * kWarps<Pass>; tile < call.tiles; tile += warps) run(tile);
  }
}

template <class Pass>
cudaError_t launch_pass(const ActivationArgs& args, cudaStream_t stream) {
  if (args.numel == 0) return cudaSuccess;
  const Call call = Call::of<typename Pass::Tile>(args);
  int64_t blocks = (call.tiles + kWarps<Pass> - 1) / kWarps<Pass>;
  if constexpr (!kOnly<Pass>) {
    int processors = 0;
    if (const cudaError_t error = processor_count(processors)) return error;
    blocks = std::min(blocks, int64_t(processors) * kBlocksPerProcessor);
  }
  launch_kernel(activation_kernel<Pass>, unsigned(blocks), kThreads<Pass>, stream, call);
  return cudaGetLastError();
}

template <template <class, class> class Pass, class S>
struct LaunchOnly {
  template <template <class, bool> class Formula>
  cudaError_t operator()(const ActivationArgs& args, cudaStream_t stream) const {
    return launch_pass<Pass<S, Only<Formula>>>(args, stream);
  }
};

template <template <class, class> class Pass, class S>
cudaError_t launch_dtype(const ActivationArgs& args, cudaStream_t stream) {
  if constexpr (!std::is_same_v<S, double>) {
    const bool plain = !args.bias.data && !args.residual;
    if (plain && !args.drop.on) return visit(args.act, LaunchOnly<Pass, S>{}, args, stream);
    // Forward, random words take so long that more of them at a time serve better.
    if (plain && args.act == Act::identity && args.grad)
      return launch_pass<Pass<S, Only<Identity, true>>>(args, stream);
  }
  return launch_pass<Pass<S, Any>>(args, stream);
}

template <template <class, class> class Pass>
int launch(const ActivationArgs& args, cudaStream_t stream) {
  switch (args.dtype) {
    case Dtype::float32: return launch_dtype<Pass, float>(args, stream);
    case Dtype::float64: return launch_dtype<Pass, double>(args, stream);
    case Dtype::float16: return launch_dtype<Pass, Half>(args, stream);
    case Dtype::bfloat16: return launch_dtype<Pass, Bfloat>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace memkit::cuda
