// Activations as calls ask for them: which loops run (activation_loops.h), over which memory. With a bias, dropout or a
// residual: read and add the bias, formula, dropout, add the residual, store.
#include "activation.h"

#include "activation_loops.h"

namespace memkit::cpu {
namespace {

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
  const Table<T>& loops = *visit(args.act, FindTable<T, !direct>{args});
  const TileTable<S>* tiles = visit(args.act, FindTiles<S>{});
  const Blocks<S, T>& engine = blocks<S, T>();

  const S* x(int64_t first) const { return static_cast<const S*>(args.x) + first; }
  const S* grad(int64_t first) const { return static_cast<const S*>(args.grad) + first; }
  S* out(int64_t first) const { return static_cast<S*>(args.out) + first; }
  uint8_t* bits(int64_t first) const { return args.bits ? args.bits + first / 8 : nullptr; }

  void forward(int64_t first, int64_t n) const {
    if (!args.bias.data && !args.drop.on && !args.residual) {
      if constexpr (direct) {
        if (args.bits) return loops.marked(args.params, x(first), out(first), bits(first), n);
        return loops.value(args.params, x(first), out(first), n);
      }
      if (tiles) return tiles->value(args.params, x(first), out(first), bits(first), n);
    }
    alignas(64) T block[kBlock], other[kBlock];  // as the loops that are called would align what is theirs
    T* const last = place(first, block);
    const T* at = read(first, block, n);
    if (args.bits) loops.mark(args.params, at, bits(first), n);
    if (args.act != Act::identity) at = value(at, args.drop.on || args.residual ? block : last, n);
    if (args.drop.on) {
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
    if (!args.bias.data && !args.drop.on) {
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
    if (!args.drop.on) {
      if constexpr (direct)
        return loops.slope_from_output(args.params, x(first), bits(first), grad(first), out(first), n);
      if (tiles) return tiles->slope_from_output(args.params, x(first), bits(first), grad(first), out(first), n);
    }
    alignas(64) T block[kBlock], grads[kBlock];
    const T* arrived = arrived_at(first, grads, n);
    engine.widen(x(first), block, n);
    if (args.drop.on) {
      const T unscale = T(args.drop.unscale);  // what dropout kept is the activation's output times `scale`
      for (int64_t i = 0; i < n; ++i) block[i] *= unscale;
    }
    T* const to = place(first, grads);
    loops.slope_from_output(args.params, block, bits(first), arrived, to, n);
    written(to, first, n);
  }

  void backward_from_bits(int64_t first, int64_t n) const {
    if constexpr (direct)
      if (!args.drop.on) return loops.slope_from_bits(args.params, bits(first), grad(first), out(first), n);
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
    if (!args.drop.on) return arrived;
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

bool has_own_tanh(Dtype dtype) { return dtype == Dtype::float32 && isa() == Isa::v4; }

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
