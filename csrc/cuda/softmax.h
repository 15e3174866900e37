// Softmax on CUDA devices. Each call launches one kernel on the given stream of the current device and returns the launch's
// error code (cudaError_t; 0 is success).
#pragma once

#include "../formulas/softmax.h"

struct CUstream_st;

namespace memkit::cuda {

int softmax_forward(const SoftmaxArgs& args, CUstream_st* stream);
int softmax_backward(const SoftmaxArgs& args, CUstream_st* stream);

}  // namespace memkit::cuda
