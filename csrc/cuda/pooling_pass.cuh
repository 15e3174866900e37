// What a thread does in max pooling, without CUDA's runtime: a test plays the threads on the CPU.
//
// There are several passes, which give the same results; the first that fits a call is taken. Where the window is one that
// networks have, its sizes are known when compiled, and a thread makes several results, or gradients, from whole words.
// There is one for anything, an element a thread. Nothing is divided but by a Divisor.
#pragma once

#include "../formulas/pooling.h"
#include "access.cuh"
#include "bias.cuh"

namespace memkit::cuda {

// As Divisor, for int32_t >= 0: floor(n m / 2^(31+s)).
struct SmallDivisor {
  int32_t value = 1;
  uint32_t multiplier = 1u << 31;
  int shift = 31;

  SmallDivisor() = default;
  explicit SmallDivisor(int64_t by) : value(int32_t(by)) {
    while (int64_t(1) << (shift - 31) < by) ++shift;
    multiplier = uint32_t(((uint64_t(1) << shift) + uint64_t(by) - 1) / uint64_t(by));
  }

  MEMKIT_FN int32_t divide(int32_t n) const { return int32_t(uint64_t(uint32_t(n)) * multiplier >> shift); }
};

template <class I>
using PoolDivisor = std::conditional_t<sizeof(I) == 4, SmallDivisor, Divisor>;

// A PoolAxis in the type that places within a plane are computed in.
template <class I>
struct PoolLine {
  I size, results, kernel, stride, padding, dilation;
  PoolDivisor<I> by_stride, by_dilation;

  explicit PoolLine(const PoolAxis& axis)
      : size(I(axis.size)),
        results(I(axis.results)),
        kernel(I(axis.kernel)),
        stride(I(axis.stride)),
        padding(I(axis.padding)),
        dilation(I(axis.dilation)),
        by_stride(axis.stride),
        by_dilation(axis.dilation) {}

  MEMKIT_FN I begin(I r) const { return r * stride - padding; }
  MEMKIT_FN I low(I begin) const {  // seldom steps: cheaper than a division
    I k = 0;
    while (begin + k * dilation < 0) ++k;
    return k;
  }

  // The results whose windows may have an element, [first, last], and its place there, or -1.
  MEMKIT_FN I first(I element) const {
    const I before = element + padding - (kernel - 1) * dilation;
    return before <= 0 ? 0 : by_stride.divide(before + stride - 1);
  }
  MEMKIT_FN I last(I element) const {
    const I r = by_stride.divide(element + padding);
    return r < results ? r : results - 1;
  }
  MEMKIT_FN I place(I element, I r) const {
    const I across = element - begin(r), k = by_dilation.divide(across);
    return k * dilation == across ? k : -1;
  }
};

// A call as the kernels want it. A thread has an item: there are tall x across x deep in a plane.
template <class I>
struct PoolCall {
  PoolArgs args;
  PoolLine<I> rows, columns;
  I channels;
  Divisor plane;
  PoolDivisor<I> row, column;
  int64_t items;

  PoolCall(const PoolArgs& args, int64_t tall, int64_t across, int64_t deep)
      : args(args),
        rows(args.rows),
        columns(args.columns),
        channels(I(args.channels)),
        plane(tall * across * deep),
        row(across * deep),
        column(deep),
        items(args.planes * tall * across * deep) {}

  struct Item {
    int64_t plane;
    I row, column, channel;
  };
  MEMKIT_FN Item item(int64_t i) const {
    Item at;
    at.plane = plane.divide(i);
    I rest = I(i - at.plane * plane.value);
    at.row = row.divide(rest), rest -= at.row * row.value;
    at.column = column.divide(rest), at.channel = rest - at.column * column.value;
    return at;
  }
  MEMKIT_FN int64_t picture(const Item& at) const {
    return at.plane * (args.rows.size * args.columns.size * args.channels);
  }
  MEMKIT_FN int64_t results(const Item& at) const {
    return at.plane * (args.rows.results * args.columns.results * args.channels);
  }
};

template <int n, class P, class I>
MEMKIT_FN void pool_store_places(const I (&places)[n], P* to) {
  if constexpr (n == 1) {
    *to = P(places[0]);
  } else {
    using Bytes = typename Access<n>::type;
    static_assert(sizeof(P) == 1 && (n == 4 || n == 8));
    uint32_t four[n / 4];
    MEMKIT_UNROLL
    for (int k = 0; k < n; k += 4)
      four[k / 4] = uint32_t(places[k]) | uint32_t(places[k + 1]) << 8 | uint32_t(places[k + 2]) << 16 |
                    uint32_t(places[k + 3]) << 24;
    Bytes bytes = four[0];
    if constexpr (n == 8) bytes |= uint64_t(four[1]) << 32;
    *reinterpret_cast<Bytes*>(to) = bytes;
  }
}

// Outside of a picture: never larger than what has been seen.
template <class S>
MEMKIT_FN S pool_nothing() {
  using T = typename ComputeType<S>::type;
  S pair[2];
  narrow(T(-INFINITY), T(0), pair);
  return pair[0];
}

// Whether a thread may compute with 32 bits within a plane. All that is added to a place fits with it.
inline bool is_pool_small(const PoolArgs& args) {
  constexpr int64_t most = int64_t(1) << 30;
  const auto extent = [](const PoolAxis& axis) { return axis.size + 2 * axis.padding; };
  for (const PoolAxis* axis : {&args.rows, &args.columns})
    if (axis->stride >= most || axis->dilation >= most) return false;
  return !args.wide && extent(args.rows) < most && extent(args.columns) < most && args.channels < most &&
         extent(args.rows) * extent(args.columns) < most / args.channels;
}

// Windows whose kind is known when compiled. Elements and results count from those of a tile: its first element is a
// multiple of `stride`, its first result that multiple. The results whose windows may have one of n elements are
// [first, last(n)].
template <int Kernel, int Stride, int Padding>
struct PoolWindow {
  static constexpr int kernel = Kernel, stride = Stride, padding = Padding;
  static constexpr int first = -((kernel - 1 - padding) / stride);
  MEMKIT_FN static constexpr int last(int n) { return (n - 1 + padding) / stride; }
  MEMKIT_FN static constexpr int place(int element, int result) { return element + padding - result * stride; }
  MEMKIT_FN static constexpr bool has(int element, int result) {
    return place(element, result) >= 0 && place(element, result) < kernel;
  }

  static bool is(const PoolAxis& axis) {
    return axis.kernel == kernel && axis.stride == stride && axis.padding == padding && axis.dilation == 1;
  }
  static bool is(const PoolArgs& args) { return is(args.rows) && is(args.columns) && is_pool_small(args); }
};

// -- forward

// n neighbouring results of a row.
template <class S, class W, int n>
struct MaxPoolForwardRow {
  using T = typename ComputeType<S>::type;
  using I = int32_t;
  // Of a row a thread reads these in words; `padding` before them and what comes after one by one.
  static constexpr int within = n * W::stride, after = W::kernel - W::stride - W::padding;
  static constexpr int width = W::padding + within + (after > 0 ? after : 0);

  static bool fits(const PoolArgs& args) {
    return W::is(args) && args.channels == 1 && args.columns.results % n == 0 &&
           args.columns.results * W::stride == args.columns.size && is_aligned_for<S, within>(args.x) &&
           is_aligned_for<S, n>(args.out) && is_aligned_for<uint8_t, n>(args.places);
  }
  static PoolCall<I> call(const PoolArgs& args) { return {args, args.rows.results, args.columns.results / n, 1}; }

  MEMKIT_FN static void run(const PoolCall<I>& call, int64_t i) {
    const auto at = call.item(i);
    const I size = call.columns.size, x = at.column * within, y = at.row * W::stride - W::padding;
    const S* picture = static_cast<const S*>(call.args.x) + call.picture(at);
    S raw[W::kernel][width];
    MEMKIT_UNROLL
    for (int k = 0; k < W::kernel; ++k) {
      MEMKIT_UNROLL
      for (int o = 0; o < width; ++o) raw[k][o] = pool_nothing<S>();
      if (uint32_t(y + k) >= uint32_t(call.rows.size)) continue;
      const S* row = picture + ((y + k) * size + x);
      load_raw<within>(row, raw[k] + W::padding);
      MEMKIT_UNROLL
      for (int o = 0; o < W::padding; ++o)
        if (x > 0) raw[k][o] = row[o - W::padding];
      MEMKIT_UNROLL
      for (int o = W::padding + within; o < width; ++o)
        if (x + o - W::padding < size) raw[k][o] = row[o - W::padding];
    }
    T value[n];
    I place[n];
    const I top = (y < 0 ? -y : 0) * W::kernel;
    MEMKIT_UNROLL
    for (int j = 0; j < n; ++j) {
      constexpr I p = W::padding;
      value[j] = T(-INFINITY);
      place[j] = top + (j * W::stride < p && x == 0 ? p - j * W::stride : 0);
    }
    MEMKIT_UNROLL
    for (int k = 0; k < W::kernel; ++k) {
      MEMKIT_UNROLL
      for (int j = 0; j < n; ++j) {
        Largest<T> largest(place[j], value[j]);
        MEMKIT_UNROLL
        for (int l = 0; l < W::kernel; ++l) largest.see(widen(raw[k][j * W::stride + l]), k * W::kernel + l);
        value[j] = largest.value, place[j] = largest.place;
      }
    }
    const int64_t to = call.results(at) + (at.row * call.columns.results + at.column * n);
    store_values(value, static_cast<S*>(call.args.out) + to);
    pool_store_places<n>(place, static_cast<uint8_t*>(call.args.places) + to);
  }
};

// n channels of a result, of windows of Kernel x Kernel, or any where that is 0.
template <class S, class P, class I, int Kernel, int n>
struct MaxPoolForward {
  using T = typename ComputeType<S>::type;

  static bool fits(const PoolArgs& args) {
    if (args.wide != (sizeof(P) == 4) || args.channels % n != 0) return false;
    if (Kernel > 0 && (args.rows.kernel != Kernel || args.columns.kernel != Kernel)) return false;
    return is_aligned_for<S, n>(args.x) && is_aligned_for<S, n>(args.out) && is_aligned_for<P, n>(args.places) &&
           (sizeof(I) == 8 || is_pool_small(args));
  }
  static PoolCall<I> call(const PoolArgs& args) {
    return {args, args.rows.results, args.columns.results, args.channels / n};
  }

  MEMKIT_FN static void run(const PoolCall<I>& call, int64_t i) {
    const auto at = call.item(i);
    const PoolLine<I>&rows = call.rows, &columns = call.columns;
    const I y = rows.begin(at.row), x = columns.begin(at.column), top = rows.low(y), left = columns.low(x);
    const S* plane = static_cast<const S*>(call.args.x) + call.picture(at) + at.channel * n;
    T value[n];
    int32_t place[n];
    MEMKIT_UNROLL
    for (int c = 0; c < n; ++c) value[c] = T(-INFINITY), place[c] = int32_t(top * columns.kernel + left);
    const auto see = [&](const S* raw, int32_t where) {
      MEMKIT_UNROLL
      for (int c = 0; c < n; ++c) {
        Largest<T> largest(place[c], value[c]);
        largest.see(widen(raw[c]), where);
        value[c] = largest.value, place[c] = largest.place;
      }
    };
    if constexpr (Kernel > 0) {
      S raw[Kernel * Kernel][n];
      MEMKIT_UNROLL
      for (int k = 0; k < Kernel; ++k) {
        MEMKIT_UNROLL
        for (int l = 0; l < Kernel; ++l) {
          const I b = y + k * rows.dilation, a = x + l * columns.dilation;
          MEMKIT_UNROLL
          for (int c = 0; c < n; ++c) raw[k * Kernel + l][c] = pool_nothing<S>();
          if (b >= 0 && b < rows.size && a >= 0 && a < columns.size)
            load_raw<n>(plane + (b * columns.size + a) * call.channels, raw[k * Kernel + l]);
        }
      }
      MEMKIT_UNROLL
      for (int k = 0; k < Kernel * Kernel; ++k) see(raw[k], k);
    } else {
      for (I k = top, b = y + k * rows.dilation; k < rows.kernel && b < rows.size; ++k, b += rows.dilation)
        for (I l = left, a = x + l * columns.dilation; l < columns.kernel && a < columns.size;
             ++l, a += columns.dilation) {
          S raw[n];
          load_raw<n>(plane + (b * columns.size + a) * call.channels, raw);
          see(raw, int32_t(k * columns.kernel + l));
        }
    }
    const int64_t to = call.results(at) + (at.row * columns.results + at.column) * call.channels + at.channel * n;
    store_values(value, static_cast<S*>(call.args.out) + to);
    pool_store_places<n>(place, static_cast<P*>(call.args.places) + to);
  }
};

// -- backward: the gradient of an element is that of the results whose windows it lies in and is the largest of, the first
// result first, as the CPU adds them.

constexpr uint8_t kPoolNowhere = 0xff;  // a place in no window that is known when compiled

// n neighbouring elements of `stride` neighbouring rows. All such tiles lie in the windows of the same results around
// them, at places that are known when compiled.
template <class S, class W, int n>
struct MaxPoolBackwardRow {
  using T = typename ComputeType<S>::type;
  using I = int32_t;
  // Of a row of results a thread reads these in words; `before` of them and what comes after one by one.
  static constexpr int within = n / W::stride, before = -W::first;
  static constexpr int width = before + W::last(n) + 1;
  static constexpr int tall = W::last(W::stride) - W::first + 1;

  static bool fits(const PoolArgs& args) {
    return W::is(args) && args.channels == 1 && args.columns.size % n == 0 &&
           args.columns.results * W::stride == args.columns.size && is_aligned_for<S, within>(args.x) &&
           is_aligned_for<S, n>(args.out) && is_aligned_for<uint8_t, within>(args.places);
  }
  static PoolCall<I> call(const PoolArgs& args) {
    return {args, (args.rows.size + W::stride - 1) / W::stride, args.columns.size / n, 1};
  }

  MEMKIT_FN static void run(const PoolCall<I>& call, int64_t i) {
    const auto at = call.item(i);
    const I results = call.columns.results, first = at.column * within;
    const S* grads = static_cast<const S*>(call.args.x) + call.results(at);
    const uint8_t* places = static_cast<const uint8_t*>(call.args.places) + call.results(at);
    S grad[tall][width];
    uint8_t place[tall][width];
    MEMKIT_UNROLL
    for (int e = 0; e < tall; ++e) {
      MEMKIT_UNROLL
      for (int d = 0; d < width; ++d) grad[e][d] = S(), place[e][d] = kPoolNowhere;
      const I r = at.row + e + W::first;
      if (uint32_t(r) >= uint32_t(call.rows.results)) continue;
      const I from = r * results + first;
      load_raw<within>(grads + from, grad[e] + before);
      load_raw<within>(places + from, place[e] + before);
      MEMKIT_UNROLL
      for (int d = 0; d < width; ++d) {
        if (d >= before && d < before + within) continue;
        if (d < before ? first == 0 : first + d - before >= results) continue;
        grad[e][d] = grads[from + d - before], place[e][d] = places[from + d - before];
      }
    }
    MEMKIT_UNROLL
    for (int k = 0; k < W::stride; ++k) {
      const I y = at.row * W::stride + k;
      T sum[n];
      MEMKIT_UNROLL
      for (int j = 0; j < n; ++j) {
        sum[j] = 0;
        MEMKIT_UNROLL
        for (int e = 0; e < tall; ++e) {
          MEMKIT_UNROLL
          for (int d = 0; d < width; ++d) {
            if (!W::has(k, e + W::first) || !W::has(j, d + W::first)) continue;
            if (place[e][d] == W::place(k, e + W::first) * W::kernel + W::place(j, d + W::first))
              sum[j] += widen(grad[e][d]);
          }
        }
      }
      if (y < call.rows.size)
        store_values(sum, static_cast<S*>(call.args.out) + call.picture(at) + (y * call.columns.size + at.column * n));
    }
  }
};

// n channels of `stride` x `stride` elements.
template <class S, class W, int n>
struct MaxPoolBackwardTile {
  using T = typename ComputeType<S>::type;
  using I = int32_t;
  static constexpr int tall = W::last(W::stride) - W::first + 1;

  static bool fits(const PoolArgs& args) {
    return W::is(args) && args.channels % n == 0 && is_aligned_for<S, n>(args.x) && is_aligned_for<S, n>(args.out) &&
           is_aligned_for<uint8_t, n>(args.places);
  }
  static PoolCall<I> call(const PoolArgs& args) {
    return {args, (args.rows.size + W::stride - 1) / W::stride, (args.columns.size + W::stride - 1) / W::stride,
            args.channels / n};
  }

  MEMKIT_FN static void run(const PoolCall<I>& call, int64_t i) {
    const auto at = call.item(i);
    const I channel = at.channel * n;
    const S* grads = static_cast<const S*>(call.args.x) + call.results(at) + channel;
    const uint8_t* places = static_cast<const uint8_t*>(call.args.places) + call.results(at) + channel;
    S grad[tall][tall][n];
    uint8_t place[tall][tall][n];
    MEMKIT_UNROLL
    for (int e = 0; e < tall; ++e) {
      MEMKIT_UNROLL
      for (int d = 0; d < tall; ++d) {
        MEMKIT_UNROLL
        for (int c = 0; c < n; ++c) grad[e][d][c] = S(), place[e][d][c] = kPoolNowhere;
        const I r = at.row + e + W::first, s = at.column + d + W::first;
        if (uint32_t(r) >= uint32_t(call.rows.results) || uint32_t(s) >= uint32_t(call.columns.results)) continue;
        const I from = (r * call.columns.results + s) * call.channels;
        load_raw<n>(grads + from, grad[e][d]);
        load_raw<n>(places + from, place[e][d]);
      }
    }
    MEMKIT_UNROLL
    for (int k = 0; k < W::stride; ++k) {
      MEMKIT_UNROLL
      for (int l = 0; l < W::stride; ++l) {
        const I y = at.row * W::stride + k, x = at.column * W::stride + l;
        T sum[n];
        MEMKIT_UNROLL
        for (int c = 0; c < n; ++c) {
          sum[c] = 0;
          MEMKIT_UNROLL
          for (int e = 0; e < tall; ++e) {
            MEMKIT_UNROLL
            for (int d = 0; d < tall; ++d) {
              if (!W::has(k, e + W::first) || !W::has(l, d + W::first)) continue;
              if (place[e][d][c] == W::place(k, e + W::first) * W::kernel + W::place(l, d + W::first))
                sum[c] += widen(grad[e][d][c]);
            }
          }
        }
        if (y < call.rows.size && x < call.columns.size)
          store_values(sum, static_cast<S*>(call.args.out) + call.picture(at) + channel +
                                (y * call.columns.size + x) * call.channels);
      }
    }
  }
};

// n channels of an element, of any windows.
template <class S, class P, class I, int n>
struct MaxPoolBackward {
  using T = typename ComputeType<S>::type;

  static bool fits(const PoolArgs& args) {
    return args.wide == (sizeof(P) == 4) && args.channels % n == 0 && is_aligned_for<S, n>(args.x) &&
           is_aligned_for<S, n>(args.out) && is_aligned_for<P, n>(args.places) &&
           (sizeof(I) == 8 || is_pool_small(args));
  }
  static PoolCall<I> call(const PoolArgs& args) { return {args, args.rows.size, args.columns.size, args.channels / n}; }

  MEMKIT_FN static void run(const PoolCall<I>& call, int64_t i) {
    const auto at = call.item(i);
    const PoolLine<I>&rows = call.rows, &columns = call.columns;
    const int64_t results = call.results(at) + at.channel * n;
    const I bottom = rows.last(at.row), left = columns.first(at.column), right = columns.last(at.column);
    T sum[n] = {};
    for (I r = rows.first(at.row); r <= bottom; ++r) {
      const I k = rows.place(at.row, r);
      if (k < 0) continue;
      MEMKIT_ROLL  // seldom more than two
          for (I c = left; c <= right; ++c) {
        const I l = columns.place(at.column, c);
        if (l < 0) continue;
        const int64_t one = results + (r * columns.results + c) * call.channels;
        S grad[n];
        P place[n];
        load_raw<n>(static_cast<const S*>(call.args.x) + one, grad);
        load_raw<n>(static_cast<const P*>(call.args.places) + one, place);
        MEMKIT_UNROLL
        for (int m = 0; m < n; ++m)
          if (I(place[m]) == k * columns.kernel + l) sum[m] += widen(grad[m]);
      }
    }
    store_values(sum, static_cast<S*>(call.args.out) + call.picture(at) + at.channel * n +
                          (at.row * columns.size + at.column) * call.channels);
  }
};

// -- the pass of a call

template <class Pass, class... Others>
struct PoolPasses {
  template <class F>
  static auto with_first_fit(const PoolArgs& args, const F& run) {
    if constexpr (sizeof...(Others) == 0)
      return run(Pass());
    else
      return Pass::fits(args) ? run(Pass()) : PoolPasses<Others...>::with_first_fit(args, run);
  }
};

using Pool2 = PoolWindow<2, 2, 0>;            // VGG
using Pool3 = PoolWindow<3, 2, 1>;            // ResNet
using Pool3Inside = PoolWindow<3, 2, 0>;      // AlexNet, GoogLeNet
using Pool3Everywhere = PoolWindow<3, 1, 1>;  // Inception

template <class S>
struct MaxPoolPasses {
  static constexpr int n = sizeof(Word) / sizeof(S);
  using Forward = PoolPasses<MaxPoolForwardRow<S, Pool2, n>, MaxPoolForwardRow<S, Pool3, n>,
                             MaxPoolForwardRow<S, Pool3Inside, n>, MaxPoolForwardRow<S, Pool3Everywhere, n>,
                             MaxPoolForwardRow<S, Pool2, 4>, MaxPoolForwardRow<S, Pool3, 4>,
                             MaxPoolForwardRow<S, Pool3Inside, 4>, MaxPoolForwardRow<S, Pool3Everywhere, 4>,
                             MaxPoolForward<S, uint8_t, int32_t, 2, n>, MaxPoolForward<S, uint8_t, int32_t, 3, n>,
                             MaxPoolForward<S, uint8_t, int32_t, 0, n>, MaxPoolForward<S, uint8_t, int32_t, 2, 1>,
                             MaxPoolForward<S, uint8_t, int32_t, 3, 1>, MaxPoolForward<S, uint8_t, int32_t, 0, 1>,
                             MaxPoolForward<S, uint8_t, int64_t, 0, 1>, MaxPoolForward<S, int32_t, int64_t, 0, 1>>;
  using Backward = PoolPasses<MaxPoolBackwardRow<S, Pool2, 8>, MaxPoolBackwardRow<S, Pool3, 8>,
                              MaxPoolBackwardRow<S, Pool3Inside, 8>, MaxPoolBackwardRow<S, Pool3Everywhere, 8>,
                              MaxPoolBackwardTile<S, Pool2, n>, MaxPoolBackwardTile<S, Pool3, n>,
                              MaxPoolBackwardTile<S, Pool3Inside, n>, MaxPoolBackwardTile<S, Pool3Everywhere, n>,
                              MaxPoolBackwardTile<S, Pool2, 1>, MaxPoolBackwardTile<S, Pool3, 1>,
                              MaxPoolBackwardTile<S, Pool3Inside, 1>, MaxPoolBackwardTile<S, Pool3Everywhere, 1>,
                              MaxPoolBackward<S, uint8_t, int32_t, n>, MaxPoolBackward<S, uint8_t, int32_t, 1>,
                              MaxPoolBackward<S, uint8_t, int64_t, 1>, MaxPoolBackward<S, int32_t, int64_t, 1>>;
};
template <>
struct MaxPoolPasses<double> {
  using Forward =
      PoolPasses<MaxPoolForward<double, uint8_t, int32_t, 0, 1>, MaxPoolForward<double, uint8_t, int64_t, 0, 1>,
                 MaxPoolForward<double, int32_t, int64_t, 0, 1>>;
  using Backward =
      PoolPasses<MaxPoolBackward<double, uint8_t, int32_t, 1>, MaxPoolBackward<double, uint8_t, int64_t, 1>,
                 MaxPoolBackward<double, int32_t, int64_t, 1>>;
};

}  // namespace memkit::cuda
