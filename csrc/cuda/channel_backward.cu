#include "channel_columns.cuh"

namespace memkit::cuda {

int channel_backward(const ChannelArgs& args, CUstream_st* stream) {
  constexpr auto doubles = column_backward_kernel<double, true>;
  if (args.dtype == Dtype::float64)
    return launch_over_all(doubles, doubles, channel_backward_kernel<double>, args, stream);
  return launch_over_all(column_backward_kernel<float, false>, column_backward_kernel<float, true>,
                         channel_backward_kernel<float>, args, stream);
}

}  // namespace memkit::cuda
