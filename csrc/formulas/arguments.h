// What every engine is handed: raw pointers and sizes, no framework types.
#pragma once

#include <cstdint>

#include "gradient.h"
#include "random.h"

namespace memkit {

// Halves are computed in float.
enum class Dtype : int { float32, float64, float16, bfloat16 };

// Bytes of an element.
constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }

// f(a value of the type that the dtype is stored as), of those computed in float.
template <class Half, class Bfloat, class F>
MEMKIT_FN void with_stored(Dtype dtype, const F& f) {
  if (dtype == Dtype::float32) {
    f(float());
  } else if (dtype == Dtype::float16) {
    f(Half());
  } else {
    f(Bfloat());
  }
}

// Element i of the flat tensor gets data[(i / inner) % size] added; no bias when data is null.
struct Bias {
  const void* data = nullptr;
  int64_t size = 1;
  int64_t inner = 1;
};

// The flat, dense view of one activation call, y = residual + drop(act(x + bias)). Pointers are to `dtype` elements; out may be x or grad itself.
struct ActivationArgs {
  Act act;
  ActParams params;
  Dtype dtype;
  int64_t numel = 0;
  Bias bias = {};
  Drop drop = {};
  const void* residual = nullptr;  // forward; added where there is one
  const void* x = nullptr;         // forward: the input; backward: the saved input or the saved output
  const void* grad = nullptr;      // backward: the gradient of the output
  void* out = nullptr;             // forward: the output; backward: the gradient of the input
  uint8_t* bits = nullptr;         // bit i % 8 of byte i / 8: element i lies right of the minimum, or where the
                                   // function is active; null where not kept
};

// The number of bytes that hold one bit an element.
constexpr int64_t bit_bytes(int64_t numel) { return numel / 8 + (numel % 8 != 0); }

}  // namespace memkit
