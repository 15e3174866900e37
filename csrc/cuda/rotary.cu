#include <algorithm>

#include "launch.cuh"
#include "rotary.h"
#include "rotary_pass.cuh"

namespace memkit::cuda {
namespace {

constexpr int kRotaryThreads = 256;

template <class Pass>
__global__ void __launch_bounds__(kRotaryThreads) rotary_kernel(const RotaryCall call) {
  const int64_t stride = int64_t(gridDim.x) * kRotaryThreads;
  for (int64_t item = int64_t(blockIdx.x) * kRotaryThreads + threadIdx.x; item < call.items; item += stride) {
    const int64_t i = call.row_items.divide(item);
    const RotaryRow row = call.row(i);
    if (!call.is_known(row.position)) __trap();
    Pass::run(call, row, item - i * call.row_items.value);
  }
}

template <class S, bool interleaved, bool wide, bool table_words = false>
void launch(const RotaryCall& call, cudaStream_t stream) {
  constexpr int64_t most = (int64_t(1) << 31) - 1;
  const auto blocks = unsigned(std::min((call.items + kRotaryThreads - 1) / kRotaryThreads, most));
  launch_kernel(call.args.back ? rotary_kernel<RotaryPass<S, interleaved, wide, true, table_words>>
                               : rotary_kernel<RotaryPass<S, interleaved, wide, false, table_words>>,
                blocks, kRotaryThreads, stream, call);
}

template <class S>
cudaError_t launch(const RotaryArgs& args, cudaStream_t stream) {
  const RotaryCall call = RotaryCall::of<S>(args);
  if (call.items == 0) return cudaSuccess;
  if (args.interleaved) {
    call.wide ? launch<S, true, true>(call, stream) : launch<S, true, false>(call, stream);
  } else if (!call.wide) {
    launch<S, false, false>(call, stream);
  } else if (sizeof(S) == 2 && call.table_words) {  // of wider elements a word is so few that angles one by one serve
    launch<S, false, true, sizeof(S) == 2>(call, stream);
  } else {
    launch<S, false, true>(call, stream);
  }
  return cudaGetLastError();
}

}  // namespace

int rotary(const RotaryArgs& args, CUstream_st* stream) {
  switch (args.dtype) {
    case Dtype::float32: return launch<float>(args, stream);
    case Dtype::float64: return launch<double>(args, stream);
    case Dtype::float16: return launch<Half>(args, stream);
    case Dtype::bfloat16: return launch<Bfloat>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace memkit::cuda
