// Loops over the activation formulas: load a block into the compute type (adding the bias), apply the formula, store it.
// The block stays in the first-level cache, so dtype and bias need no variant of the formulas' loops.
#include "activation.h"

#include <algorithm>

#include "convert.h"

namespace memkit::cpu {
namespace {

constexpr int64_t kBlock = 1024;  // elements; a multiple of 8

// The loops of one formula. Pointers may alias element by element.
template <class Op, class T>
struct Loops {
  MEMKIT_FN static void value(const ActParams& params, const T* x, T* y, int64_t n) {
    const Op op(params);
    MEMKIT_LOOP
    for (int64_t i = 0; i < n; ++i) y[i] = op.value(x[i]);
  }

  MEMKIT_FN static void slope(const ActParams& params, const T* x, const T* grad, T* out, int64_t n) {
    const Op op(params);
    MEMKIT_LOOP
    for (int64_t i = 0; i < n; ++i) out[i] = input_gradient<Op>(grad[i], op.slope(x[i]));
  }

  MEMKIT_FN static void right(const ActParams& params, const T* x, uint8_t* bits, int64_t n) {
    if constexpr (Op::branch) {
      const Op op(params);
      uint8_t side[kBlock];
      MEMKIT_LOOP
      for (int64_t i = 0; i < n; ++i) side[i] = op.right(x[i]);
      std::fill(side + n, side + (n + 7) / 8 * 8, uint8_t(0));
      // Eight bytes of 0 or 1 to eight bits: the multiplication gathers byte k's bit at position 56 + k.
      for (int64_t i = 0; i < n; i += 8) {
        uint64_t eight;
        std::memcpy(&eight, side + i, 8);
        bits[i / 8] = uint8_t(eight * 0x0102040810204080ull >> 56);
      }
    }
  }

  MEMKIT_FN static void slope_from_output(const ActParams& params, const T* y, const uint8_t* bits, const T* grad,
                                          T* out, int64_t n) {
    const Op op(params);
    if constexpr (Op::branch) {
      int32_t side[kBlock];
      for (int64_t j = 0; j < (n + 7) / 8; ++j)
        for (int k = 0; k < 8; ++k) side[8 * j + k] = bits[j] >> k & 1;
      MEMKIT_LOOP
      for (int64_t i = 0; i < n; ++i) out[i] = input_gradient<Op>(grad[i], op.slope_from_output(y[i], side[i] != 0));
    } else {
      MEMKIT_LOOP
      for (int64_t i = 0; i < n; ++i) out[i] = input_gradient<Op>(grad[i], op.slope_from_output(y[i]));
    }
  }
};

// What a call needs of one formula, as pointers to the loops of the machine's instruction set.
template <class T>
struct Table {
  void (*value)(const ActParams&, const T*, T*, int64_t);
  void (*slope)(const ActParams&, const T*, const T*, T*, int64_t);
  void (*right)(const ActParams&, const T*, uint8_t*, int64_t);
  void (*slope_from_output)(const ActParams&, const T*, const uint8_t*, const T*, T*, int64_t);
};

#define MEMKIT_LOOPS_FOR(NAME, TARGET)                                                                             \
  template <class Op, class T>                                                                                     \
  struct NAME {                                                                                                    \
    TARGET static void value(const ActParams& p, const T* x, T* y, int64_t n) { Loops<Op, T>::value(p, x, y, n); } \
    TARGET static void slope(const ActParams& p, const T* x, const T* g, T* o, int64_t n) {                        \
      Loops<Op, T>::slope(p, x, g, o, n);                                                                          \
    }                                                                                                              \
    TARGET static void right(const ActParams& p, const T* x, uint8_t* b, int64_t n) {                              \
      Loops<Op, T>::right(p, x, b, n);                                                                             \
    }                                                                                                              \
    TARGET static void slope_from_output(const ActParams& p, const T* y, const uint8_t* b, const T* g, T* o,       \
                                         int64_t n) {                                                              \
      Loops<Op, T>::slope_from_output(p, y, b, g, o, n);                                                           \
    }                                                                                                              \
    static constexpr Table<T> table{value, slope, right, slope_from_output};                                       \
  };

MEMKIT_LOOPS_FOR(BaseLoops, )
#if MEMKIT_X86
MEMKIT_LOOPS_FOR(V3Loops, MEMKIT_TARGET_V3)
MEMKIT_LOOPS_FOR(V4Loops, MEMKIT_TARGET_V4)
#endif

template <class T>
struct FindTable {
  template <template <class> class Op>
  const Table<T>* operator()() const {
#if MEMKIT_X86
    switch (isa()) {
      case Isa::v4: return &V4Loops<Op<T>, T>::table;
      case Isa::v3: return &V3Loops<Op<T>, T>::table;
      case Isa::base: break;
    }
#endif
    return &BaseLoops<Op<T>, T>::table;
  }
};

// Conversion of blocks, likewise for each instruction set.
#define MEMKIT_CONVERT_FOR(NAME, TARGET)                                    \
  template <class S, class T>                                               \
  struct NAME {                                                             \
    TARGET static void in(const S* x, T* y, int64_t n) { load(x, y, n); }   \
    TARGET static void out(const T* x, S* y, int64_t n) { store(x, y, n); } \
  };

MEMKIT_CONVERT_FOR(BaseConvert, )
#if MEMKIT_X86
MEMKIT_CONVERT_FOR(V3Convert, MEMKIT_TARGET_V3)
MEMKIT_CONVERT_FOR(V4Convert, MEMKIT_TARGET_V4)
#endif

template <class S, class T>
void read(const S* x, T* y, int64_t n) {
#if MEMKIT_X86
  if (isa() == Isa::v4) return V4Convert<S, T>::in(x, y, n);
  if (isa() == Isa::v3) return V3Convert<S, T>::in(x, y, n);
#endif
  BaseConvert<S, T>::in(x, y, n);
}

template <class T, class S>
void write(const T* x, S* y, int64_t n) {
#if MEMKIT_X86
  if (isa() == Isa::v4) return V4Convert<S, T>::out(x, y, n);
  if (isa() == Isa::v3) return V3Convert<S, T>::out(x, y, n);
#endif
  BaseConvert<S, T>::out(x, y, n);
}

// block[k] += bias of element first + k, one run of equal or consecutive bias elements at a time.
template <class S, class T>
void add_bias(const Bias& bias, int64_t first, T* block, int64_t n) {
  const S* data = static_cast<const S*>(bias.data);
  T values[kBlock];
  for (int64_t k = 0; k < n;) {
    const int64_t i = first + k;
    const int64_t channel = i / bias.inner % bias.size;
    int64_t run;
    if (bias.inner == 1) {
      run = std::min(bias.size - channel, n - k);
      read(data + channel, values, run);
      for (int64_t j = 0; j < run; ++j) block[k + j] += values[j];
    } else {
      run = std::min(bias.inner - i % bias.inner, n - k);
      read(data + channel, values, 1);
      for (int64_t j = 0; j < run; ++j) block[k + j] += values[0];
    }
    k += run;
  }
}

// A block of a tensor in the compute type: the tensor's own memory where it is of that type already, else a copy.
template <class S, class T>
const T* block_of(const void* tensor, int64_t first, T* buffer, int64_t n) {
  const S* source = static_cast<const S*>(tensor) + first;
  if constexpr (std::is_same_v<S, T>) {
    return source;
  } else {
    read(source, buffer, n);
    return buffer;
  }
}

template <class S, class T>
const T* biased_block_of(const ActivationArgs& args, int64_t first, T* buffer, int64_t n) {
  if (!args.bias.data) return block_of<S>(args.x, first, buffer, n);
  read(static_cast<const S*>(args.x) + first, buffer, n);
  add_bias<S>(args.bias, first, buffer, n);
  return buffer;
}

template <class S>
struct Forward {
  using T = typename ComputeType<S>::type;
  static void run(const ActivationArgs& args, const Table<T>& loops, int64_t first, int64_t n) {
    T buffer[kBlock];
    S* out = static_cast<S*>(args.out) + first;
    const T* x = biased_block_of<S>(args, first, buffer, n);
    if (args.bits) loops.right(args.params, x, args.bits + first / 8, n);
    if constexpr (std::is_same_v<S, T>) {
      loops.value(args.params, x, out, n);
    } else {
      loops.value(args.params, x, buffer, n);
      write(buffer, out, n);
    }
  }
};

template <class S, bool from_output>
struct Backward {
  using T = typename ComputeType<S>::type;
  static void run(const ActivationArgs& args, const Table<T>& loops, int64_t first, int64_t n) {
    T saved_buffer[kBlock], grad_buffer[kBlock];
    S* out = static_cast<S*>(args.out) + first;
    const T* grad = block_of<S>(args.grad, first, grad_buffer, n);
    T* result;
    if constexpr (std::is_same_v<S, T>)
      result = out;
    else
      result = grad_buffer;
    if constexpr (from_output) {
      const T* y = block_of<S>(args.x, first, saved_buffer, n);
      loops.slope_from_output(args.params, y, args.bits ? args.bits + first / 8 : nullptr, grad, result, n);
    } else {
      const T* x = biased_block_of<S>(args, first, saved_buffer, n);
      loops.slope(args.params, x, grad, result, n);
    }
    if constexpr (!std::is_same_v<S, T>) write(result, out, n);
  }
};

template <class S>
using BackwardFromInput = Backward<S, false>;
template <class S>
using BackwardFromOutput = Backward<S, true>;

template <template <class> class Engine, class S>
void for_blocks(const ActivationArgs& args, int64_t begin, int64_t end) {
  using T = typename ComputeType<S>::type;
  const Table<T>& loops = *visit(args.act, FindTable<T>{});
  for (int64_t first = begin; first < end; first += kBlock) {
    Engine<S>::run(args, loops, first, std::min(kBlock, end - first));
  }
}

template <template <class> class Engine>
void for_dtype(const ActivationArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case Dtype::float32: return for_blocks<Engine, float>(args, begin, end);
    case Dtype::float64: return for_blocks<Engine, double>(args, begin, end);
    case Dtype::float16: return for_blocks<Engine, Half>(args, begin, end);
    case Dtype::bfloat16: return for_blocks<Engine, Bfloat>(args, begin, end);
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

}  // namespace memkit::cpu
