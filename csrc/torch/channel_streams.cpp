#include "channel_streams.h"

#include <type_traits>

#include "channel_layout.h"
#include "channel_steps.h"

namespace memkit {
namespace {

using cuda::Numbers;

Numbers numbers_of(const double* x) { return {const_cast<double*>(x), Dtype::float64}; }

template <class T>
cuda::Statistics<T> device_statistics(const ChannelCall& call, int64_t parts) {
  auto s = shape_of<cuda::Statistics<T>>(call, parts);
  s.weight = call.weight, s.bias = call.bias, s.mean = call.mean, s.variance = call.variance;
  return s;
}

// Two numbers a part and the terms behind them.
template <class T>
struct Workspace {
  Workspace(const ChannelCall& call, int64_t parts, bool with_terms)
      : room(call.device, 16 * parts + (with_terms ? terms_bytes<T>(call) : 0)),
        first(room.as<double>()),
        second(first + parts),
        terms(with_terms ? reinterpret_cast<T*>(second + parts) : nullptr) {}

  Room room;
  double *first, *second;
  T* terms;
};

// launch(a value of the type computed in, stream).
template <class Launch>
void launch_passes(const ChannelCall& call, const Launch& launch) {
  with_computed(call, [&](auto computed) {
    on_stream(call.device, [&](auto stream) -> int { return launch(computed, stream); });
  });
}

void launch_norm(ChannelCall call, bool forward) {
  launch_passes(call, [&](auto computed, auto stream) -> int {
    using T = decltype(computed);
    if constexpr (std::is_same_v<T, float>) {
      const auto s = device_statistics<float>(call, call.args.planes());
      bool whole = false;
      if (const int error = cuda::channel_by_statistics(call.args, s, whole)) return error;
      if (forward && whole) return cuda::channel_whole_forward(call.args, s, call.running, stream);
    }
    const ChannelArgs groups = by_groups(call).args;
    int64_t parts = 0;
    if (const int error = cuda::channel_parts(groups, parts)) return error;
    cuda::Statistics<T> s = device_statistics<T>(call, parts);
    if (call.groups) s.step = s.count = 1;
    const Workspace<T> space(call, parts, forward);
    call.args.terms = space.terms;
    if (const int error = cuda::channel_moments(groups, parts, space.first, space.second, stream)) return error;
    const int error = cuda::channel_finish_moments<T>(s, space.first, space.second, call.running, space.terms, stream);
    return error || !forward ? error : cuda::channel_forward(call.args, stream);
  });
}

// Group norm's parameters take sums over planes, which then stay.
int launch_whole_gradients(const ChannelCall& call, const cuda::Statistics<float>& s, int64_t parts,
                           const cuda::FromSums<float>& to, CUstream_st* stream) {
  if (s.groups == 0 || !(to.grad_weight || to.grad_bias))
    return cuda::channel_whole_backward(call.args, s, nullptr, nullptr, to, stream);
  const Workspace<float> space(call, parts, false);
  if (const int error = cuda::channel_whole_backward(call.args, s, space.first, space.second, to, stream)) return error;
  return cuda::channel_finish_parameters(s, parts, space.first, space.second, to, stream);
}

void launch_gradients(ChannelCall call, const Numbers& weight, const Numbers& bias, const Numbers& c1,
                      const Numbers& c2, bool backward) {
  launch_passes(call, [&](auto computed, auto stream) -> int {
    using T = decltype(computed);
    int64_t parts = 0;
    if (const int error = cuda::channel_parts(call.args, parts)) return error;
    const cuda::Statistics<T> s = device_statistics<T>(call, parts);
    if constexpr (std::is_same_v<T, float>) {
      bool whole = false;
      if (const int error = cuda::channel_by_statistics(call.args, s, whole)) return error;
      if (backward && whole) return launch_whole_gradients(call, s, parts, {weight, bias}, stream);
    }
    const Workspace<T> space(call, parts, backward);
    call.args.terms = space.terms;
    if (const int error = cuda::channel_sums<T>(call.args, s, parts, space.first, space.second, stream)) return error;
    const int error =
        cuda::channel_finish_sums<T>(s, parts, space.first, space.second, {weight, bias, c1, c2, space.terms}, stream);
    return error || !backward ? error : cuda::channel_backward(call.args, stream);
  });
}

// A pass over the tensor by statistics that are given.
template <class Launch>
void launch_given(ChannelCall call, const double* c1, const double* c2, const Launch& pass) {
  launch_passes(call, [&](auto computed, auto stream) -> int {
    using T = decltype(computed);
    const Workspace<T> space(call, 0, true);
    call.args.terms = space.terms;
    const int error =
        cuda::channel_terms<T>(device_statistics<T>(call, 0), numbers_of(c1), numbers_of(c2), space.terms, stream);
    return error ? error : pass(call.args, stream);
  });
}

}  // namespace

void moments_on_stream(const ChannelCall& call) { launch_norm(call, false); }
void norm_on_stream(const ChannelCall& call) { launch_norm(call, true); }

void move_running_on_stream(const cuda::Running& running, const double* mean, const double* variance, int64_t channels,
                            c10::Device device) {
  on_stream(device,
            [&](auto stream) -> int { return cuda::channel_move_running(running, mean, variance, channels, stream); });
}

void forward_on_stream(const ChannelCall& call) {
  launch_given(call, nullptr, nullptr,
               [](const ChannelArgs& args, auto stream) { return cuda::channel_forward(args, stream); });
}

void sums_on_stream(const ChannelCall& call, double* dz, double* dz_x_hat, double* c1, double* c2) {
  launch_gradients(call, numbers_of(dz_x_hat), numbers_of(dz), numbers_of(c1), numbers_of(c2), false);
}

void backward_on_stream(const ChannelCall& call, const double* c1, const double* c2) {
  launch_given(call, c1, c2, [](const ChannelArgs& args, auto stream) { return cuda::channel_backward(args, stream); });
}

void gradients_on_stream(const ChannelCall& call, const Numbers& weight, const Numbers& bias) {
  launch_gradients(call, weight, bias, {}, {}, true);
}

}  // namespace memkit
