// Loops over the activation formulas. Each is compiled for three instruction sets and for float, double, and float as exact
// as dtypes of two bytes need. Those are widened a tile at a time, or a block in the first-level cache, which is quicker
// than conversions in the formula's loop. So it is with a bias, dropout or a residual: read and add the bias, formula,
// dropout, add the residual, store.
#include "activation.h"

#include "../formulas/gradient.h"
#include "pieces.h"

namespace memkit::cpu {
namespace {

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
    if constexpr (InPieces<Lanes, Op>::exists) return InPieces<Lanes, Op>::value(x, y, n);
    const Op op(params);
    for_elements<ahead>(n, [&](int64_t i) MEMKIT_INLINE { y[i] = op.value(x[i]); }, x, y);
  }

  MEMKIT_FN static void slope(const ActParams& params, const T* x, const T* grad, T* out, int64_t n) {
    const Op op(params);
    for_elements<ahead>(
        n, [&](int64_t i) MEMKIT_INLINE { out[i] = gradient_at_input(op, grad[i], x[i]); }, x, grad, out);
  }

  // The bits that backward needs of these inputs.
  MEMKIT_FN static void mark([[maybe_unused]] const ActParams& params, const T* x, uint8_t* bits, int64_t n) {
    if constexpr (Op::branch) {
      Lanes::pack(x, T(Op::x0), bits, n);
    } else if constexpr (has_two_slopes<Op>) {
      const Op op(params);
      T marks[kBlock];
      MEMKIT_LOOP
      for (int64_t i = 0; i < n; ++i) marks[i] = select(op.active(x[i]), T(1), T(0));
      Lanes::pack(marks, T(1), bits, n);
    }
  }

  MEMKIT_FN static void slope_from_output(const ActParams& params, const T* y, const uint8_t* bits, const T* grad,
                                          T* out, int64_t n) {
    [[maybe_unused]] const Op op(params);
    if constexpr (OnCurve<Lanes, Op, T>::exists) {
      OnCurve<Lanes, Op, T>::template gradient<ahead>(y, bits, grad, out, n);
    } else if constexpr (Op::branch) {
      int32_t sides[kBlock];
      Lanes::spread(bits, sides, n);
      for_elements<ahead>(
          n, [&](int64_t i) MEMKIT_INLINE { out[i] = gradient_at_output(op, grad[i], y[i], sides[i] != 0); }, y, grad,
          out);
    } else {
      for_elements<ahead>(
          n, [&](int64_t i) MEMKIT_INLINE { out[i] = gradient_at_output(op, grad[i], y[i]); }, y, grad, out);
    }
  }

  MEMKIT_FN static void slope_from_bits([[maybe_unused]] const ActParams& params, const uint8_t* bits, const T* grad,
                                        T* out, int64_t n) {
    if constexpr (has_two_slopes<Op>) {
      const Op op(params);
      int32_t sides[kBlock];
      Lanes::spread(bits, sides, n);
      MEMKIT_LOOP
      for (int64_t i = 0; i < n; ++i) out[i] = gradient_where(op, grad[i], sides[i] != 0);
    }
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
    std::fill_n(tile, kTile, 0.f);
    Lanes::widen(x, tile, n);
  }
  MEMKIT_FN static void write(const Tile& tile, S* y, int64_t n) {
    if (n == kTile) return Lanes::put_tile(tile, y);
    Lanes::narrow(tile, y, n);
  }

  template <class F, class... Arrays>
  MEMKIT_FN static void for_tiles(int64_t n, const F& f, const Arrays*... arrays) {
    for (int64_t first = 0; first < n; first += kTile) {
      if constexpr (is_long<Op>) (prefetch_tile(arrays + first), ...);
      f(first, std::min(kTile, n - first));
    }
  }

  MEMKIT_FN static void value(const ActParams& params, const S* x, S* y, int64_t n) {
    for_tiles(
        n,
        [&](int64_t first, int64_t count) MEMKIT_INLINE {
          alignas(64) Tile tile;
          read(x + first, tile, count);
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
        [&](int64_t first, int64_t count) MEMKIT_INLINE {
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
      if constexpr (Op::branch) std::memcpy(own, bits + first / 8, size_t(count + 7) / 8);
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
  void (*slope_from_output)(const ActParams&, const T*, const uint8_t*, const T*, T*, int64_t);
  void (*slope_from_bits)(const ActParams&, const uint8_t*, const T*, T*, int64_t);
};

template <class S>
struct TileTable {
  void (*value)(const ActParams&, const S*, S*, int64_t);
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
  const uint64_t key = uint64_t(*drop.seed), counter = uint64_t(first) / 4;
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
    TARGET static void slope_from_output(const ActParams& p, const T* y, const uint8_t* b, const T* g, T* o,           \
                                         int64_t n) {                                                                  \
      L::slope_from_output(p, y, b, g, o, n);                                                                          \
    }                                                                                                                  \
    TARGET static void slope_from_bits(const ActParams& p, const uint8_t* b, const T* g, T* o, int64_t n) {            \
      L::slope_from_bits(p, b, g, o, n);                                                                               \
    }                                                                                                                  \
    static constexpr Table<T> table{value, slope, mark, slope_from_output, slope_from_bits};                           \
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
    TARGET static void value(const ActParams& p, const S* x, S* y, int64_t n) { L::value(p, x, y, n); }                \
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
MEMKIT_LOOPS_FOR(V4ShortLoops, V4Lanes, MEMKIT_TARGET_V4_SHORT)
MEMKIT_TILES_FOR(V3Tiles, V3Lanes, MEMKIT_TARGET_V3)
MEMKIT_TILES_FOR(V4Tiles, V4Lanes, MEMKIT_TARGET_V4)
#endif

constexpr int64_t kFewElements = 1 << 18;

template <class T, bool coarse>
struct FindTable {
  int64_t numel;

  template <template <class, bool> class Formula>
  const Table<T>* operator()() const {
    using Op = Formula<T, coarse>;
#if MEMKIT_X86
    if (isa() == Isa::v4) {
      if constexpr (!is_long<Op>)
        if (numel <= kFewElements) return &V4ShortLoops<Op, T>::table;
      return &V4Loops<Op, T>::table;
    }
    if (isa() == Isa::v3) return &V3Loops<Op, T>::table;
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

// x where it lies if it is of the type computed in.
template <class S, class T>
const T* widened(const S* x, T* space, int64_t n) {
  if constexpr (std::is_same_v<S, T>)
    return x;
  else {
    blocks<S, T>().widen(x, space, n);
    return space;
  }
}

// block[k] = x + bias of element first + k, one run of equal or consecutive bias elements at a time.
template <class S, class T>
void read_biased(const S* x, const Bias& bias, int64_t first, T* block, int64_t n) {
  const Blocks<S, T>& engine = blocks<S, T>();
  const S* data = static_cast<const S*>(bias.data);
  T space[kBlock], values[kBlock];
  const T* from = widened(x, space, n);
  for (int64_t k = 0; k < n;) {
    const int64_t i = first + k;
    const int64_t channel = i / bias.inner % bias.size;
    int64_t run;
    if (bias.inner == 1) {
      run = std::min(bias.size - channel, n - k);
      engine.add(from + k, widened(data + channel, values, run), block + k, run);
    } else {
      run = std::min(bias.inner - i % bias.inner, n - k);
      engine.add_one(from + k, to_compute(data[channel]), block + k, run);
    }
    k += run;
  }
}

// A call with the loops it needs. Where nothing is to be widened or added, they run from memory to memory.
template <class S>
struct Engine {
  using T = typename ComputeType<S>::type;
  static constexpr bool direct = std::is_same_v<S, T>;
  const ActivationArgs& args;
  const Table<T>& loops = *visit(args.act, FindTable<T, !direct>{args.numel});
  const TileTable<S>* tiles = visit(args.act, FindTiles<S>{});
  const Blocks<S, T>& engine = blocks<S, T>();

  const S* x(int64_t first) const { return static_cast<const S*>(args.x) + first; }
  const S* grad(int64_t first) const { return static_cast<const S*>(args.grad) + first; }
  S* out(int64_t first) const { return static_cast<S*>(args.out) + first; }
  uint8_t* bits(int64_t first) const { return args.bits ? args.bits + first / 8 : nullptr; }

  void forward(int64_t first, int64_t n) const {
    if (!args.bias.data && !args.drop.seed && !args.residual) {
      if constexpr (direct) {
        if (args.bits) loops.mark(args.params, x(first), bits(first), n);
        return loops.value(args.params, x(first), out(first), n);
      }
      if (tiles && !args.bits) return tiles->value(args.params, x(first), out(first), n);
    }
    alignas(64) T block[kBlock], other[kBlock];  // as the loops that are called would align what is theirs
    T* const last = place(first, block);
    const T* at = read(first, block, n);
    if (args.bits) loops.mark(args.params, at, bits(first), n);
    if (args.act != Act::identity) at = value(at, args.drop.seed || args.residual ? block : last, n);
    if (args.drop.seed) {
      T* const to = args.residual ? block : last;
      engine.drop(args.drop, first, at, to, n);
      at = to;
    }
    if (args.residual) {
      engine.add(at, widened(static_cast<const S*>(args.residual) + first, other, n), last, n);
      at = last;
    }
    if (static_cast<const void*>(at) != out(first)) engine.narrow(at, out(first), n);
  }

  void backward_from_input(int64_t first, int64_t n) const {
    if (!args.bias.data && !args.drop.seed) {
      if constexpr (direct) return loops.slope(args.params, x(first), grad(first), out(first), n);
      if (tiles) return tiles->slope(args.params, x(first), grad(first), out(first), n);
    }
    alignas(64) T block[kBlock], grads[kBlock];
    const T* arrived = arrived_at(first, grads, n);
    T* const to = place(first, grads);
    loops.slope(args.params, read(first, block, n), arrived, to, n);
    written(to, first, n);
  }

  void backward_from_output(int64_t first, int64_t n) const {
    if (!args.drop.seed) {
      if constexpr (direct)
        return loops.slope_from_output(args.params, x(first), bits(first), grad(first), out(first), n);
      if (tiles) return tiles->slope_from_output(args.params, x(first), bits(first), grad(first), out(first), n);
    }
    alignas(64) T block[kBlock], grads[kBlock];
    const T* arrived = arrived_at(first, grads, n);
    engine.widen(x(first), block, n);
    if (args.drop.seed) {
      const T unscale = T(1 / args.drop.scale);  // what dropout kept is the activation's output times `scale`
      for (int64_t i = 0; i < n; ++i) block[i] *= unscale;
    }
    T* const to = place(first, grads);
    loops.slope_from_output(args.params, block, bits(first), arrived, to, n);
    written(to, first, n);
  }

  void backward_from_bits(int64_t first, int64_t n) const {
    if constexpr (direct)
      if (!args.drop.seed) return loops.slope_from_bits(args.params, bits(first), grad(first), out(first), n);
    alignas(64) T grads[kBlock];
    const T* arrived = arrived_at(first, grads, n);
    T* const to = place(first, grads);
    loops.slope_from_bits(args.params, bits(first), arrived, to, n);
    written(to, first, n);
  }

 private:
  // x + bias.
  const T* read(int64_t first, T* block, int64_t n) const {
    if (!args.bias.data) return widened(x(first), block, n);
    read_biased(x(first), args.bias, first, block, n);
    return block;
  }
  // The gradient of the activation's output.
  const T* arrived_at(int64_t first, T* grads, int64_t n) const {
    const T* arrived = widened(grad(first), grads, n);
    if (!args.drop.seed) return arrived;
    engine.drop_gradient(args.drop, first, arrived, grads, n);
    return grads;
  }
  const T* value(const T* at, T* to, int64_t n) const {
    loops.value(args.params, at, to, n);
    return to;
  }

  // Where to compute what is then `written`.
  T* place(int64_t first, T* block) const {
    if constexpr (direct) return out(first);
    return block;
  }
  void written(const T* values, int64_t first, int64_t n) const {
    if constexpr (!direct) engine.narrow(values, out(first), n);
  }
};

struct Forward {
  template <class S>
  static void run(const Engine<S>& engine, int64_t first, int64_t n) {
    engine.forward(first, n);
  }
};
struct BackwardFromInput {
  template <class S>
  static void run(const Engine<S>& engine, int64_t first, int64_t n) {
    engine.backward_from_input(first, n);
  }
};
struct BackwardFromOutput {
  template <class S>
  static void run(const Engine<S>& engine, int64_t first, int64_t n) {
    engine.backward_from_output(first, n);
  }
};
struct BackwardFromBits {
  template <class S>
  static void run(const Engine<S>& engine, int64_t first, int64_t n) {
    engine.backward_from_bits(first, n);
  }
};

template <class Pass, class S>
void for_blocks(const ActivationArgs& args, int64_t begin, int64_t end) {
  const Engine<S> engine{args};
  for (int64_t first = begin; first < end; first += kBlock) Pass::run(engine, first, std::min(kBlock, end - first));
}

template <class Pass>
void for_dtype(const ActivationArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case Dtype::float32: return for_blocks<Pass, float>(args, begin, end);
    case Dtype::float64: return for_blocks<Pass, double>(args, begin, end);
    case Dtype::float16: return for_blocks<Pass, Half>(args, begin, end);
    case Dtype::bfloat16: return for_blocks<Pass, Bfloat>(args, begin, end);
  }
}

}  // namespace

void activation_forward(const ActivationArgs& args, int64_t begin, int64_t end) {
  for_dtype<Forward>(args, begin, end);
}

void activation_backward_from_input(const ActivationArgs& args, int64_t begin, int64_t end) {
  for_dtype<BackwardFromInput>(args, begin, end);
}

void activation_backward_from_output(const ActivationArgs& args, int64_t begin, int64_t end) {
  for_dtype<BackwardFromOutput>(args, begin, end);
}

void activation_backward_from_bits(const ActivationArgs& args, int64_t begin, int64_t end) {
  for_dtype<BackwardFromBits>(args, begin, end);
}

}  // namespace memkit::cpu
