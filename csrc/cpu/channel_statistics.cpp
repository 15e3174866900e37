// What lies between the passes of batch and group norm: as many numbers as channels, for each sample in group norm, which
// are a good part of the time where an image is a few pixels.
#include "channel_norm.h"
#include "reductions.h"

namespace memkit::cpu {
namespace {

struct Roots {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const double* variance, double eps, int64_t n, double* roots) {
      MEMKIT_LOOP
      for (int64_t i = 0; i < n; ++i) roots[i] = reciprocal_root(variance[i], eps);
    }
  };
};

// Of n channels, each with a mean and a root of its own, or all with one.
template <class T, bool backward, bool together>
MEMKIT_FN void put_terms(const ChannelStatistics<T>& s, int64_t statistic, int64_t channel, int64_t n, const double* c1,
                         const double* c2, const TermArrays<T>& to, int64_t at) {
  T *center = to.center() + at, *scale = to.scale() + at, *shift = to.shift() + at;
  T *offset = to.offset() + at, *slope = to.slope() + at;
  if (!s.weight || !s.bias || !s.roots || (backward && !c1)) __builtin_unreachable();  // no branches in the loop
  MEMKIT_LOOP
  for (int64_t c = 0; c < n; ++c) {
    const int64_t i = together ? statistic : statistic + c;
    const ChannelTerms<T> own = s.terms_of(i, channel + c, backward ? c1 : nullptr, c2);
    center[c] = own.center, scale[c] = own.scale, shift[c] = own.shift;
    offset[c] = own.offset, slope[c] = own.slope;
  }
}

template <class T, bool backward>
struct Terms {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const double* c1,
                              const double* c2, const TermArrays<T>& to) {
      put_terms<T, backward, false>(s, begin, begin, end - begin, c1, c2, to, begin);
    }
  };
};

template <class T, bool backward>
struct GroupTerms {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const double* c1,
                              const double* c2, const TermArrays<T>& to) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i * s.count;
        put_terms<T, backward, true>(s, i, first % s.channels, s.count, c1, c2, to, first % to.sets);
      }
    }
  };
};

// Of value(k), k < n. Eight sums side by side: the compiler keeps to the order of an addition.
template <class Lanes, class Value>
MEMKIT_FN double sum_of(int64_t n, const Value& value) {
  constexpr int kSide = 8;
  double all = 0;
  const int64_t whole = n - n % kSide;
  if (whole) {
    double side[kSide] = {};
    for (int64_t k = 0; k < whole; k += kSide) {
      MEMKIT_LOOP
      for (int j = 0; j < kSide; ++j) side[j] += value(k + j);
    }
    all = Fold<Lanes, double>::sum(side);
  }
  for (int64_t k = whole; k < n; ++k) all += value(k);
  return all;
}

template <class T>
struct GroupMoments {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const double* means,
                              const double* m2) {
      const double each = double(s.size / s.count);
      for (int64_t i = begin; i < end; ++i) {
        const double *mean = means + i * s.count, *own = m2 + i * s.count;
        const double all = sum_of<Lanes>(s.count, [&](int64_t k) MEMKIT_INLINE { return mean[k]; }) / double(s.count);
        s.mean[i] = all;
        s.variance[i] = sum_of<Lanes>(s.count,
                                      [&](int64_t k) MEMKIT_INLINE {
                                        const double d = mean[k] - all;
                                        return own[k] + each * d * d;
                                      }) /
                        double(s.size);
      }
    }
  };
};

template <class T>
struct GroupSums {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const double* sums,
                              const double* distances, double* c1, double* c2) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i * s.count;
        const T* const weight = s.weight ? s.weight + first % s.channels : nullptr;
        const auto weighted = [&](const double* values) MEMKIT_INLINE {
          return weight ? sum_of<Lanes>(s.count, [&](int64_t k) MEMKIT_INLINE { return double(weight[k]) * values[k]; })
                        : sum_of<Lanes>(s.count, [&](int64_t k) MEMKIT_INLINE { return values[k]; });
        };
        s.finish_sums(i, {weighted(sums + first), weighted(distances + first)}, c1, c2);
      }
    }
  };
};

template <class T>
struct GroupParameters {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const ChannelStatistics<T>& s, const double* sums, const double* distances, double* dz,
                              double* dz_x_hat) {
      for (int64_t c = 0; c < s.channels; ++c) dz[c] = dz_x_hat[c] = 0;
      for (int64_t i = 0; i < s.statistics; ++i) {
        const int64_t first = i * s.count, channel = first % s.channels;
        const double lost = s.lost(i), root = s.rstd(i);
        const double *a = sums + first, *b = distances + first;
        double *to = dz + channel, *to_x_hat = dz_x_hat + channel;
        MEMKIT_LOOP
        for (int64_t j = 0; j < s.count; ++j) to[j] += a[j], to_x_hat[j] += (b[j] - lost * a[j]) * root;
      }
    }
  };
};

}  // namespace

void channel_roots(const double* variance, double eps, int64_t n, double* roots) {
  Compiled<Roots::Body>::run(variance, eps, n, roots);
}

template <class T>
void channel_terms(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const double* c1, const double* c2,
                   const TermArrays<T>& terms) {
  if (!s.weight || !s.bias) {
    for (int64_t c = begin; c < end; ++c) terms.put(c, s.terms_of(c, c, c1, c2));
    return;
  }
  if (c1) return Compiled<Terms<T, true>::template Body, has_v4<T>>::run(s, begin, end, c1, c2, terms);
  Compiled<Terms<T, false>::template Body, has_v4<T>>::run(s, begin, end, c1, c2, terms);
}

template <class T>
void group_terms(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const double* c1, const double* c2,
                 const TermArrays<T>& terms) {
  if (!s.weight || !s.bias) {
    for (int64_t i = begin * s.count; i < end * s.count; ++i)
      terms.put(i % terms.sets, s.terms_of(i / s.count, i % s.channels, c1, c2));
    return;
  }
  if (c1) return Compiled<GroupTerms<T, true>::template Body, has_v4<T>>::run(s, begin, end, c1, c2, terms);
  Compiled<GroupTerms<T, false>::template Body, has_v4<T>>::run(s, begin, end, c1, c2, terms);
}

template <class T>
void group_moments(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const double* means, const double* m2) {
  Compiled<GroupMoments<T>::template Body, has_v4<T>>::run(s, begin, end, means, m2);
}

template <class T>
void group_sums(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const double* sums, const double* distances,
                double* c1, double* c2) {
  Compiled<GroupSums<T>::template Body, has_v4<T>>::run(s, begin, end, sums, distances, c1, c2);
}

template <class T>
void group_parameters(const ChannelStatistics<T>& s, const double* sums, const double* distances, double* dz,
                      double* dz_x_hat) {
  Compiled<GroupParameters<T>::template Body, has_v4<T>>::run(s, sums, distances, dz, dz_x_hat);
}

#define MEMKIT_STATISTICS(T)                                                                                     \
  template void channel_terms(const ChannelStatistics<T>&, int64_t, int64_t, const double*, const double*,       \
                              const TermArrays<T>&);                                                             \
  template void group_terms(const ChannelStatistics<T>&, int64_t, int64_t, const double*, const double*,         \
                            const TermArrays<T>&);                                                               \
  template void group_moments(const ChannelStatistics<T>&, int64_t, int64_t, const double*, const double*);      \
  template void group_sums(const ChannelStatistics<T>&, int64_t, int64_t, const double*, const double*, double*, \
                           double*);                                                                             \
  template void group_parameters(const ChannelStatistics<T>&, const double*, const double*, double*, double*);
MEMKIT_STATISTICS(float)
MEMKIT_STATISTICS(double)
#undef MEMKIT_STATISTICS

}  // namespace memkit::cpu
