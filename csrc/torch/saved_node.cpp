#include "saved_node.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_make_dual.h>

namespace memkit {

torch::autograd::variable_list SavedNode::with_tangents(torch::autograd::variable_list&& grads) {
  auto found = [&] {
    const at::AutoGradMode on(true);
    return with_saved([&] { return backward(std::move(grads)); });
  }();
  for (at::Tensor& each : found) {
    if (!each.defined()) continue;
    const at::Tensor tangent = each._fw_grad(0), plain = each.detach();
    each = tangent.defined() ? at::_make_dual(plain, tangent.detach(), /*level=*/0) : plain;
  }
  return found;
}

}  // namespace memkit
