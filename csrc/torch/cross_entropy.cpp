// memkit::cross_entropy. The forward keeps the logits and two numbers a row, no softmax; backward makes the gradient in one
// pass over the logits, and into their own memory where it may.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include "checks.h"
#include "eager.h"
#include "fast_call.h"
#include "fresh.h"
#include "loss.h"
#include "operators.h"
#include "saved_node.h"
#include "transforms.h"

namespace memkit::loss_op {
namespace {

namespace autograd = torch::autograd;
using at::Tensor;

constexpr std::string_view kOp = "cross_entropy";

using Results = std::tuple<Tensor, Tensor, Tensor>;  // loss, stats, total

Tensor call_forward(const Tensor& input, const Tensor& target, const OptionalTensor& weight, const LossOptions& o,
                    at::ScalarType dtype, Inplace inplace) {
  return MEMKIT_CALL("memkit::_cross_entropy", Tensor(const Tensor&, const Tensor&, const OptionalTensor&, int64_t,
                                                      int64_t, double, double, double, at::ScalarType, int64_t))(
      input, target, weight, o.reduction, o.ignore_index, o.smoothing, o.z, o.cap, dtype,
      inplace == Inplace::forced      ? 1
      : inplace == Inplace::automatic ? 2
                                      : 0);
}

// -- backends

// The logits as [outer, classes, inner] in memory: contiguous, or with the classes last.
struct Layout {
  Tensor x;
  int64_t rows, classes, inner;
  bool channels_last;

  explicit Layout(const Tensor& input) : x(input) {
    channels_last = input.dim() > 2 && !input.is_contiguous() && input.movedim(1, -1).is_contiguous();
    if (!channels_last) x = input.contiguous();
    classes = input.size(input.dim() > 1);
    inner = 1;
    for (int64_t d = 2; d < input.dim() && !channels_last; ++d) inner *= input.size(d);
    rows = classes > 0 ? input.numel() / classes : 0;
  }
  LossCall call(const Tensor& target, const OptionalTensor& weight, const LossOptions& options) const {
    return LossCall(kOp, target, weight, options, x.scalar_type(), rows, classes, inner, channels_last);
  }
};

void check(const Tensor& input, const Tensor& target, const OptionalTensor& weight, const LossOptions& options) {
  check_float_tensor(kOp, input);
  TORCH_CHECK_VALUE(input.dim() > 0, kOp, ": expected an input of shape [C] or [N, C, ...], got []");
  check_loss(kOp, input.sym_sizes(), input.device(), target, weight, options);
}

at::TensorOptions wide_options(const Tensor& input) { return input.options().dtype(wide_dtype(input.scalar_type())); }

Results forward(const Tensor& input, const Tensor& target, const OptionalTensor& weight, int64_t reduction,
                int64_t ignore_index, double smoothing, double z, double cap, at::ScalarType dtype) {
  const LossOptions options{reduction, ignore_index, smoothing, z, cap};
  check(input, target, weight, options);
  TORCH_CHECK_VALUE(input.size(input.dim() > 1) > 0, kOp, ": expected at least 1 class, got input ", input.sizes());
  const Layout layout(input);
  LossCall call = layout.call(target, weight, options);
  const c10::SymDimVector shape = rows_shape(input.sym_sizes());
  const Tensor losses = at::empty(C10_AS_INTARRAYREF_SLOW(shape), input.options().dtype(call.losses_dtype(dtype))),
               stats = at::empty({2, layout.rows}, wide_options(input));
  call.set_results(losses, stats);
  LossArgs args = call.all();
  args.x = layout.x.const_data_ptr();
  run_loss(LossPass::forward, args, input.device());
  auto [loss, total] = call.reduce(dtype);
  return {std::move(loss), stats, std::move(total)};
}

Results forward_meta(const Tensor& input, const Tensor& target, const OptionalTensor& weight, int64_t reduction,
                     int64_t ignore_index, double smoothing, double z, double cap, at::ScalarType dtype) {
  check(input, target, weight, {reduction, ignore_index, smoothing, z, cap});
  const c10::SymDimVector shape = rows_shape(input.sym_sizes());
  c10::SymInt rows = 1;
  for (const c10::SymInt& each : shape) rows = rows * each;
  const auto wide = wide_options(input);
  const auto none = reduction == at::Reduction::None;
  return {none ? at::empty_symint(shape, input.options().dtype(dtype)) : at::empty({}, input.options().dtype(dtype)),
          at::empty_symint({2, rows}, wide),
          reduction == at::Reduction::Mean ? at::empty({}, wide) : at::empty({0}, wide)};
}

Tensor loss_alone(const Tensor& input, const Tensor& target, const OptionalTensor& weight, int64_t reduction,
                  int64_t ignore_index, double smoothing, double z, double cap, at::ScalarType dtype, int64_t) {
  return std::get<0>(forward(input, target, weight, reduction, ignore_index, smoothing, z, cap, dtype));
}
Tensor loss_alone_meta(const Tensor& input, const Tensor& target, const OptionalTensor& weight, int64_t reduction,
                       int64_t ignore_index, double smoothing, double z, double cap, at::ScalarType dtype, int64_t) {
  return std::get<0>(forward_meta(input, target, weight, reduction, ignore_index, smoothing, z, cap, dtype));
}

// Saved-tensor hooks may hand back anything.
void check_backward(const Tensor& input, const Tensor& grad, const Tensor& target, const OptionalTensor& weight,
                    const Tensor& stats, const Tensor& total, const LossOptions& options) {
  check(input, target, weight, options);
  const auto fits = [&](const Tensor& x) {
    return x.is_contiguous() && x.scalar_type() == wide_dtype(input.scalar_type()) && x.device() == input.device();
  };
  const c10::SymInt rows = c10::multiply_integers(rows_shape(input.sym_sizes()));
  TORCH_CHECK(fits(stats) && stats.sym_sizes() == c10::SymIntArrayRef({2, rows}) && fits(total) &&
                  total.sym_numel() == (options.reduction == at::Reduction::Mean ? 1 : 0) &&
                  grad.device() == input.device(),
              kOp, ": expected what the forward kept, [2, ", rows, "] and a total, got ", describe(stats), " and ",
              describe(total), " for ", describe(input));
}

void backward_into(const Tensor& grad, const Layout& layout, const Tensor& target, const OptionalTensor& weight,
                   const Tensor& stats, const Tensor& total, const LossOptions& options, const Tensor& out) {
  LossCall call = layout.call(target, weight, options);
  call.set_results(Tensor(), stats);
  call.set_grad(grad, total);
  LossArgs args = call.all();
  args.x = layout.x.const_data_ptr();
  args.out = out.mutable_data_ptr();
  run_loss(LossPass::backward, args, layout.x.device());
}

Tensor backward(const Tensor& input, const Tensor& grad, const Tensor& target, const OptionalTensor& weight,
                const Tensor& stats, const Tensor& total, int64_t reduction, int64_t ignore_index, double smoothing,
                double z, double cap) {
  const LossOptions options{reduction, ignore_index, smoothing, z, cap};
  check_backward(input, grad, target, weight, stats, total, options);
  const Layout layout(input);
  Tensor out = fresh_like(layout.x);
  backward_into(grad, layout, target, weight, stats, total, options, out);
  return out;
}

Tensor backward_meta(const Tensor& input, const Tensor& grad, const Tensor& target, const OptionalTensor& weight,
                     const Tensor& stats, const Tensor& total, int64_t reduction, int64_t ignore_index,
                     double smoothing, double z, double cap) {
  check_backward(input, grad, target, weight, stats, total, {reduction, ignore_index, smoothing, z, cap});
  const bool dense = input.is_contiguous() || (input.dim() > 2 && input.movedim(1, -1).is_contiguous());
  return at::empty_like(input, dense ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous);
}

// Memory that cannot be walked is worked on in a copy and written back.
Tensor& backward_(Tensor& input, const Tensor& grad, const Tensor& target, const OptionalTensor& weight,
                  const Tensor& stats, const Tensor& total, int64_t reduction, int64_t ignore_index, double smoothing,
                  double z, double cap) {
  check_inplace(kOp, input, memory_blocker(input));
  const LossOptions options{reduction, ignore_index, smoothing, z, cap};
  check_backward(input, grad, target, weight, stats, total, options);
  const Layout layout(input);
  backward_into(grad, layout, target, weight, stats, total, options, layout.x);
  if (!layout.x.is_same(input)) input.copy_(layout.x);
  return input;
}

Tensor& backward_meta_(Tensor& input, const Tensor& grad, const Tensor& target, const OptionalTensor& weight,
                       const Tensor& stats, const Tensor& total, int64_t reduction, int64_t ignore_index,
                       double smoothing, double z, double cap) {
  check_backward(input, grad, target, weight, stats, total, {reduction, ignore_index, smoothing, z, cap});
  return input;
}

// -- autograd

#define MEMKIT_BACKWARD(NAME, RESULT, INPUT)                                                                        \
  MEMKIT_CALL_PAST_AUTOGRAD(NAME, RESULT(INPUT, const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, \
                                         const Tensor&, int64_t, int64_t, double, double, double))

struct CrossEntropyBackward : SavedNode {
  LossOptions options;
  at::ScalarType dtype = at::kFloat;
  Inplace inplace = Inplace::never;
  bool has_weight = false;
  bool detached = false;  // what is saved of the input is its memory alone

  std::string name() const override { return "memkit::cross_entropy_backward"; }

 protected:
  autograd::variable_list backward(autograd::variable_list&& grads) override {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return {Tensor()};
    const Tensor target = unpack(1), stats = unpack(2), total = unpack(3);
    const OptionalTensor weight = has_weight ? OptionalTensor(unpack(4)) : std::nullopt;
    if (at::GradMode::is_enabled()) return differentiable(grad, target, weight);
    const bool keeps = autograd::get_current_graph_task_keep_graph();
    Tensor input = inplace == Inplace::never ? unpack(0) : take(0);
    const bool overwrite = inplace != Inplace::never && !keeps && is_plain(input) && is_plain(grad) &&
                           (inplace == Inplace::forced || is_sole_owner(input));
    const auto& o = options;
    if (!overwrite)
      return {MEMKIT_BACKWARD("memkit::_cross_entropy_backward", Tensor, const Tensor&)(
          input, grad, target, weight, stats, total, o.reduction, o.ignore_index, o.smoothing, o.z, o.cap)};
    // A tensor of its own over the memory: the logits of the forward may still be referred to.
    Tensor memory = detached ? std::move(input) : input.tensor_data();
    return {MEMKIT_BACKWARD("memkit::_cross_entropy_backward_", Tensor&, Tensor&)(
        memory, grad, target, weight, stats, total, o.reduction, o.ignore_index, o.smoothing, o.z, o.cap)};
  }

 private:
  // create_graph: the gradient itself needs a derivative, which ATen's operators have.
  autograd::variable_list differentiable(const Tensor& grad, const Tensor& target, const OptionalTensor& weight) {
    Tensor input = unpack(0);
    if (detached) {
      input = input.tensor_data();
      autograd::impl::set_gradient_edge(input, next_edge(0));
    }
    const Tensor loss = stock_cross_entropy(input.to(wide_dtype(input.scalar_type())), target, weight, options);
    return autograd::grad({loss.to(dtype)}, {input}, {grad}, /*retain_graph=*/true, /*create_graph=*/true);
  }
};

#undef MEMKIT_BACKWARD

Tensor by_stock(const Tensor& input, const Tensor& target, const OptionalTensor& weight, const LossOptions& options,
                at::ScalarType dtype) {
  return stock_cross_entropy(input.to(wide_dtype(input.scalar_type())), target, weight, options).to(dtype);
}

Tensor recorded(const Tensor& input, const Tensor& target, const OptionalTensor& weight, int64_t reduction,
                int64_t ignore_index, double smoothing, double z, double cap, at::ScalarType dtype, int64_t inplace) {
  const LossOptions options{reduction, ignore_index, smoothing, z, cap};
  check(input, target, weight, options);
  if (needs_stock(input, target, weight) ||
      autograd::compute_requires_grad(target, weight)) {  // the kernels have no gradient of the target
    return by_stock(input, target, weight, options, dtype);
  }
  if (!autograd::compute_requires_grad(input)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_forward(input, target, weight, options, dtype, Inplace::never);
  }
  auto node = make_node<CrossEntropyBackward>();
  node->set_next_edges(autograd::collect_next_edges(input));
  node->options = options;
  node->dtype = dtype;
  node->inplace = inplace == 1 ? Inplace::forced : inplace == 2 ? Inplace::automatic : Inplace::never;
  node->has_weight = weight.has_value();
  // Saved as memory alone, so that who still refers to the logits shows in its reference count.
  node->detached = node->inplace == Inplace::automatic && is_plain(input) && !input.is_leaf();
  Tensor loss, stats, total;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::tie(loss, stats, total) = MEMKIT_CALL(
        "memkit::_cross_entropy_forward", Results(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, int64_t,
                                                  double, double, double, at::ScalarType))(
        input, target, weight, reduction, ignore_index, smoothing, z, cap, dtype);
  }
  autograd::set_history(loss, node);
  node->save(node->detached ? input.tensor_data() : input);
  node->save(target);
  node->save(stats);
  node->save(total);
  if (weight) node->save(*weight);
  return loss;
}

Tensor batched(const Tensor& input, const Tensor& target, const OptionalTensor& weight, int64_t reduction,
               int64_t ignore_index, double smoothing, double z, double cap, at::ScalarType dtype, int64_t) {
  return by_stock(input, target, weight, {reduction, ignore_index, smoothing, z, cap}, dtype);
}

Tensor& bumping_(Tensor& input, const Tensor& grad, const Tensor& target, const OptionalTensor& weight,
                 const Tensor& stats, const Tensor& total, int64_t reduction, int64_t ignore_index, double smoothing,
                 double z, double cap) {
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    MEMKIT_CALL("memkit::_cross_entropy_backward_",
                Tensor & (Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                          int64_t, int64_t, double, double, double))
    (input, grad, target, weight, stats, total, reduction, ignore_index, smoothing, z, cap);
  }
  autograd::impl::bump_version(input);  // afterwards: where the kernel raises, nothing was written
  return input;
}

Tensor& functional_(Tensor& input, const Tensor& grad, const Tensor& target, const OptionalTensor& weight,
                    const Tensor& stats, const Tensor& total, int64_t reduction, int64_t ignore_index, double smoothing,
                    double z, double cap) {
  return input.copy_(MEMKIT_CALL("memkit::_cross_entropy_backward",
                                 Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                        const Tensor&, const Tensor&, int64_t, int64_t, double, double, double))(
      input, grad, target, weight, stats, total, reduction, ignore_index, smoothing, z, cap));
}

// -- the named operator and the eager entry

Tensor named(const Tensor& input, const Tensor& target, const OptionalTensor& weight, c10::string_view reduction,
             int64_t ignore_index, double smoothing, double z, std::optional<double> softcap) {
  const LossOptions options{reduction_of(kOp, reduction), ignore_index, smoothing, z, softcap_of(kOp, softcap)};
  return call_forward(input, target, weight, options, loss_dtype(input), Inplace::never);
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                     std::string_view reduction, int64_t ignore_index, double smoothing, double z, double softcap,
                     Inplace inplace) {
  const LossOptions options{reduction_of(kOp, reduction), ignore_index, smoothing, z, softcap};
  if (inplace == Inplace::forced && at::GradMode::is_enabled() && input.requires_grad()) {
    check_float_tensor(kOp, input);  // a sparse tensor has no strides to look at
    check_inplace(kOp, input, inplace_blocker(input));
    check_inplace(kOp, input, saver_blocker(input));
  }
  const pybind11::gil_scoped_release no_gil;
  return call_forward(input, target, weight, options, loss_dtype(input), inplace);
}

constexpr char kEntry[] = "cross_entropy";

}  // namespace

TORCH_LIBRARY_IMPL(memkit, CompositeImplicitAutograd, m) { m.impl("cross_entropy", named); }
TORCH_LIBRARY_IMPL(memkit, Autograd, m) { m.impl("_cross_entropy", recorded); }
TORCH_LIBRARY_IMPL(memkit, ADInplaceOrView, m) { m.impl("_cross_entropy_backward_", bumping_); }
TORCH_LIBRARY_IMPL(memkit, Functionalize, m) { m.impl("_cross_entropy_backward_", functional_); }
TORCH_LIBRARY_IMPL(memkit, FuncTorchBatched, m) {
  m.impl("cross_entropy", named);
  m.impl("_cross_entropy", batched);
}

#define MEMKIT_BACKEND(KEY)                        \
  TORCH_LIBRARY_IMPL(memkit, KEY, m) {             \
    m.impl("_cross_entropy", loss_alone);          \
    m.impl("_cross_entropy_forward", forward);     \
    m.impl("_cross_entropy_backward", backward);   \
    m.impl("_cross_entropy_backward_", backward_); \
  }
MEMKIT_BACKEND(CPU)
MEMKIT_BACKEND(CUDA)
#undef MEMKIT_BACKEND
TORCH_LIBRARY_IMPL(memkit, Meta, m) {
  m.impl("_cross_entropy", loss_alone_meta);
  m.impl("_cross_entropy_forward", forward_meta);
  m.impl("_cross_entropy_backward", backward_meta);
  m.impl("_cross_entropy_backward_", backward_meta_);
}

}  // namespace memkit::loss_op

void memkit::bind_losses(pybind11::module_& m) { eager::bind<loss_op::cross_entropy, loss_op::kEntry>(m); }
