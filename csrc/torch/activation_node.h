// The derivative of every activation, as one autograd node.
#pragma once

#include <ATen/core/DimVector.h>
#include <c10/core/SymIntArrayRef.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <string>
#include <vector>

#include "node.h"

namespace memkit {

struct ActivationBackward : torch::autograd::Node {
  // What the forward was asked for.
  std::string op;
  std::vector<double> params;
  int64_t dim = -1;
  c10::SymDimVector strides;  // of the memory order the bits follow

  torch::autograd::SavedVariable saved;  // the output, or the input
  torch::autograd::SavedVariable bits;   // which side of the minimum; where the output is saved and not monotone
  torch::autograd::SavedVariable bias;   // where the input is saved
  bool saved_output = false;
  bool has_bits = false;
  bool has_bias = false;  // a bias was added
  bool released = false;

  bool from_output() const { return saved_output; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override;
  std::string name() const override { return "memkit::" + op + "_backward"; }
};

}  // namespace memkit
