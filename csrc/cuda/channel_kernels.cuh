// The passes of batch and group norm over the tensor, one kernel for all activations. A thread works on eight neighbouring
// elements; sums are taken by a block over a plane or, in the layout of columns, over some rows of eight channels a thread.
#pragma once

#include <algorithm>

#include "../formulas/channel_norm.h"
#include "bias.cuh"
#include "vector.cuh"

namespace memkit::cuda {

// Which set each of eight neighbouring elements belongs to.
struct SetFinder {
  Divisor inner, sets;
  bool together;  // eight elements are of one set

  SetFinder(const ChannelArgs& args, bool wide)
      : inner(std::max<int64_t>(1, args.inner)),
        sets(std::max<int64_t>(1, args.sets)),
        together(wide && args.inner % kWidth == 0) {}

  MEMKIT_FN int64_t of(int64_t i) const { return sets.remainder(inner.divide(i)); }
};

// f(k, terms of element i + k) for the eight elements from i on.
template <class T, class F>
__device__ void for_terms(const ChannelArgs& args, const SetFinder& find, int64_t i, int64_t end, F&& f) {
  const TermArrays<const T> arrays{static_cast<const T*>(args.terms), args.sets};
  const auto terms = [&](int64_t set) {
    return ChannelTerms<T>{arrays.center()[set], arrays.scale()[set], arrays.shift()[set], arrays.offset()[set],
                           arrays.slope()[set]};
  };
  if (find.together) {
    const ChannelTerms<T> all = terms(find.of(i));
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) f(k, all);
  } else {
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k)
      if (i + k < end) f(k, terms(find.of(i + k)));
  }
}

MEMKIT_FN Act act_of(const ChannelArgs& args) { return args.has_act ? args.act : Act::identity; }

// What stands behind the norm, on eight elements: all threads of a launch take the same branch.
template <class T>
struct ActValue {
  template <template <class, bool> class Formula>
  __device__ void operator()(const ActParams& params, Vector<T>& z) const {
    const Formula<T, false> op(params);
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) z.x[k] = op.value(z.x[k]);
  }
};

// The gradient of z from that of act(z).
template <class T>
struct ActGradient {
  template <template <class, bool> class Formula>
  __device__ void operator()(const ActParams& params, const Vector<T>& z, Vector<T>& g) const {
    const Formula<T, false> op(params);
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) g.x[k] = gradient_at_input(op, g.x[k], z.x[k]);
  }
};

template <class T>
__global__ void channel_forward_kernel(const ChannelArgs args, const SetFinder find, const bool wide) {
  const int64_t end = args.numel(), step = int64_t(gridDim.x) * blockDim.x * kWidth;
  for (int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth; i < end; i += step) {
    const bool whole = wide && i + kWidth <= end;
    Vector<T> x = load_eight<T>(args.x, args.dtype, i, end, whole);
    for_terms<T>(args, find, i, end, [&](int k, const ChannelTerms<T>& t) { x.x[k] = t.value(x.x[k]); });
    visit(act_of(args), ActValue<T>{}, args.params, x);
    store_eight(x, args.y, args.out_dtype, i, end, whole);
  }
}

template <class T>
__global__ void channel_backward_kernel(const ChannelArgs args, const SetFinder find, const bool wide) {
  const int64_t end = args.numel(), step = int64_t(gridDim.x) * blockDim.x * kWidth;
  for (int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth; i < end; i += step) {
    const bool whole = wide && i + kWidth <= end;
    const Vector<T> x = load_eight<T>(args.x, args.dtype, i, end, whole);
    Vector<T> g = load_eight<T>(args.grad, args.out_dtype, i, end, whole), z = {};
    for_terms<T>(args, find, i, end, [&](int k, const ChannelTerms<T>& t) { z.x[k] = t.value(x.x[k]); });
    visit(act_of(args), ActGradient<T>{}, args.params, z, g);
    for_terms<T>(args, find, i, end, [&](int k, const ChannelTerms<T>& t) { g.x[k] = t.gradient(x.x[k], g.x[k]); });
    store_eight(g, args.grad_input, args.dtype, i, end, whole);
  }
}

// A block for each plane, or a warp of a block of several.
template <class F>
__device__ void for_planes(const ChannelArgs& args, F&& f) {
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  for (int64_t plane = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; plane < args.planes(); plane += step) f(plane);
}

// f(eight elements, index of the first) for those of [begin, end) that are the thread's, of blockDim.x threads. The loads of
// `ahead` vectors are under way before the first is used.
template <class T, int ahead, class F>
__device__ void for_eights(int64_t begin, int64_t end, bool wide, const void* array, Dtype dtype, F&& f) {
  const int64_t step = int64_t(blockDim.x) * kWidth;
  for (int64_t i = begin + int64_t(threadIdx.x) * kWidth; i < end; i += step * ahead) {
    if (wide) {
      RawVector<T> raw[ahead];
      MEMKIT_UNROLL
      for (int a = 0; a < ahead; ++a)
        if (i + a * step < end) raw[a].load(array, dtype, i + a * step);
      MEMKIT_UNROLL
      for (int a = 0; a < ahead; ++a)
        if (i + a * step < end) f(raw[a].values(dtype), i + a * step);
    } else {
      for (int a = 0; a < ahead; ++a)
        if (i + a * step < end) f(load_eight<T>(array, dtype, i + a * step, end, false), i + a * step);
    }
  }
}

template <class T>
__global__ void plane_sums_kernel(const ChannelArgs args, const bool wide, double* dz, double* dz_distance) {
  const TermArrays<const T> arrays{static_cast<const T*>(args.terms), args.sets};
  for_planes(args, [&](int64_t plane) {
    const int64_t set = plane % args.sets, begin = plane * args.inner, end = begin + args.inner;
    const ChannelTerms<T> t{arrays.center()[set], arrays.scale()[set], arrays.shift()[set], T(0), T(0)};
    Pair<double> sum{0, 0};
    for_eights<T, 2>(begin, end, wide, args.x, args.dtype, [&](const Vector<T>& x, int64_t i) {
      Vector<T> g = load_eight<T>(args.grad, args.out_dtype, i, end, wide), z;
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) z.x[k] = t.value(x.x[k]);
      visit(act_of(args), ActGradient<T>{}, args.params, z, g);
      Pair<T> own{0, 0};
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k)
        if (wide || i + k < end) own.a += g.x[k], own.b += g.x[k] * (x.x[k] - t.center);
      sum.a += double(own.a), sum.b += double(own.b);
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) dz[plane] = sum.a, dz_distance[plane] = sum.b;
  });
}

constexpr int kColumnThreads = 32, kRowThreads = 8;  // of a block in the layout of columns

// A thread has eight channels and every kRowThreads-th row of its block's range; blockIdx.y is the range.
template <class T>
__global__ void column_sums_kernel(const ChannelArgs args, const bool wide, double* dz, double* dz_distance) {
  const int64_t channels = args.channels;
  const int64_t c = (int64_t(blockIdx.x) * kColumnThreads + threadIdx.x) * kWidth;
  const int64_t begin = args.outer * blockIdx.y / gridDim.y, end = args.outer * (blockIdx.y + 1) / gridDim.y;
  const TermArrays<const T> arrays{static_cast<const T*>(args.terms), args.sets};
  Vector<T> center = {}, scale = {}, shift = {};
  Vector<double> sum = {}, sum_distance = {};
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k)
    if (c + k < channels)
      center.x[k] = arrays.center()[c + k], scale.x[k] = arrays.scale()[c + k], shift.x[k] = arrays.shift()[c + k];
  if (c < channels) {
    for (int64_t row = begin + threadIdx.y; row < end; row += kRowThreads) {
      const int64_t at = row * channels + c, row_end = (row + 1) * channels;
      const Vector<T> x = load_eight<T>(args.x, args.dtype, at, row_end, wide);
      Vector<T> g = load_eight<T>(args.grad, args.out_dtype, at, row_end, wide), z;
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) z.x[k] = (x.x[k] - center.x[k]) * scale.x[k] + shift.x[k];
      visit(act_of(args), ActGradient<T>{}, args.params, z, g);
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k)
        sum.x[k] += double(g.x[k]), sum_distance.x[k] += double(g.x[k] * (x.x[k] - center.x[k]));
    }
  }
  __shared__ double rows[2][kRowThreads][kColumnThreads];
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k) {
    __syncthreads();
    rows[0][threadIdx.y][threadIdx.x] = sum.x[k];
    rows[1][threadIdx.y][threadIdx.x] = sum_distance.x[k];
    __syncthreads();
    if (threadIdx.y != 0 || c + k >= channels) continue;
    double a = 0, b = 0;
    MEMKIT_UNROLL
    for (int r = 0; r < kRowThreads; ++r) a += rows[0][r][threadIdx.x], b += rows[1][r][threadIdx.x];
    dz[blockIdx.y * channels + c + k] = a;
    dz_distance[blockIdx.y * channels + c + k] = b;
  }
}

// -- from a call to the launch ---------------------------------------------------------------------------------------------

constexpr int kChannelThreads = 256;

inline bool channel_aligned(const ChannelArgs& args) {
  return is_aligned(args.x) && is_aligned(args.y) && is_aligned(args.grad) && is_aligned(args.grad_input);
}

inline cudaError_t element_blocks(const ChannelArgs& args, unsigned& blocks) {
  int count = 0;
  if (const cudaError_t error = processor_count(count)) return error;
  const int64_t each = int64_t(kChannelThreads) * kWidth;
  blocks = unsigned(std::min<int64_t>((args.numel() + each - 1) / each, int64_t(count) * 64));
  return cudaSuccess;
}

// One of the kernels that take eight elements a thread.
inline int launch_elements(void (*kernel)(ChannelArgs, SetFinder, bool), const ChannelArgs& args, cudaStream_t stream) {
  unsigned blocks = 0;
  if (const cudaError_t error = element_blocks(args, blocks)) return error;
  const bool wide = channel_aligned(args);
  launch_kernel(kernel, blocks, kChannelThreads, stream, args, SetFinder(args, wide), wide);
  return cudaGetLastError();
}

// One of the kernels over planes: a thread has up to four vectors of a plane at a time, and a block several short planes.
template <class... P>
void launch_planes(void (*kernel)(ChannelArgs, P...), const ChannelArgs& args, cudaStream_t stream,
                   typename Same<P>::type... rest) {
  const int64_t warps = (args.inner + kLanes * kWidth * 4 - 1) / (kLanes * kWidth * 4);
  const unsigned threads = unsigned(std::min<int64_t>(warps * kLanes, kChannelThreads));
  const unsigned together = threads == kLanes ? kChannelThreads / kLanes : 1;
  const auto blocks = unsigned(std::min<int64_t>((args.planes() + together - 1) / together, 1 << 30));
  launch_kernel(kernel, blocks, dim3(threads, together), stream, args, rest...);
}

inline dim3 column_grid(const ChannelArgs& args, int64_t parts) {
  const int64_t each = kColumnThreads * kWidth;
  return dim3(unsigned((args.channels + each - 1) / each), unsigned(parts / args.channels));
}
inline dim3 column_threads() { return dim3(kColumnThreads, kRowThreads); }

// Whether the accesses of a pass by units are aligned: every unit begins on a word.
inline bool wide_units(const ChannelArgs& args) {
  return channel_aligned(args) && (args.columns() ? args.channels : args.inner) % kWidth == 0;
}

}  // namespace memkit::cuda
