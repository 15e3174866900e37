// What ATen's operators have rules for and ours do not: function transforms, forward-mode derivatives, views that negate.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <optional>

#include "checks.h"

namespace memkit {

inline bool needs_stock(const at::Tensor& x) {
  constexpr c10::DispatchKeySet known(
      {c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Negative});
  return x.key_set().has_any(known) || torch::autograd::isFwGradDefined(x);
}
inline bool needs_stock(const std::optional<at::Tensor>& x) { return x && needs_stock(*x); }
template <class X, class Y, class... Rest>
bool needs_stock(const X& x, const Y& y, const Rest&... rest) {
  return needs_stock(x) || needs_stock(y, rest...);
}

// No transform, mode or trace wants to see what is done to the tensor, nor is it a subclass's.
inline bool is_unseen(const at::Tensor& x) {
  const bool transformed = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  return is_plain(x) && !transformed && !torch::jit::tracer::isTracing();
}

}  // namespace memkit
