#include "channel_columns.cuh"
#include "channel_kernels.cuh"

namespace memkit::cuda {
namespace {

template <class T>
int forward(const ChannelArgs& args, cudaStream_t stream) {
  bool by_columns = false;
  if (const int error = launch_columns(column_forward_kernel<T, sizeof(T) == 8>, column_forward_kernel<T, true>, args,
                                       stream, by_columns);
      error || by_columns)
    return error;
  return launch_elements(channel_forward_kernel<T>, args, stream);
}

}  // namespace

int channel_forward(const ChannelArgs& args, CUstream_st* stream) {
  return args.dtype == Dtype::float64 ? forward<double>(args, stream) : forward<float>(args, stream);
}

}  // namespace memkit::cuda
