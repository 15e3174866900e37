// batch_norm_act and group_norm, as Python calls them in eager mode.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "channel_norm.h"
#include "checks.h"
#include "eager.h"
#include "norm_call.h"
#include "operators.h"
#include "row_norm.h"

namespace memkit {
namespace {

using at::Tensor;

constexpr char kBatchNormAct[] = "batch_norm_act", kGroupNorm[] = "group_norm", kUpdateRunning[] = "update_running";

std::tuple<Tensor, Tensor, Tensor> batch_norm_act_entry(const Tensor& input, OptionalTensor weight, OptionalTensor bias,
                                                        OptionalTensor mean, OptionalTensor variance, double eps,
                                                        std::string_view act, std::vector<double> params) {
  check_float_tensor(kBatchNormAct, input);
  const pybind11::gil_scoped_release no_gil;
  return MEMKIT_CALL("memkit::_batch_norm_act",
                     std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                        const OptionalTensor&, const OptionalTensor&, double,
                                                        c10::string_view, c10::ArrayRef<double>, at::ScalarType))(
      input, weight, bias, mean, variance, eps, act, params, norm_output_dtype(input));
}

Tensor group_norm_entry(const Tensor& input, int64_t groups, OptionalTensor weight, OptionalTensor bias, double eps) {
  check_float_tensor(kGroupNorm, input);
  const pybind11::gil_scoped_release no_gil;
  return MEMKIT_CALL("memkit::_group_norm", Tensor(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&,
                                                   double, at::ScalarType))(input, groups, weight, bias, eps,
                                                                            norm_output_dtype(input));
}

bool is_array(const Tensor& x, at::ScalarType dtype) {
  return is_plain(x) && !x.is_inference() && x.is_cpu() && x.is_contiguous() && x.scalar_type() == dtype;
}

// Moves a running statistic by `momentum` towards `factor` times the new one: its few operators take as long as the norm
// of a small tensor.
Tensor update_running(const Tensor& running, const Tensor& found, double factor, double momentum) {
  const pybind11::gil_scoped_release no_gil;
  const at::NoGradGuard no_grad;
  if (is_array(running, at::kFloat) && is_array(found, at::kDouble) && running.sizes() == found.sizes()) {
    float* const moved = running.mutable_data_ptr<float>();
    const double* const to = found.const_data_ptr<double>();
    for (int64_t i = 0; i < running.numel(); ++i) moved[i] = float(moved[i] + momentum * (factor * to[i] - moved[i]));
    torch::autograd::impl::bump_version(running);
    return running;
  }
  const Tensor scaled = factor == 1 ? found : found.mul(factor);
  return running.lerp_(scaled.to(running.scalar_type()), momentum);
}

}  // namespace

void bind_channel_norms(pybind11::module_& m) {
  eager::bind<batch_norm_act_entry, kBatchNormAct>(m);
  eager::bind<group_norm_entry, kGroupNorm>(m);
  eager::bind<update_running, kUpdateRunning>(m);
}

}  // namespace memkit
