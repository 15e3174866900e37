// Rows of any dtype, a chunk at a time in the type computed in, and sums over them.
#pragma once

#include "../formulas/arguments.h"
#include "compiled.h"

namespace memkit::cpu {

constexpr int64_t kChunk = 2048;  // elements: a few chunks fit in the first-level cache

template <class F>
MEMKIT_FN void with_storage(Dtype dtype, const F& f) {
  with_stored<Half, Bfloat>(dtype, f);
}

// The elements [first, first + n) of an array: where they lie if they are of type T, else widened into `space`.
// What is computed in double is stored in double.
template <class Lanes>
MEMKIT_FN const double* read(const void* array, Dtype, int64_t first, int64_t, double*) {
  return static_cast<const double*>(array) + first;
}
template <class Lanes>
MEMKIT_FN const float* read(const void* array, Dtype dtype, int64_t first, int64_t n, float* space) {
  if (dtype == Dtype::float32) return static_cast<const float*>(array) + first;
  with_storage(dtype, [&](auto stored) MEMKIT_INLINE {
    Lanes::widen(static_cast<const decltype(stored)*>(array) + first, space, n);
  });
  return space;
}

// Where to write such elements: in their place if they are of type T, else to `space`, for `written` to narrow.
template <class T>
MEMKIT_FN T* place(void* array, Dtype dtype, int64_t first, T* space) {
  return size_of(dtype) == sizeof(T) ? static_cast<T*>(array) + first : space;
}
template <class Lanes>
MEMKIT_FN void written(const double*, void*, Dtype, int64_t, int64_t) {}
template <class Lanes>
MEMKIT_FN void written(const float* values, void* array, Dtype dtype, int64_t first, int64_t n) {
  if (dtype == Dtype::float32) return;
  with_storage(dtype, [&](auto stored)
                          MEMKIT_INLINE { Lanes::narrow(values, static_cast<decltype(stored)*>(array) + first, n); });
}

}  // namespace memkit::cpu
