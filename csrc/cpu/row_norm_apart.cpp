// A block of rows that lie side by side at a time, column after column of it, so that all loops run over neighbours. A block
// stays in the cache between the passes: forward two for the moments and one for the result, backward one for the sums over
// the rows and one for the gradients. Half dtypes are converted once, and columns that would share few lines of the cache
// copied.
#include "row_norm_apart.h"

#include <algorithm>
#include <memory>

#include "affine.h"
#include "reductions.h"

namespace memkit::cpu {
namespace {

constexpr int64_t kMost = 256;        // rows side by side
constexpr int64_t kElements = 32768;  // of a block
constexpr int64_t kShared = 1024;     // bytes: columns a multiple of this apart share lines of the cache
constexpr int64_t kWhole = 64;        // no vector is longer
constexpr int64_t kGroup = 16;        // columns added up at a time: a sum of many in T would lose digits

// How many rows of so many columns go together.
MEMKIT_FN int64_t together(int64_t columns) { return std::clamp(kElements / columns / 32 * 32, int64_t(32), kMost); }

// The block of rows from one on, at most as many as go together and none of the next `inner`.
struct Block {
  int64_t rows, at;

  MEMKIT_FN Block(const RowNormArgs& args, int64_t row, int64_t end) {
    const int64_t outer = row / args.inner, place = row % args.inner;
    rows = std::min({together(args.columns), args.inner - place, end - row});
    at = outer * args.inner * args.columns + place;
  }
};

// The columns of a block as arrays of T.
template <class Lanes, class T>
class Columns {
 public:
  MEMKIT_FN Columns(const RowNormArgs& args, const void* array, Dtype dtype)
      : args_(args), array_(array), dtype_(dtype) {
    const bool shares = args.inner * int64_t(sizeof(T)) % kShared == 0;
    if (size_of(dtype) != sizeof(T) || shares) space_.reset(new T[args.columns * together(args.columns)]);
  }

  MEMKIT_FN void take(const Block& block) {
    at_ = block.at;
    rows_ = block.rows;
    if (!space_) return;
    for (int64_t c = 0; c < args_.columns; ++c) {
      T* const to = space_.get() + c * rows_;
      const T* const from = read<Lanes>(array_, dtype_, at_ + c * args_.inner, rows_, to);
      if (from != to) std::copy_n(from, rows_, to);
    }
  }
  MEMKIT_FN const T* operator[](int64_t c) const {
    return space_ ? space_.get() + c * rows_ : static_cast<const T*>(array_) + at_ + c * args_.inner;
  }

 private:
  const RowNormArgs& args_;
  const void* array_;
  Dtype dtype_;
  int64_t at_ = 0, rows_ = 0;
  std::unique_ptr<T[]> space_;
};

// f(c, to) for each column, which is to write what goes into the array there.
template <class Lanes, class T, class F>
MEMKIT_FN void write_columns(const RowNormArgs& args, const Block& block, void* array, Dtype dtype, const F& f) {
  T space[kMost];
  for (int64_t c = 0; c < args.columns; ++c) {
    const int64_t at = block.at + c * args.inner;
    T* const to = place(array, dtype, at, space);
    f(c, to);
    written<Lanes>(to, array, dtype, at, block.rows);
  }
}

// Two sums over the columns for each row of a block.
template <class T>
struct RowSums {
  T a[kMost + kWhole], b[kMost + kWhole];

  // f(c, a, b) adds what column c has.
  template <class F>
  MEMKIT_FN void over(int64_t columns, int64_t rows, const F& f) {
    clear(*this, rows);
    RowSums part;
    for (int64_t first = 0; first < columns; first += kGroup) {
      clear(part, rows);
      for (int64_t c = first; c < std::min(first + kGroup, columns); ++c) f(c, part.a, part.b);
      MEMKIT_LOOP
      for (int64_t r = 0; r < rows; ++r) a[r] += part.a[r], b[r] += part.b[r];
    }
  }

 private:
  MEMKIT_FN static void clear(RowSums& sums, int64_t rows) {
    std::fill_n(sums.a, rows + kWhole, T(0));
    std::fill_n(sums.b, rows + kWhole, T(0));
  }
};

template <class T, bool centered>
struct ForwardApart {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const RowNormArgs& args, int64_t begin, int64_t end) {
      const Affine<Lanes, T> affine(args);
      Columns<Lanes, T> x(args, args.x, args.dtype);
      RowSums<T> sums;
      T mean[kMost], rstd[kMost];
      const T count = T(args.columns);
      for (int64_t row = begin, rows = 0; row < end; row += rows) {
        const Block block(args, row, end);
        rows = block.rows;
        x.take(block);
        if constexpr (centered) {
          sums.over(args.columns, rows, [&](int64_t c, T* a, T*) MEMKIT_INLINE {
            const T* from = x[c];
            MEMKIT_LOOP
            for (int64_t r = 0; r < rows; ++r) a[r] += from[r];
          });
          for (int64_t r = 0; r < rows; ++r) mean[r] = sums.a[r] / count;
        } else {
          std::fill_n(mean, rows, T(0));
        }
        sums.over(args.columns, rows, [&](int64_t c, T* a, T* b) MEMKIT_INLINE {
          const T* from = x[c];
          MEMKIT_LOOP
          for (int64_t r = 0; r < rows; ++r) {
            const T d = from[r] - mean[r];
            if constexpr (centered) a[r] += d;
            b[r] += d * d;
          }
        });
        for (int64_t r = 0; r < rows; ++r) {
          T m2 = sums.b[r];
          if constexpr (centered) {
            const auto moments = Moments<T>::from_sums(count, mean[r], sums.a[r], m2);
            mean[r] = moments.mean, m2 = moments.m2;
          }
          rstd[r] = args.reciprocal(m2);
          if (args.mean) static_cast<T*>(args.mean)[row + r] = mean[r];
          if (args.rstd) static_cast<T*>(args.rstd)[row + r] = rstd[r];
        }
        write_columns<Lanes, T>(args, block, args.y, args.out_dtype, [&](int64_t c, T* to) MEMKIT_INLINE {
          const T *from = x[c], w = affine.weight[c], b = centered ? affine.bias[c] : T(0);
          MEMKIT_LOOP
          for (int64_t r = 0; r < rows; ++r) {
            if constexpr (centered) {
              to[r] = normalised(from[r], mean[r], rstd[r]) * w + b;
            } else {
              to[r] = from[r] * rstd[r] * w;
            }
          }
        });
      }
    }
  };
};

template <class T, bool centered, bool from_output_, bool parameters>
struct BackwardApart {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const RowNormArgs& args, int64_t begin, int64_t end) {
      Affine<Lanes, T> affine(args);
      const T *weight = affine.weight, *bias = affine.bias;
      const T* inverse = from_output_ ? affine.inverse(args.columns) : nullptr;
      Columns<Lanes, T> saved(args, args.saved, from_output_ ? args.out_dtype : args.dtype);
      Columns<Lanes, T> grad(args, args.grad, args.out_dtype);
      double* const grad_weight = static_cast<double*>(args.partial);
      double* const grad_bias = parameters ? grad_weight + args.columns : nullptr;
      if constexpr (parameters) std::fill_n(grad_weight, 2 * args.columns, 0.0);
      RowSums<T> sums;
      T mean[kMost + kWhole]{}, rstd[kMost + kWhole]{};
      const T count = T(args.columns);
      const auto x_hat = [&](int64_t c, T saved, T mean, T rstd) MEMKIT_INLINE {
        if constexpr (from_output_)
          return from_output(saved, inverse[c], centered ? bias[c] : T(0));
        else
          return normalised(saved, mean, rstd);
      };
      for (int64_t row = begin, rows = 0; row < end; row += rows) {
        const Block block(args, row, end);
        rows = block.rows;
        saved.take(block);
        grad.take(block);
        if constexpr (centered && !from_output_) std::copy_n(static_cast<const T*>(args.mean) + row, rows, mean);
        std::copy_n(static_cast<const T*>(args.rstd) + row, rows, rstd);
        sums.over(args.columns, rows, [&](int64_t c, T* a, T* b) MEMKIT_INLINE {
          const T w = weight[c];
          const Sums<T> own = sums_of<Lanes, T>(
              rows,
              [&](int64_t r, bool here, T g, T s, T m, T root, T& sum_a, T& sum_b) MEMKIT_INLINE {
                const T xh = select(here, x_hat(c, s, m, root), T(0)), gw = g * w;
                if constexpr (centered) a[r] += gw;  // which hold whole vectors
                b[r] += gw * xh;
                if constexpr (parameters) {
                  sum_a += g * xh;
                  if constexpr (centered) sum_b += g;
                }
              },
              grad[c], saved[c], mean, rstd);
          if constexpr (parameters) {
            grad_weight[c] += double(own.a);
            grad_bias[c] += double(own.b);
          }
        });
        if (!args.grad_input) continue;
        MEMKIT_LOOP
        for (int64_t r = 0; r < rows; ++r) sums.a[r] /= count, sums.b[r] = args.projection(sums.b[r], rstd[r]);
        write_columns<Lanes, T>(args, block, args.grad_input, args.dtype, [&](int64_t c, T* to) MEMKIT_INLINE {
          const T *g = grad[c], *s = saved[c], w = weight[c];
          MEMKIT_LOOP
          for (int64_t r = 0; r < rows; ++r)
            to[r] = norm_gradient(g[r] * w, x_hat(c, s[r], mean[r], rstd[r]), rstd[r], sums.a[r], sums.b[r]);
        });
      }
    }
  };
};

template <class T>
void forward(const RowNormArgs& args, int64_t begin, int64_t end) {
  if (args.centered) return Compiled<ForwardApart<T, true>::template Body, has_v4<T>>::run(args, begin, end);
  Compiled<ForwardApart<T, false>::template Body, has_v4<T>>::run(args, begin, end);
}

template <class T, bool centered, bool from_output>
void backward(const RowNormArgs& args, int64_t begin, int64_t end) {
  if (args.partial)
    return Compiled<BackwardApart<T, centered, from_output, true>::template Body, has_v4<T>>::run(args, begin, end);
  Compiled<BackwardApart<T, centered, from_output, false>::template Body, has_v4<T>>::run(args, begin, end);
}

template <class T>
void backward(const RowNormArgs& args, int64_t begin, int64_t end) {
  if (args.centered)
    return args.from_output ? backward<T, true, true>(args, begin, end) : backward<T, true, false>(args, begin, end);
  return args.from_output ? backward<T, false, true>(args, begin, end) : backward<T, false, false>(args, begin, end);
}

}  // namespace

void row_norm_apart_forward(const RowNormArgs& args, int64_t begin, int64_t end) {
  return args.dtype == Dtype::float64 ? forward<double>(args, begin, end) : forward<float>(args, begin, end);
}

void row_norm_apart_backward(const RowNormArgs& args, int64_t begin, int64_t end) {
  return args.dtype == Dtype::float64 ? backward<double>(args, begin, end) : backward<float>(args, begin, end);
}

}  // namespace memkit::cpu
