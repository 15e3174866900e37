// Activations on CUDA devices. Each call launches one kernel for the whole tensor on the given stream of the current
// device and returns the launch's error code (cudaError_t; 0 is success).
#pragma once

#include "../formulas/arguments.h"

struct CUstream_st;

namespace memkit::cuda {

int activation_forward(const ActivationArgs& args, CUstream_st* stream);
int activation_backward_from_input(const ActivationArgs& args, CUstream_st* stream);
int activation_backward_from_output(const ActivationArgs& args, CUstream_st* stream);
int activation_backward_from_bits(const ActivationArgs& args, CUstream_st* stream);

}  // namespace memkit::cuda
