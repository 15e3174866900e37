// Softmax on the CPU. Each call covers the rows [begin, end); different rows share nothing.
#pragma once

#include "../formulas/softmax.h"

namespace memkit::cpu {

void softmax_forward(const SoftmaxArgs& args, int64_t begin, int64_t end);
void softmax_backward(const SoftmaxArgs& args, int64_t begin, int64_t end);

}  // namespace memkit::cpu
