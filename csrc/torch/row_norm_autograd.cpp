// LayerNorm and RMSNorm with their derivative: what is saved, when memory is overwritten, and when ATen's operators serve.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "checks.h"
#include "derivative.h"
#include "operators.h"
#include "row_norm_save.h"
#include "saved_node.h"
#include "transforms.h"

namespace memkit {
namespace autograd = torch::autograd;
using at::Tensor;

namespace {

RowNormed forward(const RowNorm& norm, const Tensor& input, const OptionalTensor& residual,
                  const OptionalTensor& weight, const OptionalTensor& bias, Statistics statistics) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (is_plain(input) && (!residual || is_plain(*residual)) && (!weight || is_plain(*weight)) &&
      (!bias || is_plain(*bias)))
    return row_norm_forward(norm, input, residual, weight, bias, statistics);
  auto [out, sum, mean, rstd] = MEMKIT_CALL(
      "memkit::_row_norm_forward", std::tuple<Tensor, Tensor, Tensor, Tensor>(
                                       const Tensor&, const OptionalTensor&, int64_t, int64_t, const OptionalTensor&,
                                       const OptionalTensor&, double, bool, at::ScalarType, c10::string_view))(
      input, residual, norm.dims, norm.behind, weight, bias, norm.eps, norm.centered, norm.dtype,
      name_of(norm.denominator));
  return {out, residual ? sum : Tensor(), norm.centered ? mean : Tensor(), rstd};
}

struct RowNormBackward : SavedNode {
  RowNorm norm;
  Kept kept;
  bool adds = false;  // a residual: outputs are sum and normed, inputs are input, residual, weight and bias
  at::ScalarType input_dtype;

  std::string name() const override {
    return norm.centered ? "memkit::layer_norm_backward" : "memkit::rms_norm_backward";
  }
  // What is normalised, from the input or the sum; of two results it is the second.
  bool can_rebuild(uint32_t output) const override { return kept == Kept::input && output == uint32_t(adds); }

  // Saved in this order.
  void keep(const Tensor& x, const RowNormed& made, const OptionalTensor& weight, const OptionalTensor& bias,
            bool is_output, bool on_view = false) {
    save(x, is_output, on_view);
    save(made.rstd);
    save_parameter(weight);
    save_parameter(bias);
    save(kept == Kept::input ? made.mean : Tensor());
  }

 protected:
  Tensor recompute() override {
    return forward(norm, unpack(0), std::nullopt, optional(unpack_parameter(2)), optional(unpack_parameter(3)),
                   Statistics::none)
        .out;
  }

  autograd::variable_list backward(autograd::variable_list&& grads) override {
    autograd::variable_list result(adds ? 4 : 3);
    const size_t parameters = adds ? 2 : 1;
    OptionalTensor grad_sum = adds ? optional(std::move(grads[0])) : std::nullopt;
    Tensor grad = std::move(grads[adds ? 1 : 0]);
    if (!grad.defined()) {
      if (grad_sum) result[0] = result[1] = *grad_sum;
      return result;
    }
    const Tensor x = unpack(0), rstd = unpack(1), mean = unpack(4);
    const OptionalTensor weight = optional(unpack(2)), bias = optional(unpack(3));
    if (weight && autograd::get_current_graph_task_id() == -1) check_there(*weight);  // before any backward
    const std::array<bool, 3> wanted{task_should_compute_output(0) || (adds && task_should_compute_output(1)),
                                     weight && task_should_compute_output(parameters),
                                     bias && task_should_compute_output(parameters + 1)};
    const bool plain = is_plain(grad) && is_plain(x) && (!grad_sum || is_plain(*grad_sum));
    const bool from_output = kept == Kept::output;
    RowNormGradients g;
    if (at::GradMode::is_enabled()) {  // create_graph: the gradient itself needs a derivative
      const bool by_kernel = plain && !needs_stock(grad, grad_sum);
      g = differentiable(grad, grad_sum, x, weight, bias, mean, rstd, wanted, by_kernel);
    } else if (plain) {
      // The incoming gradient's memory serves for the outgoing one where no one else can see it.
      Tensor into;
      if (grad_sum && is_sole_owner(*grad_sum) && grad_sum->is_contiguous()) {
        into = *grad_sum;
      } else if (is_sole_owner(grad) && grad.scalar_type() == input_dtype && grad.is_contiguous()) {
        into = grad;
      }
      g = row_norm_backward(norm, grad, grad_sum, x, weight, bias, mean, rstd, from_output, input_dtype, wanted, into);
    } else {
      auto [input, w, b] =
          MEMKIT_CALL("memkit::_row_norm_backward",
                      std::tuple<Tensor, Tensor, Tensor>(
                          const Tensor&, const OptionalTensor&, const Tensor&, int64_t, int64_t, const OptionalTensor&,
                          const OptionalTensor&, const OptionalTensor&, const Tensor&, bool, bool, at::ScalarType,
                          std::array<bool, 3>, double, c10::string_view))(
              grad, grad_sum, x, norm.dims, norm.behind, weight, bias, optional(mean), rstd, norm.centered, from_output,
              input_dtype, wanted, norm.eps, name_of(norm.denominator));
      if (wanted[0]) g.input = input;
      if (wanted[1]) g.weight = w;
      if (wanted[2]) g.bias = b;
    }
    result[0] = g.input;
    if (adds) result[1] = g.input;
    result[parameters] = g.weight;
    result[parameters + 1] = g.bias;
    return result;
  }

 private:
  RowNormGradients differentiable(const Tensor& grad, const OptionalTensor& grad_sum, const Tensor& x,
                                  const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& mean,
                                  const Tensor& rstd, std::array<bool, 3> wanted, bool by_kernel) {
    const bool from_output = kept == Kept::output;
    const auto composed = [norm = norm, wanted](const std::vector<Tensor>& t, bool again) -> std::vector<Tensor> {
      auto made = composed_row_norm_backward(norm, t[0], optional(t[1]), t[2], optional(t[3]), wanted, again);
      return {made.input, made.weight, made.bias};
    };
    std::vector<Tensor> inputs{grad, grad_sum.value_or(Tensor()), x, weight.value_or(Tensor())};
    std::optional<Remade> remade;
    if (from_output) {
      inputs[2] = Tensor();
      inputs.insert(inputs.end(), {x.detach(), bias ? bias->detach() : Tensor(), rstd});
      const auto input = [norm = norm, dtype = input_dtype](const std::vector<Tensor>& t) {
        return stock_input(norm, t[4], optional(t[3]), optional(t[5]), t[6], dtype);
      };
      // With a residual, where the sum is.
      remade = Remade{2, adds ? autograd::Edge(getptr(), 0) : next_edge(0), input};
    }
    std::vector<Tensor> made;
    if (by_kernel) {
      RowNormGradients g = [&] {
        const at::AutoGradMode off(false);
        return row_norm_backward(norm, grad, grad_sum, x, weight, bias, mean, rstd, from_output, input_dtype, wanted);
      }();
      made = with_derivative({g.input, g.weight, g.bias}, inputs, composed, std::move(remade));
    } else {
      if (remade) inputs[2] = made_anew(*remade, inputs);
      made = composed(inputs, true);
    }
    return {made[0], made[1], made[2]};
  }
};

auto new_node(const RowNorm& norm, Kept kept, const Tensor& input, autograd::edge_list edges) {
  auto node = make_node<RowNormBackward>();
  node->set_next_edges(std::move(edges));
  node->norm = norm;
  node->kept = kept;
  node->input_dtype = input.scalar_type();
  return node;
}

Tensor row_norm(const Tensor& input, int64_t dims, int64_t behind, const OptionalTensor& weight,
                const OptionalTensor& bias, double eps, bool centered, at::ScalarType dtype, c10::string_view save,
                c10::string_view denominator) {
  const RowNorm norm{dims, eps, centered, dtype, behind, denominator_of(denominator)};
  check_row_norm(norm, input, std::nullopt, weight, bias);
  if (needs_stock(input, weight, bias)) return stock_row_norm(norm, input, weight, bias);
  if (!autograd::compute_requires_grad(input, weight, bias))
    return forward(norm, input, std::nullopt, weight, bias, Statistics::none).out;
  const Kept kept = resolve_kept(norm, input, weight, bias, save, false);
  auto node = new_node(norm, kept, input, edges_of(input, weight, bias));
  const RowNormed made = forward(norm, input, std::nullopt, weight, bias, statistics_beside(kept));
  autograd::set_history(made.out, node);
  node->watch(made.out);
  node->keep(kept == Kept::input ? input : made.out, made, weight, bias, kept == Kept::output);
  return made.out;
}

std::tuple<Tensor, Tensor> add_row_norm(const Tensor& input, const Tensor& residual, int64_t dims,
                                        const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                        bool centered, at::ScalarType dtype, c10::string_view save) {
  const RowNorm norm{dims, eps, centered, dtype};
  check_row_norm(norm, input, residual, weight, bias);
  if (needs_stock(input, residual, weight, bias)) {
    const Tensor sum = input + residual;
    return {stock_row_norm(norm, sum, weight, bias), sum};
  }
  if (!autograd::compute_requires_grad(input, residual, weight, bias)) {
    RowNormed made = forward(norm, input, residual, weight, bias, Statistics::none);
    return {made.out, made.sum};
  }
  const Kept kept = resolve_kept(norm, input, weight, bias, save, false);
  auto node = new_node(norm, kept, input, edges_of(input, residual, weight, bias));
  node->adds = true;
  const RowNormed made = forward(norm, input, residual, weight, bias, statistics_beside(kept));
  autograd::set_history(made.sum, node);
  autograd::set_history(made.out, node);
  node->watch(made.out);
  node->keep(kept == Kept::input ? made.sum : made.out, made, weight, bias, true);
  return {made.out, made.sum};
}

void check_own_memory(const RowNorm& norm, const Tensor& x, const OptionalTensor& other, const char* what) {
  TORCH_CHECK(!other || !other->has_storage() || !other->is_alias_of(x), norm.name(), ": expected, in place, a ", what,
              " in memory of its own, got one that shares the storage of what is overwritten");
}

// What in place asks of the tensor that is overwritten.
void check_overwriting(const RowNorm& norm, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias) {
  check_inplace(norm.name(), x, inplace_blocker(x));
  check_own_memory(norm, x, weight, "weight");
  check_own_memory(norm, x, bias, "bias");
}

}  // namespace

Tensor& row_norm_(const RowNorm& norm, Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias) {
  check_row_norm(norm, x, std::nullopt, weight, bias);
  check_overwriting(norm, x, weight, bias);
  TORCH_CHECK_TYPE(norm.dtype == x.scalar_type(), norm.name(), ": expected, in place, an input of the output's dtype ",
                   norm.dtype, ", got ", describe(x));
  const bool requires_grad = autograd::compute_requires_grad(x, weight, bias);
  autograd::check_inplace(x, requires_grad);
  decltype(make_node<RowNormBackward>()) node;
  if (requires_grad) node = new_node(norm, Kept::output, x, edges_of(x, weight, bias));
  RowNormed made;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    const bool direct = x.is_contiguous();
    const Statistics statistics = requires_grad ? statistics_beside(Kept::output) : Statistics::none;
    made = row_norm_forward(norm, x, std::nullopt, weight, bias, statistics, direct ? x : Tensor());
    if (!direct) x.copy_(made.out);
  }
  autograd::impl::bump_version(x);
  if (!requires_grad) return x;
  const bool on_view = x.is_view();
  autograd::rebase_history(x, NodePtr(node));
  node->keep(x, made, weight, bias, true, on_view);
  return x;
}

std::tuple<Tensor, Tensor> add_row_norm_(const RowNorm& norm, const Tensor& input, Tensor& residual,
                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                         std::string_view save) {
  check_row_norm(norm, input, residual, weight, bias);
  check_overwriting(norm, residual, weight, bias);
  check_own_memory(norm, residual, input, "input");
  const bool requires_grad = autograd::compute_requires_grad(input, residual, weight, bias);
  autograd::check_inplace(residual, requires_grad);
  TORCH_CHECK(!requires_grad || !residual.is_view() || !residual._base().requires_grad(), norm.name(),
              ": expected, in place, a residual that is no view, got ", describe(residual),
              ", a view that autograd records; use inplace=False or inplace='auto', or pass a clone");
  decltype(make_node<RowNormBackward>()) node;
  Kept kept = Kept::input;
  Statistics statistics = Statistics::none;
  if (requires_grad) {
    kept = resolve_kept(norm, input, weight, bias, save, false);
    statistics = statistics_beside(kept);
    node = new_node(norm, kept, input, edges_of(input, residual, weight, bias));
    node->adds = true;
  }
  RowNormed made;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    const bool direct = residual.is_contiguous();
    made = row_norm_forward(norm, input, residual, weight, bias, statistics, direct ? residual : Tensor());
    if (!direct) residual.copy_(made.sum);
  }
  autograd::impl::bump_version(residual);
  if (requires_grad) {
    autograd::rebase_history(residual, NodePtr(node));
    autograd::set_history(made.out, node);
    node->watch(made.out);
    node->keep(kept == Kept::input ? residual : made.out, made, weight, bias, true);
  }
  return {made.out, residual};
}

std::string_view row_norm_saves(const Tensor& x) {
  const auto* node = dynamic_cast<const RowNormBackward*>(x.grad_fn().get());
  if (!node) return "";
  return node->kept == Kept::input ? "input" : "output";
}

const SavedNode* row_norm_of(const autograd::Node& node) { return dynamic_cast<const RowNormBackward*>(&node); }

TORCH_LIBRARY_IMPL(memkit, Autograd, m) {
  m.impl("_row_norm", row_norm);
  m.impl("_add_row_norm", add_row_norm);
}

}  // namespace memkit
