// Memory for results.
#pragma once

#include <ATen/core/Tensor.h>

namespace memkit {

// An empty tensor as it is. A large one on the CPU that the C library has just mapped gets its pages in one call a thread:
// faults one by one, 4 KiB each, cost more than the formula that writes them (32 MiB: 10.3 ms with gelu, 15.1 without).
at::Tensor with_pages(at::Tensor empty);

// at::empty_like, with its pages; the second in another dtype.
at::Tensor fresh_like(const at::Tensor& x);
at::Tensor fresh_like(const at::Tensor& x, at::ScalarType dtype);

// A contiguous one.
at::Tensor fresh(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);

}  // namespace memkit
