#include "channel_kernels.cuh"
#include "channel_norm.h"

namespace memkit::cuda {

int channel_sums(const ChannelArgs& args, int64_t parts, double* dz, double* dz_distance, CUstream_st* stream) {
  return launch_channels<LaunchSums>(args, parts, dz, dz_distance, stream);
}

}  // namespace memkit::cuda
