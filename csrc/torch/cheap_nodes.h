// PyTorch's own cheap operators, as autograd's nodes know them: those that keep what they take, so that what they gave can
// be made again of it by the same kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace memkit {

// A product or quotient.
bool is_product(const torch::autograd::Node& node);
// An activation, a gated unit, or another function of one tensor.
bool is_function_of_kept(const torch::autograd::Node& node);

// Whether all that this product is of is kept by its node, or can be made again.
bool has_factors(const torch::autograd::Node& node);

// Whether one of its tensors is a parameter of so many elements or more; where any counts, also whether one may be frozen.
bool takes_parameter(const torch::autograd::Node& node, int64_t elements);

// Whether what it keeps may be asked for twice: no hooks took it, or those that are asked now.
bool gives_twice(const torch::autograd::Node& node);

// What a node of either kind gave, without autograd; raises where its graph has been freed.
at::Tensor cheap_result(const torch::autograd::Node& node);

}  // namespace memkit
