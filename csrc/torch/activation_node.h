// The derivative of every activation, as one autograd node.
#pragma once

#include <ATen/core/DimVector.h>
#include <c10/core/SymIntArrayRef.h>

#include <string>
#include <vector>

#include "saved_node.h"

namespace memkit {

struct ActivationBackward : SavedNode {
  // What the forward was asked for.
  std::string op;
  std::vector<double> params;
  int64_t dim = -1;
  c10::SymDimVector strides;  // of the memory order the bits follow

  // Saved: the output or the input; then the bits or the bias, where there are any.
  bool saved_output = false;
  bool has_bits = false;  // which side of the minimum; where the output is saved and not monotone
  bool has_bias = false;  // a bias was added; saved where the input is

  std::string name() const override { return "memkit::" + op + "_backward"; }

 protected:
  torch::autograd::variable_list backward(torch::autograd::variable_list&& grads) override;
};

}  // namespace memkit
