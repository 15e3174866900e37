// Loops over 64 elements and the word that says which of them are not zero.
#include "nonzeros.h"

#include <algorithm>
#include <cstring>

#include "compiled.h"

namespace memkit::cpu {
namespace {

template <class E>
constexpr E kSign = E(1) << (8 * sizeof(E) - 1);

// What each instruction set does with a word's elements; E is their bits.
template <class E, class Lanes>
struct Words {
  // Bit k is x[k] != 0, for n elements; notes a -0.0, of which it is true as well.
  MEMKIT_FN static uint64_t find(const E* x, int64_t n, bool& negative_zero) {
    alignas(64) uint8_t is_nonzero[64] = {};
    E found = 0;
    MEMKIT_LOOP
    for (int64_t k = 0; k < n; ++k) {
      is_nonzero[k] = x[k] != 0;
      found |= E(x[k] == kSign<E>);
    }
    negative_zero |= found != 0;
    uint64_t word = 0;
    for (int k = 0; k < 8; ++k) {
      uint64_t eight;
      std::memcpy(&eight, is_nonzero + 8 * k, 8);
      word |= (eight * 0x0102040810204080u >> 56) << 8 * k;
    }
    return word;
  }
  // Of n elements, into memory that goes on to `end`. Returns behind what it wrote.
  MEMKIT_FN static E* gather(const E* x, uint64_t word, E* nonzeros, const E* /*end*/, int64_t /*n*/) {
    for (; word; word &= word - 1) *nonzeros++ = x[__builtin_ctzll(word)];
    return nonzeros;
  }
  // Returns behind what it read; n elements.
  MEMKIT_FN static E* spread(E* nonzeros, uint64_t word, E* x, const E* /*end*/, int64_t n) {
    std::memset(x, 0, size_t(n) * sizeof(E));
    for (; word; word &= word - 1) x[__builtin_ctzll(word)] = *nonzeros++;
    return nonzeros;
  }
};

#if MEMKIT_X86

// Sixteen elements at a time, which is what one instruction moves together or apart; two bytes are widened to four.
template <class E>
struct Words<E, V4Lanes> {
  static constexpr int kTogether = sizeof(E) == 8 ? 8 : 16;

  MEMKIT_TARGET_V4 static uint64_t find(const E* x, int64_t n, bool& negative_zero) {
    uint64_t word = 0;
    unsigned negative = 0;
    const auto add = [&](unsigned mask, int64_t k) MEMKIT_INLINE MEMKIT_TARGET_V4 {
      const __m512i v = load(mask, x + k);
      word |= uint64_t(nonzeros_of(v)) << k;
      negative |= negative_zeros_of(v);
    };
    if (n == 64)
      for (int64_t k = 0; k < 64; k += kTogether) add(kAll, k);
    else
      for (int64_t k = 0; k < n; k += kTogether) add(first(n - k), k);
    negative_zero |= negative != 0;
    return word;
  }
  // Whole vectors where there is room for them: what is written or read behind the last element is another's turn next. No
  // vector of nothing, at an address where nothing may be: a processor takes a hundred times as long to see that it need not.
  MEMKIT_TARGET_V4 static E* gather(const E* x, uint64_t word, E* nonzeros, const E* end, int64_t n) {
    const bool whole = n == 64 && end - nonzeros >= 64;
    for (int64_t k = 0; k < n; k += kTogether) {
      const unsigned mask = word >> k & kAll;
      const int count = __builtin_popcount(mask);
      if (whole)
        store(kAll, nonzeros, together(mask, load(kAll, x + k)));
      else if (mask)
        store(first(count), nonzeros, together(mask, load(mask, x + k)));
      nonzeros += count;
    }
    return nonzeros;
  }
  MEMKIT_TARGET_V4 static E* spread(E* nonzeros, uint64_t word, E* x, const E* end, int64_t n) {
    const bool whole = n == 64 && end - nonzeros >= 64;
    for (int64_t k = 0; k < n; k += kTogether) {
      const unsigned mask = word >> k & kAll;
      const int count = __builtin_popcount(mask);
      if (whole)
        store(kAll, x + k, apart(mask, load(kAll, nonzeros)));
      else
        store(first(n - k), x + k, mask ? apart(mask, load(first(count), nonzeros)) : _mm512_setzero_si512());
      nonzeros += count;
    }
    return nonzeros;
  }

 private:
  static constexpr unsigned kAll = (1u << kTogether) - 1;

  static unsigned first(int64_t n) { return n >= kTogether ? kAll : (1u << n) - 1; }
  MEMKIT_TARGET_V4 static __m512i load(unsigned mask, const E* x) {
    if constexpr (sizeof(E) == 2) return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16(mask), x));
    if constexpr (sizeof(E) == 4) return _mm512_maskz_loadu_epi32(__mmask16(mask), x);
    if constexpr (sizeof(E) == 8) return _mm512_maskz_loadu_epi64(__mmask8(mask), x);
  }
  MEMKIT_TARGET_V4 static void store(unsigned mask, E* x, __m512i v) {
    if constexpr (sizeof(E) == 2) _mm256_mask_storeu_epi16(x, __mmask16(mask), _mm512_cvtepi32_epi16(v));
    if constexpr (sizeof(E) == 4) _mm512_mask_storeu_epi32(x, __mmask16(mask), v);
    if constexpr (sizeof(E) == 8) _mm512_mask_storeu_epi64(x, __mmask8(mask), v);
  }
  MEMKIT_TARGET_V4 static unsigned nonzeros_of(__m512i v) {
    if constexpr (sizeof(E) == 8) return _mm512_test_epi64_mask(v, v);
    return _mm512_test_epi32_mask(v, v);
  }
  MEMKIT_TARGET_V4 static unsigned negative_zeros_of(__m512i v) {
    if constexpr (sizeof(E) == 8) return _mm512_cmpeq_epi64_mask(v, _mm512_set1_epi64(int64_t(kSign<E>)));
    return _mm512_cmpeq_epi32_mask(v, _mm512_set1_epi32(int32_t(kSign<E>)));
  }
  MEMKIT_TARGET_V4 static __m512i together(unsigned mask, __m512i v) {
    if constexpr (sizeof(E) == 8) return _mm512_maskz_compress_epi64(__mmask8(mask), v);
    return _mm512_maskz_compress_epi32(__mmask16(mask), v);
  }
  MEMKIT_TARGET_V4 static __m512i apart(unsigned mask, __m512i v) {
    if constexpr (sizeof(E) == 8) return _mm512_maskz_expand_epi64(__mmask8(mask), v);
    return _mm512_maskz_expand_epi32(__mmask16(mask), v);
  }
};

#endif

template <class E>
struct Find {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const NonzerosArgs& args, int64_t begin, int64_t end, bool& negative_zero) {
      const E* const x = static_cast<const E*>(args.elements);
      for (int64_t u = begin; u < end; ++u) {
        int64_t count = 0;
        const int64_t last = std::min((u + 1) * kNonzerosUnit, args.numel);
        for (int64_t i = u * kNonzerosUnit; i < last; i += 64) {
          const int64_t n = std::min<int64_t>(64, last - i);
          const uint64_t word = Words<E, Lanes>::find(x + i, n, negative_zero);
          count += __builtin_popcountll(word);
          args.bits[i / 64] = word;
        }
        args.starts[u] = count;
      }
    }
  };
};

// There and back.
template <class E, bool gathers>
struct Move {
  template <class Lanes>
  struct Body {
    MEMKIT_FN static void run(const NonzerosArgs& args, int64_t begin, int64_t end) {
      E* const x = static_cast<E*>(args.elements);
      E* nonzeros = static_cast<E*>(args.nonzeros) + args.starts[begin];
      const E* const behind = static_cast<E*>(args.nonzeros) + args.starts[end];
      const int64_t last = std::min(end * kNonzerosUnit, args.numel);
      for (int64_t i = begin * kNonzerosUnit; i < last; i += 64) {
        const uint64_t word = args.bits[i / 64];
        const int64_t n = std::min<int64_t>(64, last - i);
        if constexpr (gathers)
          nonzeros = Words<E, Lanes>::gather(x + i, word, nonzeros, behind, n);
        else
          nonzeros = Words<E, Lanes>::spread(nonzeros, word, x + i, behind, n);
      }
    }
  };
};
template <class E>
using Gather = Move<E, true>;
template <class E>
using Spread = Move<E, false>;

template <template <class> class Pass, class... Rest>
void run(const NonzerosArgs& args, int64_t begin, int64_t end, Rest&... rest) {
  switch (args.element_size) {
    case 2: return Compiled<Pass<uint16_t>::template Body>::run(args, begin, end, rest...);
    case 4: return Compiled<Pass<uint32_t>::template Body>::run(args, begin, end, rest...);
    default: return Compiled<Pass<uint64_t>::template Body>::run(args, begin, end, rest...);
  }
}

}  // namespace

bool find_nonzeros(const NonzerosArgs& args, int64_t begin, int64_t end) {
  bool negative_zero = false;
  run<Find>(args, begin, end, negative_zero);
  return negative_zero;
}

void gather_nonzeros(const NonzerosArgs& args, int64_t begin, int64_t end) { run<Gather>(args, begin, end); }

void spread_nonzeros(const NonzerosArgs& args, int64_t begin, int64_t end) { run<Spread>(args, begin, end); }

}  // namespace memkit::cpu
