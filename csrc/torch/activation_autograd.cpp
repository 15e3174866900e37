// memkit::_activation with its derivative: what is saved, when memory is overwritten, and when ATen's operators serve.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "activation_node.h"
#include "activation_ops.h"
#include "checks.h"
#include "derivative.h"
#include "eager.h"
#include "layout.h"
#include "node_kind.h"
#include "nonzeros.h"
#include "operators.h"
#include "optional.h"
#include "rebuild.h"
#include "spec.h"
#include "stock.h"
#include "transforms.h"

namespace memkit {
namespace ops {

#define MEMKIT_OPERATOR(NAME)   \
  static const auto op_handle = \
      c10::Dispatcher::singleton().findSchemaOrThrow("memkit::_" #NAME, "").typed<decltype(NAME)>()

at::Tensor activation(const at::Tensor& input, const OptionalTensor& bias, int64_t dim, std::string_view op,
                      Params params, std::string_view save, const OptionalTensor& residual, const OptionalTensor& seed,
                      Params drop) {
  MEMKIT_OPERATOR(activation);
  return op_handle.call(input, bias, dim, op, params, save, residual, seed, drop);
}

at::Tensor& activation_(at::Tensor& input, const OptionalTensor& bias, int64_t dim, std::string_view op, Params params,
                        std::string_view save, const OptionalTensor& residual, const OptionalTensor& seed,
                        Params drop) {
  MEMKIT_OPERATOR(activation_);
  return op_handle.call(input, bias, dim, op, params, save, residual, seed, drop);
}

std::tuple<at::Tensor, at::Tensor> activation_with_bits(const at::Tensor& input, const OptionalTensor& bias,
                                                        int64_t dim, std::string_view op, Params params,
                                                        const OptionalTensor& seed, Params drop) {
  MEMKIT_OPERATOR(activation_with_bits);
  return op_handle.call(input, bias, dim, op, params, seed, drop);
}

at::Tensor activation_with_bits_(at::Tensor& input, const OptionalTensor& bias, int64_t dim, std::string_view op,
                                 Params params, const OptionalTensor& seed, Params drop) {
  MEMKIT_OPERATOR(activation_with_bits_);
  return op_handle.call(input, bias, dim, op, params, seed, drop);
}

at::Tensor activation_backward(const at::Tensor& grad, const OptionalTensor& saved, const OptionalTensor& bias,
                               int64_t dim, const OptionalTensor& bits, std::string_view op, Params params,
                               bool from_output, const OptionalTensor& seed, Params drop) {
  MEMKIT_OPERATOR(activation_backward);
  return PastAutograd(op_handle)(grad, saved, bias, dim, bits, op, params, from_output, seed, drop);
}

at::Tensor& activation_backward_(at::Tensor& grad, const OptionalTensor& saved, const OptionalTensor& bias, int64_t dim,
                                 const OptionalTensor& bits, std::string_view op, Params params, bool from_output,
                                 const OptionalTensor& seed, Params drop) {
  MEMKIT_OPERATOR(activation_backward_);
  return PastAutograd(op_handle)(grad, saved, bias, dim, bits, op, params, from_output, seed, drop);
}

at::Tensor dropout_mask(c10::SymIntArrayRef size, const at::Tensor& seed, Params drop, at::ScalarType dtype) {
  MEMKIT_OPERATOR(dropout_mask);
  return op_handle.call(size, seed, drop, dtype);
}

#undef MEMKIT_OPERATOR

}  // namespace ops

namespace autograd = torch::autograd;
using at::Tensor;
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

// Saved-tensor hooks may hand back another memory order than the one that bits and dropout follow. x may be a batch of
// gradients, which a tensor made from it follows.
Tensor restride(Tensor x, c10::SymIntArrayRef strides) {
  if (same_order(x.sym_sizes(), x.sym_strides(), strides)) return x;
  return x.new_empty_strided_symint(x.sym_sizes(), strides).copy_(x);
}

// Dropout's gradient is dropout without the shifts.
Tensor drop_gradient(Tensor grad, const Tensor& seed, Params drop, bool inplace) {
  const double linear[] = {drop[0], drop[1], 0, 0};
  if (inplace && !at::GradMode::is_enabled())
    return ops::activation_(grad, std::nullopt, -1, "identity", {}, "auto", std::nullopt, seed, linear);
  return ops::activation(grad, std::nullopt, -1, "identity", {}, "auto", std::nullopt, seed, linear);
}

}  // namespace

autograd::variable_list ActivationBackward::backward(autograd::variable_list&& grads) {
  autograd::variable_list result(3);  // of input, bias, residual
  Tensor grad = std::move(grads[0]);
  if (!grad.defined()) return result;
  if (has_residual) result[2] = grad;

  size_t next = 0;
  const OptionalTensor nonzero = bits_of_nonzeros(grad);
  if (nonzero) ++next;
  const bool by_bits = saved == Save::bit || nonzero;
  const OptionalTensor kept = identity || by_bits ? std::nullopt : OptionalTensor(unpack(next++));
  const OptionalTensor kept_bits = has_bits ? OptionalTensor(unpack(next++)) : nonzero;
  const OptionalTensor kept_bias =
      has_bias && saved == Save::input && !identity ? OptionalTensor(unpack(next++)) : std::nullopt;
  const OptionalTensor seed = has_seed ? OptionalTensor(unpack(next++)) : std::nullopt;
  Tensor& grad_input = result[0];

  if (identity) {
    if (seed) grad = restride(std::move(grad), strides);
    const bool sole = is_sole_owner(grad);
    grad_input = seed ? drop_gradient(std::move(grad), *seed, drop, sole) : grad;
  } else if (at::GradMode::is_enabled() || (saved == Save::bit && needs_stock(grad))) {
    // create_graph: the gradient itself needs a derivative. Bits have no shape that a batch of gradients could follow.
    const ActivationSpec spec(op, params);
    const Tensor below = seed ? drop_gradient(restride(grad, strides), *seed, drop, false) : grad;
    if (saved == Save::bit) {
      grad_input = stock_activation_backward_where(spec, below, active_elements(*kept_bits, below));
    } else {
      Tensor at_point = kept_bias ? *kept + along(*kept_bias, *kept, dim) : *kept;
      if (seed && saved == Save::output) at_point = at_point / drop[1];
      grad_input = differentiable(spec, below, at_point);
    }
  } else if (by_bits) {
    grad = restride(std::move(grad), strides);
    const bool sole = is_sole_owner(grad) && is_plain(grad);
    const auto run = [&](auto&& backward) {
      return backward(grad, std::nullopt, std::nullopt, dim, kept_bits, op, params, false, seed, drop);
    };
    grad_input = sole ? run(ops::activation_backward_) : run(ops::activation_backward);
  } else {
    const Tensor ordered = has_bits || seed ? restride(*kept, strides) : *kept;
    // The incoming gradient's memory serves for the outgoing one where no one else can see it. Not in another order than the
    // saved tensor's, which a copy has to take on anyway and those before should find.
    if (is_sole_owner(grad) && is_plain(ordered) && same_order(ordered, grad)) {
      grad_input = ops::activation_backward_(grad, ordered, kept_bias, dim, kept_bits, op, params,
                                             saved == Save::output, seed, drop);
    } else {
      grad_input = ops::activation_backward(grad, ordered, kept_bias, dim, kept_bits, op, params, saved == Save::output,
                                            seed, drop);
    }
  }
  if (has_bias && task_should_compute_output(1)) result[1] = bias_gradient(grad_input, dim);
  return result;
}

Tensor ActivationBackward::differentiable(const ActivationSpec& spec, const Tensor& grad, const Tensor& at_point) {
  const bool from_output = saved == Save::output;
  if (stock_backward_is_one(spec, from_output) || (from_output && spec.has_branch()))
    return stock_activation_backward(spec, grad, at_point, from_output);
  const auto kernel = [&] {
    return autograd::variable_list{
        ops::activation_backward(grad, at_point, std::nullopt, -1, std::nullopt, op, params, from_output)};
  };
  const auto composed = [spec, from_output](const autograd::variable_list& t, bool) {
    return autograd::variable_list{stock_activation_backward(spec, t[0], t[1], from_output)};
  };
  return differentiable_gradients({grad, at_point}, kernel, composed)[0];
}

bool ActivationBackward::makes_zeros() const {
  if (has_residual || (has_seed && drop[3] != 0)) return false;
  if (!identity) return op == "relu" || op == "relu6" || op == "relu_squared";
  const auto* producer = dynamic_cast<const SavedNode*>(next_edge(0).function.get());
  return drop[0] >= 0.5 || (producer && producer->makes_zeros());
}

OptionalTensor ActivationBackward::bits_of_nonzeros(const Tensor& grad) {
  const auto found = nonzeros();
  if (op != "relu" || saved != Save::output || !found || at::GradMode::is_enabled() || needs_stock(grad))
    return std::nullopt;
  const auto packed = found->lock();
  // Of what others kept of the result after it was changed, the zeros are others. -0.0 is not zero, and its slope is.
  if (!packed || packed->version != kept_version() || packed->negative_zero) return std::nullopt;
  if (strides.empty()) strides.assign(packed->strides.begin(), packed->strides.end());
  if (strides.size() != size_t(grad.dim())) return std::nullopt;
  return packed->bits.view(at::kByte).narrow(0, 0, (grad.numel() + 7) / 8);
}

Tensor ActivationBackward::active_elements(const Tensor& bits, const Tensor& grad) {
  const Tensor ones = at::empty_strided_symint(grad.sym_sizes(), strides, grad.options()).fill_(1);
  Tensor active = ops::activation_backward(ones, std::nullopt, std::nullopt, -1, bits, "relu", {}, false);
  if (!at::GradMode::is_enabled()) return active;
  // Part of the graph as the input would be, so that its derivative is 0 and not missing.
  if (next_edge(0).is_valid()) autograd::impl::set_gradient_edge(active, next_edge(0));
  if (has_bias && next_edge(1).is_valid()) {
    Tensor none = at::zeros_symint({grad.sym_size(dim)}, grad.options());
    autograd::impl::set_gradient_edge(none, next_edge(1));
    active = active + along(none, active, dim);
  }
  return active;
}

Tensor ActivationBackward::recompute() {
  const std::string_view act = identity ? "identity" : op;
  bool is_own = false;
  Tensor input = unpack_for_rebuild(has_source ? 1 : 0, is_own);
  size_t next = has_source ? 0 : 1;
  const OptionalTensor kept_bias = has_bias ? OptionalTensor(unpack_parameter(next++)) : std::nullopt;
  const OptionalTensor seed = has_seed ? OptionalTensor(unpack(next)) : std::nullopt;
  Tensor ordered = has_seed ? restride(std::move(input), strides) : std::move(input);
  if (is_own && eager::is_dead(ordered) && is_plain(ordered) && ordered.is_non_overlapping_and_dense() &&
      ActivationSpec(act, params).save_without_input("auto", has_seed)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return ops::activation_(ordered, kept_bias, dim, act, params, "auto", std::nullopt, seed, drop);
  }
  return ops::activation(ordered, kept_bias, dim, act, params, "auto", std::nullopt, seed, drop);
}

namespace {

// What is asked of _activation beside its input.
struct Request {
  ActivationSpec spec;
  const OptionalTensor& bias;
  int64_t dim;
  Params params;
  const OptionalTensor& residual;
  const OptionalTensor& seed;
  Params drop;

  Request(const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params, const OptionalTensor& residual,
          const OptionalTensor& seed, Params drop)
      : spec(op, params), bias(bias), dim(dim), params(params), residual(residual), seed(seed), drop(drop) {
    TORCH_CHECK_VALUE(!residual || spec.act == Act::identity, spec.name, ": expected no activation beside a residual");
    TORCH_CHECK_VALUE(!seed || drop.size() == 4, spec.name, ": expected [p, scale, kept, dropped] beside a seed, got ",
                      drop.size(), " numbers");
  }

  bool needs_stock(const Tensor& x) const { return memkit::needs_stock(x, bias, residual); }
};

// By ATen's operators alone, but for which elements are dropped.
Tensor by_stock(const Tensor& x, const Request& r) {
  Tensor y = stock_activation(r.spec, r.bias ? x + along(*r.bias, x, r.dim) : x);
  if (r.seed) {
    TORCH_CHECK_NOT_IMPLEMENTED(!r.seed->key_set().has(c10::DispatchKey::FuncTorchBatched), r.spec.name,
                                ": expected one seed for a whole batch, got one each; vmap with randomness='same'");
    const Tensor mask = ops::dropout_mask(x.sym_sizes(), r.seed->to(x.device()), r.drop, x.scalar_type());
    y = y * mask;
    if (r.drop[2] != 0 || r.drop[3] != 0) y = y + at::where(mask == 0, r.drop[3], r.drop[2]).to(y.scalar_type());
  }
  return r.residual ? *r.residual + y : y;
}

// ATen's operators keep their input for backward, and it is overwritten here: they get a copy.
Tensor& by_stock_(Tensor& x, const Request& r) { return x.copy_(by_stock(x.clone(), r)); }

// Whether keeping x takes no memory inside lean(): what made it keeps it, or it can be made again.
bool is_kept_anyway(const Tensor& x) {
  const Tensor made = x.is_view() ? Tensor(x._base()) : x;
  const NodePtr& node = made.grad_fn();
  if (!node) return false;
  if (is_kind(node.get(), NodeKind::saver)) return made.output_nr() == 0;
  if (is_kind(node.get(), NodeKind::own) && static_cast<SavedNode&>(*node).keeps_output(made.output_nr())) return true;
  return can_rebuild(made, true) && rebuild_depth(*node) < kRebuildDepth;
}

auto new_node(const Tensor& x, const Request& r, Save save) {
  auto node = make_node<ActivationBackward>();
  node->set_next_edges(edges_of(x, r.bias, r.residual));
  node->op = r.spec.name;
  node->params = r.params.vec();
  node->dim = r.dim;
  node->drop = r.drop.vec();
  node->identity = r.spec.act == Act::identity;
  node->has_bias = r.bias.has_value();
  node->has_residual = r.residual.has_value();
  node->has_seed = r.seed.has_value();
  node->saved = save;
  node->has_bits = save == Save::bit || (save == Save::output && r.spec.has_branch());
  if (node->has_bits || node->has_seed) {
    const auto order = walk_strides(x, node->has_bias, r.dim);
    node->strides.assign(order.begin(), order.end());
  }
  return node;
}

Tensor activation_autograd(const Tensor& x, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                           c10::string_view save_name, const OptionalTensor& residual, const OptionalTensor& seed,
                           Params drop) {
  const Request request(bias, dim, op, params, residual, seed, drop);
  const Save save = resolve_save(request.spec, save_name, false, seed.has_value());
  check_arguments(request.spec.name, x, bias, dim);
  if (request.needs_stock(x)) return by_stock(x, request);
  if (!autograd::compute_requires_grad(x, bias, residual)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return ops::activation(x, bias, dim, op, params, save_name, residual, seed, drop);
  }
  auto node = new_node(x, request, save);
  Tensor out, bits;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (node->has_bits) {
      std::tie(out, bits) = ops::activation_with_bits(x, bias, dim, op, params, seed, drop);
    } else {
      out = ops::activation(x, bias, dim, op, params, save_name, residual, seed, drop);
    }
  }
  autograd::set_history(out, node);
  if (!node->identity && save == Save::output) node->save(out, /*is_output=*/true);
  if (node->has_bits) node->save(bits);
  if (!node->identity && save == Save::input) {
    node->save(x);
    if (bias) node->save_parameter(bias);
  }
  if (seed) node->save(*seed);
  if (node->identity && seed && !bias && !residual && lean_packed(*node) && is_kept_anyway(x)) {
    node->save(x);
    node->has_source = true;
  }
  node->watch(out);
  return out;
}

Tensor& activation_autograd_(Tensor& x, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                             c10::string_view save_name, const OptionalTensor& residual, const OptionalTensor& seed,
                             Params drop) {
  const Request request(bias, dim, op, params, residual, seed, drop);
  const Save save = resolve_save(request.spec, save_name, true, seed.has_value());
  check_arguments(request.spec.name, x, bias, dim);
  check_inplace(request.spec.name, x, inplace_blocker(x));
  if (request.needs_stock(x)) return by_stock_(x, request);
  const bool requires_grad = autograd::compute_requires_grad(x, bias, residual);
  autograd::check_inplace(x, requires_grad);
  if (!requires_grad) {
    const at::AutoDispatchBelowAutograd below;
    return ops::activation_(x, bias, dim, op, params, save_name, residual, seed, drop);
  }
  auto node = new_node(x, request, save);
  Tensor bits;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (node->has_bits) {
      bits = ops::activation_with_bits_(x, bias, dim, op, params, seed, drop);
    } else {
      ops::activation_(x, bias, dim, op, params, save_name, residual, seed, drop);
    }
  }
  autograd::impl::bump_version(x);
  const bool on_view = x.is_view();
  if (on_view && node->strides.empty()) node->strides.assign(x.sym_strides().begin(), x.sym_strides().end());
  autograd::rebase_history(x, NodePtr(node));
  if (!node->identity && save == Save::output) node->save(x, /*is_output=*/true, /*is_inplace_on_view=*/on_view);
  if (node->has_bits) node->save(bits);
  if (seed) node->save(*seed);
  return x;
}

Tensor dropout_mask_autograd(c10::SymIntArrayRef size, const Tensor& seed, Params drop, at::ScalarType dtype) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return ops::dropout_mask(size, seed, drop, dtype);
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
                           c10::string_view save, const OptionalTensor& residual, const OptionalTensor& seed,
                           Params drop) {
  return bump_and_run(
      op, x, [&]() -> Tensor& { return ops::activation_(x, bias, dim, op, params, save, residual, seed, drop); });
}

Tensor activation_with_bits_bumping(Tensor& x, const OptionalTensor& bias, int64_t dim, c10::string_view op,
                                    Params params, const OptionalTensor& seed, Params drop) {
  return bump_and_run(op, x, [&] { return ops::activation_with_bits_(x, bias, dim, op, params, seed, drop); });
}

Tensor& activation_backward_bumping(Tensor& grad, const OptionalTensor& saved, const OptionalTensor& bias, int64_t dim,
                                    const OptionalTensor& bits, c10::string_view op, Params params, bool from_output,
                                    const OptionalTensor& seed, Params drop) {
  return bump_and_run(op, grad, [&]() -> Tensor& {
    return ops::activation_backward_(grad, saved, bias, dim, bits, op, params, from_output, seed, drop);
  });
}

// vmap: elementwise, so ATen's operators with their batching rules serve.
Tensor activation_batched(const Tensor& x, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                          c10::string_view, const OptionalTensor& residual, const OptionalTensor& seed, Params drop) {
  return by_stock(x, Request(bias, dim, op, params, residual, seed, drop));
}

Tensor& activation_batched_(Tensor& x, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                            c10::string_view, const OptionalTensor& residual, const OptionalTensor& seed, Params drop) {
  return by_stock_(x, Request(bias, dim, op, params, residual, seed, drop));
}

// Many incoming gradients, one graph: the slope once.
Tensor activation_backward_batched(const Tensor& grad, const OptionalTensor& saved, const OptionalTensor& bias,
                                   int64_t dim, const OptionalTensor& bits, c10::string_view op, Params params,
                                   bool from_output, const OptionalTensor& seed, Params drop) {
  TORCH_CHECK_NOT_IMPLEMENTED(saved, op, ": expected a saved tensor in vmap over a backward");
  if (needs_stock(saved)) {
    TORCH_CHECK_NOT_IMPLEMENTED(!seed, op, ": expected no vmap over a backward with dropout");
    const Tensor at_point = bias ? *saved + along(*bias, *saved, dim) : *saved;
    return stock_activation_backward(ActivationSpec(op, params), grad, at_point, from_output);
  }
  return grad *
         ops::activation_backward(at::ones_like(*saved), saved, bias, dim, bits, op, params, from_output, seed, drop);
}

// Functionalization turns a write into a value. PyTorch does it by itself for operators that do not return what they
// overwrote.
Tensor& activation_functional_(Tensor& x, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                               c10::string_view save, const OptionalTensor& residual, const OptionalTensor& seed,
                               Params drop) {
  return x.copy_(ops::activation(x, bias, dim, op, params, save, residual, seed, drop));
}

Tensor& activation_backward_functional_(Tensor& grad, const OptionalTensor& saved, const OptionalTensor& bias,
                                        int64_t dim, const OptionalTensor& bits, c10::string_view op, Params params,
                                        bool from_output, const OptionalTensor& seed, Params drop) {
  return grad.copy_(ops::activation_backward(grad, saved, bias, dim, bits, op, params, from_output, seed, drop));
}

}  // namespace

TORCH_LIBRARY_IMPL(memkit, Autograd, m) {
  m.impl("_activation", activation_autograd);
  m.impl("_activation_", activation_autograd_);
  m.impl("_dropout_mask", dropout_mask_autograd);
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
