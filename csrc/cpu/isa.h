// One body of code, compiled for three instruction sets and chosen once at run time.
//
// Plain loops over branch-free formulas vectorise well enough to be bound by memory; the SSE2 baseline alone is 7 to 15
// times slower. `target` on a thin wrapper around an always-inline body is what works inside templates, where
// target_clones does not.
#pragma once

#include <cstdlib>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__)
#define MEMKIT_X86 1
#define MEMKIT_TARGET_V4 __attribute__((target("arch=x86-64-v4,prefer-vector-width=512")))
#define MEMKIT_TARGET_V3 __attribute__((target("arch=x86-64-v3")))
#else
#define MEMKIT_X86 0
#define MEMKIT_TARGET_V4
#define MEMKIT_TARGET_V3
#endif

// The loop's iterations touch one element each; input and output may be the same memory.
#if defined(__clang__)
#define MEMKIT_LOOP _Pragma("clang loop vectorize(assume_safety)")
#define MEMKIT_ONE_LOOP MEMKIT_LOOP
#else
#define MEMKIT_LOOP _Pragma("GCC ivdep")
#define MEMKIT_ONE_LOOP MEMKIT_LOOP _Pragma("GCC unroll 1")  // or GCC unrolls it before it would vectorise it
#endif

namespace memkit::cpu {

enum class Isa : int { base, v3, v4 };

// Whether loops over T are compiled for AVX-512 as well. Those over float64 take AVX2's, but for softmax and pooling, which
// would be slower than stock's then, or nearly: the compiler is spared as many copies of them.
template <class T>
inline constexpr bool has_v4 = !std::is_same_v<T, double>;

// The best that the machine has; MEMKIT_CPU_ISA=v3 or base lowers it, as ATEN_CPU_CAPABILITY does for PyTorch.
inline Isa isa() {
#if MEMKIT_X86
  static const Isa best = [] {
    const char* asked = std::getenv("MEMKIT_CPU_ISA");
    const bool v3_at_most = asked && std::strcmp(asked, "v3") == 0;
    if (asked && std::strcmp(asked, "base") == 0) return Isa::base;
    __builtin_cpu_init();
    if (!v3_at_most && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
      return Isa::v4;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
        __builtin_cpu_supports("bmi2"))
      return Isa::v3;
    return Isa::base;
  }();
  return best;
#else
  return Isa::base;
#endif
}

// Whether loops should ask for memory ahead of time. A Xeon gains by it; AMD's cores (Zen 5) fetch as early by themselves, and what
// is asked for takes turns with what is needed, results to be written above all: layer norm took 1.2 to 1.4 times as long, from
// the second-level cache as from memory, gelu and silu into other memory 1.45 times.
inline const bool asks_ahead = [] {
#if MEMKIT_X86
  __builtin_cpu_init();
  return !__builtin_cpu_is("amd");
#else
  return true;
#endif
}();

inline const char* name(Isa isa) { return isa == Isa::v4 ? "v4" : isa == Isa::v3 ? "v3" : "base"; }

}  // namespace memkit::cpu
