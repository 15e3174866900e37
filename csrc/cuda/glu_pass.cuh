// What a thread does with one word of products, without CUDA's runtime: a test plays the threads on the CPU.
#pragma once

#include "../formulas/glu.h"
#include "access.cuh"
#include "bias.cuh"

namespace memkit::cuda {

// A call as the kernels want it. Where every operand's words are aligned and rows hold whole words, a thread moves 16
// bytes of each at a time; else one element.
struct GluCall {
  GluArgs args;
  Divisor width;
  int64_t items = 0;  // words or elements
  bool wide = false;

  template <class S>
  static GluCall of(const GluArgs& args) {
    constexpr int word = sizeof(Word) / sizeof(S);
    const auto address = [](auto... p) { return (reinterpret_cast<uintptr_t>(p) | ...); };
    const auto places = address(args.gate, args.up, args.grad, args.out, args.grad_gate, args.grad_up);
    GluCall call;
    call.args = args;
    call.width = Divisor(args.width);
    // Interleaved operands overlap: a word of each would be half the other's.
    call.wide = args.step == 1 && places % sizeof(Word) == 0 && args.width % word == 0 && args.row % word == 0;
    call.items = args.rows * args.width / (call.wide ? word : 1);
    return call;
  }

  // Of product i.
  MEMKIT_FN int64_t place(int64_t i) const {
    const int64_t row = width.divide(i);
    return row * args.row + (i - row * width.value) * args.step;
  }
};

template <class S, int n, class T>
MEMKIT_FN void read(const void* x, int64_t at, T (&values)[n]) {
  const S* source = static_cast<const S*>(x) + at;
  S raw[n];
  if constexpr (n == 1) {
    raw[0] = *source;
  } else {
    const Word word = *reinterpret_cast<const Word*>(source);
    std::memcpy(raw, &word, sizeof(word));
  }
  MEMKIT_UNROLL
  for (int k = 0; k < n; ++k) values[k] = widen(raw[k]);
}

template <class S, int n, class T>
MEMKIT_FN void write(const T (&values)[n], void* x, int64_t at) {
  store_values(values, static_cast<S*>(x) + at);
}

// The formulas on a thread's products: all threads of a launch take the same branch.
template <class S, int n>
struct Products {
  using T = typename ComputeType<S>::type;
  template <template <class, bool> class Formula>
  using Op = Formula<T, sizeof(S) == 2>;

  struct Value {
    template <template <class, bool> class Formula>
    MEMKIT_FN void operator()(const T (&gate)[n], T (&up)[n]) const {
      const Op<Formula> op(ActParams{});
      MEMKIT_UNROLL
      for (int k = 0; k < n; ++k) up[k] = glu_value(op, gate[k], up[k]);
    }
  };

  struct Gradients {
    template <template <class, bool> class Formula>
    MEMKIT_FN void operator()(const T (&grad)[n], T (&gate)[n], T (&up)[n]) const {
      const Op<Formula> op(ActParams{});
      MEMKIT_UNROLL
      for (int k = 0; k < n; ++k) {
        const GluGradients<T> both = glu_gradients(op, grad[k], gate[k], up[k]);
        gate[k] = both.gate;
        up[k] = both.up;
      }
    }
  };
};

template <class S>
struct GluForward {
  using T = typename ComputeType<S>::type;
  template <int n>
  MEMKIT_FN static void run(const GluCall& call, int64_t item) {
    const int64_t i = item * n, place = call.place(i);
    T gate[n], up[n];
    read<S>(call.args.gate, place, gate);
    read<S>(call.args.up, place, up);
    visit_gate(call.args.act, typename Products<S, n>::Value{}, gate, up);
    write<S>(up, call.args.out, i);
  }
};

template <class S>
struct GluBackward {
  using T = typename ComputeType<S>::type;
  template <int n>
  MEMKIT_FN static void run(const GluCall& call, int64_t item) {
    const int64_t i = item * n, place = call.place(i);
    T gate[n], up[n], grad[n];
    read<S>(call.args.gate, place, gate);
    read<S>(call.args.up, place, up);
    read<S>(call.args.grad, i, grad);
    visit_gate(call.args.act, typename Products<S, n>::Gradients{}, grad, gate, up);
    write<S>(gate, call.args.grad_gate, place);
    write<S>(up, call.args.grad_up, place);
  }
};

}  // namespace memkit::cuda
