// Batch and group norm with an activation, on the CPU. Passes take a range: of elements, or of units, which are planes
// (neighbouring elements of one set), or rows of `channels` elements in the layout of columns.
#pragma once

#include "../formulas/channel_norm.h"

namespace memkit::cpu {

// Mean and sum of squared distances from it. Planes: of each, into means[plane] and m2[plane]. Columns: of each channel
// over these rows, into means[channel] and m2[channel].
void channel_moments(const ChannelArgs& args, int64_t begin, int64_t end, double* means, double* m2);

// 1 / sqrt(variance + eps).
void channel_roots(const double* variance, double eps, int64_t n, double* roots);

// The terms of batch norm's channels [begin, end), whose roots have been computed; T is float or double.
template <class T>
void channel_terms(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const double* c1, const double* c2,
                   const TermArrays<T>& terms);

// Of elements.
void channel_forward(const ChannelArgs& args, int64_t begin, int64_t end);
void channel_backward(const ChannelArgs& args, int64_t begin, int64_t end);

// Sums of dz and of dz (x - center), laid out as the moments are. dz: where each element's goes, of grad's dtype, if there
// is an activation; may be grad's memory.
void channel_sums(const ChannelArgs& args, int64_t begin, int64_t end, double* sum_dz, double* sum_dz_distance,
                  void* dz = nullptr);

}  // namespace memkit::cpu
