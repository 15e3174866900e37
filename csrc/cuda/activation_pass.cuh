// What a warp does with one tile in each of the three passes, without CUDA's runtime: a test plays the lanes on the CPU.
#pragma once

#include "bias.cuh"
#include "drop.cuh"
#include "tile.cuh"

namespace memkit::cuda {

// A call as the kernels want it: of one dtype and checked for alignment.
struct Call {
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

// Each pass reads a lane's values, all of them before it writes one, so that `out` may be `x` or `grad`.

template <class Op, class S>
struct Forward {
  using T = typename ComputeType<S>::type;
  using Tile = cuda::Tile<S, 2>;

  template <class Peer>
  MEMKIT_FN static void run(const Call& call, const Op& op, const Tile& tile, Peer&& peer) {
    T x[Tile::values];
    tile.load(call.x, x);
    if (call.bias.data) add_bias(tile, call.bias, x);
    if constexpr (Op::branch) {
      if (call.bits) {
        unsigned sides = 0;
        MEMKIT_UNROLL
        for (int k = 0; k < Tile::values; ++k) sides |= unsigned(op.right(x[k])) << k;
        tile.store_bits(sides, call.bits, peer);
      }
    }
    MEMKIT_UNROLL
    for (int k = 0; k < Tile::values; ++k) x[k] = op.value(x[k]);
    if (call.drop.seed) drop_values(tile, call.drop, x);
    if (call.residual) {
      T other[Tile::values];
      tile.load(call.residual, other);
      MEMKIT_UNROLL
      for (int k = 0; k < Tile::values; ++k) x[k] += other[k];
    }
    tile.store(x, call.out);
  }
};

template <class Op, class S>
struct BackwardFromInput {
  using T = typename ComputeType<S>::type;
  using Tile = cuda::Tile<S, 1>;

  template <class Peer>
  MEMKIT_FN static void run(const Call& call, const Op& op, const Tile& tile, Peer&&) {
    T x[Tile::values], grad[Tile::values];
    tile.load(call.x, x);
    tile.load(call.grad, grad);
    if (call.drop.seed) drop_gradients(tile, call.drop, grad);
    if (call.bias.data) add_bias(tile, call.bias, x);
    MEMKIT_UNROLL
    for (int k = 0; k < Tile::values; ++k) grad[k] = gradient_at_input(op, grad[k], x[k]);
    tile.store(grad, call.out);
  }
};

template <class Op, class S>
struct BackwardFromOutput {
  using T = typename ComputeType<S>::type;
  using Tile = cuda::Tile<S, 1>;

  template <class Peer>
  MEMKIT_FN static void run(const Call& call, const Op& op, const Tile& tile, Peer&&) {
    T y[Tile::values], grad[Tile::values];
    tile.load(call.x, y);
    tile.load(call.grad, grad);
    if (call.drop.seed) {
      drop_gradients(tile, call.drop, grad);
      const T unscale = T(1 / call.drop.scale);  // what dropout kept is the activation's output times `scale`
      MEMKIT_UNROLL
      for (int k = 0; k < Tile::values; ++k) y[k] *= unscale;
    }
    if constexpr (Op::branch) {
      const unsigned sides = tile.load_bits(call.bits);
      MEMKIT_UNROLL
      for (int k = 0; k < Tile::values; ++k) grad[k] = gradient_at_output(op, grad[k], y[k], bool(sides >> k & 1u));
    } else {
      MEMKIT_UNROLL
      for (int k = 0; k < Tile::values; ++k) grad[k] = gradient_at_output(op, grad[k], y[k]);
    }
    tile.store(grad, call.out);
  }
};

}  // namespace memkit::cuda
