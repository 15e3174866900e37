// Parameters that what lean() makes again is of. Engines that shard them free their memory between forward and backward, and
// give it back for the backward of their own layer, which is not the first to ask.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <atomic>
#include <cstdint>

namespace memkit {

// Whether such an engine may be at work: copies are kept then.
inline std::atomic<bool> copies_parameters{false};

// Of a parameter with so many elements or more, or a view of one.
bool is_parameter(const torch::autograd::Edge& edge, int64_t elements = 0);

// A parameter, a view of one, or what has no gradient.
bool may_be_freed(const at::Tensor& x);

// Raises where the memory of a tensor that backward computes something again of was freed after forward.
void check_there(const at::Tensor& x);

}  // namespace memkit
