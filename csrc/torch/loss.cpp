#include "loss.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <numeric>

#include "../cpu/loss.h"
#include "../cuda/loss.h"
#include "autocast.h"
#include "checks.h"
#include "engine.h"
#include "stream.h"

namespace memkit {

using at::Tensor;

namespace {

// Below this many logits one thread is faster than waking a second.
constexpr int64_t kLossGrain = 16384;

// The class index that is none, if any.
std::optional<int64_t> stray_index(const Tensor& index, int64_t classes, int64_t ignored) {
  const int64_t* t = index.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < index.numel(); ++i)
    if ((t[i] < 0 || t[i] >= classes) && t[i] != ignored) return t[i];
  return std::nullopt;
}

const char* shift(const void* p, int64_t bytes) { return p ? static_cast<const char*>(p) + bytes : nullptr; }
char* shift(void* p, int64_t bytes) { return p ? static_cast<char*>(p) + bytes : nullptr; }

}  // namespace

Tensor in_dtype(const Tensor& x, at::ScalarType dtype) { return x.scalar_type() == dtype ? x : x.to(dtype); }

int64_t reduction_of(std::string_view op, std::string_view name) {
  if (name == "none") return at::Reduction::None;
  if (name == "mean") return at::Reduction::Mean;
  TORCH_CHECK_VALUE(name == "sum", op, ": expected reduction 'none', 'mean' or 'sum', got '", name, "'");
  return at::Reduction::Sum;
}

double softcap_of(std::string_view op, std::optional<double> softcap) {
  TORCH_CHECK_VALUE(!softcap || *softcap > 0, op, ": expected softcap None or above 0, got ", *softcap);
  return softcap.value_or(0);
}

at::ScalarType wide_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

at::ScalarType loss_dtype(const Tensor& logits) {
  return is_autocast(logits) ? wide_dtype(logits.scalar_type()) : logits.scalar_type();
}

c10::SymDimVector rows_shape(c10::SymIntArrayRef logits) {
  c10::SymDimVector shape(logits.begin(), logits.end());
  shape.erase(shape.begin() + (shape.size() > 1));
  return shape;
}

void check_loss(std::string_view op, c10::SymIntArrayRef logits, c10::Device device, const Tensor& target,
                const OptionalTensor& weight, const LossOptions& options) {
  const bool probabilities = target.is_floating_point();
  const at::ScalarType dtype = target.scalar_type();
  TORCH_CHECK_TYPE(probabilities || dtype == at::kLong || dtype == at::kInt || dtype == at::kByte, op,
                   ": expected a target of class indices (int64, int32, uint8) or of probabilities, got ",
                   describe(target));
  const c10::SymDimVector rows = rows_shape(logits);
  const c10::SymIntArrayRef expected = probabilities ? logits : c10::SymIntArrayRef(rows);
  TORCH_CHECK_VALUE(target.sym_sizes() == expected, op, ": expected a target of ",
                    probabilities ? "probabilities of shape " : "class indices of shape ", expected, " for logits of ",
                    logits, ", got ", target.sym_sizes());
  TORCH_CHECK(target.device() == device, op, ": expected input and target on one device, got ", device, " and ",
              target.device());
  TORCH_CHECK_VALUE(options.smoothing >= 0 && options.smoothing <= 1, op,
                    ": expected label_smoothing between 0 and 1, got ", options.smoothing);
  TORCH_CHECK_VALUE(!probabilities || options.ignore_index < 0, op,
                    ": expected no ignore_index beside probabilities, got ", options.ignore_index);
  if (!weight) return;
  const c10::SymInt& classes = logits[logits.size() > 1];
  TORCH_CHECK_VALUE(weight->dim() == 1 && weight->sym_size(0) == classes, op, ": expected class weights of shape [",
                    classes, "], got ", weight->sym_sizes());
  TORCH_CHECK_TYPE(weight->is_floating_point(), op, ": expected class weights of a floating-point dtype, got ",
                   describe(*weight));
  TORCH_CHECK(weight->device() == device, op, ": expected input and class weights on one device, got ", device, " and ",
              weight->device());
}

LossCall::LossCall(std::string_view op, const Tensor& target, const OptionalTensor& weight, const LossOptions& options,
                   at::ScalarType dtype, int64_t rows, int64_t classes, int64_t inner, bool channels_last)
    : dtype_(dtype), wide_(wide_dtype(dtype)), reduction_(options.reduction) {
  args_.dtype = dtype_of(dtype);
  args_.rows = rows;
  args_.classes = classes;
  args_.inner = inner;
  args_.ignore_index = options.ignore_index;
  args_.smoothing = options.smoothing;
  args_.z = options.z;
  args_.cap = options.cap;
  if (target.is_floating_point()) {
    target_ = channels_last ? target.movedim(1, -1) : target;
    if (target_.scalar_type() != dtype) target_ = in_dtype(target_, wide_);
    target_ = target_.contiguous();
    args_.wide_probabilities = target_.scalar_type() == wide_;
    args_.probabilities = target_.const_data_ptr();
  } else {
    target_ = in_dtype(target, at::kLong).contiguous();
    args_.index = target_.const_data_ptr<int64_t>();
    if (target_.is_cpu()) {
      const std::optional<int64_t> stray = stray_index(target_, classes, options.ignore_index);
      TORCH_CHECK_INDEX(!stray, op, ": expected class indices in [0, ", classes, ") or ignore_index ",
                        options.ignore_index, ", got ", *stray);
    }
  }
  if (weight) {
    weight_ = in_dtype(*weight, wide_).contiguous();
    args_.weight = weight_.const_data_ptr();
    if (options.smoothing != 0) {
      weight_sum_ = weight_.sum();
      args_.weight_sum = weight_sum_.const_data_ptr();
    }
  }
}

LossArgs LossCall::rows(int64_t first, int64_t count) const {
  const int64_t wide = int64_t(c10::elementSize(wide_));
  LossArgs args = args_;
  args.rows = count;
  if (args.index) args.index += first;
  if (args.probabilities)
    args.probabilities = shift(args.probabilities, first * args.classes * int64_t(target_.element_size()));
  args.loss = shift(args.loss, first * (args.narrow_loss ? int64_t(c10::elementSize(dtype_)) : wide));
  args.largest = shift(args.largest, first * wide);
  args.factor = shift(args.factor, first * wide);
  if (args.grad_a_row)
    args.grad = shift(args.grad, first * (args.narrow_grad ? int64_t(c10::elementSize(dtype_)) : wide));
  return args;
}

at::ScalarType LossCall::losses_dtype(at::ScalarType dtype) const {
  const bool as_wanted = reduction_ == at::Reduction::None && dtype == dtype_ && !runs_on_threads(target_.device());
  return as_wanted ? dtype : wide_;
}

void LossCall::set_results(const Tensor& losses, const Tensor& stats) {
  losses_ = losses;
  args_.loss = losses.defined() ? losses.mutable_data_ptr() : nullptr;
  args_.narrow_loss = losses.defined() && losses.scalar_type() != wide_;
  args_.largest = stats.mutable_data_ptr();
  args_.factor = shift(args_.largest, int64_t(stats.nbytes()) / 2);
}

void LossCall::set_grad(const Tensor& grad, const Tensor& total) {
  TORCH_CHECK_VALUE(grad.dim() == 0 || grad.numel() == args_.rows,
                    "cross_entropy: expected a gradient of shape [] or of ", args_.rows, " rows, got ", grad.sizes());
  const bool readable = grad.scalar_type() == dtype_ && !runs_on_threads(grad.device());
  grad_ = readable ? grad : in_dtype(grad, wide_);
  // One number for all also as the gradient of a sum of losses comes: expanded.
  args_.grad_a_row =
      std::any_of(grad_.strides().begin(), grad_.strides().end(), [](int64_t each) { return each != 0; });
  if (args_.grad_a_row) grad_ = grad_.contiguous();
  set_grad(1, total);
  args_.grad = grad_.const_data_ptr();
  args_.narrow_grad = grad_.scalar_type() != wide_;
}

void LossCall::set_grad(double grad, const Tensor& total) {
  args_.constant_grad = grad;
  total_ = total;
  args_.total = total.defined() && total.numel() > 0 ? total.const_data_ptr() : nullptr;
}

Tensor LossCall::empty_total() const {
  const at::TensorOptions options = target_.options().dtype(wide_);
  return reduction_ == at::Reduction::Mean ? at::empty({}, options) : at::empty({0}, options);
}

Tensor LossCall::total() const {
  if (reduction_ != at::Reduction::Mean) return empty_total();
  if (!runs_on_threads(target_.device())) {
    Tensor total = empty_total();
    reduce_into(total, Tensor());
    return total;
  }
  double sum = args_.index ? 0 : double(args_.rows);
  for (int64_t row = 0; args_.index && row < args_.rows; ++row) {
    const int64_t index = args_.index[row];
    sum += wide_ == at::kFloat ? args_.row_weight<float>(index) : args_.row_weight<double>(index);
  }
  return at::scalar_tensor(sum, target_.options().dtype(wide_));
}

std::pair<Tensor, Tensor> LossCall::reduce(at::ScalarType dtype) const {
  if (reduction_ == at::Reduction::None) return {in_dtype(losses_, dtype), empty_total()};
  if (!runs_on_threads(losses_.device())) {
    Tensor total = empty_total(), loss = at::empty({}, losses_.options().dtype(dtype));
    reduce_into(total, loss);
    return {loss, total};
  }
  const Tensor total = this->total();
  // In double, or the sum's rounding would outweigh that of the rows.
  if (wide_ == at::kFloat && losses_.numel() < kLossGrain) {  // few: a loop is the cheapest
    const float* each = losses_.const_data_ptr<float>();
    double sum = std::accumulate(each, each + losses_.numel(), 0.0);
    if (reduction_ == at::Reduction::Mean) sum /= double(*total.const_data_ptr<float>());
    return {at::scalar_tensor(sum, losses_.options().dtype(dtype)), total};
  }
  const Tensor sum = losses_.sum(at::kDouble);
  return {(reduction_ == at::Reduction::Mean ? sum.div(total) : sum).to(dtype), total};
}

void LossCall::reduce_into(const Tensor& total, const Tensor& loss) const {
  cuda::LossResult to;
  if (total.numel() > 0) to.total = total.mutable_data_ptr();
  if (loss.defined()) to.loss = loss.mutable_data_ptr(), to.dtype = dtype_of(loss);
  Tensor parts;
  if (const int64_t blocks = cuda::reducing_blocks(args_.rows); blocks > 1) {
    parts = at::empty({blocks, int64_t(sizeof(LossSum) / sizeof(double))}, total.options().dtype(at::kDouble));
    to.parts = static_cast<LossSum*>(parts.mutable_data_ptr());
  }
  on_stream(total.device(), [&](auto stream) { return cuda::reduce_losses(args_, to, stream); });
}

void run_loss(LossPass pass, const LossArgs& args, c10::Device device) {
  if (args.rows == 0 || args.classes == 0) return;
  if (runs_on_threads(device)) {
    const int64_t grain = std::max<int64_t>(1, kLossGrain / args.classes);
    at::parallel_for(0, args.rows, grain,
                     [&](int64_t begin, int64_t end) { cpu::cross_entropy(pass, args, begin, end); });
    return;
  }
  on_stream(device, [&](auto stream) { return cuda::cross_entropy(pass, args, stream); });
}

Tensor stock_cross_entropy(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                           const LossOptions& options) {
  const bool probabilities = target.is_floating_point();
  const Tensor x = options.cap != 0 ? at::tanh(logits / options.cap) * options.cap : logits;
  const Tensor t = target.to(probabilities ? x.scalar_type() : at::kLong);
  const OptionalTensor w = weight ? OptionalTensor(weight->to(x.scalar_type())) : std::nullopt;
  const auto reduced = [&](int64_t reduction) {
    return at::cross_entropy_loss(x, t, w, reduction, options.ignore_index, options.smoothing);
  };
  if (options.z == 0) return reduced(options.reduction);
  Tensor regular = at::logsumexp(x, x.dim() > 1 ? 1 : 0).square() * options.z;
  Tensor counted;
  if (!probabilities) {
    counted = t.ne(options.ignore_index);
    regular = at::where(counted, regular, at::zeros_like(regular));
  }
  const Tensor losses = reduced(at::Reduction::None) + regular;
  if (options.reduction == at::Reduction::None) return losses;
  if (options.reduction == at::Reduction::Sum) return losses.sum();
  if (probabilities) return losses.mean();
  const Tensor safe = t.masked_fill(counted.logical_not(), 0);
  return losses.sum() / (w ? (at::take(*w, safe) * counted).sum() : counted.sum());
}

}  // namespace memkit
