// Loops over the gated units: a block of each operand is widened in the first-level cache, computed and narrowed.
#include "glu.h"

#include <algorithm>

#include "compiled.h"

namespace memkit::cpu {
namespace {

template <class Lanes, class S>
struct Operand {
  using T = typename ComputeType<S>::type;

  MEMKIT_FN static void read(const S* x, int64_t step, T* block, int64_t n) {
    if (step == 1) return Lanes::widen(x, block, n);
    T both[2 * kBlock];  // the last element's neighbour is another operand's, or beyond the end
    read_in_blocks(x, both, 2 * n - 1);
    for (int64_t i = 0; i < n; ++i) block[i] = both[2 * i];
  }

  MEMKIT_FN static void write(const T* block, int64_t step, S* x, int64_t n) {
    if (step == 1) return Lanes::narrow(block, x, n);
    S dense[kBlock];
    Lanes::narrow(block, dense, n);
    for (int64_t i = 0; i < n; ++i) x[2 * i] = dense[i];
  }

 private:
  MEMKIT_FN static void read_in_blocks(const S* x, T* y, int64_t n) {
    for (int64_t i = 0; i < n; i += kBlock) Lanes::widen(x + i, y + i, std::min(kBlock, n - i));
  }
};

// f(place in the operands, place in the product, count) for runs of at most a block, each within a row.
template <class F>
MEMKIT_FN void for_runs(const GluArgs& args, int64_t begin, int64_t end, const F& f) {
  for (int64_t i = begin; i < end;) {
    const int64_t row = i / args.width, column = i % args.width;
    const int64_t n = std::min({kBlock, args.width - column, end - i});
    f(row * args.row + column * args.step, i, n);
    i += n;
  }
}

#define MEMKIT_INLINE __attribute__((always_inline))

template <class Op, class S>
struct Glu {
  using T = typename ComputeType<S>::type;

  template <class Lanes>
  struct Forward {
    MEMKIT_FN static void run(const GluArgs& args, int64_t begin, int64_t end) {
      using Side = Operand<Lanes, S>;
      const Op op(ActParams{});
      for_runs(args, begin, end, [&](int64_t place, int64_t dense, int64_t n) MEMKIT_INLINE {
        T gate[kBlock], up[kBlock];
        Side::read(static_cast<const S*>(args.gate) + place, args.step, gate, n);
        Side::read(static_cast<const S*>(args.up) + place, args.step, up, n);
        MEMKIT_LOOP
        for (int64_t i = 0; i < n; ++i) up[i] = glu_value(op, gate[i], up[i]);
        Lanes::narrow(up, static_cast<S*>(args.out) + dense, n);
      });
    }
  };

  template <class Lanes>
  struct Backward {
    MEMKIT_FN static void run(const GluArgs& args, int64_t begin, int64_t end) {
      using Side = Operand<Lanes, S>;
      const Op op(ActParams{});
      for_runs(args, begin, end, [&](int64_t place, int64_t dense, int64_t n) MEMKIT_INLINE {
        T gate[kBlock], up[kBlock], grad[kBlock];
        Side::read(static_cast<const S*>(args.gate) + place, args.step, gate, n);
        Side::read(static_cast<const S*>(args.up) + place, args.step, up, n);
        Lanes::widen(static_cast<const S*>(args.grad) + dense, grad, n);
        MEMKIT_LOOP
        for (int64_t i = 0; i < n; ++i) {
          const GluGradients<T> both = glu_gradients(op, grad[i], gate[i], up[i]);
          gate[i] = both.gate;
          up[i] = both.up;
        }
        Side::write(gate, args.step, static_cast<S*>(args.grad_gate) + place, n);
        Side::write(up, args.step, static_cast<S*>(args.grad_up) + place, n);
      });
    }
  };
};

template <class S, template <class, class> class Pass>
struct Run {
  template <template <class, bool> class Formula>
  void operator()(const GluArgs& args, int64_t begin, int64_t end) const {
    Pass<Formula<typename ComputeType<S>::type, sizeof(S) == 2>, S>::run(args, begin, end);
  }
};

template <class Op, class S>
struct ForwardPass : Compiled<Glu<Op, S>::template Forward> {};
template <class Op, class S>
struct BackwardPass : Compiled<Glu<Op, S>::template Backward> {};

template <template <class, class> class Pass>
void for_dtype(const GluArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case Dtype::float32: return visit_gate(args.act, Run<float, Pass>{}, args, begin, end);
    case Dtype::float64: return visit_gate(args.act, Run<double, Pass>{}, args, begin, end);
    case Dtype::float16: return visit_gate(args.act, Run<Half, Pass>{}, args, begin, end);
    case Dtype::bfloat16: return visit_gate(args.act, Run<Bfloat, Pass>{}, args, begin, end);
  }
}

}  // namespace

void glu_forward(const GluArgs& args, int64_t begin, int64_t end) { for_dtype<ForwardPass>(args, begin, end); }

void glu_backward(const GluArgs& args, int64_t begin, int64_t end) { for_dtype<BackwardPass>(args, begin, end); }

}  // namespace memkit::cpu
