// What a thread does with a word of a head, or with a pair of words, without CUDA's runtime: a test plays the threads on the CPU.
#pragma once

#include "../formulas/rotary.h"
#include "bias.cuh"

namespace memkit::cuda {

// A call as the kernels want it. An item is n pairs, n being such that a thread moves 16 bytes at a time where all words are
// aligned, else 1; then come the elements that are only copied, if any, as many in an item.
struct RotaryCall {
  RotaryArgs args;
  Divisor row_items, inner, outer;
  int64_t turning = 0, items = 0;  // items of a row that turn; of all rows
  bool wide = false, table_words = false;

  template <class S>
  static RotaryCall of(const RotaryArgs& args) {
    constexpr int64_t word = sizeof(Word) / sizeof(S);
    RotaryCall call;
    call.args = args;
    call.wide = args.rotary % (args.interleaved ? word : 2 * word) == 0 && args.width % word == 0;
    for (const RotaryHeads* h : {&args.q, &args.k}) {
      const auto address = reinterpret_cast<uintptr_t>(h->x) | reinterpret_cast<uintptr_t>(h->out);
      const int64_t strides = h->batch | h->head | h->step | h->out_batch | h->out_head | h->out_step;
      if (h->heads && (address % sizeof(Word) != 0 || strides % word != 0)) call.wide = false;
    }
    const auto tables = reinterpret_cast<uintptr_t>(args.cos) | reinterpret_cast<uintptr_t>(args.sin);
    const int64_t table_word = int64_t(sizeof(Word)) / size_of(args.table_dtype);
    call.table_words = args.pair == 1 && tables % sizeof(Word) == 0 &&
                       (args.table_batch | args.table_row | args.other) % table_word == 0;
    const bool copies = args.q.x != args.q.out || args.k.x != args.k.out;
    const int64_t pairs = !call.wide ? 1 : args.interleaved ? word / 2 : word;
    call.turning = args.rotary / 2 / pairs;
    const int64_t copied = copies ? (args.width - args.rotary) / (call.wide ? word : 1) : 0;
    const int64_t heads = args.q.heads + args.k.heads;
    call.row_items = Divisor(call.turning + copied);
    call.inner = Divisor(args.heads_outside ? args.length : heads);
    call.outer = Divisor(args.heads_outside ? heads : args.length);
    call.items = args.rows() * call.row_items.value;
    return call;
  }

  MEMKIT_FN RotaryRow row(int64_t i) const {
    const int64_t rest = inner.divide(i), low = i - rest * inner.value;
    const int64_t b = outer.divide(rest), high = rest - b * outer.value;
    return rotary_row(args, b, args.heads_outside ? high : low, args.heads_outside ? low : high);
  }
  MEMKIT_FN bool is_known(int64_t position) const { return uint64_t(position) < uint64_t(args.table_rows); }
};

// Cosines or sines of n angles, of whatever dtype; words: they are neighbours and fill aligned words.
template <class T, int n>
struct Angles {
  T x[n];

  MEMKIT_FN void load(const void* table, Dtype dtype, int64_t at, int64_t step, bool words) {
    if constexpr (sizeof(T) == 8) {
      load<double>(table, at, step, words);
    } else {
      if (dtype == Dtype::float32) return load<float>(table, at, step, words);
      if (dtype == Dtype::float16) return load<Half>(table, at, step, words);
      load<Bfloat>(table, at, step, words);
    }
  }

 private:
  template <class S>
  MEMKIT_FN void load(const void* table, int64_t at, int64_t step, bool words) {
    constexpr int word = sizeof(Word) / sizeof(S);
    const S* source = static_cast<const S*>(table) + at;
    S raw[n];
    if constexpr (n % word == 0) {
      if (words) {
        MEMKIT_UNROLL
        for (int k = 0; k < n; k += word) {
          const Word loaded = *reinterpret_cast<const Word*>(source + k);
          std::memcpy(raw + k, &loaded, sizeof(loaded));
        }
      }
    }
    if (n % word != 0 || !words) {
      MEMKIT_UNROLL
      for (int k = 0; k < n; ++k) raw[k] = source[k * step];
    }
    MEMKIT_UNROLL
    for (int k = 0; k < n; ++k) x[k] = widen(raw[k]);
  }
};

// n neighbouring elements; wide: they are one word.
template <class S, int n, bool wide>
struct Elements {
  using T = typename ComputeType<S>::type;
  T x[n];

  MEMKIT_FN void load(const void* from, int64_t at) {
    const S* source = static_cast<const S*>(from) + at;
    S raw[n];
    if constexpr (wide) {
      const Word word = *reinterpret_cast<const Word*>(source);
      std::memcpy(raw, &word, sizeof(word));
    } else {
      MEMKIT_UNROLL
      for (int k = 0; k < n; ++k) raw[k] = source[k];
    }
    MEMKIT_UNROLL
    for (int k = 0; k < n; ++k) x[k] = widen(raw[k]);
  }

  MEMKIT_FN void store(void* to, int64_t at) const {
    S* target = static_cast<S*>(to) + at;
    S raw[n == 1 ? 2 : n];
    if constexpr (n == 1) {
      narrow(x[0], T(0), raw);
      *target = raw[0];
    } else {
      MEMKIT_UNROLL
      for (int k = 0; k < n; k += 2) narrow(x[k], x[k + 1], raw + k);
      if constexpr (wide) {
        Word word;
        std::memcpy(&word, raw, sizeof(word));
        store_word(word, target);
      } else {
        MEMKIT_UNROLL
        for (int k = 0; k < n; ++k) target[k] = raw[k];
      }
    }
  }
};

// Pairs of neighbours, or pairs apart; wide: words of them.
template <class S, bool interleaved, bool wide, bool back>
struct RotaryPass {
  using T = typename ComputeType<S>::type;
  static constexpr int word = sizeof(Word) / sizeof(S);
  static constexpr int pairs = !wide ? 1 : interleaved ? word / 2 : word;

  // Pairs from one on, first and second elements.
  MEMKIT_FN static void turn(const RotaryCall& call, int64_t table, int64_t pair, T (&first)[pairs],
                             T (&second)[pairs]) {
    const RotaryArgs& args = call.args;
    Angles<T, pairs> cos_a, sin_a;
    const int64_t a = table + pair * args.pair;
    cos_a.load(args.cos, args.table_dtype, a, args.pair, call.table_words);
    sin_a.load(args.sin, args.table_dtype, a, args.pair, call.table_words);
    Angles<T, pairs> cos_b = cos_a, sin_b = sin_a;
    if (args.other != 0) {
      cos_b.load(args.cos, args.table_dtype, a + args.other, args.pair, call.table_words);
      sin_b.load(args.sin, args.table_dtype, a + args.other, args.pair, call.table_words);
    }
    MEMKIT_UNROLL
    for (int k = 0; k < pairs; ++k) {
      const auto turned = rotate<back>(first[k], second[k], cos_a.x[k], sin_a.x[k], cos_b.x[k], sin_b.x[k]);
      first[k] = turned.first, second[k] = turned.second;
    }
  }

  // Item `part` of a row.
  MEMKIT_FN static void run(const RotaryCall& call, const RotaryRow& row, int64_t part) {
    const RotaryArgs& args = call.args;
    const void* const from = row.heads->x;
    void* const to = row.heads->out;
    if (part >= call.turning) {
      constexpr int n = wide ? word : 1;
      const int64_t at = args.rotary + (part - call.turning) * n;
      Elements<S, n, wide> copied;
      copied.load(from, row.from + at);
      copied.store(to, row.to + at);
      return;
    }
    const int64_t pair = part * pairs;
    if constexpr (interleaved) {
      Elements<S, 2 * pairs, wide> x;
      x.load(from, row.from + 2 * pair);
      T first[pairs], second[pairs];
      MEMKIT_UNROLL
      for (int k = 0; k < pairs; ++k) first[k] = x.x[2 * k], second[k] = x.x[2 * k + 1];
      turn(call, row.table, pair, first, second);
      MEMKIT_UNROLL
      for (int k = 0; k < pairs; ++k) x.x[2 * k] = first[k], x.x[2 * k + 1] = second[k];
      x.store(to, row.to + 2 * pair);
    } else {
      const int64_t apart = args.rotary / 2;
      Elements<S, pairs, wide> x, x2;
      x.load(from, row.from + pair);
      x2.load(from, row.from + apart + pair);
      turn(call, row.table, pair, x.x, x2.x);
      x.store(to, row.to + pair);
      x2.store(to, row.to + apart + pair);
    }
  }
};

}  // namespace memkit::cuda
