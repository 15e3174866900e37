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
  // The gradients are this many times too large, and where `divides` not yet divided by the total either.
  double scale = 1;
  bool divides = false;

  std::string name() const override { return "memkit::" + std::string(op) + "_backward"; }

  // Undefined where none is wanted; as many as the node has edges.
  void keep(const std::vector<at::Tensor>& gradients, const at::Tensor& total);

  // Of a node that lives in lean(): takes the place of the norm whose result the loss was given, and with it of what that
  // keeps, where nothing else can send that norm a gradient any more. What is between them may reshape, slice, convert and
  // scale. Whether it did.
  bool take_place_of_norm();

 protected:
  torch::autograd::variable_list backward(torch::autograd::variable_list&& grads) override;

 private:
  at::Tensor factor_of(const at::Tensor& grad);

  size_t count_ = 0;  // of gradients, which are saved first; then the total
};

void bind_known_gradients(pybind11::module_& m);

}  // namespace memkit
