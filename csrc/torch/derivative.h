// Gradients that have derivatives of any order: a node keeps what they were computed of, and computes them again by ATen's
// operators in its own backward. Composed of those at once, they would keep each step.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <optional>
#include <vector>

namespace memkit {

// `again`: whether there may be a derivative after this one. Of a layer norm PyTorch's own gradient has one that is right, of a
// batch norm one at all.
using Formula = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&, bool again)>;

// The gradients of `results`, of which some may be undefined or without one that arrived, by those inputs that are asked for
// and need any: as many as there are inputs. Results that are moved here lose their memory first.
std::vector<at::Tensor> gradients_of(std::vector<at::Tensor> results, const std::vector<at::Tensor>& arrived,
                                     const std::vector<at::Tensor>& inputs, const std::vector<bool>& asked,
                                     bool create_graph);

// An input that is not kept, but made of the others.
struct Remade {
  size_t place;
  torch::autograd::Edge edge;  // where it is in the graph
  std::function<at::Tensor(const std::vector<at::Tensor>&)> make;
};

// Puts gradients into the graph. `inputs`, of which some may be undefined: all that `formula` takes; it gives as many results
// as there are gradients, and like these some undefined. `zeros`: what they do not depend on has a gradient of 0, as where
// stock's goes through a slope that is 0.
std::vector<at::Tensor> with_derivative(std::vector<at::Tensor> gradients, const std::vector<at::Tensor>& inputs,
                                        Formula formula, std::optional<Remade> remade = std::nullopt,
                                        bool zeros = false);

// The gradients that `kernel` makes of `inputs`, the first of them the incoming gradient, with a derivative. By the formula
// alone where function transforms or tangents are about, or an input is of another class.
std::vector<at::Tensor> differentiable_gradients(const std::vector<at::Tensor>& inputs,
                                                 const std::function<std::vector<at::Tensor>()>& kernel,
                                                 Formula formula, bool zeros = false);

// Makes it and puts it into the graph, behind a node of its own: it is not what the edge's node made.
at::Tensor made_anew(const Remade& remade, const std::vector<at::Tensor>& inputs);

}  // namespace memkit
