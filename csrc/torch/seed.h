// The seeds of dropout.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>

namespace memkit {

// One random int64, from the generator of the input's device, so that torch.manual_seed, checkpoints and captured graphs
// govern it, or from the one given. A CPU generator draws the same for every device. On the input's device or the CPU.
at::Tensor draw_seed(const at::Tensor& input, const std::optional<at::Generator>& generator);

}  // namespace memkit
