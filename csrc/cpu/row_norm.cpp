// Some rows at a time, which stay in the first-level cache between the passes over them: forward one or two for the moments
// and one for the result, backward one for the sums over a row and one for the gradients. Each step is taken for all of the
// rows before the next, so that the reductions of one overlap with the loads of another. Half dtypes are converted once, or,
// of rows too long for that, again for the second pass.
#include "row_norm.h"

#include <algorithm>
#include <memory>

#include "affine.h"
#include "moments.h"
#include "row_norm_apart.h"

namespace memkit::cpu {
namespace {

MEMKIT_FN int64_t chunk_at(int64_t first, int64_t columns) { return std::min(kChunk, columns - first); }

template <class Lanes, class T>
MEMKIT_FN T squares_of(const T* x, int64_t n) {
  return sum_of<Lanes, T>(n, [](int64_t, bool, T each) MEMKIT_INLINE { return each * each; }, x);
}

constexpr int64_t kTogether = 256;  // rows at most
constexpr int64_t kPiece =
    8192;  // bytes, half with a residual: reductions of a row of 1,024 floats overlap with loads of another

// What lies in one piece: `rows` rows, or of a single long one `width` columns from `first` on.
struct Piece {
  int64_t rows, width, first, at;

  MEMKIT_FN int64_t size() const { return rows * width; }
  // How far ahead to ask for the rows after these. Long rows come in by themselves, and would drive others out of the cache.
  MEMKIT_FN int64_t ahead() const { return width > 1024 || !asks_ahead ? 0 : size(); }
};

// Rows in pieces of about so many elements.
class Rows {
 public:
  MEMKIT_FN Rows(int64_t columns, int64_t elements)
      : columns_(columns), together_(std::clamp<int64_t>(elements / columns, 1, kTogether)) {}

  MEMKIT_FN int64_t count(int64_t row, int64_t end) const { return std::min(together_, end - row); }
  MEMKIT_FN bool whole() const { return columns_ <= kChunk; }
  // f(piece) for each of the pieces of `count` rows.
  template <class F>
  MEMKIT_FN void each_piece(int64_t row, int64_t count, const F& f) const {
    for (int64_t first = 0; first < columns_; first += kChunk)
      f(Piece{count, std::min(kChunk, columns_ - first), first, row * columns_ + first});
  }

 private:
  const int64_t columns_, together_;
};

template <class T, bool centered>
struct Forward {
  template <class Lanes>
  struct Body {
    // Of the input, which with a residual is their sum as it is stored.
    MEMKIT_FN static const T* input(const RowNormArgs& args, const Piece& piece, T* space) {
      const int64_t at = piece.at, n = piece.size();
      const T* x = read<Lanes>(args.x, args.dtype, at, n, space);
      if (!args.residual) return x;
      T other[kChunk];
      const T* r = read<Lanes>(args.residual, args.dtype, at, n, other);
      T* sum = place(args.sum, args.dtype, at, space);
      MEMKIT_LOOP
      for (int64_t i = 0; i < n; ++i) sum[i] = x[i] + r[i];
      written<Lanes>(sum, args.sum, args.dtype, at, n);
      return read<Lanes>(args.sum, args.dtype, at, n, space);
    }

    MEMKIT_FN static void add_moments(const Piece& piece, const T* x, int64_t ahead, Moments<T>* moments) {
      const int64_t n = piece.width;
      if constexpr (centered) {
        for (int64_t r = 0; r < piece.rows; ++r) {
          const auto own = moments_of<Lanes, T>(x + r * n, n, ahead);
          if (piece.first == 0)
            moments[r] = own;
          else
            moments[r].add(own);
        }
      } else {
        for (int64_t r = 0; r < piece.rows; ++r)
          moments[r].m2 = (piece.first == 0 ? T(0) : moments[r].m2) + squares_of<Lanes>(x + r * n, n);
      }
    }

    MEMKIT_FN static void run(const RowNormArgs& args, int64_t begin, int64_t end) {
      const Affine<Lanes, T> affine(args);
      const Rows rows(args.columns, (args.residual ? kPiece / 2 : kPiece) / sizeof(T));
      T space[kChunk], result[kChunk], rstd[kTogether];
      Moments<T> moments[kTogether];
      const T* x = nullptr;
      for (int64_t row = begin, count = 0; row < end; row += count) {
        count = rows.count(row, end);
        rows.each_piece(row, count, [&](const Piece& piece) MEMKIT_INLINE {
          x = input(args, piece, space);
          add_moments(piece, x, x == space ? 0 : piece.ahead(), moments);
        });
        for (int64_t r = 0; r < count; ++r) {
          rstd[r] = args.reciprocal(moments[r].m2);
          if (args.mean) static_cast<T*>(args.mean)[row + r] = moments[r].mean;
          if (args.rstd) static_cast<T*>(args.rstd)[row + r] = rstd[r];
        }
        rows.each_piece(row, count, [&](const Piece& piece) MEMKIT_INLINE {
          const int64_t n = piece.width;
          if (!rows.whole()) x = read<Lanes>(args.residual ? args.sum : args.x, args.dtype, piece.at, n, space);
          T* const y = place(args.y, args.out_dtype, piece.at, result);
          const T *w = affine.weight + piece.first, *b = centered ? affine.bias + piece.first : nullptr;
          for (int64_t r = 0; r < count; ++r) {
            const T *from = x + r * n, mean = moments[r].mean, own = rstd[r];
            T* const to = y + r * n;
            const auto output = [&](int64_t i) MEMKIT_INLINE {
              if constexpr (centered) {
                to[i] = normalised(from[i], mean, own) * w[i] + b[i];
              } else {
                to[i] = from[i] * own * w[i];
              }
            };
            for_kept(n, x == space ? 0 : piece.ahead(), output, from, to);
          }
          written<Lanes>(y, args.y, args.out_dtype, piece.at, piece.size());
        });
      }
    }
  };
};

// The gradients of weight and bias. What a few rows add up to in T goes into the double sums: a sum over many rows in float
// would lose digits.
template <class T>
class ParameterSums {
  static constexpr int64_t kWhole = 64;  // no vector is longer
  const int64_t pitch_;
  const std::unique_ptr<T[]> memory_;

 public:
  T *const weight, *const bias;

  MEMKIT_FN ParameterSums(double* sums, int64_t columns)
      : pitch_((columns + kWhole - 1) / kWhole * kWhole),
        memory_(new T[2 * pitch_ + kWhole]()),
        weight(whole_line(memory_.get())),
        bias(weight + pitch_),
        sums_(sums),
        columns_(columns) {}

  MEMKIT_FN void next_row() {
    if (++rows_ == kRows) flush();
  }
  MEMKIT_FN void flush() {
    if (flushed_ && rows_ == 0) return;
    add(weight, sums_);
    add(bias, sums_ + columns_);
    flushed_ = true;
    rows_ = 0;
  }

 private:
  // A vector that lies in two lines of the cache is slow to be read again.
  MEMKIT_FN static T* whole_line(T* x) { return x + (-reinterpret_cast<uintptr_t>(x) % 64) / sizeof(T); }
  MEMKIT_FN void add(T* from, double* to) const {
    MEMKIT_LOOP
    for (int64_t i = 0; i < columns_; ++i) {
      to[i] = (flushed_ ? to[i] : 0) + double(from[i]);
      from[i] = 0;
    }
  }

  static constexpr int kRows = 8;
  double* sums_;  // may hold anything at first
  int64_t columns_;
  int rows_ = 0;
  bool flushed_ = false;
};

template <class T, bool centered, bool from_output_, bool parameters>
struct Backward {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const RowNormArgs& args, int64_t begin, int64_t end) {
      Affine<Lanes, T> affine(args);
      const T *weight = affine.weight, *bias = affine.bias;
      const T* inverse = from_output_ ? affine.inverse(args.columns) : nullptr;
      const Dtype saved_dtype = from_output_ ? args.out_dtype : args.dtype;
      ParameterSums<T> parameter_sums(static_cast<double*>(args.partial), parameters ? args.columns : 0);
      T *grad_weight = parameter_sums.weight, *grad_bias = parameter_sums.bias;
      // With vectors of 64 bytes the reductions of longer rows overlap with other rows by themselves.
      const bool together = args.columns < 48 || Lanes::kBytes < 64;
      const Rows rows(args.columns, together ? 4096 / sizeof(T) : 1);
      T kept[kChunk], grads[kChunk], result[kChunk], other[kChunk], means[kTogether], rstds[kTogether];
      Sums<T> total[kTogether];
      const T *saved = nullptr, *g = nullptr;
      const auto take = [&](const Piece& piece) MEMKIT_INLINE {
        saved = read<Lanes>(args.saved, saved_dtype, piece.at, piece.size(), kept);
        g = read<Lanes>(args.grad, args.out_dtype, piece.at, piece.size(), grads);
      };
      const auto x_hat = [](T saved, T mean, T rstd, T inverse, T bias) MEMKIT_INLINE {
        if constexpr (from_output_)
          return from_output(saved, inverse, centered ? bias : T(0));
        else
          return normalised(saved, mean, rstd);
      };
      for (int64_t row = begin, count = 0; row < end; row += count) {
        count = rows.count(row, end);
        for (int64_t r = 0; r < count; ++r) {
          means[r] = centered && !from_output_ ? static_cast<const T*>(args.mean)[row + r] : T(0);
          rstds[r] = static_cast<const T*>(args.rstd)[row + r];
          total[r] = {0, 0};
        }
        rows.each_piece(row, count, [&](const Piece& piece) MEMKIT_INLINE {
          take(piece);
          const int64_t n = piece.width, first = piece.first;
          const T *w = weight + first, *v = from_output_ ? inverse + first : w, *c = centered ? bias + first : w;
          for (int64_t r = 0; r < count; ++r) {
            const T mean = means[r], rstd = rstds[r];
            const Sums<T> own = sums_of<Lanes, T>(
                n,
                [&](int64_t i, bool here, T gi, T si, T wi, T vi, T ci, T& a, T& b) MEMKIT_INLINE {
                  const T xh = select(here, x_hat(si, mean, rstd, vi, ci), T(0)), gw = gi * wi;
                  if constexpr (centered) a += gw;
                  b += gw * xh;
                  if constexpr (parameters) {  // which hold whole vectors
                    grad_weight[first + i] += gi * xh;
                    if constexpr (centered) grad_bias[first + i] += gi;
                  }
                },
                g + r * n, saved + r * n, w, v, c);
            total[r].a += own.a, total[r].b += own.b;
            if (parameters && first + n == args.columns) parameter_sums.next_row();
          }
        });
        if (!args.grad_input) continue;
        rows.each_piece(row, count, [&](const Piece& piece) MEMKIT_INLINE {
          if (!rows.whole()) take(piece);
          const int64_t n = piece.width, first = piece.first;
          T* const dx = place(args.grad_input, args.dtype, piece.at, result);
          const T* more =
              args.grad_sum ? read<Lanes>(args.grad_sum, args.dtype, piece.at, piece.size(), other) : nullptr;
          const T *w = weight + first, *v = from_output_ ? inverse + first : w, *c = centered ? bias + first : w;
          for (int64_t r = 0; r < count; ++r) {
            const T *s = saved + r * n, *from = g + r * n, mean = means[r], rstd = rstds[r];
            const T a = total[r].a / T(args.columns), b = args.projection(total[r].b, rstd);
            T* const to = dx + r * n;
            const auto gradient = [&](int64_t i) MEMKIT_INLINE {
              return norm_gradient(from[i] * w[i], x_hat(s[i], mean, rstd, v[i], c[i]), rstd, a, b);
            };
            if (more) {
              const T* add = more + r * n;
              MEMKIT_LOOP
              for (int64_t i = 0; i < n; ++i) to[i] = gradient(i) + add[i];
            } else {
              for_kept(
                  n, g == grads ? 0 : piece.ahead(), [&](int64_t i) MEMKIT_INLINE { to[i] = gradient(i); }, from, s,
                  to);
            }
          }
          written<Lanes>(dx, args.grad_input, args.dtype, piece.at, piece.size());
        });
      }
      if constexpr (parameters) parameter_sums.flush();
    }
  };
};

template <class T>
struct Reduce {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const RowNormArgs& args, const double* partials, int64_t count, void* grad_weight,
                              void* grad_bias, int64_t begin, int64_t end) {
      T space[kChunk];
      double total[kChunk];
      for (int part = 0; part < 2; ++part) {
        void* target = part == 0 ? grad_weight : grad_bias;
        if (!target) continue;
        for (int64_t first = begin; first < end; first += kChunk) {
          const int64_t n = chunk_at(first, end);
          T* to = place(target, args.weight_dtype, first, space);
          const double* from = partials + part * args.columns + first;
          std::copy_n(from, n, total);
          for (int64_t k = 1; k < count; ++k) {
            from += 2 * args.columns;
            MEMKIT_LOOP
            for (int64_t i = 0; i < n; ++i) total[i] += from[i];
          }
          MEMKIT_LOOP
          for (int64_t i = 0; i < n; ++i) to[i] = T(total[i]);
          written<Lanes>(to, target, args.weight_dtype, first, n);
        }
      }
    }
  };
};

template <class T>
struct Flaws {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const RowNormArgs& args, int& found) {
      const Affine<Lanes, T> affine(args);
      const WeightCheck<T> check = weight_check<T>(args.out_dtype, args.columns);
      int flaws = 0;
      for (int64_t i = 0; i < args.columns; ++i)
        flaws |= check.flaws(affine.weight[i], args.centered ? affine.bias[i] : T(0));
      found = flaws;
    }
  };
};

template <class T>
void forward(const RowNormArgs& args, int64_t begin, int64_t end) {
  if (args.centered) return Compiled<Forward<T, true>::template Body, has_v4<T>>::run(args, begin, end);
  Compiled<Forward<T, false>::template Body, has_v4<T>>::run(args, begin, end);
}

template <class T, bool centered, bool from_output>
void backward(const RowNormArgs& args, int64_t begin, int64_t end) {
  if (args.partial)
    return Compiled<Backward<T, centered, from_output, true>::template Body, has_v4<T>>::run(args, begin, end);
  Compiled<Backward<T, centered, from_output, false>::template Body, has_v4<T>>::run(args, begin, end);
}

template <class T>
void backward(const RowNormArgs& args, int64_t begin, int64_t end) {
  if (args.centered)
    return args.from_output ? backward<T, true, true>(args, begin, end) : backward<T, true, false>(args, begin, end);
  return args.from_output ? backward<T, false, true>(args, begin, end) : backward<T, false, false>(args, begin, end);
}

}  // namespace

void row_norm_forward(const RowNormArgs& args, int64_t begin, int64_t end) {
  if (args.inner > 1) return row_norm_apart_forward(args, begin, end);
  return args.dtype == Dtype::float64 ? forward<double>(args, begin, end) : forward<float>(args, begin, end);
}

void row_norm_backward(const RowNormArgs& args, int64_t begin, int64_t end) {
  if (args.inner > 1) return row_norm_apart_backward(args, begin, end);
  return args.dtype == Dtype::float64 ? backward<double>(args, begin, end) : backward<float>(args, begin, end);
}

void row_norm_reduce(const RowNormArgs& args, const double* partials, int64_t count, void* grad_weight, void* grad_bias,
                     int64_t begin, int64_t end) {
  if (args.dtype == Dtype::float64)
    return Compiled<Reduce<double>::Body, has_v4<double>>::run(args, partials, count, grad_weight, grad_bias, begin,
                                                               end);
  Compiled<Reduce<float>::Body>::run(args, partials, count, grad_weight, grad_bias, begin, end);
}

int row_norm_flaws(const RowNormArgs& args) {
  int flaws = 0;
  if (args.dtype == Dtype::float64) {
    Compiled<Flaws<double>::Body, has_v4<double>>::run(args, flaws);
  } else {
    Compiled<Flaws<float>::Body>::run(args, flaws);
  }
  return flaws;
}

}  // namespace memkit::cpu
