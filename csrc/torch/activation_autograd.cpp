// memkit::_activation with its derivative: what is saved, when memory is overwritten, and when ATen's operators serve.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "activation_node.h"
#include "activation_ops.h"
#include "checks.h"
#include "layout.h"
#include "spec.h"
#include "stock.h"

namespace memkit {
namespace ops {

#define MEMKIT_OPERATOR(NAME)   \
  static const auto op_handle = \
      c10::Dispatcher::singleton().findSchemaOrThrow("memkit::_" #NAME, "").typed<decltype(NAME)>()

at::Tensor activation(const at::Tensor& input, const OptionalTensor& bias, int64_t dim, std::string_view op,
                      Params params, std::string_view save) {
  MEMKIT_OPERATOR(activation);
  return op_handle.call(input, bias, dim, op, params, save);
}

at::Tensor& activation_(at::Tensor& input, const OptionalTensor& bias, int64_t dim, std::string_view op, Params params,
                        std::string_view save) {
  MEMKIT_OPERATOR(activation_);
  return op_handle.call(input, bias, dim, op, params, save);
}

std::tuple<at::Tensor, at::Tensor> activation_with_bits(const at::Tensor& input, const OptionalTensor& bias,
                                                        int64_t dim, std::string_view op, Params params) {
  MEMKIT_OPERATOR(activation_with_bits);
  return op_handle.call(input, bias, dim, op, params);
}

at::Tensor activation_with_bits_(at::Tensor& input, const OptionalTensor& bias, int64_t dim, std::string_view op,
                                 Params params) {
  MEMKIT_OPERATOR(activation_with_bits_);
  return op_handle.call(input, bias, dim, op, params);
}

at::Tensor activation_backward(const at::Tensor& grad, const at::Tensor& saved, const OptionalTensor& bias, int64_t dim,
                               const OptionalTensor& bits, std::string_view op, Params params, bool from_output) {
  MEMKIT_OPERATOR(activation_backward);
  return op_handle.call(grad, saved, bias, dim, bits, op, params, from_output);
}

at::Tensor& activation_backward_(at::Tensor& grad, const at::Tensor& saved, const OptionalTensor& bias, int64_t dim,
                                 const OptionalTensor& bits, std::string_view op, Params params, bool from_output) {
  MEMKIT_OPERATOR(activation_backward_);
  return op_handle.call(grad, saved, bias, dim, bits, op, params, from_output);
}

#undef MEMKIT_OPERATOR

}  // namespace ops

namespace autograd = torch::autograd;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Params = c10::ArrayRef<double>;

namespace {

// bias[c] at dimension dim of x, ready to broadcast.
Tensor along(const Tensor& bias, const Tensor& x, int64_t dim) {
  c10::SymDimVector shape(x.dim(), 1);
  shape[dim < 0 ? dim + x.dim() : dim] = bias.sym_size(0);
  return bias.view_symint(shape);
}

Tensor bias_gradient(const Tensor& grad, int64_t dim) {
  const int64_t kept = dim < 0 ? dim + grad.dim() : dim;
  std::vector<int64_t> others;
  for (int64_t d = 0; d < grad.dim(); ++d)
    if (d != kept) others.push_back(d);
  return others.empty() ? grad : grad.sum(others);
}

// Saved-tensor hooks may hand back another memory order than the one the bits follow.
Tensor restride(const Tensor& x, c10::SymIntArrayRef strides) {
  if (x.sym_strides() == strides) return x;
  return at::empty_strided_symint(x.sym_sizes(), strides, x.options()).copy_(x);
}

}  // namespace

autograd::variable_list ActivationBackward::backward(autograd::variable_list&& grads) {
  autograd::variable_list result(has_bias ? 2 : 1);
  Tensor grad = std::move(grads[0]);
  if (!grad.defined()) return result;

  const Tensor kept = unpack(0);
  const OptionalTensor kept_bias = has_bias && !saved_output ? OptionalTensor(unpack(1)) : std::nullopt;
  Tensor& grad_input = result[0];

  if (at::GradMode::is_enabled()) {  // create_graph: the gradient itself needs a derivative
    const ActivationSpec spec(op, params);
    const Tensor at_point = kept_bias ? kept + along(*kept_bias, kept, dim) : kept;
    grad_input = stock_activation_backward(spec, grad, at_point, saved_output);
  } else {
    const OptionalTensor kept_bits = has_bits ? OptionalTensor(unpack(1)) : std::nullopt;
    const Tensor ordered = has_bits ? restride(kept, strides) : kept;
    // The incoming gradient's memory serves for the outgoing one where no one else can see it.
    if (is_sole_owner(grad) && is_plain(ordered)) {
      grad_input = ops::activation_backward_(grad, ordered, kept_bias, dim, kept_bits, op, params, saved_output);
    } else {
      grad_input = ops::activation_backward(grad, ordered, kept_bias, dim, kept_bits, op, params, saved_output);
    }
  }
  if (has_bias && task_should_compute_output(1)) result[1] = bias_gradient(grad_input, dim);
  return result;
}

namespace {

Tensor stock_with_bias(const Tensor& x, const OptionalTensor& bias, int64_t dim, const ActivationSpec& spec) {
  return stock_activation(spec, bias ? x + along(*bias, x, dim) : x);
}

// ATen's operators keep their input for backward, and it is overwritten here: they get a copy.
Tensor& stock_with_bias_(Tensor& x, const OptionalTensor& bias, int64_t dim, const ActivationSpec& spec) {
  return x.copy_(stock_with_bias(bias ? x : x.clone(), bias, dim, spec));
}

auto new_node(const Tensor& x, const OptionalTensor& bias, int64_t dim, const ActivationSpec& spec, Params params,
              Save save) {
  auto node = make_node<ActivationBackward>();
  node->set_next_edges(bias ? autograd::collect_next_edges(x, *bias) : autograd::collect_next_edges(x));
  node->op = spec.name;
  node->params = params.vec();
  node->dim = dim;
  node->has_bias = bias.has_value();
  node->saved_output = save == Save::output;
  node->has_bits = node->saved_output && spec.has_branch();
  return node;
}

Tensor activation(const Tensor& x, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                  c10::string_view save_name) {
  const ActivationSpec spec(op, params);
  const Save save = resolve_save(spec, save_name, false);
  check_arguments(spec.name, x, bias, dim);
  if (needs_stock(x, bias)) return stock_with_bias(x, bias, dim, spec);
  if (!autograd::compute_requires_grad(x, bias)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return ops::activation(x, bias, dim, op, params, save_name);
  }
  auto node = new_node(x, bias, dim, spec, params, save);
  Tensor out, bits;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (node->has_bits) {
      std::tie(out, bits) = ops::activation_with_bits(x, bias, dim, op, params);
    } else {
      out = ops::activation(x, bias, dim, op, params, save_name);
    }
  }
  autograd::set_history(out, node);
  if (node->saved_output) {
    node->save(out, /*is_output=*/true);
    if (node->has_bits) {
      node->strides = walk_strides(out, false, dim);
      node->save(bits);
    }
  } else {
    node->save(x);
    if (bias) node->save(*bias);
  }
  return out;
}

Tensor& activation_(Tensor& x, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                    c10::string_view save_name) {
  const ActivationSpec spec(op, params);
  const Save save = resolve_save(spec, save_name, true);
  check_arguments(spec.name, x, bias, dim);
  check_inplace(spec.name, x, inplace_blocker(x));
  if (needs_stock(x, bias)) return stock_with_bias_(x, bias, dim, spec);
  const bool requires_grad = autograd::compute_requires_grad(x, bias);
  autograd::check_inplace(x, requires_grad);
  if (!requires_grad) {
    const at::AutoDispatchBelowAutograd below;
    return ops::activation_(x, bias, dim, op, params, save_name);
  }
  auto node = new_node(x, bias, dim, spec, params, save);
  Tensor bits;
  {
    const at::AutoDispatchBelowAutograd below;  // the ADInplaceOrView kernel bumps the version
    if (node->has_bits) {
      bits = ops::activation_with_bits_(x, bias, dim, op, params);
    } else {
      ops::activation_(x, bias, dim, op, params, save_name);
    }
  }
  const bool on_view = x.is_view();
  autograd::rebase_history(x, NodePtr(node));
  node->save(x, /*is_output=*/true, /*is_inplace_on_view=*/on_view);
  if (node->has_bits) {
    node->strides = walk_strides(x, bias.has_value(), dim);
    node->save(bits);
  }
  return x;
}

// Overwriting bumps the version that saved tensors are checked against, with autograd recording or without.
template <class Operator>
auto bump_and_run(c10::string_view op, Tensor& x, Operator&& run) -> decltype(run()) {
  check_inplace(op, x, memory_blocker(x));
  const at::AutoDispatchBelowADInplaceOrView below;
  decltype(run()) result = run();
  autograd::impl::bump_version(x);  // afterwards: where run() raises, nothing was written
  return result;
}

Tensor& activation_bumping(Tensor& x, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                           c10::string_view save) {
  return bump_and_run(op, x, [&]() -> Tensor& { return ops::activation_(x, bias, dim, op, params, save); });
}

Tensor activation_with_bits_bumping(Tensor& x, const OptionalTensor& bias, int64_t dim, c10::string_view op,
                                    Params params) {
  return bump_and_run(op, x, [&] { return ops::activation_with_bits_(x, bias, dim, op, params); });
}

Tensor& activation_backward_bumping(Tensor& grad, const Tensor& saved, const OptionalTensor& bias, int64_t dim,
                                    const OptionalTensor& bits, c10::string_view op, Params params, bool from_output) {
  return bump_and_run(op, grad, [&]() -> Tensor& {
    return ops::activation_backward_(grad, saved, bias, dim, bits, op, params, from_output);
  });
}

// vmap: elementwise, so ATen's operators with their batching rules serve.
Tensor activation_batched(const Tensor& x, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                          c10::string_view) {
  return stock_with_bias(x, bias, dim, ActivationSpec(op, params));
}

Tensor& activation_batched_(Tensor& x, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                            c10::string_view) {
  return stock_with_bias_(x, bias, dim, ActivationSpec(op, params));
}

// Many incoming gradients, one graph: the slope once.
Tensor activation_backward_batched(const Tensor& grad, const Tensor& saved, const OptionalTensor& bias, int64_t dim,
                                   const OptionalTensor& bits, c10::string_view op, Params params, bool from_output) {
  if (needs_stock(saved)) {
    const Tensor at_point = bias ? saved + along(*bias, saved, dim) : saved;
    return stock_activation_backward(ActivationSpec(op, params), grad, at_point, from_output);
  }
  return grad * ops::activation_backward(at::ones_like(saved), saved, bias, dim, bits, op, params, from_output);
}

// Functionalization turns a write into a value. PyTorch does it by itself for operators that do not return what they
// overwrote.
Tensor& activation_functional_(Tensor& x, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                               c10::string_view save) {
  return x.copy_(ops::activation(x, bias, dim, op, params, save));
}

Tensor& activation_backward_functional_(Tensor& grad, const Tensor& saved, const OptionalTensor& bias, int64_t dim,
                                        const OptionalTensor& bits, c10::string_view op, Params params,
                                        bool from_output) {
  return grad.copy_(ops::activation_backward(grad, saved, bias, dim, bits, op, params, from_output));
}

}  // namespace

TORCH_LIBRARY_IMPL(memkit, Autograd, m) {
  m.impl("_activation", activation);
  m.impl("_activation_", activation_);
}

TORCH_LIBRARY_IMPL(memkit, ADInplaceOrView, m) {
  m.impl("_activation_", activation_bumping);
  m.impl("_activation_with_bits_", activation_with_bits_bumping);
  m.impl("_activation_backward_", activation_backward_bumping);
}

TORCH_LIBRARY_IMPL(memkit, FuncTorchBatched, m) {
  m.impl("_activation", activation_batched);
  m.impl("_activation_", activation_batched_);
  m.impl("_activation_backward", activation_backward_batched);
}

TORCH_LIBRARY_IMPL(memkit, Functionalize, m) {
  m.impl("_activation_", activation_functional_);
  m.impl("_activation_backward_", activation_backward_functional_);
}

}  // namespace memkit
