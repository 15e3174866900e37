// The operators whose results memkit::_consumer makes again: activations and dropout, gated units, norms.
#include <ATen/ATen.h>

#include "activation_ops.h"
#include "channel_norm.h"
#include "checks.h"
#include "consumer.h"
#include "eager.h"
#include "layout.h"
#include "operators.h"
#include "row_norm_save.h"

namespace memkit {
namespace {

using at::Tensor;
using Params = c10::ArrayRef<double>;
using Text = c10::string_view;

// drop(act(input + bias)), the bias along the last dimension.
struct ActivationProducer : Producer {
  ActivationProducer(const ProducerSpec& s, Tensors inputs)
      : Producer(std::move(inputs)),
        act(s.act),
        drop(seed() ? s.numbers.slice(0, 4) : Params()),
        params(s.numbers.slice(drop.size())),
        dtype(s.dtype) {}

  const Tensor& x() const { return inputs[0]; }
  OptionalTensor bias() const { return optional(inputs[1]); }
  OptionalTensor seed() const { return optional(inputs[2]); }

  bool is_nothing() const override { return act == "identity" && !bias() && !seed(); }

  void check() const override {
    if (is_nothing()) return;  // a layer alone
    ActivationSpec(act, params);
    check_arguments(act, x(), bias(), -1);
  }

  Tensor forward(Tensors&) const override {
    if (is_nothing()) return x().to(dtype);
    return ops::activation(x(), bias(), -1, act, params, "input", std::nullopt, seed(), drop).to(dtype);
  }

  Tensors backward(Tensor grad, const Tensors&, const std::vector<bool>& wanted, bool) override {
    grad = grad.to(x().scalar_type());
    if (act != "identity") {
      ops::activation_backward_(grad, x(), bias(), -1, std::nullopt, act, params, false, seed(), drop);
    } else if (seed()) {  // dropout's gradient is dropout without the shifts, in the input's order of memory
      const auto order = walk_strides(x(), bias().has_value(), -1);
      if (!same_order(grad.sym_sizes(), grad.sym_strides(), order))
        grad = at::empty_strided_symint(grad.sym_sizes(), order, grad.options()).copy_(grad);
      const double linear[] = {drop[0], drop[1], 0, 0};
      ops::activation_(grad, std::nullopt, -1, "identity", {}, "auto", std::nullopt, seed(), linear);
    }
    Tensors found(3);
    if (wanted[1]) found[1] = grad.reshape_symint({-1, grad.sym_size(-1)}).sum(0);
    if (wanted[0]) found[0] = grad;
    return found;
  }

  std::string_view act;
  Params drop, params;
  at::ScalarType dtype;
};

struct GluProducer : Producer {
  GluProducer(const ProducerSpec& s, Tensors inputs)
      : Producer(std::move(inputs)), act(s.act), packing(s.packing), dtype(s.dtype) {}

  void check() const override { check_float_tensor("glu_linear", inputs[0]); }  // the rest by the operator itself

  Tensor forward(Tensors&) const override {
    return MEMKIT_CALL("memkit::_glu", Tensor(const Tensor&, const OptionalTensor&, Text, Text))(
               inputs[0], optional(inputs[1]), act, packing)
        .to(dtype);
  }

  // Where nobody can see gate and up again, their memory takes their gradients.
  Tensors backward(Tensor grad, const Tensors&, const std::vector<bool>&, bool last) override {
    const Tensor &gate = inputs[0], &up = inputs[1];
    grad = grad.to(gate.scalar_type());
    if (last && eager::is_dead(gate) && (!up.defined() || eager::is_dead(up))) {
      Tensors found = inputs;
      MEMKIT_CALL_PAST_AUTOGRAD("memkit::_glu_backward_",
                                void(const Tensor&, Tensor&, const OptionalTensor&, Text, Text))
      (grad, found[0], optional(up), act, packing);
      return found;
    }
    auto [grad_gate, grad_up] = MEMKIT_CALL_PAST_AUTOGRAD(
        "memkit::_glu_backward", std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, Text,
                                                            Text))(grad, gate, optional(up), act, packing);
    return {grad_gate, up.defined() ? grad_up : Tensor()};
  }

  std::string_view act, packing;
  at::ScalarType dtype;
};

struct RowNormProducer : Producer {
  RowNormProducer(const ProducerSpec& s, Tensors inputs)
      : Producer(std::move(inputs)),
        norm{int64_t(s.numbers[0]), s.numbers[1], s.op == "layer_norm", s.dtype},
        keeps_result(s.numbers.size() > 2) {}

  OptionalTensor weight() const { return optional(inputs[1]); }
  OptionalTensor bias() const { return optional(inputs[2]); }

  void check() const override { check_row_norm(norm, inputs[0], std::nullopt, weight(), bias()); }

  // Layers of a dtype of two bytes round the gradient of a float32 input's norm.
  bool prefers_result() const override {
    return inputs[0].scalar_type() == at::kFloat && c10::elementSize(norm.dtype) == 2 &&
           resolve_kept(norm, inputs[0], weight(), bias(), "auto", false, /*rounded=*/true) == Kept::output;
  }

  Tensor forward(Tensors& statistics) const override {
    const auto run = [&](Statistics wanted) {
      return row_norm_forward(norm, inputs[0], std::nullopt, weight(), bias(), wanted);
    };
    if (!statistics.empty()) return keeps_result ? inputs[0] : run(Statistics::none).out;
    RowNormed made = run(statistics_beside(keeps_result ? Kept::output : Kept::input));
    statistics.push_back(made.rstd);
    if (keeps_result)
      statistics.push_back(made.out);
    else if (norm.centered)
      statistics.push_back(made.mean);
    return made.out;
  }

  Tensor input_again(const Tensors& statistics) const override {
    if (!keeps_result) return inputs[0];
    const at::NoGradGuard no_grad;
    Tensor x = inputs[0].to(at::kFloat), rstd = statistics[0];
    if (bias()) x = x - *bias();
    if (weight()) x = x / *weight();
    for (int64_t d = 0; d < norm.dims; ++d) rstd = rstd.unsqueeze(-1);
    return x / rstd;  // a row's mean is nothing to a layer norm
  }

  Tensor differentiable(Tensors&) const override {
    return MEMKIT_CALL("memkit::_row_norm", Tensor(const Tensor&, int64_t, int64_t, const OptionalTensor&,
                                                   const OptionalTensor&, double, bool, at::ScalarType, Text, Text))(
        inputs[0], norm.dims, norm.behind, weight(), bias(), norm.eps, norm.centered, norm.dtype, "input",
        name_of(norm.denominator));
  }

  Tensors backward(Tensor grad, const Tensors& statistics, const std::vector<bool>& wanted, bool) override {
    const at::ScalarType dtype = keeps_result ? at::kFloat : inputs[0].scalar_type();
    const bool fits = grad.scalar_type() == dtype && grad.is_contiguous();
    const Tensor mean = norm.centered && !keeps_result ? statistics[1] : Tensor();
    RowNormGradients g =
        row_norm_backward(norm, grad, std::nullopt, inputs[0], weight(), bias(), mean, statistics[0], keeps_result,
                          dtype, {wanted[0], wanted[1], wanted[2]}, fits ? grad : Tensor());
    return {g.input, g.weight, g.bias};
  }

  RowNorm norm;
  bool keeps_result;
};

// Batch norm with an activation behind it, by its own statistics or given ones.
struct BatchNormProducer : Producer {
  BatchNormProducer(const ProducerSpec& s, Tensors inputs)
      : Producer(std::move(inputs)), norm{0, s.numbers[0], s.act, s.numbers.slice(1)}, dtype(s.dtype) {}

  const Tensor& x() const { return inputs[0]; }
  OptionalTensor weight() const { return optional(inputs[1]); }
  OptionalTensor bias() const { return optional(inputs[2]); }
  bool own() const { return !inputs[3].defined(); }

  void check() const override {
    check_channel_norm(norm, x(), weight(), bias());
    TORCH_CHECK(inputs[3].defined() == inputs[4].defined(), norm.name(),
                ": expected a mean and a variance or neither, got one of them");
  }

  Tensor forward(Tensors& statistics) const override {
    if (statistics.empty()) {
      if (own()) {
        ChannelNormed made = channel_norm(norm, x(), weight(), bias(), dtype);
        statistics = {std::move(made.mean), std::move(made.variance)};
        return std::move(made.out);
      }
      statistics = {inputs[3].clone(), inputs[4].clone()};  // an operator's results are new tensors
    }
    return channel_norm_forward(norm, x(), statistics[0], statistics[1], weight(), bias(), dtype);
  }

  Tensor differentiable(Tensors& statistics) const override {
    auto [out, mean, variance] =
        MEMKIT_CALL("memkit::_batch_norm_act",
                    std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                       const OptionalTensor&, const OptionalTensor&, double, Text,
                                                       Params, at::ScalarType))(
            x(), weight(), bias(), optional(inputs[3]), optional(inputs[4]), norm.eps, norm.act, norm.params, dtype);
    statistics = {mean, variance};
    return out;
  }

  Tensors backward(Tensor grad, const Tensors& statistics, const std::vector<bool>& wanted, bool) override {
    const Tensor &mean = statistics[0], &variance = statistics[1];
    Tensors found(5);
    if (own() && wanted[0]) {
      ChannelGradients g = channel_norm_gradients(norm, grad, x(), mean, variance, weight(), bias(), wanted[1],
                                                  wanted[2], /*reuse_grad=*/true);
      found[0] = std::move(g.input), found[1] = std::move(g.weight), found[2] = std::move(g.bias);
      return found;
    }
    ChannelSums sums;
    if (own() || wanted[1] || wanted[2]) sums = channel_norm_sums(norm, grad, x(), mean, variance, weight(), bias());
    if (wanted[1]) found[1] = gradient_of(weight(), sums.dz_x_hat);
    if (wanted[2]) found[2] = gradient_of(bias(), sums.dz);
    const OptionalTensor c1 = own() ? optional(sums.c1) : std::nullopt, c2 = own() ? optional(sums.c2) : std::nullopt;
    if (wanted[0])
      found[0] = channel_norm_backward(norm, grad, x(), mean, variance, weight(), bias(), c1, c2, /*reuse_grad=*/true);
    return found;
  }

  ChannelNorm norm;
  at::ScalarType dtype;
};

template <class P>
std::unique_ptr<Producer> make(const ProducerSpec& spec, Tensors inputs, size_t places, size_t numbers) {
  TORCH_CHECK_VALUE(inputs.size() == places && inputs[0].defined() && spec.numbers.size() >= numbers,
                    "_consumer: ", spec.op, ": expected ", places, " inputs and ", numbers, " numbers, got ",
                    inputs.size(), " and ", spec.numbers.size());
  auto made = std::make_unique<P>(spec, std::move(inputs));
  made->check();
  return made;
}

}  // namespace

std::unique_ptr<Producer> make_producer(const ProducerSpec& spec, Tensors inputs) {
  const size_t seeded = inputs.size() > 2 && inputs[2].defined();
  if (spec.op == "activation") return make<ActivationProducer>(spec, std::move(inputs), 3, seeded ? 4 : 0);
  if (spec.op == "glu") return make<GluProducer>(spec, std::move(inputs), 2, 0);
  if (spec.op == "batch_norm") return make<BatchNormProducer>(spec, std::move(inputs), 5, 1);
  TORCH_CHECK_VALUE(spec.op == "layer_norm" || spec.op == "rms_norm",
                    "_consumer: expected op 'activation', 'glu', 'layer_norm', 'rms_norm' or 'batch_norm', got '",
                    spec.op, "'");
  return make<RowNormProducer>(spec, std::move(inputs), 3, 2);
}

}  // namespace memkit
