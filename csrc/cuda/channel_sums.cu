#include "channel_columns.cuh"
#include "channel_kernels.cuh"

namespace memkit::cuda {
namespace {

template <class T>
auto column_sums(const ChannelArgs& args, bool wide) {
  if constexpr (sizeof(T) == 4)
    if (wide && !is_any(args)) return column_sums_kernel<T, true, false>;
  return wide ? column_sums_kernel<T, true, true> : column_sums_kernel<T, false, true>;
}

}  // namespace

template <class T>
int channel_sums(const ChannelArgs& args, const Statistics<T>& s, int64_t parts, double* dz, double* dz_distance,
                 CUstream_st* stream) {
  const bool wide = wide_units(args);
  if (args.columns())
    launch_kernel(column_sums<T>(args, wide), column_grid(args, parts / args.channels), column_threads(args), stream,
                  args, s, dz, dz_distance);
  else if (has_short_planes(args, wide))
    launch_short_planes(short_plane_sums_kernel<T>, kPlanesOfSums, args, stream, s, dz, dz_distance);
  else
    launch_planes(plane_sums_kernel<T>, args, stream, s, wide, dz, dz_distance);
  return cudaGetLastError();
}

template int channel_sums(const ChannelArgs&, const Statistics<float>&, int64_t, double*, double*, CUstream_st*);
template int channel_sums(const ChannelArgs&, const Statistics<double>&, int64_t, double*, double*, CUstream_st*);

}  // namespace memkit::cuda
