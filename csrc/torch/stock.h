// The activations in ATen's own differentiable operators: what memkit's are held against, and what serves where memkit's
// kernels do not apply (function transforms, forward-mode derivatives, derivatives of derivatives).
#pragma once

#include <ATen/core/Tensor.h>

#include "spec.h"

namespace memkit {

at::Tensor stock_activation(const ActivationSpec& spec, const at::Tensor& x);

// grad * f'(...), differentiable in both arguments; `saved` is the output where from_output, else the input.
// Raises for an output-saving activation that is not monotone: its input is gone.
at::Tensor stock_activation_backward(const ActivationSpec& spec, const at::Tensor& grad, const at::Tensor& saved,
                                     bool from_output);

// Whether that is one operator of ATen's, or one that keeps no gradient: then it keeps no more than it is given.
bool stock_backward_is_one(const ActivationSpec& spec, bool from_output);

// The same where the slope has two values; `active`: 1 or 0, which one.
at::Tensor stock_activation_backward_where(const ActivationSpec& spec, const at::Tensor& grad,
                                           const at::Tensor& active);

}  // namespace memkit
