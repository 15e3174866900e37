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

// One call over a tensor [outer, channels, inner]. `sets` is how many terms there are: channels (batch norm) or
// outer * channels (group norm). Terms, moments and sums are of the type computed in. With inner == 1 and one set a channel,
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

  int64_t planes() const { return outer * channels; }
  int64_t numel() const { return planes() * inner; }
  bool columns() const { return inner == 1 && sets == channels; }
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

// Terms of a forward pass, from statistics.
template <class T>
MEMKIT_FN ChannelTerms<T> channel_terms(T mean, T rstd, T weight, T bias) {
  return {mean, rstd * weight, bias, T(0), T(0)};
}

// Those of a backward pass, with c1 and c2 as above.
template <class T>
MEMKIT_FN void set_gradient_terms(ChannelTerms<T>& terms, T rstd, T c1, T c2) {
  terms.offset = -rstd * c1;
  terms.slope = -rstd * rstd * c2;
}

}  // namespace memkit
