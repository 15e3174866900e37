// memkit::_activation and its companions below autograd, on CPU, CUDA and meta tensors.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "checks.h"
#include "engine.h"
#include "fresh.h"
#include "layout.h"
#include "spec.h"

namespace memkit {
namespace {

using at::Tensor;
using Params = c10::ArrayRef<double>;
using OptionalTensor = std::optional<Tensor>;

Tensor flat(const Tensor& x, bool biased, int64_t dim) { return is_walkable(x, biased, dim) ? x : x.contiguous(); }

// other in the memory order of `like`.
Tensor in_order_of(const Tensor& like, const Tensor& other) {
  return other.sym_strides() == like.sym_strides() ? other : at::empty_like(like).copy_(other);
}

Bias bias_of(const Tensor& x, const OptionalTensor& bias, int64_t dim) {
  if (!bias) return {};
  const int64_t d = dim < 0 ? dim + x.dim() : dim;
  int64_t inner = 1;
  if (x.is_contiguous())
    for (int64_t i = d + 1; i < x.dim(); ++i) inner *= x.size(i);
  return {bias->const_data_ptr(), x.size(d), inner};
}

OptionalTensor contiguous(const OptionalTensor& bias) { return bias ? OptionalTensor(bias->contiguous()) : bias; }

void forward_into(const Tensor& x, const OptionalTensor& bias, int64_t dim, const ActivationSpec& spec,
                  const Tensor& out, const Tensor* bits) {
  if (x.is_meta()) return;
  const OptionalTensor dense_bias = contiguous(bias);
  ActivationArgs args{spec.act, spec.params, dtype_of(x), x.numel(), bias_of(x, dense_bias, dim)};
  args.x = x.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.bits = bits ? static_cast<uint8_t*>(bits->mutable_data_ptr()) : nullptr;
  run_activation(Pass::forward, args, x.device());
}

c10::SymInt sym_bit_bytes(const Tensor& x) { return (x.sym_numel() + 7) / 8; }

Tensor empty_bits(const Tensor& x) { return at::empty_symint({sym_bit_bytes(x)}, x.options().dtype(at::kByte)); }

Tensor activation(const Tensor& input, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                  c10::string_view save) {
  const ActivationSpec spec(op, params);
  resolve_save(spec, save, false);
  check_arguments(spec.name, input, bias, dim);
  const Tensor x = flat(input, bias.has_value(), dim);
  Tensor out = fresh_like(x);
  forward_into(x, bias, dim, spec, out, nullptr);
  return out;
}

std::tuple<Tensor, Tensor> activation_with_bits(const Tensor& input, const OptionalTensor& bias, int64_t dim,
                                                c10::string_view op, Params params) {
  const ActivationSpec spec(op, params);
  check_arguments(spec.name, input, bias, dim);
  const Tensor x = flat(input, bias.has_value(), dim);
  Tensor out = fresh_like(x);
  Tensor bits = empty_bits(x);
  forward_into(x, bias, dim, spec, out, &bits);
  return {out, bits};
}

void check_overwriting(const ActivationSpec& spec, const Tensor& input, const OptionalTensor& bias, int64_t dim) {
  check_arguments(spec.name, input, bias, dim);
  check_inplace(spec.name, input, memory_blocker(input));
  TORCH_CHECK(!bias || !bias->has_storage() || !bias->is_alias_of(input), spec.name,
              ": expected, in place, a bias in memory of its own, got one that shares the input's storage");
}

// In place, memory that cannot be walked is worked on in a copy and written back.
Tensor& activation_(Tensor& input, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                    c10::string_view save) {
  const ActivationSpec spec(op, params);
  resolve_save(spec, save, true);
  check_overwriting(spec, input, bias, dim);
  const Tensor x = flat(input, bias.has_value(), dim);
  forward_into(x, bias, dim, spec, x, nullptr);
  if (!x.is_same(input)) input.copy_(x);
  return input;
}

Tensor activation_with_bits_(Tensor& input, const OptionalTensor& bias, int64_t dim, c10::string_view op,
                             Params params) {
  const ActivationSpec spec(op, params);
  check_overwriting(spec, input, bias, dim);
  const Tensor x = flat(input, bias.has_value(), dim);
  Tensor bits = empty_bits(x);
  forward_into(x, bias, dim, spec, x, &bits);
  if (!x.is_same(input)) input.copy_(x);
  return bits;
}

// Saved-tensor hooks may hand back anything.
void check_saved(const ActivationSpec& spec, const Tensor& grad, const Tensor& saved, const OptionalTensor& bias,
                 int64_t dim, const OptionalTensor& bits, bool from_output) {
  check_arguments(spec.name, saved, bias, dim);
  TORCH_CHECK(saved.scalar_type() == grad.scalar_type() && saved.device() == grad.device() &&
                  saved.sym_sizes() == grad.sym_sizes(),
              spec.name, ": expected a saved tensor like the gradient, ", describe(grad), " on ", grad.device(),
              ", got ", describe(saved), " on ", saved.device());
  TORCH_CHECK(bits.has_value() == (from_output && spec.has_branch()), spec.name, ": expected bits ",
              bits ? "only " : "", "where the gradient comes from the output of a function with a minimum");
  TORCH_CHECK(!bits || (bits->scalar_type() == at::kByte && bits->device() == saved.device() && bits->is_contiguous() &&
                        bits->sym_numel() == sym_bit_bytes(saved)),
              spec.name, ": expected ", sym_bit_bytes(saved), " contiguous bytes of bits on ", saved.device(), ", got ",
              describe(*bits), " on ", bits->device());
}

void backward_into(const Tensor& grad, const Tensor& saved, const OptionalTensor& bias, int64_t dim,
                   const OptionalTensor& bits, const ActivationSpec& spec, bool from_output, const Tensor& out) {
  if (saved.is_meta()) return;
  const OptionalTensor dense_bias = contiguous(bias);
  const ActParams params = from_output ? spec.params_of_output(saved.scalar_type()) : spec.params;
  ActivationArgs args{spec.act, params, dtype_of(saved), saved.numel(), bias_of(saved, dense_bias, dim)};
  args.x = saved.const_data_ptr();
  args.grad = grad.const_data_ptr();
  args.out = out.mutable_data_ptr();
  if (bits) args.bits = const_cast<uint8_t*>(bits->const_data_ptr<uint8_t>());
  run_activation(from_output ? Pass::backward_from_output : Pass::backward_from_input, args, saved.device());
}

Tensor activation_backward(const Tensor& grad, const Tensor& saved, const OptionalTensor& bias, int64_t dim,
                           const OptionalTensor& bits, c10::string_view op, Params params, bool from_output) {
  const ActivationSpec spec(op, params);
  check_saved(spec, grad, saved, bias, dim, bits, from_output);
  const Tensor s = flat(saved, bias.has_value(), dim);
  Tensor out = fresh_like(s);
  backward_into(in_order_of(s, grad), s, bias, dim, bits, spec, from_output, out);
  return out;
}

Tensor& activation_backward_(Tensor& grad, const Tensor& saved, const OptionalTensor& bias, int64_t dim,
                             const OptionalTensor& bits, c10::string_view op, Params params, bool from_output) {
  const ActivationSpec spec(op, params);
  check_saved(spec, grad, saved, bias, dim, bits, from_output);
  const Tensor s = flat(saved, bias.has_value(), dim);
  const Tensor g = in_order_of(s, grad);
  backward_into(g, s, bias, dim, bits, spec, from_output, g);
  if (!g.is_same(grad)) grad.copy_(g);
  return grad;
}

void register_backend(torch::Library& m) {
  m.impl("_activation", activation);
  m.impl("_activation_", activation_);
  m.impl("_activation_with_bits", activation_with_bits);
  m.impl("_activation_with_bits_", activation_with_bits_);
  m.impl("_activation_backward", activation_backward);
  m.impl("_activation_backward_", activation_backward_);
}

}  // namespace

TORCH_LIBRARY_IMPL(memkit, CPU, m) { register_backend(m); }
TORCH_LIBRARY_IMPL(memkit, CUDA, m) { register_backend(m); }
TORCH_LIBRARY_IMPL(memkit, Meta, m) { register_backend(m); }

}  // namespace memkit
