// The node of a reduced loss: its gradients were made in the forward, up to the factor that arrives in backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "saved_node.h"

namespace memkit {

void check_first_derivative(std::string_view op);

struct KnownGradients : SavedNode {
  std::string_view op;

  std::string name() const override { return "memkit::" + std::string(op) + "_backward"; }

  // Undefined where none is wanted; as many as the node has edges. factors: what each is to be multiplied by beside the
  // factor that arrives, in float32; undefined for ones.
  void keep(const std::vector<at::Tensor>& gradients, const at::Tensor& factors);

  // Of a node that lives in lean(): takes the place of the norm whose result the loss was given, and with it of what that
  // keeps, where nothing else can send that norm a gradient any more. What is between them may reshape, slice, convert and
  // scale. Whether it did.
  bool take_place_of_norm();

 protected:
  torch::autograd::variable_list backward(torch::autograd::variable_list&& grads) override;

 private:
  size_t count_ = 0;  // of gradients, which are saved first; then the factors
  bool has_factors_ = false;
};

void bind_known_gradients(pybind11::module_& m);

}  // namespace memkit
