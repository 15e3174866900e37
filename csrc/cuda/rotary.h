// Rotary embeddings on CUDA devices: one kernel on the given stream of the current device for all heads of q and k.
#pragma once

#include "../formulas/rotary.h"

struct CUstream_st;

namespace memkit::cuda {

// Returns a cudaError_t. A position without a row in the tables stops the kernel.
int rotary(const RotaryArgs& args, CUstream_st* stream);

}  // namespace memkit::cuda
