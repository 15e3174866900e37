// Elements as they lie in memory, and the type the formulas compute in.
#pragma once

#include "../formulas/math.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include "../cpu/convert.h"
#endif

namespace memkit::cuda {

#if defined(__CUDACC__)
using Half = __half;
using Bfloat = __nv_bfloat16;
#else  // a test drives the tiles without a CUDA header
using Half = cpu::Half;
using Bfloat = cpu::Bfloat;
#endif

template <class S>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};

MEMKIT_FN float widen(float x) { return x; }
MEMKIT_FN double widen(double x) { return x; }

// Two at a time: the hardware rounds a pair of halves in one instruction.
MEMKIT_FN void narrow(float a, float b, float* to) { to[0] = a, to[1] = b; }
MEMKIT_FN void narrow(double a, double b, double* to) { to[0] = a, to[1] = b; }

#if defined(__CUDACC__)
MEMKIT_FN float widen(Half x) { return __half2float(x); }
MEMKIT_FN float widen(Bfloat x) { return __bfloat162float(x); }
MEMKIT_FN void narrow(float x, Half* to) { *to = __float2half_rn(x); }
MEMKIT_FN void narrow(float x, Bfloat* to) { *to = __float2bfloat16_rn(x); }

MEMKIT_FN void narrow(float a, float b, Half* to) {
  const __half2 pair = __floats2half2_rn(a, b);
  to[0] = pair.x, to[1] = pair.y;
}
MEMKIT_FN void narrow(float a, float b, Bfloat* to) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  to[0] = pair.x, to[1] = pair.y;
}
#else
MEMKIT_FN float widen(Half x) { return cpu::to_compute(x); }
MEMKIT_FN float widen(Bfloat x) { return cpu::to_compute(x); }
MEMKIT_FN void narrow(float x, Half* to) { cpu::from_compute(x, *to); }
MEMKIT_FN void narrow(float x, Bfloat* to) { cpu::from_compute(x, *to); }
MEMKIT_FN void narrow(float a, float b, Half* to) { cpu::from_compute(a, to[0]), cpu::from_compute(b, to[1]); }
MEMKIT_FN void narrow(float a, float b, Bfloat* to) { cpu::from_compute(a, to[0]), cpu::from_compute(b, to[1]); }
#endif

}  // namespace memkit::cuda
