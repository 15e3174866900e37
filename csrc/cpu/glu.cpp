// Loops over the gated units: a block of each operand where it lies, or widened in the first-level cache, computed and narrowed.
#include "glu.h"

#include <algorithm>

#include "chunks.h"
#include "values.h"

namespace memkit::cpu {
namespace {

// Elements of an operand `step` apart, at most a block of them.
template <class Lanes, class T>
struct Operand {
  MEMKIT_FN static const T* read(const void* x, Dtype dtype, int64_t at, int64_t step, T* block, int64_t n) {
    if (step == 1) return cpu::read<Lanes>(x, dtype, at, n, block);
    T space[2 * kBlock];
    const T* both = cpu::read<Lanes>(x, dtype, at, 2 * n - 1, space);  // the last one's neighbour may be beyond the end
    for (int64_t i = 0; i < n; ++i) block[i] = both[2 * i];
    return block;
  }

  // Where to compute what is then `written`.
  MEMKIT_FN static T* place(void* x, Dtype dtype, int64_t at, int64_t step, T* block) {
    return step == 1 ? cpu::place(x, dtype, at, block) : block;
  }
  MEMKIT_FN static void written(const T* block, void* x, Dtype dtype, int64_t at, int64_t step, int64_t n) {
    if (step == 1) return cpu::written<Lanes>(block, x, dtype, at, n);
    if constexpr (std::is_same_v<T, double>) {
      spread(block, static_cast<double*>(x) + at, n);
    } else {
      with_storage(dtype, [&](auto stored) MEMKIT_INLINE {
        decltype(stored) dense[kBlock];
        Lanes::narrow(block, dense, n);
        spread(dense, static_cast<decltype(stored)*>(x) + at, n);
      });
    }
  }

 private:
  template <class S>
  MEMKIT_FN static void spread(const S* dense, S* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[2 * i] = dense[i];
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

template <class Op, class T>
struct Glu {
  template <class Lanes>
  struct Forward {
    MEMKIT_FN static void run(const GluArgs& args, int64_t begin, int64_t end) {
      using Side = Operand<Lanes, T>;
      const Op op(ActParams{});
      for_runs(args, begin, end, [&](int64_t at, int64_t dense, int64_t n) MEMKIT_INLINE {
        T gates[kBlock], ups[kBlock];
        const T* gate = Side::read(args.gate, args.dtype, at, args.step, gates, n);
        const T* up = Side::read(args.up, args.dtype, at, args.step, ups, n);
        T* const y = place(args.out, args.dtype, dense, ups);
        if constexpr (Values<Lanes, Op>::exists) {
          T values[kBlock];
          Values<Lanes, Op>::template write<true>(gate, values, n);
          for_elements<true>(n, [&](int64_t i) MEMKIT_INLINE { y[i] = values[i] * up[i]; }, up, y);
        } else {
          for_elements<true>(n, [&](int64_t i) MEMKIT_INLINE { y[i] = glu_value(op, gate[i], up[i]); }, gate, up, y);
        }
        written<Lanes>(y, args.out, args.dtype, dense, n);
      });
    }
  };

  template <class Lanes>
  struct Backward {
    MEMKIT_FN static void run(const GluArgs& args, int64_t begin, int64_t end) {
      using Side = Operand<Lanes, T>;
      const Op op(ActParams{});
      for_runs(args, begin, end, [&](int64_t at, int64_t dense, int64_t n) MEMKIT_INLINE {
        T gates[kBlock], ups[kBlock], grads[kBlock];
        const T* gate = Side::read(args.gate, args.dtype, at, args.step, gates, n);
        const T* up = Side::read(args.up, args.dtype, at, args.step, ups, n);
        const T* grad = read<Lanes>(args.grad, args.dtype, dense, n, grads);
        T* const grad_gate = Side::place(args.grad_gate, args.dtype, at, args.step, gates);
        T* const grad_up = Side::place(args.grad_up, args.dtype, at, args.step, ups);
        const auto gradients = [&](int64_t i) MEMKIT_INLINE {
          const GluGradients<T> both = glu_gradients(op, grad[i], gate[i], up[i]);
          grad_gate[i] = both.gate;
          grad_up[i] = both.up;
        };
        for_elements<true>(n, gradients, gate, up, grad, grad_gate, grad_up);
        Side::written(grad_gate, args.grad_gate, args.dtype, at, args.step, n);
        Side::written(grad_up, args.grad_up, args.dtype, at, args.step, n);
      });
    }
  };
};

template <template <class, class> class Pass, class T, bool coarse>
struct Run {
  template <template <class, bool> class Formula>
  void operator()(const GluArgs& args, int64_t begin, int64_t end) const {
    Pass<Formula<T, coarse>, T>::run(args, begin, end);
  }
};

template <class Op, class T>
struct ForwardPass : Compiled<Glu<Op, T>::template Forward, has_v4<T>> {};
template <class Op, class T>
struct BackwardPass : Compiled<Glu<Op, T>::template Backward, has_v4<T>> {};

template <template <class, class> class Pass>
void for_dtype(const GluArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case Dtype::float32: return visit_gate(args.act, Run<Pass, float, false>{}, args, begin, end);
    case Dtype::float64: return visit_gate(args.act, Run<Pass, double, false>{}, args, begin, end);
    case Dtype::float16:
    case Dtype::bfloat16: return visit_gate(args.act, Run<Pass, float, true>{}, args, begin, end);
  }
}

}  // namespace

void glu_forward(const GluArgs& args, int64_t begin, int64_t end) { for_dtype<ForwardPass>(args, begin, end); }

void glu_backward(const GluArgs& args, int64_t begin, int64_t end) { for_dtype<BackwardPass>(args, begin, end); }

}  // namespace memkit::cpu
