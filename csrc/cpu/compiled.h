// A loop compiled for three instruction sets, the best of which is chosen when it is called.
#pragma once

#include "lanes.h"

namespace memkit::cpu {

// Body is a class template over the lanes (lanes.h) with one always-inline static function `run`. Also in an unnamed namespace
// its name has to be its own among those that take the same arguments: GCC gives these functions external linkage then.
// with_v4: whether for AVX-512 too; see has_v4.
template <template <class> class Body, bool with_v4 = true>
struct Compiled {
  template <class... Args>
  static void run(Args&&... args) {
#if MEMKIT_X86
    if constexpr (with_v4)
      if (isa() == Isa::v4) return v4(args...);
    if (isa() != Isa::base) return v3(args...);
#endif
    base(args...);
  }

 private:
  template <class... Args>
  static void base(Args&&... args) {
    Body<BaseLanes>::run(args...);
  }
#if MEMKIT_X86
  template <class... Args>
  MEMKIT_TARGET_V3 static void v3(Args&&... args) {
    Body<V3Lanes>::run(args...);
  }
  template <class... Args>
  MEMKIT_TARGET_V4 static void v4(Args&&... args) {
    Body<V4Lanes>::run(args...);
  }
#endif
};

}  // namespace memkit::cpu
