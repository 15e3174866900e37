// Results that a layer pads for a convolution: between an activation and a convolution, in audio codecs above all, autograd
// keeps them beside what the activation was given.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace memkit {

// Whether the node padded what can be made again.
bool pads_rebuildable(const torch::autograd::Node& node);

// What a node filled `made` up with, one element; undefined where the padding is of other elements, or there is none.
at::Tensor fill_of(const torch::autograd::Node& node, const at::Tensor& made);

// Its result again.
at::Tensor pad_again(const torch::autograd::Node& node, const at::Tensor& fill);

}  // namespace memkit
