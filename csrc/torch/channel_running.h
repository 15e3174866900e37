// Batch norm's running statistics.
#pragma once

#include <ATen/core/Tensor.h>

namespace memkit {

// Moved by `momentum` towards those that a training step finds.
struct RunningStatistics {
  at::Tensor mean, variance;
  double momentum;

  // From `count` values, the variance over count, not count - 1.
  void move(const at::Tensor& found_mean, const at::Tensor& found_variance, int64_t count) const;
};

// n / (n - 1): a variance over n - 1 from one over n.
inline double unbiased(int64_t n) { return double(n) / double(n - 1); }

// Moves one towards `factor` times what was found, and returns it.
at::Tensor move_running(const at::Tensor& running, const at::Tensor& found, double factor, double momentum);

// No transform, mode or trace wants to see what is done to the tensor, nor is it a subclass's.
bool is_unseen(const at::Tensor& x);

// Numbers in the CPU's memory that nothing but their version tells of.
bool is_array(const at::Tensor& x, at::ScalarType dtype);

}  // namespace memkit
