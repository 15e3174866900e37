#include "channel_kernels.cuh"
#include "channel_norm.h"

namespace memkit::cuda {
namespace {

template <class T>
int launch(const ChannelArgs& args, cudaStream_t stream) {
  unsigned blocks = 0;
  if (const cudaError_t error = element_blocks(args, blocks)) return error;
  const bool wide = channel_aligned(args);
  channel_forward_kernel<T><<<blocks, kChannelThreads, 0, stream>>>(args, SetFinder(args, wide), wide);
  return cudaGetLastError();
}

}  // namespace

int channel_forward(const ChannelArgs& args, CUstream_st* stream) {
  return args.dtype == Dtype::float64 ? launch<double>(args, stream) : launch<float>(args, stream);
}

}  // namespace memkit::cuda
