// A row is worked on in chunks, which stay in the first-level cache between the passes over them: two for the moments,
// one for the result. Rows of one chunk are converted once; longer rows of a half dtype again for the second pass.
#include "row_norm.h"

#include <algorithm>
#include <memory>

#include "chunks.h"
#include "moments.h"

namespace memkit::cpu {
namespace {

// Weight and bias as arrays of T; converted once a call where they are not, and made up where there are none.
template <class Lanes, class T>
class Affine {
 public:
  MEMKIT_FN explicit Affine(const RowNormArgs& args) {
    weight = fill(args.weight, args, T(1), own_weight_);
    if (args.centered) bias = fill(args.bias, args, T(0), own_bias_);
  }

  // Of the weight 1 / w, from which the input follows.
  MEMKIT_FN const T* inverse(int64_t columns) {
    own_inverse_.reset(new T[columns]);
    for (int64_t i = 0; i < columns; ++i) own_inverse_[i] = inverse_weight(weight[i]);
    return own_inverse_.get();
  }

  const T* weight;
  const T* bias = nullptr;

 private:
  MEMKIT_FN static const T* fill(const void* from, const RowNormArgs& args, T missing, std::unique_ptr<T[]>& own) {
    if (from && size_of(args.weight_dtype) == sizeof(T)) return static_cast<const T*>(from);
    own.reset(new T[args.columns]);
    if (from) return read<Lanes>(from, args.weight_dtype, 0, args.columns, own.get());
    for (int64_t i = 0; i < args.columns; ++i) own[i] = missing;
    return own.get();
  }

  std::unique_ptr<T[]> own_weight_, own_bias_, own_inverse_;
};

MEMKIT_FN int64_t chunk_at(int64_t first, int64_t columns) { return std::min(kChunk, columns - first); }

template <class Lanes, class T>
MEMKIT_FN T squares_of(const T* x, int64_t n) {
  return sum_of<Lanes, T>(n, [](int64_t, bool, T each) MEMKIT_INLINE { return each * each; }, x);
}

template <class T, bool centered>
struct Forward {
  template <class Lanes>
  struct Body {
    // The chunk of the input, which with a residual is their sum as it is stored.
    MEMKIT_FN static const T* input(const RowNormArgs& args, int64_t at, int64_t n, T* space) {
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

    MEMKIT_FN static void run(const RowNormArgs& args, int64_t begin, int64_t end) {
      const Affine<Lanes, T> affine(args);
      const T *weight = affine.weight, *bias = affine.bias;
      T space[kChunk], result[kChunk];
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * args.columns;
        Moments<T> moments;
        const T* x = nullptr;
        for (int64_t first = 0; first < args.columns; first += kChunk) {
          const int64_t n = chunk_at(first, args.columns);
          x = input(args, at + first, n, space);
          if constexpr (centered) {
            moments.add(moments_of<Lanes, T>(x, n, x != space));
          } else {
            moments.m2 += squares_of<Lanes>(x, n);
          }
        }
        const T mean = moments.mean, rstd = reciprocal_root(moments.m2 / T(args.columns), T(args.eps));
        if (args.mean) static_cast<T*>(args.mean)[row] = mean;
        if (args.rstd) static_cast<T*>(args.rstd)[row] = rstd;
        for (int64_t first = 0; first < args.columns; first += kChunk) {
          const int64_t n = chunk_at(first, args.columns);
          if (args.columns > kChunk)
            x = read<Lanes>(args.residual ? args.sum : args.x, args.dtype, at + first, n, space);
          T* y = place(args.y, args.out_dtype, at + first, result);
          const T *w = weight + first, *b = bias + first;
          const auto output = [&](int64_t i) MEMKIT_INLINE {
            if constexpr (centered) {
              y[i] = normalised(x[i], mean, rstd) * w[i] + b[i];
            } else {
              y[i] = x[i] * rstd * w[i];
            }
          };
          for_kept(n, x != space, output, x, y);
          written<Lanes>(y, args.y, args.out_dtype, at + first, n);
        }
      }
    }
  };
};

// The gradients of weight and bias. What a few rows add up to in T goes into the double sums: a sum over many rows in float
// would lose digits.
template <class T>
class ParameterSums {
 public:
  MEMKIT_FN ParameterSums(double* sums, int64_t columns)
      : pitch((columns + kSums - 1) / kSums * kSums),
        weight(new T[2 * pitch]()),
        bias(weight.get() + pitch),
        sums_(sums),
        columns_(columns) {}

  MEMKIT_FN void next_row() {
    if (++rows_ == kRows) flush();
  }
  MEMKIT_FN void flush() {
    if (flushed_ && rows_ == 0) return;
    add(weight.get(), sums_);
    add(bias, sums_ + columns_);
    std::fill_n(weight.get(), 2 * pitch, T(0));
    flushed_ = true;
    rows_ = 0;
  }

  const int64_t pitch;  // the columns, in whole runs
  const std::unique_ptr<T[]> weight;
  T* const bias;

 private:
  MEMKIT_FN void add(const T* from, double* to) const {
    MEMKIT_LOOP
    for (int64_t i = 0; i < columns_; ++i) to[i] = (flushed_ ? to[i] : 0) + double(from[i]);
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
      T *grad_weight = parameter_sums.weight.get(), *grad_bias = parameter_sums.bias;
      T kept[kChunk], grads[kChunk], result[kChunk], other[kChunk];
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * args.columns;
        const T mean = centered && !from_output_ ? static_cast<const T*>(args.mean)[row] : T(0);
        const T rstd = static_cast<const T*>(args.rstd)[row];
        const T *saved = nullptr, *g = nullptr;
        const auto chunk = [&](int64_t first, int64_t n) MEMKIT_INLINE {
          saved = read<Lanes>(args.saved, saved_dtype, at + first, n, kept);
          g = read<Lanes>(args.grad, args.out_dtype, at + first, n, grads);
        };
        const auto x_hat = [&](T saved, T inverse, T bias) MEMKIT_INLINE {
          if constexpr (from_output_)
            return from_output(saved, inverse, centered ? bias : T(0));
          else
            return normalised(saved, mean, rstd);
        };
        Sums<T> total{0, 0};
        for (int64_t first = 0; first < args.columns; first += kChunk) {
          const int64_t n = chunk_at(first, args.columns);
          chunk(first, n);
          T a[kSums] = {}, b[kSums] = {};
          const T *w = weight + first, *v = from_output_ ? inverse + first : w, *c = centered ? bias + first : w;
          in_runs<Lanes>(
              n,
              [&](int64_t i, int k, bool here, T gi, T si, T wi, T vi, T ci) MEMKIT_INLINE {
                const T xh = select(here, x_hat(si, vi, ci), T(0)), gw = gi * wi;
                if constexpr (centered) a[k] += gw;
                b[k] += gw * xh;
                if constexpr (parameters) {  // which hold whole runs
                  grad_weight[first + i] += gi * xh;
                  if constexpr (centered) grad_bias[first + i] += gi;
                }
              },
              g, saved, w, v, c);
          total.a += Fold<Lanes, T>::sum(a), total.b += Fold<Lanes, T>::sum(b);
        }
        if constexpr (parameters) parameter_sums.next_row();
        if (!args.grad_input) continue;
        const T a = total.a / T(args.columns), b = total.b / T(args.columns);
        for (int64_t first = 0; first < args.columns; first += kChunk) {
          const int64_t n = chunk_at(first, args.columns);
          if (args.columns > kChunk) chunk(first, n);
          T* dx = place(args.grad_input, args.dtype, at + first, result);
          const T *w = weight + first, *v = from_output_ ? inverse + first : w, *c = centered ? bias + first : w;
          if (args.grad_sum) {
            const T* more = read<Lanes>(args.grad_sum, args.dtype, at + first, n, other);
            MEMKIT_LOOP
            for (int64_t i = 0; i < n; ++i)
              dx[i] = norm_gradient(g[i] * w[i], x_hat(saved[i], v[i], c[i]), rstd, a, b) + more[i];
          } else {
            const auto gradient = [&](int64_t i) MEMKIT_INLINE {
              dx[i] = norm_gradient(g[i] * w[i], x_hat(saved[i], v[i], c[i]), rstd, a, b);
            };
            for_kept(n, g != grads, gradient, g, saved, dx);
          }
          written<Lanes>(dx, args.grad_input, args.dtype, at + first, n);
        }
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
  if (args.centered) return Compiled<Forward<T, true>::template Body>::run(args, begin, end);
  Compiled<Forward<T, false>::template Body>::run(args, begin, end);
}

template <class T, bool centered, bool from_output>
void backward(const RowNormArgs& args, int64_t begin, int64_t end) {
  if (args.partial) return Compiled<Backward<T, centered, from_output, true>::template Body>::run(args, begin, end);
  Compiled<Backward<T, centered, from_output, false>::template Body>::run(args, begin, end);
}

template <class T>
void backward(const RowNormArgs& args, int64_t begin, int64_t end) {
  if (args.centered)
    return args.from_output ? backward<T, true, true>(args, begin, end) : backward<T, true, false>(args, begin, end);
  return args.from_output ? backward<T, false, true>(args, begin, end) : backward<T, false, false>(args, begin, end);
}

}  // namespace

void row_norm_forward(const RowNormArgs& args, int64_t begin, int64_t end) {
  return args.dtype == Dtype::float64 ? forward<double>(args, begin, end) : forward<float>(args, begin, end);
}

void row_norm_backward(const RowNormArgs& args, int64_t begin, int64_t end) {
  return args.dtype == Dtype::float64 ? backward<double>(args, begin, end) : backward<float>(args, begin, end);
}

void row_norm_reduce(const RowNormArgs& args, const double* partials, int64_t count, void* grad_weight, void* grad_bias,
                     int64_t begin, int64_t end) {
  if (args.dtype == Dtype::float64)
    return Compiled<Reduce<double>::Body>::run(args, partials, count, grad_weight, grad_bias, begin, end);
  Compiled<Reduce<float>::Body>::run(args, partials, count, grad_weight, grad_bias, begin, end);
}

int row_norm_flaws(const RowNormArgs& args) {
  int flaws = 0;
  if (args.dtype == Dtype::float64) {
    Compiled<Flaws<double>::Body>::run(args, flaws);
  } else {
    Compiled<Flaws<float>::Body>::run(args, flaws);
  }
  return flaws;
}

}  // namespace memkit::cpu
