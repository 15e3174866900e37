// Batch norm with an activation and group norm: what a call asks for, and its passes below autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "channel_running.h"
#include "optional.h"
#include "spec.h"

namespace memkit {

struct ChannelNorm {
  int64_t groups;  // of group norm; 0: batch norm
  double eps;
  std::string_view act;  // a name, or "" for none
  c10::ArrayRef<double> params;

  std::string_view name() const { return groups ? "group_norm" : "batch_norm_act"; }
};

// Raises on what the kernels do not take.
void check_channel_norm(const ChannelNorm& norm, const at::Tensor& input, const OptionalTensor& weight,
                        const OptionalTensor& bias);

// The mean and the variance (over n, not n - 1) of each channel, or of each group of each sample; in
// double, as all statistics and sums here.
std::tuple<at::Tensor, at::Tensor> channel_moments(const ChannelNorm& norm, const at::Tensor& input);

at::Tensor channel_norm_forward(const ChannelNorm& norm, const at::Tensor& input, const at::Tensor& mean,
                                const at::Tensor& variance, const OptionalTensor& weight, const OptionalTensor& bias,
                                at::ScalarType dtype);

// With the input's own statistics, in one go. `moved`: running statistics, by the kernel that made these.
struct ChannelNormed {
  at::Tensor out, mean, variance;
  bool moved = false;
};
ChannelNormed channel_norm(const ChannelNorm& norm, const at::Tensor& input, const OptionalTensor& weight,
                           const OptionalTensor& bias, at::ScalarType dtype,
                           const RunningStatistics* running = nullptr);

struct ChannelSums {
  at::Tensor dz, dz_x_hat;  // a channel each: the gradients of bias and weight
  at::Tensor c1, c2;        // a statistic each
};
ChannelSums channel_norm_sums(const ChannelNorm& norm, const at::Tensor& grad, const at::Tensor& input,
                              const at::Tensor& mean, const at::Tensor& variance, const OptionalTensor& weight,
                              const OptionalTensor& bias);

// c1, c2: as above; none where the statistics are given, not taken from the input. `reuse_grad`: into the gradient's memory.
at::Tensor channel_norm_backward(const ChannelNorm& norm, const at::Tensor& grad, const at::Tensor& input,
                                 const at::Tensor& mean, const at::Tensor& variance, const OptionalTensor& weight,
                                 const OptionalTensor& bias, const OptionalTensor& c1, const OptionalTensor& c2,
                                 bool reuse_grad = false);

// A parameter's gradient from sums in double; undefined without the parameter. On the CPU past the dispatcher, which takes as
// long as a small pass.
at::Tensor gradient_of(const OptionalTensor& parameter, const at::Tensor& sums);

// All gradients, those of weight and bias in their dtype and where they are wanted. The statistics are the input's own.
struct ChannelGradients {
  at::Tensor input, weight, bias;
};
ChannelGradients channel_norm_gradients(const ChannelNorm& norm, const at::Tensor& grad, const at::Tensor& input,
                                        const at::Tensor& mean, const at::Tensor& variance,
                                        const OptionalTensor& weight, const OptionalTensor& bias, bool wants_weight,
                                        bool wants_bias, bool reuse_grad);

}  // namespace memkit
