// Batch and group norm with an activation on CUDA devices. Each call with a stream launches one kernel on it, on the current
// device, and each returns an error code (cudaError_t; 0 is success). Terms are of the type computed in, moments and sums
// double.
#pragma once

#include "../formulas/channel_norm.h"
#include "numbers.h"

struct CUstream_st;

namespace memkit::cuda {

template <class T>
using Statistics = ChannelStatistics<T, Numbers, Numbers>;

// Batch norm's running statistics, which move by `momentum` towards the mean and `factor` times the variance.
struct Running {
  Numbers mean, variance;
  double momentum = 0, factor = 1;
};

// Where what is made of sums goes, each where it is given: parameters' gradients; c1 and c2; backward's terms.
template <class T>
struct FromSums {
  Numbers grad_weight, grad_bias, c1, c2;
  T* terms = nullptr;
};

// How many parts of the tensor the moments and sums are taken of, each into a place of its own: planes, or in the layout
// of columns `channels` for each of some ranges of rows.
int channel_parts(const ChannelArgs& args, int64_t& parts);

int channel_moments(const ChannelArgs& args, int64_t parts, double* means, double* m2, CUstream_st* stream);
// Statistics, into those of s; from them the forward's terms and the running statistics, where there are such.
template <class T>
int channel_finish_moments(const Statistics<T>& s, const double* means, const double* m2, const Running& running,
                           T* terms, CUstream_st* stream);
// The running statistics of `channels` channels, by those that were found.
int channel_move_running(const Running& running, const double* mean, const double* variance, int64_t channels,
                         CUstream_st* stream);
int channel_forward(const ChannelArgs& args, CUstream_st* stream);

template <class T>
int channel_sums(const ChannelArgs& args, const Statistics<T>& s, int64_t parts, double* dz, double* dz_distance,
                 CUstream_st* stream);
template <class T>
int channel_finish_sums(const Statistics<T>& s, int64_t parts, const double* dz, const double* dz_distance,
                        const FromSums<T>& to, CUstream_st* stream);
int channel_backward(const ChannelArgs& args, CUstream_st* stream);

// Group norm's gradients of parameters alone.
template <class T>
int channel_finish_parameters(const Statistics<T>& s, int64_t parts, const double* dz, const double* dz_distance,
                              const FromSums<T>& to, CUstream_st* stream);

// Whether a block for each statistic is the faster way, in which one call does what lies above. Not for columns, nor where
// large statistics are too few for the device, or many too short for a block; in float64 there is none.
int channel_by_statistics(const ChannelArgs& args, const Statistics<float>& s, bool& whole);
// Statistics, running ones and y; terms are the kernel's own.
int channel_whole_forward(const ChannelArgs& args, const Statistics<float>& s, const Running& running,
                          CUstream_st* stream);
// grad_input, batch norm's gradients of parameters, and group norm's sums over planes, where dz is given, for
// channel_finish_parameters.
int channel_whole_backward(const ChannelArgs& args, const Statistics<float>& s, double* dz, double* dz_distance,
                           const FromSums<float>& to, CUstream_st* stream);

// Terms of statistics that are given; with c1 and c2, backward's.
template <class T>
int channel_terms(const Statistics<T>& s, const Numbers& c1, const Numbers& c2, T* terms, CUstream_st* stream);

}  // namespace memkit::cuda
