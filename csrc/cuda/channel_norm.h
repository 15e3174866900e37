// Batch and group norm with an activation on CUDA devices. Each call launches one kernel on the given stream of the
// current device and returns the launch's error code (cudaError_t; 0 is success). Pointers are to the type computed in.
#pragma once

#include "../formulas/channel_norm.h"

struct CUstream_st;

namespace memkit::cuda {

// How many parts of the tensor the moments and sums are taken of, each into a place of its own: planes, or in the layout
// of columns `channels` for each of some ranges of rows.
int channel_parts(const ChannelArgs& args, int64_t& parts);

int channel_moments(const ChannelArgs& args, int64_t parts, void* means, void* m2, CUstream_st* stream);
int channel_forward(const ChannelArgs& args, CUstream_st* stream);
int channel_sums(const ChannelArgs& args, int64_t parts, double* dz, double* dz_distance, CUstream_st* stream);
int channel_backward(const ChannelArgs& args, CUstream_st* stream);

// The steps between them.
template <class T>
int channel_finish_moments(const ChannelStatistics<T>& s, const T* means, const T* m2, CUstream_st* stream);
template <class T>
int channel_terms(const ChannelStatistics<T>& s, int64_t sets, const T* c1, const T* c2, T* terms, CUstream_st* stream);
template <class T>
int channel_finish_sums(const ChannelStatistics<T>& s, int64_t parts, const double* dz, const double* dz_distance,
                        T* sum_dz, T* sum_dz_x_hat, T* c1, T* c2, CUstream_st* stream);

}  // namespace memkit::cuda
