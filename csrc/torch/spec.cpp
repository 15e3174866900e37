#include "spec.h"

#include <c10/util/Exception.h>

namespace memkit {
namespace {

struct Known {
  std::string_view name;
  Act act;
  size_t arity;  // parameters the caller gives
};

constexpr Known kKnown[] = {
    {"gelu", Act::gelu, 0},
    {"silu", Act::silu, 0},
    {"relu", Act::relu, 0},
    {"gelu_tanh", Act::gelu_tanh, 0},
    {"quick_gelu", Act::quick_gelu, 0},
    {"mish", Act::mish, 0},
    {"hardswish", Act::hardswish, 0},
    {"leaky_relu", Act::leaky_relu, 1},
    {"elu", Act::elu, 1},
    {"selu", Act::elu, 0},
    {"celu", Act::elu, 1},
    {"sigmoid", Act::sigmoid, 0},
    {"tanh", Act::tanh, 0},
    {"softplus", Act::softplus, 2},
    {"relu6", Act::hardtanh, 0},
    {"hardtanh", Act::hardtanh, 2},
    {"hardsigmoid", Act::hardsigmoid, 0},
    {"relu_squared", Act::relu_squared, 0},
    {"identity", Act::identity, 0},
};

const Known& find(std::string_view name) {
  for (const Known& known : kKnown)
    if (known.name == name) return known;
  std::string names;
  for (const Known& known : kKnown) names.append(names.empty() ? "" : ", ").append(known.name);
  TORCH_CHECK_VALUE(false, "activation: expected one of ", names, ", got '", name, "'");
}

ActParams parameters(const Known& known, c10::ArrayRef<double> given) {
  TORCH_CHECK_VALUE(given.size() == known.arity, known.name, ": expected ", known.arity, " parameters, got ",
                    given.size());
  ActParams p;
  if (known.name == "elu") {
    p = {given[0], 1, 1};
  } else if (known.name == "selu") {
    p = {1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1};
  } else if (known.name == "celu") {
    TORCH_CHECK_VALUE(given[0] != 0, "celu: expected alpha other than 0, got 0");
    p = {given[0], 1, 1 / given[0]};
  } else if (known.name == "softplus") {
    TORCH_CHECK_VALUE(given[0] != 0, "softplus: expected beta other than 0, got 0");
    p = {given[0], given[1], 0};
  } else if (known.name == "relu6") {
    p = {0, 6, 0};
  } else if (known.name == "hardtanh") {
    TORCH_CHECK_VALUE(given[0] <= given[1], "hardtanh: expected min_val <= max_val, got ", given[0], " and ", given[1]);
    p = {given[0], given[1], 0};
  } else if (known.arity == 1) {
    p = {given[0], 0, 0};
  }
  return p;
}

}  // namespace

ActivationSpec::ActivationSpec(std::string_view name_, c10::ArrayRef<double> given) {
  const Known& known = find(name_);
  name = known.act == Act::identity ? "dropout" : known.name;
  act = known.act;
  params = parameters(known, given);
}

bool ActivationSpec::has_two_slopes() const {
  return act == Act::relu || act == Act::leaky_relu || act == Act::hardtanh || act == Act::hardsigmoid;
}

ActParams ActivationSpec::params_of_output(at::ScalarType dtype) const {
  if (act != Act::hardtanh) return params;
  const auto stored = [&](double bound) -> double {
    switch (dtype) {
      case at::kHalf: return c10::Half(static_cast<float>(bound));
      case at::kBFloat16: return c10::BFloat16(static_cast<float>(bound));
      case at::kFloat: return static_cast<float>(bound);
      default: return bound;
    }
  };
  return {stored(params.a), stored(params.b), params.c};
}

bool ActivationSpec::invertible(bool dropped) const {
  if (dropped && (act == Act::hardtanh || act == Act::hardsigmoid || act == Act::hardswish)) return false;
  switch (act) {
    case Act::leaky_relu: return params.a >= 0;
    case Act::elu: return params.a >= 0 && params.b > 0 && params.c > 0;
    // Where softplus turns into the identity its value steps down by log1p(exp(-threshold)) / beta, and two inputs share
    // an output. Beyond the default threshold that is less than the rounding.
    case Act::softplus: return params.a > 0 && params.b >= 20;
    default: return true;
  }
}

std::optional<std::string_view> ActivationSpec::save_without_input(std::string_view save, bool dropped) const {
  if (save == "bit") return save;
  if (save == "input" || !invertible(dropped)) return std::nullopt;
  return "output";
}

std::string_view gelu_name(std::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh",
                    "gelu: expected approximate 'none' or 'tanh', got '", approximate, "'");
  return approximate == "none" ? "gelu" : "gelu_tanh";
}

Save resolve_save(const ActivationSpec& spec, std::string_view save, bool inplace, bool dropped) {
  if (save == "bit" && spec.has_two_slopes()) return Save::bit;
  TORCH_CHECK_VALUE(save == "auto" || save == "input" || save == "output", spec.name, ": expected save 'auto', 'input'",
                    spec.has_two_slopes() ? ", 'output' or 'bit'" : " or 'output'", ", got '", save, "'");
  TORCH_CHECK_VALUE(!(inplace && save == "input"), spec.name,
                    ": expected save 'auto' or 'output' in place, got 'input', which is overwritten");
  const bool output =
      save == "output" || (save == "auto" && (inplace || (!spec.has_branch() && spec.invertible(dropped))));
  TORCH_CHECK_VALUE(
      !output || !dropped || spec.invertible(true) || !spec.invertible(), spec.name,
      ": expected save 'auto' or 'input', out of place, beside dropout, whose scaling blurs where the slope "
      "jumps, got '",
      save, inplace ? "' in place" : "'");
  TORCH_CHECK_VALUE(!output || spec.invertible(), spec.name,
                    ": expected parameters with one slope for each output (negative_slope >= 0, alpha >= 0, beta > 0, "
                    "threshold >= 20) "
                    "where the gradient comes from the output, got (",
                    spec.params.a, ", ", spec.params.b, ", ", spec.params.c, "); use save='input' out of place");
  return output ? Save::output : Save::input;
}

}  // namespace memkit
