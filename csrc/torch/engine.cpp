#include "engine.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "../cpu/activation.h"

#ifdef MEMKIT_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../cuda/activation.h"
#endif

namespace memkit {
namespace {

// Elements a thread's share is a multiple of: whole bytes of bits, and whole cache lines of any dtype.
constexpr int64_t kUnit = 512;
// Below this many elements one thread is faster than waking a second (ATen's own grain size).
constexpr int64_t kGrain = 32768;

void run_on_cpu(Pass pass, const ActivationArgs& args) {
  const auto kernel = pass == Pass::forward               ? cpu::activation_forward
                      : pass == Pass::backward_from_input ? cpu::activation_backward_from_input
                                                          : cpu::activation_backward_from_output;
  const int64_t units = args.numel / kUnit + (args.numel % kUnit != 0);
  at::parallel_for(0, units, kGrain / kUnit,
                   [&](int64_t begin, int64_t end) { kernel(args, begin * kUnit, std::min(end * kUnit, args.numel)); });
}

}  // namespace

Dtype dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return Dtype::float32;
    case at::kDouble: return Dtype::float64;
    case at::kHalf: return Dtype::float16;
    case at::kBFloat16: return Dtype::bfloat16;
    default: TORCH_INTERNAL_ASSERT(false, "a dtype that was not checked");
  }
}

void run_activation(Pass pass, const ActivationArgs& args, c10::Device device) {
  if (args.numel == 0) return;
  if (device.is_cpu()) return run_on_cpu(pass, args);
#ifdef MEMKIT_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  const auto kernel = pass == Pass::forward               ? cuda::activation_forward
                      : pass == Pass::backward_from_input ? cuda::activation_backward_from_input
                                                          : cuda::activation_backward_from_output;
  C10_CUDA_CHECK(static_cast<cudaError_t>(kernel(args, c10::cuda::getCurrentCUDAStream().stream())));
#else
  TORCH_CHECK(false, "memkit: expected a CPU tensor, got one on ", device,
              "; this memkit was built without CUDA: rebuild with MEMKIT_CUDA=1");
#endif
}

}  // namespace memkit
