// What a step of an optimizer is given, and what is asked of it before anything is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace memkit {

// An operator's lists; those that it has not are empty.
struct StepLists {
  std::string_view op;
  at::TensorList params, grads, first, second, largest, first_scales, second_scales, steps;
};

// Raises where an operator would.
void check_step(const StepLists& lists, int64_t block);

// Whether a moment lies in memory as its parameter does, which the engines walk side by side.
bool lies_as(const at::Tensor& state, const at::Tensor& param);

}  // namespace memkit
