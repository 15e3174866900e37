#include "channel_running.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>

#include "../formulas/channel_norm.h"
#include "channel_streams.h"
#include "checks.h"
#include "engine.h"
#include "stream.h"
#include "transforms.h"

namespace memkit {

bool is_array(const at::Tensor& x, at::ScalarType dtype) {
  return is_unseen(x) && !x.is_inference() && x.is_cpu() && x.is_contiguous() && x.scalar_type() == dtype;
}

namespace {

bool fits(const at::Tensor& running, const at::Tensor& input) {
  return running.dim() == 1 && running.size(0) == input.size(1) && running.device() == input.device() &&
         running.is_floating_point() && running.is_non_overlapping_and_dense() && !running.is_inference();
}

// n / (n - 1): a variance over n - 1 from one over n.
double unbiased(int64_t n) { return double(n) / double(n - 1); }

bool suits_kernel(const at::Tensor& running) {
  return !runs_on_threads(running.device()) && has_kernels(running) && running.is_contiguous() &&
         !running.is_inference() && is_unseen(running);
}

bool is_found(const at::Tensor& found, const at::Tensor& running) {
  return is_unseen(found) && found.scalar_type() == at::kDouble && found.is_contiguous() &&
         found.device() == running.device() && found.sizes() == running.sizes();
}

// On the CPU by hand: its few operators take as long as the norm of a small tensor.
void move_alone(const at::Tensor& running, const at::Tensor& found, double factor, double momentum) {
  if (is_array(running, at::kFloat) && is_array(found, at::kDouble) && running.sizes() == found.sizes()) {
    float* const x = running.mutable_data_ptr<float>();
    const double* const to = found.const_data_ptr<double>();
    for (int64_t i = 0; i < running.numel(); ++i) x[i] = float(moved(x[i], factor * to[i], momentum));
    torch::autograd::impl::bump_version(running);
    return;
  }
  const at::Tensor scaled = factor == 1 ? found : found.mul(factor);
  running.lerp_(scaled.to(running.scalar_type()), momentum);
}

}  // namespace

bool fit(const OptionalTensor& running_mean, const OptionalTensor& running_var, const at::Tensor& input,
         bool training) {
  if (running_mean.has_value() != running_var.has_value() || input.dim() < 2) return false;
  if (!training) return running_mean.has_value();
  if (input.numel() / std::max<int64_t>(1, input.size(1)) <= 1) return false;
  return !running_mean || (fits(*running_mean, input) && fits(*running_var, input));
}

std::optional<cuda::Running> RunningStatistics::for_kernel(int64_t count) const {
  if (!suits_kernel(mean) || !suits_kernel(variance)) return std::nullopt;
  const auto numbers = [](const at::Tensor& x) { return cuda::Numbers{x.mutable_data_ptr(), dtype_of(x)}; };
  return cuda::Running{numbers(mean), numbers(variance), momentum, unbiased(count)};
}

void RunningStatistics::bump_versions() const {
  torch::autograd::impl::bump_version(mean);
  torch::autograd::impl::bump_version(variance);
}

void RunningStatistics::move(const at::Tensor& found_mean, const at::Tensor& found_variance, int64_t count) const {
  const at::NoGradGuard no_grad;
  const auto running = for_kernel(count);
  if (running && is_found(found_mean, mean) && is_found(found_variance, variance)) {
    move_running_on_stream(*running, found_mean.const_data_ptr<double>(), found_variance.const_data_ptr<double>(),
                           mean.numel(), mean.device());
    return bump_versions();
  }
  move_alone(mean, found_mean, 1, momentum);
  move_alone(variance, found_variance, unbiased(count), momentum);
}

}  // namespace memkit
