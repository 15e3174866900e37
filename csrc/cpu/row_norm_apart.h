// Norms over rows whose elements lie apart (RowNormArgs::inner), for the rows [begin, end); row_norm.h calls them.
#pragma once

#include "../formulas/norm.h"

namespace memkit::cpu {

void row_norm_apart_forward(const RowNormArgs& args, int64_t begin, int64_t end);
void row_norm_apart_backward(const RowNormArgs& args, int64_t begin, int64_t end);

}  // namespace memkit::cpu
