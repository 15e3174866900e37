#include "channel_engine.h"

#include "channel_blocks.h"
#include "channel_samples.h"
#include "channel_steps.h"
#include "channel_streams.h"
#include "engine.h"

namespace memkit {
namespace {

// f(begin, end, part): over units, in ranges; part is where the results of a range of rows go.
template <class F>
void for_units(const ChannelArgs& args, const ChannelParts& parts, const F& f) {
  if (args.columns()) {
    at::parallel_for(0, parts.ways, 1, [&](int64_t begin, int64_t end) {
      for (int64_t way = begin; way < end; ++way)
        f(args.outer * way / parts.ways, args.outer * (way + 1) / parts.ways, way * args.channels);
    });
  } else {
    at::parallel_for(0, args.planes(), std::max<int64_t>(1, kChannelGrain / std::max<int64_t>(1, args.inner)),
                     [&](int64_t begin, int64_t end) { f(begin, end, int64_t(0)); });
  }
}

template <class F>
void for_elements(const ChannelArgs& args, const F& f) {
  // Whole blocks, so that no two threads write to one cache line.
  constexpr int64_t kUnit = 512;
  const int64_t numel = args.numel();
  at::parallel_for(0, (numel + kUnit - 1) / kUnit, kChannelGrain / kUnit,
                   [&](int64_t begin, int64_t end) { f(begin * kUnit, std::min(end * kUnit, numel)); });
}

}  // namespace

void run_channel_moments(const ChannelCall& whole) {
  if (!runs_on_threads(whole.device)) return moments_on_stream(whole);
  if (whole.samples) return moments_by_samples(whole);
  const ChannelCall call = by_columns(by_groups(whole), kSmallPlaneOfSums);
  const ChannelParts parts = parts_of(call);
  with_computed(call, [&](auto computed) {
    using T = decltype(computed);
    const Room room = doubles(call, 2 * parts.count);
    double *means = room.as<double>(), *m2 = means + parts.count;
    const ChannelStatistics<T> s = statistics_of<T>(call, parts);
    for_units(call.args, parts, [&](int64_t begin, int64_t end, int64_t part) {
      cpu::channel_moments(call.args, begin, end, means + part, m2 + part);
    });
    if (call.groups == 0) return finish_batch_moments(s, means, m2);
    cpu::group_moments(s, 0, s.statistics, means, m2);
  });
}

void run_channel_forward(const ChannelCall& whole) {
  if (!runs_on_threads(whole.device)) return forward_on_stream(whole);
  if (whole.samples) return forward_by_samples(whole);
  ChannelCall call = by_long_rows(by_columns(whole, kSmallPlane));
  with_computed(call, [&](auto computed) {
    const Room terms = make_terms<decltype(computed)>(call, nullptr, nullptr);
    for_elements(call.args, [&](int64_t begin, int64_t end) { cpu::channel_forward(call.args, begin, end); });
  });
}

void run_channel_sums(const ChannelCall& whole, double* dz, double* dz_x_hat, double* c1, double* c2) {
  if (!runs_on_threads(whole.device)) return sums_on_stream(whole, dz, dz_x_hat, c1, c2);
  if (whole.samples) return sums_by_samples(whole, dz, dz_x_hat, c1, c2);
  ChannelCall call = by_long_rows(by_columns(whole, kSmallPlaneOfSums));
  const ChannelParts parts = parts_of(call);
  with_computed(call, [&](auto computed) {
    using T = decltype(computed);
    const Room room = doubles(call, 2 * parts.count);
    double *sums = room.as<double>(), *distances = sums + parts.count;
    ChannelStatistics<T> s = statistics_of<T>(call, parts);
    const Room terms = make_terms<T>(call, nullptr, nullptr), roots = make_roots(call, s);
    for_units(call.args, parts, [&](int64_t begin, int64_t end, int64_t part) {
      cpu::channel_sums(call.args, begin, end, sums + part, distances + part, call.dz);
    });
    if (call.groups == 0)
      return for_channels(s, [&](int64_t begin, int64_t end) {
        finish_batch_sums(s, begin, end, sums, distances, dz, dz_x_hat, c1, c2);
      });
    cpu::group_sums(s, 0, s.statistics, sums, distances, c1, c2);
    cpu::group_parameters(s, sums, distances, dz, dz_x_hat);
  });
}

void run_channel_backward(const ChannelCall& whole, const double* c1, const double* c2) {
  if (!runs_on_threads(whole.device)) return backward_on_stream(whole, c1, c2);
  if (whole.samples) return backward_by_samples(whole, c1, c2);
  ChannelCall call = by_long_rows(by_columns(whole, kSmallPlane));
  with_computed(call, [&](auto computed) {
    const Room terms = make_terms<decltype(computed)>(call, c1, c2);
    for_elements(call.args, [&](int64_t begin, int64_t end) { cpu::channel_backward(call.args, begin, end); });
  });
}

void run_channel_norm(const ChannelCall& call) {
  if (!runs_on_threads(call.device)) return norm_on_stream(call);
  if (by_blocks(call)) return norm_by_blocks(call);
  run_channel_moments(call);
  run_channel_forward(call);
}

void run_channel_gradients(const ChannelCall& whole, double* dz, double* dz_x_hat) {
  if (by_blocks(whole)) return gradients_by_blocks(whole, dz, dz_x_hat);
  ChannelCall call = whole;
  ChannelArgs& args = call.args;
  // Sums leave dz where the input's gradient will be, if that holds it, so that the slope is computed once. In half
  // precision it does where the slope is 0 or 1.
  const bool steps = args.act == Act::relu || args.act == Act::hardtanh;
  const bool holds_dz = args.out_dtype == args.dtype && (steps || args.dtype == dtype_of(call.computed));
  if (args.has_act && holds_dz) call.dz = args.grad_input;
  ChannelCall last = call;
  if (call.dz) last.args.has_act = false, last.args.grad = call.dz;
  const int64_t statistics = call.groups ? (call.samples ? call.samples : args.outer) * call.groups : args.channels;
  const Room means = doubles(call, 2 * statistics);
  double *const c1 = means.as<double>(), *const c2 = c1 + statistics;
  if (by_channels(call)) return gradients_by_channels(call, last, dz, dz_x_hat, c1, c2);
  run_channel_sums(call, dz, dz_x_hat, c1, c2);
  run_channel_backward(last, c1, c2);
}

}  // namespace memkit
