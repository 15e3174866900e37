// What memkit asks of tensors before it writes anything, and what it says when the answer is no.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>

namespace memkit {

// A dense CPU, CUDA or meta tensor of a floating-point dtype memkit computes in.
void check_float_tensor(std::string_view op, const at::Tensor& x);

// A bias of shape [x.size(dim)], of x's dtype and device.
void check_bias(std::string_view op, const at::Tensor& x, const at::Tensor& bias, int64_t dim);

// "torch.float32 [4, 8]", for messages.
std::string describe(const at::Tensor& x);

// Why x cannot be overwritten without corrupting a value or a gradient; nothing where it can.
std::optional<std::string> inplace_blocker(const at::Tensor& x);

// As above, and besides: any reference to x's memory that its holder might still read. Proves exclusive ownership by
// reference counts, so x must be the caller's own handle and not a copy.
std::optional<std::string> inplace_blocker_strict(const at::Tensor& x);

// Raises where inplace_blocker says why.
void check_inplace_allowed(std::string_view op, const at::Tensor& x);
[[noreturn]] void raise_inplace(std::string_view op, const at::Tensor& x, const std::string& blocker);

// Whether the tensor is an ordinary one: no subclass, no function transform, no tracing mode around.
bool is_plain(const at::Tensor& x);

// Whether nothing but this handle can reach the tensor's memory, so that it may be overwritten.
bool is_sole_owner(const at::Tensor& x);

}  // namespace memkit
