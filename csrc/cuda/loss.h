// Cross entropy on a CUDA stream.
#pragma once

#include <cuda_runtime.h>

#include "../formulas/loss.h"

namespace memkit::cuda {

// Returns a cudaError_t. A class index out of range stops the kernel, as PyTorch's own does.
int cross_entropy(LossPass pass, const LossArgs& args, cudaStream_t stream);

}  // namespace memkit::cuda
