// Moments of planes and columns, and the steps between the passes over the tensor: a thread for each statistic or set.
#include "channel_kernels.cuh"
#include "channel_norm.h"

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

// A thread takes the moments of some rows at a time in its registers and adds them up: Moments::add, with the quotient of
// counts that all channels share.
template <class T>
__global__ void __launch_bounds__(kColumnThreads)
    column_moments_kernel(const ChannelArgs args, const bool wide, double* means, double* m2) {
  constexpr int kRows = 4;
  const ColumnShare share(args);
  const int64_t c = share.c, channels = share.channels;
  double count = 0;
  Vector<double> mean = {}, squares = {};
  if (c < channels) {
    for (int64_t row = share.begin + threadIdx.y; row < share.end; row += int64_t(blockDim.y) * kRows) {
      Vector<T> x[kRows] = {};
      int rows = 0;
      MEMKIT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int64_t at = row + r * int64_t(blockDim.y);
        if (at >= share.end) continue;
        x[r] = load_eight<T>(args.x, args.dtype, at * channels + c, (at + 1) * channels, wide);
        ++rows;
      }
      const T one_of = T(1) / T(rows);
      const double both = count + rows, part = rows / both, weight = count * part;
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) {
        T about = 0;  // near the mean
        MEMKIT_UNROLL
        for (int r = 0; r < kRows; ++r) about += x[r].x[k];
        about *= one_of;
        Pair<T> distance{0, 0};
        MEMKIT_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const T d = r < rows ? x[r].x[k] - about : T(0);
          distance.a += d, distance.b += d * d;
        }
        const T off = distance.a * one_of;
        const double delta = (double(about) + double(off)) - mean.x[k];
        mean.x[k] += delta * part;
        squares.x[k] += double(at_least(distance.b - distance.a * off, T(0))) + delta * delta * weight;
      }
      count = both;
    }
  }
  __shared__ ColumnSums sums;
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k) sums.put(k, mean.x[k], squares.x[k]);
  sums.for_channels(share, [&](int64_t channel, int x, int k) {
    double all = 0, sum = 0;
    for (int y = 0; y < int(blockDim.y); ++y) sum += share.rows(y) * sums.a[sums.place(y, x, k)];
    sum /= double(share.end - share.begin);
    for (int y = 0; y < int(blockDim.y); ++y) {
      const double d = sums.a[sums.place(y, x, k)] - sum;
      all += sums.b[sums.place(y, x, k)] + share.rows(y) * d * d;
    }
    means[blockIdx.y * channels + channel] = sum;
    m2[blockIdx.y * channels + channel] = all;
  });
}

// f(i) for i in [0, n), a thread each.
template <class F>
__global__ void each_kernel(const int64_t n, const F f) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) f(i);
}

template <class F>
int for_each(int64_t n, cudaStream_t stream, const F& f) {
  launch_kernel(each_kernel<F>, unsigned((n + 127) / 128), 128, stream, n, f);
  return cudaGetLastError();
}

// Parts up to which one thread takes a statistic; of more parts a block of kPartThreads takes it.
constexpr int64_t kFewParts = 16;
constexpr int kPartThreads = 256;

template <class T>
struct FinishMoments {
  ChannelStatistics<T> s;
  const double *means, *m2;
  __device__ void operator()(int64_t i) const { s.finish_moments(i, means, m2); }
};

// The mean first, then the distances from it.
template <class T>
__global__ void finish_moments_kernel(const ChannelStatistics<T> s, const double* means, const double* m2) {
  const int64_t i = blockIdx.x, many = s.size / s.together;
  const int64_t alike = many % s.count == 0 ? many / s.count * s.together : 0;
  const auto size = [&](int64_t j) { return double(alike ? alike : s.part_size(j)); };
  Pair<double> sum{0, 0}, squares{0, 0};
  for (int64_t j = threadIdx.x; j < s.count; j += blockDim.x) sum.a += size(j) * means[s.part(i, j)];
  const double mean = block_sum(sum).a / double(s.size);
  for (int64_t j = threadIdx.x; j < s.count; j += blockDim.x) {
    const double d = means[s.part(i, j)] - mean;
    squares.a += m2[s.part(i, j)] + size(j) * d * d;
  }
  squares = block_sum(squares);
  if (threadIdx.x == 0) s.mean[i] = mean, s.variance[i] = squares.a / double(s.size);
}

template <class T>
struct MakeTerms {
  ChannelStatistics<T> s;
  const double *c1, *c2;
  TermArrays<T> terms;
  __device__ void operator()(int64_t set) const { terms.put(set, s.terms(set, c1, c2)); }
};

// First the statistics, a thread or a block each, then the channels, a block each.
template <class T>
__global__ void finish_sums_kernel(const ChannelStatistics<T> s, const int64_t of_statistics, const int64_t parts,
                                   const double* dz, const double* dz_distance, double* sum_dz, double* sum_dz_x_hat,
                                   double* c1, double* c2) {
  using Sums = typename ChannelStatistics<T>::Sums;
  const auto all = [](const Sums& own) {
    const Pair<double> sum = block_sum(Pair<double>{own.dz, own.distance});
    return Sums{sum.a, sum.b};
  };
  if (blockIdx.x >= of_statistics) {
    const int64_t channel = blockIdx.x - of_statistics;
    const Sums sums = all(s.parameter_sums(channel, parts, dz, dz_distance, threadIdx.x, blockDim.x));
    if (threadIdx.x == 0) sum_dz[channel] = sums.dz, sum_dz_x_hat[channel] = sums.distance;
  } else if (s.count > kFewParts) {
    const Sums sums = all(s.sums_of(blockIdx.x, dz, dz_distance, threadIdx.x, blockDim.x));
    if (threadIdx.x == 0) s.finish_sums(blockIdx.x, sums, c1, c2);
  } else {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < s.statistics) s.finish_sums(i, s.sums_of(i, dz, dz_distance), c1, c2);
  }
}

template <class T>
int moments(const ChannelArgs& args, int64_t parts, double* means, double* m2, cudaStream_t stream) {
  const bool wide = wide_units(args);
  if (args.columns()) {
    launch_kernel(column_moments_kernel<T>, column_grid(args, parts), column_threads(args), stream, args, wide, means,
                  m2);
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
  int count = 0;
  if (const cudaError_t error = processor_count(count)) return error;
  // Enough blocks to fill the device, each with a few rows a thread at least.
  const int64_t tiles = column_grid(args, args.channels).x;
  const int64_t ways = std::min<int64_t>(std::max<int64_t>(1, int64_t(count) * 8 / tiles), args.outer / 64 + 1);
  parts = std::min<int64_t>(ways, 65535) * args.channels;
  return cudaSuccess;
}

int channel_moments(const ChannelArgs& args, int64_t parts, double* means, double* m2, CUstream_st* stream) {
  if (args.dtype == Dtype::float64) return moments<double>(args, parts, means, m2, stream);
  return moments<float>(args, parts, means, m2, stream);
}

template <class T>
int channel_finish_moments(const ChannelStatistics<T>& s, const double* means, const double* m2, CUstream_st* stream) {
  if (s.count <= kFewParts) return for_each(s.statistics, stream, FinishMoments<T>{s, means, m2});
  launch_kernel(finish_moments_kernel<T>, unsigned(s.statistics), kPartThreads, stream, s, means, m2);
  return cudaGetLastError();
}

template <class T>
int channel_terms(const ChannelStatistics<T>& s, int64_t sets, const double* c1, const double* c2, T* terms,
                  CUstream_st* stream) {
  return for_each(sets, stream, MakeTerms<T>{s, c1, c2, {terms, sets}});
}

template <class T>
int channel_finish_sums(const ChannelStatistics<T>& s, int64_t parts, const double* dz, const double* dz_distance,
                        double* sum_dz, double* sum_dz_x_hat, double* c1, double* c2, CUstream_st* stream) {
  const int64_t of_statistics = s.count > kFewParts ? s.statistics : (s.statistics + kPartThreads - 1) / kPartThreads;
  launch_kernel(finish_sums_kernel<T>, unsigned(of_statistics + s.channels), kPartThreads, stream, s, of_statistics,
                parts, dz, dz_distance, sum_dz, sum_dz_x_hat, c1, c2);
  return cudaGetLastError();
}

#define MEMKIT_STEPS(T)                                                                                                \
  template int channel_finish_moments<T>(const ChannelStatistics<T>&, const double*, const double*, CUstream_st*);     \
  template int channel_terms<T>(const ChannelStatistics<T>&, int64_t, const double*, const double*, T*, CUstream_st*); \
  template int channel_finish_sums<T>(const ChannelStatistics<T>&, int64_t, const double*, const double*, double*,     \
                                      double*, double*, double*, CUstream_st*);
MEMKIT_STEPS(float)
MEMKIT_STEPS(double)
#undef MEMKIT_STEPS

}  // namespace memkit::cuda
