#include "channel_columns.cuh"
#include "channel_kernels.cuh"

namespace memkit::cuda {
namespace {

template <class T>
int backward(const ChannelArgs& args, cudaStream_t stream) {
  bool by_columns = false;
  if (const int error = launch_columns(column_backward_kernel<T, sizeof(T) == 8>, column_backward_kernel<T, true>, args,
                                       stream, by_columns);
      error || by_columns)
    return error;
  return launch_elements(channel_backward_kernel<T>, args, stream);
}

}  // namespace

int channel_backward(const ChannelArgs& args, CUstream_st* stream) {
  return args.dtype == Dtype::float64 ? backward<double>(args, stream) : backward<float>(args, stream);
}

}  // namespace memkit::cuda
