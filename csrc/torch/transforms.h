// Function transforms and forward-mode derivatives: they see ATen's operators, whose rules they know.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <optional>

namespace memkit {

inline bool needs_stock(const at::Tensor& x) {
  constexpr c10::DispatchKeySet transforms(
      {c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched});
  return x.key_set().has_any(transforms) || torch::autograd::isFwGradDefined(x);
}
inline bool needs_stock(const std::optional<at::Tensor>& x) { return x && needs_stock(*x); }
template <class X, class Y, class... Rest>
bool needs_stock(const X& x, const Y& y, const Rest&... rest) {
  return needs_stock(x) || needs_stock(y, rest...);
}

}  // namespace memkit
