// The passes of batch norm in the layout of columns (channels last, or a batch of vectors): a thread has eight channels, whose
// terms it holds, and every blockDim.y-th row of its block's range, of which it has some under way at a time. blockIdx.y is
// the range.
#pragma once

#include "channel_kernels.cuh"

namespace memkit::cuda {

constexpr int kColumnThreads = 256;
// Blocks of a multiprocessor at a time, for which registers suffice.
constexpr int kColumnBlocks = 2;

struct ColumnShare {
  // Some of a thread's rows, blockDim.y apart: where its channels of number r are, if that exists.
  struct Rows {
    int64_t first, stride;
    int left, step;

    __device__ bool exists(int r) const { return r * step < left; }
    __device__ int64_t at(int r) const { return first + r * stride; }
  };

  int64_t channels, c, begin, end;

  __device__ explicit ColumnShare(const ChannelArgs& args)
      : channels(args.channels),
        c((int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth),
        begin(args.outer * blockIdx.y / gridDim.y),
        end(args.outer * (blockIdx.y + 1) / gridDim.y) {}

  __device__ bool has_channels() const { return c < channels; }
  __device__ int exist() const { return int(at_most(channels - c, int64_t(kWidth))); }
  // f(rows) for the thread's next `n` rows at a time.
  template <int n, class F>
  __device__ void for_rows(F&& f) const {
    if (!has_channels()) return;
    const int step = int(blockDim.y), all = int(end - begin);
    for (int row = int(threadIdx.y); row < all; row += step * n)
      f(Rows{(begin + row) * channels + c, channels * step, all - row, step});
  }
  // Rows that the threads of row y have.
  __device__ double rows(int y) const {
    const int64_t all = end - begin;
    return double(all > y ? (all - y + blockDim.y - 1) / blockDim.y : 0);
  }
};

// At the end a block's threads take a channel each and add up what the rows of threads have of it.
struct ColumnSums {
  double a[kColumnThreads * kWidth], b[kColumnThreads * kWidth];

  static __device__ int place(int y, int x, int k) { return (k * int(blockDim.y) + y) * int(blockDim.x) + x; }
  static __device__ int own(int k) { return place(threadIdx.y, threadIdx.x, k); }
  // f(channel, its x, its k) by a thread for each channel.
  template <class F>
  __device__ void for_channels(const ColumnShare& share, F&& f) const {
    __syncthreads();
    const int t = int(threadIdx.y * blockDim.x + threadIdx.x), x = t / kWidth, k = t % kWidth;
    const int64_t channel = (int64_t(blockIdx.x) * blockDim.x + x) * kWidth + k;
    if (x < int(blockDim.x) && channel < share.channels) f(channel, x, k);
  }
};

// The terms of a thread's channels; of those that there are not, 0.
template <class F>
__device__ void column_terms(const ColumnShare& share, F&& put) {
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k)
    if (share.c + k < share.channels) put(k, share.c + k);
}

// Most have no activation behind them, or relu: kernels for those alone are short, and several rows fit. Any other is for
// one row at a time.
template <bool any, class F, class... Args>
__device__ void with_act(const ChannelArgs& args, F&& f, Args&... on) {
  if constexpr (any)
    visit(act_of(args), f, args.params, on...);
  else if (args.has_act)
    f.template operator()<Relu>(args.params, on...);
}
inline bool is_any(const ChannelArgs& args) { return args.has_act && args.act != Act::relu; }

// A thread takes the moments of some rows at a time in its registers and adds them up: Moments::add, with the quotient of
// counts that all channels share.
template <class S>
__global__ void __launch_bounds__(kColumnThreads, sizeof(S) == 8 ? 1 : kColumnBlocks)
    column_moments_kernel(const ChannelArgs args, const bool wide, double* means, double* m2) {
  using T = typename ComputeType<S>::type;
  constexpr int n = sizeof(S) == 2 ? 6 : 4;
  const ColumnShare share(args);
  const S* const from = static_cast<const S*>(args.x);
  double count = 0;
  Vector<double> mean = {}, squares = {};
  share.for_rows<n>([&](const ColumnShare::Rows& rows) {
    Eight<S> raw[n] = {};
    MEMKIT_UNROLL
    for (int r = 0; r < n; ++r) {
      if (!rows.exists(r)) continue;
      const S* at = from + rows.at(r);
      wide ? raw[r].load(at) : raw[r].load_some(at, share.exist());
    }
    int have = 0;
    MEMKIT_UNROLL
    for (int r = 0; r < n; ++r) have += rows.exists(r);
    const T one_of = T(1) / T(have);
    Vector<T> about = {};  // near the mean
    MEMKIT_UNROLL
    for (int r = 0; r < n; ++r) {
      const Vector<T> x = raw[r].values();
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) about.x[k] += x.x[k];
    }
    Vector<T> off = {}, distance = {};
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) about.x[k] *= one_of;
    MEMKIT_UNROLL
    for (int r = 0; r < n; ++r) {
      const Vector<T> x = raw[r].values();
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) {
        const T d = rows.exists(r) ? x.x[k] - about.x[k] : T(0);
        off.x[k] += d, distance.x[k] += d * d;
      }
    }
    const double both = count + have, part = have / both, weight = count * part;
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) {
      const T rest = off.x[k] * one_of;
      const double delta = (double(about.x[k]) + double(rest)) - mean.x[k];
      mean.x[k] += delta * part;
      squares.x[k] += double(at_least(distance.x[k] - off.x[k] * rest, T(0))) + delta * delta * weight;
    }
    count = both;
  });
  __shared__ ColumnSums sums;
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k) sums.a[sums.own(k)] = mean.x[k], sums.b[sums.own(k)] = squares.x[k];
  sums.for_channels(share, [&](int64_t channel, int x, int k) {
    double all = 0, sum = 0;
    for (int y = 0; y < int(blockDim.y); ++y) sum += share.rows(y) * sums.a[sums.place(y, x, k)];
    sum /= double(share.end - share.begin);
    for (int y = 0; y < int(blockDim.y); ++y) {
      const double d = sums.a[sums.place(y, x, k)] - sum;
      all += sums.b[sums.place(y, x, k)] + share.rows(y) * d * d;
    }
    means[blockIdx.y * share.channels + channel] = sum;
    m2[blockIdx.y * share.channels + channel] = all;
  });
}

// A thread's sums leave the type computed in, for shared memory, after kSumRows rows.
constexpr int kSumRows = 8;

template <class T, bool wide, bool any>
__global__ void __launch_bounds__(kColumnThreads, sizeof(T) == 8 ? 1 : kColumnBlocks)
    column_sums_kernel(const ChannelArgs args, const Statistics<T> s, double* dz, double* dz_distance) {
  constexpr int n = any ? 1 : 3;
  const ColumnShare share(args);
  const int64_t channels = share.channels;
  __shared__ ChannelTerms<T> terms[kLanes * kWidth];
  __shared__ ColumnSums sums;
  const int thread = int(threadIdx.y * blockDim.x + threadIdx.x);
  const int64_t first = int64_t(blockIdx.x) * blockDim.x * kWidth;
  if (thread < int(blockDim.x) * kWidth && first + thread < channels)
    terms[thread] = sum_terms(args, s, first + thread);
  __syncthreads();
  Vector<T> center = {}, scale = {}, shift = {}, sum = {}, distance = {};
  column_terms(share, [&](int k, int64_t channel) {
    const ChannelTerms<T>& t = terms[channel - first];
    center.x[k] = t.center, scale.x[k] = t.scale, shift.x[k] = t.shift;
  });
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k) sums.a[sums.own(k)] = sums.b[sums.own(k)] = 0;
  int held = 0;
  const auto let_go = [&] {
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) {
      sums.a[sums.own(k)] += double(sum.x[k]), sums.b[sums.own(k)] += double(distance.x[k]);
      sum.x[k] = distance.x[k] = 0;
    }
  };
  share.for_rows<n>([&](const ColumnShare::Rows& rows) {
    Pending<T, wide> x[n], g[n];
    MEMKIT_UNROLL
    for (int r = 0; r < n; ++r) {
      if (!rows.exists(r)) continue;
      const int64_t at = rows.at(r), end = at - share.c + channels;
      x[r].load(args.x, args.dtype, at, end);
      g[r].load(args.grad, args.out_dtype, at, end);
    }
    MEMKIT_UNROLL
    for (int r = 0; r < n; ++r) {
      if (!rows.exists(r)) continue;
      Vector<T> from_center = x[r].values(args.dtype), own = g[r].values(args.out_dtype), z;
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) {
        from_center.x[k] -= center.x[k];
        z.x[k] = from_center.x[k] * scale.x[k] + shift.x[k];
      }
      with_act<any>(args, ActGradient<T>{}, z, own);
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) sum.x[k] += own.x[k], distance.x[k] += own.x[k] * from_center.x[k];
    }
    held += n;
    if (held >= kSumRows) let_go(), held = 0;
  });
  let_go();
  sums.for_channels(share, [&](int64_t channel, int x, int k) {
    double a = 0, b = 0;
    for (int y = 0; y < int(blockDim.y); ++y) a += sums.a[sums.place(y, x, k)], b += sums.b[sums.place(y, x, k)];
    dz[blockIdx.y * channels + channel] = a;
    dz_distance[blockIdx.y * channels + channel] = b;
  });
}

template <class T, bool any>
__global__ void __launch_bounds__(kColumnThreads, sizeof(T) == 8 ? 1 : kColumnBlocks)
    column_forward_kernel(const ChannelArgs args) {
  constexpr int n = any ? 1 : 4;
  const ColumnShare share(args);
  const TermArrays<const T> terms{static_cast<const T*>(args.terms), args.sets};
  Vector<T> center = {}, scale = {}, shift = {};
  column_terms(share, [&](int k, int64_t channel) {
    center.x[k] = terms.center()[channel], scale.x[k] = terms.scale()[channel], shift.x[k] = terms.shift()[channel];
  });
  share.for_rows<n>([&](const ColumnShare::Rows& rows) {
    RawVector<T> x[n];
    MEMKIT_UNROLL
    for (int r = 0; r < n; ++r)
      if (rows.exists(r)) x[r].load(args.x, args.dtype, rows.at(r));
    MEMKIT_UNROLL
    for (int r = 0; r < n; ++r) {
      if (!rows.exists(r)) continue;
      Vector<T> z = x[r].values(args.dtype);
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) z.x[k] = ChannelTerms<T>{center.x[k], scale.x[k], shift.x[k]}.value(z.x[k]);
      with_act<any>(args, ActValue<T>{}, z);
      store_eight(z, args.y, args.out_dtype, rows.at(r), rows.at(r) + kWidth, true);
    }
  });
}

template <class T, bool any>
__global__ void __launch_bounds__(kColumnThreads, sizeof(T) == 8 ? 1 : kColumnBlocks)
    column_backward_kernel(const ChannelArgs args) {
  constexpr int n = any ? 1 : 3;
  const ColumnShare share(args);
  const TermArrays<const T> terms{static_cast<const T*>(args.terms), args.sets};
  ChannelTerms<T> own[kWidth] = {};
  column_terms(share, [&](int k, int64_t channel) {
    own[k] = {terms.center()[channel], terms.scale()[channel], terms.shift()[channel], terms.offset()[channel],
              terms.slope()[channel]};
  });
  share.for_rows<n>([&](const ColumnShare::Rows& rows) {
    RawVector<T> x[n], g[n];
    MEMKIT_UNROLL
    for (int r = 0; r < n; ++r) {
      if (!rows.exists(r)) continue;
      x[r].load(args.x, args.dtype, rows.at(r));
      g[r].load(args.grad, args.out_dtype, rows.at(r));
    }
    MEMKIT_UNROLL
    for (int r = 0; r < n; ++r) {
      if (!rows.exists(r)) continue;
      const Vector<T> given = x[r].values(args.dtype);
      Vector<T> dz = g[r].values(args.out_dtype), z;
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) z.x[k] = own[k].value(given.x[k]);
      with_act<any>(args, ActGradient<T>{}, z, dz);
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) dz.x[k] = own[k].gradient(given.x[k], dz.x[k]);
      store_eight(dz, args.grad_input, args.dtype, rows.at(r), rows.at(r) + kWidth, true);
    }
  });
}

// -- from a call to the launch ---------------------------------------------------------------------------------------------

inline dim3 column_threads(const ChannelArgs& args) {
  unsigned threads = 1;
  while (threads < kLanes && threads * kWidth < args.channels) threads *= 2;
  return dim3(threads, kColumnThreads / threads);
}
inline dim3 column_grid(const ChannelArgs& args, int64_t ranges) {
  const int64_t each = int64_t(column_threads(args).x) * kWidth;
  return dim3(unsigned((args.channels + each - 1) / each), unsigned(ranges));
}
// Ranges of rows for as many blocks as the device has at a time, each with a few rows a thread at least.
inline cudaError_t column_ranges(const ChannelArgs& args, int64_t& ranges, bool* fill = nullptr) {
  int count = 0;
  if (const cudaError_t error = processor_count(count)) return error;
  const int64_t tiles = column_grid(args, 1).x;
  const int64_t ways = std::max<int64_t>(1, int64_t(count) * kColumnBlocks / tiles);
  ranges = std::min<int64_t>(std::min<int64_t>(ways, args.outer / 64 + 1), 65535);
  if (fill) *fill = ranges * tiles >= count;
  return cudaSuccess;
}

template <class T>
auto column_moments(Dtype dtype) {
  if constexpr (sizeof(T) == 8) {
    return column_moments_kernel<double>;
  } else {
    return dtype == Dtype::float32   ? column_moments_kernel<float>
           : dtype == Dtype::float16 ? column_moments_kernel<Half>
                                     : column_moments_kernel<Bfloat>;
  }
}

// A pass over all elements: by columns where these are aligned and fill the device, of the kernels the short one where there
// is no activation, or relu; else by `elements`.
using ColumnKernel = void (*)(ChannelArgs);

inline int launch_over_all(ColumnKernel short_one, ColumnKernel any, void (*elements)(ChannelArgs, SetFinder, bool),
                           const ChannelArgs& args, cudaStream_t stream) {
  int64_t ranges = 0;
  bool fill = args.columns() && wide_units(args);
  if (fill)
    if (const cudaError_t error = column_ranges(args, ranges, &fill)) return error;
  if (!fill) return launch_elements(elements, args, stream);
  launch_kernel(is_any(args) ? any : short_one, column_grid(args, ranges), column_threads(args), stream, args);
  return cudaGetLastError();
}

}  // namespace memkit::cuda
