#include "channel_columns.cuh"

namespace memkit::cuda {

int channel_forward(const ChannelArgs& args, CUstream_st* stream) {
  constexpr auto doubles = column_forward_kernel<double, true>;
  if (args.dtype == Dtype::float64)
    return launch_over_all(doubles, doubles, channel_forward_kernel<double>, args, stream);
  return launch_over_all(column_forward_kernel<float, false>, column_forward_kernel<float, true>,
                         channel_forward_kernel<float>, args, stream);
}

}  // namespace memkit::cuda
