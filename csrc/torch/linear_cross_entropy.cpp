// memkit::linear_cross_entropy: the logits exist a chunk of rows at a time.
//
// A chunk is one matrix product into a scratch buffer, one kernel that takes the losses and turns logits into their
// gradients where they lie, and the two products of the gradients: the three products of the layer and the loss apart, and
// no pass over memory more. So reduced losses have their gradients made in the forward, up to the factor that arrives in
// backward. Losses one by one meet a factor a row, and make the logits anew in backward.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "autocast.h"
#include "checks.h"
#include "known_gradients.h"
#include "loss.h"
#include "operators.h"
#include "saved_node.h"
#include "transforms.h"

namespace memkit::linear_loss {
namespace {

namespace autograd = torch::autograd;
using at::Tensor;

constexpr std::string_view kOp = "linear_cross_entropy";

using Wanted = std::array<bool, 3>;  // gradients of input, weight, bias
using Grads = std::tuple<Tensor, Tensor, Tensor>;
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;  // loss, stats, factors, gradients

// Gradients of logits in float16 are made this much larger and not divided by the number of rows, or most were subnormal:
// a loss scale arrives in backward only. What is more is multiplied then: the factors, one for each gradient.
constexpr double kHalfScale = 32;

Tensor largest(const Tensor& x) {
  if (x.numel() == 0) return at::ones({}, x.options().dtype(at::kFloat));
  const auto [least, most] = at::aminmax(x);
  return at::maximum(least.neg(), most).to(at::kFloat);
}

// By how much those of the logits are made smaller for the input's gradient to be finite, and where classes have weights
// for their own to be as large as without.
Tensor half_divisor(const Tensor& linear_weight, const OptionalTensor& weight) {
  const Tensor divisor = (largest(linear_weight) / 1024).clamp_min_(1);
  return weight ? divisor * largest(*weight).clamp_min_(std::numeric_limits<float>::min()) : divisor;
}

// The same for the input as a factor of the weight's gradient, a power of two.
Tensor input_divisor(const Tensor& x) { return at::exp2((largest(x) / 32).log2_().ceil_().clamp_(0, 15)); }

// A sum in float32 for float16, as large as that holds, and what it is to be multiplied by.
std::pair<Tensor, Tensor> in_half(Tensor sum) {
  constexpr double kExponent = 14;
  const Tensor size = at::linalg_vector_norm(sum, std::numeric_limits<double>::infinity());
  const Tensor exponent = size.log2_().ceil_().clamp_(-100, 100);
  return {sum.mul_(at::exp2(kExponent - exponent)).to(at::kHalf), at::exp2(exponent - kExponent)};
}

// Rows a chunk: an eighth of all, so that the scratch is a 24th of what logits, softmax and gradient take together; more
// where the products would be too thin to be efficient, on a GPU's many processors before all, less where the scratch would be
// large and remains efficient.
int64_t rows_a_chunk(int64_t asked, int64_t rows, int64_t classes, int64_t element, c10::Device device) {
  constexpr int64_t kMany = 1024, kScratch = int64_t(512) << 20;
  const int64_t least = device.is_cuda() ? kMany : 64;
  if (asked > 0) return std::min(asked, std::max<int64_t>(rows, 1));
  const int64_t fitting = std::max(kMany, kScratch / std::max<int64_t>(1, classes * element));
  return std::clamp<int64_t>(std::min((rows + 7) / 8, fitting), std::min(least, std::max<int64_t>(rows, 1)),
                             std::max<int64_t>(rows, 1));
}

// More sums than this are not rounded to two bytes one after the other.
constexpr int64_t kShortSums = 16;

// The gradient of the weight as it adds up over the chunks, of `rows` at most. fits: of large gradients in float16.
class WeightGradient {
 public:
  WeightGradient(const Tensor& weight, at::ScalarType compute, int64_t chunks, int64_t rows, bool fits)
      : dtype_(weight.scalar_type()),
        direct_(dtype_ == compute && !fits && (compute == wide_dtype(compute) || chunks <= kShortSums)),
        alpha_(fits ? std::exp2(std::min(0.0, std::floor(std::log2(kHalfScale / double(rows))))) : 1),
        sum_(at::empty_like(weight, weight.options().dtype(direct_ ? dtype_ : wide_dtype(compute)),
                            at::MemoryFormat::Contiguous)) {}

  void add(const Tensor& logits_grad, const Tensor& x) {
    if (direct_) {
      if (first_) {
        at::mm_out(sum_, logits_grad.t(), x);
      } else {
        at::addmm_out(sum_, sum_, logits_grad.t(), x);
      }
    } else {  // a product in the dtype of the logits, and the sum wider: some classes at a time
      const int64_t step = std::max<int64_t>(256, logits_grad.numel() / (8 * std::max<int64_t>(1, x.size(1))));
      for (int64_t c = 0; c < sum_.size(0); c += step) {
        const int64_t n = std::min(step, sum_.size(0) - c);
        if (!product_.defined()) product_ = at::empty({n, x.size(1)}, x.options());
        Tensor part = product_.narrow(0, 0, n), into = sum_.narrow(0, c, n);
        if (alpha_ == 1) {
          at::mm_out(part, logits_grad.narrow(1, c, n).t(), x);
        } else {
          at::addmm_out(part, part, logits_grad.narrow(1, c, n).t(), x, /*beta=*/0, alpha_);
        }
        first_ ? into.copy_(part) : into.add_(part);
      }
    }
    first_ = false;
  }
  Tensor result() {
    if (first_) sum_.zero_();  // no rows
    return in_dtype(sum_, dtype_);
  }
  // And what it is to be multiplied by, undefined for 1.
  std::pair<Tensor, Tensor> fitting_result() {
    if (first_) sum_.zero_();
    if (dtype_ != at::kHalf) return {result(), alpha_ == 1 ? Tensor() : at::scalar_tensor(1 / alpha_, sum_.options())};
    auto [grad, factor] = in_half(std::move(sum_));
    return {std::move(grad), factor.div_(alpha_)};
  }

 private:
  at::ScalarType dtype_;
  bool direct_;
  double alpha_;
  Tensor sum_, product_;
  bool first_ = true;
};

// The matrices in the dtype of the products, and the walk over the chunks.
struct Chunks {
  Tensor x, weight;
  OptionalTensor bias;
  int64_t rows, classes, step;

  Chunks(const Tensor& input, const Tensor& linear_weight, const OptionalTensor& linear_bias, at::ScalarType compute,
         int64_t asked)
      : x(in_dtype(input, compute)),
        weight(in_dtype(linear_weight, compute)),
        bias(linear_bias ? OptionalTensor(in_dtype(*linear_bias, compute)) : std::nullopt),
        rows(x.size(0)),
        classes(weight.size(0)),
        step(rows_a_chunk(asked, rows, classes, int64_t(x.element_size()), x.device())) {}

  LossCall call(const Tensor& target, const OptionalTensor& weights, const LossOptions& options) const {
    return LossCall(kOp, target, weights, options, x.scalar_type(), rows, classes, 1, false);
  }

  // factors: what to multiply the gradients by, [3], is multiplied by what they were made smaller by to fit in float16.
  Grads run(LossPass pass, const LossCall& call, const Tensor& input, const Tensor& linear_weight,
            const OptionalTensor& linear_bias, const Wanted& wanted, const Tensor& factors = {}) const {
    const Tensor scratch = at::empty({std::min(step, rows), classes}, x.options()), transposed = weight.t();
    std::optional<WeightGradient> grad_weight;
    if (wanted[1])
      grad_weight.emplace(linear_weight, x.scalar_type(), (rows + step - 1) / step, step, factors.defined());
    const at::ScalarType wide = wide_dtype(x.scalar_type());
    const Tensor grad_input =
        wanted[0] ? at::empty_like(input, at::MemoryFormat::Contiguous) : at::empty({0}, input.options());
    Tensor grad_bias =
        wanted[2] && rows == 0 ? at::zeros({classes}, x.options().dtype(wide)) : at::empty({0}, input.options());
    const Tensor divisor = wanted[1] && factors.defined() ? input_divisor(x) : Tensor();
    for (int64_t first = 0; first < rows; first += step) {
      const int64_t n = std::min(step, rows - first);
      Tensor logits = part_of(scratch, 0, n);
      const Tensor part = part_of(x, first, n);
      bias ? at::addmm_out(logits, *bias, part, transposed) : at::mm_out(logits, part, transposed);
      LossArgs args = call.rows(first, n);
      args.x = args.out = logits.mutable_data_ptr();
      run_loss(pass, args, x.device());
      if (wanted[0]) {
        Tensor into = part_of(grad_input, first, n);
        if (input.scalar_type() == x.scalar_type()) {
          at::mm_out(into, logits, weight);
        } else {
          Tensor product = at::empty_like(part);
          into.copy_(at::mm_out(product, logits, weight));
        }
      }
      if (wanted[1]) grad_weight->add(logits, divisor.defined() ? part / divisor : part);
      if (!wanted[2]) continue;
      const Tensor sum = logits.sum({0}, false, wide);
      first == 0 ? grad_bias = sum : grad_bias.add_(sum);
    }
    const Tensor none = at::empty({0}, linear_weight.options());
    if (!factors.defined())
      return {grad_input, wanted[1] ? grad_weight->result() : none,
              wanted[2] ? in_dtype(grad_bias, linear_bias->scalar_type()) : grad_bias};
    const auto [fitting, factor] = wanted[1] ? grad_weight->fitting_result() : std::pair(none, Tensor());
    if (factor.defined()) factors.select(0, 1).mul_(factor);
    if (divisor.defined()) factors.select(0, 1).mul_(divisor);
    if (!wanted[2] || linear_bias->scalar_type() != at::kHalf) return {grad_input, fitting, grad_bias};
    const auto [fitting_bias, bias_factor] = in_half(std::move(grad_bias));
    factors.select(0, 2).mul_(bias_factor);
    return {grad_input, fitting, fitting_bias};
  }

 private:
  // n of x's rows; all of them without a call.
  static Tensor part_of(const Tensor& x, int64_t first, int64_t n) {
    return n == x.size(0) ? x : x.narrow(0, first, n);
  }
};

void check(const Tensor& input, const Tensor& linear_weight, const OptionalTensor& linear_bias, const Tensor& target,
           const OptionalTensor& weight, const LossOptions& options, at::ScalarType compute) {
  check_float_tensor(kOp, input);
  check_float_tensor(kOp, linear_weight);
  TORCH_CHECK_VALUE(input.dim() == 2 && linear_weight.dim() == 2 && input.sym_size(1) == linear_weight.sym_size(1), kOp,
                    ": expected an input of [..., in_features] and a weight of [classes, in_features], got ",
                    input.sym_sizes(), " and ", linear_weight.sym_sizes());
  TORCH_CHECK(linear_weight.device() == input.device(), kOp, ": expected input and weight on one device, got ",
              input.device(), " and ", linear_weight.device());
  if (linear_bias) {
    check_float_tensor(kOp, *linear_bias);
    TORCH_CHECK_VALUE(linear_bias->dim() == 1 && linear_bias->sym_size(0) == linear_weight.sym_size(0), kOp,
                      ": expected a bias of shape [", linear_weight.sym_size(0), "], got ", linear_bias->sym_sizes());
    TORCH_CHECK(linear_bias->device() == input.device(), kOp, ": expected input and bias on one device, got ",
                input.device(), " and ", linear_bias->device());
  }
  TORCH_CHECK_TYPE(compute == at::kFloat || compute == at::kDouble || compute == at::kHalf || compute == at::kBFloat16,
                   kOp, ": expected to compute in float32, float64, float16 or bfloat16, got ", compute);
  const c10::SymInt logits[] = {input.sym_size(0), linear_weight.sym_size(0)};
  check_loss(kOp, logits, input.device(), target, weight, options);
}

// -- backends

Results forward(const Tensor& input, const Tensor& linear_weight, const OptionalTensor& linear_bias,
                const Tensor& target, const OptionalTensor& weight, int64_t reduction, int64_t ignore_index,
                double smoothing, double z, double cap, at::ScalarType compute, at::ScalarType dtype, int64_t chunk,
                Wanted grads) {
  const at::AutoDispatchBelowADInplaceOrView below;  // a traced graph may call it with what requires grad
  const LossOptions options{reduction, ignore_index, smoothing, z, cap};
  check(input, linear_weight, linear_bias, target, weight, options, compute);
  TORCH_CHECK_VALUE(linear_weight.size(0) > 0, kOp, ": expected at least 1 class, got weight ", linear_weight.sizes());
  const Chunks chunks(input, linear_weight, linear_bias, compute, chunk);
  LossCall call = chunks.call(target, weight, options);
  const Tensor losses = at::empty({chunks.rows}, chunks.x.options().dtype(call.losses_dtype(dtype))),
               stats = at::empty({2, chunks.rows}, chunks.x.options().dtype(wide_dtype(compute)));
  call.set_results(losses, stats);
  const bool any = grads[0] || grads[1] || grads[2], half = any && compute == at::kHalf;
  Tensor factors = at::empty({compute == at::kHalf ? 3 : 0}, chunks.x.options().dtype(at::kFloat));
  if (half) {
    const Tensor divisor = half_divisor(chunks.weight, weight);
    call.set_grad(kHalfScale, divisor);
    factors.copy_(divisor).div_(kHalfScale);
  } else if (any) {
    call.set_grad(1, call.total());
  }
  const auto [grad_input, grad_weight, grad_bias] =
      chunks.run(any ? LossPass::both : LossPass::forward, call, input, linear_weight, linear_bias, grads,
                 half ? factors : Tensor());
  auto [loss, total] = call.reduce(dtype);
  // Without a row that counts the gradients are 0, as in stock.
  if (half && options.reduction == at::Reduction::Mean) factors.div_(total).masked_fill_(total == 0, 0);
  return {std::move(loss), stats, std::move(factors), grad_input, grad_weight, grad_bias};
}

Grads empty_grads(const Tensor& input, const Tensor& linear_weight, const OptionalTensor& linear_bias,
                  const Wanted& wanted) {
  const auto like = [](bool wanted, const Tensor& x) {
    return wanted ? at::empty_like(x, at::MemoryFormat::Contiguous) : at::empty({0}, x.options());
  };
  return {like(wanted[0], input), like(wanted[1], linear_weight), like(wanted[2], linear_bias.value_or(input))};
}

Results forward_meta(const Tensor& input, const Tensor& linear_weight, const OptionalTensor& linear_bias,
                     const Tensor& target, const OptionalTensor& weight, int64_t reduction, int64_t ignore_index,
                     double smoothing, double z, double cap, at::ScalarType compute, at::ScalarType dtype, int64_t,
                     Wanted grads) {
  check(input, linear_weight, linear_bias, target, weight, {reduction, ignore_index, smoothing, z, cap}, compute);
  const auto rows = input.sym_size(0);
  const auto wide = input.options().dtype(wide_dtype(compute)), narrow = input.options().dtype(dtype);
  const auto [grad_input, grad_weight, grad_bias] = empty_grads(input, linear_weight, linear_bias, grads);
  return {reduction == at::Reduction::None ? at::empty_symint({rows}, narrow) : at::empty({}, narrow),
          at::empty_symint({2, rows}, wide),
          at::empty({compute == at::kHalf ? 3 : 0}, input.options().dtype(at::kFloat)),
          grad_input,
          grad_weight,
          grad_bias};
}

// Saved-tensor hooks may hand back anything.
void check_backward(const Tensor& grad, const Tensor& input, const Tensor& linear_weight,
                    const OptionalTensor& linear_bias, const Tensor& target, const OptionalTensor& weight,
                    const Tensor& stats, const LossOptions& options, at::ScalarType compute) {
  check(input, linear_weight, linear_bias, target, weight, options, compute);
  TORCH_CHECK(stats.sym_sizes() == c10::SymIntArrayRef({2, input.sym_size(0)}) && grad.device() == input.device() &&
                  stats.scalar_type() == wide_dtype(compute) && stats.device() == input.device(),
              kOp, ": expected what the forward kept, [2, ", input.sym_size(0), "], got ", describe(stats));
}

// Of losses that were not reduced.
Grads backward(const Tensor& grad, const Tensor& input, const Tensor& linear_weight, const OptionalTensor& linear_bias,
               const Tensor& target, const OptionalTensor& weight, const Tensor& stats, int64_t reduction,
               int64_t ignore_index, double smoothing, double z, double cap, at::ScalarType compute, int64_t chunk,
               Wanted grads) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const LossOptions options{reduction, ignore_index, smoothing, z, cap};
  check_backward(grad, input, linear_weight, linear_bias, target, weight, stats, options, compute);
  const Chunks chunks(input, linear_weight, linear_bias, compute, chunk);
  LossCall call = chunks.call(target, weight, options);
  call.set_results(Tensor(), stats.contiguous());
  call.set_grad(grad, Tensor());
  return chunks.run(LossPass::backward, call, input, linear_weight, linear_bias, grads);
}

Grads backward_meta(const Tensor& grad, const Tensor& input, const Tensor& linear_weight,
                    const OptionalTensor& linear_bias, const Tensor& target, const OptionalTensor& weight,
                    const Tensor& stats, int64_t reduction, int64_t ignore_index, double smoothing, double z,
                    double cap, at::ScalarType compute, int64_t, Wanted grads) {
  check_backward(grad, input, linear_weight, linear_bias, target, weight, stats,
                 {reduction, ignore_index, smoothing, z, cap}, compute);
  return empty_grads(input, linear_weight, linear_bias, grads);
}

Tensor loss_alone(const Tensor& input, const Tensor& linear_weight, const OptionalTensor& linear_bias,
                  const Tensor& target, const OptionalTensor& weight, int64_t reduction, int64_t ignore_index,
                  double smoothing, double z, double cap, at::ScalarType compute, at::ScalarType dtype, int64_t chunk) {
  return std::get<0>(forward(input, linear_weight, linear_bias, target, weight, reduction, ignore_index, smoothing, z,
                             cap, compute, dtype, chunk, {}));
}
Tensor loss_alone_meta(const Tensor& input, const Tensor& linear_weight, const OptionalTensor& linear_bias,
                       const Tensor& target, const OptionalTensor& weight, int64_t reduction, int64_t ignore_index,
                       double smoothing, double z, double cap, at::ScalarType compute, at::ScalarType dtype,
                       int64_t chunk) {
  return std::get<0>(forward_meta(input, linear_weight, linear_bias, target, weight, reduction, ignore_index, smoothing,
                                  z, cap, compute, dtype, chunk, {}));
}

// -- autograd

// Of losses one by one. Saved: what the forward was given, and stats.
struct LinearCrossEntropyBackward : SavedNode {
  LossOptions options;
  at::ScalarType compute = at::kFloat;
  int64_t chunk = 0;
  Wanted wanted{};
  bool has_bias = false, has_weight = false;

  std::string name() const override { return "memkit::linear_cross_entropy_backward"; }

 protected:
  autograd::variable_list backward(autograd::variable_list&& grads) override {
    autograd::variable_list result(3);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return result;
    check_first_derivative(kOp);
    const OptionalTensor bias = has_bias ? OptionalTensor(unpack(4)) : std::nullopt;
    const OptionalTensor weight = has_weight ? OptionalTensor(unpack(5)) : std::nullopt;
    std::tie(result[0], result[1], result[2]) = MEMKIT_CALL_PAST_AUTOGRAD(
        "memkit::_linear_cross_entropy_backward",
        Grads(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
              const Tensor&, int64_t, int64_t, double, double, double, at::ScalarType, int64_t, Wanted))(
        grad, unpack(0), unpack(1), bias, unpack(2), weight, unpack(3), options.reduction, options.ignore_index,
        options.smoothing, options.z, options.cap, compute, chunk, wanted);
    for (int i = 0; i < 3; ++i)
      if (!wanted[i]) result[i].reset();
    return result;
  }
};

Tensor by_stock(const Tensor& input, const Tensor& linear_weight, const OptionalTensor& linear_bias,
                const Tensor& target, const OptionalTensor& weight, const LossOptions& options, at::ScalarType compute,
                at::ScalarType dtype) {
  const OptionalTensor bias = linear_bias ? OptionalTensor(linear_bias->to(compute)) : std::nullopt;
  const Tensor logits = at::linear(input.to(compute), linear_weight.to(compute), bias);
  return stock_cross_entropy(logits.to(wide_dtype(compute)), target, weight, options).to(dtype);
}

Tensor recorded(const Tensor& input, const Tensor& linear_weight, const OptionalTensor& linear_bias,
                const Tensor& target, const OptionalTensor& weight, int64_t reduction, int64_t ignore_index,
                double smoothing, double z, double cap, at::ScalarType compute, at::ScalarType dtype, int64_t chunk) {
  const LossOptions options{reduction, ignore_index, smoothing, z, cap};
  check(input, linear_weight, linear_bias, target, weight, options, compute);
  if (needs_stock(input, linear_weight, linear_bias, target, weight) ||
      autograd::compute_requires_grad(target, weight)) {
    return by_stock(input, linear_weight, linear_bias, target, weight, options, compute, dtype);
  }
  const bool records = autograd::compute_requires_grad(input, linear_weight, linear_bias);
  const Wanted wanted{records && input.requires_grad(), records && linear_weight.requires_grad(),
                      records && linear_bias && linear_bias->requires_grad()};
  const bool in_forward = options.reduction != at::Reduction::None;
  Tensor loss, stats, factors, grad_input, grad_weight, grad_bias;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::tie(loss, stats, factors, grad_input, grad_weight, grad_bias) =
        MEMKIT_CALL("memkit::_linear_cross_entropy_forward",
                    Results(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
                            int64_t, int64_t, double, double, double, at::ScalarType, at::ScalarType, int64_t, Wanted))(
            input, linear_weight, linear_bias, target, weight, reduction, ignore_index, smoothing, z, cap, compute,
            dtype, chunk, in_forward ? wanted : Wanted{});
  }
  if (!records) return loss;
  auto edges = autograd::collect_next_edges(input, linear_weight, linear_bias.value_or(Tensor()));
  if (in_forward) {
    auto node = make_node<KnownGradients>();
    node->set_next_edges(std::move(edges));
    node->op = kOp;
    autograd::set_history(loss, node);
    std::vector<Tensor> grads{std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
    for (int i = 0; i < 3; ++i)
      if (!wanted[i]) grads[i].reset();
    node->keep(grads, compute == at::kHalf ? factors : Tensor());
    return loss;
  }
  auto node = make_node<LinearCrossEntropyBackward>();
  node->set_next_edges(std::move(edges));
  node->options = options;
  node->compute = compute;
  node->chunk = chunk;
  node->wanted = wanted;
  node->has_bias = linear_bias.has_value();
  node->has_weight = weight.has_value();
  autograd::set_history(loss, node);
  for (const Tensor& each : {input, linear_weight, target, stats}) node->save(each);
  node->save(linear_bias);
  node->save(weight);
  return loss;
}

Tensor batched(const Tensor& input, const Tensor& linear_weight, const OptionalTensor& linear_bias,
               const Tensor& target, const OptionalTensor& weight, int64_t reduction, int64_t ignore_index,
               double smoothing, double z, double cap, at::ScalarType compute, at::ScalarType dtype, int64_t) {
  return by_stock(input, linear_weight, linear_bias, target, weight, {reduction, ignore_index, smoothing, z, cap},
                  compute, dtype);
}

// -- the named operator

Tensor named(const Tensor& input, const Tensor& linear_weight, const Tensor& target, const OptionalTensor& linear_bias,
             const OptionalTensor& weight, c10::string_view reduction, int64_t ignore_index, double smoothing, double z,
             std::optional<double> softcap, std::optional<int64_t> chunk) {
  TORCH_CHECK_VALUE(input.dim() > 0, kOp, ": expected an input of shape [..., in_features], got []");
  TORCH_CHECK_VALUE(!chunk || *chunk > 0, kOp, ": expected chunk None or above 0, got ", *chunk);
  at::ScalarType compute = input.scalar_type();
  if (is_autocast(input) && compute != at::kDouble) {
    compute = at::autocast::get_autocast_dtype(input.device().type());
  } else {
    for (const Tensor& each : {linear_weight, linear_bias.value_or(linear_weight)})
      TORCH_CHECK_TYPE(each.scalar_type() == compute, kOp, ": expected input, weight and bias of one dtype, got ",
                       describe(input), " and ", describe(each));
  }
  const int64_t reduced = reduction_of(kOp, reduction);
  // Any leading dimensions, and none, are rows.
  const Tensor x = input.dim() == 2 ? input : input.reshape_symint({-1, input.sym_size(-1)});
  Tensor t = target;
  if (input.dim() != 2) {
    c10::SymDimVector rows(input.sym_sizes().begin(), input.sym_sizes().end() - 1);
    const bool probabilities = target.is_floating_point();
    if (probabilities) rows.push_back(linear_weight.sym_size(0));
    TORCH_CHECK_VALUE(target.sym_sizes() == c10::SymIntArrayRef(rows), kOp, ": expected a target of shape ",
                      c10::SymIntArrayRef(rows), " for input ", input.sym_sizes(), ", got ", target.sym_sizes());
    t = probabilities ? target.reshape_symint({-1, linear_weight.sym_size(0)}) : target.reshape({-1});
  }
  const Tensor loss =
      MEMKIT_CALL("memkit::_linear_cross_entropy",
                  Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
                         int64_t, int64_t, double, double, double, at::ScalarType, at::ScalarType, int64_t))(
          x, linear_weight, linear_bias, t, weight, reduced, ignore_index, smoothing, z, softcap_of(kOp, softcap),
          compute, loss_dtype(input), chunk.value_or(0));
  if (reduced != at::Reduction::None || input.dim() == 2) return loss;
  return loss.reshape_symint(input.sym_sizes().slice(0, input.dim() - 1));
}

}  // namespace

TORCH_LIBRARY_IMPL(memkit, CompositeImplicitAutograd, m) { m.impl("linear_cross_entropy", named); }
TORCH_LIBRARY_IMPL(memkit, Autograd, m) { m.impl("_linear_cross_entropy", recorded); }
TORCH_LIBRARY_IMPL(memkit, FuncTorchBatched, m) {
  m.impl("linear_cross_entropy", named);
  m.impl("_linear_cross_entropy", batched);
}

#define MEMKIT_BACKEND(KEY)                             \
  TORCH_LIBRARY_IMPL(memkit, KEY, m) {                  \
    m.impl("_linear_cross_entropy", loss_alone);        \
    m.impl("_linear_cross_entropy_forward", forward);   \
    m.impl("_linear_cross_entropy_backward", backward); \
  }
MEMKIT_BACKEND(CPU)
MEMKIT_BACKEND(CUDA)
#undef MEMKIT_BACKEND
TORCH_LIBRARY_IMPL(memkit, Meta, m) {
  m.impl("_linear_cross_entropy", loss_alone_meta);
  m.impl("_linear_cross_entropy_forward", forward_meta);
  m.impl("_linear_cross_entropy_backward", backward_meta);
}

}  // namespace memkit::linear_loss
