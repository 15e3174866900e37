#include "norm_engine.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "../cpu/row_norm.h"
#include "../cuda/row_norm.h"
#include "engine.h"
#include "stream.h"

#ifdef MEMKIT_WITH_CUDA
#include <c10/core/Event.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace memkit {
namespace {

using at::Tensor;

int64_t grain_rows(const RowNormArgs& args) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, args.columns));
}

// Each thread sums over its rows; the sums are added up in the threads' order.
void backward_on_cpu(RowNormArgs args, Tensor& grad_weight, Tensor& grad_bias) {
  const bool parameters = grad_weight.defined() || grad_bias.defined();
  const int64_t most = (args.rows + grain_rows(args) - 1) / grain_rows(args);
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), most));
  Tensor partials;
  double* partial = nullptr;
  if (parameters) {
    partials = Tensor(at::detail::empty_cpu({parts, 2, args.columns}, at::kDouble));
    partial = partials.mutable_data_ptr<double>();
  }
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      RowNormArgs own = args;
      own.partial = partial ? partial + part * 2 * args.columns : nullptr;
      cpu::row_norm_backward(own, args.rows * part / parts, args.rows * (part + 1) / parts);
    }
  });
  if (!parameters) return;
  void* weight = grad_weight.defined() ? grad_weight.mutable_data_ptr() : nullptr;
  void* bias = grad_bias.defined() ? grad_bias.mutable_data_ptr() : nullptr;
  at::parallel_for(0, args.columns, std::max<int64_t>(1, kGrain / parts), [&](int64_t begin, int64_t end) {
    cpu::row_norm_reduce(args, partial, parts, weight, bias, begin, end);
  });
}

}  // namespace

void run_row_norm_forward(const RowNormArgs& args, c10::Device device) {
  if (args.rows == 0 || args.columns == 0) return;
  if (runs_on_threads(device)) {
    at::parallel_for(0, args.rows, grain_rows(args),
                     [&](int64_t begin, int64_t end) { cpu::row_norm_forward(args, begin, end); });
    return;
  }
  on_stream(device, [&](auto stream) { return cuda::row_norm_forward(args, stream); });
}

void run_row_norm_backward(RowNormArgs args, const Tensor& grad, Tensor& grad_weight, Tensor& grad_bias) {
  if (args.rows == 0 || args.columns == 0) {
    if (grad_weight.defined()) grad_weight.zero_();
    if (grad_bias.defined()) grad_bias.zero_();
    return;
  }
  if (runs_on_threads(grad.device())) return backward_on_cpu(args, grad_weight, grad_bias);
  void* weight = grad_weight.defined() ? grad_weight.mutable_data_ptr() : nullptr;
  void* bias = grad_bias.defined() ? grad_bias.mutable_data_ptr() : nullptr;
  on_stream(grad.device(), [&](auto stream) {
    int64_t parts = 0;
    if (const int error = cuda::row_norm_parts(args, parts)) return error;
    Tensor partials;
    if (weight || bias) {
      partials = at::empty({parts, 2, args.columns},
                           grad.options().dtype(args.dtype == Dtype::float64 ? at::kDouble : at::kFloat));
      args.partial = partials.mutable_data_ptr();
    }
    const int error = cuda::row_norm_backward(args, parts, stream);
    return error || !args.partial ? error : cuda::row_norm_reduce(args, parts, weight, bias, stream);
  });
}

#ifdef MEMKIT_WITH_CUDA

struct WeightMeasurement::Pending {
  Tensor host, device;
  c10::Event event{c10::DeviceType::CUDA};
  bool running = false;
};

namespace {
// While a graph is captured nothing else may be asked of the device.
bool capturing() { return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None; }
}  // namespace

#else
struct WeightMeasurement::Pending {};
#endif

void WeightMeasurement::start(const RowNorm& norm, const Tensor& weight, const OptionalTensor& bias) {
  const Tensor dense_weight = weight.contiguous();
  const OptionalTensor dense_bias = bias ? OptionalTensor(bias->contiguous()) : bias;
  RowNormArgs args;
  args.columns = weight.numel();
  args.centered = norm.centered;
  args.weight_dtype = dtype_of(weight);
  args.dtype = args.weight_dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32;
  args.out_dtype = dtype_of(norm.dtype);
  args.weight = dense_weight.const_data_ptr();
  args.bias = dense_bias ? dense_bias->const_data_ptr() : nullptr;
  if (runs_on_threads(weight.device())) {
    flaws_ = cpu::row_norm_flaws(args);
    return;
  }
#ifdef MEMKIT_WITH_CUDA
  if (capturing()) return;
  if (!pending_) {
    pending_ = std::make_shared<Pending>();
    pending_->host = at::zeros({1}, at::TensorOptions(at::kInt).pinned_memory(true));
    pending_->device = at::empty({1}, weight.options().dtype(at::kInt).requires_grad(false));
  }
  on_stream(weight.device(), [&](auto stream) {
    pending_->device.zero_();
    const int error = cuda::row_norm_flaws(args, pending_->device.mutable_data_ptr<int>(), stream);
    pending_->host.copy_(pending_->device, /*non_blocking=*/true);
    pending_->event.record(c10::cuda::getCurrentCUDAStream().unwrap());
    return error;
  });
  pending_->running = true;
#else
  flaws_ = 0;
  on_stream(weight.device(), [&](auto stream) { return cuda::row_norm_flaws(args, &*flaws_, stream); });
#endif
}

bool WeightMeasurement::done() {
#ifdef MEMKIT_WITH_CUDA
  if (pending_ && pending_->running) {
    if (capturing() || !pending_->event.query()) return false;
    flaws_ = *pending_->host.const_data_ptr<int>();
    pending_->running = false;
  }
#endif
  return true;
}

void WeightMeasurement::wait() {
#ifdef MEMKIT_WITH_CUDA
  if (pending_ && pending_->running && !capturing()) pending_->event.synchronize();
#endif
}

std::optional<int> WeightMeasurement::flaws() {
  done();
  return flaws_;
}

}  // namespace memkit
