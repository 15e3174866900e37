// Norms over rows on CUDA devices. Each call launches one kernel on the given stream of the current device and returns
// the launch's error code (cudaError_t; 0 is success).
#pragma once

#include "../formulas/norm.h"

struct CUstream_st;

namespace memkit::cuda {

int row_norm_forward(const RowNormArgs& args, CUstream_st* stream);

// How many blocks the backward pass has, and of how many parts of the rows it makes sums where the gradients of weight or
// bias are wanted (`parameters`): args.partial has then 2 * columns elements for each.
int row_norm_parts(const RowNormArgs& args, bool parameters, int64_t& parts);
int row_norm_backward(const RowNormArgs& args, int64_t parts, CUstream_st* stream);
int row_norm_reduce(const RowNormArgs& args, int64_t parts, void* grad_weight, void* grad_bias, CUstream_st* stream);

// Writes the bits of kIllConditioned and kNotInvertible that apply to any of the weights; into the host's memory, too.
int row_norm_flaws(const RowNormArgs& args, int* flaws, CUstream_st* stream);

}  // namespace memkit::cuda
