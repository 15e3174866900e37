#include "engine.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "../cpu/activation.h"
#include "../cpu/glu.h"
#include "../cpu/pooling.h"
#include "../cpu/rotary.h"
#include "../cpu/softmax.h"
#include "../cuda/activation.h"
#include "../cuda/glu.h"
#include "../cuda/pooling.h"
#include "../cuda/rotary.h"
#include "../cuda/softmax.h"
#include "stream.h"

namespace memkit {
namespace {

// Elements a thread's share is a multiple of: whole bytes of bits, and whole cache lines of any dtype.
constexpr int64_t kUnit = 512;

// kernel(begin, end) over all elements, on torch's threads.
template <class Kernel>
void on_threads(int64_t numel, const Kernel& kernel) {
  const int64_t units = numel / kUnit + (numel % kUnit != 0);
  at::parallel_for(0, units, kGrain / kUnit,
                   [&](int64_t begin, int64_t end) { kernel(begin * kUnit, std::min(end * kUnit, numel)); });
}

}  // namespace

Dtype dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return Dtype::float32;
    case at::kDouble: return Dtype::float64;
    case at::kHalf: return Dtype::float16;
    case at::kBFloat16: return Dtype::bfloat16;
    default: TORCH_CHECK_TYPE(false, "memkit: expected float32, float64, float16 or bfloat16, got ", dtype);
  }
}

bool has_kernels(const at::Tensor& x) {
  const auto dtype = x.scalar_type();
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

void run_activation(Pass pass, const ActivationArgs& args, c10::Device device) {
  if (args.numel == 0) return;
  if (runs_on_threads(device)) {
    const auto kernel = pass == Pass::forward                ? cpu::activation_forward
                        : pass == Pass::backward_from_input  ? cpu::activation_backward_from_input
                        : pass == Pass::backward_from_output ? cpu::activation_backward_from_output
                                                             : cpu::activation_backward_from_bits;
    return on_threads(args.numel, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  }
  on_stream(device, [&](auto stream) {
    switch (pass) {
      case Pass::forward: return cuda::activation_forward(args, stream);
      case Pass::backward_from_input: return cuda::activation_backward_from_input(args, stream);
      case Pass::backward_from_output: return cuda::activation_backward_from_output(args, stream);
      default: return cuda::activation_backward_from_bits(args, stream);
    }
  });
}

void run_glu(const GluArgs& args, bool backward, c10::Device device) {
  if (args.rows * args.width == 0) return;
  if (runs_on_threads(device)) {
    const auto kernel = backward ? cpu::glu_backward : cpu::glu_forward;
    return on_threads(args.rows * args.width, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  }
  on_stream(device,
            [&](auto stream) { return backward ? cuda::glu_backward(args, stream) : cuda::glu_forward(args, stream); });
}

void run_max_pool(const PoolArgs& args, bool backward, c10::Device device) {
  if (!runs_on_threads(device)) {
    return on_stream(device, [&](auto stream) {
      return backward ? cuda::max_pool_backward(args, stream) : cuda::max_pool_forward(args, stream);
    });
  }
  const int64_t units = backward ? cpu::max_pool_units(args) : args.planes * args.rows.results;
  const auto kernel = backward ? cpu::max_pool_backward : cpu::max_pool_forward;
  // An element that a window looks at costs some four times what a cheap activation's does.
  const int64_t work = args.results() / units * (backward ? 1 : args.kernel()) * 4;
  at::parallel_for(0, units, grain_of(work), [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void run_rotary(const RotaryArgs& args, c10::Device device) {
  if (args.rows() == 0) return;
  if (!runs_on_threads(device)) return on_stream(device, [&](auto stream) { return cuda::rotary(args, stream); });
  at::parallel_for(0, args.rows(), grain_of(args.width),
                   [&](int64_t begin, int64_t end) { cpu::rotary(args, begin, end); });
}

void run_softmax(const SoftmaxArgs& args, bool backward, c10::Device device) {
  if (args.rows == 0 || args.columns == 0) return;
  if (runs_on_threads(device)) {
    const auto kernel = backward ? cpu::softmax_backward : cpu::softmax_forward;
    const int64_t grain = grain_of(row_cost(args.columns, backward ? 2 : 3));
    return at::parallel_for(0, args.rows, grain, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  }
  on_stream(device, [&](auto stream) {
    return backward ? cuda::softmax_backward(args, stream) : cuda::softmax_forward(args, stream);
  });
}

}  // namespace memkit
