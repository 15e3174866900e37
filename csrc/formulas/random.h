// Random bits by counter, and what dropout does with them: the same for an element on every engine.
#pragma once

#include "math.h"

namespace memkit {

struct Words {
  uint32_t at[4];
};

// a b, in two halves.
MEMKIT_FN void multiply(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
#if defined(__CUDA_ARCH__)
  high = __umulhi(a, b), low = a * b;  // one instruction; of 64-bit integers nvcc makes two
#else
  const uint64_t product = uint64_t(a) * b;
  high = uint32_t(product >> 32), low = uint32_t(product);
#endif
}

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011): a bijection of the
// counter for each key, so that nothing needs to be kept to draw the same words again.
MEMKIT_FN Words philox(uint64_t counter, uint64_t key) {
  uint32_t a = uint32_t(counter), b = uint32_t(counter >> 32), c = 0, d = 0;
  uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    uint32_t first, first_low, second, second_low;
    multiply(a, 0xD2511F53u, first, first_low);
    multiply(c, 0xCD9E8D57u, second, second_low);
    a = second ^ b ^ low;
    b = second_low;
    c = first ^ d ^ high;
    d = first_low;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

// Dropout as an affine map: a kept element becomes x * scale + kept, a dropped one x * 0 + dropped. Element i draws word
// i % 4 of counter i / 4 and is dropped where that is below threshold, which is the probability in units of 2^-32.
struct Drop {
  bool on = false;                // else there is none
  int64_t known = 0;              // the key,
  const int64_t* seed = nullptr;  // or where it is, in the engine's memory
  uint32_t threshold = 0;
  double scale = 1, kept = 0, dropped = 0;
  double unscale = 1;  // from what was kept back to the element, where kept is 0

  Drop() = default;
  // Of probability 1, which is no 32-bit threshold, whatever is drawn is dropped.
  Drop(int64_t known, const int64_t* seed, double p, double scale, double kept, double dropped)
      : on(true), known(known), seed(seed), scale(scale), kept(kept), dropped(dropped), unscale(1 / scale) {
    const double share = std::nearbyint(p * 0x1p32);
    if (share < 0x1p32)
      threshold = uint32_t(share);
    else
      this->scale = 0, this->kept = dropped;
  }

  MEMKIT_FN uint64_t key() const { return uint64_t(seed ? *seed : known); }
};

template <class T>
struct Dropper {
  T scale, kept, dropped;
  uint32_t threshold;
  MEMKIT_FN explicit Dropper(const Drop& d)
      : scale(T(d.scale)), kept(T(d.kept)), dropped(T(d.dropped)), threshold(d.threshold) {}
  MEMKIT_FN bool drops(uint32_t word) const { return word < threshold; }
  // A dropped NaN or infinity is NaN, as in 0 * x.
  MEMKIT_FN T value(T x, uint32_t word) const {
    const bool gone = drops(word);
    return x * select(gone, T(0), scale) + select(gone, dropped, kept);
  }
  MEMKIT_FN T gradient(T grad, uint32_t word) const { return grad * select(drops(word), T(0), scale); }
};

}  // namespace memkit
