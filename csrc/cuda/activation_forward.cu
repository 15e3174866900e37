#include "activation.h"
#include "activation_launch.cuh"

namespace memkit::cuda {

int activation_forward(const ActivationArgs& args, CUstream_st* stream) { return launch<Forward>(args, stream); }

}  // namespace memkit::cuda
