// memkit::glu: act(gate) * up with its derivative. Gate and up are kept, the product is not; their memory serves for their
// gradients where the graph dies and nobody else can see it.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <array>

#include "checks.h"
#include "derivative.h"
#include "eager.h"
#include "engine.h"
#include "fresh.h"
#include "layout.h"
#include "named_ops.h"
#include "operators.h"
#include "optional.h"
#include "saved_node.h"
#include "spec.h"
#include "stock.h"
#include "transforms.h"

namespace memkit::glu_op {
namespace {

namespace autograd = torch::autograd;
using at::Tensor;
using Text = c10::string_view;

Tensor call_glu(const Tensor& gate, const OptionalTensor& up, Text act, Text packing) {
  return MEMKIT_CALL("memkit::_glu", Tensor(const Tensor&, const OptionalTensor&, Text, Text))(gate, up, act, packing);
}
std::tuple<Tensor, Tensor> call_backward(const Tensor& grad, const Tensor& gate, const OptionalTensor& up, Text act,
                                         Text packing) {
  return MEMKIT_CALL_PAST_AUTOGRAD("memkit::_glu_backward",
                                   std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, Text,
                                                              Text))(grad, gate, up, act, packing);
}
void call_backward_(const Tensor& grad, Tensor& gate, const OptionalTensor& up, Text act, Text packing) {
  MEMKIT_CALL_PAST_AUTOGRAD("memkit::_glu_backward_", void(const Tensor&, Tensor&, const OptionalTensor&, Text, Text))
  (grad, gate, up, act, packing);
}

// The function of memkit.functional that multiplies by this activation.
const char* name_of(Text act) {
  return act == "silu" ? "swiglu" : act == "relu" ? "reglu" : act == "gelu" || act == "gelu_tanh" ? "geglu" : "gated";
}

enum class Packing { gate_up, up_gate, interleaved };

Packing packing_of(Text name) {
  if (name == "gate_up") return Packing::gate_up;
  if (name == "up_gate") return Packing::up_gate;
  TORCH_CHECK_VALUE(name == "interleaved", "gated: expected packing 'gate_up', 'up_gate' or 'interleaved', got '", name,
                    "'");
  return Packing::interleaved;
}

ActivationSpec spec_of(Text act) {
  constexpr std::array<Text, 6> known{"silu", "gelu", "gelu_tanh", "relu", "sigmoid", "identity"};
  TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), act) != known.end(),
                    "gated: expected act 'silu', 'gelu', 'gelu_tanh', 'relu', 'sigmoid' or 'identity', got '", act,
                    "'");
  return ActivationSpec(act, {});
}

void check(const Tensor& gate, const OptionalTensor& up, Text act, Text packing) {
  const char* name = name_of(act);
  packing_of(packing);
  check_float_tensor(name, gate);
  if (!up) {
    TORCH_CHECK_VALUE(gate.dim() > 0 && gate.sym_size(-1) % 2 == 0, name,
                      ": expected gate and up packed in an even last dimension, got ", describe(gate));
    return;
  }
  check_float_tensor(name, *up);
  TORCH_CHECK_VALUE(gate.sym_sizes() == up->sym_sizes(), name, ": expected gate and up of one shape, got ",
                    gate.sym_sizes(), " and ", up->sym_sizes());
  TORCH_CHECK_TYPE(gate.scalar_type() == up->scalar_type(), name, ": expected gate and up of one dtype, got ",
                   describe(gate), " and ", describe(*up));
  TORCH_CHECK(gate.device() == up->device(), name, ": expected gate and up on one device, got ", gate.device(), " and ",
              up->device());
}

// Gate and up as views of what packs them.
std::pair<Tensor, Tensor> unpacked(const Tensor& x, Packing packing) {
  const c10::SymInt half = x.sym_size(-1) / 2;
  if (packing == Packing::interleaved) {
    auto shape = c10::SymDimVector(x.sym_sizes().begin(), x.sym_sizes().end());
    shape.back() = half;
    shape.push_back(2);
    const Tensor pairs = x.reshape_symint(shape);
    return {pairs.select(-1, 0), pairs.select(-1, 1)};
  }
  const Tensor first = x.narrow_symint(-1, 0, half), second = x.narrow_symint(-1, half, half);
  return packing == Packing::gate_up ? std::pair(first, second) : std::pair(second, first);
}

Tensor packed(const Tensor& gate, const Tensor& up, Packing packing) {
  if (packing == Packing::interleaved) {  // not by flatten, which has no batching rule
    auto sizes = gate.sym_sizes().vec();
    sizes.back() = sizes.back() * 2;
    return at::stack({gate, up}, -1).reshape_symint(sizes);
  }
  return packing == Packing::gate_up ? at::cat({gate, up}, -1) : at::cat({up, gate}, -1);
}

// Dense operands in one order, and how the kernels walk them.
struct Operands {
  Tensor gate;
  OptionalTensor up;
  Packing packing;

  Operands(const Tensor& g, const OptionalTensor& u, Text name) : packing(packing_of(name)) {
    const bool as_they_are = u ? g.is_non_overlapping_and_dense() && same_order(g, *u) : false;
    gate = as_they_are ? g : g.contiguous();
    if (u) up = as_they_are ? *u : u->contiguous();
  }

  Tensor new_product() const {
    if (up) return fresh_like(gate);
    auto shape = c10::SymDimVector(gate.sym_sizes().begin(), gate.sym_sizes().end());
    shape.back() = shape.back() / 2;
    return with_pages(at::empty_symint(shape, gate.options()));
  }

  // Of the first and second operand in memory that lies as gate and up do.
  std::pair<char*, char*> places(void* first, void* second) const {
    if (up) return {static_cast<char*>(first), static_cast<char*>(second)};
    const int64_t apart = (packing == Packing::interleaved ? 1 : gate.size(-1) / 2) * gate.element_size();
    char *const low = static_cast<char*>(first), *const high = low + apart;
    return packing == Packing::up_gate ? std::pair(high, low) : std::pair(low, high);
  }

  GluArgs args(const ActivationSpec& spec) const {
    GluArgs a{spec.act, dtype_of(gate)};
    if (up) {
      a.rows = 1;
      a.width = a.row = gate.numel();
    } else if (packing == Packing::interleaved) {
      a.rows = 1;
      a.width = gate.numel() / 2;
      a.step = 2;
    } else {
      a.row = gate.size(-1);
      a.width = a.row / 2;
      a.rows = a.row == 0 ? 0 : gate.numel() / a.row;
    }
    std::tie(a.gate, a.up) =
        places(const_cast<void*>(gate.const_data_ptr()), up ? const_cast<void*>(up->const_data_ptr()) : nullptr);
    return a;
  }

  // The gradient of the product, as densely as the kernels want it.
  Tensor ordered(const Tensor& grad) const {
    if (!up) return grad.contiguous();
    return same_order(gate, grad) ? grad : at::empty_like(gate).copy_(grad);
  }
};

Tensor glu(const Tensor& gate, const OptionalTensor& up, Text act, Text packing) {
  const ActivationSpec spec = spec_of(act);
  check(gate, up, act, packing);
  const Operands operands(gate, up, packing);
  Tensor out = operands.new_product();
  if (out.is_meta()) return out;
  GluArgs args = operands.args(spec);
  args.out = out.mutable_data_ptr();
  run_glu(args, /*backward=*/false, gate.device());
  return out;
}

void check_gradient(const Tensor& grad, const Tensor& gate, const OptionalTensor& up) {
  const bool fits = grad.dim() == gate.dim() && grad.scalar_type() == gate.scalar_type() &&
                    grad.device() == gate.device() && grad.sym_numel() * (up ? 1 : 2) == gate.sym_numel();
  TORCH_CHECK(fits, "gated: expected a gradient of the product's shape and dtype, got ", describe(grad), " for gate ",
              describe(gate));
}

void backward_into(const Tensor& grad, const Operands& operands, const ActivationSpec& spec, const Tensor& grad_gate,
                   const Tensor& grad_up) {
  if (grad.is_meta()) return;
  const Tensor ordered = operands.ordered(grad);
  GluArgs args = operands.args(spec);
  args.grad = ordered.const_data_ptr();
  std::tie(args.grad_gate, args.grad_up) =
      operands.places(grad_gate.mutable_data_ptr(), operands.up ? grad_up.mutable_data_ptr() : nullptr);
  run_glu(args, /*backward=*/true, grad.device());
}

std::tuple<Tensor, Tensor> glu_backward(const Tensor& grad, const Tensor& gate, const OptionalTensor& up, Text act,
                                        Text packing) {
  const ActivationSpec spec = spec_of(act);
  check(gate, up, act, packing);
  check_gradient(grad, gate, up);
  const Operands operands(gate, up, packing);
  const Tensor grad_gate = fresh_like(operands.gate);
  const Tensor grad_up = up ? fresh_like(*operands.up) : at::empty({0}, gate.options());
  backward_into(grad, operands, spec, grad_gate, grad_up);
  return {grad_gate, grad_up};
}

void glu_backward_(const Tensor& grad, Tensor& gate, const OptionalTensor& up, Text act, Text packing) {
  const ActivationSpec spec = spec_of(act);
  check(gate, up, act, packing);
  check_gradient(grad, gate, up);
  check_inplace(name_of(act), gate, memory_blocker(gate));
  if (up) check_inplace(name_of(act), *up, memory_blocker(*up));
  const Operands operands(gate, up, packing);
  backward_into(grad, operands, spec, operands.gate, up ? *operands.up : Tensor());
  if (!operands.gate.is_same(gate)) gate.copy_(operands.gate);
  if (up && !operands.up->is_same(*up)) up->copy_(*operands.up);
}

// By ATen's operators, for transforms and higher derivatives.
Tensor glu_by_stock(const Tensor& gate, const OptionalTensor& up, Text act, Text packing) {
  const auto [g, u] = up ? std::pair(gate, *up) : unpacked(gate, packing_of(packing));
  return stock_activation(spec_of(act), g) * u;
}

struct GluBackward : SavedNode {
  std::string act, packing;
  bool split = false;

  std::string name() const override { return "memkit::glu_backward"; }
  bool can_rebuild(uint32_t) const override { return true; }

 protected:
  Tensor recompute() override {
    return call_glu(unpack(0), split ? OptionalTensor(unpack(1)) : std::nullopt, act, packing);
  }

  autograd::variable_list backward(autograd::variable_list&& grads) override {
    const Tensor grad = std::move(grads[0]);
    if (!grad.defined()) return autograd::variable_list(2);
    if (at::GradMode::is_enabled()) return differentiable(grad);
    Tensor gate = take(0), up = split ? take(1) : Tensor();
    const OptionalTensor optional_up = split ? OptionalTensor(std::move(up)) : std::nullopt;
    if (eager::is_dead(gate) && (!split || eager::is_dead(*optional_up))) {
      call_backward_(grad, gate, optional_up, act, packing);
      return {gate, optional_up.value_or(Tensor())};
    }
    auto [grad_gate, grad_up] = call_backward(grad, gate, optional_up, act, packing);
    return {grad_gate, split ? grad_up : Tensor()};
  }

 private:
  autograd::variable_list differentiable(const Tensor& grad) {
    const autograd::variable_list inputs{grad, unpack(0), split ? unpack(1) : Tensor()};
    const auto composed = [act = act, packing = packing](const autograd::variable_list& t, bool) {
      const ActivationSpec spec = spec_of(act);
      const auto [gate, up] = t[2].defined() ? std::pair(t[1], t[2]) : unpacked(t[1], packing_of(packing));
      const Tensor grad_gate = stock_activation_backward(spec, t[0] * up, gate, false);
      const Tensor grad_up = t[0] * stock_activation(spec, gate);
      if (t[2].defined()) return autograd::variable_list{grad_gate, grad_up};
      return autograd::variable_list{packed(grad_gate, grad_up, packing_of(packing)), Tensor()};
    };
    const auto kernel = [&] {
      auto [gate, up] = call_backward(grad, inputs[1], optional(inputs[2]), act, packing);
      return autograd::variable_list{gate, split ? up : Tensor()};
    };
    return differentiable_gradients(inputs, kernel, composed);
  }
};

Tensor glu_autograd(const Tensor& gate, const OptionalTensor& up, Text act, Text packing) {
  spec_of(act);
  check(gate, up, act, packing);
  if (needs_stock(gate, up)) return glu_by_stock(gate, up, act, packing);
  const bool recorded = autograd::compute_requires_grad(gate, up);
  Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = call_glu(gate, up, act, packing);
  }
  if (!recorded) return out;
  auto node = make_node<GluBackward>();
  node->set_next_edges(edges_of(gate, up));
  node->act = act;
  node->packing = packing;
  node->split = up.has_value();
  autograd::set_history(out, node);
  node->watch(out);
  node->save(gate);
  if (up) node->save(*up);
  return out;
}

// One name in the graph.
Tensor named_glu(const Tensor& gate, const OptionalTensor& up, Text act, Text packing) {
  return call_glu(gate, up, act, packing);
}

Tensor glu_entry(const Tensor& gate, const OptionalTensor& up, Text act, Text packing) {
  const pybind11::gil_scoped_release no_gil;
  return call_glu(gate, up, act, packing);
}

void register_glu(torch::Library& m) {
  m.impl("_glu", glu);
  m.impl("_glu_backward", glu_backward);
  m.impl("_glu_backward_", glu_backward_);
}

constexpr char kGlu[] = "glu";

}  // namespace

TORCH_LIBRARY_IMPL(memkit, CPU, m) { register_glu(m); }
TORCH_LIBRARY_IMPL(memkit, CUDA, m) { register_glu(m); }
TORCH_LIBRARY_IMPL(memkit, Meta, m) { register_glu(m); }
TORCH_LIBRARY_IMPL(memkit, Autograd, m) { m.impl("_glu", glu_autograd); }
TORCH_LIBRARY_IMPL(memkit, FuncTorchBatched, m) { m.impl("_glu", glu_by_stock); }
TORCH_LIBRARY_IMPL(memkit, CompositeImplicitAutograd, m) { m.impl("glu", named_glu); }

}  // namespace memkit::glu_op

void memkit::bind_glu(pybind11::module_& m) { eager::bind<glu_op::glu_entry, glu_op::kGlu>(m); }
