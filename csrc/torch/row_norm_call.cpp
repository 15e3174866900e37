// layer_norm, rms_norm and their forms with a residual, as Python calls them in eager mode.
#include <torch/csrc/jit/frontend/tracer.h>

#include "checks.h"
#include "eager.h"
#include "norm_call.h"
#include "operators.h"
#include "row_norm_save.h"

namespace memkit {
namespace {

using at::Tensor;
using Shape = std::vector<int64_t>;

constexpr char kLayerNorm[] = "layer_norm", kRmsNorm[] = "rms_norm", kNormalize[] = "normalize";
constexpr char kAddLayerNorm[] = "add_layer_norm", kAddRmsNorm[] = "add_rms_norm";

RowNorm norm_of(bool centered, const Tensor& input, const Shape& shape, std::optional<double> eps,
                std::string_view save, bool overwrites = false, int64_t behind = 0,
                Denominator denominator = Denominator::root) {
  const auto dtype = norm_output_dtype(input);
  // Without an eps: that of the type computed in, as in torch.nn.functional.rms_norm.
  const double smallest =
      dtype == at::kDouble ? std::numeric_limits<double>::epsilon() : double(std::numeric_limits<float>::epsilon());
  const RowNorm norm{int64_t(shape.size()), eps.value_or(smallest), centered, dtype, behind, denominator};
  const auto sizes = input.sizes();
  const int64_t last = norm.last(input.dim());
  TORCH_CHECK_VALUE(
      !shape.empty() && norm.dims <= last && std::equal(shape.begin(), shape.end(), sizes.begin() + last - norm.dims),
      norm.name(), ": expected an input whose ",
      behind ? "dimensions up to " + std::to_string(last - 1) : std::string("last dimensions"), " are ",
      at::IntArrayRef(shape), ", got ", sizes);
  check_save(norm, save, overwrites);
  return norm;
}

// Tensors that a tracer, a mode or a transform follows are worked on by registered operators alone.
bool may_bypass(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias) {
  return is_plain(x) && (!weight || is_plain(*weight)) && (!bias || is_plain(*bias)) &&
         !torch::jit::tracer::isTracing();
}

Tensor run(const RowNorm& norm, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
           std::string_view save) {
  return MEMKIT_CALL("memkit::_row_norm", Tensor(const Tensor&, int64_t, int64_t, const OptionalTensor&,
                                                 const OptionalTensor&, double, bool, at::ScalarType, c10::string_view,
                                                 c10::string_view))(input, norm.dims, norm.behind, weight, bias,
                                                                    norm.eps, norm.centered, norm.dtype, save,
                                                                    name_of(norm.denominator));
}

std::tuple<Tensor, Tensor> run_adding(const RowNorm& norm, const Tensor& input, const Tensor& residual,
                                      const OptionalTensor& weight, const OptionalTensor& bias, std::string_view save) {
  return MEMKIT_CALL("memkit::_add_row_norm",
                     std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, int64_t, const OptionalTensor&,
                                                const OptionalTensor&, double, bool, at::ScalarType, c10::string_view))(
      input, residual, norm.dims, weight, bias, norm.eps, norm.centered, norm.dtype, save);
}

// Raises where the gradient from an output that is to overwrite the input would not be exact.
void check_overwritten(const RowNorm& norm, const Tensor& input, const OptionalTensor& weight,
                       const OptionalTensor& bias, std::string_view save) {
  const bool records = at::GradMode::is_enabled() && (input.requires_grad() || (weight && weight->requires_grad()) ||
                                                      (bias && bias->requires_grad()));
  if (records) resolve_kept(norm, input, weight, bias, save, true);
}

// Over the last dimensions, by the root of the variance and eps.
Tensor usual_norm(bool centered, const Tensor& input, const Shape& shape, const OptionalTensor& weight,
                  const OptionalTensor& bias, std::optional<double> eps, Inplace inplace, std::string_view save) {
  const RowNorm norm = norm_of(centered, input, shape, eps, save, inplace == Inplace::forced);
  const bool bypass = may_bypass(input, weight, bias);
  if (inplace == Inplace::automatic) {
    const bool possible = bypass && norm.dtype == input.scalar_type() &&
                          eager::resolve_inplace(inplace, norm.name(), input) == eager::Way::overwrite &&
                          resolve_kept(norm, input, weight, bias, save, false) == Kept::output;
    inplace = possible ? Inplace::forced : Inplace::never;
  } else if (inplace == Inplace::forced) {
    eager::resolve_inplace(inplace, norm.name(), input);
    check_overwritten(norm, input, weight, bias, save);
  }
  const pybind11::gil_scoped_release no_gil;
  if (inplace == Inplace::never) return run(norm, input, weight, bias, save);
  Tensor self = input;
  if (!bypass) return self.copy_(run(norm, input, weight, bias, "output"));
  return row_norm_(norm, self, weight, bias);
}

// Whether the elements of the last dimension are neighbours, and the others in their order.
bool are_rows(const Tensor& x) {
  if (x.is_contiguous()) return true;
  if (x.numel() == 0 || x.stride(-1) != 1) return false;
  int64_t before = std::numeric_limits<int64_t>::max();
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    if (x.size(dim) == 1) continue;
    if (x.stride(dim) > before) return false;
    before = x.stride(dim);
  }
  return true;
}

// Over the dimensions that end with `dim`. In place by a copy, but for what turns out to be rows.
Tensor row_norm(bool centered, const Tensor& input, const Shape& shape, const OptionalTensor& weight,
                const OptionalTensor& bias, std::optional<double> eps, int64_t dim, std::string_view denominator,
                Inplace inplace, std::string_view save) {
  const std::string_view name = centered ? kLayerNorm : denominator == "norm" ? kNormalize : kRmsNorm;
  check_float_tensor(name, input);
  const auto divided_by = denominator_of(denominator, name);
  const bool usual = divided_by == Denominator::root;
  if (dim == -1 && usual) return usual_norm(centered, input, shape, weight, bias, eps, inplace, save);
  TORCH_CHECK_VALUE(-input.dim() <= dim && dim < input.dim(), name, ": expected dim in [", -input.dim(), ", ",
                    input.dim() - 1, "], got ", dim, " for input ", input.sizes());
  const int64_t behind = input.dim() - 1 - (dim < 0 ? dim + input.dim() : dim);
  const bool forced = inplace == Inplace::forced;
  if (forced) eager::resolve_inplace(inplace, name, input);
  if (behind && shape.size() == 1) {
    const Tensor rows = input.movedim(dim, -1);
    if (are_rows(rows)) {
      const Inplace way = forced ? inplace : Inplace::never;
      const Tensor out = row_norm(centered, rows, shape, weight, bias, eps, -1, denominator, way, save);
      if (forced) return input;
      // Of a contiguous input only dimensions of one element were moved: the strides of a fresh result.
      return input.is_contiguous() ? out.view(input.sizes()) : out.movedim(-1, dim);
    }
  }
  if (!behind && usual) return usual_norm(centered, input, shape, weight, bias, eps, inplace, save);
  const RowNorm norm = norm_of(centered, input, shape, eps, save, forced, behind, divided_by);
  if (forced) check_overwritten(norm, input, weight, bias, save);
  const pybind11::gil_scoped_release no_gil;
  const Tensor out = run(norm, input, weight, bias, forced && save == "auto" ? "output" : save);
  return forced ? Tensor(input).copy_(out) : out;
}

std::tuple<Tensor, Tensor> add_row_norm(bool centered, Tensor input, Tensor residual, const Shape& shape,
                                        const OptionalTensor& weight, const OptionalTensor& bias,
                                        std::optional<double> eps, bool inplace, std::string_view save) {
  // The dtype that torch gives to input + residual.
  const auto dtype = at::promote_types(input.scalar_type(), residual.scalar_type());
  check_float_tensor(centered ? kLayerNorm : kRmsNorm, input);
  const bool bypass = may_bypass(input, weight, bias) && is_plain(residual);
  if (input.scalar_type() != dtype) input = input.to(dtype);
  const RowNorm norm = norm_of(centered, input, shape, eps, save);
  const pybind11::gil_scoped_release no_gil;
  if (!inplace) return run_adding(norm, input, residual.to(dtype), weight, bias, save);
  if (bypass) return add_row_norm_(norm, input, residual, weight, bias, save);
  auto [normed, sum] = run_adding(norm, input, residual.to(dtype), weight, bias, save);
  residual.copy_(sum);
  return {normed, residual};
}

// Whether to write the sum into the residual: `residual` is the caller's own handle.
bool overwrites(Inplace inplace, std::string_view op, const Tensor& input, const Tensor& residual,
                const OptionalTensor& weight, const OptionalTensor& bias) {
  if (inplace == Inplace::never) return false;
  check_float_tensor(op, residual);
  const bool fits = at::promote_types(input.scalar_type(), residual.scalar_type()) == residual.scalar_type();
  if (inplace == Inplace::automatic && (!fits || !may_bypass(input, weight, bias) || !is_plain(residual))) return false;
  TORCH_CHECK_TYPE(fits, op, ": expected, in place, a residual that holds the sum, got ", describe(input), " and ",
                   describe(residual));
  return eager::resolve_inplace(inplace, op, residual) == eager::Way::overwrite;
}

Tensor layer_norm(const Tensor& input, Shape shape, OptionalTensor weight, OptionalTensor bias, double eps, int64_t dim,
                  std::string_view denominator, Inplace inplace, std::string_view save) {
  return row_norm(true, input, shape, weight, bias, eps, dim, denominator, inplace, save);
}
Tensor rms_norm(const Tensor& input, Shape shape, OptionalTensor weight, std::optional<double> eps, int64_t dim,
                std::string_view denominator, Inplace inplace, std::string_view save) {
  return row_norm(false, input, shape, weight, std::nullopt, eps, dim, denominator, inplace, save);
}
std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual, Shape shape,
                                          OptionalTensor weight, OptionalTensor bias, double eps, Inplace inplace,
                                          std::string_view save) {
  const bool overwrite = overwrites(inplace, kAddLayerNorm, input, residual, weight, bias);
  return add_row_norm(true, input, residual, shape, weight, bias, eps, overwrite, save);
}
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual, Shape shape, OptionalTensor weight,
                                        std::optional<double> eps, Inplace inplace, std::string_view save) {
  const bool overwrite = overwrites(inplace, kAddRmsNorm, input, residual, weight, std::nullopt);
  return add_row_norm(false, input, residual, shape, weight, std::nullopt, eps, overwrite, save);
}

}  // namespace

void bind_norms(pybind11::module_& m) {
  eager::bind<layer_norm, kLayerNorm>(m);
  eager::bind<rms_norm, kRmsNorm>(m);
  eager::bind<add_layer_norm, kAddLayerNorm>(m);
  eager::bind<add_rms_norm, kAddRmsNorm>(m);
  m.def("follow_weight", &follow_weight);
  m.def("norm_saves", [](const Tensor& x) { return std::string(row_norm_saves(x)); });
}

}  // namespace memkit
