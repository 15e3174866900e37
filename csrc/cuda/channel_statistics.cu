// Moments of planes and columns, and the steps between the passes over the tensor.
#include "channel_columns.cuh"
#include "channel_kernels.cuh"

namespace memkit::cuda {
namespace {

// From the sums of x - about and of its square: in double, as `about` is only near the mean.
template <class T>
__device__ Moments<double> moments_about(double count, T about, Pair<T> distance) {
  return Moments<double>::from_sums(count, double(about), double(distance.a), double(distance.b));
}

// Aligned.
template <class T>
__global__ void short_plane_moments_kernel(const ChannelArgs args, double* means, double* m2) {
  constexpr int n = kPlanesOfMoments;
  for_plane_slots<n>(args, [&](const PlaneSlots<n>& slot) {
    RawVector<T> raw[n] = {};
    MEMKIT_UNROLL
    for (int s = 0; s < n; ++s)
      if (slot.exists(s)) raw[s].load(args.x, args.dtype, slot.at(s));
    Vector<T> x[n];
    Pair<T> sums[n] = {}, distances[n] = {};
    MEMKIT_UNROLL
    for (int s = 0; s < n; ++s) {
      x[s] = raw[s].values(args.dtype);
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) sums[s].a += x[s].x[k];
    }
    block_sums(sums);
    MEMKIT_UNROLL
    for (int s = 0; s < n; ++s) {
      sums[s].a /= T(args.inner);
      if (!slot.exists(s)) continue;
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) {
        const T d = x[s].x[k] - sums[s].a;
        distances[s].a += d, distances[s].b += d * d;
      }
    }
    block_sums(distances);
    slot.each_once([&](int s) {
      const Moments<double> moments = moments_about(double(args.inner), sums[s].a, distances[s]);
      means[slot.plane(s)] = moments.mean, m2[slot.plane(s)] = moments.m2;
    });
  });
}

// Reads each plane twice; the second time mostly from a cache.
template <class T>
__global__ void plane_moments_kernel(const ChannelArgs args, const bool wide, double* means, double* m2) {
  for_planes(args, [&](int64_t plane) {
    const int64_t begin = plane * args.inner, end = begin + args.inner;
    const auto over = [&](auto&& term) {
      for_eights<T, 4>(begin, end, wide, args.x, args.dtype, [&](const Vector<T>& x, int64_t i) {
        MEMKIT_UNROLL
        for (int k = 0; k < kWidth; ++k)
          if (wide || i + k < end) term(x.x[k]);
      });
    };
    Pair<T> sum{0, 0}, distance{0, 0};
    over([&](T x) { sum.a += x; });
    const T about = block_sum(sum).a / T(args.inner);
    over([&](T x) { distance.a += x - about, distance.b += (x - about) * (x - about); });
    distance = block_sum(distance);
    if (threadIdx.x != 0) return;
    const Moments<double> moments = moments_about(double(args.inner), about, distance);
    means[plane] = moments.mean, m2[plane] = moments.m2;
  });
}

// Of few parts a statistic is taken by each of its sets' threads, of more by a block, whose threads then have its sets.
constexpr int64_t kFewParts = 16;
constexpr int kPartThreads = 256;

template <class T>
MEMKIT_FN bool is_few(const Statistics<T>& s) {
  return s.count <= kFewParts;
}
template <class T>
int64_t statistic_blocks(const Statistics<T>& s) {
  return is_few(s) ? (s.sets() + kPartThreads - 1) / kPartThreads : s.statistics;
}

struct Alone {
  int64_t first = 0, step = 1;
  __device__ double sum(double own) const { return own; }
  __device__ Pair<double> sums(Pair<double> own) const { return own; }
};
struct Together {
  int64_t first = threadIdx.x, step = blockDim.x;
  __device__ double sum(double own) const { return block_sum(Pair<double>{own, 0}).a; }
  __device__ Pair<double> sums(Pair<double> own) const { return block_sum(own); }
};

// f(who takes the parts, statistic, the thread's first set of it, where its sets end). Every step-th set is the thread's.
template <class T, class F>
__device__ void for_statistic(const Statistics<T>& s, F&& f) {
  const int64_t sets = s.sets_of_one();
  if (is_few(s)) {
    const int64_t set = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (set < s.sets()) f(Alone{}, s.statistic_of(set), set, set + 1);
  } else {
    const int64_t i = blockIdx.x;
    f(Together{}, i, i * sets + threadIdx.x, (i + 1) * sets);
  }
}

__global__ void move_running_kernel(const Running running, const double* mean, const double* variance,
                                    const int64_t channels) {
  const int64_t channel = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (channel < channels) move(running, channel, mean[channel], variance[channel]);
}

template <class T>
__global__ void finish_moments_kernel(const Statistics<T> s, const double* means, const double* m2,
                                      const Running running, const TermArrays<T> terms) {
  for_statistic(s, [&](const auto& team, int64_t i, int64_t set, int64_t end) {
    const Moments<double> all =
        s.moments_of(i, means, m2, team.first, team.step, [&](double own) { return team.sum(own); });
    const double variance = all.m2 / double(s.size);
    if (set == i * s.sets_of_one()) {
      s.mean.put(i, all.mean), s.variance.put(i, variance);
      if (running.mean) move(running, i, all.mean, variance);
    }
    if (!terms.data) return;
    const double root = reciprocal_root(variance, s.eps);
    for (; set < end; set += team.step) terms.put(set, s.terms_from(all.mean, root, set % s.channels));
  });
}

// Group norm's parameters have blocks behind those of the statistics, one a channel.
template <class T>
__global__ void finish_sums_kernel(const Statistics<T> s, const int64_t of_statistics, const int64_t parts,
                                   const double* dz, const double* dz_distance, const FromSums<T> to) {
  using Sums = typename Statistics<T>::Sums;
  const auto add_up = [](const auto& team, const Sums& own) {
    const Pair<double> sums = team.sums({own.dz, own.distance});
    return Sums{sums.a, sums.b};
  };
  if (blockIdx.x >= of_statistics) {
    const Together team;
    const int64_t channel = blockIdx.x - of_statistics;
    const Sums sums = add_up(team, s.parameter_sums(channel, parts, dz, dz_distance, team.first, team.step));
    if (threadIdx.x == 0) put_parameters(to, channel, sums);
    return;
  }
  for_statistic(s, [&](const auto& team, int64_t i, int64_t set, int64_t end) {
    const double mean = s.mean[i], root = s.rstd(i);
    const Sums own = s.sums_of(i, dz, dz_distance, team.first, team.step);
    const Sums sums = s.normalised(add_up(team, own), mean, root), share = s.share_of(i, sums);
    if (set == i * s.sets_of_one()) {
      if (s.groups == 0) put_parameters(to, i, sums);
      if (to.c1) to.c1.put(i, share.dz), to.c2.put(i, share.distance);
    }
    if (!to.terms) return;
    const TermArrays<T> terms{to.terms, s.sets()};
    for (; set < end; set += team.step)
      terms.put(set, s.terms_from(mean, root, set % s.channels, share.dz, share.distance));
  });
}

template <class T>
__global__ void terms_kernel(const Statistics<T> s, const Numbers c1, const Numbers c2, const TermArrays<T> terms) {
  const int64_t set = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (set >= terms.sets) return;
  const int64_t i = s.statistic_of(set), channel = set % s.channels;
  const double mean = s.mean[i], root = s.rstd(i);
  terms.put(set, c1 ? s.terms_from(mean, root, channel, c1[i], c2[i]) : s.terms_from(mean, root, channel));
}

template <class T>
int moments(const ChannelArgs& args, int64_t parts, double* means, double* m2, cudaStream_t stream) {
  const bool wide = wide_units(args);
  if (args.columns()) {
    launch_kernel(column_moments<T>(args.dtype), column_grid(args, parts / args.channels), column_threads(args), stream,
                  args, wide, means, m2);
  } else if (has_short_planes(args, wide)) {
    launch_short_planes(short_plane_moments_kernel<T>, kPlanesOfMoments, args, stream, means, m2);
  } else {
    launch_planes(plane_moments_kernel<T>, args, stream, wide, means, m2);
  }
  return cudaGetLastError();
}

}  // namespace

int channel_parts(const ChannelArgs& args, int64_t& parts) {
  if (!args.columns()) {
    parts = args.planes();
    return cudaSuccess;
  }
  int64_t ranges = 0;
  if (const cudaError_t error = column_ranges(args, ranges)) return error;
  parts = ranges * args.channels;
  return cudaSuccess;
}

int channel_moments(const ChannelArgs& args, int64_t parts, double* means, double* m2, CUstream_st* stream) {
  if (args.dtype == Dtype::float64) return moments<double>(args, parts, means, m2, stream);
  return moments<float>(args, parts, means, m2, stream);
}

template <class T>
int channel_finish_moments(const Statistics<T>& s, const double* means, const double* m2, const Running& running,
                           T* terms, CUstream_st* stream) {
  launch_kernel(finish_moments_kernel<T>, unsigned(statistic_blocks(s)), kPartThreads, stream, s, means, m2, running,
                TermArrays<T>{terms, s.sets()});
  return cudaGetLastError();
}

int channel_move_running(const Running& running, const double* mean, const double* variance, int64_t channels,
                         CUstream_st* stream) {
  launch_kernel(move_running_kernel, unsigned((channels + kPartThreads - 1) / kPartThreads), kPartThreads, stream,
                running, mean, variance, channels);
  return cudaGetLastError();
}

template <class T>
int channel_finish_sums(const Statistics<T>& s, int64_t parts, const double* dz, const double* dz_distance,
                        const FromSums<T>& to, CUstream_st* stream) {
  const int64_t of_statistics = statistic_blocks(s);
  const int64_t of_parameters = s.groups && (to.grad_weight || to.grad_bias) ? s.channels : 0;
  launch_kernel(finish_sums_kernel<T>, unsigned(of_statistics + of_parameters), kPartThreads, stream, s, of_statistics,
                parts, dz, dz_distance, to);
  return cudaGetLastError();
}

template <class T>
int channel_finish_parameters(const Statistics<T>& s, int64_t parts, const double* dz, const double* dz_distance,
                              const FromSums<T>& to, CUstream_st* stream) {
  launch_kernel(finish_sums_kernel<T>, unsigned(s.channels), kPartThreads, stream, s, 0, parts, dz, dz_distance, to);
  return cudaGetLastError();
}

template <class T>
int channel_terms(const Statistics<T>& s, const Numbers& c1, const Numbers& c2, T* terms, CUstream_st* stream) {
  launch_kernel(terms_kernel<T>, unsigned((s.sets() + kPartThreads - 1) / kPartThreads), kPartThreads, stream, s, c1,
                c2, TermArrays<T>{terms, s.sets()});
  return cudaGetLastError();
}

#define MEMKIT_STEPS(T)                                                                                                \
  template int channel_finish_moments<T>(const Statistics<T>&, const double*, const double*, const Running&, T*,       \
                                         CUstream_st*);                                                                \
  template int channel_finish_sums<T>(const Statistics<T>&, int64_t, const double*, const double*, const FromSums<T>&, \
                                      CUstream_st*);                                                                   \
  template int channel_finish_parameters<T>(const Statistics<T>&, int64_t, const double*, const double*,               \
                                            const FromSums<T>&, CUstream_st*);                                         \
  template int channel_terms<T>(const Statistics<T>&, const Numbers&, const Numbers&, T*, CUstream_st*);
MEMKIT_STEPS(float)
MEMKIT_STEPS(double)
#undef MEMKIT_STEPS

}  // namespace memkit::cuda
