// The derivative of every activation, as one autograd node.
#pragma once

#include <c10/core/SymIntArrayRef.h>

#include <string>
#include <string_view>
#include <vector>

#include "saved_node.h"
#include "spec.h"

namespace memkit {

struct ActivationBackward : SavedNode {
  // What the forward was asked for.
  std::string_view op;  // of static storage
  std::vector<double> params;
  int64_t dim = -1;
  std::vector<double> drop;
  std::vector<c10::SymInt> strides;  // of the memory order that bits and dropout follow; set where there are any

  // Saved, each where it is needed: the output, the input, or neither; the bits or the bias; the seed; what is dropped from,
  // for lean() alone.
  bool identity = false;
  Save saved = Save::input;
  bool has_bits = false;  // where the output is saved and not monotone, or nothing but them
  bool has_bias = false;  // a bias was added; saved where the input is
  bool has_seed = false;
  bool has_residual = false;
  bool has_source = false;

  bool can_rebuild(uint32_t) const override { return !has_residual && (identity ? has_source : saved == Save::input); }
  bool makes_zeros() const override;
  std::string name() const override { return "memkit::" + std::string(op) + "_backward"; }

 protected:
  torch::autograd::variable_list backward(torch::autograd::variable_list&& grads) override;
  at::Tensor recompute() override;

 private:
  // One bit an element for the slope of relu, where lean() packed the output; nothing where they would not do.
  std::optional<at::Tensor> bits_of_nonzeros(const at::Tensor& grad);
  // The gradient of the input with its derivative; `at_point`: what was kept, the bias added.
  at::Tensor differentiable(const ActivationSpec& spec, const at::Tensor& grad, const at::Tensor& at_point);
  // 1 where the bits say that a function of two slopes is active, else 0; like the gradient.
  at::Tensor active_elements(const at::Tensor& bits, const at::Tensor& grad);
};

}  // namespace memkit
