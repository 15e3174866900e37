// Gated linear units on the CPU. Each call covers the products [begin, end) of all rows, numbered densely.
#pragma once

#include "../formulas/glu.h"

namespace memkit::cpu {

void glu_forward(const GluArgs& args, int64_t begin, int64_t end);
void glu_backward(const GluArgs& args, int64_t begin, int64_t end);

}  // namespace memkit::cpu
