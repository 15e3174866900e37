// batch_norm_act and group_norm, as Python calls them in eager mode.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "channel_norm.h"
#include "channel_running.h"
#include "checks.h"
#include "eager.h"
#include "norm_call.h"
#include "operators.h"
#include "row_norm.h"
#include "stream.h"
#include "transforms.h"

namespace memkit {
namespace {

using at::Tensor;

constexpr char kBatchNormAct[] = "batch_norm_act", kGroupNorm[] = "group_norm", kMoveRunning[] = "move_running",
               kCountBatch[] = "count_batch";

Tensor group_norm_entry(const Tensor& input, int64_t groups, OptionalTensor weight, OptionalTensor bias, double eps) {
  check_float_tensor(kGroupNorm, input);
  const pybind11::gil_scoped_release no_gil;
  const Tensor x =
      runs_on_cuda(input.device()) ? input.contiguous() : input;  // as PyTorch does, whose result is contiguous there
  return MEMKIT_CALL("memkit::_group_norm", Tensor(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&,
                                                   double, at::ScalarType))(x, groups, weight, bias, eps,
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

Tensor move_running(const Tensor& running_mean, const Tensor& running_var, const Tensor& mean, const Tensor& variance,
                    int64_t count, double momentum) {
  const pybind11::gil_scoped_release no_gil;
  RunningStatistics{running_mean, running_var, momentum}.move(mean, variance, count);
  return running_mean;
}

// Nothing where Python has to look itself: what it refuses, too.
std::optional<Tensor> batch_norm_act_entry(const Tensor& input, OptionalTensor weight, OptionalTensor bias,
                                           OptionalTensor running_mean, OptionalTensor running_var, bool training,
                                           double momentum, double eps, std::string_view act,
                                           std::vector<double> params) {
  check_float_tensor(kBatchNormAct, input);
  if (!fit(running_mean, running_var, input, training)) return std::nullopt;
  const bool keeps = running_mean.has_value();
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
  if (training && keeps)
    RunningStatistics{*running_mean, *running_var, momentum}.move(mean, variance, input.numel() / input.size(1));
  return out;
}

}  // namespace

void bind_channel_norms(pybind11::module_& m) {
  eager::bind<batch_norm_act_entry, kBatchNormAct>(m);
  eager::bind<group_norm_entry, kGroupNorm>(m);
  eager::bind<move_running, kMoveRunning>(m);
  eager::bind<count_batch, kCountBatch>(m);
}

}  // namespace memkit
