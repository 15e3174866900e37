// What a warp does with one tile in each of the three passes, without CUDA's runtime: a test plays the lanes on the CPU.
#pragma once

#include <type_traits>

#include "bias.cuh"
#include "drop.cuh"
#include "tile.cuh"

namespace memkit::cuda {

// A call as the kernels want it: of one dtype and checked for alignment.
struct Call {
  Act act = Act::identity;
  ActParams params;
  const void* x = nullptr;
  const void* grad = nullptr;
  void* out = nullptr;
  uint8_t* bits = nullptr;
  int64_t numel = 0;
  int64_t tiles = 0;
  bool aligned = false;
  BiasPlan bias;
  Drop drop;
  const void* residual = nullptr;

  template <class Tile>
  static Call of(const ActivationArgs& args) {
    const auto address = reinterpret_cast<uintptr_t>(args.x) | reinterpret_cast<uintptr_t>(args.grad) |
                         reinterpret_cast<uintptr_t>(args.out) | reinterpret_cast<uintptr_t>(args.residual);
    Call call;
    call.act = args.act;
    call.params = args.params;
    call.x = args.x;
    call.grad = args.grad;
    call.out = args.out;
    call.bits = args.bits;
    call.numel = args.numel;
    call.tiles = tile_count<Tile>(args.numel);
    call.aligned = address % 16 == 0;
    call.bias = BiasPlan(args.bias, Tile::width);
    call.drop = args.drop;
    call.residual = args.residual;
    return call;
  }
};

// What a kernel knows of its calls. Any: nothing, so that it asks once a tile and all threads of a launch answer alike: one
// kernel serves every activation and all that may go with it.
struct Any {
  static constexpr bool bias = true, drop = true, residual = true;
  template <class F, class... Args>
  MEMKIT_FN static auto apply(const Call& call, F&& f, Args&&... args) {
    return visit(call.act, f, call.params, args...);
  }
};

// The formula, and that nothing goes with it but, where `dropped`, dropout: a short kernel of few registers, whose warps each
// do one tile. For a small tensor the way through a kernel counts, and for a large one how many of its threads are resident.
template <template <class, bool> class Formula, bool dropped = false>
struct Only {
  static constexpr bool bias = false, drop = dropped, residual = false;
  template <class F, class... Args>
  MEMKIT_FN static auto apply(const Call& call, F&& f, Args&&... args) {
    return f.template operator()<Formula>(call.params, args...);
  }
};

// The formulas on a lane's values.
template <class S, int n>
struct Lane {
  using T = typename ComputeType<S>::type;
  template <template <class, bool> class Formula>
  using Op = Formula<T, sizeof(S) == 2>;

  // Bit k: x[k] lies right of the minimum, or where the function is active.
  struct Mark {
    template <template <class, bool> class Formula>
    MEMKIT_FN unsigned operator()(const ActParams& params, const T (&x)[n]) const {
      unsigned sides = 0;
      if constexpr (Op<Formula>::branch) {
        const Op<Formula> op(params);
        MEMKIT_UNROLL
        for (int k = 0; k < n; ++k) sides |= unsigned(op.right(x[k])) << k;
      } else if constexpr (has_two_slopes<Op<Formula>>) {
        const Op<Formula> op(params);
        MEMKIT_UNROLL
        for (int k = 0; k < n; ++k) sides |= unsigned(op.active(x[k])) << k;
      }
      return sides;
    }
  };

  struct Value {
    template <template <class, bool> class Formula>
    MEMKIT_FN void operator()(const ActParams& params, T (&x)[n]) const {
      const Op<Formula> op(params);
      MEMKIT_UNROLL
      for (int k = 0; k < n; ++k) x[k] = op.value(x[k]);
    }
  };

  struct GradientAtInput {
    template <template <class, bool> class Formula>
    MEMKIT_FN void operator()(const ActParams& params, const T (&x)[n], T (&grad)[n]) const {
      const Op<Formula> op(params);
      MEMKIT_UNROLL
      for (int k = 0; k < n; ++k) grad[k] = gradient_at_input(op, grad[k], x[k]);
    }
  };

  struct GradientAtOutput {
    template <template <class, bool> class Formula>
    MEMKIT_FN void operator()(const ActParams& params, const T (&y)[n], unsigned sides, T (&grad)[n]) const {
      const Op<Formula> op(params);
      MEMKIT_UNROLL
      for (int k = 0; k < n; ++k) {
        if constexpr (Op<Formula>::branch)
          grad[k] = gradient_at_output(op, grad[k], y[k], bool(sides >> k & 1u));
        else
          grad[k] = gradient_at_output(op, grad[k], y[k]);
      }
    }
  };

  struct GradientWhere {
    template <template <class, bool> class Formula>
    MEMKIT_FN void operator()(const ActParams& params, unsigned sides, T (&grad)[n]) const {
      if constexpr (has_two_slopes<Op<Formula>>) {
        const Op<Formula> op(params);
        MEMKIT_UNROLL
        for (int k = 0; k < n; ++k) grad[k] = gradient_where(op, grad[k], bool(sides >> k & 1u));
      }
    }
  };
};

// Each pass reads a lane's values, all of them before it writes one, so that `out` may be `x` or `grad`. As many rows as
// keep memory busy with the threads that registers leave resident, and spill none.
template <class S, class Known>
constexpr int kForwardRows = !std::is_same_v<Known, Any> ? 1
                             : sizeof(S) == 2            ? 4
                                                         : 2;
template <class S, class Known>
constexpr int kBackwardRows = sizeof(S) == 8 ? 1 : 2;

template <class S, class K = Any>
struct Forward {
  using Known = K;
  using T = typename ComputeType<S>::type;
  using Tile = cuda::Tile<S, kForwardRows<S, K>>;
  using Lane = cuda::Lane<S, Tile::values>;

  template <class Peer>
  MEMKIT_FN static void run(const Call& call, const Tile& tile, Peer&& peer) {
    T x[Tile::values];
    tile.load(call.x, x);
    if (Known::bias && call.bias.data) add_bias(tile, call.bias, x);
    if (call.bits) tile.store_bits(Known::apply(call, typename Lane::Mark{}, x), call.bits, peer);
    Known::apply(call, typename Lane::Value{}, x);
    if (Known::drop && call.drop.on) drop_values(tile, call.drop, x);
    if (Known::residual && call.residual) {
      T other[Tile::values];
      tile.load(call.residual, other);
      MEMKIT_UNROLL
      for (int k = 0; k < Tile::values; ++k) x[k] += other[k];
    }
    tile.store(x, call.out);
  }
};

template <class S, class K = Any>
struct BackwardFromInput {
  using Known = K;
  using T = typename ComputeType<S>::type;
  using Tile = cuda::Tile<S, kBackwardRows<S, K>>;

  template <class Peer>
  MEMKIT_FN static void run(const Call& call, const Tile& tile, Peer&&) {
    T x[Tile::values], grad[Tile::values];
    tile.load(call.x, x, call.grad, grad);
    if (Known::drop && call.drop.on) drop_gradients(tile, call.drop, grad);
    if (Known::bias && call.bias.data) add_bias(tile, call.bias, x);
    Known::apply(call, typename Lane<S, Tile::values>::GradientAtInput{}, x, grad);
    tile.store(grad, call.out);
  }
};

template <class S, class K = Any>
struct BackwardFromOutput {
  using Known = K;
  using T = typename ComputeType<S>::type;
  using Tile = cuda::Tile<S, kBackwardRows<S, K>>;

  template <class Peer>
  MEMKIT_FN static void run(const Call& call, const Tile& tile, Peer&&) {
    T y[Tile::values], grad[Tile::values];
    const unsigned sides = tile.load(call.x, y, call.grad, grad, call.bits);
    if (Known::drop && call.drop.on) {
      drop_gradients(tile, call.drop, grad);
      const T unscale = T(call.drop.unscale);  // what dropout kept is the activation's output times `scale`
      MEMKIT_UNROLL
      for (int k = 0; k < Tile::values; ++k) y[k] *= unscale;
    }
    Known::apply(call, typename Lane<S, Tile::values>::GradientAtOutput{}, y, sides, grad);
    tile.store(grad, call.out);
  }
};

template <class S, class K = Any>
struct BackwardFromBits {
  using Known = K;
  using T = typename ComputeType<S>::type;
  using Tile = cuda::Tile<S, kBackwardRows<S, K>>;

  template <class Peer>
  MEMKIT_FN static void run(const Call& call, const Tile& tile, Peer&&) {
    T grad[Tile::values];
    tile.load(call.grad, grad);
    if (Known::drop && call.drop.on) drop_gradients(tile, call.drop, grad);
    Known::apply(call, typename Lane<S, Tile::values>::GradientWhere{}, tile.load_bits(call.bits), grad);
    tile.store(grad, call.out);
  }
};

}  // namespace memkit::cuda
