// The dropout operators: each draws a seed and hands its arguments to memkit::_activation, whose backward draws the same
// elements again from it.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>

#include "activation_ops.h"
#include "checks.h"
#include "eager.h"
#include "named_ops.h"
#include "optional.h"
#include "seed.h"
#include "spec.h"

namespace memkit {
namespace {

using at::Tensor;
using Text = c10::string_view;
using OptionalGenerator = std::optional<at::Generator>;

struct Dropout {
  Text name;
  double p;
  bool training;
  const OptionalGenerator& generator;
  bool alpha = false;
  OptionalTensor bias = {};
  int64_t dim = -1;
  OptionalTensor residual = {};
  Text act = "identity";
  c10::ArrayRef<double> params = {};
  Text save = "auto";

  void check(const Tensor& input) const {
    TORCH_CHECK_VALUE(p >= 0 && p <= 1, name, ": expected a probability p in [0, 1], got ", p);
    check_arguments(name, input, bias, dim);
    if (!residual) return;
    check_float_tensor(name, *residual);
    TORCH_CHECK(residual->device() == input.device(), name, ": expected input and residual on one device, got ",
                input.device(), " and ", residual->device());
  }

  bool drops(const Tensor& input) const { return training && p > 0 && input.sym_numel() != 0; }
  bool does_nothing(const Tensor& input) const { return act == "identity" && !bias && !residual && !drops(input); }
  // Another shape or dtype follows the rules of +.
  bool adds_apart(const Tensor& input) const {
    return residual && (residual->scalar_type() != input.scalar_type() || residual->sym_sizes() != input.sym_sizes());
  }

  // [p, scale, kept, dropped] of memkit::_activation. Alpha dropout keeps mean 0 and variance 1: Klambauer, Unterthiner,
  // Mayr, Hochreiter, "Self-normalizing neural networks", 2017.
  std::array<double, 4> parameters() const {
    if (p == 1) return {p, 1, 0, 0};
    if (!alpha) return {p, 1 / (1 - p), 0, 0};
    constexpr double fixed = 1.7580993408473766;  // selu's scale times alpha
    const double a = 1 / std::sqrt((fixed * fixed * p + 1) * (1 - p)), shift = fixed * a * p;
    return {p, a, shift, shift - fixed * a};
  }

  Tensor run(const Tensor& input) const {
    check(input);
    if (does_nothing(input)) return input;
    if (adds_apart(input)) return at::add(*residual, without_residual().run(input));
    const std::array<double, 4> drop = parameters();
    if (!drops(input)) return ops::activation(input, bias, dim, act, params, save, residual);
    return ops::activation(input, bias, dim, act, params, save, residual, draw_seed(input, generator), drop);
  }

  Tensor& run_(Tensor& input) const {
    check(input);
    if (does_nothing(input)) return input;
    TORCH_CHECK_VALUE(!adds_apart(input), name, ": expected, in place, a residual of the input's shape and dtype, ",
                      describe(input), ", got ", describe(*residual));
    check_inplace(name, input, inplace_blocker(input));
    TORCH_CHECK(!residual || !residual->has_storage() || !residual->is_alias_of(input), name,
                ": expected, in place, a residual in memory of its own, got one that shares the input's storage");
    const std::array<double, 4> drop = parameters();
    if (!drops(input)) return ops::activation_(input, bias, dim, act, params, save, residual);
    return ops::activation_(input, bias, dim, act, params, save, residual, draw_seed(input, generator), drop);
  }

  Dropout without_residual() const {
    Dropout other = *this;
    other.residual.reset();
    return other;
  }

  // For Python: overwrites the input where that is asked for and safe.
  Tensor run(const Tensor& input, Inplace inplace) {
    eager::Way way = eager::Way::fresh;
    if (inplace != Inplace::never) {
      check(input);
      const auto without_input = ActivationSpec(act, params).save_without_input(save, drops(input));
      const bool possible = !does_nothing(input) && !adds_apart(input) && without_input;
      if (inplace == Inplace::automatic || !does_nothing(input))
        way = eager::resolve_inplace(inplace, name, input, possible);
      if (way == eager::Way::fresh_keeping_output) save = *without_input;
    }
    const pybind11::gil_scoped_release no_gil;
    if (way != eager::Way::overwrite) return run(input);
    Tensor self = input;
    return run_(self);
  }
};

Dropout act_dropout(Text act, double p, bool training, const OptionalGenerator& generator, const OptionalTensor& bias,
                    int64_t dim, OptionalParams params, Text save, const Tensor& input) {
  Dropout d{"act_dropout", p, training, generator};
  if (bias) d.bias = cast_for_autocast(*bias, input);
  d.dim = dim;
  d.act = act;
  d.params = params.value_or(default_params(act));
  d.save = save;
  return d;
}

Dropout bias_dropout_add(const Tensor& bias, const OptionalTensor& residual, double p, bool training,
                         const OptionalGenerator& generator, int64_t dim, const Tensor& input) {
  Dropout d{"bias_dropout_add", p, training, generator};
  d.bias = cast_for_autocast(bias, input);
  d.dim = dim;
  d.residual = residual;
  return d;
}

Dropout dropout_add(const Tensor& residual, double p, bool training, const OptionalGenerator& generator) {
  Dropout d{"dropout_add", p, training, generator};
  d.residual = residual;
  return d;
}

void register_dropout(torch::Library& m) {
  m.impl("dropout", [](const Tensor& x, double p, bool training, OptionalGenerator g) {
    return Dropout{"dropout", p, training, g}.run(x);
  });
  m.impl("dropout_", [](Tensor& x, double p, bool training, OptionalGenerator g) -> Tensor& {
    return Dropout{"dropout", p, training, g}.run_(x);
  });
  m.impl("alpha_dropout", [](const Tensor& x, double p, bool training, OptionalGenerator g) {
    return Dropout{"alpha_dropout", p, training, g, true}.run(x);
  });
  m.impl("alpha_dropout_", [](Tensor& x, double p, bool training, OptionalGenerator g) -> Tensor& {
    return Dropout{"alpha_dropout", p, training, g, true}.run_(x);
  });
  m.impl("dropout_add", [](const Tensor& x, const Tensor& residual, double p, bool training, OptionalGenerator g) {
    return dropout_add(residual, p, training, g).run(x);
  });
  m.impl("dropout_add_",
         [](Tensor& x, const Tensor& residual, double p, bool training, OptionalGenerator g) -> Tensor& {
           return dropout_add(residual, p, training, g).run_(x);
         });
  m.impl("bias_dropout_add", [](const Tensor& x, const Tensor& bias, const OptionalTensor& residual, double p,
                                bool training, OptionalGenerator g, int64_t dim) {
    return bias_dropout_add(bias, residual, p, training, g, dim, x).run(x);
  });
  m.impl("bias_dropout_add_",
         [](Tensor& x, const Tensor& bias, const OptionalTensor& residual, double p, bool training, OptionalGenerator g,
            int64_t dim) -> Tensor& { return bias_dropout_add(bias, residual, p, training, g, dim, x).run_(x); });
  m.impl("act_dropout", [](const Tensor& x, Text act, double p, bool training, OptionalGenerator g,
                           const OptionalTensor& bias, int64_t dim, OptionalParams params,
                           Text save) { return act_dropout(act, p, training, g, bias, dim, params, save, x).run(x); });
  m.impl("act_dropout_",
         [](Tensor& x, Text act, double p, bool training, OptionalGenerator g, const OptionalTensor& bias, int64_t dim,
            OptionalParams params,
            Text save) -> Tensor& { return act_dropout(act, p, training, g, bias, dim, params, save, x).run_(x); });
}

// The eager entries: the operators' arguments by position, with inplace before the generator.
Tensor dropout_entry(const Tensor& x, double p, bool training, Inplace inplace, const OptionalGenerator& g,
                     bool alpha) {
  return Dropout{alpha ? "alpha_dropout" : "dropout", p, training, g, alpha}.run(x, inplace);
}
Tensor dropout_add_entry(const Tensor& x, const Tensor& residual, double p, bool training, Inplace inplace,
                         const OptionalGenerator& g) {
  return dropout_add(residual, p, training, g).run(x, inplace);
}
Tensor bias_dropout_add_entry(const Tensor& x, const Tensor& bias, const OptionalTensor& residual, double p,
                              bool training, Inplace inplace, const OptionalGenerator& g, int64_t dim) {
  return bias_dropout_add(bias, residual, p, training, g, dim, x).run(x, inplace);
}
Tensor act_dropout_entry(const Tensor& x, Text act, double p, bool training, Inplace inplace,
                         const OptionalGenerator& g, const OptionalTensor& bias, int64_t dim,
                         const std::optional<std::vector<double>>& params, Text save) {
  const OptionalParams given = params ? OptionalParams(*params) : std::nullopt;
  return act_dropout(act, p, training, g, bias, dim, given, save, x).run(x, inplace);
}

Tensor draw_seed_entry(const Tensor& x, const OptionalGenerator& g) {
  const pybind11::gil_scoped_release no_gil;
  return draw_seed(x, g);
}

constexpr char kDropout[] = "dropout", kDropoutAdd[] = "dropout_add", kBiasDropoutAdd[] = "bias_dropout_add",
               kActDropout[] = "act_dropout", kDrawSeed[] = "draw_seed";

}  // namespace

void bind_dropout(pybind11::module_& m) {
  eager::bind<dropout_entry, kDropout>(m);
  eager::bind<dropout_add_entry, kDropoutAdd>(m);
  eager::bind<bias_dropout_add_entry, kBiasDropoutAdd>(m);
  eager::bind<act_dropout_entry, kActDropout>(m);
  eager::bind<draw_seed_entry, kDrawSeed>(m);
}

TORCH_LIBRARY_IMPL(memkit, CompositeImplicitAutograd, m) { register_dropout(m); }
// Under vmap the composite itself must run, not a loop over the batch.
TORCH_LIBRARY_IMPL(memkit, FuncTorchBatched, m) { register_dropout(m); }

}  // namespace memkit
