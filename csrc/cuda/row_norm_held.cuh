// What the kernels over rows that are held have in common.
#pragma once

#include "row_norm_held.h"
#include "storage.cuh"

namespace memkit::cuda {

// f(X(), Y()) for the dtypes that there are kernels for.
template <class F>
std::optional<int> with_dtypes(const RowNormArgs& args, const F& f) {
  switch (args.dtype) {
    case Dtype::float32:
      if (args.out_dtype == Dtype::float32) return f(float(), float());
      if (args.out_dtype == Dtype::bfloat16) return f(float(), Bfloat());
      if (args.out_dtype == Dtype::float16) return f(float(), Half());
      return std::nullopt;
    case Dtype::bfloat16:
      return args.out_dtype == Dtype::bfloat16 ? std::optional(f(Bfloat(), Bfloat())) : std::nullopt;
    case Dtype::float16: return args.out_dtype == Dtype::float16 ? std::optional(f(Half(), Half())) : std::nullopt;
    case Dtype::float64: break;
  }
  return std::nullopt;
}

}  // namespace memkit::cuda
