// Max pooling on the CPU.
#pragma once

#include "../formulas/pooling.h"

namespace memkit::cpu {

// Rows of results [begin, end), over all planes.
void max_pool_forward(const PoolArgs& args, int64_t begin, int64_t end);

// Units of the gradient that share no element: some channels of a plane.
int64_t max_pool_units(const PoolArgs& args);
void max_pool_backward(const PoolArgs& args, int64_t begin, int64_t end);

}  // namespace memkit::cpu
