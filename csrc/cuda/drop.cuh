// Dropout on a lane's values of a tile: element i draws word i % 4 of counter i / 4.
#pragma once

#include "tile.cuh"

namespace memkit::cuda {

// x[k] = f(x[k], word of element k). A wide row draws four words at a time; single elements one of four.
template <class S, int Rows, class F>
MEMKIT_FN void with_words(const Tile<S, Rows>& tile, const Drop& drop,
                          typename Tile<S, Rows>::T (&x)[Tile<S, Rows>::values], const F& f) {
  constexpr int width = Tile<S, Rows>::width, values = Tile<S, Rows>::values;
  const uint64_t key = drop.key();
  if (tile.wide) {
    constexpr int share = width < 4 ? width : 4;
    const int64_t first = tile.wide_row(0);
    constexpr int together = values > 16 ? 16 : values;  // more of them take more registers than there are
    MEMKIT_ROLL
    for (int start = 0; start < values; start += together) {
      typename Tile<S, Rows>::T made[together];
      MEMKIT_UNROLL
      for (int k = 0; k < together; k += share) {
        const int64_t i = first + (start + k) / width * kLanes * width + k % width;
        const Words words = philox(uint64_t(i) / 4, key);
        MEMKIT_UNROLL
        for (int j = 0; j < share; ++j) {
          const uint32_t word = width < 4 && i % 4 ? words.at[(j + 2) % 4] : words.at[j];
          made[k + j] = f(x[k + j], word);
        }
      }
      turn(x, made);
    }
  } else {
    MEMKIT_ROLL
    for (int k = 0; k < values; ++k) {
      const int64_t i = tile.single(k);
      const Words words = philox(uint64_t(i) / 4, key);
      const uint32_t low = i & 1 ? words.at[1] : words.at[0], high = i & 1 ? words.at[3] : words.at[2];
      const typename Tile<S, Rows>::T made[] = {f(x[0], i & 2 ? high : low)};
      turn(x, made);
    }
  }
}

template <class S, int Rows>
MEMKIT_FN void drop_values(const Tile<S, Rows>& tile, const Drop& drop,
                           typename Tile<S, Rows>::T (&x)[Tile<S, Rows>::values]) {
  using T = typename Tile<S, Rows>::T;
  const Dropper<T> dropper(drop);
  with_words(tile, drop, x, [&](T value, uint32_t word) { return dropper.value(value, word); });
}

template <class S, int Rows>
MEMKIT_FN void drop_gradients(const Tile<S, Rows>& tile, const Drop& drop,
                              typename Tile<S, Rows>::T (&grad)[Tile<S, Rows>::values]) {
  using T = typename Tile<S, Rows>::T;
  const Dropper<T> dropper(drop);
  with_words(tile, drop, grad, [&](T value, uint32_t word) { return dropper.gradient(value, word); });
}

}  // namespace memkit::cuda
