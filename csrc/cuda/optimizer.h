// Optimizer steps on CUDA devices: a few launches for the whole list on the given stream of the current device. Returns an
// error code (cudaError_t; 0 is success).
#pragma once

#include "../formulas/optimizer.h"

struct CUstream_st;

namespace memkit::cuda {

// numbers: space for one each tensor, in the device's memory.
int optimizer_step(const StepArgs& args, const StepTensor* tensors, int64_t count, StepNumbers* numbers,
                   CUstream_st* stream);

}  // namespace memkit::cuda
