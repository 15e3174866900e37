// The named operators: each hands its arguments to memkit::_activation.
#include "named_ops.h"

#include <torch/library.h>

#include "activation_ops.h"
#include "autocast.h"
#include "spec.h"

namespace memkit {

using at::Tensor;
using Text = c10::string_view;

Tensor cast_for_autocast(const Tensor& bias, const Tensor& input) {
  if (bias.scalar_type() == input.scalar_type()) return bias;
  return is_autocast(input) ? bias.to(input.scalar_type()) : bias;
}

c10::ArrayRef<double> default_params(Text act) {
  static constexpr double kNegativeSlope[] = {0.01}, kAlpha[] = {1}, kSoftplus[] = {1, 20}, kHardtanh[] = {-1, 1};
  if (act == "leaky_relu") return kNegativeSlope;
  if (act == "elu" || act == "celu") return kAlpha;
  if (act == "softplus") return kSoftplus;
  if (act == "hardtanh") return kHardtanh;
  return {};
}

namespace {

template <class... Ts>
Tensor run(const Tensor& input, Text op, Text save, Ts... params) {
  const std::array<double, sizeof...(Ts)> values{params...};
  return ops::activation(input, std::nullopt, -1, op, values, save);
}

template <class... Ts>
Tensor& run_(Tensor& input, Text op, Text save, Ts... params) {
  const std::array<double, sizeof...(Ts)> values{params...};
  return ops::activation_(input, std::nullopt, -1, op, values, save);
}

#define MEMKIT_PLAIN(NAME)                                                               \
  m.impl(#NAME, [](const Tensor& input, Text save) { return run(input, #NAME, save); }); \
  m.impl(#NAME "_", [](Tensor& input, Text save) -> Tensor& { return run_(input, #NAME, save); });
#define MEMKIT_ONE(NAME)                                                                              \
  m.impl(#NAME, [](const Tensor& input, double a, Text save) { return run(input, #NAME, save, a); }); \
  m.impl(#NAME "_", [](Tensor& input, double a, Text save) -> Tensor& { return run_(input, #NAME, save, a); });
#define MEMKIT_TWO(NAME)                                                                                           \
  m.impl(#NAME, [](const Tensor& input, double a, double b, Text save) { return run(input, #NAME, save, a, b); }); \
  m.impl(#NAME "_",                                                                                                \
         [](Tensor& input, double a, double b, Text save) -> Tensor& { return run_(input, #NAME, save, a, b); });

Tensor bias_act(const Tensor& input, const Tensor& bias, Text act, int64_t dim, OptionalParams params, Text save) {
  return ops::activation(input, cast_for_autocast(bias, input), dim, act, params.value_or(default_params(act)), save);
}

Tensor& bias_act_(Tensor& input, const Tensor& bias, Text act, int64_t dim, OptionalParams params, Text save) {
  return ops::activation_(input, cast_for_autocast(bias, input), dim, act, params.value_or(default_params(act)), save);
}

void register_named(torch::Library& m) {
  MEMKIT_PLAIN(relu)
  MEMKIT_ONE(leaky_relu)
  MEMKIT_ONE(elu)
  MEMKIT_PLAIN(selu)
  MEMKIT_ONE(celu)
  MEMKIT_PLAIN(sigmoid)
  MEMKIT_PLAIN(tanh)
  MEMKIT_TWO(softplus)
  MEMKIT_PLAIN(relu6)
  MEMKIT_TWO(hardtanh)
  MEMKIT_PLAIN(hardsigmoid)
  MEMKIT_PLAIN(relu_squared)
  MEMKIT_PLAIN(quick_gelu)
  MEMKIT_PLAIN(silu)
  MEMKIT_PLAIN(mish)
  MEMKIT_PLAIN(hardswish)
  m.impl("gelu",
         [](const Tensor& input, Text approximate, Text save) { return run(input, gelu_name(approximate), save); });
  m.impl("gelu_", [](Tensor& input, Text approximate, Text save) -> Tensor& {
    return run_(input, gelu_name(approximate), save);
  });
  m.impl("bias_act", bias_act);
  m.impl("bias_act_", bias_act_);
}

}  // namespace

TORCH_LIBRARY_IMPL(memkit, CompositeImplicitAutograd, m) { register_named(m); }
// Under vmap the composite itself must run, not a loop over the batch.
TORCH_LIBRARY_IMPL(memkit, FuncTorchBatched, m) { register_named(m); }

}  // namespace memkit
