// batch_norm_act and group_norm, as Python calls them in eager mode.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "channel_norm.h"
#include "channel_running.h"
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

// A batch norm's count of its training steps, one more.
Tensor count_batch(const Tensor& counter) {
  const pybind11::gil_scoped_release no_gil;
  const at::NoGradGuard no_grad;
  if (!is_array(counter, at::kLong) || counter.numel() != 1) return counter.add_(1);
  ++*counter.mutable_data_ptr<int64_t>();
  torch::autograd::impl::bump_version(counter);
  return counter;
}

Tensor update_running(const Tensor& running, const Tensor& found, double factor, double momentum) {
  const pybind11::gil_scoped_release no_gil;
  return move_running(running, found, factor, momentum);
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
  const auto dtype = norm_output_dtype(input);
  const auto unseen = [](const OptionalTensor& x) { return !x || is_unseen(*x); };
  if (keeps && is_unseen(input) && unseen(weight) && unseen(bias) && unseen(running_mean) && unseen(running_var))
    return MEMKIT_CALL("memkit::_batch_norm",
                       Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                              bool, double, double, c10::string_view, c10::ArrayRef<double>, at::ScalarType))(
        input, weight, bias, *running_mean, *running_var, training, momentum, eps, act, params, dtype);
  const OptionalTensor none;
  auto [out, mean, variance] =
      MEMKIT_CALL("memkit::_batch_norm_act",
                  std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                     const OptionalTensor&, const OptionalTensor&, double,
                                                     c10::string_view, c10::ArrayRef<double>, at::ScalarType))(
          input, weight, bias, training ? none : running_mean, training ? none : running_var, eps, act, params, dtype);
  if (training && keeps) RunningStatistics{*running_mean, *running_var, momentum}.move(mean, variance, count);
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
