#include "activation.h"
#include "activation_launch.cuh"

namespace memkit::cuda {

int activation_backward_from_output(const ActivationArgs& args, CUstream_st* stream) {
  return launch<BackwardFromOutput>(args, stream);
}

}  // namespace memkit::cuda
