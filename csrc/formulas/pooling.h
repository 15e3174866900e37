// Max pooling, and where in its window each maximum was found: all that backward needs.
#pragma once

#include <cmath>

#include "arguments.h"

namespace memkit {

// One direction. The window of result r has the elements begin(r) + k dilation, k in [0, kernel), that lie in [0, size).
struct PoolAxis {
  int64_t size = 0, results = 0, kernel = 1, stride = 1, padding = 0, dilation = 1;

  MEMKIT_FN int64_t begin(int64_t r) const { return r * stride - padding; }
  // Those are k in [low, high). There is one.
  MEMKIT_FN int64_t low(int64_t r) const { return begin(r) < 0 ? (dilation - 1 - begin(r)) / dilation : 0; }
  MEMKIT_FN int64_t high(int64_t r) const {
    const int64_t most = (size - 1 - begin(r)) / dilation + 1;
    return most < kernel ? most : kernel;
  }
};

// Memory is [planes, rows, columns, channels]; channels is 1 where each channel has planes of its own.
struct PoolArgs {
  Dtype dtype = Dtype::float32;
  int64_t planes = 0, channels = 1;
  PoolAxis rows, columns;
  const void* x = nullptr;  // forward: the input; backward: the gradient of the results
  void* out = nullptr;      // forward: the results; backward: the gradient of the input
  void* places = nullptr;   // of each result: k of its row times columns.kernel, plus k of its column
  bool wide = false;        // places are int32_t, else uint8_t

  int64_t kernel() const { return rows.kernel * columns.kernel; }
  int64_t results() const { return planes * rows.results * columns.results * channels; }
};

// The largest of the elements seen, and its place: the window's first where all are -infinity. As stock has it, NaN is
// largest: the last of several.
template <class T, class Place = int32_t>
struct Largest {
  T value;
  Place place;

  MEMKIT_FN explicit Largest(Place first, T value = -INFINITY) : value(value), place(first) {}
  MEMKIT_FN bool is_less(T x) const { return (x > value) | (x != x); }
  MEMKIT_FN void see(T x, Place at) {
    const bool more = is_less(x);
    value = more ? x : value;
    place = more ? at : place;
  }
};

}  // namespace memkit
