#include "channel_kernels.cuh"
#include "channel_norm.h"

namespace memkit::cuda {
namespace {

template <class T>
int launch(const ChannelArgs& args, int64_t parts, double* dz, double* dz_distance, cudaStream_t stream) {
  const bool wide = wide_units(args);
  if (args.columns())
    launch_kernel(column_sums_kernel<T>, column_grid(args, parts), column_threads(args), stream, args, wide, dz,
                  dz_distance);
  else if (has_short_planes(args, wide))
    launch_short_planes(short_plane_sums_kernel<T>, kPlanesOfSums, args, stream, dz, dz_distance);
  else
    launch_planes(plane_sums_kernel<T>, args, stream, wide, dz, dz_distance);
  return cudaGetLastError();
}

}  // namespace

int channel_sums(const ChannelArgs& args, int64_t parts, double* dz, double* dz_distance, CUstream_st* stream) {
  return args.dtype == Dtype::float64 ? launch<double>(args, parts, dz, dz_distance, stream)
                                      : launch<float>(args, parts, dz, dz_distance, stream);
}

}  // namespace memkit::cuda
