// Batch norm with an activation and group norm below autograd, on CPU, CUDA and meta tensors.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>

#include "channel_engine.h"
#include "channel_norm.h"
#include "channel_streams.h"
#include "checks.h"
#include "engine.h"
#include "fresh.h"
#include "row_norm.h"
#include "stream.h"

namespace memkit {
namespace {

using at::Tensor;
using Params = c10::ArrayRef<double>;

// Channels last is taken as it is, of group norm on the CPU, where PyTorch's result is it; all else is made contiguous.
at::MemoryFormat format_of(const ChannelNorm& norm, const Tensor& x) {
  if ((norm.groups && runs_on_cuda(x.device())) || x.is_contiguous()) return at::MemoryFormat::Contiguous;
  if (norm.groups) return x.suggest_memory_format();
  if (x.dim() == 4 && x.is_contiguous(at::MemoryFormat::ChannelsLast)) return at::MemoryFormat::ChannelsLast;
  if (x.dim() == 5 && x.is_contiguous(at::MemoryFormat::ChannelsLast3d)) return at::MemoryFormat::ChannelsLast3d;
  return at::MemoryFormat::Contiguous;
}

// x is of the format above.
ChannelCall call_of(const ChannelNorm& norm, const Tensor& x, at::ScalarType dtype) {
  ChannelCall call;
  ChannelArgs& args = call.args;
  const int64_t spatial = x.numel() ? x.numel() / (x.size(0) * x.size(1)) : 0;
  const bool columns = !x.is_contiguous();
  if (columns && norm.groups) call.samples = x.size(0);
  args.outer = call.samples ? spatial : columns ? x.size(0) * spatial : x.size(0);
  args.channels = x.size(1);
  args.inner = columns ? 1 : spatial;
  args.sets = norm.groups && !columns ? args.planes() : args.channels;
  if (!norm.act.empty()) {
    const ActivationSpec spec(norm.act, norm.params);
    args.has_act = true;
    args.act = spec.act;
    args.params = spec.params;
  }
  args.dtype = dtype_of(x);
  args.out_dtype = dtype_of(dtype);
  args.x = x.const_data_ptr();
  call.computed = compute_dtype(x.scalar_type());
  call.groups = norm.groups;
  call.eps = norm.eps;
  call.device = x.device();
  return call;
}

OptionalTensor as(const OptionalTensor& x, at::ScalarType dtype) {
  return !x || (x->scalar_type() == dtype && x->is_contiguous()) ? x : x->to(dtype).contiguous();
}

cuda::Numbers numbers_of(const OptionalTensor& x) {
  if (!x) return {};
  return {const_cast<void*>(x->const_data_ptr()), dtype_of(*x)};
}
cuda::Numbers numbers_to(const Tensor& x) {
  if (!x.defined()) return {};
  return {x.mutable_data_ptr(), dtype_of(x)};
}

// Statistics in double and parameters in the type computed in, alive as long as the call that points to them. CUDA's kernels
// read every dtype.
struct Operands {
  Tensor mean, variance;
  OptionalTensor weight, bias;

  Operands(ChannelCall& call, const ChannelNorm& norm, const Tensor& x, const Tensor& mean_, const Tensor& variance_,
           const OptionalTensor& weight_, const OptionalTensor& bias_)
      : mean(*ready(mean_, at::kDouble)),
        variance(*ready(variance_, at::kDouble)),
        weight(ready(weight_, call.computed)),
        bias(ready(bias_, call.computed)) {
    const int64_t statistics = norm.groups ? x.size(0) * norm.groups : x.size(1);
    TORCH_CHECK_VALUE(mean.numel() == statistics && variance.numel() == statistics && mean.device() == x.device() &&
                          variance.device() == x.device(),
                      norm.name(), ": expected ", statistics, " means and variances on ", x.device(), ", got ",
                      describe(mean), " and ", describe(variance));
    call.mean = numbers_of(mean), call.variance = numbers_of(variance);
    call.weight = numbers_of(weight), call.bias = numbers_of(bias);
  }

 private:
  static OptionalTensor ready(const OptionalTensor& x, at::ScalarType dtype) {
    return as(x, x && !runs_on_threads(x->device()) && has_kernels(*x) ? x->scalar_type() : dtype);
  }
};

c10::SymDimVector statistics_shape(const ChannelNorm& norm, const Tensor& x) {
  if (norm.groups) return {x.sym_size(0), c10::SymInt(norm.groups)};
  return {x.sym_size(1)};
}

Tensor doubles(c10::SymIntArrayRef shape, const Tensor& x) {
  if (x.is_meta()) return at::empty_symint(shape, x.options().dtype(at::kDouble));
  return fresh(C10_AS_INTARRAYREF_SLOW(shape), at::kDouble, x.device());
}

Tensor empty_statistics(const ChannelNorm& norm, const Tensor& x) { return doubles(statistics_shape(norm, x), x); }

// As PyTorch's kernels: group norms hand on what x's strides say of dimensions of one element, batch norms do not.
Tensor result_memory(const ChannelNorm& norm, const Tensor& x, at::ScalarType dtype) {
  return norm.groups ? fresh_strided_like(x, dtype) : fresh_like(x, dtype);
}

// Where the gradient of x goes: the incoming one's memory, or that of its copy g, where that is free.
Tensor gradient_memory(const Tensor& x, const Tensor& grad, const Tensor& g, bool reuse_grad) {
  const bool reuse = (reuse_grad || !g.is_same(grad)) && g.scalar_type() == x.scalar_type();
  return reuse ? g : fresh_strided_like(x, x.scalar_type());
}

}  // namespace

void check_channel_norm(const ChannelNorm& norm, const Tensor& input, const OptionalTensor& weight,
                        const OptionalTensor& bias) {
  check_float_tensor(norm.name(), input);
  TORCH_CHECK_VALUE(input.dim() >= 2, norm.name(), ": expected an input of at least 2 dimensions, got ",
                    input.sym_sizes());
  TORCH_CHECK_VALUE(norm.groups >= 0 && (norm.groups == 0 || input.sym_size(1) % norm.groups == 0), norm.name(),
                    ": expected channels that num_groups divides, got ", input.sym_size(1), " and ", norm.groups);
  for (const auto& [what, parameter] : {std::pair{"weight", &weight}, std::pair{"bias", &bias}}) {
    if (!*parameter) continue;
    check_float_tensor(norm.name(), **parameter);
    TORCH_CHECK_VALUE((*parameter)->dim() == 1 && (*parameter)->sym_size(0) == input.sym_size(1), norm.name(),
                      ": expected a ", what, " of shape [", input.sym_size(1), "], got ", (*parameter)->sym_sizes());
    TORCH_CHECK((*parameter)->device() == input.device(), norm.name(), ": expected input and ", what,
                " on one device, got ", input.device(), " and ", (*parameter)->device());
  }
  if (!norm.act.empty()) (void)ActivationSpec(norm.act, norm.params);
}

namespace {

// Saved-tensor hooks may hand back anything.
void check_gradient(const ChannelNorm& norm, const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                    const OptionalTensor& bias) {
  check_float_tensor(norm.name(), grad);
  check_channel_norm(norm, input, weight, bias);
  TORCH_CHECK(input.sym_sizes() == grad.sym_sizes() && input.device() == grad.device(), norm.name(),
              ": expected a saved input like the gradient, ", describe(grad), " on ", grad.device(), ", got ",
              describe(input), " on ", input.device());
}

}  // namespace

std::tuple<Tensor, Tensor> channel_moments(const ChannelNorm& norm, const Tensor& input) {
  const Tensor mean = empty_statistics(norm, input), variance = empty_statistics(norm, input);
  if (input.is_meta()) return {mean, variance};
  if (input.numel() == 0) return {mean.fill_(NAN), variance.fill_(NAN)};
  const Tensor x = input.contiguous(format_of(norm, input));
  ChannelCall call = call_of(norm, x, x.scalar_type());
  call.mean = numbers_to(mean), call.variance = numbers_to(variance);
  run_channel_moments(call);
  return {mean, variance};
}

Tensor channel_norm_forward(const ChannelNorm& norm, const Tensor& input, const Tensor& mean, const Tensor& variance,
                            const OptionalTensor& weight, const OptionalTensor& bias, at::ScalarType dtype) {
  check_channel_norm(norm, input, weight, bias);
  const Tensor x = input.contiguous(format_of(norm, input));
  Tensor out = result_memory(norm, x, dtype);
  if (x.is_meta() || x.numel() == 0) return out;
  ChannelCall call = call_of(norm, x, dtype);
  const Operands operands(call, norm, x, mean, variance, weight, bias);
  call.args.y = out.mutable_data_ptr();
  run_channel_forward(call);
  return out;
}

ChannelNormed channel_norm(const ChannelNorm& norm, const Tensor& input, const OptionalTensor& weight,
                           const OptionalTensor& bias, at::ScalarType dtype, const RunningStatistics* running) {
  check_channel_norm(norm, input, weight, bias);
  const Tensor mean = empty_statistics(norm, input), variance = empty_statistics(norm, input);
  const Tensor x = input.contiguous(format_of(norm, input));
  Tensor out = result_memory(norm, x, dtype);
  if (x.is_meta()) return {out, mean, variance};
  if (x.numel() == 0) return {out, mean.fill_(NAN), variance.fill_(NAN)};
  ChannelCall call = call_of(norm, x, dtype);
  const Operands operands(call, norm, x, mean, variance, weight, bias);
  call.args.y = out.mutable_data_ptr();
  const auto moved = running ? running->for_kernel(x.numel() / x.size(1)) : std::nullopt;
  if (moved) call.running = *moved;
  run_channel_norm(call);
  if (moved) running->bump_versions();
  return {out, mean, variance, moved.has_value()};
}

Tensor gradient_of(const OptionalTensor& parameter, const Tensor& sums) {
  if (!parameter) return {};
  if (!is_plain(sums) || !sums.is_cpu() || parameter->scalar_type() != at::kFloat)
    return sums.to(parameter->scalar_type());
  Tensor made(at::detail::empty_cpu(sums.sizes(), at::kFloat));
  std::copy_n(sums.const_data_ptr<double>(), sums.numel(), made.mutable_data_ptr<float>());
  return made;
}

ChannelSums channel_norm_sums(const ChannelNorm& norm, const Tensor& grad, const Tensor& input, const Tensor& mean,
                              const Tensor& variance, const OptionalTensor& weight, const OptionalTensor& bias) {
  check_gradient(norm, grad, input, weight, bias);
  const auto format = format_of(norm, input);
  const Tensor x = input.contiguous(format), g = grad.contiguous(format);
  ChannelSums sums{doubles({x.sym_size(1)}, x), doubles({x.sym_size(1)}, x), empty_statistics(norm, x),
                   empty_statistics(norm, x)};
  if (x.is_meta()) return sums;
  if (x.numel() == 0) return {sums.dz.zero_(), sums.dz_x_hat.zero_(), sums.c1.zero_(), sums.c2.zero_()};
  ChannelCall call = call_of(norm, x, g.scalar_type());
  const Operands operands(call, norm, x, mean, variance, weight, bias);
  call.args.grad = g.const_data_ptr();
  run_channel_sums(call, sums.dz.data_ptr<double>(), sums.dz_x_hat.data_ptr<double>(), sums.c1.data_ptr<double>(),
                   sums.c2.data_ptr<double>());
  return sums;
}

Tensor channel_norm_backward(const ChannelNorm& norm, const Tensor& grad, const Tensor& input, const Tensor& mean,
                             const Tensor& variance, const OptionalTensor& weight, const OptionalTensor& bias,
                             const OptionalTensor& c1, const OptionalTensor& c2, bool reuse_grad) {
  check_gradient(norm, grad, input, weight, bias);
  const auto format = format_of(norm, input);
  const Tensor x = input.contiguous(format), g = grad.contiguous(format);
  const Tensor grad_input = gradient_memory(x, grad, g, reuse_grad);
  if (x.is_meta() || x.numel() == 0) return grad_input;
  ChannelCall call = call_of(norm, x, g.scalar_type());
  const Operands operands(call, norm, x, mean, variance, weight, bias);
  const OptionalTensor first = as(c1, at::kDouble), second = as(c2, at::kDouble);
  for (const OptionalTensor& each : {first, second})
    TORCH_CHECK(!each || (each->numel() == mean.numel() && each->device() == x.device()), norm.name(),
                ": expected a sum for each of ", mean.numel(), " means, got ", each ? describe(*each) : "");
  call.args.grad = g.const_data_ptr();
  call.args.grad_input = grad_input.mutable_data_ptr();
  run_channel_backward(call, first ? first->const_data_ptr<double>() : nullptr,
                       second ? second->const_data_ptr<double>() : nullptr);
  return grad_input;
}

ChannelGradients channel_norm_gradients(const ChannelNorm& norm, const Tensor& grad, const Tensor& input,
                                        const Tensor& mean, const Tensor& variance, const OptionalTensor& weight,
                                        const OptionalTensor& bias, bool wants_weight, bool wants_bias,
                                        bool reuse_grad) {
  check_gradient(norm, grad, input, weight, bias);
  const auto format = format_of(norm, input);
  const Tensor x = input.contiguous(format), g = grad.contiguous(format);
  const Tensor grad_input = gradient_memory(x, grad, g, reuse_grad);
  if (x.is_meta() || x.numel() == 0) {
    const auto zeros = [](const OptionalTensor& parameter, bool wanted) {
      return wanted ? at::zeros_like(*parameter, at::MemoryFormat::Contiguous) : Tensor();
    };
    return {grad_input, zeros(weight, wants_weight), zeros(bias, wants_bias)};
  }
  ChannelCall call = call_of(norm, x, g.scalar_type());
  const Operands operands(call, norm, x, mean, variance, weight, bias);
  call.args.grad = g.const_data_ptr();
  call.args.grad_input = grad_input.mutable_data_ptr();
  if (!runs_on_threads(call.device)) {
    const Tensor grad_weight = wants_weight ? fresh_like(*weight) : Tensor();
    const Tensor grad_bias = wants_bias ? fresh_like(*bias) : Tensor();
    gradients_on_stream(call, numbers_to(grad_weight), numbers_to(grad_bias));
    return {grad_input, grad_weight, grad_bias};
  }
  const Tensor dz = doubles({x.sym_size(1)}, x), dz_x_hat = doubles({x.sym_size(1)}, x);
  run_channel_gradients(call, dz.data_ptr<double>(), dz_x_hat.data_ptr<double>());
  return {grad_input, wants_weight ? gradient_of(weight, dz_x_hat) : Tensor(),
          wants_bias ? gradient_of(bias, dz) : Tensor()};
}

namespace {

std::tuple<Tensor, Tensor> moments_op(const Tensor& input, int64_t groups) {
  const ChannelNorm norm{groups, 0, "", {}};
  check_channel_norm(norm, input, std::nullopt, std::nullopt);
  return channel_moments(norm, input);
}

Tensor channel_norm_forward_op(const Tensor& input, int64_t groups, const Tensor& mean, const Tensor& variance,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                               c10::string_view act, Params params, at::ScalarType dtype) {
  return channel_norm_forward({groups, eps, act, params}, input, mean, variance, weight, bias, dtype);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sums_op(const Tensor& grad, const Tensor& input, int64_t groups,
                                                   const Tensor& mean, const Tensor& variance,
                                                   const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                                   c10::string_view act, Params params) {
  const ChannelSums s = channel_norm_sums({groups, eps, act, params}, grad, input, mean, variance, weight, bias);
  return {s.dz, s.dz_x_hat, s.c1, s.c2};
}

Tensor channel_norm_backward_op(const Tensor& grad, const Tensor& input, int64_t groups, const Tensor& mean,
                                const Tensor& variance, const OptionalTensor& weight, const OptionalTensor& bias,
                                const OptionalTensor& c1, const OptionalTensor& c2, double eps, c10::string_view act,
                                Params params) {
  return channel_norm_backward({groups, eps, act, params}, grad, input, mean, variance, weight, bias, c1, c2);
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_act_op(const Tensor& input, const OptionalTensor& weight,
                                                     const OptionalTensor& bias, const OptionalTensor& mean,
                                                     const OptionalTensor& variance, double eps, c10::string_view act,
                                                     Params params, at::ScalarType dtype) {
  const ChannelNorm norm{0, eps, act, params};
  if (mean)
    return {channel_norm_forward(norm, input, *mean, *variance, weight, bias, dtype), mean->clone(), variance->clone()};
  const ChannelNormed made = channel_norm(norm, input, weight, bias, dtype);
  return {made.out, made.mean, made.variance};
}

// Running statistics are of the input's channels and densely packed.
Tensor batch_norm_op(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                     const Tensor& running_mean, const Tensor& running_var, bool training, double momentum, double eps,
                     c10::string_view act, Params params, at::ScalarType dtype) {
  const ChannelNorm norm{0, eps, act, params};
  if (!training) return channel_norm_forward(norm, input, running_mean, running_var, weight, bias, dtype);
  const RunningStatistics running{running_mean, running_var, momentum};
  const ChannelNormed made = channel_norm(norm, input, weight, bias, dtype, &running);
  if (!made.moved) running.move(made.mean, made.variance, input.numel() / input.size(1));
  return made.out;
}

Tensor group_norm_op(const Tensor& input, int64_t groups, const OptionalTensor& weight, const OptionalTensor& bias,
                     double eps, at::ScalarType dtype) {
  return channel_norm({groups, eps, "", {}}, input, weight, bias, dtype).out;
}

void register_channel_norms(torch::Library& m) {
  m.impl("_batch_norm_act", batch_norm_act_op);
  m.impl("_batch_norm", batch_norm_op);
  m.impl("_group_norm", group_norm_op);
  m.impl("_channel_moments", moments_op);
  m.impl("_channel_norm_forward", channel_norm_forward_op);
  m.impl("_channel_norm_sums", sums_op);
  m.impl("_channel_norm_backward", channel_norm_backward_op);
}

}  // namespace

TORCH_LIBRARY_IMPL(memkit, CPU, m) { register_channel_norms(m); }
TORCH_LIBRARY_IMPL(memkit, CUDA, m) { register_channel_norms(m); }
TORCH_LIBRARY_IMPL(memkit, Meta, m) { register_channel_norms(m); }

}  // namespace memkit
