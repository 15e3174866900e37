// Loops over the activation formulas, over at most a block. Each is compiled for three instruction sets and for float, double,
// and float as exact as dtypes of two bytes need. Those are widened a tile at a time, or a block in the first-level cache,
// which is quicker than conversions in the formula's loop.
#pragma once

#include "../formulas/arguments.h"
#include "../formulas/gradient.h"
#include "../formulas/random.h"
#include "values.h"

namespace memkit::cpu {

// Functions that take longer to compute than elements to fetch.
template <class Op>
inline constexpr bool is_long = !has_two_slopes<Op>;
template <class T, bool coarse>
inline constexpr bool is_long<Identity<T, coarse>> = false;
template <class T, bool coarse>
inline constexpr bool is_long<ReluSquared<T, coarse>> = false;

// The loops of one formula over at most a block. Pointers may alias element by element.
template <class Lanes, class Op, class T, bool ahead = is_long<Op>>
struct Loops {
  MEMKIT_FN static void value(const ActParams& params, const T* x, T* y, int64_t n) {
    if constexpr (Values<Lanes, Op>::exists) return Values<Lanes, Op>::template write<ahead>(x, y, n);
    const Op op(params);
    for_elements<ahead>(n, [&](int64_t i) MEMKIT_INLINE { y[i] = op.value(x[i]); }, x, y);
  }

  MEMKIT_FN static void slope(const ActParams& params, const T* x, const T* grad, T* out, int64_t n) {
    const Op op(params);
    for_elements<ahead>(
        n, [&](int64_t i) MEMKIT_INLINE { out[i] = gradient_at_input(op, grad[i], x[i]); }, x, grad, out);
  }

  // The bits that backward needs of these inputs, by pack(values, threshold).
  template <int64_t kMost, class Pack>
  MEMKIT_FN static void mark([[maybe_unused]] const ActParams& params, const T* x, int64_t n, const Pack& pack) {
    if constexpr (Op::branch) {
      pack(x, T(Op::x0));
    } else if constexpr (has_two_slopes<Op>) {
      const Op op(params);
      alignas(64) T marks[kMost];
      MEMKIT_LOOP
      for (int64_t i = 0; i < n; ++i) marks[i] = select(op.active(x[i]), T(1), T(0));
      pack(marks, T(1));
    }
  }
  MEMKIT_FN static void mark(const ActParams& params, const T* x, uint8_t* bits, int64_t n) {
    mark<kBlock>(params, x, n,
                 [&](const T* values, T threshold) MEMKIT_INLINE { Lanes::pack(values, threshold, bits, n); });
  }

  // The bits, and the values.
  MEMKIT_FN static void marked(const ActParams& params, const T* x, T* y, uint8_t* bits, int64_t n) {
    int64_t first = 0;
    if constexpr (has_two_slopes<Op> && std::is_same_v<T, float>) {  // in one go
      const Op op(params);
      alignas(64) int32_t sides[kTile];
      for (; first + kTile <= n; first += kTile) {
        // Bits and values written in turns, lines of values come from the second-level cache one by one, in twice the time.
        for (int64_t i = 0; i < kTile; i += 64 / sizeof(T)) prefetch_to_write(y + first + kTile + i);
        MEMKIT_LOOP
        for (int64_t i = 0; i < kTile; ++i) {
          const T v = x[first + i];
          sides[i] = -int32_t(op.active(v));
          y[first + i] = op.value(v);
        }
        const uint64_t word = Lanes::gather_tile(sides);
        std::memcpy(bits + first / 8, &word, sizeof word);
      }
    }
    mark(params, x + first, bits + first / 8, n - first);
    value(params, x + first, y + first, n - first);
  }

  MEMKIT_FN static void slope_from_output(const ActParams& params, const T* y, const uint8_t* bits, const T* grad,
                                          T* out, int64_t n) {
    [[maybe_unused]] const Op op(params);
    if constexpr (OnCurve<Lanes, Op, T>::exists) {
      OnCurve<Lanes, Op, T>::template gradient<ahead>(y, bits, grad, out, n);
    } else if constexpr (Op::branch) {
      for_sides<ahead>(
          bits, n, [&](int64_t i, bool right) MEMKIT_INLINE { out[i] = gradient_at_output(op, grad[i], y[i], right); },
          y, grad, out);
    } else {
      for_elements<ahead>(
          n, [&](int64_t i) MEMKIT_INLINE { out[i] = gradient_at_output(op, grad[i], y[i]); }, y, grad, out);
    }
  }

  MEMKIT_FN static void slope_from_bits([[maybe_unused]] const ActParams& params, const uint8_t* bits, const T* grad,
                                        T* out, int64_t n) {
    if constexpr (has_two_slopes<Op>) {
      const Op op(params);
      for_sides<false>(bits, n,
                       [&](int64_t i, bool active) MEMKIT_INLINE { out[i] = gradient_where(op, grad[i], active); });
    }
  }

 private:
  // f(i, whether bit i is set), and else as for_elements.
  template <bool pays, class F, class... Arrays>
  MEMKIT_FN static void for_sides(const uint8_t* bits, int64_t n, const F& f, const Arrays*... arrays) {
    alignas(64) int32_t sides[kTile];
    int64_t first = 0;
    for (; first + kTile <= n; first += kTile) {
      if constexpr (pays) (prefetch_tile(arrays + first), ...);
      Lanes::spread_tile(bits + first / 8, sides);
      MEMKIT_LOOP
      for (int64_t i = 0; i < kTile; ++i) f(first + i, sides[i] < 0);
    }
    Lanes::spread(bits + first / 8, sides, n - first);
    MEMKIT_LOOP
    for (int64_t i = first; i < n; ++i) f(i, sides[i - first] < 0);
  }
};

// The same from and to elements of two bytes: a tile is widened, computed and narrowed before the next. That
// takes 5 to 30% less time than a pass over a block for each, which a bias or dropout in between ask for.
template <class Lanes, class Op, class S>
struct Tiles {
  using Each = Loops<Lanes, Op, float, false>;
  using Tile = float[kTile];

  MEMKIT_FN static void read(const S* x, Tile& tile, int64_t n) {
    if (n == kTile) return Lanes::take_tile(x, tile);
    S whole[kTile] = {};
    std::copy_n(x, n, whole);
    Lanes::take_tile(whole, tile);
  }
  MEMKIT_FN static void write(const Tile& tile, S* y, int64_t n) {
    if (n == kTile) return Lanes::put_tile(tile, y);
    S whole[kTile];
    Lanes::put_tile(tile, whole);
    std::copy_n(whole, n, y);
  }

  // The bits of a tile's elements.
  MEMKIT_FN static uint64_t read(const uint8_t* bits, int64_t n) {
    uint64_t word = 0;
    std::memcpy(&word, bits, size_t(n + 7) / 8);
    return std::is_same_v<S, Bfloat> ? apart<Lanes::kLanes>(word) : word;
  }
  MEMKIT_FN static void write(uint64_t word, uint8_t* bits, int64_t n) {
    if constexpr (std::is_same_v<S, Bfloat>) word = together<Lanes::kLanes>(word);
    if (n < kTile) word &= (uint64_t(1) << n) - 1;
    std::memcpy(bits, &word, size_t(n + 7) / 8);
  }

  template <class F, class... Arrays>
  MEMKIT_FN static void for_tiles(int64_t n, const F& f, const Arrays*... arrays) {
    int64_t first = 0;
    for (; first + kTile <= n; first += kTile) {
      if constexpr (is_long<Op>) (prefetch_tile(arrays + first), ...);
      f(first, std::integral_constant<int64_t, kTile>());
    }
    if (first < n) f(first, n - first);
  }

  // `bits` null: nothing to mark.
  MEMKIT_FN static void value(const ActParams& params, const S* x, S* y, uint8_t* bits, int64_t n) {
    [[maybe_unused]] const Values<Lanes, Op> values{};
    for_tiles(
        n,
        [&](int64_t first, auto count) MEMKIT_INLINE {
          alignas(64) Tile tile;
          read(x + first, tile, count);
          if (bits)
            Each::template mark<kTile>(params, tile, kTile, [&](const float* values, float threshold) MEMKIT_INLINE {
              write(Lanes::pack_tile(values, threshold), bits + first / 8, count);
            });
          if constexpr (Values<Lanes, Op>::exists)
            values.tile(tile, tile);
          else
            Each::value(params, tile, tile, kTile);
          write(tile, y + first, count);
        },
        x, y);
  }

  // f(tile, grads, first, count): of x and of the gradient, which becomes that of the input.
  template <class F>
  MEMKIT_FN static void gradients(const S* x, const S* grad, S* out, int64_t n, const F& f) {
    for_tiles(
        n,
        [&](int64_t first, auto count) MEMKIT_INLINE {
          alignas(64) Tile tile, grads;
          read(x + first, tile, count);
          read(grad + first, grads, count);
          f(tile, grads, first, count);
          write(grads, out + first, count);
        },
        x, grad, out);
  }

  MEMKIT_FN static void slope(const ActParams& params, const S* x, const S* grad, S* out, int64_t n) {
    gradients(x, grad, out, n, [&](const Tile& tile, Tile& grads, int64_t, int64_t) MEMKIT_INLINE {
      Each::slope(params, tile, grads, grads, kTile);
    });
  }

  MEMKIT_FN static void slope_from_output(const ActParams& params, const S* y, const uint8_t* bits, const S* grad,
                                          S* out, int64_t n) {
    gradients(y, grad, out, n, [&](const Tile& tile, Tile& grads, int64_t first, int64_t count) MEMKIT_INLINE {
      uint8_t own[kTile / 8] = {};
      if constexpr (Op::branch) {
        const uint64_t word = read(bits + first / 8, count);
        std::memcpy(own, &word, sizeof word);
      }
      Each::slope_from_output(params, tile, own, grads, grads, kTile);
    });
  }
};

// What a call needs, as pointers to loops of the machine's instruction set.
template <class T>
struct Table {
  void (*value)(const ActParams&, const T*, T*, int64_t);
  void (*slope)(const ActParams&, const T*, const T*, T*, int64_t);
  void (*mark)(const ActParams&, const T*, uint8_t*, int64_t);
  void (*marked)(const ActParams&, const T*, T*, uint8_t*, int64_t);
  void (*slope_from_output)(const ActParams&, const T*, const uint8_t*, const T*, T*, int64_t);
  void (*slope_from_bits)(const ActParams&, const uint8_t*, const T*, T*, int64_t);
};

template <class S>
struct TileTable {
  void (*value)(const ActParams&, const S*, S*, uint8_t*, int64_t);
  void (*slope)(const ActParams&, const S*, const S*, S*, int64_t);
  void (*slope_from_output)(const ActParams&, const S*, const uint8_t*, const S*, S*, int64_t);
};

// Conversions of blocks, sums, and dropout.
template <class S, class T>
struct Blocks {
  void (*widen)(const S*, T*, int64_t);
  void (*narrow)(const T*, S*, int64_t);
  void (*add)(const T* x, const T* other, T* y, int64_t n);
  void (*add_one)(const T* x, T other, T* y, int64_t n);
  void (*drop)(const Drop&, int64_t first, const T* x, T* y, int64_t n);
  void (*drop_gradient)(const Drop&, int64_t first, const T* x, T* y, int64_t n);
};

// The words of elements first to first + n; first is a multiple of 4.
MEMKIT_FN void draw(const Drop& drop, int64_t first, uint32_t* words, int64_t n) {
  const uint64_t key = drop.key(), counter = uint64_t(first) / 4;
  MEMKIT_LOOP
  for (int64_t i = 0; i < (n + 3) / 4; ++i) {
    const Words drawn = philox(counter + uint64_t(i), key);
    words[4 * i] = drawn.at[0];
    words[4 * i + 1] = drawn.at[1];
    words[4 * i + 2] = drawn.at[2];
    words[4 * i + 3] = drawn.at[3];
  }
}

template <class T, class F>
MEMKIT_FN void with_words(const Drop& drop, int64_t first, const T* x, T* y, int64_t n, const F& f) {
  uint32_t words[kBlock];
  draw(drop, first, words, n);
  for_elements<true>(n, [&](int64_t i) MEMKIT_INLINE { y[i] = f(x[i], words[i]); }, x, y);
}

#define MEMKIT_LOOPS_FOR(NAME, LANES, TARGET)                                                                          \
  template <class Op, class T>                                                                                         \
  struct NAME {                                                                                                        \
    using L = Loops<LANES, Op, T>;                                                                                     \
    TARGET static void value(const ActParams& p, const T* x, T* y, int64_t n) { L::value(p, x, y, n); }                \
    TARGET static void slope(const ActParams& p, const T* x, const T* g, T* o, int64_t n) { L::slope(p, x, g, o, n); } \
    TARGET static void mark(const ActParams& p, const T* x, uint8_t* b, int64_t n) { L::mark(p, x, b, n); }            \
    TARGET static void marked(const ActParams& p, const T* x, T* y, uint8_t* b, int64_t n) {                           \
      L::marked(p, x, y, b, n);                                                                                        \
    }                                                                                                                  \
    TARGET static void slope_from_output(const ActParams& p, const T* y, const uint8_t* b, const T* g, T* o,           \
                                         int64_t n) {                                                                  \
      L::slope_from_output(p, y, b, g, o, n);                                                                          \
    }                                                                                                                  \
    TARGET static void slope_from_bits(const ActParams& p, const uint8_t* b, const T* g, T* o, int64_t n) {            \
      L::slope_from_bits(p, b, g, o, n);                                                                               \
    }                                                                                                                  \
    static constexpr Table<T> table{value, slope, mark, marked, slope_from_output, slope_from_bits};                   \
  };                                                                                                                   \
  template <class S, class T>                                                                                          \
  struct NAME##Blocks {                                                                                                \
    TARGET static void widen(const S* x, T* y, int64_t n) { LANES::widen(x, y, n); }                                   \
    TARGET static void narrow(const T* x, S* y, int64_t n) { LANES::narrow(x, y, n); }                                 \
    TARGET static void add(const T* x, const T* other, T* y, int64_t n) {                                              \
      for_elements<true>(n, [&](int64_t i) MEMKIT_INLINE { y[i] = x[i] + other[i]; }, x, y);                           \
    }                                                                                                                  \
    TARGET static void add_one(const T* x, T other, T* y, int64_t n) {                                                 \
      for_elements<true>(n, [&](int64_t i) MEMKIT_INLINE { y[i] = x[i] + other; }, x, y);                              \
    }                                                                                                                  \
    TARGET static void drop(const Drop& d, int64_t first, const T* x, T* y, int64_t n) {                               \
      const Dropper<T> dropper(d);                                                                                     \
      with_words(d, first, x, y, n, [&](T v, uint32_t w) MEMKIT_INLINE { return dropper.value(v, w); });               \
    }                                                                                                                  \
    TARGET static void drop_gradient(const Drop& d, int64_t first, const T* x, T* y, int64_t n) {                      \
      const Dropper<T> dropper(d);                                                                                     \
      with_words(d, first, x, y, n, [&](T g, uint32_t w) MEMKIT_INLINE { return dropper.gradient(g, w); });            \
    }                                                                                                                  \
    static constexpr Blocks<S, T> table{widen, narrow, add, add_one, drop, drop_gradient};                             \
  };

#define MEMKIT_TILES_FOR(NAME, LANES, TARGET)                                                                          \
  template <class Op, class S>                                                                                         \
  struct NAME {                                                                                                        \
    using L = Tiles<LANES, Op, S>;                                                                                     \
    TARGET static void value(const ActParams& p, const S* x, S* y, uint8_t* b, int64_t n) { L::value(p, x, y, b, n); } \
    TARGET static void slope(const ActParams& p, const S* x, const S* g, S* o, int64_t n) { L::slope(p, x, g, o, n); } \
    TARGET static void slope_from_output(const ActParams& p, const S* y, const uint8_t* b, const S* g, S* o,           \
                                         int64_t n) {                                                                  \
      L::slope_from_output(p, y, b, g, o, n);                                                                          \
    }                                                                                                                  \
    static constexpr TileTable<S> table{value, slope, slope_from_output};                                              \
  };

MEMKIT_LOOPS_FOR(BaseLoops, BaseLanes, )
#if MEMKIT_X86
MEMKIT_LOOPS_FOR(V3Loops, V3Lanes, MEMKIT_TARGET_V3)
MEMKIT_LOOPS_FOR(V4Loops, V4Lanes, MEMKIT_TARGET_V4)
MEMKIT_TILES_FOR(V3Tiles, V3Lanes, MEMKIT_TARGET_V3)
MEMKIT_TILES_FOR(V4Tiles, V4Lanes, MEMKIT_TARGET_V4)
#endif

// Up to which functions of two slopes take the loops of AVX2 where there is AVX-512: sixteen lanes read no faster, cost a call
// between Python's own work 2 us, and choose by masks, which the compiler puts on loads of the gradient as well: those then
// wait for the other operand (Zen 5, 1 Mi elements: 1.2 to 1.5 times as long). In place, and in memory beyond, they gain.
constexpr int64_t kFewInPlace = 1 << 18, kFewElsewhere = 1 << 21;

template <class Op>
inline constexpr int64_t few_in_place = is_long<Op> ? 0 : kFewInPlace;
template <class Op>
inline constexpr int64_t few_elsewhere = is_long<Op> ? 0 : kFewElsewhere;

template <class T, bool coarse>
struct FindTable {
  const ActivationArgs& args;

  template <template <class, bool> class Formula>
  const Table<T>* operator()() const {
    using Op = Formula<T, coarse && has_coarse<Formula>>;
#if MEMKIT_X86
    const bool in_place = args.out == args.x || args.out == args.grad;
    if constexpr (has_v4<T>)
      if (isa() == Isa::v4 && args.numel > (in_place ? few_in_place<Op> : few_elsewhere<Op>))
        return &V4Loops<Op, T>::table;
    if (isa() != Isa::base) return &V3Loops<Op, T>::table;
#endif
    return &BaseLoops<Op, T>::table;
  }
};

// None without vectors, where nothing stays in registers, and for types that are computed in as they are.
template <class S>
struct FindTiles {
  template <template <class, bool> class Formula>
  const TileTable<S>* operator()() const {
#if MEMKIT_X86
    if constexpr (sizeof(S) == 2) {
      using Op = Formula<float, true>;
      if (isa() == Isa::v4) return &V4Tiles<Op, S>::table;
      if (isa() == Isa::v3) return &V3Tiles<Op, S>::table;
    }
#endif
    return nullptr;
  }
};

template <class S, class T>
const Blocks<S, T>& blocks() {
#if MEMKIT_X86
  if (isa() == Isa::v4) return V4LoopsBlocks<S, T>::table;
  if (isa() == Isa::v3) return V3LoopsBlocks<S, T>::table;
#endif
  return BaseLoopsBlocks<S, T>::table;
}

}  // namespace memkit::cpu
