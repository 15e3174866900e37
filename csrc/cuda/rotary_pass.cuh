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
  int64_t turning = 0, items = 0;          // items of a row that turn; of all rows
  bool wide = false, table_words = false;  // table_words: angles of the elements' dtype, neighbours in aligned words

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
    call.table_words = args.table_dtype == args.dtype && args.pair == 1 && tables % sizeof(Word) == 0 &&
                       (args.table_batch | args.table_row | args.other) % word == 0;
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

// An angle's cosine or sine, of whatever dtype.
template <class T>
MEMKIT_FN T angle(const void* table, Dtype dtype, int64_t i) {
  if constexpr (sizeof(T) == 8) {
    return static_cast<const double*>(table)[i];
  } else {
    if (dtype == Dtype::float32) return static_cast<const float*>(table)[i];
    if (dtype == Dtype::float16) return widen(static_cast<const Half*>(table)[i]);
    return widen(static_cast<const Bfloat*>(table)[i]);
  }
}

// n neighbouring elements; wide: they are one word.
template <class S, int n, bool wide>
struct Elements {
  using T = typename ComputeType<S>::type;
  T x[n];

  Elements() = default;
  MEMKIT_FN explicit Elements(Word word) {
    S raw[n];
    static_assert(sizeof(raw) == sizeof(word));
    std::memcpy(raw, &word, sizeof(word));
    MEMKIT_UNROLL
    for (int k = 0; k < n; ++k) x[k] = widen(raw[k]);
  }

  MEMKIT_FN void load(const void* from, int64_t at) {
    const S* source = static_cast<const S*>(from) + at;
    if constexpr (wide) {
      *this = Elements(*reinterpret_cast<const Word*>(source));
    } else {
      MEMKIT_UNROLL
      for (int k = 0; k < n; ++k) x[k] = widen(source[k]);
    }
  }

  MEMKIT_FN void store(void* to, int64_t at) const {
    S* target = static_cast<S*>(to) + at;
    S raw[n == 1 ? 2 : n];
    if constexpr (n == 1) {
      narrow(x[0], T(0), raw);
      *target = raw[0];
    } else {
      narrow_all(x, raw);
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

// Pairs of neighbours, or pairs apart; wide: words of them; table_words: of angles too.
template <class S, bool interleaved, bool wide, bool back, bool table_words = false>
struct RotaryPass {
  using T = typename ComputeType<S>::type;
  static constexpr int word = sizeof(Word) / sizeof(S);
  static constexpr int pairs = !wide ? 1 : interleaved ? word / 2 : word;

  MEMKIT_FN static RotaryPair<T> turn(const RotaryArgs& args, int64_t table, int64_t pair, T first, T second) {
    const int64_t a = table + pair * args.pair, b = a + args.other;
    const T cos_a = angle<T>(args.cos, args.table_dtype, a), sin_a = angle<T>(args.sin, args.table_dtype, a);
    if (args.other == 0) return rotate<back>(first, second, cos_a, sin_a, cos_a, sin_a);
    return rotate<back>(first, second, cos_a, sin_a, angle<T>(args.cos, args.table_dtype, b),
                        angle<T>(args.sin, args.table_dtype, b));
  }

  // A word of pairs apart by words of angles, which are all asked for before the first is used.
  MEMKIT_FN static void turn_words(const RotaryCall& call, const RotaryRow& row, int64_t pair) {
    const RotaryArgs& args = call.args;
    const int64_t apart = args.rotary / 2, a = row.table + pair;
    const auto load = [](const void* from, int64_t at) {
      return *reinterpret_cast<const Word*>(static_cast<const S*>(from) + at);
    };
    const Word raw_first = load(row.heads->x, row.from + pair),
               raw_second = load(row.heads->x, row.from + apart + pair);
    const Word raw_cos_a = load(args.cos, a), raw_sin_a = load(args.sin, a);
    Word raw_cos_b = raw_cos_a, raw_sin_b = raw_sin_a;
    if (args.other != 0) raw_cos_b = load(args.cos, a + args.other), raw_sin_b = load(args.sin, a + args.other);
    Elements<S, word, true> first(raw_first), second(raw_second);
    const Elements<S, word, true> cos_a(raw_cos_a), sin_a(raw_sin_a), cos_b(raw_cos_b), sin_b(raw_sin_b);
    MEMKIT_UNROLL
    for (int k = 0; k < word; ++k) {
      const auto turned = rotate<back>(first.x[k], second.x[k], cos_a.x[k], sin_a.x[k], cos_b.x[k], sin_b.x[k]);
      first.x[k] = turned.first, second.x[k] = turned.second;
    }
    first.store(row.heads->out, row.to + pair);
    second.store(row.heads->out, row.to + apart + pair);
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
      MEMKIT_UNROLL
      for (int k = 0; k < pairs; ++k) {
        const RotaryPair<T> turned = turn(args, row.table, pair + k, x.x[2 * k], x.x[2 * k + 1]);
        x.x[2 * k] = turned.first, x.x[2 * k + 1] = turned.second;
      }
      x.store(to, row.to + 2 * pair);
    } else if constexpr (table_words) {
      turn_words(call, row, pair);
    } else {
      const int64_t apart = args.rotary / 2;
      Elements<S, pairs, wide> x, x2;
      x.load(from, row.from + pair);
      x2.load(from, row.from + apart + pair);
      MEMKIT_UNROLL
      for (int k = 0; k < pairs; ++k) {
        const RotaryPair<T> turned = turn(args, row.table, pair + k, x.x[k], x2.x[k]);
        x.x[k] = turned.first, x2.x[k] = turned.second;
      }
      x.store(to, row.to + pair);
      x2.store(to, row.to + apart + pair);
    }
  }
};

}  // namespace memkit::cuda
