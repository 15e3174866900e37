// Batch norm with an activation and group norm with their derivative. The input and the statistics are kept; what the
// activation was applied to is computed again.
#include <ATen/ATen.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "channel_norm.h"
#include "checks.h"
#include "derivative.h"
#include "operators.h"
#include "row_norm.h"
#include "saved_node.h"
#include "stock.h"
#include "transforms.h"

namespace memkit {
namespace autograd = torch::autograd;
using at::Tensor;
using Params = c10::ArrayRef<double>;

namespace {

bool all_plain(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias) {
  return is_plain(x) && (!weight || is_plain(*weight)) && (!bias || is_plain(*bias));
}

struct Composed {
  Tensor out, mean, variance;
};

// In ATen's operators, for function transforms and derivatives of derivatives.
Composed compose(const ChannelNorm& norm, const Tensor& input, const OptionalTensor& mean,
                 const OptionalTensor& variance, const OptionalTensor& weight, const OptionalTensor& bias,
                 at::ScalarType dtype) {
  const auto computed = compute_dtype(input.scalar_type());
  Tensor x = input.to(computed);
  const auto shape = x.sym_sizes().vec();
  std::vector<int64_t> dims{0};
  for (int64_t d = 2; d < x.dim(); ++d) dims.push_back(d);
  const int64_t channel_dim = 1;
  if (norm.groups) {
    x = x.reshape_symint({shape[0], norm.groups, -1});
    dims = {2};
  }
  const auto spread = [&](const Tensor& t) {  // of a statistic
    if (norm.groups) return t.to(computed).unsqueeze(-1);
    c10::SymDimVector wide(x.dim(), 1);
    wide[channel_dim] = shape[1];
    return t.to(computed).view_symint(wide);
  };
  const auto of_channel = [&](const Tensor& t) {
    c10::SymDimVector wide(shape.size(), 1);
    wide[channel_dim] = shape[1];
    return t.to(computed).view_symint(wide);
  };
  Composed made;
  if (mean) {
    made.mean = *mean, made.variance = *variance;
  } else {
    std::tie(made.variance, made.mean) = at::var_mean(x, at::OptionalIntArrayRef(dims), /*correction=*/0);
  }
  Tensor z = (x - spread(made.mean)) * (spread(made.variance) + norm.eps).rsqrt();
  if (norm.groups) z = z.reshape_symint(shape);
  if (weight) z = z * of_channel(*weight);
  if (bias) z = z + of_channel(*bias);
  if (!norm.act.empty()) z = stock_activation(ActivationSpec(norm.act, norm.params), z);
  made.out = z.to(dtype);
  return made;
}

// Below autograd, with the statistics given.
Tensor normalise(const ChannelNorm& norm, const Tensor& input, const Tensor& mean, const Tensor& variance,
                 const OptionalTensor& weight, const OptionalTensor& bias, at::ScalarType dtype) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (all_plain(input, weight, bias)) return channel_norm_forward(norm, input, mean, variance, weight, bias, dtype);
  return MEMKIT_CALL("memkit::_channel_norm_forward",
                     Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, const OptionalTensor&,
                            const OptionalTensor&, double, c10::string_view, Params, at::ScalarType))(
      input, norm.groups, mean, variance, weight, bias, norm.eps, norm.act, norm.params, dtype);
}

// By PyTorch's own norms, whose gradients have a derivative that keeps less than that of steps.
struct Stock {
  const ChannelNorm& norm;
  const Tensor &x, &weight, &bias;  // the last two maybe undefined
  const Tensor &mean, &variance;
  bool own_statistics;

  Tensor normalised() const {
    if (norm.groups) {
      const bool alike = !weight.defined() || weight.scalar_type() == x.scalar_type();
      return at::group_norm(alike ? x : wide(x), norm.groups, optional(alike ? weight : wide(weight)),
                            optional(alike ? bias : wide(bias)), norm.eps);
    }
    return at::batch_norm(plain(x), optional(wide(weight)), optional(wide(bias)), given(mean), given(variance),
                          own_statistics, /*momentum=*/0, norm.eps, at::globalContext().userEnabledCuDNN());
  }

  // Of a batch norm, from that of its result.
  autograd::variable_list gradients(const Tensor& grad, std::array<bool, 3> wanted) const {
    auto [dx, dweight, dbias] = at::native_batch_norm_backward(
        plain(grad), plain(x), optional(wide(weight)), given(mean), given(variance), wide(mean),
        wide((variance + norm.eps).rsqrt()), own_statistics, norm.eps, wanted);
    if (wanted[1]) dweight = dweight.to(weight.scalar_type());
    if (wanted[2]) dbias = dbias.to(bias.scalar_type());
    return {dx, dweight, dbias};
  }

 private:
  // Beside an input of a dtype of 2 bytes a batch norm takes float32.
  Tensor wide(const Tensor& t) const { return t.defined() ? t.to(compute_dtype(x.scalar_type())) : t; }
  // Its kernels read other strides wrong, also those of dimensions of 1.
  Tensor plain(const Tensor& t) const {
    const auto format = x.suggest_memory_format();
    const Tensor made = t.contiguous(format);
    const auto sizes = made.sizes();
    const bool is_plain =
        format == at::MemoryFormat::ChannelsLast     ? made.strides() == c10::get_channels_last_strides_2d(sizes)
        : format == at::MemoryFormat::ChannelsLast3d ? made.strides() == c10::get_channels_last_strides_3d(sizes)
                                                     : made.strides() == c10::contiguous_strides(sizes);
    return is_plain ? made : made.clone(format);
  }
  OptionalTensor given(const Tensor& t) const { return own_statistics ? std::nullopt : OptionalTensor(wide(t)); }
};

// Of the incoming gradient, the input, weight, bias and the statistics; with one derivative, or `again` more.
autograd::variable_list composed_gradients(const ChannelNorm& norm, bool own_statistics, at::ScalarType dtype,
                                           const autograd::variable_list& given, std::array<bool, 3> wanted,
                                           bool again) {
  // Aliases: the gradient of each apart from that of others which it was made from.
  autograd::variable_list to(3);
  for (size_t i = 0; i < 3; ++i) to[i] = given[i + 1].defined() ? at::alias(given[i + 1]) : Tensor();
  const OptionalTensor weight = optional(to[1]), bias = optional(to[2]);
  const std::vector<bool> asked(wanted.begin(), wanted.end());
  if (again || (bias && !weight) || to[0].sym_numel() == 0) {  // its kernel divides by the number of elements
    const OptionalTensor mean = own_statistics ? std::nullopt : OptionalTensor(given[4]);
    const OptionalTensor variance = own_statistics ? std::nullopt : OptionalTensor(given[5]);
    autograd::variable_list out(1);
    out[0] = compose(norm, to[0], mean, variance, weight, bias, dtype).out;
    return gradients_of(std::move(out), {given[0]}, to, asked, /*create_graph=*/true);
  }
  const Stock stock{norm, to[0], to[1], to[2], given[4], given[5], own_statistics};
  Tensor grad = given[0].to(to[0].scalar_type());
  if (norm.groups) {
    autograd::variable_list out(1);
    out[0] = stock.normalised();
    return gradients_of(std::move(out), {grad}, to, asked, /*create_graph=*/true);
  }
  if (!norm.act.empty()) {
    const ActivationSpec act(norm.act, norm.params);
    Tensor z;
    if (act.has_two_slopes()) {  // which have no derivative by z
      const at::AutoGradMode off(false);
      z = normalise({0, norm.eps, "", {}}, to[0], given[4], given[5], weight, bias, to[0].scalar_type());
    } else {
      z = stock.normalised();
    }
    grad = stock_activation_backward(act, grad, z, /*from_output=*/false);
  }
  return stock.gradients(grad, wanted);
}

struct ChannelNormBackward : SavedNode {
  int64_t groups = 0;
  double eps = 0;
  std::string act;
  std::vector<double> params;
  bool own_statistics = true;
  at::ScalarType dtype = at::kFloat;  // of the result

  bool can_rebuild(uint32_t output) const override { return output == 0; }
  ChannelNorm norm() const { return {groups, eps, act, params}; }
  std::string name() const override { return "memkit::" + std::string(norm().name()) + "_backward"; }

 protected:
  Tensor recompute() override {
    return normalise(norm(), unpack(0), unpack(1), unpack(2), optional(unpack_parameter(3)),
                     optional(unpack_parameter(4)), dtype);
  }

  autograd::variable_list backward(autograd::variable_list&& grads) override {
    autograd::variable_list result(3);
    Tensor grad = std::move(grads[0]);
    if (!grad.defined()) return result;
    const Tensor x = unpack(0), mean = unpack(1), variance = unpack(2);
    const OptionalTensor weight = optional(unpack(3)), bias = optional(unpack(4));
    if (!at::GradMode::is_enabled())
      return gradients(grad, x, mean, variance, weight, bias, /*reuse=*/is_sole_owner(grad));
    // create_graph: the gradient itself needs a derivative.
    const autograd::variable_list inputs{grad, x, weight.value_or(Tensor()), bias.value_or(Tensor()), mean, variance};
    const std::array<bool, 3> wanted{task_should_compute_output(0), weight && task_should_compute_output(1),
                                     bias && task_should_compute_output(2)};
    // Not this node, which holds the input.
    const auto composed = [groups = groups, eps = eps, act = act, params = params, own = own_statistics, dtype = dtype,
                           wanted](const autograd::variable_list& given, bool again) {
      return composed_gradients({groups, eps, act, params}, own, dtype, given, wanted, again);
    };
    const auto kernel = [&] { return gradients(grad, x, mean, variance, weight, bias, /*reuse=*/false); };
    const bool has_zeros = !act.empty() && ActivationSpec(act, params).has_two_slopes();
    return differentiable_gradients(inputs, kernel, composed, has_zeros);
  }

 private:
  autograd::variable_list gradients(const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& variance,
                                    const OptionalTensor& weight, const OptionalTensor& bias, bool reuse) {
    autograd::variable_list result(3);
    const bool plain = is_plain(grad) && all_plain(x, weight, bias);
    const bool wants_weight = weight && task_should_compute_output(1);
    const bool wants_bias = bias && task_should_compute_output(2);
    const bool wants_input = task_should_compute_output(0);
    // The incoming gradient's memory serves for the outgoing one where no one else can see it.
    reuse = reuse && plain;
    if (plain && own_statistics && wants_input) {
      ChannelGradients found =
          channel_norm_gradients(norm(), grad, x, mean, variance, weight, bias, wants_weight, wants_bias, reuse);
      return {std::move(found.input), std::move(found.weight), std::move(found.bias)};
    }
    ChannelSums sums;
    if (own_statistics || wants_weight || wants_bias) {
      if (plain) {
        sums = channel_norm_sums(norm(), grad, x, mean, variance, weight, bias);
      } else {
        std::tie(sums.dz, sums.dz_x_hat, sums.c1, sums.c2) = MEMKIT_CALL(
            "memkit::_channel_norm_sums", std::tuple<Tensor, Tensor, Tensor, Tensor>(
                                              const Tensor&, const Tensor&, int64_t, const Tensor&, const Tensor&,
                                              const OptionalTensor&, const OptionalTensor&, double, c10::string_view,
                                              Params))(grad, x, groups, mean, variance, weight, bias, eps, act, params);
      }
    }
    if (wants_weight) result[1] = gradient_of(weight, sums.dz_x_hat);
    if (wants_bias) result[2] = gradient_of(bias, sums.dz);
    if (!wants_input) return result;
    const OptionalTensor c1 = own_statistics ? optional(sums.c1) : std::nullopt;
    const OptionalTensor c2 = own_statistics ? optional(sums.c2) : std::nullopt;
    if (plain) {
      result[0] = channel_norm_backward(norm(), grad, x, mean, variance, weight, bias, c1, c2, reuse);
    } else {
      result[0] = MEMKIT_CALL("memkit::_channel_norm_backward",
                              Tensor(const Tensor&, const Tensor&, int64_t, const Tensor&, const Tensor&,
                                     const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                     const OptionalTensor&, double, c10::string_view, Params))(
          grad, x, groups, mean, variance, weight, bias, c1, c2, eps, act, params);
    }
    return result;
  }
};

std::tuple<Tensor, Tensor, Tensor> run(const ChannelNorm& norm, const Tensor& input, const OptionalTensor& weight,
                                       const OptionalTensor& bias, const OptionalTensor& mean,
                                       const OptionalTensor& variance, at::ScalarType dtype,
                                       const RunningStatistics* running = nullptr) {
  check_channel_norm(norm, input, weight, bias);
  TORCH_CHECK(mean.has_value() == variance.has_value(), norm.name(),
              ": expected a mean and a variance or neither, got one of them");
  if (needs_stock(input, weight, bias)) {
    const Composed made = compose(norm, input, mean, variance, weight, bias, dtype);
    if (running) running->move(made.mean.detach(), made.variance.detach(), input.numel() / input.size(1));
    return {made.out, made.mean.to(at::kDouble), made.variance.to(at::kDouble)};
  }
  Tensor out, own_mean, own_variance;
  bool moved = false;
  if (!mean && all_plain(input, weight, bias)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    ChannelNormed made = channel_norm(norm, input, weight, bias, dtype, running);
    out = std::move(made.out), own_mean = std::move(made.mean), own_variance = std::move(made.variance);
    moved = made.moved;
  } else {
    if (mean) {
      own_mean = *mean, own_variance = *variance;
    } else {
      const at::AutoDispatchBelowADInplaceOrView below;
      std::tie(own_mean, own_variance) = MEMKIT_CALL(
          "memkit::_channel_moments", std::tuple<Tensor, Tensor>(const Tensor&, int64_t))(input, norm.groups);
    }
    out = normalise(norm, input, own_mean, own_variance, weight, bias, dtype);
  }
  if (running && !moved) running->move(own_mean, own_variance, input.numel() / input.size(1));
  if (autograd::compute_requires_grad(input, weight, bias)) {
    auto node = make_node<ChannelNormBackward>();
    node->set_next_edges(edges_of(input, weight, bias));
    node->groups = norm.groups;
    node->eps = norm.eps;
    node->act = norm.act;
    node->params = norm.params.vec();
    node->own_statistics = !mean;
    node->dtype = dtype;
    autograd::set_history(out, node);
    node->watch(out);
    node->save(input);
    node->save(own_mean);
    node->save(own_variance);
    node->save_parameter(weight);
    node->save_parameter(bias);
  }
  return {out, own_mean, own_variance};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_act(const Tensor& input, const OptionalTensor& weight,
                                                  const OptionalTensor& bias, const OptionalTensor& mean,
                                                  const OptionalTensor& variance, double eps, c10::string_view act,
                                                  Params params, at::ScalarType dtype) {
  auto made = run({0, eps, act, params}, input, weight, bias, mean, variance, dtype);
  if (mean) {  // an operator's results are new tensors
    std::get<1>(made) = mean->clone();
    std::get<2>(made) = variance->clone();
  }
  return made;
}

Tensor batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                  const Tensor& running_mean, const Tensor& running_var, bool training, double momentum, double eps,
                  c10::string_view act, Params params, at::ScalarType dtype) {
  const ChannelNorm norm{0, eps, act, params};
  if (!training) return std::get<0>(run(norm, input, weight, bias, running_mean, running_var, dtype));
  const RunningStatistics running{running_mean, running_var, momentum};
  return std::get<0>(run(norm, input, weight, bias, std::nullopt, std::nullopt, dtype, &running));
}

Tensor group_norm(const Tensor& input, int64_t groups, const OptionalTensor& weight, const OptionalTensor& bias,
                  double eps, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(groups > 0, "group_norm: expected num_groups of at least 1, got ", groups);
  return std::get<0>(run({groups, eps, "", {}}, input, weight, bias, std::nullopt, std::nullopt, dtype));
}

}  // namespace

TORCH_LIBRARY_IMPL(memkit, Autograd, m) {
  m.impl("_batch_norm_act", batch_norm_act);
  m.impl("_batch_norm", batch_norm);
  m.impl("_group_norm", group_norm);
}

TORCH_LIBRARY_IMPL(memkit, FuncTorchBatched, m) {
  m.impl("_batch_norm_act", batch_norm_act);
  m.impl("_group_norm", group_norm);
}

}  // namespace memkit
