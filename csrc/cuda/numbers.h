// An array of a few numbers, read and written as doubles: parameters and statistics of any dtype, which kernels then take
// without a conversion before. Kernels include numbers.cuh.
#pragma once

#include "../formulas/arguments.h"

namespace memkit::cuda {

struct Numbers {
  void* data = nullptr;
  Dtype dtype = Dtype::float64;

  MEMKIT_FN explicit operator bool() const { return data != nullptr; }
  MEMKIT_FN double operator[](int64_t i) const;
  MEMKIT_FN void put(int64_t i, double x) const;
};

}  // namespace memkit::cuda
