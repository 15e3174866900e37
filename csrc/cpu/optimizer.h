// Optimizer steps on the CPU.
#pragma once

#include "../formulas/optimizer.h"

namespace memkit::cpu {

// Updates what of the tensors, in the order of their offsets, lies in the units [begin, end) of the whole list.
void optimizer_step(const StepArgs& args, double lr, const StepTensor* tensors, const StepNumbers* numbers,
                    int64_t count, int64_t begin, int64_t end);

}  // namespace memkit::cpu
