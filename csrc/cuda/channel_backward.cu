#include "channel_kernels.cuh"

namespace memkit::cuda {

int channel_backward(const ChannelArgs& args, CUstream_st* stream) {
  const bool doubles = args.dtype == Dtype::float64;
  return launch_elements(doubles ? channel_backward_kernel<double> : channel_backward_kernel<float>, args, stream);
}

}  // namespace memkit::cuda
