// Cross entropy on a CUDA stream.
#pragma once

#include "../formulas/loss.h"

struct CUstream_st;

namespace memkit::cuda {

// Returns a cudaError_t. A class index out of range stops the kernel, as PyTorch's own does.
int cross_entropy(LossPass pass, const LossArgs& args, CUstream_st* stream);

}  // namespace memkit::cuda
