// What lies between the passes of batch and group norm: statistics from moments and sums, terms from statistics.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "../cpu/channel_norm.h"
#include "channel_layout.h"
#include "room.h"
#include "stream.h"

namespace memkit {

// Calls f with a value of the type computed in.
template <class F>
void with_computed(const ChannelCall& call, const F& f) {
  if (call.computed == at::kDouble) {
    f(double());
  } else {
    f(float());
  }
}

inline Room doubles(const ChannelCall& call, int64_t count) { return Room(call.device, count * 8); }
template <class T>
int64_t terms_bytes(const ChannelCall& call) {
  return 5 * call.args.sets * int64_t(sizeof(T));
}

// Without the arrays.
template <class Statistics>
Statistics shape_of(const ChannelCall& call, int64_t parts) {
  const ChannelArgs& args = call.args;
  Statistics s;
  s.channels = args.channels / (call.together * call.repeat);
  s.groups = call.groups;
  if (call.groups) {
    s.statistics = args.outer * call.groups;
    s.step = s.count = args.channels / call.groups;
    s.size = s.count * args.inner;
  } else {
    s.statistics = s.stride = s.channels;
    s.count = parts / (s.channels * call.together);
    s.size = args.numel() / s.channels;
    s.together = call.together;
  }
  s.eps = call.eps;
  return s;
}

// On the CPU the steps between the passes are loops in the order of memory: there may be a part for every few elements.

template <class T>
Room terms_room(const ChannelCall& call) {
  return Room(call.device, terms_bytes<T>(call));
}

template <class T>
ChannelStatistics<T> statistics_of(const ChannelCall& call, const ChannelParts& parts) {
  auto s = shape_of<ChannelStatistics<T>>(call, parts.count);
  s.weight = static_cast<const T*>(call.weight.data);
  s.bias = static_cast<const T*>(call.bias.data);
  s.mean = static_cast<double*>(call.mean.data);
  s.variance = static_cast<double*>(call.variance.data);
  return s;
}

// 1 / sqrt(variance + eps), which s then points to.
template <class T>
Room make_roots(const ChannelCall& call, ChannelStatistics<T>& s) {
  Room made = doubles(call, s.statistics);
  double* roots = made.as<double>();
  at::parallel_for(0, s.statistics, 8192, [&](int64_t begin, int64_t end) {
    cpu::channel_roots(s.variance + begin, s.eps, end - begin, roots + begin);
  });
  s.roots = roots;
  return made;
}

// f(k, c, n): of channel c the sums at k, which are those of n elements. In the order of memory, for the channels
// [begin, end) of batch norm.
template <class T, class F>
void for_parts(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const F& f) {
  for (int64_t j = 0; j < s.count; ++j) {
    const int64_t first = j * s.channels;
    const double n = double(s.part_size(j)) / double(s.together);
    if (s.together == 1) {
      for (int64_t c = begin; c < end; ++c) f(first + c, c, n);
    } else {
      for (int64_t c = begin; c < end; ++c)
        for (int64_t i = 0; i < s.together; ++i) f((first + c) * s.together + i, c, n);
    }
  }
}

template <class T, class F>
void for_channels(const ChannelStatistics<T>& s, const F& f) {
  at::parallel_for(0, s.channels, std::max<int64_t>(8, kChannelGrain / (s.count * s.together)), f);
}

// The mean first, then the distances from it.
template <class T>
void finish_batch_moments(const ChannelStatistics<T>& s, const double* means, const double* m2) {
  for_channels(s, [&](int64_t begin, int64_t end) {
    std::fill(s.mean + begin, s.mean + end, 0.0);
    std::fill(s.variance + begin, s.variance + end, 0.0);
    for_parts(s, begin, end, [&](int64_t k, int64_t c, double n) { s.mean[c] += n * means[k]; });
    for (int64_t c = begin; c < end; ++c) s.mean[c] /= double(s.size);
    for_parts(s, begin, end, [&](int64_t k, int64_t c, double n) {
      const double d = means[k] - s.mean[c];
      s.variance[c] += m2[k] + n * d * d;
    });
    for (int64_t c = begin; c < end; ++c) s.variance[c] /= double(s.size);
  });
}

// Of the channels [begin, end) the gradients of weight and bias, and c1 and c2 from them.
template <class T>
void finish_batch_sums(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const double* sums,
                       const double* distances, double* dz, double* dz_x_hat, double* c1, double* c2) {
  std::fill(dz + begin, dz + end, 0.0);
  std::fill(dz_x_hat + begin, dz_x_hat + end, 0.0);
  for_parts(s, begin, end, [&](int64_t k, int64_t c, double) { dz[c] += sums[k], dz_x_hat[c] += distances[k]; });
  for (int64_t c = begin; c < end; ++c) {
    dz_x_hat[c] = (dz_x_hat[c] - s.lost(c) * dz[c]) * s.rstd(c);
    const double share = s.weight_of(c) / double(s.size);
    c1[c] = share * dz[c], c2[c] = share * dz_x_hat[c];
  }
}

// The terms of all sets, which the call then points to.
template <class T>
Room make_terms(ChannelCall& call, const double* c1, const double* c2) {
  Room made = terms_room<T>(call);
  T* data = made.as<T>();
  call.args.terms = data;
  ChannelStatistics<T> s = statistics_of<T>(call, {1, call.args.planes()});
  const TermArrays<T> arrays{data, call.args.sets};
  const Room roots = make_roots(call, s);
  const int64_t row = call.args.sets / call.repeat;
  if (call.groups == 0 && row == call.args.sets && call.together == 1) {
    at::parallel_for(0, row, 8192,
                     [&](int64_t begin, int64_t end) { cpu::channel_terms(s, begin, end, c1, c2, arrays); });
    return made;
  }
  at::parallel_for(0, row / call.together, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t set = begin; set < end; ++set) {
      const ChannelTerms<T> own = s.terms(set, c1, c2);
      for (int64_t first = set * call.together; first < call.args.sets; first += row)
        for (int64_t i = 0; i < call.together; ++i) arrays.put(first + i, own);
    }
  });
  return made;
}

}  // namespace memkit
