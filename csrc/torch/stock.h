// The activations in ATen's own differentiable operators: what memkit's are held against, and what serves where memkit's
// kernels do not apply (function transforms, forward-mode derivatives, derivatives of derivatives).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "spec.h"

namespace memkit {

// Function transforms and forward-mode derivatives see ATen's operators, whose rules they know.
bool needs_stock(const at::Tensor& x);
inline bool needs_stock(const std::optional<at::Tensor>& x) { return x && needs_stock(*x); }
template <class X, class Y, class... Rest>
bool needs_stock(const X& x, const Y& y, const Rest&... rest) {
  return needs_stock(x) || needs_stock(y, rest...);
}

at::Tensor stock_activation(const ActivationSpec& spec, const at::Tensor& x);

// grad * f'(...), differentiable in both arguments; `saved` is the output where from_output, else the input.
// Raises for an output-saving activation that is not monotone: its input is gone.
at::Tensor stock_activation_backward(const ActivationSpec& spec, const at::Tensor& grad, const at::Tensor& saved,
                                     bool from_output);

}  // namespace memkit
