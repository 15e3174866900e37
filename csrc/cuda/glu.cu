#include "activation_launch.cuh"
#include "glu.h"
#include "glu_pass.cuh"

namespace memkit::cuda {
namespace {

constexpr int kGluThreads = 256;

template <class Pass, int n>
__global__ void __launch_bounds__(kGluThreads) glu_kernel(const GluCall call) {
  const int64_t stride = int64_t(gridDim.x) * kGluThreads;
  for (int64_t item = int64_t(blockIdx.x) * kGluThreads + threadIdx.x; item < call.items; item += stride)
    Pass::template run<n>(call, item);
}

template <class Pass, class S>
cudaError_t launch_pass(const GluArgs& args, cudaStream_t stream) {
  const GluCall call = GluCall::of<S>(args);
  if (call.items == 0) return cudaSuccess;
  int processors = 0;
  if (const cudaError_t error = processor_count(processors)) return error;
  const unsigned blocks = unsigned(
      std::min<int64_t>((call.items + kGluThreads - 1) / kGluThreads, int64_t(processors) * kBlocksPerProcessor));
  if (call.wide)
    launch_kernel(glu_kernel<Pass, sizeof(Word) / sizeof(S)>, blocks, kGluThreads, stream, call);
  else
    launch_kernel(glu_kernel<Pass, 1>, blocks, kGluThreads, stream, call);
  return cudaGetLastError();
}

template <template <class> class Pass>
int launch_glu(const GluArgs& args, cudaStream_t stream) {
  switch (args.dtype) {
    case Dtype::float32: return launch_pass<Pass<float>, float>(args, stream);
    case Dtype::float64: return launch_pass<Pass<double>, double>(args, stream);
    case Dtype::float16: return launch_pass<Pass<Half>, Half>(args, stream);
    case Dtype::bfloat16: return launch_pass<Pass<Bfloat>, Bfloat>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int glu_forward(const GluArgs& args, CUstream_st* stream) { return launch_glu<GluForward>(args, stream); }

int glu_backward(const GluArgs& args, CUstream_st* stream) { return launch_glu<GluBackward>(args, stream); }

}  // namespace memkit::cuda
