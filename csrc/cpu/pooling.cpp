// Loops over windows: forward, for each place in the window, the neighbouring results that have it; backward, the results.
#include "pooling.h"

#include <algorithm>
#include <vector>

#include "compiled.h"

namespace memkit::cpu {
namespace {

constexpr int64_t kLine = 256;  // results at a time
constexpr int64_t kDeep = 64;   // channels of a unit

// What a line of results has seen; they take neighbours in memory, or every `stride`-th element.
template <class S>
struct Line {
  using T = typename ComputeType<S>::type;
  T value[kLine];
  int32_t place[kLine];

  MEMKIT_FN void clear(int64_t n) {
    for (int64_t i = 0; i < n; ++i) value[i] = 0, place[i] = -1;
  }
  template <int64_t constant>
  MEMKIT_FN void see_every(const S* x, int64_t stride, int64_t first, int64_t n, int32_t at) {
    MEMKIT_LOOP
    for (int64_t i = 0; i < n; ++i) {
      Largest<T> largest{value[first + i], place[first + i]};
      largest.see(to_compute(x[i * (constant ? constant : stride)]), at);
      value[first + i] = largest.value, place[first + i] = largest.place;
    }
  }
  MEMKIT_FN void see(const S* x, int64_t stride, int64_t first, int64_t n, int32_t at) {
    if (stride == 1) return see_every<1>(x, stride, first, n, at);
    if (stride == 2) return see_every<2>(x, stride, first, n, at);
    see_every<0>(x, stride, first, n, at);
  }
  template <class P>
  MEMKIT_FN void put(S* out, P* places, int64_t n) const {
    store(value, out, n);
    for (int64_t i = 0; i < n; ++i) places[i] = P(place[i]);
  }
};

// The results [low, high) of a row that have an element k; result c's is at c stride + offset.
struct Span {
  int64_t low, high, offset;
};

inline std::vector<Span> spans_of(const PoolAxis& axis) {
  std::vector<Span> spans;
  for (int64_t k = 0; k < axis.kernel; ++k) {
    const int64_t offset = k * axis.dilation - axis.padding;
    const int64_t low = offset < 0 ? (-offset + axis.stride - 1) / axis.stride : 0;
    const int64_t high = offset < axis.size ? (axis.size - 1 - offset) / axis.stride + 1 : 0;
    spans.push_back({low, std::min(high, axis.results), offset});
  }
  return spans;
}

template <class S, class P>
struct Forward {
  template <class Lanes>
  struct Body {
    // f(the input's row, its k) for the rows in result r's window.
    template <class F>
    MEMKIT_FN static void rows_of(const PoolArgs& args, const S* plane, int64_t r, const F& f) {
      for (int64_t k = 0; k < args.rows.kernel; ++k) {
        const int64_t y = args.rows.begin(r) + k * args.rows.dilation;
        if (y >= 0 && y < args.rows.size)
          f(plane + y * args.columns.size * args.channels, int32_t(k * args.columns.kernel));
      }
    }

    // Results [first, first + n) of a row.
    MEMKIT_FN static void columns(const PoolArgs& args, const std::vector<Span>& spans, const S* plane, int64_t r,
                                  int64_t first, int64_t n, Line<S>& line) {
      const int64_t stride = args.columns.stride;
      rows_of(args, plane, r, [&](const S* row, int32_t at) MEMKIT_INLINE {
        for (const Span& span : spans) {
          const int64_t from = std::max(span.low, first), to = std::min(span.high, first + n);
          if (from < to) line.see(row + from * stride + span.offset, stride, from - first, to - from, at);
          ++at;
        }
      });
    }

    // Channels [first, first + n) of a result.
    MEMKIT_FN static void channels(const PoolArgs& args, const S* plane, int64_t r, int64_t c, int64_t first, int64_t n,
                                   Line<S>& line) {
      const PoolAxis& axis = args.columns;
      rows_of(args, plane, r, [&](const S* row, int32_t at) MEMKIT_INLINE {
        for (int64_t k = 0; k < axis.kernel; ++k) {
          const int64_t x = axis.begin(c) + k * axis.dilation;
          if (x >= 0 && x < axis.size) line.see(row + x * args.channels + first, 1, 0, n, at + int32_t(k));
        }
      });
    }

    MEMKIT_FN static void run(const PoolArgs& args, int64_t begin, int64_t end) {
      const int64_t plane_size = args.rows.size * args.columns.size * args.channels;
      const int64_t row_size = args.columns.results * args.channels;
      const std::vector<Span> spans = spans_of(args.columns);
      Line<S> line;
      for (int64_t i = begin; i < end; ++i) {
        const S* plane = static_cast<const S*>(args.x) + i / args.rows.results * plane_size;
        const int64_t r = i % args.rows.results;
        S* out = static_cast<S*>(args.out) + i * row_size;
        P* places = static_cast<P*>(args.places) + i * row_size;
        const int64_t width = args.channels == 1 ? row_size : args.channels;
        for (int64_t start = 0; start < row_size; start += width)
          for (int64_t first = 0; first < width; first += kLine) {
            const int64_t n = std::min(kLine, width - first);
            line.clear(n);
            if (args.channels == 1)
              columns(args, spans, plane, r, first, n, line);
            else
              channels(args, plane, r, start / width, first, n, line);
            line.put(out + start + first, places + start + first, n);
          }
      }
    }
  };
};

template <class S, class P>
struct Backward {
  using T = typename ComputeType<S>::type;
  static constexpr bool direct = std::is_same_v<S, T>;

  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const PoolArgs& args, int64_t begin, int64_t end) {
      const PoolAxis &rows = args.rows, &columns = args.columns;
      const int64_t all = args.channels, blocks = (all + kDeep - 1) / kDeep, pixels = rows.size * columns.size;
      std::vector<int64_t> offsets(size_t(args.kernel()));  // from the window's first element, by place
      for (int64_t k = 0; k < args.kernel(); ++k)
        offsets[size_t(k)] = k / columns.kernel * rows.dilation * columns.size + k % columns.kernel * columns.dilation;
      std::vector<T> space;
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t plane = unit / blocks, first = unit % blocks * kDeep, n = std::min(kDeep, all - first);
        S* out = static_cast<S*>(args.out) + plane * pixels * all + first;
        // Sums of what is computed in another type lie together until they are done.
        const int64_t pitch = direct ? all : n;
        T* sums;
        if constexpr (direct) {
          sums = out;
          for (int64_t i = 0; i < pixels; i += pitch == n ? pixels : 1)
            std::fill_n(sums + i * pitch, pitch == n ? pixels * n : n, T(0));
        } else {
          space.assign(size_t(pixels * n), T(0));
          sums = space.data();
        }
        const int64_t results = plane * rows.results * columns.results * all + first;
        const S* grad = static_cast<const S*>(args.x) + results;
        const P* places = static_cast<const P*>(args.places) + results;
        for (int64_t r = 0; r < rows.results; ++r)
          for (int64_t c = 0; c < columns.results; ++c, grad += all, places += all) {
            const int64_t window = rows.begin(r) * columns.size + columns.begin(c);
            for (int64_t i = 0; i < n; ++i)
              sums[(window + offsets[size_t(places[i])]) * pitch + i] += to_compute(grad[i]);
          }
        if constexpr (!direct)
          for (int64_t i = 0; i < pixels; i += all == n ? pixels : 1)
            store(sums + i * n, out + i * all, all == n ? pixels * n : n);
      }
    }
  };
};

template <template <class, class> class Pass>
void run(const PoolArgs& args, int64_t begin, int64_t end) {
  const auto with = [&](auto stored) {
    using S = decltype(stored);
    if (args.wide)
      Compiled<Pass<S, int32_t>::template Body>::run(args, begin, end);
    else
      Compiled<Pass<S, uint8_t>::template Body>::run(args, begin, end);
  };
  switch (args.dtype) {
    case Dtype::float32: return with(float());
    case Dtype::float64: return with(double());
    case Dtype::float16: return with(Half());
    case Dtype::bfloat16: return with(Bfloat());
  }
}

}  // namespace

void max_pool_forward(const PoolArgs& args, int64_t begin, int64_t end) { run<Forward>(args, begin, end); }

int64_t max_pool_units(const PoolArgs& args) { return args.planes * ((args.channels + kDeep - 1) / kDeep); }

void max_pool_backward(const PoolArgs& args, int64_t begin, int64_t end) { run<Backward>(args, begin, end); }

}  // namespace memkit::cpu
