// What a thread does with an element of max pooling, without CUDA's runtime: a test plays the threads on the CPU.
#pragma once

#include "../formulas/pooling.h"
#include "storage.cuh"

namespace memkit::cuda {

// Where an element of [planes, rows, columns, channels] lies.
struct PoolPlace {
  int64_t plane, row, column, channel;

  MEMKIT_FN PoolPlace(int64_t i, int64_t rows, int64_t columns, int64_t channels) {
    channel = i % channels, i /= channels;
    column = i % columns, i /= columns;
    row = i % rows, plane = i / rows;
  }
};

// Result i.
template <class S, class P>
struct MaxPoolForward {
  using T = typename ComputeType<S>::type;
  static int64_t items(const PoolArgs& args) { return args.results(); }

  MEMKIT_FN static void run(const PoolArgs& args, int64_t i) {
    const PoolAxis &rows = args.rows, &columns = args.columns;
    const PoolPlace at(i, rows.results, columns.results, args.channels);
    const S* plane = static_cast<const S*>(args.x) + at.plane * rows.size * columns.size * args.channels + at.channel;
    const int64_t top = rows.low(at.row), bottom = rows.high(at.row);
    const int64_t left = columns.low(at.column), right = columns.high(at.column);
    Largest<T> largest(int32_t(top * columns.kernel + left));
    S found[2] = {};
    for (int64_t k = top; k < bottom; ++k)
      for (int64_t l = left; l < right; ++l) {
        const int64_t y = rows.begin(at.row) + k * rows.dilation, x = columns.begin(at.column) + l * columns.dilation;
        largest.see(widen(plane[(y * columns.size + x) * args.channels]), int32_t(k * columns.kernel + l));
      }
    narrow(largest.value, T(0), found);
    static_cast<S*>(args.out)[i] = found[0];
    static_cast<P*>(args.places)[i] = P(largest.place);
  }
};

// The gradient of element i: of the results whose windows it lies in, those that it is the largest of.
template <class S, class P>
struct MaxPoolBackward {
  using T = typename ComputeType<S>::type;
  static int64_t items(const PoolArgs& args) {
    return args.planes * args.rows.size * args.columns.size * args.channels;
  }

  // The result in whose window an element is the k-th, or -1.
  MEMKIT_FN static int64_t result(const PoolAxis& axis, int64_t element, int64_t k) {
    const int64_t begin = element + axis.padding - k * axis.dilation;
    if (begin < 0 || begin % axis.stride != 0 || begin / axis.stride >= axis.results) return -1;
    return begin / axis.stride;
  }

  MEMKIT_FN static void run(const PoolArgs& args, int64_t i) {
    const PoolAxis &rows = args.rows, &columns = args.columns;
    const PoolPlace at(i, rows.size, columns.size, args.channels);
    const int64_t results = at.plane * rows.results * columns.results;
    T sum = 0;
    S found[2] = {};
    for (int64_t k = rows.kernel - 1; k >= 0; --k) {  // the first result first, as the CPU adds them
      const int64_t r = result(rows, at.row, k);
      if (r < 0) continue;
      for (int64_t l = columns.kernel - 1; l >= 0; --l) {
        const int64_t c = result(columns, at.column, l);
        if (c < 0) continue;
        const int64_t one = (results + r * columns.results + c) * args.channels + at.channel;
        if (int64_t(static_cast<const P*>(args.places)[one]) == k * columns.kernel + l)
          sum += widen(static_cast<const S*>(args.x)[one]);
      }
    }
    narrow(sum, T(0), found);
    static_cast<S*>(args.out)[i] = found[0];
  }
};

}  // namespace memkit::cuda
