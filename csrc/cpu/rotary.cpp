// Loops over the rotation: a head at a time, its pairs in chunks.
#include "rotary.h"

#include <algorithm>

#include "chunks.h"

namespace memkit::cpu {
namespace {

constexpr int64_t kPairs = 512;

// The angles of pairs [first, first + n): where they lie, or widened; kept while the next head wants the same.
template <class Lanes, class T>
struct Angles {
  const RotaryArgs& args;
  int64_t table = -1, first = -1;
  const T *cos_a = nullptr, *sin_a = nullptr, *cos_b = nullptr, *sin_b = nullptr;
  T space[4][kPairs];

  MEMKIT_FN explicit Angles(const RotaryArgs& args) : args(args) {}

  MEMKIT_FN void load(int64_t row, int64_t pair, int64_t n) {
    if (row == table && pair == first) return;
    table = row, first = pair;
    const int64_t a = row + pair * args.pair, b = a + args.other;
    if (args.pair == 1) {
      cos_a = read<Lanes>(args.cos, args.table_dtype, a, n, space[0]);
      sin_a = read<Lanes>(args.sin, args.table_dtype, a, n, space[1]);
      cos_b = args.other ? read<Lanes>(args.cos, args.table_dtype, b, n, space[2]) : cos_a;
      sin_b = args.other ? read<Lanes>(args.sin, args.table_dtype, b, n, space[3]) : sin_a;
    } else {
      apart(args.cos, a, n, space[0], space[2]);
      apart(args.sin, a, n, space[1], space[3]);
      cos_a = space[0], sin_a = space[1], cos_b = space[2], sin_b = space[3];
    }
  }

 private:
  // A column an element, neighbours being pairs.
  MEMKIT_FN void apart(const void* from, int64_t at, int64_t n, T* even, T* odd) const {
    T both[2 * kPairs];
    const T* x = read<Lanes>(from, args.table_dtype, at, 2 * n, both);
    MEMKIT_LOOP
    for (int64_t i = 0; i < n; ++i) even[i] = x[2 * i], odd[i] = x[2 * i + 1];
  }
};

template <class T, bool back>
struct Rotary {
  template <class Lanes>
  struct Body {
    // The pairs of a chunk, neighbours or apart; `y` may be `x`.
    MEMKIT_FN static void turn(const Angles<Lanes, T>& angles, const T* x, const T* x2, T* y, T* y2, int64_t n) {
      const T *ca = angles.cos_a, *sa = angles.sin_a, *cb = angles.cos_b, *sb = angles.sin_b;
      MEMKIT_LOOP
      for (int64_t i = 0; i < n; ++i) {
        const RotaryPair<T> turned = rotate<back>(x[i], x2[i], ca[i], sa[i], cb[i], sb[i]);
        y[i] = turned.first, y2[i] = turned.second;
      }
    }
    MEMKIT_FN static void turn_neighbours(const Angles<Lanes, T>& angles, const T* x, T* y, int64_t n) {
      const T *ca = angles.cos_a, *sa = angles.sin_a, *cb = angles.cos_b, *sb = angles.sin_b;
      MEMKIT_LOOP
      for (int64_t i = 0; i < n; ++i) {
        const RotaryPair<T> turned = rotate<back>(x[2 * i], x[2 * i + 1], ca[i], sa[i], cb[i], sb[i]);
        y[2 * i] = turned.first, y[2 * i + 1] = turned.second;
      }
    }

    MEMKIT_FN static void head(const RotaryArgs& args, const RotaryRow& row, Angles<Lanes, T>& angles) {
      T one[2 * kPairs], two[kPairs], out[2 * kPairs], out2[kPairs];
      const void* const from = row.heads->x;
      void* const to = row.heads->out;
      const int64_t pairs = args.rotary / 2;
      for (int64_t first = 0; first < pairs; first += kPairs) {
        const int64_t n = std::min(kPairs, pairs - first);
        angles.load(row.table, first, n);
        if (args.interleaved) {
          const T* x = read<Lanes>(from, args.dtype, row.from + 2 * first, 2 * n, one);
          T* y = place(to, args.dtype, row.to + 2 * first, out);
          turn_neighbours(angles, x, y, n);
          written<Lanes>(y, to, args.dtype, row.to + 2 * first, 2 * n);
        } else {
          const T* x = read<Lanes>(from, args.dtype, row.from + first, n, one);
          const T* x2 = read<Lanes>(from, args.dtype, row.from + pairs + first, n, two);
          T* y = place(to, args.dtype, row.to + first, out);
          T* y2 = place(to, args.dtype, row.to + pairs + first, out2);
          turn(angles, x, x2, y, y2, n);
          written<Lanes>(y, to, args.dtype, row.to + first, n);
          written<Lanes>(y2, to, args.dtype, row.to + pairs + first, n);
        }
      }
    }

    MEMKIT_FN static void run(const RotaryArgs& args, int64_t begin, int64_t end) {
      Angles<Lanes, T> angles(args);
      const int64_t heads = args.q.heads + args.k.heads, bytes = size_of(args.dtype);
      const int64_t inner = args.heads_outside ? args.length : heads, outer = args.heads_outside ? heads : args.length;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t low = i % inner, high = i / inner % outer, b = i / inner / outer;
        const RotaryRow row = rotary_row(args, b, args.heads_outside ? high : low, args.heads_outside ? low : high);
        head(args, row, angles);
        if (args.width == args.rotary || row.heads->x == row.heads->out) continue;
        std::memcpy(static_cast<char*>(row.heads->out) + (row.to + args.rotary) * bytes,
                    static_cast<const char*>(row.heads->x) + (row.from + args.rotary) * bytes,
                    size_t((args.width - args.rotary) * bytes));
      }
    }
  };
};

template <class T>
void run(const RotaryArgs& args, int64_t begin, int64_t end) {
  if (args.back) return Compiled<Rotary<T, true>::template Body, has_v4<T>>::run(args, begin, end);
  Compiled<Rotary<T, false>::template Body, has_v4<T>>::run(args, begin, end);
}

}  // namespace

void rotary(const RotaryArgs& args, int64_t begin, int64_t end) {
  return args.dtype == Dtype::float64 ? run<double>(args, begin, end) : run<float>(args, begin, end);
}

}  // namespace memkit::cpu
