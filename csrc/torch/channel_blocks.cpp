#include "channel_blocks.h"

#include "channel_steps.h"

namespace memkit {
namespace {

constexpr int64_t kBlock = 16384;   // elements of groups that all passes are over, one pass after the other
constexpr int64_t kCached = 32768;  // elements of channels that stay in the cache from one pass to the next

// f(begin, end): of the groups of all samples.
template <class F>
void for_blocks(const ChannelCall& call, const F& f) {
  const int64_t groups = call.args.outer * call.groups, size = std::max<int64_t>(1, call.args.numel() / groups);
  const int64_t block = std::max<int64_t>(1, kBlock / size);
  at::parallel_for(0, groups, std::max<int64_t>(1, kChannelGrain / size), [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += block) f(first, std::min(first + block, end));
  });
}

template <class T>
void norm_groups(ChannelCall call) {
  const ChannelCall whole_groups = by_groups(call);
  ChannelStatistics<T> s = statistics_of<T>(call, {1, call.args.planes()});
  const Room terms = terms_room<T>(call), roots = doubles(call, s.statistics);
  const TermArrays<T> arrays{terms.as<T>(), call.args.sets};
  double* const root = roots.as<double>();
  s.roots = root, call.args.terms = arrays.data;
  for_blocks(call, [&](int64_t begin, int64_t end) {
    cpu::channel_moments(whole_groups.args, begin, end, s.mean, s.variance);
    for (int64_t i = begin; i < end; ++i) s.variance[i] /= double(s.size);
    cpu::channel_roots(s.variance + begin, s.eps, end - begin, root + begin);
    cpu::group_terms<T>(s, begin, end, nullptr, nullptr, arrays);
    cpu::channel_forward(call.args, begin * s.size, end * s.size);
  });
}

template <class T>
void gradients_of_groups(ChannelCall call, double* dz, double* dz_x_hat) {
  const int64_t planes = call.args.planes();
  ChannelStatistics<T> s = statistics_of<T>(call, {1, planes});
  const Room terms = terms_room<T>(call), room = doubles(call, 2 * planes + 3 * s.statistics);
  const TermArrays<T> arrays{terms.as<T>(), planes};
  double *const sums = room.as<double>(), *const distances = sums + planes;
  double *const root = distances + planes, *const c1 = root + s.statistics, *const c2 = c1 + s.statistics;
  s.roots = root, call.args.terms = arrays.data;
  for_blocks(call, [&](int64_t begin, int64_t end) {
    cpu::channel_roots(s.variance + begin, s.eps, end - begin, root + begin);
    for (int64_t i = begin; i < end; ++i)  // all that the sums need of the terms
      std::fill_n(arrays.center() + i * s.count, s.count, T(s.mean[i]));
    cpu::channel_sums(call.args, begin * s.count, end * s.count, sums, distances);
    cpu::group_sums(s, begin, end, sums, distances, c1, c2);
    cpu::group_terms<T>(s, begin, end, c1, c2, arrays);
    cpu::channel_backward(call.args, begin * s.size, end * s.size);
  });
  cpu::group_parameters(s, sums, distances, dz, dz_x_hat);
}

// Some channels at a time, which the second pass finds in the cache.
template <class T>
void gradients_of_channels(ChannelCall call, ChannelCall last, double* dz, double* dz_x_hat, double* c1, double* c2) {
  const ChannelArgs& args = call.args;
  const ChannelParts parts = parts_of(call);
  const Room room = doubles(call, 2 * parts.count);
  double *sums = room.as<double>(), *distances = sums + parts.count;
  ChannelStatistics<T> s = statistics_of<T>(call, parts);
  const Room terms = make_terms<T>(call, nullptr, nullptr), roots = make_roots(call, s);
  const TermArrays<T> arrays{terms.as<T>(), args.sets};
  last.args.terms = arrays.data;
  const int64_t channel = args.outer * args.inner, at_once = std::max<int64_t>(1, kCached / channel);
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < args.planes(); plane += args.channels)
      cpu::channel_sums(args, plane, plane + end - begin, sums, distances, call.dz);
    finish_batch_sums(s, begin, end, sums, distances, dz, dz_x_hat, c1, c2);
    cpu::channel_terms(s, begin, end, c1, c2, arrays);
    for (int64_t plane = begin; plane < args.planes(); plane += args.channels)
      cpu::channel_backward(last.args, plane * args.inner, (plane + end - begin) * args.inner);
  };
  at::parallel_for(0, args.channels, std::max<int64_t>(1, kChannelGrain / channel), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c += at_once) some(c, std::min(end, c + at_once));
  });
}

}  // namespace

bool by_blocks(const ChannelCall& call) {
  return call.groups && !call.samples && !call.args.columns() && call.args.outer * call.groups >= at::get_num_threads();
}

void norm_by_blocks(const ChannelCall& call) {
  with_computed(call, [&](auto computed) { norm_groups<decltype(computed)>(call); });
}

void gradients_by_blocks(const ChannelCall& call, double* dz, double* dz_x_hat) {
  with_computed(call, [&](auto computed) { gradients_of_groups<decltype(computed)>(call, dz, dz_x_hat); });
}

bool by_channels(const ChannelCall& call) {
  return !call.groups && !call.args.columns() && by_columns(call, kSmallPlaneOfSums).together == 1 &&
         call.args.channels >= at::get_num_threads();
}

void gradients_by_channels(const ChannelCall& call, const ChannelCall& last, double* dz, double* dz_x_hat, double* c1,
                           double* c2) {
  with_computed(call,
                [&](auto computed) { gradients_of_channels<decltype(computed)>(call, last, dz, dz_x_hat, c1, c2); });
}

}  // namespace memkit
