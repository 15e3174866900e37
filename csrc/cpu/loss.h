// Cross entropy on the CPU, over the rows [begin, end). Class indices were checked.
#pragma once

#include "../formulas/loss.h"

namespace memkit::cpu {

void cross_entropy(LossPass pass, const LossArgs& args, int64_t begin, int64_t end);

}  // namespace memkit::cpu
