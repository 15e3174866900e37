// Adds a bias to a lane's values of a tile: bias element (i / inner) % size to element i.
#pragma once

#include "tile.cuh"

namespace memkit::cuda {

// Division of int64_t >= 0 by a number known on the host: one high multiplication instead of some hundred instructions.
// Exact (Granlund and Montgomery 1994): with 2^(s-1) < d <= 2^s and m = ceil(2^(63+s) / d) < 2^64,
// floor(n / d) = floor(n m / 2^(63+s)) for all n < 2^63.
struct Divisor {
  int64_t value = 1;
  uint64_t multiplier = 0;
  int shift = 0;

  Divisor() = default;
  explicit Divisor(int64_t value) : value(value) {
    if (value == 1) return;
    while (uint64_t(1) << (shift + 1) < uint64_t(value)) ++shift;  // s - 1
    const auto d = static_cast<unsigned __int128>(value);
    multiplier = uint64_t(((static_cast<unsigned __int128>(1) << (64 + shift)) + d - 1) / d);
  }

  MEMKIT_FN int64_t divide(int64_t n) const {
    if (value == 1) return n;
#if defined(MEMKIT_DEVICE)
    return int64_t(__umul64hi(uint64_t(n), multiplier) >> shift);
#else
    return int64_t(uint64_t(static_cast<unsigned __int128>(n) * multiplier >> 64) >> shift);
#endif
  }
  MEMKIT_FN int64_t remainder(int64_t n) const { return n - divide(n) * value; }
};

// A Bias as the kernels want it.
struct BiasPlan {
  // How a wide row of a tile meets the bias: as one aligned word of it, as the end of one channel and the start of
  // the next, or in any other way.
  enum class Row : int { word, two_channels, any };

  const void* data = nullptr;
  Divisor size, inner;
  Row row = Row::any;

  BiasPlan() = default;
  BiasPlan(const Bias& bias, int width) : data(bias.data), size(bias.size), inner(bias.inner) {
    const bool aligned = reinterpret_cast<uintptr_t>(bias.data) % 16 == 0;
    if (bias.inner == 1 && bias.size % width == 0 && aligned) row = Row::word;
    if (bias.inner >= width) row = Row::two_channels;
  }

  MEMKIT_FN int64_t channel(int64_t i) const { return size.remainder(inner.divide(i)); }
};

template <class S, int Rows>
MEMKIT_FN void add_bias(const Tile<S, Rows>& tile, const BiasPlan& bias,
                        typename Tile<S, Rows>::T (&x)[Tile<S, Rows>::values]) {
  using T = typename Tile<S, Rows>::T;
  constexpr int width = Tile<S, Rows>::width, values = Tile<S, Rows>::values;
  const S* data = static_cast<const S*>(bias.data);
  if (tile.wide && bias.row == BiasPlan::Row::word) {
    MEMKIT_UNROLL
    for (int row = 0; row < Rows; ++row) {
      const Word word = *reinterpret_cast<const Word*>(data + bias.size.remainder(tile.wide_row(row)));
      S share[width];
      std::memcpy(share, &word, sizeof(word));
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) x[row * width + k] += widen(share[k]);
    }
  } else if (tile.wide && bias.row == BiasPlan::Row::two_channels) {
    MEMKIT_UNROLL
    for (int row = 0; row < Rows; ++row) {
      const int64_t i = tile.wide_row(row), run = bias.inner.divide(i);
      const int64_t next = (run + 1) * bias.inner.value - i;  // values before the next channel
      const int64_t channel = bias.size.remainder(run);
      const int before = next < width ? int(next) : width;
      const T here = widen(data[channel]);
      const T there = before == width ? here : widen(data[channel + 1 == bias.size.value ? 0 : channel + 1]);
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) x[row * width + k] += k < before ? here : there;
    }
  } else {
    MEMKIT_ROLL
    for (int k = 0; k < values; ++k) {
      const T sum[] = {x[0] + widen(data[bias.channel(tile.element(k))])};
      turn(x, sum);
    }
  }
}

}  // namespace memkit::cuda
