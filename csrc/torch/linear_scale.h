// What a layer makes, times few numbers, as layer scale and gates have it. The numbers' gradient needs no result. With
// y = h Wᵀ + b, z = s ∘ y, g = ∂L/∂z, any row m and P = (g - m)ᵀ h:
//   ∂L/∂s = Σₖ P ∘ W + b ∘ Σ (g - m) + m ∘ Σ y,   ∂L/∂W = s ∘ (P + m ⊗ Σ h),   ∂L/∂b = s ∘ Σ g,   ∂L/∂h = (s ∘ g) W
// Σ y is kept. With m = 0, what is added up would be large where y is not: a bias may take away what h's mean brings. With
// g's mean, rows of h that are large and have no gradient would count. m is g's mean weighted by the squares of h's rows.
// Where h's mean is as large as its deviation, ∂L/∂s may be off by 2.5 times as much as stock's; else by twice as much.
//
// Touvron et al., "Going deeper with image transformers", 2021 (layer scale).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/DimVector.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace memkit {

// Of a layer's input and the gradient of its result, as the layer has them: rows of features, or images.
struct LinearScale {
  at::Tensor scale;     // [groups, features]: for as many rows each; one group of images
  bool wanted;          // its gradient
  at::Tensor results;   // of the layer, summed: as scale; where wanted
  at::Tensor gradient;  // set by of_layer, as scale

  // Gradients of the layer's weight and bias, from that of the product. bias: undefined where there is none. product: the
  // weight's gradient, of a gradient and an input.
  using Product = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;
  std::pair<at::Tensor, at::Tensor> of_layer(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                             const at::Tensor& bias, const Product& product);
  // In rows.
  std::pair<at::Tensor, at::Tensor> of_layer(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                             const at::Tensor& bias);
  at::Tensor times(const at::Tensor& grad) const;
};

// The end of a node: a layer that learns.
class ScalableLayer {
 public:
  virtual ~ScalableLayer() = default;
  // Whether it is a convolution, whose features are the second dimension; else they are the last.
  virtual bool is_conv() const = 0;
  // Of its weight; none where it is several layers, or does not learn.
  virtual std::optional<size_t> weight_edge() const = 0;
  // Its result, by operators that autograd knows.
  virtual at::Tensor result_again() = 0;
  // What the node's backward finds for scale times grad, for each of its edges. last: nobody asks it again.
  virtual torch::autograd::variable_list scaled_backward(const at::Tensor& grad, LinearScale& scale, bool last) = 0;
};

// Of the tensor whose gradient goes along it.
inline c10::SymDimVector shape_of(const torch::autograd::Edge& edge) {
  const auto sizes = edge.function->input_metadata(edge.input_nr).shape_as_dim_vector();
  return {sizes.begin(), sizes.end()};
}

// The layers of PyTorch's own nodes; nothing where it is none, or what backward needs of it cannot be had of the node. bias:
// the parameter, where the layer has one, of the dtype that it has; where that is cast for the layer, before the cast.
std::unique_ptr<ScalableLayer> stock_layer(torch::autograd::Node& node, at::Tensor& bias);

}  // namespace memkit
