// Tensors that need not be given.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace memkit {

using OptionalTensor = std::optional<at::Tensor>;

// An undefined tensor stands for one that was not given.
inline OptionalTensor optional(const at::Tensor& x) { return x.defined() ? OptionalTensor(x) : std::nullopt; }

}  // namespace memkit
