// See numbers.h.
#pragma once

#include "numbers.h"
#include "vector.cuh"

namespace memkit::cuda {

MEMKIT_FN double Numbers::operator[](int64_t i) const {
  return dtype == Dtype::float64 ? load_one<double>(data, dtype, i) : double(load_one<float>(data, dtype, i));
}
MEMKIT_FN void Numbers::put(int64_t i, double x) const {
  if (dtype == Dtype::float64) {
    store_one(x, data, dtype, i);
  } else {
    store_one(float(x), data, dtype, i);
  }
}

}  // namespace memkit::cuda
