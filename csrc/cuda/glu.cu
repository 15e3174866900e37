#include <cuda_runtime.h>

#include "activation_launch.cuh"
#include "glu.h"
#include "glu_pass.cuh"

namespace memkit::cuda {
namespace {

constexpr int kGluThreads = 256;

template <class Pass, class Op, int n>
__global__ void __launch_bounds__(kGluThreads) glu_kernel(const GluCall call, const Op op) {
  const int64_t stride = int64_t(gridDim.x) * kGluThreads;
  for (int64_t item = int64_t(blockIdx.x) * kGluThreads + threadIdx.x; item < call.items; item += stride)
    Pass::template run<n>(call, op, item);
}

template <template <class, class> class Pass, class S>
struct LaunchGlu {
  template <template <class, bool> class Formula>
  cudaError_t operator()(const GluArgs& args, cudaStream_t stream) const {
    using Op = Formula<typename ComputeType<S>::type, sizeof(S) == 2>;
    const GluCall call = GluCall::of<S>(args);
    if (call.items == 0) return cudaSuccess;
    int processors = 0;
    if (const cudaError_t error = processor_count(processors)) return error;
    const unsigned blocks = unsigned(
        std::min<int64_t>((call.items + kGluThreads - 1) / kGluThreads, int64_t(processors) * kBlocksPerProcessor));
    const Op op(ActParams{});
    if (call.wide)
      glu_kernel<Pass<Op, S>, Op, sizeof(Word) / sizeof(S)><<<blocks, kGluThreads, 0, stream>>>(call, op);
    else
      glu_kernel<Pass<Op, S>, Op, 1><<<blocks, kGluThreads, 0, stream>>>(call, op);
    return cudaGetLastError();
  }
};

template <template <class, class> class Pass>
int launch_glu(const GluArgs& args, cudaStream_t stream) {
  switch (args.dtype) {
    case Dtype::float32: return visit_gate(args.act, LaunchGlu<Pass, float>{}, args, stream);
    case Dtype::float64: return visit_gate(args.act, LaunchGlu<Pass, double>{}, args, stream);
    case Dtype::float16: return visit_gate(args.act, LaunchGlu<Pass, Half>{}, args, stream);
    case Dtype::bfloat16: return visit_gate(args.act, LaunchGlu<Pass, Bfloat>{}, args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int glu_forward(const GluArgs& args, CUstream_st* stream) { return launch_glu<GluForward>(args, stream); }

int glu_backward(const GluArgs& args, CUstream_st* stream) { return launch_glu<GluBackward>(args, stream); }

}  // namespace memkit::cuda
