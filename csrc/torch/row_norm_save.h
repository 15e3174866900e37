// Whether a norm's backward may start from the output: x_hat = (y - bias) / weight.
#pragma once

#include "row_norm.h"

namespace memkit {

enum class Kept { input, output };

inline Statistics statistics_beside(Kept kept) {
  return kept == Kept::input ? Statistics::mean_and_rstd : Statistics::rstd;
}

// Whether `save` is one that norms know, and that a call in place can keep.
void check_save(const RowNorm& norm, std::string_view save, bool inplace);

// What `save` means for this call, which works in place or not. rounded: the gradient that arrives will have been rounded to
// the output's dtype, as under autocast, whether that is on or not.
//
// Weights are measured in each call, for versions do not tell: engines that shard or flatten parameters write past them. On
// CUDA "auto" does not wait for that: until a measurement is done the one before it holds, and before the first the input is
// kept. What the caller insists on (the output, in place) is refused by a measurement of now alone.
Kept resolve_kept(const RowNorm& norm, const at::Tensor& input, const OptionalTensor& weight,
                  const OptionalTensor& bias, std::string_view save, bool inplace, bool rounded = false);

// `made` was computed from the parameter, and is in each call anew, as 1 + weight. On CUDA nothing would ever be known of it.
void follow_weight(const at::Tensor& made, const at::Tensor& parameter);

}  // namespace memkit
