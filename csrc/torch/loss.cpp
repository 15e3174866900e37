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
    : wide_(wide_dtype(dtype)), reduction_(options.reduction) {
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
    if (target_.scalar_type() != dtype) target_ = target_.to(wide_);
    target_ = target_.contiguous();
    args_.wide_probabilities = target_.scalar_type() == wide_;
    args_.probabilities = target_.const_data_ptr();
  } else {
    target_ = target.to(at::kLong).contiguous();
    args_.index = target_.const_data_ptr<int64_t>();
    if (target_.is_cpu()) {
      const std::optional<int64_t> stray = stray_index(target_, classes, options.ignore_index);
      TORCH_CHECK_INDEX(!stray, op, ": expected class indices in [0, ", classes, ") or ignore_index ",
                        options.ignore_index, ", got ", *stray);
    }
  }
  if (weight) {
    weight_ = weight->detach().to(wide_).contiguous();
    args_.weight = weight_.const_data_ptr();
    if (options.smoothing != 0) {
      weight_sum_ = weight_.sum();
      args_.weight_sum = weight_sum_.const_data_ptr();
    }
  }
}

Tensor LossCall::total() const {
  const at::TensorOptions options = target_.options().dtype(wide_);
  if (reduction_ != at::Reduction::Mean) return at::empty({0}, options);
  return args_.index ? count_weights() : at::scalar_tensor(double(args_.rows), options);
}

// The sum of the class weights of the rows that are not ignored.
Tensor LossCall::count_weights() const {
  if (!runs_on_threads(target_.device())) {
    const Tensor counted = target_.ne(args_.ignore_index);
    if (!weight_.defined()) return counted.sum(wide_);
    return weight_.take(target_.masked_fill(counted.logical_not(), 0)).mul_(counted).sum();
  }
  double sum = 0;
  for (int64_t i = 0; i < target_.numel(); ++i) {
    const int64_t t = args_.index[i];
    if (t == args_.ignore_index) continue;
    sum += !weight_.defined()    ? 1
           : wide_ == at::kFloat ? double(weight_.const_data_ptr<float>()[t])
                                 : weight_.const_data_ptr<double>()[t];
  }
  return at::scalar_tensor(sum, target_.options().dtype(wide_));
}

LossArgs LossCall::rows(int64_t first, int64_t count) const {
  const int64_t wide = int64_t(c10::elementSize(wide_));
  LossArgs args = args_;
  args.rows = count;
  if (args.index) args.index += first;
  if (args.probabilities)
    args.probabilities = shift(args.probabilities, first * args.classes * int64_t(target_.element_size()));
  args.loss = shift(args.loss, first * wide);
  args.largest = shift(args.largest, first * wide);
  args.factor = shift(args.factor, first * wide);
  if (args.grad_a_row) args.grad = shift(args.grad, first * wide);
  return args;
}

void LossCall::set_results(const Tensor& loss, const Tensor& stats) {
  if (loss.defined()) args_.loss = loss.mutable_data_ptr();
  args_.largest = stats.mutable_data_ptr();
  args_.factor = shift(args_.largest, int64_t(stats.nbytes()) / 2);
}

void LossCall::set_grad(const Tensor& grad, const Tensor& total) {
  TORCH_CHECK_VALUE(grad.dim() == 0 || grad.numel() == args_.rows,
                    "cross_entropy: expected a gradient of shape [] or of ", args_.rows, " rows, got ", grad.sizes());
  grad_ = grad.to(wide_).contiguous();
  args_.grad = grad_.const_data_ptr();
  args_.grad_a_row = grad.dim() > 0;
  total_ = total;
  args_.total = total.numel() > 0 ? total.const_data_ptr() : nullptr;
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

Tensor reduce_loss(const Tensor& losses, const Tensor& total, int64_t reduction, at::ScalarType dtype) {
  if (reduction == at::Reduction::None) return losses.to(dtype);
  // In double, or the sum's rounding would outweigh that of the rows.
  if (losses.is_cpu() && losses.scalar_type() == at::kFloat &&
      losses.numel() < kLossGrain) {  // few: a loop is the cheapest
    const float* each = losses.const_data_ptr<float>();
    double sum = std::accumulate(each, each + losses.numel(), 0.0);
    if (reduction == at::Reduction::Mean) sum /= double(*total.const_data_ptr<float>());
    return at::scalar_tensor(sum, losses.options().dtype(dtype));
  }
  const Tensor sum = losses.sum(at::kDouble);
  return (reduction == at::Reduction::Mean ? sum.div(total) : sum).to(dtype);
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
