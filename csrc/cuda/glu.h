// Gated linear units on CUDA devices. Each call launches one kernel on the given stream of the current device and returns
// the launch's error code (cudaError_t; 0 is success).
#pragma once

#include "../formulas/glu.h"

struct CUstream_st;

namespace memkit::cuda {

int glu_forward(const GluArgs& args, CUstream_st* stream);
int glu_backward(const GluArgs& args, CUstream_st* stream);

}  // namespace memkit::cuda
