#include "activation.h"
#include "activation_launch.cuh"

namespace memkit::cuda {

int activation_backward_from_input(const ActivationArgs& args, CUstream_st* stream) {
  return launch<BackwardFromInput>(args, stream);
}

}  // namespace memkit::cuda
