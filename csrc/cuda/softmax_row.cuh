// A thread's part of a row of softmax, without CUDA's runtime: a test plays the threads on the CPU.
#pragma once

#include "../formulas/softmax.h"
#include "row.cuh"

namespace memkit::cuda {

// z of one row; masked: by a mask or causally.
template <class S, bool masked>
struct SoftmaxRow {
  using T = typename ComputeType<S>::type;
  const SoftmaxArgs& args;
  const S* x;
  S* y;
  int64_t mask, seen;
  T scale;

  MEMKIT_FN SoftmaxRow(const SoftmaxArgs& args, int64_t row)
      : args(args),
        x(static_cast<const S*>(args.x) + row * args.columns),
        y(static_cast<S*>(args.y) + row * args.columns),
        mask(!masked || args.mask.kind == SoftmaxMask::Kind::none ? 0 : args.mask.row(row)),
        seen(masked ? args.seen(row) : args.columns),
        scale(T(args.scale)) {}

  MEMKIT_FN T z(T value, int64_t c) const {
    if constexpr (!masked) return value * scale;
    const T none = -std::numeric_limits<T>::infinity();
    if (c >= seen) return none;
    if (args.mask.kind == SoftmaxMask::Kind::boolean)
      return static_cast<const uint8_t*>(args.mask.data)[mask + c] ? value * scale : none;
    return args.mask.kind == SoftmaxMask::Kind::additive ? value * scale + added(mask + c) : value * scale;
  }

 private:
  MEMKIT_FN T added(int64_t i) const {
    if constexpr (sizeof(T) == 8) {
      return static_cast<const double*>(args.mask.data)[i];
    } else {
      if (args.mask.dtype == Dtype::float32) return static_cast<const float*>(args.mask.data)[i];
      if (args.mask.dtype == Dtype::float16) return widen(static_cast<const Half*>(args.mask.data)[i]);
      return widen(static_cast<const Bfloat*>(args.mask.data)[i]);
    }
  }
};

// The outputs of a row; in float32 the quotient is rounded once.
template <class S, bool log>
struct SoftmaxEnd : SoftmaxOutput<typename ComputeType<S>::type, log> {
  using T = typename ComputeType<S>::type;
  static constexpr bool exact = std::is_same<S, float>::value;
  RowSum<S> sum;

  MEMKIT_FN SoftmaxEnd(T largest, const RowSum<S>& sum, bool masked)
      : SoftmaxOutput<T, log>(largest, sum.high, masked), sum(sum) {
    if constexpr (log && exact) this->last += select(sum.high > T(0), sum.rest() / sum.high, T(0));
  }

  // From e^(z - pivot), or from z for the logarithm.
  MEMKIT_FN T finish(T z) const {
    const T y = SoftmaxOutput<T, log>::finish(z);
    if constexpr (!log && exact) return y + this->last * (std::fma(-y, sum.high, z) - y * sum.rest());
    return y;
  }
  MEMKIT_FN T value(T z) const {
    if constexpr (log) return finish(z);
    return finish(row_exp<S>(z - this->pivot));
  }
};

// A row in the registers of its threads, W words and one element in each. What is kept of an element is z, then
// e^(z - pivot); or, of half the width and many words, the element as it was loaded: more of a row, and another exponential.
template <class S, int W, bool log, bool masked>
struct SoftmaxHeld {
  using T = typename ComputeType<S>::type;
  static constexpr int width = RowWalk<S>::width;
  static constexpr bool wide = masked || sizeof(S) > 2 || W <= 2;

  SoftmaxRow<S, masked> row;
  RowWalk<S> walk;
  int thread, threads, single;
  RowWords<S, W> words;
  T kept[wide ? W : 1][width], kept_single;

  // real: else a row that is not there.
  MEMKIT_FN SoftmaxHeld(const SoftmaxArgs& args, int64_t i, bool real, int thread, int threads)
      : row(args, real ? i : 0),
        walk(row.x, row.y, real ? args.columns : 0),
        thread(thread),
        threads(threads),
        single(int(walk.single(thread))) {}

  MEMKIT_FN bool has(int w) const { return thread + w * threads < int(walk.words); }
  MEMKIT_FN int element(int w) const { return int(walk.head) + (thread + w * threads) * width; }

  MEMKIT_FN void z(int w, T (&values)[width]) const {
    if constexpr (wide) {
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) values[k] = kept[w][k];
    } else {
      words.values(w, values);
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) values[k] = row.z(values[k], 0);
    }
  }

  // The largest of this thread's z.
  MEMKIT_FN T load() {
    words.load(row.x, walk, thread, threads, masked ? walk.words_before(row.seen) : walk.words);
    const S first = single >= 0 && (!masked || single < row.seen) ? row.x[single] : S{};
    T most = -std::numeric_limits<T>::infinity();
    kept_single = single >= 0 ? row.z(widen(first), single) : most;
    most = std::fmax(most, kept_single);
    MEMKIT_UNROLL
    for (int w = 0; w < W; ++w) {
      if (!has(w)) continue;
      T values[width];
      if constexpr (wide) {
        words.values(w, values);
        MEMKIT_UNROLL
        for (int k = 0; k < width; ++k) kept[w][k] = values[k] = row.z(values[k], element(w) + k);
      } else {
        z(w, values);
      }
      most = std::fmax(most, largest_of(values));
    }
    return most;
  }

  // The sum of this thread's exponentials.
  MEMKIT_FN RowSum<S> sum(T pivot) {
    if constexpr (!wide) words.stay_narrow();
    RowSum<S> total;
    if (single >= 0) {
      const T e = row_exp<S>(kept_single - pivot);
      total.add(e);
      if constexpr (!log) kept_single = e;
    }
    MEMKIT_UNROLL
    for (int w = 0; w < W; ++w) {
      if (!has(w)) continue;
      T values[width];
      z(w, values);
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) {
        values[k] = row_exp<S>(values[k] - pivot);
        if constexpr (wide && !log) kept[w][k] = values[k];
      }
      total.add_all(values);
    }
    return total;
  }

  MEMKIT_FN void write(const SoftmaxEnd<S, log>& end) {
    if constexpr (!wide) words.stay_narrow();
    if (single >= 0) store_value(end.finish(kept_single), row.y + single);
    MEMKIT_UNROLL
    for (int w = 0; w < W; ++w) {
      if (!has(w)) continue;
      T values[width];
      z(w, values);
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) values[k] = wide ? end.finish(values[k]) : end.value(values[k]);
      store_values(values, row.y + element(w));
    }
  }
};

// The walks of a row that is not held: over the columns seen, for their state; over all, to write.
template <class S, int W, bool masked>
struct SoftmaxLook {
  using T = typename ComputeType<S>::type;
  static constexpr int width = RowWalk<S>::width;
  const SoftmaxRow<S, masked>& row;
  const RowWalk<S>& walk;
  int threads;
  SoftmaxState<T> state = {};

  MEMKIT_FN void one(int64_t c) {
    const T z = row.z(widen(row.x[c]), c);
    state.raise(z);
    state.add(z);
  }
  MEMKIT_FN void batch(int64_t i) {
    RowWords<S, W> words;
    words.load(row.x, walk, i, threads, walk.words);
    T z[W][width], most = state.largest;
    MEMKIT_UNROLL
    for (int w = 0; w < W; ++w) {
      words.values(w, z[w]);
      const int64_t at = i + w * threads, c = walk.element(at);
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k)
        z[w][k] = at < walk.words ? row.z(z[w][k], c + k) : -std::numeric_limits<T>::infinity();
      most = std::fmax(most, largest_of(z[w]));
    }
    if (most > state.largest) state.raise(most);
    const T pivot = softmax_pivot(state.largest);
    MEMKIT_UNROLL
    for (int w = 0; w < W; ++w) {
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) z[w][k] = row_exp<S>(z[w][k] - pivot);
      state.sum += sum_of(z[w]);
    }
  }
};

template <class S, int W, bool log, bool masked>
struct SoftmaxWrite {
  using T = typename ComputeType<S>::type;
  static constexpr int width = RowWalk<S>::width;
  const SoftmaxRow<S, masked>& row;
  const RowWalk<S>& walk;
  int threads;
  SoftmaxEnd<S, log> end;

  MEMKIT_FN void one(int64_t c) const { store_value(end.value(row.z(widen(row.x[c]), c)), row.y + c); }
  MEMKIT_FN void batch(int64_t i) const {
    RowWords<S, W> words;
    words.load(row.x, walk, i, threads, walk.words);
    MEMKIT_UNROLL
    for (int w = 0; w < W; ++w) {
      const int64_t at = i + w * threads, c = walk.element(at);
      if (at >= walk.words) continue;
      T z[width];
      words.values(w, z);
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) z[k] = end.value(row.z(z[k], c + k));
      store_values(z, row.y + c);
    }
  }
};

// The backward of one row.
template <class S, bool log>
struct SoftmaxBack {
  using T = typename ComputeType<S>::type;
  const S* grad;
  const S* y;
  S* out;
  SoftmaxGradient<T, log> gradient;

  MEMKIT_FN SoftmaxBack(const SoftmaxArgs& args, int64_t first)
      : grad(static_cast<const S*>(args.grad) + first),
        y(static_cast<const S*>(args.y) + first),
        out(static_cast<S*>(args.grad_input) + first),
        gradient(args) {}

  // Over all three; words only where they lie alike: else one of the walks has a head alone.
  MEMKIT_FN RowWalk<S> walk(int64_t columns) const {
    const RowWalk<S> reading(grad, y, columns), writing(grad, out, columns);
    return reading.head < writing.head ? writing : reading;
  }

  MEMKIT_FN static void add(RowSum<S>& sum, T g, T y) {
    if constexpr (log)
      sum.add(g);
    else
      sum.add_product(g, y);
  }
  MEMKIT_FN T value(T g, T y, const RowSum<S>& sum) const {
    if constexpr (std::is_same<S, float>::value) {
      if constexpr (!log) return gradient.value(g - sum.high, y, sum.rest());
      g -= exp_falling(y) * sum.rest();
    }
    return gradient.value(g, y, sum.high);
  }

  // The walks of a row that is not held.
  template <int W>
  struct Sum {
    static constexpr int width = RowWalk<S>::width;
    const SoftmaxBack& back;
    const RowWalk<S>& walk;
    int threads;
    RowSum<S> sum = {};

    MEMKIT_FN void one(int64_t c) { add(sum, widen(back.grad[c]), widen(back.y[c])); }
    MEMKIT_FN void batch(int64_t i) {
      RowWords<S, W> gs, ys;
      gs.load(back.grad, walk, i, threads, walk.words);
      ys.load(back.y, walk, i, threads, walk.words);
      words(gs, ys, i);
    }
    template <class I>
    MEMKIT_FN void words(const RowWords<S, W>& gs, const RowWords<S, W>& ys, I i) {
      MEMKIT_UNROLL
      for (int w = 0; w < W; ++w) {
        if (I(i + w * threads) >= I(walk.words)) continue;
        T g[width], y[width];
        gs.values(w, g);
        if constexpr (!log) {
          ys.values(w, y);
          MEMKIT_UNROLL
          for (int k = 0; k < width; ++k) g[k] = sum.product_of(g[k], y[k]);
        }
        sum.add_all(g);
      }
    }
  };
  template <int W>
  struct Write {
    static constexpr int width = RowWalk<S>::width;
    const SoftmaxBack& back;
    const RowWalk<S>& walk;
    int threads;
    RowSum<S> sum;

    MEMKIT_FN void one(int64_t c) const {
      store_value(back.value(widen(back.grad[c]), widen(back.y[c]), sum), back.out + c);
    }
    MEMKIT_FN void batch(int64_t i) const {
      RowWords<S, W> gs, ys;
      gs.load(back.grad, walk, i, threads, walk.words);
      ys.load(back.y, walk, i, threads, walk.words);
      words(gs, ys, i);
    }
    template <class I>
    MEMKIT_FN void words(const RowWords<S, W>& gs, const RowWords<S, W>& ys, I i) const {
      MEMKIT_UNROLL
      for (int w = 0; w < W; ++w) {
        const I at = i + w * threads;
        if (at >= I(walk.words)) continue;
        T g[width], y[width];
        gs.values(w, g);
        ys.values(w, y);
        MEMKIT_UNROLL
        for (int k = 0; k < width; ++k) g[k] = back.value(g[k], y[k], sum);
        store_values(g, back.out + walk.element(at));
      }
    }
  };
};

}  // namespace memkit::cuda
