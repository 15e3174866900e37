#include "channel_kernels.cuh"
#include "channel_norm.h"

namespace memkit::cuda {

int channel_forward(const ChannelArgs& args, CUstream_st* stream) {
  return launch_channels<LaunchForward>(args, stream);
}

}  // namespace memkit::cuda
