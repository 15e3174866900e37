#include "activation.h"
#include "activation_launch.cuh"

namespace memkit::cuda {

int activation_backward_from_bits(const ActivationArgs& args, CUstream_st* stream) {
  return launch<BackwardFromBits>(args, stream);
}

}  // namespace memkit::cuda
