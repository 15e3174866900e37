// Loops over softmax: a row at a time where its elements are neighbours, kept in the cache between the passes or, where it is
// too long for that, looked at twice; else rows side by side.
#include "softmax.h"

#include <algorithm>
#include <cmath>

#include "reductions.h"

namespace memkit::cpu {
namespace {

constexpr int64_t kBeside = 256;
template <class T>
constexpr int64_t kRow = (128 << 10) / sizeof(T);  // elements of a row that is kept

// The sum of e^(z - pivot); the terms are written to e where there is one. Asks for what is `ahead` of z, where that is read next.
template <class Lanes, bool kept, class T>
MEMKIT_FN T exponentials(const T* z, T* e, int64_t n, T pivot, int64_t ahead) {
  return sum_with<Lanes, T>(
      n, asks_for<Lanes>(z, ahead),
      [&](int64_t i, bool here, T each) MEMKIT_INLINE {
        const T term = select(here, exp_falling(each - pivot), T(0));
        if constexpr (kept)
          if (here) e[i] = term;
        return term;
      },
      z);
}

template <class T, bool log>
struct Forward {
  template <class Lanes>
  struct Body {
    const SoftmaxArgs& args;
    const T scale;
    const bool plain;  // z is x

    MEMKIT_FN explicit Body(const SoftmaxArgs& args)
        : args(args), scale(T(args.scale)), plain(args.scale == 1 && args.mask.kind == SoftmaxMask::Kind::none) {}

    MEMKIT_FN int64_t mask_row(int64_t row) const {
      return args.mask.kind == SoftmaxMask::Kind::none ? 0 : args.mask.row(row);
    }

    // z of n elements at `first`, whose mask is at `mask`, into `to`; n is at most a chunk.
    MEMKIT_FN void copy_z(int64_t first, int64_t mask, int64_t n, T* to) const {
      const T* x = read<Lanes>(args.x, args.dtype, first, n, to);
      if (args.mask.kind == SoftmaxMask::Kind::boolean) {
        const auto* takes_part = static_cast<const uint8_t*>(args.mask.data) + mask;
        MEMKIT_LOOP
        for (int64_t i = 0; i < n; ++i)
          to[i] = select(takes_part[i] != 0, x[i] * scale, -std::numeric_limits<T>::infinity());
      } else if (args.mask.kind == SoftmaxMask::Kind::additive) {
        T wide[kChunk];
        const T* added = read<Lanes>(args.mask.data, args.mask.dtype, mask, n, wide);
        MEMKIT_LOOP
        for (int64_t i = 0; i < n; ++i) to[i] = x[i] * scale + added[i];
      } else {
        MEMKIT_LOOP
        for (int64_t i = 0; i < n; ++i) to[i] = x[i] * scale;
      }
    }
    // The same where it lies if it is x, else in `space`.
    MEMKIT_FN const T* z(int64_t first, int64_t mask, int64_t n, T* space) const {
      if (plain) return read<Lanes>(args.x, args.dtype, first, n, space);
      copy_z(first, mask, n, space);
      return space;
    }

    // Rows that are kept, in their outputs' place or in `space`: one step for all of them, then the next, so that the reductions
    // of short rows overlap.
    MEMKIT_FN void kept_rows(int64_t row, int64_t count, bool last, T* space) const {
      const int64_t columns = args.columns, first = row * columns;
      T largest[kChunk], sum[kChunk];
      T* const block = place(args.y, args.dtype, first, space);
      const T* from = block;
      if (plain) {
        from = read<Lanes>(args.x, args.dtype, first, count == 1 ? args.seen(row) : count * columns, space);
      } else {
        for (int64_t r = 0; r < count; ++r) {
          const int64_t mask = mask_row(row + r), n = args.seen(row + r);
          for (int64_t c = 0; c < n; c += kChunk)
            copy_z(first + r * columns + c, mask + c, chunk_of(c, n), block + r * columns + c);
        }
      }
      for (int64_t r = 0; r < count; ++r)
        largest[r] = largest_of<Lanes>(from + r * columns, args.seen(row + r), -std::numeric_limits<T>::infinity());
      for (int64_t r = 0; r < count; ++r)
        sum[r] = exponentials<Lanes, !log>(from + r * columns, block + r * columns, args.seen(row + r),
                                           softmax_pivot(largest[r]), last ? 0 : count * columns);
      for (int64_t r = 0; r < count; ++r) {
        const SoftmaxOutput<T, log> output(largest[r], sum[r], args.masked);
        const T* const terms = (log ? from : block) + r * columns;
        T* const y = block + r * columns;
        const int64_t n = args.seen(row + r);
        for_kept(n, block == space ? 0 : n, [&](int64_t i) MEMKIT_INLINE { y[i] = output.finish(terms[i]); }, y);
        std::fill_n(y + n, columns - n, log ? -std::numeric_limits<T>::infinity() : T(0));
      }
      written<Lanes>(block, args.y, args.dtype, first, count * columns);
    }

    MEMKIT_FN void long_row(int64_t row, T* space) const {
      const int64_t first = row * args.columns, mask = mask_row(row), n = args.seen(row);
      SoftmaxState<T> state;
      for (int64_t c = 0; c < n; c += kChunk) {
        const int64_t m = chunk_of(c, n);
        const T* chunk = z(first + c, mask + c, m, space);
        state.raise(largest_of<Lanes>(chunk, m, state.largest));
        state.sum += exponentials<Lanes, false>(chunk, space, m, softmax_pivot(state.largest), m);
      }
      const SoftmaxOutput<T, log> output(state.largest, state.sum, args.masked);
      for (int64_t c = 0; c < n; c += kChunk) {
        const int64_t m = chunk_of(c, n);
        const T* chunk = z(first + c, mask + c, m, space);
        T* y = place(args.y, args.dtype, first + c, space);
        MEMKIT_LOOP
        for (int64_t i = 0; i < m; ++i) y[i] = output.value(chunk[i]);
        written<Lanes>(y, args.y, args.dtype, first + c, m);
      }
      for (int64_t c = n; c < args.columns; c += kChunk) {
        const int64_t m = chunk_of(c, args.columns);
        T* y = place(args.y, args.dtype, first + c, space);
        std::fill_n(y, m, log ? -std::numeric_limits<T>::infinity() : T(0));
        written<Lanes>(y, args.y, args.dtype, first + c, m);
      }
    }

    MEMKIT_FN static int64_t chunk_of(int64_t c, int64_t n) { return std::min(kChunk, n - c); }

    MEMKIT_FN static void run(const SoftmaxArgs& args, int64_t begin, int64_t end) {
      T space[kRow<T>];
      const Body body(args);
      const int64_t together = std::max<int64_t>(1, kChunk / args.columns);
      for (int64_t row = begin, n = 0; row < end; row += n) {
        n = std::min(together, end - row);
        if (args.columns <= kRow<T>)
          body.kept_rows(row, n, row + n == end, space);
        else
          body.long_row(row, space);
      }
    }
  };
};

// Straight from memory to memory: widening bfloat16 is a shift, which vectorises in the loop.
template <class S, bool log>
struct BackwardDirect {
  using T = typename ComputeType<S>::type;
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const SoftmaxArgs& args, int64_t begin, int64_t end) {
      const SoftmaxGradient<T, log> gradient(args);
      const int64_t columns = args.columns, together = std::max<int64_t>(1, kChunk / columns);
      T sum[kChunk];
      for (int64_t row = begin; row < end; row += together) {
        const int64_t count = std::min(together, end - row);
        const S* const y = static_cast<const S*>(args.y) + row * columns;
        const S* const g = static_cast<const S*>(args.grad) + row * columns;
        S* const dx = static_cast<S*>(args.grad_input) + row * columns;
        for (int64_t r = 0; r < count; ++r)
          sum[r] = sum_of<Lanes, T>(
              columns,
              [&](int64_t, bool, S gi, S yi) MEMKIT_INLINE { return gradient.term(to_compute(gi), to_compute(yi)); },
              g + r * columns, y + r * columns);
        for (int64_t r = 0; r < count; ++r) {
          const int64_t first = r * columns;
          const T total = sum[r];
          MEMKIT_LOOP
          for (int64_t i = first; i < first + columns; ++i)
            from_compute(gradient.value(to_compute(g[i]), to_compute(y[i]), total), dx[i]);
        }
      }
    }
  };
};

// A chunk widened at a time, for float16.
template <bool log>
struct BackwardChunks {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const SoftmaxArgs& args, int64_t begin, int64_t end) {
      const SoftmaxGradient<float, log> gradient(args);
      float outputs[kChunk], grads[kChunk], result[kChunk];
      const auto* y = static_cast<const Half*>(args.y);
      const auto* g = static_cast<const Half*>(args.grad);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t first = row * args.columns, last = first + args.columns;
        float total = 0;
        for (const bool writes : {false, true}) {
          for (int64_t at = first; at < last; at += kChunk) {
            const int64_t n = std::min(kChunk, last - at);
            if (!writes || args.columns > kChunk) {
              Lanes::widen(y + at, outputs, n);
              Lanes::widen(g + at, grads, n);
            }
            if (!writes) {
              total += sum_of<Lanes, float>(
                  n, [&](int64_t, bool, float g, float y) MEMKIT_INLINE { return gradient.term(g, y); }, grads,
                  outputs);
              continue;
            }
            MEMKIT_LOOP
            for (int64_t i = 0; i < n; ++i) result[i] = gradient.value(grads[i], outputs[i], total);
            Lanes::narrow(result, static_cast<Half*>(args.grad_input) + at, n);
          }
        }
      }
    }
  };
};

// Elements of a row lie `inner` apart, and neighbours belong to neighbouring rows: n rows of one outer index at a time.
template <class Each>
MEMKIT_FN void for_rows_beside(const SoftmaxArgs& args, int64_t begin, int64_t end, const Each& each) {
  while (begin < end) {
    const int64_t n = std::min({kBeside, args.inner - begin % args.inner, end - begin});
    each(begin / args.inner * args.columns * args.inner + begin % args.inner, n);
    begin += n;
  }
}

template <class T, bool log>
struct ForwardBeside {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const SoftmaxArgs& args, int64_t begin, int64_t end) {
      const T scale = T(args.scale);
      for_rows_beside(args, begin, end, [&](int64_t first, int64_t n) MEMKIT_INLINE {
        T block[kBeside], largest[kBeside], sum[kBeside] = {}, last[kBeside];
        std::fill_n(largest, n, -std::numeric_limits<T>::infinity());
        for (int64_t c = 0; c < args.columns; ++c) {
          const T* x = read<Lanes>(args.x, args.dtype, first + c * args.inner, n, block);
          MEMKIT_LOOP
          for (int64_t k = 0; k < n; ++k) largest[k] = select(x[k] * scale > largest[k], x[k] * scale, largest[k]);
        }
        for (int64_t k = 0; k < n; ++k) largest[k] = softmax_pivot(largest[k]);
        for (int64_t c = 0; c < args.columns; ++c) {
          const T* x = read<Lanes>(args.x, args.dtype, first + c * args.inner, n, block);
          MEMKIT_LOOP
          for (int64_t k = 0; k < n; ++k) sum[k] += exp_falling(x[k] * scale - largest[k]);
        }
        for (int64_t k = 0; k < n; ++k) last[k] = SoftmaxOutput<T, log>(largest[k], sum[k], args.masked).last;
        for (int64_t c = 0; c < args.columns; ++c) {
          const int64_t at = first + c * args.inner;
          const T* x = read<Lanes>(args.x, args.dtype, at, n, block);
          T* y = place(args.y, args.dtype, at, block);
          MEMKIT_LOOP
          for (int64_t k = 0; k < n; ++k) {
            const T z = x[k] * scale - largest[k];
            if constexpr (log)
              y[k] = z - last[k];
            else
              y[k] = exp_falling(z) * last[k];
          }
          written<Lanes>(y, args.y, args.dtype, at, n);
        }
      });
    }
  };
};

template <class T, bool log>
struct BackwardBeside {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const SoftmaxArgs& args, int64_t begin, int64_t end) {
      const SoftmaxGradient<T, log> gradient(args);
      for_rows_beside(args, begin, end, [&](int64_t first, int64_t n) MEMKIT_INLINE {
        T outputs[kBeside], grads[kBeside], sum[kBeside] = {};
        for (int pass = 0; pass < 2; ++pass) {
          for (int64_t c = 0; c < args.columns; ++c) {
            const int64_t at = first + c * args.inner;
            const T* y = read<Lanes>(args.y, args.dtype, at, n, outputs);
            const T* g = read<Lanes>(args.grad, args.dtype, at, n, grads);
            if (pass == 0) {
              MEMKIT_LOOP
              for (int64_t k = 0; k < n; ++k) sum[k] += gradient.term(g[k], y[k]);
            } else {
              T* dx = place(args.grad_input, args.dtype, at, grads);
              MEMKIT_LOOP
              for (int64_t k = 0; k < n; ++k) dx[k] = gradient.value(g[k], y[k], sum[k]);
              written<Lanes>(dx, args.grad_input, args.dtype, at, n);
            }
          }
        }
      });
    }
  };
};

// One of a body's forms for the logarithm and not.
template <template <bool> class Of>
void with_log(const SoftmaxArgs& args, int64_t begin, int64_t end) {
  if (args.log) return Compiled<Of<true>::template Body>::run(args, begin, end);
  Compiled<Of<false>::template Body>::run(args, begin, end);
}

template <template <class, bool> class Of, class T>
struct With {
  template <bool log>
  using Type = Of<T, log>;
};

}  // namespace

void softmax_forward(const SoftmaxArgs& args, int64_t begin, int64_t end) {
  const bool beside = args.inner > 1;
  if (args.dtype == Dtype::float64)
    return beside ? with_log<With<ForwardBeside, double>::Type>(args, begin, end)
                  : with_log<With<Forward, double>::Type>(args, begin, end);
  beside ? with_log<With<ForwardBeside, float>::Type>(args, begin, end)
         : with_log<With<Forward, float>::Type>(args, begin, end);
}

void softmax_backward(const SoftmaxArgs& args, int64_t begin, int64_t end) {
  if (args.inner > 1)
    return args.dtype == Dtype::float64 ? with_log<With<BackwardBeside, double>::Type>(args, begin, end)
                                        : with_log<With<BackwardBeside, float>::Type>(args, begin, end);
  switch (args.dtype) {
    case Dtype::float32: return with_log<With<BackwardDirect, float>::Type>(args, begin, end);
    case Dtype::float64: return with_log<With<BackwardDirect, double>::Type>(args, begin, end);
    case Dtype::float16: return with_log<BackwardChunks>(args, begin, end);
    case Dtype::bfloat16: return with_log<With<BackwardDirect, Bfloat>::Type>(args, begin, end);
  }
}

}  // namespace memkit::cpu
