// Gradients that have derivatives of any order: a node keeps what they were computed of, and computes them again by ATen's
// operators in its own backward. Composed of those at once, they would keep each step.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <vector>

namespace memkit {

// `again`: whether there may be a derivative after this one. Of a layer norm PyTorch's own gradient has one that is right, of a
// batch norm one at all.
using Formula = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&, bool again)>;

// Puts gradients into the graph. `inputs`, of which some may be undefined: all that `formula` takes; it gives as many results
// as there are gradients, and like these some undefined.
std::vector<at::Tensor> with_derivative(std::vector<at::Tensor> gradients, const std::vector<at::Tensor>& inputs,
                                        Formula formula);

// Puts a tensor into the graph in the place of another one of its shape, behind a node of its own: it is not what the edge's
// node made.
void set_in_place_of(at::Tensor& made, const torch::autograd::Edge& edge);

}  // namespace memkit
