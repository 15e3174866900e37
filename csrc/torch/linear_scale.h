// A linear layer's result times few numbers, as layer scale and gates have it. The numbers' gradient needs no result:
//   y = h Wᵀ + b, z = s ∘ y, g = ∂L/∂z:   P = gᵀ h,   ∂L/∂s = Σₖ P ∘ W + b ∘ Σ g,   ∂L/∂W = s ∘ P,   ∂L/∂h = (s ∘ g) W
//
// Touvron et al., "Going deeper with image transformers", 2021 (layer scale).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace memkit {

// The numbers for rows of features: a row of them for each group of as many rows.
struct LinearScale {
  at::Tensor scale;     // [groups, features]
  bool wanted;          // its gradient
  at::Tensor gradient;  // set by of_layer, as scale

  // Gradients of the layer's weight and bias, from that of the product and the layer's input, both in rows. bias: undefined
  // where there is none.
  std::pair<at::Tensor, at::Tensor> of_layer(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                             const at::Tensor& bias);
  at::Tensor times(const at::Tensor& grad) const;
};

// A node of memkit's that may end in a linear layer.
class LinearNode {
 public:
  // Whether it ends in one, with a gradient.
  virtual bool is_linear() const = 0;
  virtual at::Tensor weight() = 0;
  // Its result, by operators that autograd knows.
  virtual at::Tensor result_again() = 0;
  // What its backward finds for scale times grad, for each of its edges. last: nobody asks it again.
  virtual torch::autograd::variable_list scaled_backward(const at::Tensor& grad, LinearScale& scale, bool last) = 0;

 protected:
  ~LinearNode() = default;
};

}  // namespace memkit
