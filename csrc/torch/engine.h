// Runs a kernel of memkit's on the device its tensors live on.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "../formulas/glu.h"
#include "../formulas/pooling.h"
#include "../formulas/rotary.h"
#include "../formulas/softmax.h"

namespace memkit {

// Below this many elements of a cheap activation one thread is faster than waking a second (ATen's own grain size).
constexpr int64_t kGrain = 32768;

// How many units it takes for another thread to be worth waking, where each costs what so many such elements do.
inline int64_t grain_of(int64_t cost) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cost)); }
// What a row of so many elements costs, where an element costs `cost` of a cheap activation's: its start and end cost
// what some 64 elements do.
inline int64_t row_cost(int64_t columns, int64_t cost) { return (columns + 64) * cost; }

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
