// The tensor is walked as a flat array, a chunk at a time: widened, put through the terms of each set in turn and through
// the activation in one go, all in the first-level cache.
#include "channel_norm.h"

#include <memory>

#include "activation.h"
#include "chunks.h"
#include "moments.h"

namespace memkit::cpu {
namespace {

constexpr int64_t kBlockRows = 16;  // of a matrix of columns, whose moments are taken together
constexpr int64_t kBlockColumns = 256;
constexpr int64_t kFlushRows = 8;  // that are summed in the type computed in

template <class T>
struct Arrays {
  const T *center, *scale, *shift, *offset, *slope;

  explicit Arrays(const ChannelArgs& args) {
    const TermArrays<const T> terms{static_cast<const T*>(args.terms), args.sets};
    center = terms.center(), scale = terms.scale(), shift = terms.shift();
    offset = terms.offset(), slope = terms.slope();
  }
};

// Calls plane(k, n, unit, set) for the elements [k, k + n) of the chunk that starts at `first` and are of one set, or
// row(k, n, channel) for those that are of channels one after another.
template <class Plane, class Row>
MEMKIT_FN void for_runs(const ChannelArgs& args, int64_t first, int64_t count, const Plane& plane, const Row& row) {
  if (args.columns()) {
    for (int64_t k = 0, n, channel = first % args.channels; k < count; k += n, channel = 0) {
      n = std::min(args.channels - channel, count - k);
      row(k, n, channel);
    }
  } else {
    int64_t unit = first / args.inner, left = args.inner - first % args.inner, set = unit % args.sets;
    for (int64_t k = 0, n; k < count; k += n) {
      n = std::min(left, count - k);
      plane(k, n, unit, set);
      ++unit, left = args.inner, set = set + 1 == args.sets ? 0 : set + 1;
    }
  }
}

template <class T>
ActivationArgs activation_of(const ChannelArgs& args, const T* x, T* out, int64_t n) {
  ActivationArgs call{args.act, args.params, sizeof(T) == 8 ? Dtype::float64 : Dtype::float32, n, {}};
  call.x = x;
  call.out = out;
  return call;
}

// z of a chunk.
template <class T>
MEMKIT_FN void values(const ChannelArgs& args, const Arrays<T>& terms, int64_t first, int64_t n, const T* x, T* z) {
  for_runs(
      args, first, n,
      [&](int64_t k, int64_t m, int64_t, int64_t set) MEMKIT_INLINE {
        const T center = terms.center[set], scale = terms.scale[set], shift = terms.shift[set];
        MEMKIT_LOOP
        for (int64_t i = k; i < k + m; ++i) z[i] = (x[i] - center) * scale + shift;
      },
      [&](int64_t k, int64_t m, int64_t channel) MEMKIT_INLINE {
        const T *center = terms.center + channel, *scale = terms.scale + channel, *shift = terms.shift + channel;
        MEMKIT_LOOP
        for (int64_t i = 0; i < m; ++i) z[k + i] = (x[k + i] - center[i]) * scale[i] + shift[i];
      });
}

// dz of a chunk: the incoming gradient itself where there is no activation.
template <class Lanes, class T>
MEMKIT_FN const T* gradients(const ChannelArgs& args, const Arrays<T>& terms, int64_t first, int64_t n, const T* x,
                             T* space) {
  const T* g = read<Lanes>(args.grad, args.out_dtype, first, n, space);
  if (!args.has_act) return g;
  T z[kChunk];
  values(args, terms, first, n, x, z);
  ActivationArgs call = activation_of(args, z, space, n);
  call.grad = g;
  activation_backward_from_input(call, 0, n);
  return space;
}

// Without an activation, in and out in one dtype: straight from memory to memory, S as in convert.h. Widening bfloat16 is a
// shift, which vectorises in the loop.
template <class S>
struct ForwardDirect {
  using T = typename ComputeType<S>::type;
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const ChannelArgs& args, int64_t begin, int64_t end) {
      const Arrays<T> t(args);
      const S* const x = static_cast<const S*>(args.x);
      S* const y = static_cast<S*>(args.y);
      for_runs(
          args, begin, end - begin,
          [&](int64_t k, int64_t m, int64_t, int64_t set) MEMKIT_INLINE {
            const T center = t.center[set], scale = t.scale[set], shift = t.shift[set];
            MEMKIT_LOOP
            for (int64_t i = begin + k; i < begin + k + m; ++i)
              from_compute((to_compute(x[i]) - center) * scale + shift, y[i]);
          },
          [&](int64_t k, int64_t m, int64_t channel) MEMKIT_INLINE {
            const T *center = t.center + channel, *scale = t.scale + channel, *shift = t.shift + channel;
            const S* const from = x + begin + k;
            S* const to = y + begin + k;
            MEMKIT_LOOP
            for (int64_t i = 0; i < m; ++i)
              from_compute((to_compute(from[i]) - center[i]) * scale[i] + shift[i], to[i]);
          });
    }
  };
};

template <class S>
struct BackwardDirect {
  using T = typename ComputeType<S>::type;
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const ChannelArgs& args, int64_t begin, int64_t end) {
      const Arrays<T> t(args);
      const S* const x = static_cast<const S*>(args.x);
      const S* const dz = static_cast<const S*>(args.grad);
      S* const dx = static_cast<S*>(args.grad_input);
      for_runs(
          args, begin, end - begin,
          [&](int64_t k, int64_t m, int64_t, int64_t set) MEMKIT_INLINE {
            const ChannelTerms<T> own{t.center[set], t.scale[set], t.shift[set], t.offset[set], t.slope[set]};
            MEMKIT_LOOP
            for (int64_t i = begin + k; i < begin + k + m; ++i)
              from_compute(own.gradient(to_compute(x[i]), to_compute(dz[i])), dx[i]);
          },
          [&](int64_t k, int64_t m, int64_t c) MEMKIT_INLINE {
            const T *center = t.center + c, *scale = t.scale + c, *offset = t.offset + c, *slope = t.slope + c;
            const S *const from = x + begin + k, *const arrived = dz + begin + k;
            S* const to = dx + begin + k;
            MEMKIT_LOOP
            for (int64_t i = 0; i < m; ++i) {
              const ChannelTerms<T> own{center[i], scale[i], T(0), offset[i], slope[i]};
              from_compute(own.gradient(to_compute(from[i]), to_compute(arrived[i])), to[i]);
            }
          });
    }
  };
};

template <class T>
struct Forward {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const ChannelArgs& args, int64_t begin, int64_t end) {
      const Arrays<T> terms(args);
      T space[kChunk], result[kChunk];
      for (int64_t first = begin; first < end; first += kChunk) {
        const int64_t n = std::min(kChunk, end - first);
        const T* x = read<Lanes>(args.x, args.dtype, first, n, space);
        T* y = place(args.y, args.out_dtype, first, result);
        values(args, terms, first, n, x, y);
        if (args.has_act) activation_forward(activation_of(args, y, y, n), 0, n);
        written<Lanes>(y, args.y, args.out_dtype, first, n);
      }
    }
  };
};

template <class T>
struct Backward {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const ChannelArgs& args, int64_t begin, int64_t end) {
      const Arrays<T> t(args);
      T space[kChunk], grads[kChunk], result[kChunk];
      for (int64_t first = begin; first < end; first += kChunk) {
        const int64_t n = std::min(kChunk, end - first);
        const T* x = read<Lanes>(args.x, args.dtype, first, n, space);
        const T* dz = gradients<Lanes>(args, t, first, n, x, grads);
        T* dx = place(args.grad_input, args.dtype, first, result);
        for_runs(
            args, first, n,
            [&](int64_t k, int64_t m, int64_t, int64_t set) MEMKIT_INLINE {
              const ChannelTerms<T> own{t.center[set], t.scale[set], t.shift[set], t.offset[set], t.slope[set]};
              MEMKIT_LOOP
              for (int64_t i = k; i < k + m; ++i) dx[i] = own.gradient(x[i], dz[i]);
            },
            [&](int64_t k, int64_t m, int64_t c) MEMKIT_INLINE {
              const T *center = t.center + c, *scale = t.scale + c, *offset = t.offset + c, *slope = t.slope + c;
              MEMKIT_LOOP
              for (int64_t i = 0; i < m; ++i)
                dx[k + i] =
                    ChannelTerms<T>{center[i], scale[i], T(0), offset[i], slope[i]}.gradient(x[k + i], dz[k + i]);
            });
        written<Lanes>(dx, args.grad_input, args.dtype, first, n);
      }
    }
  };
};

template <class T>
struct GradientSums {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const ChannelArgs& args, int64_t begin, int64_t end, double* sum, double* sum_distance,
                              void* kept) {
      const Arrays<T> terms(args);
      const bool columns = args.columns();
      const int64_t unit_size = columns ? args.channels : args.inner;
      for (int64_t i = columns ? 0 : begin; i < (columns ? args.channels : end); ++i) sum[i] = sum_distance[i] = 0;
      // Columns: what some rows add up to in T goes into the double sums.
      const std::unique_ptr<T[]> own(new T[columns ? 2 * args.channels : 0]());
      T *rows = own.get(), *rows_distance = rows + (columns ? args.channels : 0);
      int64_t since_flush = 0;
      const auto flush = [&] {
        for (int64_t c = 0; c < args.channels; ++c) {
          sum[c] += double(rows[c]), sum_distance[c] += double(rows_distance[c]);
          rows[c] = rows_distance[c] = T(0);
        }
        since_flush = 0;
      };
      T space[kChunk], grads[kChunk];
      // Chunks of whole planes, or parts of one plane: its sums do not depend on the planes before it.
      const bool several = !columns && unit_size <= kChunk, parts = !columns && !several;
      const int64_t chunk = several ? kChunk / unit_size * unit_size : kChunk;
      for (int64_t first = begin * unit_size, n = 0; first < end * unit_size; first += n) {
        n = std::min({chunk, end * unit_size - first, parts ? unit_size - first % unit_size : kChunk});
        const T* x = read<Lanes>(args.x, args.dtype, first, n, space);
        const T* dz = gradients<Lanes>(args, terms, first, n, x, kept ? place(kept, args.dtype, first, grads) : grads);
        if (kept) written<Lanes>(dz, kept, args.dtype, first, n);
        for_runs(
            args, first, n,
            [&](int64_t k, int64_t m, int64_t unit, int64_t set) MEMKIT_INLINE {
              const T center = terms.center[set];
              const Sums<T> s = sums_of<Lanes, T>(
                  m,
                  [&](int64_t, bool here, T dz, T x, T& a, T& b) MEMKIT_INLINE {
                    a += dz;
                    b += dz * select(here, x - center, T(0));
                  },
                  dz + k, x + k);
              sum[unit] += double(s.a), sum_distance[unit] += double(s.b);
            },
            [&](int64_t k, int64_t m, int64_t channel) MEMKIT_INLINE {
              const T* center = terms.center + channel;
              T *a = rows + channel, *b = rows_distance + channel;
              MEMKIT_LOOP
              for (int64_t i = 0; i < m; ++i) a[i] += dz[k + i], b[i] += dz[k + i] * (x[k + i] - center[i]);
              since_flush += m;
              if (since_flush >= kFlushRows * args.channels) flush();
            });
      }
      if (columns) flush();
    }
  };
};

template <class T>
struct PlaneMoments {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const ChannelArgs& args, int64_t begin, int64_t end, double* means, double* m2) {
      T space[kChunk];
      for (int64_t plane = begin; plane < end; ++plane) {
        Moments<double> moments;
        for (int64_t first = 0; first < args.inner; first += kChunk) {
          const int64_t n = std::min(kChunk, args.inner - first);
          const T* x = read<Lanes>(args.x, args.dtype, plane * args.inner + first, n, space);
          moments.add(moments_of<Lanes, double>(x, n, x == space ? 0 : n));
        }
        means[plane] = moments.mean, m2[plane] = moments.m2;
      }
    }
  };
};

// Some rows at a time, whose moments are taken in the cache and added to those of the rows before.
template <class T>
struct ColumnMoments {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const ChannelArgs& args, int64_t begin, int64_t end, double* means, double* m2) {
      T space[kBlockRows * kBlockColumns];
      const bool direct = size_of(args.dtype) == sizeof(T);
      for (int64_t first = 0; first < args.channels; first += kBlockColumns) {
        const int64_t n = std::min(kBlockColumns, args.channels - first);
        double *mean = means + first, *squares = m2 + first;
        for (int64_t i = 0; i < n; ++i) mean[i] = squares[i] = 0;
        const bool whole = n == args.channels;  // rows that lie one after the other
        const int64_t most = direct  ? 2 * kBlockRows
                             : whole ? std::min(2 * kBlockRows, kBlockRows * kBlockColumns / n)
                                     : kBlockRows;
        const int64_t pitch = direct ? args.channels : n;
        for (int64_t row = begin, rows = 0; row < end; row += rows) {
          rows = std::min(most, end - row);
          T sum[kBlockColumns], rest[kBlockColumns], own[kBlockColumns];
          for (T* each : {sum, rest, own}) std::fill_n(each, n, T(0));
          const int64_t at = row * args.channels + first;
          const T* const x = read<Lanes>(args.x, args.dtype, at, whole ? rows * n : n, space);
          for (int64_t r = 0; r < rows; ++r) {
            if (!direct && !whole && r) read<Lanes>(args.x, args.dtype, at + r * args.channels, n, space + r * n);
            MEMKIT_LOOP
            for (int64_t i = 0; i < n; ++i) sum[i] += x[r * pitch + i];
          }
          for (int64_t i = 0; i < n; ++i) sum[i] /= T(rows);
          for (int64_t r = 0; r < rows; ++r) {
            MEMKIT_LOOP
            for (int64_t i = 0; i < n; ++i) {
              const T d = x[r * pitch + i] - sum[i];
              rest[i] += d, own[i] += d * d;
            }
          }
          MEMKIT_LOOP
          for (int64_t i = 0; i < n; ++i) {
            Moments<double> all{double(row - begin), mean[i], squares[i]};
            all.add(Moments<double>::from_sums(double(rows), double(sum[i]), double(rest[i]), double(own[i])));
            mean[i] = all.mean, squares[i] = all.m2;
          }
        }
      }
    }
  };
};

bool is_direct(const ChannelArgs& args, Dtype dtype) {
  return !args.has_act && args.dtype == dtype && args.out_dtype == dtype;
}

template <class T>
void moments(const ChannelArgs& args, int64_t begin, int64_t end, double* means, double* m2) {
  if (args.columns()) return Compiled<ColumnMoments<T>::template Body, has_v4<T>>::run(args, begin, end, means, m2);
  Compiled<PlaneMoments<T>::template Body, has_v4<T>>::run(args, begin, end, means, m2);
}

}  // namespace

void channel_moments(const ChannelArgs& args, int64_t begin, int64_t end, double* means, double* m2) {
  if (args.dtype == Dtype::float64) return moments<double>(args, begin, end, means, m2);
  moments<float>(args, begin, end, means, m2);
}

void channel_forward(const ChannelArgs& args, int64_t begin, int64_t end) {
  if (is_direct(args, Dtype::bfloat16)) return Compiled<ForwardDirect<Bfloat>::Body>::run(args, begin, end);
  if (is_direct(args, Dtype::float32)) return Compiled<ForwardDirect<float>::Body>::run(args, begin, end);
  if (args.dtype == Dtype::float64) return Compiled<Forward<double>::Body, has_v4<double>>::run(args, begin, end);
  Compiled<Forward<float>::Body>::run(args, begin, end);
}

void channel_backward(const ChannelArgs& args, int64_t begin, int64_t end) {
  if (is_direct(args, Dtype::bfloat16)) return Compiled<BackwardDirect<Bfloat>::Body>::run(args, begin, end);
  if (is_direct(args, Dtype::float32)) return Compiled<BackwardDirect<float>::Body>::run(args, begin, end);
  if (args.dtype == Dtype::float64) return Compiled<Backward<double>::Body, has_v4<double>>::run(args, begin, end);
  Compiled<Backward<float>::Body>::run(args, begin, end);
}

void channel_sums(const ChannelArgs& args, int64_t begin, int64_t end, double* sum_dz, double* sum_dz_distance,
                  void* dz) {
  if (args.dtype == Dtype::float64)
    return Compiled<GradientSums<double>::Body, has_v4<double>>::run(args, begin, end, sum_dz, sum_dz_distance, dz);
  Compiled<GradientSums<float>::Body>::run(args, begin, end, sum_dz, sum_dz_distance, dz);
}

}  // namespace memkit::cpu
