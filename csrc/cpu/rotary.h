// Rotary embeddings on the CPU. Each call covers the heads [begin, end) of all positions, numbered in the order of work.
#pragma once

#include "../formulas/rotary.h"

namespace memkit::cpu {

void rotary(const RotaryArgs& args, int64_t begin, int64_t end);

}  // namespace memkit::cpu
