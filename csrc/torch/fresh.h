// Memory for results.
#pragma once

#include <ATen/core/Tensor.h>

namespace memkit {

// An empty tensor as it is. A large one on the CPU that the C library has just mapped gets its pages in one call a thread:
// faults one by one, 4 KiB each, cost more than the formula that writes them (32 MiB: 10.3 ms with gelu, 15.1 without).
at::Tensor with_pages(at::Tensor empty);

// For a result like x, in another dtype if so: in x's order of memory; contiguous, or else channels last, where x counts as
// that. Dimensions of one element may have any strides there (an image of 1x1 that was channels last), which PyTorch's
// elementwise operators do not hand on: what comes next would go by them.
at::Tensor fresh_like(const at::Tensor& x);
at::Tensor fresh_like(const at::Tensor& x, at::ScalarType dtype);

// With x's own strides, whatever they say of a dimension of one element.
at::Tensor fresh_strided_like(const at::Tensor& x, at::ScalarType dtype);

// A contiguous one.
at::Tensor fresh(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);

}  // namespace memkit
