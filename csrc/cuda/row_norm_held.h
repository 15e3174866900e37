// The norms' kernels for the usual calls: arrays aligned to 16 bytes, columns in eights, one of the usual pairs of
// dtypes. Nothing is launched, and nothing returned, for others.
#pragma once

#include <optional>

#include "../formulas/norm.h"

struct CUstream_st;

namespace memkit::cuda {

std::optional<int> row_norm_forward_held(const RowNormArgs& args, CUstream_st* stream);
std::optional<int> row_norm_backward_held_parts(const RowNormArgs& args, bool parameters, int processors,
                                                int64_t& parts);
std::optional<int> row_norm_backward_held(const RowNormArgs& args, int64_t parts, CUstream_st* stream);

}  // namespace memkit::cuda
