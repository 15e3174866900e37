#include "channel_kernels.cuh"
#include "channel_norm.h"

namespace memkit::cuda {

int channel_backward(const ChannelArgs& args, CUstream_st* stream) {
  return launch_channels<LaunchBackward>(args, stream);
}

}  // namespace memkit::cuda
