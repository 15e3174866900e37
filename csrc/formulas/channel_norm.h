// Batch and group norm with an activation behind them: y = act(z), z = (x - center) scale + shift, where all three are
// constant over a channel (batch norm) or over a channel of a sample (group norm). Beyond x, backward needs the statistics.
//
//   dz = g act'(z), x_hat = (x - mean) rstd, scale = weight rstd
//   dx = scale dz - rstd (c1 + x_hat c2)
//   batch norm: c1 = weight mean(dz), c2 = weight mean(dz x_hat) over the channel; both 0 where the statistics are given
//   group norm: c1 = mean(weight dz), c2 = mean(weight dz x_hat) over the group
//   dweight = sum of dz x_hat, dbias = sum of dz
#pragma once

#include "norm.h"

namespace memkit {

// What the elements of a set have in common. dx = scale dz + offset + slope (x - center).
template <class T>
struct ChannelTerms {
  T center, scale, shift, offset, slope;

  MEMKIT_FN T value(T x) const { return (x - center) * scale + shift; }
  // Without a slope x has no part in it, infinite or NaN as it may be.
  MEMKIT_FN T gradient(T x, T dz) const {
    return (dz * scale + offset) + (slope == T(0) ? T(0) : (x - center) * slope);
  }
};

// One call over a tensor [outer, channels, inner]. `sets` is how many terms there are: channels (batch norm) or
// outer * channels (group norm). Terms are of the type computed in; moments and sums are double. With inner == 1 and one set a channel,
// neighbouring elements have different terms (channels last, or a batch of vectors): "columns".
struct ChannelArgs {
  int64_t outer = 0, channels = 0, inner = 0, sets = 0;
  bool has_act = false;
  Act act = Act::relu;
  ActParams params{};
  Dtype dtype;                  // of x and grad_input
  Dtype out_dtype;              // of y and grad
  const void* terms = nullptr;  // every set's center, then every set's scale, and so on
  const void* x = nullptr;
  void* y = nullptr;
  const void* grad = nullptr;
  void* grad_input = nullptr;  // may be grad's memory

  MEMKIT_FN int64_t planes() const { return outer * channels; }
  MEMKIT_FN int64_t numel() const { return planes() * inner; }
  MEMKIT_FN bool columns() const { return inner == 1 && sets == channels; }
};

// The terms of all sets, one array each.
template <class T>
struct TermArrays {
  T* data;
  int64_t sets;

  MEMKIT_FN T* center() const { return data; }
  MEMKIT_FN T* scale() const { return data + sets; }
  MEMKIT_FN T* shift() const { return data + 2 * sets; }
  MEMKIT_FN T* offset() const { return data + 3 * sets; }
  MEMKIT_FN T* slope() const { return data + 4 * sets; }

  MEMKIT_FN ChannelTerms<T> at(int64_t set) const {
    return {center()[set], scale()[set], shift()[set], offset()[set], slope()[set]};
  }
  MEMKIT_FN void put(int64_t set, const ChannelTerms<T>& terms) const {
    center()[set] = terms.center, scale()[set] = terms.scale, shift()[set] = terms.shift;
    offset()[set] = terms.offset, slope()[set] = terms.slope;
  }
};

// What lies between the passes over the tensor: statistics from the moments of parts of it, terms from statistics, and
// gradients from sums over parts. A part is a plane; in the layout of columns, a channel over some rows. All in double:
// there is little of it, and an error in the mean is one of every element of a channel. T has what the mean loses when it
// is rounded to a term in the terms next to it. Parameters and Statistics are arrays of numbers.
template <class T, class Parameters = const T*, class Statistics = double*>
struct ChannelStatistics {
  // Statistic s is made of the parts s * step + j * stride, j < count, which have `size` elements together.
  int64_t statistics = 0, step = 1, stride = 1, count = 1, size = 0;
  int64_t together = 1;  // neighbouring elements that are in one part
  // Batch norm has a set for each statistic; group norm for each of the `channels` of a sample, which make `groups`.
  int64_t channels = 0, groups = 0;
  double eps = 0;
  Parameters weight{};  // of the channels; null: 1
  Parameters bias{};    // null: 0
  Statistics mean{};
  Statistics variance{};
  const double* roots = nullptr;  // 1 / sqrt(variance + eps), where they have been computed

  MEMKIT_FN int64_t part(int64_t s, int64_t j) const { return s * step + j * stride; }
  MEMKIT_FN int64_t part_size(int64_t j) const {
    const int64_t many = size / together;
    return (many * (j + 1) / count - many * j / count) * together;
  }
  MEMKIT_FN double weight_of(int64_t channel) const { return weight ? double(weight[channel]) : 1.0; }
  MEMKIT_FN double rstd(int64_t s) const { return roots ? roots[s] : reciprocal_root(double(variance[s]), eps); }
  MEMKIT_FN static double lost_of(double mean) { return mean - double(T(mean)); }
  MEMKIT_FN double lost(int64_t s) const { return lost_of(mean[s]); }
  MEMKIT_FN int64_t sets_of_one() const { return groups == 0 ? 1 : channels / groups; }
  MEMKIT_FN int64_t sets() const { return statistics * sets_of_one(); }
  MEMKIT_FN int64_t statistic_of(int64_t set) const { return groups == 0 ? set : set / (channels / groups); }

  // Of statistic s, the mean first, then the distances from it. Of several threads each has the parts first, first + step,
  // ..., and sum() adds up what they have.
  template <class Sum>
  MEMKIT_FN Moments<double> moments_of(int64_t s, const double* means, const double* m2, int64_t first, int64_t step,
                                       Sum&& sum) const {
    const int64_t many = size / together, alike = many % count == 0 ? many / count * together : 0;
    double own = 0, squares = 0;
    for (int64_t j = first; j < count; j += step) own += double(alike ? alike : part_size(j)) * means[part(s, j)];
    const double all = sum(own) / double(size);
    for (int64_t j = first; j < count; j += step) {
      const double d = means[part(s, j)] - all;
      squares += m2[part(s, j)] + double(alike ? alike : part_size(j)) * d * d;
    }
    return {double(size), all, sum(squares)};
  }
  MEMKIT_FN void finish_moments(int64_t s, const double* means, const double* m2) const {
    const Moments<double> all = moments_of(s, means, m2, 0, 1, [](double own) { return own; });
    mean[s] = all.mean;
    variance[s] = all.m2 / double(size);
  }

  // Of a channel: for the forward, and for backward, which needs c1 and c2.
  MEMKIT_FN ChannelTerms<T> terms_from(double mean, double root, int64_t channel) const {
    const double scale = root * weight_of(channel), offset = bias ? double(bias[channel]) : 0.0;
    return {T(mean), T(scale), T(offset - lost_of(mean) * scale), T(0), T(0)};
  }
  MEMKIT_FN ChannelTerms<T> terms_from(double mean, double root, int64_t channel, double c1, double c2) const {
    ChannelTerms<T> made = terms_from(mean, root, channel);
    const double slope = -root * root * c2;
    made.offset = T(-root * c1 - slope * lost_of(mean)), made.slope = T(slope);
    return made;
  }
  // c1 and c2, one a statistic, where backward needs them.
  MEMKIT_FN ChannelTerms<T> terms(int64_t set, const double* c1, const double* c2) const {
    return terms_of(statistic_of(set), set % channels, c1, c2);
  }
  MEMKIT_FN ChannelTerms<T> terms_of(int64_t s, int64_t channel, const double* c1, const double* c2) const {
    return c1 ? terms_from(mean[s], rstd(s), channel, c1[s], c2[s]) : terms_from(mean[s], rstd(s), channel);
  }

  // Sums of dz and of dz (x - center); or of dz and of dz x_hat.
  struct Sums {
    double dz = 0, distance = 0;
  };
  MEMKIT_FN static Sums normalised(const Sums& sums, double mean, double root) {
    return {sums.dz, (sums.distance - lost_of(mean) * sums.dz) * root};
  }

  MEMKIT_FN double weight_in_sums(int64_t part) const { return groups == 0 ? 1.0 : weight_of(part % channels); }
  // Over the parts first, first + step, ... of a statistic, group norm's weighted; then c1 and c2 from those over all of
  // them.
  MEMKIT_FN Sums sums_of(int64_t s, const double* dz, const double* dz_distance, int64_t first = 0,
                         int64_t step = 1) const {
    Sums sums;
    for (int64_t j = first; j < count; j += step) {
      const int64_t k = part(s, j);
      const double w = weight_in_sums(k);
      sums.dz += w * dz[k], sums.distance += w * dz_distance[k];
    }
    return sums;
  }
  // dz and dz x_hat, a statistic's share of them in the gradient.
  MEMKIT_FN Sums share_of(int64_t s, const Sums& normalised) const {
    const double share = (groups == 0 ? weight_of(s) : 1.0) / double(size);
    return {share * normalised.dz, share * normalised.distance};
  }
  MEMKIT_FN void finish_sums(int64_t s, const Sums& all, double* c1, double* c2) const {
    const Sums share = share_of(s, normalised(all, mean[s], rstd(s)));
    c1[s] = share.dz, c2[s] = share.distance;
  }

  // Group norm's gradients of a channel's bias and weight, from the parts first, first + step, ... of it among all `parts`.
  MEMKIT_FN Sums parameter_sums(int64_t channel, int64_t parts, const double* dz, const double* dz_distance,
                                int64_t first = 0, int64_t step = 1) const {
    Sums sums;
    for (int64_t k = channel + first * channels; k < parts; k += step * channels) {
      const int64_t s = statistic_of(k);
      const Sums part = normalised({dz[k], dz_distance[k]}, mean[s], rstd(s));
      sums.dz += part.dz, sums.distance += part.distance;
    }
    return sums;
  }
};

// A running statistic after a step that found another.
MEMKIT_FN double moved(double running, double found, double momentum) { return running + momentum * (found - running); }

}  // namespace memkit
