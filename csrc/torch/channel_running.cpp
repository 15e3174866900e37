#include "channel_running.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "../formulas/channel_norm.h"
#include "checks.h"

namespace memkit {

bool is_unseen(const at::Tensor& x) {
  const bool transformed = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  return is_plain(x) && !transformed && !torch::jit::tracer::isTracing();
}

bool is_array(const at::Tensor& x, at::ScalarType dtype) {
  return is_unseen(x) && !x.is_inference() && x.is_cpu() && x.is_contiguous() && x.scalar_type() == dtype;
}

// Its few operators take as long as the norm of a small tensor.
at::Tensor move_running(const at::Tensor& running, const at::Tensor& found, double factor, double momentum) {
  const at::NoGradGuard no_grad;
  if (is_array(running, at::kFloat) && is_array(found, at::kDouble) && running.sizes() == found.sizes()) {
    float* const x = running.mutable_data_ptr<float>();
    const double* const to = found.const_data_ptr<double>();
    for (int64_t i = 0; i < running.numel(); ++i) x[i] = float(moved(x[i], factor * to[i], momentum));
    torch::autograd::impl::bump_version(running);
    return running;
  }
  const at::Tensor scaled = factor == 1 ? found : found.mul(factor);
  return running.lerp_(scaled.to(running.scalar_type()), momentum);
}

void RunningStatistics::move(const at::Tensor& found_mean, const at::Tensor& found_variance, int64_t count) const {
  move_running(mean, found_mean, 1, momentum);
  move_running(variance, found_variance, unbiased(count), momentum);
}

}  // namespace memkit
