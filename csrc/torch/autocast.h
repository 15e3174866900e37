#pragma once

#include <ATen/Tensor.h>
#include <ATen/autocast_mode.h>

namespace memkit {

// Whether autocast is on for the tensor's device. PyTorch has none for meta tensors, and raises when asked.
inline bool is_autocast(const at::Tensor& x) {
  return !x.is_meta() && at::autocast::is_autocast_enabled(x.device().type());
}

}  // namespace memkit
