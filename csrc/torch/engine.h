// Runs a kernel of memkit's on the device its tensors live on.
#pragma once

#include <ATen/core/Tensor.h>

#include "../formulas/glu.h"
#include "../formulas/pooling.h"
#include "../formulas/rotary.h"
#include "../formulas/softmax.h"

namespace memkit {

// Below this many elements one thread is faster than waking a second (ATen's own grain size).
constexpr int64_t kGrain = 32768;

Dtype dtype_of(at::ScalarType dtype);
inline Dtype dtype_of(const at::Tensor& x) { return dtype_of(x.scalar_type()); }
// Whether the tensor's dtype is one of these.
bool has_kernels(const at::Tensor& x);

enum class Pass { forward, backward_from_input, backward_from_output, backward_from_bits };

// On the CPU: split over torch's intra-op threads. On CUDA: on the current stream of the tensors' device.
void run_activation(Pass pass, const ActivationArgs& args, c10::Device device);
void run_glu(const GluArgs& args, bool backward, c10::Device device);
void run_max_pool(const PoolArgs& args, bool backward, c10::Device device);
void run_rotary(const RotaryArgs& args, c10::Device device);
void run_softmax(const SoftmaxArgs& args, bool backward, c10::Device device);

}  // namespace memkit
