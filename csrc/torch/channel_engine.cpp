#include "channel_engine.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "../cpu/channel_norm.h"
#include "engine.h"

#ifdef MEMKIT_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../cuda/channel_norm.h"
#endif

namespace memkit {
namespace {

using at::Tensor;

constexpr int64_t kGrain = 32768;  // elements below which one thread is faster than two
// A loop over a plane costs as much as some elements do: smaller planes are columns, if there are as many rows as a plane
// has elements, which pays for terms for every element of a row. Sums over a plane, which end in adding up partial sums,
// cost more.
constexpr int64_t kSmallPlane = 32, kSmallPlaneOfSums = 128, kRowsOfColumns = 4;
constexpr int64_t kCached = 32768;  // elements that stay in the second-level cache from one pass to the next
constexpr int64_t kShortRow = 512;  // elements of rows of columns that are walked as one, for the same reason
constexpr int64_t kBlock = 16384;   // elements of groups that all passes are over, one pass after the other

// Parts: what moments and sums are taken of. `each` of `ways` ranges of rows in the layout of columns, else planes.
struct Parts {
  int64_t ways, count;
};

// The moments of a group are those of a plane of all its channels.
ChannelCall by_groups(ChannelCall call) {
  if (call.groups) {
    call.args.inner *= call.args.channels / call.groups;
    call.args.channels = call.groups;
    call.args.sets = call.args.planes();
  }
  return call;
}

// Batch norm of small planes on the CPU: the elements of a plane become channels of their own, with the same terms.
ChannelCall by_columns(ChannelCall call, int64_t small) {
  ChannelArgs& args = call.args;
  if (call.device.is_cpu() && call.groups == 0 && args.inner < small &&
      args.outer >= std::max(kRowsOfColumns, args.inner)) {
    call.together = args.inner;
    args.channels = args.sets = args.channels * args.inner;
    args.inner = 1;
  }
  return call;
}

// Columns of few channels on the CPU: some rows become one, whose channels are theirs one after the other. Not for
// moments, whose parts have to be of known sizes.
ChannelCall by_long_rows(ChannelCall call) {
  ChannelArgs& args = call.args;
  if (!call.device.is_cpu() || !args.columns()) return call;
  while (2 * args.channels <= kShortRow && args.outer % 2 == 0 && args.outer >= 2 * kRowsOfColumns)
    args.outer /= 2, args.channels *= 2, args.sets *= 2, call.repeat *= 2;
  return call;
}

Parts parts_of(const ChannelCall& call) {
  const ChannelArgs& args = call.args;
  if (!args.columns()) return {1, args.planes()};
#ifdef MEMKIT_WITH_CUDA
  if (call.device.is_cuda()) {
    int64_t count = 0;
    C10_CUDA_CHECK(static_cast<cudaError_t>(cuda::channel_parts(args, count)));
    return {count / args.channels, count};
  }
#endif
  const int64_t most = std::max<int64_t>(1, args.numel() / kGrain);
  const int64_t ways = std::max<int64_t>(1, std::min<int64_t>({at::get_num_threads(), most, args.outer}));
  return {ways, ways * args.channels};
}

template <class T>
ChannelStatistics<T> statistics_of(const ChannelCall& call, const Parts& parts) {
  const ChannelArgs& args = call.args;
  ChannelStatistics<T> s;
  s.channels = args.channels / (call.together * call.repeat);
  s.groups = call.groups;
  if (call.groups) {
    s.statistics = args.outer * call.groups;
    s.step = s.count = args.channels / call.groups;
    s.size = s.count * args.inner;
  } else {
    s.statistics = s.stride = s.channels;
    s.count = parts.count / (s.channels * call.together);
    s.size = args.numel() / s.channels;
    s.together = call.together;
  }
  s.eps = call.eps;
  s.weight = static_cast<const T*>(call.weight);
  s.bias = static_cast<const T*>(call.bias);
  s.mean = call.mean;
  s.variance = call.variance;
  return s;
}

// Calls f with a value of the type computed in.
template <class F>
void with_computed(const ChannelCall& call, const F& f) {
  if (call.computed == at::kDouble) {
    f(double());
  } else {
    f(float());
  }
}

// Memory for one pass. On the CPU past the dispatcher, which takes as long as a small pass.
Tensor room(const ChannelCall& call, at::IntArrayRef shape, at::ScalarType dtype) {
  if (call.device.is_cpu()) return Tensor(at::detail::empty_cpu(shape, dtype));
  return at::empty(shape, at::TensorOptions(dtype).device(call.device));
}
Tensor scratch(const ChannelCall& call, int64_t count) { return room(call, {2, count}, at::kDouble); }

// f(begin, end, part): over units, in ranges; part is where the results of a range of rows go.
template <class F>
void for_units(const ChannelArgs& args, const Parts& parts, const F& f) {
  if (args.columns()) {
    at::parallel_for(0, parts.ways, 1, [&](int64_t begin, int64_t end) {
      for (int64_t way = begin; way < end; ++way)
        f(args.outer * way / parts.ways, args.outer * (way + 1) / parts.ways, way * args.channels);
    });
  } else {
    at::parallel_for(0, args.planes(), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, args.inner)),
                     [&](int64_t begin, int64_t end) { f(begin, end, int64_t(0)); });
  }
}

template <class F>
void for_elements(const ChannelArgs& args, const F& f) {
  // Whole blocks, so that no two threads write to one cache line.
  constexpr int64_t kUnit = 512;
  const int64_t numel = args.numel();
  at::parallel_for(0, (numel + kUnit - 1) / kUnit, kGrain / kUnit,
                   [&](int64_t begin, int64_t end) { f(begin * kUnit, std::min(end * kUnit, numel)); });
}

#ifdef MEMKIT_WITH_CUDA
void check(int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }
CUstream_st* stream() { return c10::cuda::getCurrentCUDAStream().stream(); }
#endif

[[maybe_unused]] void without_cuda(const ChannelCall& call) {
  TORCH_CHECK(false, "memkit: expected a CPU tensor, got one on ", call.device,
              "; this memkit was built without CUDA: rebuild with MEMKIT_CUDA=1");
}

// On the CPU the steps between the passes are loops in the order of memory: there may be a part for every few elements.

// 1 / sqrt(variance + eps), which s then points to.
template <class T>
Tensor make_roots(const ChannelCall& call, ChannelStatistics<T>& s) {
  Tensor made = room(call, {s.statistics}, at::kDouble);
  double* roots = made.mutable_data_ptr<double>();
  at::parallel_for(0, s.statistics, 8192, [&](int64_t begin, int64_t end) {
    cpu::channel_roots(s.variance + begin, s.eps, end - begin, roots + begin);
  });
  s.roots = roots;
  return made;
}

// f(k, c, n): of channel c the sums at k, which are those of n elements. In the order of memory, for the channels
// [begin, end) of batch norm.
template <class T, class F>
void for_parts(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const F& f) {
  for (int64_t j = 0; j < s.count; ++j) {
    const int64_t first = j * s.channels;
    const double n = double(s.part_size(j)) / double(s.together);
    if (s.together == 1) {
      for (int64_t c = begin; c < end; ++c) f(first + c, c, n);
    } else {
      for (int64_t c = begin; c < end; ++c)
        for (int64_t i = 0; i < s.together; ++i) f((first + c) * s.together + i, c, n);
    }
  }
}

template <class T, class F>
void for_channels(const ChannelStatistics<T>& s, const F& f) {
  at::parallel_for(0, s.channels, std::max<int64_t>(8, kGrain / (s.count * s.together)), f);
}

// The mean first, then the distances from it.
template <class T>
void finish_batch_moments(const ChannelStatistics<T>& s, const double* means, const double* m2) {
  for_channels(s, [&](int64_t begin, int64_t end) {
    std::fill(s.mean + begin, s.mean + end, 0.0);
    std::fill(s.variance + begin, s.variance + end, 0.0);
    for_parts(s, begin, end, [&](int64_t k, int64_t c, double n) { s.mean[c] += n * means[k]; });
    for (int64_t c = begin; c < end; ++c) s.mean[c] /= double(s.size);
    for_parts(s, begin, end, [&](int64_t k, int64_t c, double n) {
      const double d = means[k] - s.mean[c];
      s.variance[c] += m2[k] + n * d * d;
    });
    for (int64_t c = begin; c < end; ++c) s.variance[c] /= double(s.size);
  });
}

// Of the channels [begin, end) the gradients of weight and bias, and c1 and c2 from them.
template <class T>
void finish_batch_sums(const ChannelStatistics<T>& s, int64_t begin, int64_t end, const double* sums,
                       const double* distances, double* dz, double* dz_x_hat, double* c1, double* c2) {
  std::fill(dz + begin, dz + end, 0.0);
  std::fill(dz_x_hat + begin, dz_x_hat + end, 0.0);
  for_parts(s, begin, end, [&](int64_t k, int64_t c, double) { dz[c] += sums[k], dz_x_hat[c] += distances[k]; });
  for (int64_t c = begin; c < end; ++c) {
    dz_x_hat[c] = (dz_x_hat[c] - s.lost(c) * dz[c]) * s.rstd(c);
    const double share = s.weight_of(c) / double(s.size);
    c1[c] = share * dz[c], c2[c] = share * dz_x_hat[c];
  }
}

// The gradients of weight and bias, from the sums over planes in the order of memory.
template <class T>
void finish_group_parameters(const ChannelStatistics<T>& s, const double* sums, const double* distances, double* dz,
                             double* dz_x_hat) {
  std::fill_n(dz, s.channels, 0.0);
  std::fill_n(dz_x_hat, s.channels, 0.0);
  for (int64_t i = 0; i < s.statistics; ++i) {
    const int64_t first = i * s.count, channel = first % s.channels;
    const double lost = s.lost(i), root = s.rstd(i);
    for (int64_t j = 0; j < s.count; ++j) {
      dz[channel + j] += sums[first + j];
      dz_x_hat[channel + j] += (distances[first + j] - lost * sums[first + j]) * root;
    }
  }
}

// The terms of all sets, which the call then points to.
template <class T>
Tensor make_terms(ChannelCall& call, const double* c1, const double* c2) {
  Tensor made = room(call, {5, call.args.sets}, call.computed);
  T* data = static_cast<T*>(made.mutable_data_ptr());
  call.args.terms = data;
  ChannelStatistics<T> s = statistics_of<T>(call, {1, call.args.planes()});
  if (call.device.is_cpu()) {
    const TermArrays<T> arrays{data, call.args.sets};
    const Tensor roots = make_roots(call, s);
    const int64_t row = call.args.sets / call.repeat;
    at::parallel_for(0, row / call.together, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t set = begin; set < end; ++set) {
        const ChannelTerms<T> own = s.terms(set, c1, c2);
        for (int64_t first = set * call.together; first < call.args.sets; first += row)
          for (int64_t i = 0; i < call.together; ++i) arrays.put(first + i, own);
      }
    });
    return made;
  }
#ifdef MEMKIT_WITH_CUDA
  check(cuda::channel_terms<T>(s, call.args.sets, c1, c2, data, stream()));
#endif
  return made;
}

// Group norm on the CPU where there are groups for all threads. A group's elements lie one behind the other: all passes are
// over some groups, which are in the cache after the first. One sample of planes of one element is columns, whose sums are
// over ranges of rows.
bool by_blocks(const ChannelCall& call) {
  return call.device.is_cpu() && call.groups && !call.args.columns() &&
         call.args.outer * call.groups >= at::get_num_threads();
}

// f(begin, end): of the groups of all samples.
template <class F>
void for_blocks(const ChannelCall& call, const F& f) {
  const int64_t groups = call.args.outer * call.groups, size = std::max<int64_t>(1, call.args.numel() / groups);
  const int64_t block = std::max<int64_t>(1, kBlock / size);
  at::parallel_for(0, groups, std::max<int64_t>(1, kGrain / size), [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += block) f(first, std::min(first + block, end));
  });
}

// The terms of the groups [begin, end).
template <class T>
void put_terms(const ChannelStatistics<T>& s, const TermArrays<T>& arrays, int64_t begin, int64_t end, const double* c1,
               const double* c2) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = i * s.count, channel = first % s.channels;
    for (int64_t j = 0; j < s.count; ++j) arrays.put(first + j, s.terms_of(i, channel + j, c1, c2));
  }
}

template <class T>
void norm_by_blocks(ChannelCall call) {
  const ChannelCall whole_groups = by_groups(call);
  ChannelStatistics<T> s = statistics_of<T>(call, {1, call.args.planes()});
  const Tensor terms = room(call, {5, call.args.sets}, call.computed), roots = room(call, {s.statistics}, at::kDouble);
  const TermArrays<T> arrays{static_cast<T*>(terms.mutable_data_ptr()), call.args.sets};
  double* const root = roots.mutable_data_ptr<double>();
  s.roots = root, call.args.terms = arrays.data;
  for_blocks(call, [&](int64_t begin, int64_t end) {
    cpu::channel_moments(whole_groups.args, begin, end, s.mean, s.variance);
    for (int64_t i = begin; i < end; ++i) s.variance[i] /= double(s.size);
    cpu::channel_roots(s.variance + begin, s.eps, end - begin, root + begin);
    put_terms(s, arrays, begin, end, nullptr, nullptr);
    cpu::channel_forward(call.args, begin * s.size, end * s.size);
  });
}

template <class T>
void gradients_by_blocks(ChannelCall call, double* dz, double* dz_x_hat) {
  const int64_t planes = call.args.planes();
  ChannelStatistics<T> s = statistics_of<T>(call, {1, planes});
  const Tensor terms = room(call, {5, planes}, call.computed),
               doubles = room(call, {2 * planes + 3 * s.statistics}, at::kDouble);
  const TermArrays<T> arrays{static_cast<T*>(terms.mutable_data_ptr()), planes};
  double *const sums = doubles.mutable_data_ptr<double>(), *const distances = sums + planes;
  double *const root = distances + planes, *const c1 = root + s.statistics, *const c2 = c1 + s.statistics;
  s.roots = root, call.args.terms = arrays.data;
  for_blocks(call, [&](int64_t begin, int64_t end) {
    cpu::channel_roots(s.variance + begin, s.eps, end - begin, root + begin);
    for (int64_t i = begin; i < end; ++i)  // all that the sums need of the terms
      std::fill_n(arrays.center() + i * s.count, s.count, T(s.mean[i]));
    cpu::channel_sums(call.args, begin * s.count, end * s.count, sums, distances);
    for (int64_t i = begin; i < end; ++i) s.finish_sums(i, sums, distances, c1, c2);
    put_terms(s, arrays, begin, end, c1, c2);
    cpu::channel_backward(call.args, begin * s.size, end * s.size);
  });
  finish_group_parameters(s, sums, distances, dz, dz_x_hat);
}

// Batch norm of planes on the CPU where there are channels for all threads.
bool by_channels(const ChannelCall& call) {
  return call.device.is_cpu() && !call.groups && !call.args.columns() &&
         by_columns(call, kSmallPlaneOfSums).together == 1 && call.args.channels >= at::get_num_threads();
}

// Some channels at a time, which the second pass finds in the cache.
template <class T>
void gradients_by_channels(ChannelCall call, ChannelCall last, double* dz, double* dz_x_hat, double* c1, double* c2) {
  const ChannelArgs& args = call.args;
  const Parts parts = parts_of(call);
  const Tensor room = scratch(call, parts.count);
  double *sums = room.mutable_data_ptr<double>(), *distances = sums + parts.count;
  ChannelStatistics<T> s = statistics_of<T>(call, parts);
  const Tensor terms = make_terms<T>(call, nullptr, nullptr), roots = make_roots(call, s);
  const TermArrays<T> arrays{static_cast<T*>(terms.mutable_data_ptr()), args.sets};
  last.args.terms = arrays.data;
  const int64_t channel = args.outer * args.inner, at_once = std::max<int64_t>(1, kCached / channel);
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < args.planes(); plane += args.channels)
      cpu::channel_sums(args, plane, plane + end - begin, sums, distances, call.dz);
    finish_batch_sums(s, begin, end, sums, distances, dz, dz_x_hat, c1, c2);
    for (int64_t c = begin; c < end; ++c) arrays.put(c, s.terms(c, c1, c2));
    for (int64_t plane = begin; plane < args.planes(); plane += args.channels)
      cpu::channel_backward(last.args, plane * args.inner, (plane + end - begin) * args.inner);
  };
  at::parallel_for(0, args.channels, std::max<int64_t>(1, kGrain / channel), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c += at_once) some(c, std::min(end, c + at_once));
  });
}

}  // namespace

void run_channel_moments(const ChannelCall& whole) {
  const ChannelCall call = by_columns(by_groups(whole), kSmallPlaneOfSums);
  const Parts parts = parts_of(call);
  with_computed(call, [&](auto computed) {
    using T = decltype(computed);
    const Tensor room = scratch(call, parts.count);
    double *means = room.mutable_data_ptr<double>(), *m2 = means + parts.count;
    const ChannelStatistics<T> s = statistics_of<T>(call, parts);
    if (call.device.is_cpu()) {
      for_units(call.args, parts, [&](int64_t begin, int64_t end, int64_t part) {
        cpu::channel_moments(call.args, begin, end, means + part, m2 + part);
      });
      if (call.groups == 0) return finish_batch_moments(s, means, m2);
      for (int64_t i = 0; i < s.statistics; ++i) s.finish_moments(i, means, m2);
      return;
    }
#ifdef MEMKIT_WITH_CUDA
    const c10::cuda::CUDAGuard guard(call.device);
    check(cuda::channel_moments(call.args, parts.count, means, m2, stream()));
    check(cuda::channel_finish_moments<T>(s, means, m2, stream()));
#else
    without_cuda(call);
#endif
  });
}

void run_channel_forward(const ChannelCall& whole) {
  ChannelCall call = by_long_rows(by_columns(whole, kSmallPlane));
  with_computed(call, [&](auto computed) {
    if (call.device.is_cpu()) {
      const Tensor terms = make_terms<decltype(computed)>(call, nullptr, nullptr);
      for_elements(call.args, [&](int64_t begin, int64_t end) { cpu::channel_forward(call.args, begin, end); });
      return;
    }
#ifdef MEMKIT_WITH_CUDA
    const c10::cuda::CUDAGuard guard(call.device);
    const Tensor terms = make_terms<decltype(computed)>(call, nullptr, nullptr);
    check(cuda::channel_forward(call.args, stream()));
#else
    without_cuda(call);
#endif
  });
}

void run_channel_sums(const ChannelCall& whole, double* dz, double* dz_x_hat, double* c1, double* c2) {
  ChannelCall call = by_long_rows(by_columns(whole, kSmallPlaneOfSums));
  const Parts parts = parts_of(call);
  with_computed(call, [&](auto computed) {
    using T = decltype(computed);
    const Tensor room = scratch(call, parts.count);
    double *sums = room.mutable_data_ptr<double>(), *distances = sums + parts.count;
    ChannelStatistics<T> s = statistics_of<T>(call, parts);
    if (call.device.is_cpu()) {
      const Tensor terms = make_terms<T>(call, nullptr, nullptr), roots = make_roots(call, s);
      for_units(call.args, parts, [&](int64_t begin, int64_t end, int64_t part) {
        cpu::channel_sums(call.args, begin, end, sums + part, distances + part, call.dz);
      });
      if (call.groups == 0)
        return for_channels(s, [&](int64_t begin, int64_t end) {
          finish_batch_sums(s, begin, end, sums, distances, dz, dz_x_hat, c1, c2);
        });
      for (int64_t i = 0; i < s.statistics; ++i) s.finish_sums(i, sums, distances, c1, c2);
      return finish_group_parameters(s, sums, distances, dz, dz_x_hat);
    }
#ifdef MEMKIT_WITH_CUDA
    const c10::cuda::CUDAGuard guard(call.device);
    const Tensor terms = make_terms<T>(call, nullptr, nullptr);
    check(cuda::channel_sums(call.args, parts.count, sums, distances, stream()));
    check(cuda::channel_finish_sums<T>(s, parts.count, sums, distances, dz, dz_x_hat, c1, c2, stream()));
#else
    without_cuda(call);
#endif
  });
}

void run_channel_backward(const ChannelCall& whole, const double* c1, const double* c2) {
  ChannelCall call = by_long_rows(by_columns(whole, kSmallPlane));
  with_computed(call, [&](auto computed) {
    if (call.device.is_cpu()) {
      const Tensor terms = make_terms<decltype(computed)>(call, c1, c2);
      for_elements(call.args, [&](int64_t begin, int64_t end) { cpu::channel_backward(call.args, begin, end); });
      return;
    }
#ifdef MEMKIT_WITH_CUDA
    const c10::cuda::CUDAGuard guard(call.device);
    const Tensor terms = make_terms<decltype(computed)>(call, c1, c2);
    check(cuda::channel_backward(call.args, stream()));
#else
    without_cuda(call);
#endif
  });
}

void run_channel_norm(const ChannelCall& call) {
  if (by_blocks(call)) return with_computed(call, [&](auto computed) { norm_by_blocks<decltype(computed)>(call); });
  run_channel_moments(call);
  run_channel_forward(call);
}

void run_channel_gradients(const ChannelCall& whole, double* dz, double* dz_x_hat) {
  if (by_blocks(whole))
    return with_computed(whole, [&](auto computed) { gradients_by_blocks<decltype(computed)>(whole, dz, dz_x_hat); });
  ChannelCall call = whole;
  ChannelArgs& args = call.args;
  // Sums leave dz where the input's gradient will be, if that holds it, so that the slope is computed once.
  const bool holds_dz = args.out_dtype == args.dtype && args.dtype == dtype_of(call.computed);
  if (call.device.is_cpu() && args.has_act && holds_dz) call.dz = args.grad_input;
  ChannelCall last = call;
  if (call.dz) last.args.has_act = false, last.args.grad = call.dz;
  const int64_t statistics = call.groups ? args.outer * call.groups : args.channels;
  const Tensor means = scratch(call, statistics);
  double *const c1 = means.mutable_data_ptr<double>(), *const c2 = c1 + statistics;
  if (by_channels(call))
    return with_computed(
        call, [&](auto computed) { gradients_by_channels<decltype(computed)>(call, last, dz, dz_x_hat, c1, c2); });
  run_channel_sums(call, dz, dz_x_hat, c1, c2);
  run_channel_backward(last, c1, c2);
}

}  // namespace memkit
