// batch_norm_act and group_norm, as Python calls them in eager mode.
#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>

#include "channel_norm.h"
#include "checks.h"
#include "eager.h"
#include "norm_call.h"
#include "operators.h"
#include "row_norm.h"

namespace memkit {
namespace {

using at::Tensor;

constexpr char kBatchNormAct[] = "batch_norm_act", kGroupNorm[] = "group_norm", kUpdateRunning[] = "update_running",
               kCountBatch[] = "count_batch";

Tensor group_norm_entry(const Tensor& input, int64_t groups, OptionalTensor weight, OptionalTensor bias, double eps) {
  check_float_tensor(kGroupNorm, input);
  const pybind11::gil_scoped_release no_gil;
  return MEMKIT_CALL("memkit::_group_norm", Tensor(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&,
                                                   double, at::ScalarType))(input, groups, weight, bias, eps,
                                                                            norm_output_dtype(input));
}

bool is_array(const Tensor& x, at::ScalarType dtype) {
  const bool transformed = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  return is_plain(x) && !transformed && !torch::jit::tracer::isTracing() && !x.is_inference() && x.is_cpu() &&
         x.is_contiguous() && x.scalar_type() == dtype;
}

// A batch norm's count of its training steps, one more.
Tensor count_batch(const Tensor& counter) {
  const pybind11::gil_scoped_release no_gil;
  const at::NoGradGuard no_grad;
  if (!is_array(counter, at::kLong) || counter.numel() != 1) return counter.add_(1);
  ++*counter.mutable_data_ptr<int64_t>();
  torch::autograd::impl::bump_version(counter);
  return counter;
}

// Moves a running statistic by `momentum` towards `factor` times the new one: its few operators take as long as the norm
// of a small tensor.
Tensor moved(const Tensor& running, const Tensor& found, double factor, double momentum) {
  const at::NoGradGuard no_grad;
  if (is_array(running, at::kFloat) && is_array(found, at::kDouble) && running.sizes() == found.sizes()) {
    float* const x = running.mutable_data_ptr<float>();
    const double* const to = found.const_data_ptr<double>();
    for (int64_t i = 0; i < running.numel(); ++i) x[i] = float(x[i] + momentum * (factor * to[i] - x[i]));
    torch::autograd::impl::bump_version(running);
    return running;
  }
  const Tensor scaled = factor == 1 ? found : found.mul(factor);
  return running.lerp_(scaled.to(running.scalar_type()), momentum);
}

Tensor update_running(const Tensor& running, const Tensor& found, double factor, double momentum) {
  const pybind11::gil_scoped_release no_gil;
  return moved(running, found, factor, momentum);
}

// Whether it is a running statistic of the input's channels.
bool fits(const Tensor& running, const Tensor& input) {
  return running.dim() == 1 && running.size(0) == input.size(1) && running.device() == input.device() &&
         running.is_floating_point() && running.is_non_overlapping_and_dense() && !running.is_inference();
}

// Nothing where Python has to look itself: what it refuses, too.
std::optional<Tensor> batch_norm_act_entry(const Tensor& input, OptionalTensor weight, OptionalTensor bias,
                                           OptionalTensor running_mean, OptionalTensor running_var, bool training,
                                           double momentum, double eps, std::string_view act,
                                           std::vector<double> params) {
  check_float_tensor(kBatchNormAct, input);
  if (running_mean.has_value() != running_var.has_value() || input.dim() < 2) return std::nullopt;
  const int64_t count = input.numel() / std::max<int64_t>(1, input.size(1));
  const bool keeps = running_mean.has_value();
  if (training ? count <= 1 || (keeps && !(fits(*running_mean, input) && fits(*running_var, input))) : !keeps)
    return std::nullopt;
  const pybind11::gil_scoped_release no_gil;
  const OptionalTensor none;
  auto [out, mean, variance] =
      MEMKIT_CALL("memkit::_batch_norm_act",
                  std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                     const OptionalTensor&, const OptionalTensor&, double,
                                                     c10::string_view, c10::ArrayRef<double>, at::ScalarType))(
          input, weight, bias, training ? none : running_mean, training ? none : running_var, eps, act, params,
          norm_output_dtype(input));
  if (training && keeps) {
    moved(*running_mean, mean, 1, momentum);
    moved(*running_var, variance, double(count) / double(count - 1), momentum);
  }
  return out;
}

}  // namespace

void bind_channel_norms(pybind11::module_& m) {
  eager::bind<batch_norm_act_entry, kBatchNormAct>(m);
  eager::bind<group_norm_entry, kGroupNorm>(m);
  eager::bind<update_running, kUpdateRunning>(m);
  eager::bind<count_batch, kCountBatch>(m);
}

}  // namespace memkit
