// x * scale + shift with few numbers of scale and shift, as adaptive norms have it; by ATen's operators. Of x, scale and shift
// lean() makes the result again, where stock's sum does not keep its shift.
//
// Perez et al., "FiLM: visual reasoning with a general conditioning layer", 2018.
#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include "checks.h"
#include "eager.h"
#include "named_ops.h"
#include "optional.h"
#include "rebuild.h"
#include "saved_node.h"
#include "transforms.h"

namespace memkit {
namespace {

namespace autograd = torch::autograd;
using at::Tensor;

// In x's memory where it is nobody else's.
Tensor product(const Tensor& x, const Tensor& factor, bool is_own) {
  return is_own && at::result_type(x, factor) == x.scalar_type() ? x.mul_(factor) : x.mul(factor);
}

// As stock rounds it.
Tensor scaled_and_shifted(const Tensor& x, const Tensor& scale, const OptionalTensor& shift, bool is_own) {
  const Tensor scaled = product(x, scale, is_own);
  if (!shift) return scaled;
  return at::result_type(scaled, *shift) == scaled.scalar_type() ? scaled.add_(*shift) : scaled.add(*shift);
}

struct ScaleShiftBackward : SavedNode {
  bool has_shift = false;
  c10::DimVector scale_sizes, shift_sizes;

  std::string name() const override { return "memkit::scale_shift_backward"; }
  bool can_rebuild(uint32_t) const override { return true; }

 protected:
  Tensor recompute() override {
    bool is_own = false;
    const Tensor x = unpack_for_rebuild(0, is_own);
    return scaled_and_shifted(x, unpack_parameter(1), shift(), is_own);
  }

  autograd::variable_list backward(autograd::variable_list&& grads) override {
    Tensor grad = std::move(grads[0]);
    autograd::variable_list found(3);
    if (!grad.defined()) return found;
    if (has_shift && task_should_compute_output(2)) found[2] = at::sum_to(grad, shift_sizes, true);
    // Not where gradients are batched or have tangents, which have no place in x's memory.
    const bool alone = !at::GradMode::is_enabled() && is_unseen(grad) && !needs_stock(grad);
    if (task_should_compute_output(1)) {
      bool is_own = false;
      const Tensor x = unpack_for_rebuild(0, is_own);
      found[1] = at::sum_to(product(x, grad, alone && is_own), scale_sizes, true);
    }
    if (task_should_compute_output(0)) found[0] = product(grad, unpack(1), alone && eager::is_dead(grad));
    return found;
  }

 private:
  OptionalTensor shift() { return has_shift ? OptionalTensor(unpack(2)) : std::nullopt; }
};

bool is_small(const Tensor& part, const Tensor& x) {
  return part.device() == x.device() && part.layout() == at::kStrided && part.is_floating_point() && is_unseen(part) &&
         4 * part.numel() <= x.numel() && at::is_expandable_to(part.sizes(), x.sizes());
}

// Where scale has no gradient, stock would not keep x.
bool is_rebuilt(const Tensor& x) {
  const auto& node = x.grad_fn();
  return node && x._version() == 0 && can_rebuild(*node, x.output_nr());
}

// Of two factors in either order; nothing where the caller does better with stock's operators.
OptionalTensor scale_shift(const Tensor& first, const Tensor& second, const OptionalTensor& shift) {
  const bool swapped = first.numel() < second.numel();
  const Tensor &x = swapped ? second : first, &scale = swapped ? first : second;
  const bool served =
      x.layout() == at::kStrided && x.is_floating_point() && is_unseen(x) && !needs_stock(x, scale, shift);
  if (!served || !is_small(scale, x) || (shift && !is_small(*shift, x)) ||
      !autograd::compute_requires_grad(x, scale, shift) || !(scale.requires_grad() || is_rebuilt(x)))
    return std::nullopt;
  Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = scaled_and_shifted(x, scale, shift, false);
  }
  auto node = make_node<ScaleShiftBackward>();
  node->set_next_edges(edges_of(x, scale, shift));
  node->has_shift = shift.has_value();
  node->scale_sizes = scale.sizes();
  if (shift) node->shift_sizes = shift->sizes();
  autograd::set_history(out, node);
  node->watch(out);
  node->save(x), node->save_parameter(scale);
  // A copy, as stock does not mind what becomes of the shift.
  if (shift) node->save(shift->detach().clone());
  return out;
}

OptionalTensor scale_shift_entry(const Tensor& first, const Tensor& second, const OptionalTensor& shift) {
  const pybind11::gil_scoped_release no_gil;
  return scale_shift(first, second, shift);
}

constexpr char kScaleShift[] = "scale_shift";

}  // namespace

void bind_scale_shift(pybind11::module_& m) { eager::bind<scale_shift_entry, kScaleShift>(m); }

}  // namespace memkit
