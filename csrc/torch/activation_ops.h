// The operators of schemas.cpp as C++ functions that go through the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "optional.h"

namespace memkit::ops {

using Params = c10::ArrayRef<double>;

at::Tensor activation(const at::Tensor& input, const OptionalTensor& bias, int64_t dim, std::string_view op,
                      Params params, std::string_view save, const OptionalTensor& residual = {},
                      const OptionalTensor& seed = {}, Params drop = {});
at::Tensor& activation_(at::Tensor& input, const OptionalTensor& bias, int64_t dim, std::string_view op, Params params,
                        std::string_view save, const OptionalTensor& residual = {}, const OptionalTensor& seed = {},
                        Params drop = {});
std::tuple<at::Tensor, at::Tensor> activation_with_bits(const at::Tensor& input, const OptionalTensor& bias,
                                                        int64_t dim, std::string_view op, Params params,
                                                        const OptionalTensor& seed = {}, Params drop = {});
at::Tensor activation_with_bits_(at::Tensor& input, const OptionalTensor& bias, int64_t dim, std::string_view op,
                                 Params params, const OptionalTensor& seed = {}, Params drop = {});
at::Tensor activation_backward(const at::Tensor& grad, const OptionalTensor& saved, const OptionalTensor& bias,
                               int64_t dim, const OptionalTensor& bits, std::string_view op, Params params,
                               bool from_output, const OptionalTensor& seed = {}, Params drop = {});
at::Tensor& activation_backward_(at::Tensor& grad, const OptionalTensor& saved, const OptionalTensor& bias, int64_t dim,
                                 const OptionalTensor& bits, std::string_view op, Params params, bool from_output,
                                 const OptionalTensor& seed = {}, Params drop = {});
at::Tensor dropout_mask(c10::SymIntArrayRef size, const at::Tensor& seed, Params drop, at::ScalarType dtype);

}  // namespace memkit::ops
