// What plain loops do not express well, for each instruction set: dtypes of two bytes, and one bit an element.
#pragma once

#include <algorithm>

#include "convert.h"

namespace memkit::cpu {

// What works on a block is called: inlined wherever a block is read, for each dtype it may have, it took most of the
// compiler's time.
#define MEMKIT_OUTLINE __attribute__((noinline))
// Of a lambda.
#define MEMKIT_INLINE __attribute__((always_inline))

constexpr int64_t kBlock = 1024;  // elements that a call below takes at most; a multiple of 16
constexpr int64_t kTile = 64;     // elements that stay in registers, or nearly

// What the next block will need, where it comes from beyond the caches: read in blocks, memory would wait for the arithmetic
// and the arithmetic for memory. An address past the end does no harm.
MEMKIT_FN void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }
MEMKIT_FN void prefetch_to_write(void* address) { __builtin_prefetch(address, 1, 3); }
// The same of the tile so many elements behind this one.
template <class T>
constexpr int64_t kAhead = 3072 / sizeof(T);
template <class T>
MEMKIT_FN void prefetch_tile(const T* tile, int64_t ahead = kAhead<T>) {
  if (!asks_ahead) return;
  for (int64_t i = 0; i < kTile; i += 64 / sizeof(T)) prefetch(tile + ahead + i);
}

// f(i) for the elements of arrays, whose lines are asked for some time before where that `pays`: a processor takes up long
// computations so slowly that it does not get to the next loads by itself while memory is at work.
template <bool pays, class F, class... T>
MEMKIT_FN void for_elements(int64_t n, const F& f, const T*... arrays) {
  int64_t first = 0;
  if constexpr (pays)
    for (; first + kTile <= n; first += kTile) {
      (prefetch_tile(arrays + first), ...);
      MEMKIT_LOOP
      for (int64_t i = first; i < first + kTile; ++i) f(i);
    }
  MEMKIT_LOOP
  for (int64_t i = first; i < n; ++i) f(i);
}

// f(i) for the elements of rows that are in the cache: asks for what lies so far `ahead` of them in memory, unless that is 0,
// as of a loop's own space.
template <class F, class... T>
MEMKIT_FN void for_kept(int64_t n, int64_t ahead, const F& f, const T*... arrays) {
  const auto ask = [&](const auto* tile, int64_t length) MEMKIT_INLINE {
    using Element = std::decay_t<decltype(*tile)>;
    const int64_t own = std::max(ahead, kAhead<Element>);
    for (int64_t i = 0; i < length; i += 64 / sizeof(Element)) prefetch(tile + own + i);
  };
  int64_t first = 0;
  for (; ahead && first + kTile <= n; first += kTile) {
    (ask(arrays + first, kTile), ...);
    MEMKIT_LOOP
    for (int64_t i = first; i < first + kTile; ++i) f(i);
  }
  if (ahead) (ask(arrays + first, n - first), ...);
  MEMKIT_LOOP
  for (int64_t i = first; i < n; ++i) f(i);
}

// How the elements of a tile lie: as in memory, or, so that bfloat16 is widened and narrowed without moving words across a
// vector, those with even places first, then those with odd ones, of each two vectors. `apart` gives the same order to bits
// of elements, `together` the order of memory.
MEMKIT_FN uint64_t swapped(uint64_t bits, int distance, uint64_t chosen) {
  const uint64_t other = (bits ^ bits >> distance) & chosen;
  return bits ^ other ^ other << distance;
}
template <int kLanes>
MEMKIT_FN uint64_t apart(uint64_t bits) {
  bits = swapped(bits, 1, 0x2222222222222222);
  bits = swapped(bits, 2, 0x0c0c0c0c0c0c0c0c);
  bits = swapped(bits, 4, 0x00f000f000f000f0);
  return kLanes == 16 ? swapped(bits, 8, 0x0000ff000000ff00) : bits;
}
template <int kLanes>
MEMKIT_FN uint64_t together(uint64_t bits) {
  if (kLanes == 16) bits = swapped(bits, 8, 0x0000ff000000ff00);
  bits = swapped(bits, 4, 0x00f000f000f000f0);
  bits = swapped(bits, 2, 0x0c0c0c0c0c0c0c0c);
  return swapped(bits, 1, 0x2222222222222222);
}

// Element by element.
struct BaseLanes {
  static constexpr int kBytes = 16;                    // of a vector
  static constexpr bool masked(int) { return false; }  // whether elements of so many bytes are loaded under a mask
  template <class S, class T>
  MEMKIT_OUTLINE static void widen(const S* x, T* y, int64_t n) {
    load(x, y, n);
  }
  template <class T, class S>
  MEMKIT_OUTLINE static void narrow(const T* x, S* y, int64_t n) {
    store(x, y, n);
  }
  // Bit k of the bits is x[k] >= threshold; the last byte is filled up with zeros.
  template <class S, class T>
  MEMKIT_OUTLINE static void pack(const S* x, T threshold, uint8_t* bits, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) {
      unsigned byte = 0;
      for (int64_t k = 0; k < std::min<int64_t>(8, n - i); ++k)
        byte |= unsigned(to_compute(x[i + k]) >= threshold) << k;
      bits[i / 8] = uint8_t(byte);
    }
  }
  // All ones in sides[k] where bit k is set, zero elsewhere; n rounded up to whole bytes.
  MEMKIT_OUTLINE static void spread(const uint8_t* bits, int32_t* sides, int64_t n) {
    for (int64_t i = 0; i < n; i += 8)
      for (int k = 0; k < 8; ++k) sides[i + k] = -int32_t(bits[i / 8] >> k & 1);
  }
  MEMKIT_FN static void spread_tile(const uint8_t* bits, int32_t* sides) {
    for (int64_t i = 0; i < kTile; ++i) sides[i] = -int32_t(bits[i / 8] >> i % 8 & 1);
  }
  // Back from there: bit k is the sign of sides[k].
  MEMKIT_FN static uint64_t gather_tile(const int32_t* sides) {
    uint64_t word = 0;
    for (int64_t i = 0; i < kTile; ++i) word |= uint64_t(sides[i] < 0) << i;
    return word;
  }
};

#if MEMKIT_X86

// Eight lanes.
struct V3Lanes {
  static constexpr int64_t kLanes = 8;
  static constexpr int kBytes = 32;
  static constexpr bool masked(int bytes) { return bytes >= 4; }
  MEMKIT_TARGET_V3 static __m128i words(const void* x) { return _mm_loadu_si128(static_cast<const __m128i*>(x)); }
  MEMKIT_TARGET_V3 static __m256 lanes(const float* x) { return _mm256_loadu_ps(x); }
  MEMKIT_TARGET_V3 static __m256 lanes(const Half* x) { return _mm256_cvtph_ps(words(x)); }
  MEMKIT_TARGET_V3 static __m256 lanes(const Bfloat* x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words(x)), 16));
  }
  MEMKIT_TARGET_V3 static void put(const float* x, Half* y) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm256_cvtps_ph(_mm256_loadu_ps(x), 0));
  }
  // As from_compute, in the upper words.
  MEMKIT_TARGET_V3 static __m256i rounded(const float* x) {
    const __m256 v = _mm256_loadu_ps(x);
    const __m256i u = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(sum, _mm256_set1_epi32(0x7fc00000), nan);
  }
  MEMKIT_TARGET_V3 static void put(const float* x, Bfloat* y) {
    const __m256i kept = _mm256_srli_epi32(rounded(x), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(kept, kept), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm256_castsi256_si128(packed));
  }
  MEMKIT_TARGET_V3 static void take_tile(const Half* x, float* y) {
    for (int64_t i = 0; i < kTile; i += kLanes) _mm256_store_ps(y + i, lanes(x + i));
  }
  MEMKIT_TARGET_V3 static void put_tile(const float* x, Half* y) {
    for (int64_t i = 0; i < kTile; i += kLanes) put(x + i, y + i);
  }
  MEMKIT_TARGET_V3 static void take_tile(const Bfloat* x, float* y) {
    for (int64_t i = 0; i < kTile; i += 2 * kLanes) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
      _mm256_store_ps(y + i, _mm256_castsi256_ps(_mm256_slli_epi32(both, 16)));
      _mm256_store_ps(y + i + kLanes, _mm256_castsi256_ps(_mm256_blend_epi16(both, _mm256_setzero_si256(), 0x55)));
    }
  }
  MEMKIT_TARGET_V3 static void put_tile(const float* x, Bfloat* y) {
    for (int64_t i = 0; i < kTile; i += 2 * kLanes) {
      const __m256i even = _mm256_srli_epi32(rounded(x + i), 16);
      const __m256i both = _mm256_blend_epi16(even, rounded(x + i + kLanes), 0xaa);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + i), both);
    }
  }
  template <class S>
  MEMKIT_TARGET_V3 static void pack_lanes(const S* x, float threshold, uint8_t* bits) {
    *bits = uint8_t(_mm256_movemask_ps(_mm256_cmp_ps(lanes(x), _mm256_set1_ps(threshold), _CMP_GE_OQ)));
  }
  MEMKIT_TARGET_V3 static void pack_lanes(const double* x, double threshold, uint8_t* bits) {
    const __m256d limit = _mm256_set1_pd(threshold);
    const int low = _mm256_movemask_pd(_mm256_cmp_pd(_mm256_loadu_pd(x), limit, _CMP_GE_OQ));
    const int high = _mm256_movemask_pd(_mm256_cmp_pd(_mm256_loadu_pd(x + 4), limit, _CMP_GE_OQ));
    *bits = uint8_t(low | high << 4);
  }
  // Bit k is tile[k] >= threshold.
  MEMKIT_TARGET_V3 static uint64_t pack_tile(const float* tile, float threshold) {
    uint64_t word = 0;
    for (int64_t i = 0; i < kTile; i += kLanes) {
      const __m256 marked = _mm256_cmp_ps(_mm256_load_ps(tile + i), _mm256_set1_ps(threshold), _CMP_GE_OQ);
      word |= uint64_t(_mm256_movemask_ps(marked)) << i;
    }
    return word;
  }
  MEMKIT_OUTLINE MEMKIT_TARGET_V3 static void spread(const uint8_t* bits, int32_t* sides, int64_t n) {
    const __m256i place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int64_t i = 0; i < n; i += 8) {
      const __m256i own = _mm256_and_si256(_mm256_set1_epi32(bits[i / 8]), place);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sides + i), _mm256_cmpeq_epi32(own, place));
    }
  }
  // The same of a tile, whose sides may then stay in registers.
  MEMKIT_TARGET_V3 static void spread_tile(const uint8_t* bits, int32_t* sides) {
    for (int64_t i = 0; i < kTile; i += 4 * kLanes) {
      int32_t word;
      std::memcpy(&word, bits + i / 8, sizeof word);
      const __m256i words = _mm256_set1_epi32(word);
      __m256i place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
      for (int64_t k = i; k < i + 4 * kLanes; k += kLanes) {
        const __m256i own = _mm256_cmpeq_epi32(_mm256_and_si256(words, place), place);
        _mm256_store_si256(reinterpret_cast<__m256i*>(sides + k), own);
        place = _mm256_slli_epi32(place, kLanes);
      }
    }
  }
  MEMKIT_TARGET_V3 static uint64_t gather_tile(const int32_t* sides) {
    uint64_t word = 0;
    for (int64_t i = 0; i < kTile; i += 4 * kLanes) {
      const auto at = [&](int64_t k) MEMKIT_INLINE MEMKIT_TARGET_V3 {
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(sides + i + k * kLanes));
      };
      // In each half of a vector four bytes of each.
      const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(at(0), at(1)), _mm256_packs_epi32(at(2), at(3)));
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      word |= uint64_t(uint32_t(_mm256_movemask_epi8(_mm256_permutevar8x32_epi32(bytes, order)))) << i;
    }
    return word;
  }
  template <class S, class T>
  MEMKIT_OUTLINE MEMKIT_TARGET_V3 static void widen(const S* x, T* y, int64_t n) {
    int64_t i = 0;
    if constexpr (sizeof(S) == 2)
      for (; i + kLanes <= n; i += kLanes) {
        prefetch(x + i + kBlock);
        _mm256_storeu_ps(y + i, lanes(x + i));
      }
    load(x + i, y + i, n - i);  // what is left over
  }
  template <class T, class S>
  MEMKIT_OUTLINE MEMKIT_TARGET_V3 static void narrow(const T* x, S* y, int64_t n) {
    int64_t i = 0;
    if constexpr (sizeof(S) == 2)
      for (; i + kLanes <= n; i += kLanes) {
        prefetch_to_write(y + i + kBlock);
        put(x + i, y + i);
      }
    store(x + i, y + i, n - i);
  }
  template <class S, class T>
  MEMKIT_OUTLINE MEMKIT_TARGET_V3 static void pack(const S* x, T threshold, uint8_t* bits, int64_t n) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) pack_lanes(x + i, threshold, bits + i / 8);
    BaseLanes::pack(x + i, threshold, bits + i / 8, n - i);
  }
};

// Sixteen lanes.
struct V4Lanes {
  static constexpr int64_t kLanes = 16;
  static constexpr int kBytes = 64;
  static constexpr bool masked(int) { return true; }
  MEMKIT_TARGET_V4 static __m256i words(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
  MEMKIT_TARGET_V4 static __m512 lanes(const float* x) { return _mm512_loadu_ps(x); }
  MEMKIT_TARGET_V4 static __m512 lanes(const Half* x) { return _mm512_cvtph_ps(words(x)); }
  MEMKIT_TARGET_V4 static __m512 lanes(const Bfloat* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words(x)), 16));
  }
  MEMKIT_TARGET_V4 static void put(const float* x, Half* y) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), _mm512_cvtps_ph(_mm512_loadu_ps(x), 0));
  }
  // As from_compute, in the upper words.
  MEMKIT_TARGET_V4 static __m512i rounded(const float* x) {
    const __m512 v = _mm512_loadu_ps(x);
    const __m512i u = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i more = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    return _mm512_mask_add_epi32(_mm512_set1_epi32(0x7fc00000), _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), u, more);
  }
  MEMKIT_TARGET_V4 static void put(const float* x, Bfloat* y) {
    const __m256i kept = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(x), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), kept);
  }
  MEMKIT_TARGET_V4 static void take_tile(const Half* x, float* y) {
    for (int64_t i = 0; i < kTile; i += kLanes) _mm512_store_ps(y + i, lanes(x + i));
  }
  MEMKIT_TARGET_V4 static void put_tile(const float* x, Half* y) {
    for (int64_t i = 0; i < kTile; i += kLanes) put(x + i, y + i);
  }
  MEMKIT_TARGET_V4 static void take_tile(const Bfloat* x, float* y) {
    for (int64_t i = 0; i < kTile; i += 2 * kLanes) {
      const __m512i both = _mm512_loadu_si512(x + i);
      _mm512_store_ps(y + i, _mm512_castsi512_ps(_mm512_slli_epi32(both, 16)));
      const __m512i odd = _mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000)));
      _mm512_store_ps(y + i + kLanes, _mm512_castsi512_ps(odd));
    }
  }
  MEMKIT_TARGET_V4 static void put_tile(const float* x, Bfloat* y) {
    for (int64_t i = 0; i < kTile; i += 2 * kLanes) {
      const __m512i even = _mm512_srli_epi32(rounded(x + i), 16);
      _mm512_storeu_si512(y + i, _mm512_mask_mov_epi16(even, 0xaaaaaaaa, rounded(x + i + kLanes)));
    }
  }
  template <class S>
  MEMKIT_TARGET_V4 static void pack_lanes(const S* x, float threshold, uint8_t* bits) {
    const uint16_t both = _mm512_cmp_ps_mask(lanes(x), _mm512_set1_ps(threshold), _CMP_GE_OQ);
    std::memcpy(bits, &both, 2);
  }
  MEMKIT_TARGET_V4 static void pack_lanes(const double* x, double threshold, uint8_t* bits) {
    const __m512d limit = _mm512_set1_pd(threshold);
    bits[0] = _mm512_cmp_pd_mask(_mm512_loadu_pd(x), limit, _CMP_GE_OQ);
    bits[1] = _mm512_cmp_pd_mask(_mm512_loadu_pd(x + 8), limit, _CMP_GE_OQ);
  }
  // Bit k is tile[k] >= threshold.
  MEMKIT_TARGET_V4 static uint64_t pack_tile(const float* tile, float threshold) {
    uint64_t word = 0;
    for (int64_t i = 0; i < kTile; i += kLanes)
      word |= uint64_t(_mm512_cmp_ps_mask(_mm512_load_ps(tile + i), _mm512_set1_ps(threshold), _CMP_GE_OQ)) << i;
    return word;
  }
  MEMKIT_OUTLINE MEMKIT_TARGET_V4 static void spread(const uint8_t* bits, int32_t* sides, int64_t n) {
    for (int64_t i = 0; i < n; i += 8)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sides + i), _mm256_movm_epi32(bits[i / 8]));
  }
  MEMKIT_TARGET_V4 static void spread_tile(const uint8_t* bits, int32_t* sides) {
    for (int64_t i = 0; i < kTile; i += kLanes) {
      uint16_t word;
      std::memcpy(&word, bits + i / 8, sizeof word);
      _mm512_store_si512(sides + i, _mm512_movm_epi32(word));
    }
  }
  MEMKIT_TARGET_V4 static uint64_t gather_tile(const int32_t* sides) {
    uint64_t word = 0;
    for (int64_t i = 0; i < kTile; i += kLanes)
      word |= uint64_t(_mm512_movepi32_mask(_mm512_load_si512(sides + i))) << i;
    return word;
  }
  template <class S, class T>
  MEMKIT_OUTLINE MEMKIT_TARGET_V4 static void widen(const S* x, T* y, int64_t n) {
    int64_t i = 0;
    if constexpr (sizeof(S) == 2)
      for (; i + kLanes <= n; i += kLanes) {
        prefetch(x + i + kBlock);
        _mm512_storeu_ps(y + i, lanes(x + i));
      }
    load(x + i, y + i, n - i);  // what is left over
  }
  template <class T, class S>
  MEMKIT_OUTLINE MEMKIT_TARGET_V4 static void narrow(const T* x, S* y, int64_t n) {
    int64_t i = 0;
    if constexpr (sizeof(S) == 2)
      for (; i + kLanes <= n; i += kLanes) {
        prefetch_to_write(y + i + kBlock);
        put(x + i, y + i);
      }
    store(x + i, y + i, n - i);
  }
  template <class S, class T>
  MEMKIT_OUTLINE MEMKIT_TARGET_V4 static void pack(const S* x, T threshold, uint8_t* bits, int64_t n) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) pack_lanes(x + i, threshold, bits + i / 8);
    BaseLanes::pack(x + i, threshold, bits + i / 8, n - i);
  }
};

#endif

}  // namespace memkit::cpu
