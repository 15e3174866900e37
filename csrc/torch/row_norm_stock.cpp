// LayerNorm and RMSNorm in ATen's own operators: under function transforms, and for derivatives of derivatives.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "row_norm.h"

namespace memkit {

using at::Tensor;

namespace {

// The dimensions beside those that are normalised; none at all would mean all of them to sum().
std::vector<int64_t> others(const RowNorm& norm, const Tensor& x) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < x.dim(); ++d)
    if (d < norm.first(x.dim()) || d >= norm.last(x.dim())) dims.push_back(d);
  return dims;
}

// The last dimensions, of which ATen's norms are.
std::vector<int64_t> last_dims(const RowNorm& norm) {
  std::vector<int64_t> dims(norm.dims);
  for (int64_t d = 0; d < norm.dims; ++d) dims[d] = d - norm.dims;
  return dims;
}

// The sum over a row by what the squares' is divided by.
Tensor over_divisor(const RowNorm& norm, const Tensor& x) {
  const auto dims = normalised_dims(norm);
  if (norm.denominator == Denominator::norm) return x.sum(dims, true);
  if (norm.denominator != Denominator::sample_deviation) return x.mean(dims, true);
  const c10::SymInt columns = c10::multiply_integers(norm.shape(x.sym_sizes()));
  return x.sum(dims, true) / at::Scalar(columns - 1);
}

// RowNormArgs::projection, of gw x_hat.
Tensor projection(const RowNorm& norm, const Tensor& gw_x_hat, const Tensor& rstd) {
  const Tensor along = over_divisor(norm, gw_x_hat);
  if (norm.denominator == Denominator::root) return along;
  const Tensor infinite = at::full({}, std::numeric_limits<double>::infinity(), rstd.options());
  if (norm.denominator == Denominator::norm) return at::where(rstd < 1 / norm.eps, along, along / infinite);
  const Tensor left = 1 - norm.eps * rstd;
  return along / at::where(left > 0, left, infinite);
}

// The statistic of each row, ready to broadcast.
Tensor along_rows(const RowNorm& norm, Tensor statistic) {
  const int64_t at = statistic.dim() - norm.behind;
  for (int64_t d = 0; d < norm.dims; ++d) statistic = statistic.unsqueeze(at);
  return statistic;
}

// rstd of a row whose elements are so far from its mean.
Tensor stock_rstd(const RowNorm& norm, const Tensor& distance) {
  const auto dims = normalised_dims(norm);
  if (norm.denominator == Denominator::root) return (distance.square().mean(dims, true) + norm.eps).rsqrt();
  const Tensor size = over_divisor(norm, distance.square()).sqrt();
  return (norm.denominator == Denominator::norm ? size.clamp_min(norm.eps) : size + norm.eps).reciprocal();
}

}  // namespace

std::vector<int64_t> normalised_dims(const RowNorm& norm) {
  std::vector<int64_t> dims = last_dims(norm);
  for (int64_t& d : dims) d -= norm.behind;
  return dims;
}

Tensor along_columns(const RowNorm& norm, Tensor parameter) {
  for (int64_t d = 0; d < norm.behind; ++d) parameter = parameter.unsqueeze(-1);
  return parameter;
}

Tensor stock_row_norm(const RowNorm& norm, const Tensor& input, const OptionalTensor& weight,
                      const OptionalTensor& bias) {
  const auto computed = compute_dtype(input.scalar_type());
  const auto wide = [&](const OptionalTensor& x) { return x ? OptionalTensor(x->to(computed)) : x; };
  const auto shape = norm.shape(input.sym_sizes());
  const auto own = normalised_dims(norm), last = last_dims(norm);
  if (norm.denominator != Denominator::root) {
    const Tensor x = input.to(computed), distance = norm.centered ? x - x.mean(own, true) : x;
    Tensor y = distance * stock_rstd(norm, distance);
    if (weight) y = y * along_columns(norm, weight->to(computed));
    if (bias) y = y + along_columns(norm, bias->to(computed));
    return y.to(norm.dtype);
  }
  const Tensor x = norm.behind ? input.to(computed).movedim(own, last) : input.to(computed);
  const Tensor y = norm.centered ? at::layer_norm_symint(x, shape, wide(weight), wide(bias), norm.eps)
                                 : at::rms_norm_symint(x, shape, wide(weight), norm.eps);
  return (norm.behind ? y.movedim(last, own) : y).to(norm.dtype);
}

RowNormGradients stock_row_norm_backward(const RowNorm& norm, const Tensor& grad, const OptionalTensor& grad_sum,
                                         const Tensor& x_hat, const OptionalTensor& weight, const Tensor& rstd,
                                         at::ScalarType input_dtype, std::array<bool, 3> wanted) {
  const auto computed = compute_dtype(input_dtype);
  const Tensor g = grad.to(computed);
  const auto dims = normalised_dims(norm), rows = others(norm, x_hat);
  const auto over_rows = [&](const Tensor& x) { return rows.empty() ? x : x.sum(rows); };
  const auto parameter_dtype = weight ? weight->scalar_type() : computed;
  RowNormGradients result;
  if (wanted[0]) {
    const Tensor gw = weight ? g * along_columns(norm, weight->to(computed)) : g;
    const Tensor centered = norm.centered ? gw - gw.mean(dims, true) : gw;
    result.input = rstd * (centered - x_hat * projection(norm, gw * x_hat, rstd));
    if (grad_sum) result.input = result.input + grad_sum->to(computed);
    result.input = result.input.to(input_dtype);
  }
  if (wanted[1]) result.weight = over_rows(g * x_hat).to(parameter_dtype);
  if (wanted[2]) result.bias = over_rows(g).to(parameter_dtype);
  return result;
}

namespace {

// x_hat of a norm's result.
Tensor stock_x_hat(const RowNorm& norm, const Tensor& out, const OptionalTensor& weight, const OptionalTensor& bias) {
  const Tensor scaled = bias ? out - along_columns(norm, bias->to(out.scalar_type())) : out;
  if (!weight) return scaled;
  const Tensor w = along_columns(norm, weight->to(out.scalar_type()));
  return at::where(w == 0, at::zeros({}, out.options()), scaled / w);
}

}  // namespace

Tensor stock_input(const RowNorm& norm, const Tensor& out, const OptionalTensor& weight, const OptionalTensor& bias,
                   const Tensor& rstd, at::ScalarType input_dtype) {
  const Tensor wide = out.to(compute_dtype(input_dtype));
  return (stock_x_hat(norm, wide, weight, bias) / along_rows(norm, rstd)).to(input_dtype);
}

RowNormGradients composed_row_norm_backward(const RowNorm& norm, const Tensor& grad, const OptionalTensor& grad_sum,
                                            const Tensor& input, const OptionalTensor& weight,
                                            std::array<bool, 3> wanted, bool again) {
  const auto input_dtype = input.scalar_type(), computed = compute_dtype(input_dtype);
  const Tensor x = input.to(computed), g = grad.to(computed);
  const bool lacks_weight = !weight && wanted[2];  // its derivative would leave out the bias's
  if (again || lacks_weight || !norm.centered || norm.denominator != Denominator::root || norm.behind) {
    const Tensor distance = norm.centered ? x - x.mean(normalised_dims(norm), true) : x;
    const Tensor rstd = stock_rstd(norm, distance);
    return stock_row_norm_backward(norm, g, grad_sum, distance * rstd, weight, rstd, input_dtype, wanted);
  }
  // PyTorch's own, whose derivative takes the statistics for constants.
  const auto parameter_dtype = weight ? weight->scalar_type() : computed;
  const OptionalTensor w = weight ? OptionalTensor(weight->to(computed)) : weight;
  const auto shape = norm.shape(x.sym_sizes());
  const auto statistics = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return at::native_layer_norm_symint(x, shape, std::nullopt, std::nullopt, norm.eps);
  }();
  // Of the bias nothing but the shape counts.
  const OptionalTensor b = wanted[2] ? OptionalTensor(w->detach()) : std::nullopt;
  auto [by_input, by_weight, by_bias] = at::native_layer_norm_backward_symint(g, x, shape, std::get<1>(statistics),
                                                                              std::get<2>(statistics), w, b, wanted);
  RowNormGradients result;
  if (wanted[0]) result.input = (grad_sum ? by_input + grad_sum->to(computed) : by_input).to(input_dtype);
  if (wanted[1]) result.weight = by_weight.to(parameter_dtype);
  if (wanted[2]) result.bias = by_bias.to(parameter_dtype);
  return result;
}

namespace {

// Outputs and gradients of vmap's batches.
Tensor row_norm_batched(const Tensor& input, int64_t dims, int64_t behind, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, bool centered, at::ScalarType dtype, c10::string_view,
                        c10::string_view denominator) {
  const RowNorm norm{dims, eps, centered, dtype, behind, denominator_of(denominator)};
  return stock_row_norm(norm, input, weight, bias);
}

std::tuple<Tensor, Tensor> add_row_norm_batched(const Tensor& input, const Tensor& residual, int64_t dims,
                                                const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                                bool centered, at::ScalarType dtype, c10::string_view) {
  const Tensor sum = input + residual;
  return {stock_row_norm({dims, eps, centered, dtype}, sum, weight, bias), sum};
}

std::tuple<Tensor, Tensor, Tensor> backward_batched(const Tensor& grad, const OptionalTensor& grad_sum,
                                                    const Tensor& saved, int64_t dims, int64_t behind,
                                                    const OptionalTensor& weight, const OptionalTensor& bias,
                                                    const OptionalTensor& mean, const Tensor& rstd, bool centered,
                                                    bool from_output, at::ScalarType input_dtype,
                                                    std::array<bool, 3> wanted, double eps,
                                                    c10::string_view denominator) {
  const RowNorm norm{dims, eps, centered, grad.scalar_type(), behind, denominator_of(denominator)};
  const auto computed = compute_dtype(input_dtype);
  const Tensor wide = saved.to(computed), scale = along_rows(norm, rstd);
  Tensor x_hat;
  if (from_output) {
    x_hat = stock_x_hat(norm, wide, weight, bias);
  } else {
    x_hat = (mean ? wide - along_rows(norm, *mean) : wide) * scale;
  }
  RowNormGradients g = stock_row_norm_backward(norm, grad, grad_sum, x_hat, weight, scale, input_dtype, wanted);
  const auto or_nothing = [&](const Tensor& x) { return x.defined() ? x : at::empty({0}, grad.options()); };
  return {or_nothing(g.input), or_nothing(g.weight), or_nothing(g.bias)};
}

}  // namespace

TORCH_LIBRARY_IMPL(memkit, FuncTorchBatched, m) {
  m.impl("_row_norm", row_norm_batched);
  m.impl("_add_row_norm", add_row_norm_batched);
  m.impl("_row_norm_backward", backward_batched);
}

}  // namespace memkit
