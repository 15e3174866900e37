// Max pooling on CUDA devices: one kernel on the given stream of the current device. Returns a cudaError_t.
#pragma once

#include "../formulas/pooling.h"

struct CUstream_st;

namespace memkit::cuda {

int max_pool_forward(const PoolArgs& args, CUstream_st* stream);
int max_pool_backward(const PoolArgs& args, CUstream_st* stream);

}  // namespace memkit::cuda
