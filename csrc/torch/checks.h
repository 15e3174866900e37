// What memkit asks of tensors before it writes anything, and what it says when the answer is no.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>

namespace memkit {

// A dense CPU, CUDA or meta tensor of a floating-point dtype memkit computes in.
void check_float_tensor(std::string_view op, const at::Tensor& x);

// x as above, and where there is one, the bias.
void check_arguments(std::string_view op, const at::Tensor& x, const std::optional<at::Tensor>& bias, int64_t dim);

// A bias of shape [x.size(dim)], of x's dtype and device.
void check_bias(std::string_view op, const at::Tensor& x, const at::Tensor& bias, int64_t dim);

// "torch.float32 [4, 8]", for messages.
std::string describe(const at::Tensor& x);

// Why x's memory cannot be overwritten at all, whatever autograd says; nothing where it can.
std::optional<std::string> memory_blocker(const at::Tensor& x);

// As above, and besides: why overwriting x would corrupt a gradient.
std::optional<std::string> inplace_blocker(const at::Tensor& x);

// As above, and besides: any reference to x's memory that its holder might still read. Proves exclusive ownership by
// reference counts, so x must be the caller's own handle and not a copy. idle_base_handles: how many handles of x's base,
// where x is a view, are known to be out of everyone's reach.
std::optional<std::string> inplace_blocker_strict(const at::Tensor& x, size_t idle_base_handles);

// An operation that keeps x itself (not a view of it) for its backward, told by reference counts: views of x hold both x
// and its memory, other holders of x alone are saved tensors. Backward would raise; this says so at once. x must be the
// caller's own handle and not a copy.
std::optional<std::string> saver_blocker(const at::Tensor& x);

// Raises where a blocker says why.
void check_inplace(std::string_view op, const at::Tensor& x, const std::optional<std::string>& blocker);

// Whether the tensor is an ordinary one: no subclass, no function transform, no tracing mode around.
bool is_plain(const at::Tensor& x);

// Whether nothing but this handle can reach the tensor's memory, so that it may be overwritten. idle_handles: how many
// others are known to be out of everyone's reach.
bool is_sole_owner(const at::Tensor& x, size_t idle_handles = 0);

}  // namespace memkit
