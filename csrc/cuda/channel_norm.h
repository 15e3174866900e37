// Batch and group norm with an activation on CUDA devices. Each call launches one kernel on the given stream of the
// current device and returns the launch's error code (cudaError_t; 0 is success). Terms are of the type computed in, moments, sums
// and statistics double.
#pragma once

#include "../formulas/channel_norm.h"

struct CUstream_st;

namespace memkit::cuda {

// How many parts of the tensor the moments and sums are taken of, each into a place of its own: planes, or in the layout
// of columns `channels` for each of some ranges of rows.
int channel_parts(const ChannelArgs& args, int64_t& parts);

int channel_moments(const ChannelArgs& args, int64_t parts, double* means, double* m2, CUstream_st* stream);
int channel_forward(const ChannelArgs& args, CUstream_st* stream);
int channel_sums(const ChannelArgs& args, int64_t parts, double* dz, double* dz_distance, CUstream_st* stream);
int channel_backward(const ChannelArgs& args, CUstream_st* stream);

// The steps between them.
template <class T>
int channel_finish_moments(const ChannelStatistics<T>& s, const double* means, const double* m2, CUstream_st* stream);
template <class T>
int channel_terms(const ChannelStatistics<T>& s, int64_t sets, const double* c1, const double* c2, T* terms,
                  CUstream_st* stream);
template <class T>
int channel_finish_sums(const ChannelStatistics<T>& s, int64_t parts, const double* dz, const double* dz_distance,
                        double* sum_dz, double* sum_dz_x_hat, double* c1, double* c2, CUstream_st* stream);

}  // namespace memkit::cuda
