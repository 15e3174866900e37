// Whether a norm's backward may start from the output: x_hat = (y - bias) / weight.
#pragma once

#include "row_norm.h"

namespace memkit {

struct OutputVerdict {
  bool exact;     // within twice the error of stock PyTorch's gradients: WeightCheck in formulas/norm.h
  bool possible;  // every weight can be divided by
};

// Measured in each call, for versions do not tell: engines that shard or flatten parameters write past them. On CUDA
// without waiting: until a measurement is done the one before it holds, and before the first `exact` is false.
// rounded: the gradient that arrives will have been rounded to the output's dtype, as under autocast.
OutputVerdict output_verdict(const RowNorm& norm, const OptionalTensor& weight, const OptionalTensor& bias,
                             bool rounded);

enum class Kept { input, output };

// What `save` means for this call, which works in place or not. rounded: as above, whether autocast is on or not.
Kept resolve_kept(const RowNorm& norm, const at::Tensor& input, const OptionalTensor& weight,
                  const OptionalTensor& bias, std::string_view save, bool inplace, bool rounded = false);

}  // namespace memkit
