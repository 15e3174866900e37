// Rotary position embeddings (Su et al., "RoFormer", 2021): pairs of a head's first `rotary` elements are turned by angles that
// grow with the position. Pairs are (i, i + rotary / 2), or neighbours where interleaved.
//
//   first' = first cos a - second sin a,    second' = second cos b + first sin b
//
// Tables that hold each angle once have a = b; those that hold it twice, a column for each element, are taken at their word.
// The gradient turns back: the transpose of the same.
#pragma once

#include "arguments.h"

namespace memkit {

template <class T>
struct RotaryPair {
  T first, second;
};

template <bool back, class T>
MEMKIT_FN RotaryPair<T> rotate(T first, T second, T cos_a, T sin_a, T cos_b, T sin_b) {
  if constexpr (back) return {first * cos_a + second * sin_b, second * cos_b - first * sin_a};
  return {first * cos_a - second * sin_a, second * cos_b + first * sin_b};
}

// Heads of one tensor: strides in elements; a head's own elements are neighbours. `out` may be `x`.
struct RotaryHeads {
  const void* x = nullptr;
  void* out = nullptr;
  int64_t heads = 0;
  int64_t batch = 0, head = 0, step = 0;              // strides of x
  int64_t out_batch = 0, out_head = 0, out_step = 0;  // and of out
};

// One call on the heads of q and of k, of which either may have none.
struct RotaryArgs {
  Dtype dtype = Dtype::float32, table_dtype = Dtype::float32;
  int64_t batch = 0, length = 0, width = 0, rotary = 0;
  bool interleaved = false, back = false;
  bool heads_outside = false;  // the order of work, as memory lies: batch, head, position; else batch, position, head
  RotaryHeads q, k;
  // Row p of sample b: tables + b * table_batch + p * table_row; the angles of pair i at i * pair and i * pair + other.
  const void* cos = nullptr;
  const void* sin = nullptr;
  int64_t table_batch = 0, table_row = 0, table_rows = 0, pair = 1, other = 0;
  const int64_t* positions = nullptr;  // the rows; null: the position in the sequence
  int64_t position_batch = 0, position_step = 0;

  int64_t rows() const { return batch * length * (q.heads + k.heads); }
};

// One head at one position: where it lies, and the first angle.
struct RotaryRow {
  const RotaryHeads* heads;
  int64_t from, to, table, position;
};

MEMKIT_FN RotaryRow rotary_row(const RotaryArgs& args, int64_t b, int64_t head, int64_t step) {
  const bool second = head >= args.q.heads;
  const RotaryHeads& heads = second ? args.k : args.q;
  const int64_t h = second ? head - args.q.heads : head;
  const int64_t position = args.positions ? args.positions[b * args.position_batch + step * args.position_step] : step;
  return {&heads, b * heads.batch + h * heads.head + step * heads.step,
          b * heads.out_batch + h * heads.out_head + step * heads.out_step,
          b * args.table_batch + position * args.table_row, position};
}

}  // namespace memkit
