// Loops over windows: forward, some neighbouring results at a time, in registers; backward, the results.
#include "pooling.h"

#include <algorithm>
#include <vector>

#include "compiled.h"

namespace memkit::cpu {
namespace {

constexpr int64_t kDeep = 64;        // channels of a unit
constexpr int64_t kTogether = 16;    // results that are computed together: neighbours in a row, or channels
constexpr int64_t kFew = 3;          // of a row
constexpr int64_t kLine = 256;       // of one line, at most
constexpr int64_t kBand = 8 * 1024;  // elements of a picture that are copied at a time, or one result's rows

template <class S, class P>
struct Forward {
  using T = typename ComputeType<S>::type;
  using Place = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

  // Places [top, bottom) x [left, right) of one with `width` in a row.
  struct Window {
    int64_t top, bottom, left, right, width;
  };

  template <class Lanes>
  struct Body {
    // Some places of n results' windows; n is a multiple of kTogether.
    template <int count>
    MEMKIT_FN static void see(const T* const* elements, const Place* ats, int64_t n, T* value, Place* place) {
      const T* x[count];
      Place at[count];
      for (int k = 0; k < count; ++k) x[k] = elements[k], at[k] = ats[k];
      n = n / kTogether * kTogether;
      MEMKIT_LOOP
      for (int64_t i = 0; i < n; ++i) {
        Largest<T, Place> largest(place[i], value[i]);
        for (int k = 0; k < count; ++k) largest.see(x[k][i], at[k]);
        value[i] = largest.value, place[i] = largest.place;
      }
    }
    // A line of results; first_of(k, l) is the first one's element at that place.
    template <class F>
    MEMKIT_FN static void line(const Window& w, int64_t n, T* value, Place* place, const F& first_of) {
      const T* elements[9];
      Place at[9];
      int m = 0;
      for (int64_t k = w.top; k < w.bottom; ++k)
        for (int64_t l = w.left; l < w.right; ++l) {
          elements[m] = first_of(k, l), at[m] = Place(k * w.width + l);
          if (++m == 9) see<9>(elements, at, n, value, place), m = 0;
        }
      int first = 0;
      for (; first + 4 <= m; first += 4) see<4>(elements + first, at + first, n, value, place);
      for (; first + 2 <= m; first += 2) see<2>(elements + first, at + first, n, value, place);
      if (first < m) see<1>(elements + first, at + first, n, value, place);
    }

    // Of every `stride` pixels the k-th go together, `part` from the next ones: neighbouring results read neighbours then.
    MEMKIT_FN static void split_columns(const T* x, T* to, int64_t part, int64_t n, int64_t stride, int64_t channels) {
      if (stride == 2 && channels == 1) {
        MEMKIT_LOOP
        for (int64_t i = 0; i < n; ++i) to[i] = x[2 * i], to[part + i] = x[2 * i + 1];
        return;
      }
      for (int64_t k = 0; k < stride; ++k)
        for (int64_t i = 0; i < n; ++i)
          for (int64_t c = 0; c < channels; ++c) to[k * part + i * channels + c] = x[(i * stride + k) * channels + c];
    }

    // Where `left` results are left in this share, what is rounded up may be written: the next ones come after.
    MEMKIT_FN static void put(const T* value, const Place* place, S* out, P* places, int64_t n, int64_t left) {
      const int64_t up = (n + kTogether - 1) / kTogether * kTogether;
      if (left >= up) n = up;
      Lanes::narrow(value, out, n);
      int64_t i = 0;
      for (; i + kTogether <= n; i += kTogether) {
        MEMKIT_LOOP
        for (int64_t j = 0; j < kTogether; ++j) places[i + j] = P(place[i + j]);
      }
      for (; i < n; ++i) places[i] = P(place[i]);
    }

    // Where a row has few results: one after the other, with a branch that is seldom taken.
    MEMKIT_FN static void run_few(const PoolArgs& args, int64_t begin, int64_t end) {
      const PoolAxis &rows = args.rows, &columns = args.columns;
      S* out = static_cast<S*>(args.out) + begin * columns.results;
      P* places = static_cast<P*>(args.places) + begin * columns.results;
      std::vector<T> wide;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t r = i % rows.results, top = rows.low(r), bottom = rows.high(r);
        const S* from = static_cast<const S*>(args.x) +
                        (i / rows.results * rows.size + rows.begin(r) + top * rows.dilation) * columns.size;
        const T* picture;
        if constexpr (std::is_same_v<S, T>) {
          picture = from;
        } else {
          wide.resize(size_t(((bottom - top - 1) * rows.dilation + 1) * columns.size));
          Lanes::widen(from, wide.data(), int64_t(wide.size()));
          picture = wide.data();
        }
        for (int64_t c = 0; c < columns.results; ++c) {
          const int64_t left = columns.low(c), right = columns.high(c);
          Largest<T> largest(int32_t(top * columns.kernel + left));
          for (int64_t k = top; k < bottom; ++k) {
            const T* row = picture + (k - top) * rows.dilation * columns.size + columns.begin(c);
            for (int64_t l = left; l < right; ++l) {
              const T x = row[l * columns.dilation];
              if (__builtin_expect(largest.is_less(x), 0)) largest = Largest<T>(int32_t(k * columns.kernel + l), x);
            }
          }
          from_compute(largest.value, *out++);
          *places++ = P(largest.place);
        }
      }
    }

    MEMKIT_FN static void run(const PoolArgs& args, int64_t begin, int64_t end) {
      constexpr bool same = std::is_same_v<S, T>;
      const PoolAxis &rows = args.rows, &columns = args.columns;
      const int64_t channels = args.channels, width = columns.size * channels;
      if (channels == 1 && columns.results < kFew) return run_few(args, begin, end);
      // A line is a row of results, each with all its channels, or, where these are many, one result.
      const bool deep = channels >= kDeep;
      // Lines are computed kTogether results at a time. What the last of them read beyond the others is there in a copy of
      // the rows, in which a row is as wide as its windows and, where these are `stride` apart, every stride-th pixel is
      // next to the one before. A picture of T whose lines are no longer than what they read is read where it is.
      const bool direct = deep && same && channels % kTogether == 0;
      const int64_t stride = deep || columns.results == 1 ? 1 : columns.stride;
      const int64_t wide = std::max(columns.size + columns.padding,
                                    (columns.results - 1) * stride + (columns.kernel - 1) * columns.dilation + 1);
      const int64_t pitch = deep ? width : (wide + stride - 1) / stride * stride * channels,
                    padding = columns.padding * channels;
      const int64_t reach = (rows.kernel - 1) * rows.dilation + 1;
      const int64_t band = direct ? rows.results : 1 + std::max<int64_t>(0, kBand / pitch - reach) / rows.stride;
      const int64_t most = std::min(rows.size, (std::min({band, end - begin, rows.results}) - 1) * rows.stride + reach);
      const bool pads = !deep && (pitch != width || (same && stride == 1)), splits = stride > 1;
      std::vector<T> dense(!same || (deep && !direct) ? size_t(most * width + kTogether) : 0);
      std::vector<T> padded(pads ? size_t(most * pitch + kTogether) : 0, -INFINITY);
      const int64_t part = most * pitch / stride + kTogether;
      std::vector<T> split(splits ? size_t(part * stride) : 0);
      std::vector<int64_t> across;  // from a window's first column to the l-th
      for (int64_t l = 0; l < columns.kernel; ++l) {
        const int64_t x = l * columns.dilation;
        across.push_back(deep ? x * channels : x % stride * part + x / stride * channels);
      }
      std::vector<Place> lefts;  // of each result in a row, the place in its first row
      if (!deep) {
        for (int64_t c = 0; c < columns.results; ++c)
          lefts.insert(lefts.end(), size_t(channels), Place(columns.low(c)));
        lefts.resize(lefts.size() + kTogether);
      }

      S* out = static_cast<S*>(args.out) + begin * columns.results * channels;
      P* places = static_cast<P*>(args.places) + begin * columns.results * channels;
      int64_t left = (end - begin) * columns.results * channels;
      T value[kLine];
      Place place[kLine];
      for (int64_t i = begin, n; i < end; i += n) {
        const int64_t r0 = i % rows.results;
        n = std::min({end - i, rows.results - r0, band});
        const int64_t y0 = std::max<int64_t>(0, rows.begin(r0));
        const int64_t height = std::min(rows.size, rows.begin(r0 + n - 1) + reach) - y0;
        const S* from = static_cast<const S*>(args.x) + (i / rows.results * rows.size + y0) * width;
        const T* picture = dense.data();
        if (!dense.empty()) Lanes::widen(from, dense.data(), height * width);
        if constexpr (same) {
          if (dense.empty()) picture = from;
        }
        if (pads) {
          for (int64_t y = 0; y < height; ++y) {
            const T* row = picture + y * width;
            T* to = padded.data() + y * pitch + padding;
            for (int64_t x = 0; x < width; ++x) to[x] = row[x];
          }
          picture = padded.data();
        }
        if (splits) {
          split_columns(picture, split.data(), part, height * pitch / stride / channels, stride, channels);
          picture = split.data();
        }
        for (int64_t r = r0; r < r0 + n; ++r) {
          Window w = {rows.low(r), rows.high(r), 0, columns.kernel, columns.kernel};
          const T* row = picture + (rows.begin(r) - y0) * pitch / stride;
          const int64_t down = rows.dilation * pitch / stride;
          for (int64_t c = 0; c < (deep ? columns.results : 1); ++c) {
            const int64_t size = deep ? channels : columns.results * channels;
            if (deep) w.left = columns.low(c), w.right = columns.high(c);
            for (int64_t start = 0; start < size; start += kLine) {
              const int64_t m = std::min(kLine, size - start), up = (m + kTogether - 1) / kTogether * kTogether;
              const Place first = Place(w.top * columns.kernel + w.left);
              for (int64_t j = 0; j < up; ++j) value[j] = -INFINITY;
              if (deep) {
                for (int64_t j = 0; j < up; ++j) place[j] = first;
              } else {
                for (int64_t j = 0; j < up; ++j) place[j] = first + lefts[size_t(start + j)];
              }
              const T* corner = row + (deep ? columns.begin(c) * channels : 0) + start;
              line(w, up, value, place,
                   [&](int64_t k, int64_t l) MEMKIT_INLINE { return corner + k * down + across[size_t(l)]; });
              put(value, place, out, places, m, left);
              out += m, places += m, left -= m;
            }
          }
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
      std::vector<T> space, row;  // the sums; a row of the gradient
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t plane = unit / blocks, first = unit % blocks * kDeep, n = std::min(kDeep, all - first);
        S* out = static_cast<S*>(args.out) + plane * pixels * all + first;
        const bool whole = n == all;
        // Sums of what is computed in another type lie together until they are done.
        const int64_t pitch = direct ? all : n;
        T* sums;
        if constexpr (direct) {
          sums = out;
          for (int64_t i = 0; i < pixels; i += pitch == n ? pixels : 1)
            std::fill_n(sums + i * pitch, pitch == n ? pixels * n : n, T(0));
        } else {
          space.assign(size_t(pixels * n), T(0));
          row.resize(size_t(columns.results * n));
          sums = space.data();
        }
        const int64_t results = plane * rows.results * columns.results * all + first;
        const S* grad = static_cast<const S*>(args.x) + results;
        const P* places = static_cast<const P*>(args.places) + results;
        for (int64_t r = 0; r < rows.results; ++r) {
          for (int64_t c = 0; c < (direct ? 0 : columns.results); c += whole ? columns.results : 1)
            Lanes::widen(grad + c * all, row.data() + c * n, whole ? columns.results * n : n);
          for (int64_t c = 0; c < columns.results; ++c, grad += all, places += all) {
            const int64_t window = rows.begin(r) * columns.size + columns.begin(c);
            const T* each;
            if constexpr (direct) {
              each = grad;
            } else {
              each = row.data() + c * n;
            }
            for (int64_t i = 0; i < n; ++i) sums[(window + offsets[size_t(places[i])]) * pitch + i] += each[i];
          }
        }
        if constexpr (!direct)
          for (int64_t i = 0; i < pixels; i += whole ? pixels : 1)
            Lanes::narrow(sums + i * n, out + i * all, whole ? pixels * n : n);
      }
    }
  };
};

template <template <class, class> class Pass>
void run(const PoolArgs& args, int64_t begin, int64_t end) {
  const auto with = [&](auto stored) {
    using S = decltype(stored);
    if (args.wide)
      Compiled<Pass<S, int32_t>::template Body, false>::run(args, begin, end);
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
