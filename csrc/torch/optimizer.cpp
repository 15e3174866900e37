// memkit::_adamw_ and memkit::_sgd_: checks, then one call of an engine for the whole list of tensors.
#include "../cpu/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../cuda/optimizer.h"
#include "checks.h"
#include "engine.h"
#include "layout.h"
#include "optimizer_lists.h"
#include "optional.h"
#include "stream.h"

namespace memkit {
namespace {

using at::Tensor;
using at::TensorList;

// Units below which one thread is faster than waking a second (ATen's own grain size).
constexpr int64_t kStepGrain = 32768 / kStepUnit;

bool is_float(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

void check_one(const StepLists& lists, size_t i) {
  const std::string_view op = lists.op;
  const Tensor &p = lists.params[i], &g = lists.grads[i];
  const at::ScalarType dtype = p.scalar_type();
  TORCH_CHECK_TYPE(p.layout() == at::kStrided && is_float(dtype), op,
                   ": expected dense parameters of float32, float64, float16 or bfloat16, got ", describe(p), " ",
                   p.layout());
  TORCH_CHECK(at::has_internal_overlap(p) != at::MemOverlap::Yes, op,
              ": expected parameters with memory of its own for each element, got strides ", p.strides(), " of ",
              describe(p));
  TORCH_CHECK(p.device() == lists.params[0].device(), op, ": expected parameters on one device, got ",
              lists.params[0].device(), " and ", p.device());
  TORCH_CHECK(g.layout() == at::kStrided, op, ": expected dense gradients, got a ", g.layout(), " one of ",
              describe(g));
  const bool fits = is_float(g.scalar_type()) && (g.scalar_type() == at::kDouble) == (dtype == at::kDouble);
  TORCH_CHECK(g.sizes() == p.sizes() && g.device() == p.device() && fits, op,
              ": expected a gradient like its parameter, ", describe(p), " on ", p.device(), ", got ", describe(g),
              " on ", g.device());
  if (lists.first.empty()) return;
  const Tensor& step = lists.steps[i];
  TORCH_CHECK(step.scalar_type() == at::kFloat && step.numel() == 1 && step.device() == p.device(), op,
              ": expected a step of one float32 on ", p.device(), ", got ", describe(step), " on ", step.device());
  const bool quantized = !lists.first_scales.empty() &&
                         (lists.first_scales[i].numel() > 0 ||
                          (p.numel() == 0 && lists.first[i].scalar_type() == at::kChar));  // no block, no scale
  const bool dense = p.is_non_overlapping_and_dense();
  const auto check_state = [&](const Tensor& x, at::ScalarType code) {
    const at::ScalarType kept = x.scalar_type();
    const bool good = quantized              ? kept == code && dtype != at::kDouble
                      : dtype == at::kDouble ? kept == at::kDouble
                                             : is_float(kept) && kept != at::kDouble;
    TORCH_CHECK(good && x.device() == p.device() && x.sizes() == p.sizes(), op, ": expected state for a parameter ",
                describe(p), " on ", p.device(), ", got ", describe(x), " on ", x.device());
    TORCH_CHECK(lies_as(x, p), op, ": expected state of strides ", dense ? p.strides() : at::IntArrayRef(),
                " as its parameter's, got ", x.strides());
  };
  check_state(lists.first[i], at::kChar);
  if (!lists.second.empty()) check_state(lists.second[i], at::kByte);
  if (!lists.largest.empty()) check_state(lists.largest[i], at::kByte);
  TORCH_CHECK(lists.second.empty() || quantized || lists.second[i].scalar_type() == lists.first[i].scalar_type(), op,
              ": expected moments of one dtype, got ", describe(lists.first[i]), " and ", describe(lists.second[i]));
}

void check_scales(const StepLists& lists, size_t i, int64_t block) {
  const auto check = [&](const Tensor& scale) {
    const int64_t blocks = (lists.params[i].numel() + block - 1) / block;
    TORCH_CHECK(scale.numel() == 0 || (scale.numel() == blocks && scale.scalar_type() == at::kFloat &&
                                       scale.is_contiguous() && scale.device() == lists.params[i].device()),
                lists.op, ": expected ", blocks, " float32 scales, got ", describe(scale));
  };
  if (!lists.first_scales.empty()) check(lists.first_scales[i]);
  if (!lists.second_scales.empty()) check(lists.second_scales[i]);
}

}  // namespace

bool lies_as(const Tensor& state, const Tensor& param) {
  return param.is_non_overlapping_and_dense() ? same_order(state, param) : state.is_contiguous();
}

void check_step(const StepLists& lists, int64_t block) {
  const size_t count = lists.params.size();
  for (const TensorList& each :
       {lists.grads, lists.first, lists.second, lists.largest, lists.first_scales, lists.second_scales, lists.steps})
    TORCH_CHECK(each.size() == count || (each.empty() && &each != &lists.grads), lists.op, ": expected lists of ",
                count, " tensors, got one of ", each.size());
  TORCH_CHECK(lists.first.empty() == lists.steps.empty(), lists.op, ": expected steps with moments, got ",
              lists.steps.size(), " and ", lists.first.size());
  TORCH_CHECK_VALUE(block == 64 || block == 128 || block == 256, lists.op,
                    ": expected a block_size of 64, 128 or 256, got ", block);
  for (size_t i = 0; i < count; ++i) {
    check_one(lists, i);
    check_scales(lists, i, block);
  }
}

namespace {

float* scale_of(TensorList scales, size_t i) {
  return scales.empty() || scales[i].numel() == 0 ? nullptr : scales[i].mutable_data_ptr<float>();
}

// A one-element tensor of the dtype on the device, or nothing.
OptionalTensor there(const OptionalTensor& x, c10::Device device, at::ScalarType dtype) {
  if (!x || !x->defined()) return std::nullopt;
  return x->to(device, dtype, /*non_blocking=*/true);
}
template <class T>
const T* pointer(const OptionalTensor& x) {
  return x ? x->const_data_ptr<T>() : nullptr;
}

// What does not lie in memory as the engines walk it, beside the copy that they get.
struct Copy {
  Tensor original, copy;
};

void run(const StepLists& lists, StepArgs args, const OptionalTensor& lr_tensor, const OptionalTensor& seed,
         const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  check_step(lists, args.block);
  const c10::Device device = lists.params[0].device();
  const OptionalTensor scale = there(grad_scale, device, at::kFloat), inf = there(found_inf, device, at::kFloat);
  const OptionalTensor key = there(seed, device, at::kLong);
  args.grad_scale = pointer<float>(scale);
  args.found_inf = pointer<float>(inf);
  args.seed = pointer<int64_t>(key);
  OptionalTensor lr;
  if (lr_tensor && lr_tensor->defined()) {
    if (runs_on_threads(device) || runs_on_threads(lr_tensor->device())) {
      args.lr = lr_tensor->item<double>();
    } else {
      lr = there(lr_tensor, device, at::kDouble);
      args.lr_there = pointer<double>(lr);
    }
  }

  std::vector<Copy> params, grads;
  std::vector<StepTensor> tensors;
  tensors.reserve(lists.params.size());
  int64_t offset = 0;
  for (size_t i = 0; i < lists.params.size(); ++i) {
    Tensor p = lists.params[i], g = lists.grads[i];
    if (!p.is_non_overlapping_and_dense()) p = params.emplace_back(Copy{p, p.clone(at::MemoryFormat::Contiguous)}).copy;
    if (!same_order(g, p)) {
      const Tensor copy = at::empty_strided(p.sizes(), p.strides(), g.options()).copy_(g);
      g = grads.emplace_back(Copy{g, copy}).copy;
    }
    StepTensor t;
    t.param = p.mutable_data_ptr();
    t.grad = args.grad_scale ? g.mutable_data_ptr() : const_cast<void*>(g.const_data_ptr());
    t.dtype = dtype_of(p);
    t.grad_dtype = dtype_of(g);
    if (!lists.first.empty()) {
      t.first = lists.first[i].mutable_data_ptr();
      t.step = lists.steps[i].mutable_data_ptr<float>();
      t.first_scale = scale_of(lists.first_scales, i);
      if (!t.first_scale && p.numel() > 0) t.state_dtype = dtype_of(lists.first[i]);
    }
    if (!lists.second.empty()) {
      t.second = lists.second[i].mutable_data_ptr();
      t.second_scale = scale_of(lists.second_scales, i);
    }
    if (!lists.largest.empty()) t.largest = lists.largest[i].mutable_data_ptr();
    t.numel = p.numel();
    t.offset = offset;
    offset += (t.numel + kStepUnit - 1) / kStepUnit * kStepUnit;
    tensors.push_back(t);
  }

  if (runs_on_threads(device)) {
    if (args.found_inf && *args.found_inf != 0) return;
    std::vector<StepNumbers> numbers;
    numbers.reserve(tensors.size());
    float last = -1;  // mostly the same for all
    for (const StepTensor& t : tensors) {
      const float step = t.step ? ++*t.step : 0;
      numbers.push_back(step == last ? numbers.back() : step_numbers(args, args.lr, step));
      last = step;
    }
    at::parallel_for(0, offset / kStepUnit, kStepGrain, [&](int64_t begin, int64_t end) {
      cpu::optimizer_step(args, args.lr, tensors.data(), numbers.data(), int64_t(tensors.size()), begin, end);
    });
  } else {
    on_stream(device, [&](auto stream) {
      const Tensor numbers =
          at::empty({int64_t(tensors.size() * sizeof(StepNumbers))}, lists.params[0].options().dtype(at::kByte));
      return cuda::optimizer_step(args, tensors.data(), int64_t(tensors.size()),
                                  static_cast<StepNumbers*>(numbers.mutable_data_ptr()), stream);
    });
  }
  for (const Copy& each : params) each.original.copy_(each.copy);
  if (args.grad_scale)
    for (const Copy& each : grads) each.original.copy_(each.copy);
}

// What autograd kept of the parameters is not what they are any more. The state is nobody's input.
void bump_versions(TensorList params) {
  for (const Tensor& p : params)
    if (!p.is_inference()) p.unsafeGetTensorImpl()->bump_version();
}

void adamw(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
           TensorList exp_avg_scales, TensorList exp_avg_sq_scales, TensorList steps, double lr,
           const OptionalTensor& lr_tensor, double beta1, double beta2, double eps, double weight_decay, bool maximize,
           int64_t block_size, const OptionalTensor& seed, const OptionalTensor& grad_scale,
           const OptionalTensor& found_inf) {
  StepArgs args;
  args.lr = lr, args.beta1 = beta1, args.beta2 = beta2, args.eps = eps, args.weight_decay = weight_decay;
  args.maximize = maximize;
  args.block = int(block_size);
  TORCH_CHECK(!exp_avgs.empty() && !exp_avg_sqs.empty(), "AdamW: expected moments, got none");
  TORCH_CHECK(max_exp_avg_sqs.empty() || exp_avg_scales.empty(),
              "AdamW: expected amsgrad without 8-bit state, got both");
  run({"AdamW", params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales, steps}, args,
      lr_tensor, seed, grad_scale, found_inf);
  bump_versions(params);
}

void sgd(TensorList params, TensorList grads, TensorList momentum_buffers, TensorList momentum_scales, TensorList steps,
         double lr, const OptionalTensor& lr_tensor, double momentum, double dampening, double weight_decay,
         bool nesterov, bool maximize, int64_t block_size, const OptionalTensor& seed, const OptionalTensor& grad_scale,
         const OptionalTensor& found_inf) {
  StepArgs args;
  args.rule = StepRule::sgd;
  args.lr = lr, args.momentum = momentum, args.dampening = dampening, args.weight_decay = weight_decay;
  args.nesterov = nesterov, args.maximize = maximize;
  args.block = int(block_size);
  run({"SGD", params, grads, momentum_buffers, {}, {}, momentum_scales, {}, steps}, args, lr_tensor, seed, grad_scale,
      found_inf);
  bump_versions(params);
}

TORCH_LIBRARY_IMPL(memkit, CPU, m) {
  m.impl("_adamw_", adamw);
  m.impl("_sgd_", sgd);
}
TORCH_LIBRARY_IMPL(memkit, CUDA, m) {
  m.impl("_adamw_", adamw);
  m.impl("_sgd_", sgd);
}

// Nothing comes back, so that there is nothing to tell a compiler.
void no_adamw(TensorList, TensorList, TensorList, TensorList, TensorList, TensorList, TensorList, TensorList, double,
              const OptionalTensor&, double, double, double, double, bool, int64_t, const OptionalTensor&,
              const OptionalTensor&, const OptionalTensor&) {}
void no_sgd(TensorList, TensorList, TensorList, TensorList, TensorList, double, const OptionalTensor&, double, double,
            double, bool, bool, int64_t, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&) {}
TORCH_LIBRARY_IMPL(memkit, Meta, m) {
  m.impl("_adamw_", no_adamw);
  m.impl("_sgd_", no_sgd);
}

}  // namespace
}  // namespace memkit
