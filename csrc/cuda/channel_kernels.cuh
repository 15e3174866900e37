// The passes of batch and group norm over the tensor, one kernel for all activations. A thread works on eight neighbouring
// elements; sums are taken by a block over a plane. The layout of columns has kernels of its own (channel_columns.cuh).
#pragma once

#include <algorithm>

#include "../formulas/channel_norm.h"
#include "bias.cuh"
#include "channel_norm.h"
#include "numbers.cuh"
#include "vector.cuh"

namespace memkit::cuda {

// Which set each of eight neighbouring elements belongs to.
struct SetFinder {
  Divisor inner, sets;
  bool together;   // eight elements are of one set
  bool in_eights;  // or of eight neighbouring ones, the first a multiple of eight

  SetFinder(const ChannelArgs& args, bool wide)
      : inner(std::max<int64_t>(1, args.inner)),
        sets(std::max<int64_t>(1, args.sets)),
        together(wide && args.inner % kWidth == 0),
        in_eights(args.inner == 1 && args.sets % kWidth == 0 && is_aligned(args.terms)) {}

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
  } else if (find.in_eights) {
    const int64_t set = find.of(i);
    const auto eight = [&](const T* array) {
      Eight<T> raw;
      raw.load(array + set);
      return raw.values();
    };
    const Vector<T> center = eight(arrays.center()), scale = eight(arrays.scale()), shift = eight(arrays.shift());
    const Vector<T> offset = eight(arrays.offset()), slope = eight(arrays.slope());
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k)
      f(k, ChannelTerms<T>{center.x[k], scale.x[k], shift.x[k], offset.x[k], slope.x[k]});
  } else {
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k)
      if (i + k < end) f(k, terms(find.of(i + k)));
  }
}

MEMKIT_FN Act act_of(const ChannelArgs& args) { return args.has_act ? args.act : Act::identity; }

// An activation's value and gradient. Those of float64 are called: written out for each of eight elements, its long formulas
// were a fifth of all that these kernels took to compile.
template <class Op>
__device__ __noinline__ double far_value(Op op, double z) {
  return op.value(z);
}
template <class Op>
__device__ __noinline__ double far_gradient(Op op, double g, double z) {
  return gradient_at_input(op, g, z);
}
template <class Op, class T>
__device__ T act_value(const Op& op, T z) {
  if constexpr (std::is_same_v<T, double> && !has_two_slopes<Op>)
    return far_value(op, z);
  else
    return op.value(z);
}
template <class Op, class T>
__device__ T act_gradient(const Op& op, T g, T z) {
  if constexpr (std::is_same_v<T, double> && !has_two_slopes<Op>)
    return far_gradient(op, g, z);
  else
    return gradient_at_input(op, g, z);
}

// What stands behind the norm, on eight elements: all threads of a launch take the same branch.
template <class T>
struct ActValue {
  template <template <class, bool> class Formula>
  __device__ void operator()(const ActParams& params, Vector<T>& z) const {
    const Formula<T, false> op(params);
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) z.x[k] = act_value(op, z.x[k]);
  }
};

// The gradient of z from that of act(z).
template <class T>
struct ActGradient {
  template <template <class, bool> class Formula>
  __device__ void operator()(const ActParams& params, const Vector<T>& z, Vector<T>& g) const {
    const Formula<T, false> op(params);
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) g.x[k] = act_gradient(op, g.x[k], z.x[k]);
  }
  template <template <class, bool> class Formula>
  __device__ void operator()(const ActParams& params, const ChannelTerms<T>& t, const Vector<T>& x,
                             Vector<T>& g) const {
    const Formula<T, false> op(params);
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) g.x[k] = act_gradient(op, g.x[k], t.value(x.x[k]));
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

__device__ inline void move(const Running& running, int64_t channel, double mean, double variance) {
  running.mean.put(channel, moved(running.mean[channel], mean, running.momentum));
  running.variance.put(channel, moved(running.variance[channel], running.factor * variance, running.momentum));
}

// What sums of dz and of dz x_hat are to a channel's parameters.
template <class T>
__device__ void put_parameters(const FromSums<T>& to, int64_t channel, const typename Statistics<T>::Sums& sums) {
  if (to.grad_weight) to.grad_weight.put(channel, sums.distance);
  if (to.grad_bias) to.grad_bias.put(channel, sums.dz);
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

// Of short planes a thread has a vector of several at a time: what one waits for the others hide. f(first plane of the
// block's, exists(slot), index of its first element).
template <int planes>
struct PlaneSlots {
  int64_t first, all, inner;

  __device__ int64_t plane(int s) const { return first + int64_t(s) * blockDim.y + threadIdx.y; }
  __device__ int64_t column() const { return int64_t(threadIdx.x) * kWidth; }
  __device__ bool exists(int s) const { return plane(s) < all && column() < inner; }
  __device__ int64_t at(int s) const { return plane(s) * inner + column(); }
  // f(s) by one thread for each plane, each by another where there are as many.
  template <class F>
  __device__ void each_once(F&& f) const {
    MEMKIT_UNROLL
    for (int s = 0; s < planes; ++s)
      if (threadIdx.x == s % blockDim.x && plane(s) < all) f(s);
  }
};

template <int planes, class F>
__device__ void for_plane_slots(const ChannelArgs& args, F&& f) {
  const int64_t each = int64_t(blockDim.y) * planes;
  for (int64_t first = blockIdx.x * each; first < args.planes(); first += gridDim.x * each)
    f(PlaneSlots<planes>{first, args.planes(), args.inner});
}

constexpr int kChannelThreads = 256;
constexpr int kPlanesOfMoments = 4, kPlanesOfSums = 2;
constexpr int kShortPlane = kLanes * kWidth;

// What the sums need of a set's terms: the center alone where there is no activation. A warp makes them for a block, as most
// devices are slow in double precision.
template <class T>
__device__ ChannelTerms<T> sum_terms(const ChannelArgs& args, const Statistics<T>& s, int64_t set) {
  const int64_t i = s.statistic_of(set);
  if (!args.has_act) return {T(s.mean[i])};
  return s.terms_from(s.mean[i], s.rstd(i), set % s.channels);
}

// Those of a plane that a warp or a whole block has.
template <class T>
__device__ ChannelTerms<T> plane_terms(const ChannelArgs& args, const Statistics<T>& s, int64_t plane) {
  if (blockDim.x <= kLanes) return sum_terms(args, s, plane % args.sets);
  __shared__ ChannelTerms<T> shared;
  __syncthreads();  // the last ones have been read
  if (threadIdx.x == 0) shared = sum_terms(args, s, plane % args.sets);
  __syncthreads();
  return shared;
}

// dz of eight elements from their gradients. acts: whether there may be an activation.
template <bool acts, class T>
__device__ void to_dz(const ChannelArgs& args, const ChannelTerms<T>& t, const Vector<T>& x, Vector<T>& g) {
  if constexpr (acts) visit(act_of(args), ActGradient<T>{}, args.params, t, x, g);
}

// dz and dz (x - center) of eight elements, added up.
template <class T, bool acts = true>
__device__ void add_sums(const ChannelArgs& args, const ChannelTerms<T>& t, const Vector<T>& x, Vector<T> g, int exist,
                         Pair<T>& sum) {
  to_dz<acts>(args, t, x, g);
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k)
    if (k < exist) sum.a += g.x[k], sum.b += g.x[k] * (x.x[k] - t.center);
}

// Aligned.
template <class T>
__global__ void short_plane_sums_kernel(const ChannelArgs args, const Statistics<T> s, double* dz,
                                        double* dz_distance) {
  constexpr int n = kPlanesOfSums;
  __shared__ ChannelTerms<T> terms[n * kChannelThreads];
  for_plane_slots<n>(args, [&](const PlaneSlots<n>& slot) {
    RawVector<T> x[n] = {}, g[n] = {};
    MEMKIT_UNROLL
    for (int i = 0; i < n; ++i) {
      if (!slot.exists(i)) continue;
      x[i].load(args.x, args.dtype, slot.at(i));
      g[i].load(args.grad, args.out_dtype, slot.at(i));
    }
    __syncthreads();  // the last terms have been read
    for (int p = threadIdx.y * blockDim.x + threadIdx.x; p < n * int(blockDim.y); p += kChannelThreads)
      if (slot.first + p < slot.all) terms[p] = sum_terms(args, s, (slot.first + p) % args.sets);
    __syncthreads();
    Pair<T> sums[n] = {};
    MEMKIT_UNROLL
    for (int i = 0; i < n; ++i)
      if (slot.exists(i))
        add_sums(args, terms[slot.plane(i) - slot.first], x[i].values(args.dtype), g[i].values(args.out_dtype), kWidth,
                 sums[i]);
    block_sums(sums);
    slot.each_once([&](int i) { dz[slot.plane(i)] = sums[i].a, dz_distance[slot.plane(i)] = sums[i].b; });
  });
}

template <class T>
__global__ void plane_sums_kernel(const ChannelArgs args, const Statistics<T> s, const bool wide, double* dz,
                                  double* dz_distance) {
  for_planes(args, [&](int64_t plane) {
    const int64_t begin = plane * args.inner, end = begin + args.inner;
    const ChannelTerms<T> t = plane_terms(args, s, plane);
    Pair<double> sum{0, 0};
    for_eights<T, 2>(begin, end, wide, args.x, args.dtype, [&](const Vector<T>& x, int64_t i) {
      Pair<T> own{0, 0};
      add_sums(args, t, x, load_eight<T>(args.grad, args.out_dtype, i, end, wide),
               wide ? kWidth : int(at_most(end - i, int64_t(kWidth))), own);
      sum.a += double(own.a), sum.b += double(own.b);
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) dz[plane] = sum.a, dz_distance[plane] = sum.b;
  });
}

// -- from a call to the launch ---------------------------------------------------------------------------------------------

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

// One of those over short planes, `planes` a thread at a time.
template <class... P>
void launch_short_planes(void (*kernel)(ChannelArgs, P...), int planes, const ChannelArgs& args, cudaStream_t stream,
                         typename Same<P>::type... rest) {
  int64_t threads = 1;
  while (threads * kWidth < args.inner) threads *= 2;
  const dim3 block(unsigned(threads), unsigned(kChannelThreads / threads));
  const int64_t each = int64_t(block.y) * planes;
  const auto blocks = unsigned(std::min<int64_t>((args.planes() + each - 1) / each, 1 << 30));
  launch_kernel(kernel, blocks, block, stream, args, rest...);
}

inline bool has_short_planes(const ChannelArgs& args, bool wide) { return wide && args.inner <= kShortPlane; }

// Whether the accesses of a pass by units are aligned: every unit begins on a word.
inline bool wide_units(const ChannelArgs& args) {
  return channel_aligned(args) && (args.columns() ? args.channels : args.inner) % kWidth == 0;
}

}  // namespace memkit::cuda
