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

// Group norm's statistics [begin, end), each of s.count channels one after the other, with a part for each channel. Mean and
// variance from the moments of the parts, which are of one size.
template <class T>
void group_moments(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const double* means, const double* m2);
// c1 and c2 from the sums over parts; here and below the roots have been computed.
template <class T>
void group_sums(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const double* sums, const double* distances,
                double* c1, double* c2);
// The terms of their channels; with fewer sets than parts, of those of one sample.
template <class T>
void group_terms(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const double* c1, const double* c2,
                 const TermArrays<T>& terms);
// The gradients of bias and weight from the sums over all parts.
template <class T>
void group_parameters(const ChannelStatistics<T>& s, const double* sums, const double* distances, double* dz,
                      double* dz_x_hat);

// Of elements.
void channel_forward(const ChannelArgs& args, int64_t begin, int64_t end);
void channel_backward(const ChannelArgs& args, int64_t begin, int64_t end);

// Sums of dz and of dz (x - center), laid out as the moments are. dz: where each element's goes, of grad's dtype, if there
// is an activation; may be grad's memory.
void channel_sums(const ChannelArgs& args, int64_t begin, int64_t end, double* sum_dz, double* sum_dz_distance,
                  void* dz = nullptr);

}  // namespace memkit::cpu
