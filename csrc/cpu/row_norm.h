// Norms over rows on the CPU. Each call covers the rows [begin, end); different rows share nothing.
#pragma once

#include "../formulas/norm.h"

namespace memkit::cpu {

void row_norm_forward(const RowNormArgs& args, int64_t begin, int64_t end);

// Puts these rows' share of the gradients of weight and bias into args.partial, doubles of this call alone.
void row_norm_backward(const RowNormArgs& args, int64_t begin, int64_t end);

// The sum of `count` partial sums of 2 * columns elements each, into the gradients of weight and bias (either may be
// null), for the columns [begin, end).
void row_norm_reduce(const RowNormArgs& args, const double* partials, int64_t count, void* grad_weight, void* grad_bias,
                     int64_t begin, int64_t end);

// Which of kIllConditioned and kNotInvertible apply to any of the weights.
int row_norm_flaws(const RowNormArgs& args);

}  // namespace memkit::cpu
