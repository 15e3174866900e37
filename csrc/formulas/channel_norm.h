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
  MEMKIT_FN T gradient(T x, T dz) const { return (dz * scale + offset) + (x - center) * slope; }
};

// One call over a tensor [outer, channels, inner]. Sums over many elements are double. `sets` is how many terms there are: channels (batch norm) or
// outer * channels (group norm). Terms and moments are of the type computed in. With inner == 1 and one set a channel,
// neighbouring elements have different terms (channels last, or a batch of vectors): "columns".
struct ChannelArgs {
  int64_t outer = 0, channels = 0, inner = 0, sets = 0;
  bool has_act = false;
  Act act = Act::relu;
  ActParams params{};
  Dtype dtype;      // of x and grad_input
  Dtype out_dtype;  // of y and grad
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
// gradients from sums over parts. A part is a plane; in the layout of columns, a channel over some rows.
template <class T>
struct ChannelStatistics {
  // Statistic s is made of the parts s * step + j * stride, j < count, which have `size` elements together.
  int64_t statistics = 0, step = 1, stride = 1, count = 1, size = 0;
  // Batch norm has a set for each statistic; group norm for each of the `channels` of a sample, which make `groups`.
  int64_t channels = 0, groups = 0;
  T eps = 0;
  const T* weight = nullptr;  // of the channels; null: 1
  const T* bias = nullptr;    // null: 0
  T* mean = nullptr;
  T* variance = nullptr;

  MEMKIT_FN int64_t part(int64_t s, int64_t j) const { return s * step + j * stride; }
  MEMKIT_FN T part_size(int64_t j) const { return T(size * (j + 1) / count - size * j / count); }
  MEMKIT_FN T weight_of(int64_t channel) const { return weight ? weight[channel] : T(1); }
  MEMKIT_FN T rstd(int64_t s) const { return reciprocal_root(variance[s], eps); }
  MEMKIT_FN int64_t statistic_of(int64_t set) const { return groups == 0 ? set : set / (channels / groups); }

  MEMKIT_FN void finish_moments(int64_t s, const T* means, const T* m2) const {
    Moments<T> all;
    for (int64_t j = 0; j < count; ++j) all.add({part_size(j), means[part(s, j)], m2[part(s, j)]});
    mean[s] = all.mean;
    variance[s] = all.m2 / T(size);
  }

  // c1 and c2, one a statistic, where backward needs them.
  MEMKIT_FN ChannelTerms<T> terms(int64_t set, const T* c1, const T* c2) const {
    const int64_t s = statistic_of(set), channel = set % channels;
    const T root = rstd(s);
    ChannelTerms<T> made{mean[s], root * weight_of(channel), bias ? bias[channel] : T(0), T(0), T(0)};
    if (c1) made.offset = -root * c1[s], made.slope = -root * root * c2[s];
    return made;
  }

  // Sums of dz and dz (x - mean) over the parts, into c1 and c2 of a statistic.
  MEMKIT_FN void finish_sums(int64_t s, const double* dz, const double* dz_distance, T* c1, T* c2) const {
    double a = 0, b = 0;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t k = part(s, j);
      const double w = weight_of(k % channels);
      a += w * dz[k], b += w * dz_distance[k];
    }
    c1[s] = T(a / double(size)), c2[s] = T(b * double(rstd(s)) / double(size));
  }

  // The gradients of a channel's weight and bias, from all `parts` of them.
  MEMKIT_FN void finish_parameters(int64_t channel, int64_t parts, const double* dz, const double* dz_distance,
                                   T* sum_dz, T* sum_dz_x_hat) const {
    double a = 0, b = 0;
    for (int64_t k = channel; k < parts; k += channels) {
      a += dz[k], b += dz_distance[k] * double(rstd(groups == 0 ? channel : statistic_of(k)));
    }
    sum_dz[channel] = T(a), sum_dz_x_hat[channel] = T(b);
  }
};

}  // namespace memkit
