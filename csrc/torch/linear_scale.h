// What a linear layer or a convolution makes, times few numbers, as layer scale and gates have it. The numbers' gradient needs
// no result. With y = h Wᵀ + b, z = s ∘ y, g = ∂L/∂z and P = gᵀ h, which is the gradient of W for g:
//   ∂L/∂s = Σₖ P ∘ W + b ∘ Σ g,   ∂L/∂W = s ∘ P,   ∂L/∂b = s ∘ Σ g,   ∂L/∂h = (s ∘ g) W
//
// Touvron et al., "Going deeper with image transformers", 2021 (layer scale).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <utility>

namespace memkit {

// The numbers: for rows of features, a row of them for each group of as many rows; for images one for each channel.
struct LinearScale {
  at::Tensor scale;     // [groups, features]; of images [1, channels]
  bool wanted;          // its gradient
  at::Tensor gradient;  // set by of_layer, as scale

  // Gradients of the layer's weight and bias, from that of the product and the layer's input. bias: undefined where there is
  // none. product: the weight's gradient, of a gradient and an input.
  using Product = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;
  std::pair<at::Tensor, at::Tensor> of_layer(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                             const at::Tensor& bias, const Product& product);
  // In rows.
  std::pair<at::Tensor, at::Tensor> of_layer(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                             const at::Tensor& bias);
  at::Tensor times(const at::Tensor& grad) const;
};

// The end of a node: a layer with a gradient of its own.
class ScalableLayer {
 public:
  virtual ~ScalableLayer() = default;
  // Whether it is a convolution, whose features are the second dimension; else they are the last.
  virtual bool is_conv() const = 0;
  virtual at::Tensor weight() = 0;
  // Its result, by operators that autograd knows.
  virtual at::Tensor result_again() = 0;
  // What the node's backward finds for scale times grad, for each of its edges. last: nobody asks it again.
  virtual torch::autograd::variable_list scaled_backward(const at::Tensor& grad, LinearScale& scale, bool last) = 0;
};

// The layers of PyTorch's own nodes; nothing where it is none, or what backward needs of it cannot be had of the node. bias:
// the parameter, where the layer has one, of the dtype that it has; where that is cast for the layer, before the cast.
std::unique_ptr<ScalableLayer> stock_layer(torch::autograd::Node& node, at::Tensor& bias);

}  // namespace memkit
