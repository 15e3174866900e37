// LayerNorm and RMSNorm below autograd, on CPU, CUDA and meta tensors.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "autocast.h"
#include "checks.h"
#include "engine.h"
#include "fresh.h"
#include "norm_engine.h"

namespace memkit {
namespace {

using at::Tensor;

c10::SymInt columns_of(const RowNorm& norm, const Tensor& x) {
  return c10::multiply_integers(norm.shape(x.sym_sizes()));
}

// One statistic a row.
Tensor empty_statistic(const RowNorm& norm, const Tensor& x) {
  std::vector<c10::SymInt> sizes = x.sym_sizes().vec();
  sizes.erase(sizes.begin() + norm.first(x.dim()), sizes.begin() + norm.last(x.dim()));
  return at::empty_symint(sizes, x.options().dtype(compute_dtype(x.scalar_type())));
}

// Weight or bias as the kernels read it: contiguous, float64 where that is computed in.
OptionalTensor dense(const OptionalTensor& parameter, at::ScalarType computed) {
  if (!parameter) return parameter;
  const bool fits = (computed == at::kDouble) == (parameter->scalar_type() == at::kDouble);
  return fits ? parameter->contiguous() : parameter->to(computed).contiguous();
}

void describe_call(RowNormArgs& args, const RowNorm& norm, const Tensor& x, at::ScalarType input_dtype,
                   const OptionalTensor& weight, const OptionalTensor& bias) {
  args.columns = columns_of(norm, x).expect_int();
  args.rows = args.columns ? x.numel() / args.columns : 0;
  args.inner = c10::multiply_integers(x.sizes().slice(norm.last(x.dim())));
  args.centered = norm.centered;
  args.eps = norm.eps;
  args.denominator = norm.denominator;
  args.dtype = dtype_of(input_dtype);
  args.out_dtype = dtype_of(norm.dtype);
  args.weight_dtype = weight ? dtype_of(*weight) : bias ? dtype_of(*bias) : Dtype::float32;
  args.weight = weight ? weight->const_data_ptr() : nullptr;
  args.bias = bias ? bias->const_data_ptr() : nullptr;
}

void check_parameter(const RowNorm& norm, const char* what, const Tensor& input, const Tensor& parameter) {
  check_float_tensor(norm.name(), parameter);
  const auto shape = norm.shape(input.sym_sizes());
  TORCH_CHECK_VALUE(parameter.sym_sizes() == shape, norm.name(), ": expected a ", what, " of shape ", shape, ", got ",
                    parameter.sym_sizes());
  TORCH_CHECK(parameter.device() == input.device(), norm.name(), ": expected input and ", what, " on one device, got ",
              input.device(), " and ", parameter.device());
}

}  // namespace

at::ScalarType norm_output_dtype(const Tensor& input) {
  const auto dtype = input.scalar_type();
  return dtype != at::kDouble && is_autocast(input) ? at::autocast::get_autocast_dtype(input.device().type()) : dtype;
}

namespace {

constexpr std::string_view kDenominators[] = {"root", "deviation", "sample_deviation", "norm"};

}  // namespace

Denominator denominator_of(std::string_view name, std::string_view op) {
  const auto* const found = std::find(std::begin(kDenominators), std::end(kDenominators), name);
  TORCH_CHECK_VALUE(found != std::end(kDenominators), op,
                    ": expected denominator 'root', 'deviation', 'sample_deviation' or 'norm', got '", name, "'");
  return Denominator(found - std::begin(kDenominators));
}

std::string_view name_of(Denominator denominator) { return kDenominators[int(denominator)]; }

void check_row_norm(const RowNorm& norm, const Tensor& input, const OptionalTensor& residual,
                    const OptionalTensor& weight, const OptionalTensor& bias) {
  check_float_tensor(norm.name(), input);
  const int64_t most = input.dim() - norm.behind;
  TORCH_CHECK_VALUE(norm.behind >= 0 && norm.dims >= 1 && norm.dims <= most, norm.name(),
                    ": expected a normalized_shape of 1 to ", most, " dimensions for input ", input.sym_sizes(),
                    ", got ", norm.dims);
  // Behind it a bias is large beside what is left: the output would say little of the input.
  TORCH_CHECK_VALUE(
      !norm.centered || norm.denominator != Denominator::norm, norm.name(),
      ": expected denominator 'root', 'deviation' or 'sample_deviation', got 'norm', which is rms_norm's");
  TORCH_CHECK_VALUE(norm.denominator != Denominator::norm || norm.eps >= 0, norm.name(),
                    ": expected an eps of at least 0 beside denominator 'norm', got ", norm.eps);
  TORCH_CHECK_VALUE(!norm.behind || !residual, norm.name(), ": expected the last dimensions with a residual, got ",
                    norm.behind, " behind them");
  TORCH_CHECK((norm.dtype == at::kDouble) == (input.scalar_type() == at::kDouble), norm.name(),
              ": expected an output in float64 for float64 and for nothing else, got ", norm.dtype, " for ",
              describe(input));
  if (residual) {
    check_float_tensor(norm.name(), *residual);
    TORCH_CHECK_VALUE(residual->sym_sizes() == input.sym_sizes(), norm.name(),
                      ": expected input and residual of one shape, got ", input.sym_sizes(), " and ",
                      residual->sym_sizes());
    TORCH_CHECK_TYPE(residual->scalar_type() == input.scalar_type(), norm.name(),
                     ": expected input and residual of one dtype, got ", describe(input), " and ", describe(*residual));
    TORCH_CHECK(residual->device() == input.device(), norm.name(), ": expected input and residual on one device, got ",
                input.device(), " and ", residual->device());
  }
  TORCH_CHECK(norm.centered || !bias, norm.name(), ": expected no bias, got ", bias ? describe(*bias) : "");
  if (weight) check_parameter(norm, "weight", input, *weight);
  if (bias) check_parameter(norm, "bias", input, *bias);
  TORCH_CHECK_TYPE(!weight || !bias || weight->scalar_type() == bias->scalar_type(), norm.name(),
                   ": expected weight and bias of one dtype, got ", describe(*weight), " and ", describe(*bias));
}

namespace {

// On CUDA rows whose elements lie apart are laid out next to each other first.
bool needs_rows(const RowNorm& norm, const Tensor& x) { return norm.behind && x.is_cuda(); }

RowNorm over_last(RowNorm norm) {
  norm.behind = 0;
  return norm;
}

Tensor as_rows(const RowNorm& norm, const Tensor& x) {
  return x.movedim(normalised_dims(norm), normalised_dims(over_last(norm)));
}

Tensor from_rows(const RowNorm& norm, const Tensor& x) {
  return x.movedim(normalised_dims(over_last(norm)), normalised_dims(norm)).contiguous();
}

}  // namespace

RowNormed row_norm_forward(const RowNorm& norm, const Tensor& input, const OptionalTensor& residual,
                           const OptionalTensor& weight, const OptionalTensor& bias, Statistics statistics,
                           Tensor into) {
  check_row_norm(norm, input, residual, weight, bias);
  if (needs_rows(norm, input)) {
    RowNormed made = row_norm_forward(over_last(norm), as_rows(norm, input), std::nullopt, weight, bias, statistics);
    made.out = from_rows(norm, made.out);
    return made;
  }
  const Tensor x = input.contiguous();
  const OptionalTensor other = residual ? OptionalTensor(residual->contiguous()) : residual;
  const auto computed = compute_dtype(x.scalar_type());
  const OptionalTensor w = dense(weight, computed), b = dense(bias, computed);
  RowNormed result;
  if (residual) result.sum = into.defined() ? into : fresh_like(x);
  result.out = into.defined() && !residual ? into : fresh_like(x, norm.dtype);
  if (norm.centered && statistics == Statistics::mean_and_rstd) result.mean = empty_statistic(norm, x);
  if (statistics != Statistics::none) result.rstd = empty_statistic(norm, x);
  if (x.is_meta()) return result;
  RowNormArgs args;
  describe_call(args, norm, x, x.scalar_type(), w, b);
  args.x = x.const_data_ptr();
  args.y = result.out.mutable_data_ptr();
  if (residual) {
    args.residual = other->const_data_ptr();
    args.sum = result.sum.mutable_data_ptr();
  }
  args.mean = result.mean.defined() ? result.mean.mutable_data_ptr() : nullptr;
  args.rstd = result.rstd.defined() ? result.rstd.mutable_data_ptr() : nullptr;
  run_row_norm_forward(args, x.device());
  return result;
}

RowNormGradients row_norm_backward(const RowNorm& norm, const Tensor& grad, const OptionalTensor& grad_sum,
                                   const Tensor& saved, const OptionalTensor& weight, const OptionalTensor& bias,
                                   const Tensor& mean, const Tensor& rstd, bool from_output, at::ScalarType input_dtype,
                                   std::array<bool, 3> wanted, Tensor into) {
  // Saved-tensor hooks may hand back anything.
  TORCH_CHECK(saved.sym_sizes() == grad.sym_sizes() && saved.device() == grad.device() &&
                  saved.scalar_type() == (from_output ? norm.dtype : input_dtype) && grad.scalar_type() == norm.dtype,
              norm.name(), ": expected a saved tensor like the gradient, ", describe(grad), " on ", grad.device(),
              ", got ", describe(saved), " on ", saved.device());
  if (needs_rows(norm, grad)) {
    RowNormGradients made = row_norm_backward(over_last(norm), as_rows(norm, grad), std::nullopt, as_rows(norm, saved),
                                              weight, bias, mean, rstd, from_output, input_dtype, wanted);
    if (wanted[0]) made.input = from_rows(norm, made.input);
    return made;
  }
  const Tensor g = grad.contiguous(), s = saved.contiguous();
  const OptionalTensor more = grad_sum ? OptionalTensor(grad_sum->contiguous()) : grad_sum;
  const auto computed = compute_dtype(input_dtype);
  const OptionalTensor w = dense(weight, computed), b = dense(bias, computed);
  RowNormGradients result;
  TORCH_CHECK((!wanted[1] || w) && (!wanted[2] || b), norm.name(), ": expected parameters whose gradients are wanted");
  if (wanted[0]) result.input = into.defined() ? into : fresh_like(g, input_dtype);
  if (wanted[1]) result.weight = at::empty_like(*w, at::MemoryFormat::Contiguous);
  if (wanted[2]) result.bias = at::empty_like(*b, at::MemoryFormat::Contiguous);
  const auto as_parameters = [&] {
    if (wanted[1]) result.weight = result.weight.to(weight->scalar_type());
    if (wanted[2]) result.bias = result.bias.to(bias->scalar_type());
    return result;
  };
  if (g.is_meta()) return as_parameters();
  RowNormArgs args;
  describe_call(args, norm, g, input_dtype, w, b);
  const auto fits = [&](const Tensor& x, int64_t numel, at::ScalarType dtype) {
    return !x.defined() ||
           (x.is_contiguous() && x.numel() == numel && x.scalar_type() == dtype && x.device() == g.device());
  };
  TORCH_CHECK(rstd.numel() * args.columns == g.numel() && fits(rstd, rstd.numel(), computed) &&
                  fits(mean, rstd.numel(), computed),
              norm.name(), ": expected one statistic a row, got ", describe(rstd), " for ", describe(g));
  const Tensor none;
  const at::ScalarType parameters = w ? w->scalar_type() : b ? b->scalar_type() : computed;
  TORCH_CHECK(fits(w.value_or(none), args.columns, parameters) && fits(b.value_or(none), args.columns, parameters) &&
                  fits(more.value_or(none), g.numel(), input_dtype),
              norm.name(), ": expected parameters of ", args.columns, " elements and gradients like ", describe(g));
  args.from_output = from_output;
  args.mean = mean.defined() ? mean.data_ptr() : nullptr;
  args.rstd = rstd.data_ptr();
  args.saved = s.const_data_ptr();
  args.grad = g.const_data_ptr();
  args.grad_sum = more ? more->const_data_ptr() : nullptr;
  args.grad_input = wanted[0] ? result.input.mutable_data_ptr() : nullptr;
  run_row_norm_backward(args, g, result.weight, result.bias);
  return as_parameters();
}

namespace {

// Operators return tensors: where there is nothing, one without elements.
Tensor or_nothing(const Tensor& x, const Tensor& like) { return x.defined() ? x : at::empty({0}, like.options()); }

std::tuple<Tensor, Tensor, Tensor, Tensor> row_norm_forward_op(const Tensor& input, const OptionalTensor& residual,
                                                               int64_t dims, int64_t behind,
                                                               const OptionalTensor& weight, const OptionalTensor& bias,
                                                               double eps, bool centered, at::ScalarType dtype,
                                                               c10::string_view denominator) {
  const RowNorm norm{dims, eps, centered, dtype, behind, denominator_of(denominator)};
  RowNormed r = row_norm_forward(norm, input, residual, weight, bias, Statistics::mean_and_rstd);
  return {r.out, or_nothing(r.sum, input), or_nothing(r.mean, r.rstd), r.rstd};
}

std::tuple<Tensor, Tensor, Tensor> row_norm_backward_op(const Tensor& grad, const OptionalTensor& grad_sum,
                                                        const Tensor& saved, int64_t dims, int64_t behind,
                                                        const OptionalTensor& weight, const OptionalTensor& bias,
                                                        const OptionalTensor& mean, const Tensor& rstd, bool centered,
                                                        bool from_output, at::ScalarType input_dtype,
                                                        std::array<bool, 3> wanted, double eps,
                                                        c10::string_view denominator) {
  const RowNorm norm{dims, eps, centered, grad.scalar_type(), behind, denominator_of(denominator)};
  RowNormGradients r = row_norm_backward(norm, grad, grad_sum, saved, weight, bias, mean.value_or(Tensor()), rstd,
                                         from_output, input_dtype, wanted);
  return {or_nothing(r.input, grad), or_nothing(r.weight, grad), or_nothing(r.bias, grad)};
}

Tensor norm_op(const Tensor& input, int64_t dims, int64_t behind, const OptionalTensor& weight,
               const OptionalTensor& bias, double eps, bool centered, at::ScalarType dtype, c10::string_view,
               c10::string_view denominator) {
  const RowNorm norm{dims, eps, centered, dtype, behind, denominator_of(denominator)};
  return row_norm_forward(norm, input, std::nullopt, weight, bias, Statistics::none).out;
}

std::tuple<Tensor, Tensor> add_norm_op(const Tensor& input, const Tensor& residual, int64_t dims,
                                       const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                       bool centered, at::ScalarType dtype, c10::string_view) {
  RowNormed r = row_norm_forward({dims, eps, centered, dtype}, input, residual, weight, bias, Statistics::none);
  return {r.out, r.sum};
}

void register_row_norms(torch::Library& m) {
  m.impl("_row_norm", norm_op);
  m.impl("_add_row_norm", add_norm_op);
  m.impl("_row_norm_forward", row_norm_forward_op);
  m.impl("_row_norm_backward", row_norm_backward_op);
}

}  // namespace

TORCH_LIBRARY_IMPL(memkit, CPU, m) { register_row_norms(m); }
TORCH_LIBRARY_IMPL(memkit, CUDA, m) { register_row_norms(m); }
TORCH_LIBRARY_IMPL(memkit, Meta, m) { register_row_norms(m); }

}  // namespace memkit
