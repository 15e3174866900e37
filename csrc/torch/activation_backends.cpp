// memkit::_activation and its companions below autograd, on CPU, CUDA and meta tensors.
#include <ATen/ATen.h>
#include <ATen/CPUFunctions.h>
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <cmath>

#include "../cpu/activation.h"
#include "checks.h"
#include "engine.h"
#include "fresh.h"
#include "layout.h"
#include "optional.h"
#include "spec.h"

namespace memkit {
namespace {

using at::Tensor;
using Params = c10::ArrayRef<double>;

Tensor flat(const Tensor& x, bool biased, int64_t dim) { return is_walkable(x, biased, dim) ? x : x.contiguous(); }

// other in the memory order of `like`.
Tensor in_order_of(const Tensor& like, const Tensor& other) {
  return same_order(like, other) ? other : at::empty_like(like).copy_(other);
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

// Seeds and residuals are the caller's; they are looked at before anything is written.
Drop drop_of(const ActivationSpec& spec, const Tensor& x, const OptionalTensor& seed, Params drop) {
  if (!seed) return {};
  TORCH_CHECK_VALUE(drop.size() == 4, spec.name, ": expected [p, scale, kept, dropped] beside a seed, got ",
                    drop.size(), " numbers");
  TORCH_CHECK_VALUE(drop[0] >= 0 && drop[0] <= 1, "dropout: expected a probability in [0, 1], got ", drop[0]);
  TORCH_CHECK(
      seed->scalar_type() == at::kLong && (seed->is_cpu() || seed->device() == x.device()) && seed->sym_numel() == 1,
      "dropout: expected as seed one int64 on ", x.device(), " or the CPU, got ", describe(*seed), " on ",
      seed->device());
  const int64_t* at = x.is_meta() ? nullptr : seed->const_data_ptr<int64_t>();
  const bool known = at && seed->is_cpu();
  return {known ? *at : 0, known ? nullptr : at, drop[0], drop[1], drop[2], drop[3]};
}

void check_residual(const Tensor& x, const OptionalTensor& residual) {
  if (!residual) return;
  check_float_tensor("dropout_add", *residual);
  TORCH_CHECK_VALUE(residual->sym_sizes() == x.sym_sizes(), "dropout_add: expected a residual of the input's shape ",
                    x.sym_sizes(), ", got ", residual->sym_sizes());
  TORCH_CHECK_TYPE(residual->scalar_type() == x.scalar_type(),
                   "dropout_add: expected input and residual of one dtype, got ", describe(x), " and ",
                   describe(*residual));
  TORCH_CHECK(residual->device() == x.device(), "dropout_add: expected input and residual on one device, got ",
              x.device(), " and ", residual->device());
}

// The tanh that PyTorch has from a vendor's library on the CPU looks its polynomials up in tables: 0.6 of the formula's time
// where a call's own costs do not count.
bool is_quicker_in_torch(const Tensor& x, Act act) {
  return act == Act::tanh && x.is_cpu() && x.numel() >= 4096 &&
         (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble) && !cpu::has_own_tanh(dtype_of(x));
}

void forward_into(const Tensor& x, const OptionalTensor& bias, int64_t dim, const ActivationSpec& spec,
                  const OptionalTensor& residual, const Drop& drop, const Tensor& out, const Tensor* bits) {
  if (x.is_meta()) return;
  if (!bias && !residual && !drop.on && is_quicker_in_torch(x, spec.act)) {
    Tensor result = out;
    at::cpu::tanh_out(result, x);
    return;
  }
  const OptionalTensor dense_bias = contiguous(bias);
  const OptionalTensor ordered = residual ? OptionalTensor(in_order_of(x, *residual)) : residual;
  ActivationArgs args{spec.act, spec.params, dtype_of(x), x.numel(), bias_of(x, dense_bias, dim)};
  args.x = x.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.bits = bits ? static_cast<uint8_t*>(bits->mutable_data_ptr()) : nullptr;
  args.drop = drop;
  args.residual = ordered ? ordered->const_data_ptr() : nullptr;
  run_activation(Pass::forward, args, x.device());
}

c10::SymInt sym_bit_bytes(const Tensor& x) { return (x.sym_numel() + 7) / 8; }

Tensor empty_bits(const Tensor& x) {
  if (x.is_cpu()) return at::detail::empty_cpu({(x.numel() + 7) / 8}, at::kByte);
  return at::empty_symint({sym_bit_bytes(x)}, x.options().dtype(at::kByte));
}

// Of PyTorch's functions hardtanh alone (and relu6) hands on x's strides along one element, which a sum before it hands on too.
Tensor result_memory(const ActivationSpec& spec, const Tensor& x, bool fused) {
  return spec.act == Act::hardtanh && !fused ? fresh_strided_like(x, x.scalar_type()) : fresh_like(x);
}

Tensor activation(const Tensor& input, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                  c10::string_view save, const OptionalTensor& residual, const OptionalTensor& seed, Params drop) {
  const ActivationSpec spec(op, params);
  resolve_save(spec, save, false, seed.has_value());
  check_arguments(spec.name, input, bias, dim);
  check_residual(input, residual);
  const Drop dropout = drop_of(spec, input, seed, drop);
  const Tensor x = flat(input, bias.has_value(), dim);
  Tensor out = result_memory(spec, x, residual || seed);
  forward_into(x, bias, dim, spec, residual, dropout, out, nullptr);
  return out;
}

std::tuple<Tensor, Tensor> activation_with_bits(const Tensor& input, const OptionalTensor& bias, int64_t dim,
                                                c10::string_view op, Params params, const OptionalTensor& seed,
                                                Params drop) {
  const ActivationSpec spec(op, params);
  check_arguments(spec.name, input, bias, dim);
  const Drop dropout = drop_of(spec, input, seed, drop);
  const Tensor x = flat(input, bias.has_value(), dim);
  Tensor out = result_memory(spec, x, seed.has_value());
  Tensor bits = empty_bits(x);
  forward_into(x, bias, dim, spec, std::nullopt, dropout, out, &bits);
  return {out, bits};
}

void check_overwriting(const ActivationSpec& spec, const Tensor& input, const OptionalTensor& bias, int64_t dim,
                       const OptionalTensor& residual = {}) {
  check_arguments(spec.name, input, bias, dim);
  check_residual(input, residual);
  check_inplace(spec.name, input, memory_blocker(input));
  const auto own = [&](const OptionalTensor& other, const char* what) {
    TORCH_CHECK(!other || !other->has_storage() || !other->is_alias_of(input), spec.name, ": expected, in place, a ",
                what, " in memory of its own, got one that shares the input's storage");
  };
  own(bias, "bias");
  own(residual, "residual");
}

// In place, memory that cannot be walked is worked on in a copy and written back.
Tensor& activation_(Tensor& input, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                    c10::string_view save, const OptionalTensor& residual, const OptionalTensor& seed, Params drop) {
  const ActivationSpec spec(op, params);
  resolve_save(spec, save, true, seed.has_value());
  check_overwriting(spec, input, bias, dim, residual);
  const Drop dropout = drop_of(spec, input, seed, drop);
  const Tensor x = flat(input, bias.has_value(), dim);
  forward_into(x, bias, dim, spec, residual, dropout, x, nullptr);
  if (!x.is_same(input)) input.copy_(x);
  return input;
}

Tensor activation_with_bits_(Tensor& input, const OptionalTensor& bias, int64_t dim, c10::string_view op, Params params,
                             const OptionalTensor& seed, Params drop) {
  const ActivationSpec spec(op, params);
  check_overwriting(spec, input, bias, dim);
  const Drop dropout = drop_of(spec, input, seed, drop);
  const Tensor x = flat(input, bias.has_value(), dim);
  Tensor bits = empty_bits(x);
  forward_into(x, bias, dim, spec, std::nullopt, dropout, x, &bits);
  if (!x.is_same(input)) input.copy_(x);
  return bits;
}

// Saved-tensor hooks may hand back anything.
void check_saved(const ActivationSpec& spec, const Tensor& grad, const OptionalTensor& kept, const OptionalTensor& bias,
                 int64_t dim, const OptionalTensor& bits, bool from_output) {
  TORCH_CHECK(kept || (spec.has_two_slopes() && !bias), spec.name, ": expected a saved tensor, got none");
  const Tensor& saved = kept ? *kept : grad;
  check_arguments(spec.name, saved, bias, dim);
  TORCH_CHECK(saved.scalar_type() == grad.scalar_type() && saved.device() == grad.device() &&
                  saved.sym_sizes() == grad.sym_sizes(),
              spec.name, ": expected a saved tensor like the gradient, ", describe(grad), " on ", grad.device(),
              ", got ", describe(saved), " on ", saved.device());
  TORCH_CHECK(bits.has_value() == (!kept || (from_output && spec.has_branch())), spec.name, ": expected bits ",
              bits ? "only " : "", "where no tensor is saved, or the output of a function with a minimum");
  TORCH_CHECK(!bits || (bits->scalar_type() == at::kByte && bits->device() == saved.device() && bits->is_contiguous() &&
                        bits->sym_numel() == sym_bit_bytes(saved)),
              spec.name, ": expected ", sym_bit_bytes(saved), " contiguous bytes of bits on ", saved.device(), ", got ",
              describe(*bits), " on ", bits->device());
}

void backward_into(const Tensor& grad, const OptionalTensor& saved, const OptionalTensor& bias, int64_t dim,
                   const OptionalTensor& bits, const ActivationSpec& spec, bool from_output, const Drop& drop,
                   const Tensor& out) {
  if (grad.is_meta()) return;
  const OptionalTensor dense_bias = contiguous(bias);
  const ActParams params = from_output ? spec.params_of_output(grad.scalar_type()) : spec.params;
  ActivationArgs args{spec.act, params, dtype_of(grad), grad.numel(), bias_of(grad, dense_bias, dim)};
  if (saved) args.x = saved->const_data_ptr();
  args.grad = grad.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.drop = drop;
  if (bits) args.bits = const_cast<uint8_t*>(bits->const_data_ptr<uint8_t>());
  const Pass pass = !saved        ? Pass::backward_from_bits
                    : from_output ? Pass::backward_from_output
                                  : Pass::backward_from_input;
  run_activation(pass, args, grad.device());
}

// What was saved and the gradient, in one memory order: that of the saved tensor, without one the gradient's own.
std::pair<OptionalTensor, Tensor> in_one_order(const OptionalTensor& saved, const Tensor& grad, bool biased,
                                               int64_t dim) {
  if (!saved) return {saved, flat(grad, false, dim)};
  const Tensor s = flat(*saved, biased, dim);
  return {s, in_order_of(s, grad)};
}

Tensor activation_backward(const Tensor& grad, const OptionalTensor& saved, const OptionalTensor& bias, int64_t dim,
                           const OptionalTensor& bits, c10::string_view op, Params params, bool from_output,
                           const OptionalTensor& seed, Params drop) {
  const ActivationSpec spec(op, params);
  check_saved(spec, grad, saved, bias, dim, bits, from_output);
  const Drop dropout = drop_of(spec, grad, seed, drop);
  const auto [s, g] = in_one_order(saved, grad, bias.has_value(), dim);
  Tensor out = g.is_same(grad) ? fresh_like(g) : g;
  backward_into(g, s, bias, dim, bits, spec, from_output, dropout, out);
  return out;
}

Tensor& activation_backward_(Tensor& grad, const OptionalTensor& saved, const OptionalTensor& bias, int64_t dim,
                             const OptionalTensor& bits, c10::string_view op, Params params, bool from_output,
                             const OptionalTensor& seed, Params drop) {
  const ActivationSpec spec(op, params);
  check_saved(spec, grad, saved, bias, dim, bits, from_output);
  const Drop dropout = drop_of(spec, grad, seed, drop);
  const auto [s, g] = in_one_order(saved, grad, bias.has_value(), dim);
  backward_into(g, s, bias, dim, bits, spec, from_output, dropout, g);
  if (!g.is_same(grad)) grad.copy_(g);
  return grad;
}

Tensor dropout_mask(c10::SymIntArrayRef size, const Tensor& seed, Params drop, at::ScalarType dtype) {
  const ActivationSpec identity("identity", {});
  Tensor mask = at::ones_symint(size, seed.options().dtype(dtype));
  Drop linear = drop_of(identity, mask, seed, drop);
  linear.kept = linear.dropped = 0;
  forward_into(mask, std::nullopt, -1, identity, std::nullopt, linear, mask, nullptr);
  return mask;
}

void register_activation(torch::Library& m) {
  m.impl("_activation", activation);
  m.impl("_activation_", activation_);
  m.impl("_activation_with_bits", activation_with_bits);
  m.impl("_activation_with_bits_", activation_with_bits_);
  m.impl("_activation_backward", activation_backward);
  m.impl("_activation_backward_", activation_backward_);
  m.impl("_dropout_mask", dropout_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(memkit, CPU, m) { register_activation(m); }
TORCH_LIBRARY_IMPL(memkit, CUDA, m) { register_activation(m); }
TORCH_LIBRARY_IMPL(memkit, Meta, m) { register_activation(m); }

}  // namespace memkit
