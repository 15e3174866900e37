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
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <deque>
#include <mutex>
#include <vector>
#endif

namespace memkit {
namespace {

using at::Tensor;

// Each thread sums over its rows; the sums are added up in the threads' order.
void backward_on_cpu(RowNormArgs args, Tensor& grad_weight, Tensor& grad_bias) {
  const bool parameters = grad_weight.defined() || grad_bias.defined();
  const int64_t grain = grain_of(row_cost(args.columns, 1));
  const int64_t most = (args.rows + grain - 1) / grain;
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
  at::parallel_for(0, args.columns, grain_of(parts), [&](int64_t begin, int64_t end) {
    cpu::row_norm_reduce(args, partial, parts, weight, bias, begin, end);
  });
}

}  // namespace

void run_row_norm_forward(const RowNormArgs& args, c10::Device device) {
  if (args.rows == 0 || args.columns == 0) return;
  if (runs_on_threads(device)) {
    at::parallel_for(0, args.rows, grain_of(row_cost(args.columns, args.centered ? 3 : 1)),
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
    if (const int error = cuda::row_norm_parts(args, weight || bias, parts)) return error;
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

namespace {

// While a graph is captured nothing else may be asked of the device.
bool capturing() { return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None; }

constexpr int kRunning = -1;

// Words of the host's memory for kernels to write a result into. A kernel may outlive who has asked for its result, so none
// is given back to the system, and none to the next while it is awaited.
class HostWords {
 public:
  volatile int* take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t tries = idle_.size(); tries > 0; --tries) {
      volatile int* const word = idle_.front();
      idle_.pop_front();
      if (*word != kRunning) return word;
      idle_.push_back(word);
    }
    constexpr int64_t kPage = 256;
    pages_.push_back(at::zeros({kPage}, at::TensorOptions(at::kInt).pinned_memory(true)));
    int* const page = pages_.back().mutable_data_ptr<int>();
    for (int64_t i = 1; i < kPage; ++i) idle_.push_back(page + i);
    return page;
  }
  void give(volatile int* word) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(word);
  }
  static HostWords& get() {
    static HostWords& one = *new HostWords;
    return one;
  }

 private:
  std::mutex mutex_;
  std::vector<Tensor> pages_;
  std::deque<volatile int*> idle_;
};

}  // namespace

struct WeightMeasurement::Pending {
  volatile int* const word = HostWords::get().take();
  std::optional<c10::cuda::CUDAStream> stream;  // while it runs

  Pending() = default;
  Pending(const Pending&) = delete;
  ~Pending() { HostWords::get().give(word); }
};

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
  if (!pending_) pending_ = std::make_shared<Pending>();
  *pending_->word = kRunning;
  on_stream(weight.device(), [&](auto stream) {
    pending_->stream = c10::cuda::getCurrentCUDAStream();
    const int error = cuda::row_norm_flaws(args, const_cast<int*>(pending_->word), stream);
    if (error) *pending_->word = 0, pending_->stream.reset();
    return error;
  });
#else
  flaws_ = 0;
  on_stream(weight.device(), [&](auto stream) { return cuda::row_norm_flaws(args, &*flaws_, stream); });
#endif
}

bool WeightMeasurement::done() {
#ifdef MEMKIT_WITH_CUDA
  if (pending_ && pending_->stream) {
    const int found = *pending_->word;
    if (found == kRunning) return false;
    flaws_ = found;
    pending_->stream.reset();
  }
#endif
  return true;
}

void WeightMeasurement::wait() {
#ifdef MEMKIT_WITH_CUDA
  if (pending_ && pending_->stream && !capturing()) pending_->stream->synchronize();
#endif
}

std::optional<int> WeightMeasurement::flaws() {
  done();
  return flaws_;
}

}  // namespace memkit
