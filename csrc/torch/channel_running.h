// Batch norm's running statistics.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "../cuda/channel_norm.h"
#include "optional.h"

namespace memkit {

// Moved by `momentum` towards those that a training step finds.
struct RunningStatistics {
  at::Tensor mean, variance;
  double momentum;

  // From `count` values, the variance over count, not count - 1.
  void move(const at::Tensor& found_mean, const at::Tensor& found_variance, int64_t count) const;

  // What a kernel on their device is to move, and what is to be told behind it; nothing where none can.
  std::optional<cuda::Running> for_kernel(int64_t count) const;
  void bump_versions() const;
};

// Whether a batch norm may compute with them right away: where not, Python says what is wrong, or knows a way.
bool fit(const OptionalTensor& running_mean, const OptionalTensor& running_var, const at::Tensor& input, bool training);

// Numbers in the CPU's memory that nothing but their version tells of.
bool is_array(const at::Tensor& x, at::ScalarType dtype);

}  // namespace memkit
