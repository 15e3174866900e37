// What the named operators share.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string_view>

namespace memkit {

using OptionalParams = std::optional<c10::ArrayRef<double>>;

// Under autocast a linear layer's output is in the autocast dtype and its bias, if kept apart, still in float32.
at::Tensor cast_for_autocast(const at::Tensor& bias, const at::Tensor& input);

// An activation's parameters where none are given, as in torch.nn.functional.
c10::ArrayRef<double> default_params(std::string_view act);

// Add the eager entries of the families to the module.
void bind_consumer(pybind11::module_& m);
void bind_dropout(pybind11::module_& m);
void bind_glu(pybind11::module_& m);
void bind_scale_shift(pybind11::module_& m);
void bind_linear_scale(pybind11::module_& m);
void bind_pooling(pybind11::module_& m);
void bind_rotary(pybind11::module_& m);
void bind_softmax(pybind11::module_& m);

}  // namespace memkit
