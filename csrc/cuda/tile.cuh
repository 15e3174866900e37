// The part of a tensor that one warp works on at a time, and how its lanes share it.
//
// A lane's memory accesses are 16 bytes wide and those of a warp adjacent: value k of a lane belongs to row k / width
// of the tile, and a row is `width` neighbouring elements for each lane in turn. Where a pointer is not aligned to 16
// bytes, and in a tensor's last, incomplete tile, the width is 1. Either way the arithmetic on a lane's values is
// the same code; only loads and stores ask which.
//
// Everything is plain code over a lane number, so that a test can play the lanes of a warp on the CPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "../formulas/arguments.h"
#include "storage.cuh"

#if defined(__CUDACC__)
#define MEMKIT_UNROLL _Pragma("unroll")
#define MEMKIT_ROLL _Pragma("unroll 1")
#else
#define MEMKIT_UNROLL
#define MEMKIT_ROLL
#endif

namespace memkit::cuda {

constexpr int kLanes = 32;

// What one instruction loads or stores.
#if defined(__CUDACC__)
using Word = uint4;
#else
struct alignas(16) Word {
  uint32_t parts[4];
} __attribute__((may_alias));
#endif

MEMKIT_FN void store_word(Word word, void* target) {
#if defined(__CUDA_ARCH__)
  // By name: the compiler splits an assignment into narrow stores.
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(word.x), "r"(word.y), "r"(word.z),
               "r"(word.w)
               : "memory");
#else
  *static_cast<Word*>(target) = word;
#endif
}
MEMKIT_FN void store_word(uint64_t half, void* target) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.u64 [%0], %1;" ::"l"(target), "l"(half) : "memory");
#else
  std::memcpy(target, &half, sizeof(half));
#endif
}

// As pairs, where the hardware rounds two in one instruction.
template <class S, class T, int n>
MEMKIT_FN void narrow_all(const T (&x)[n], S (&raw)[n]) {
  MEMKIT_UNROLL
  for (int k = 0; k < n; k += 2) narrow(x[k], x[k + 1], raw + k);
}

// Rows: independent loads that a lane has in flight from each tensor.
template <class S, int Rows>
struct Tile {
  using T = typename ComputeType<S>::type;
  static constexpr int width = sizeof(Word) / sizeof(S);  // elements in a word
  static constexpr int rows = Rows;
  static constexpr int values = width * Rows;  // of a lane
  static constexpr int elements = kLanes * values;

  int64_t first;  // element of the tensor
  int64_t numel;  // of the tensor
  int lane;
  bool wide;

  MEMKIT_FN Tile(int64_t index, int lane, int64_t numel, bool aligned)
      : first(index * elements), numel(numel), lane(lane), wide(aligned && first + elements <= numel) {}

  // The element of the tensor that is the first value of a wide row, and value k where rows are not wide.
  MEMKIT_FN int64_t wide_row(int row) const { return first + (row * kLanes + lane) * width; }
  MEMKIT_FN int64_t single(int k) const { return first + k * kLanes + lane; }

  // Value k in either case.
  MEMKIT_FN int64_t element(int k) const { return wide ? wide_row(k / width) + k % width : single(k); }

  MEMKIT_FN void load(const void* tensor, T (&x)[values]) const {
    S raw[values];
    wide ? fetch_words(tensor, raw) : fetch_singles(tensor, raw);
    widen_all(raw, x);
  }

  // Two tensors, and bits where there are any, under one question: where each has its own, a warp waits for the first
  // before it asks for the next. Returns the bits as load_bits does.
  MEMKIT_FN unsigned load(const void* first_tensor, T (&x)[values], const void* second_tensor, T (&y)[values],
                          const uint8_t* bits = nullptr) const {
    S raw_x[values], raw_y[values];
    unsigned sides = 0;
    if (wide) {
      fetch_words(first_tensor, raw_x);
      fetch_words(second_tensor, raw_y);
      if (bits) sides = wide_bits(bits);
    } else {
      fetch_singles(first_tensor, raw_x);
      fetch_singles(second_tensor, raw_y);
      if (bits) sides = single_bits(bits);
    }
    widen_all(raw_x, x);
    widen_all(raw_y, y);
    return sides;
  }

  MEMKIT_FN void store(const T (&y)[values], void* tensor) const {
    S* target = static_cast<S*>(tensor);
    S raw[values];
    narrow_all(y, raw);
    if (wide) {
      MEMKIT_UNROLL
      for (int row = 0; row < Rows; ++row) {
        Word word;
        std::memcpy(&word, raw + row * width, sizeof(word));
        store_word(word, target + wide_row(row));
      }
    } else {
      MEMKIT_UNROLL
      for (int k = 0; k < values; ++k)
        if (single(k) < numel) target[single(k)] = raw[k];
    }
  }

  // Bit k: the packed bit of value k.
  MEMKIT_FN unsigned load_bits(const uint8_t* bits) const { return wide ? wide_bits(bits) : single_bits(bits); }

  // The inverse, by all lanes together: peer(sides, d) is the argument that lane ^ d passed in.
  // Bits past the tensor's end are 0.
  template <class Peer>
  MEMKIT_FN void store_bits(unsigned sides, uint8_t* bits, Peer&& peer) const {
    if (wide) return gather_bits<width>(sides, bits, peer);
    MEMKIT_UNROLL
    for (int k = 0; k < values; ++k)
      if (single(k) >= numel) sides &= ~(1u << k);
    gather_bits<1>(sides, bits, peer);
  }

 private:
  MEMKIT_FN void fetch_words(const void* tensor, S (&raw)[values]) const {
    const S* source = static_cast<const S*>(tensor);
    MEMKIT_UNROLL
    for (int row = 0; row < Rows; ++row) {
      const Word word = *reinterpret_cast<const Word*>(source + wide_row(row));
      std::memcpy(raw + row * width, &word, sizeof(word));
    }
  }
  MEMKIT_FN void fetch_singles(const void* tensor, S (&raw)[values]) const {
    const S* source = static_cast<const S*>(tensor);
    MEMKIT_UNROLL
    for (int k = 0; k < values; ++k) raw[k] = single(k) < numel ? source[single(k)] : S{};
  }
  MEMKIT_FN static void widen_all(const S (&raw)[values], T (&x)[values]) {
    MEMKIT_UNROLL
    for (int k = 0; k < values; ++k) x[k] = widen(raw[k]);
  }

  MEMKIT_FN unsigned wide_bits(const uint8_t* bits) const {
    constexpr int sharers = 8 / width;
    unsigned sides = 0;
    MEMKIT_UNROLL
    for (int row = 0; row < Rows; ++row) {
      const unsigned byte = bits[wide_row(row) / 8];
      sides |= (byte >> (lane % sharers * width) & ((1u << width) - 1)) << (row * width);
    }
    return sides;
  }
  MEMKIT_FN unsigned single_bits(const uint8_t* bits) const {
    unsigned sides = 0;
    MEMKIT_UNROLL
    for (int k = 0; k < values; ++k)
      if (single(k) < numel) sides |= (bits[single(k) / 8] >> (lane % 8) & 1u) << k;
    return sides;
  }

  // 8 / run neighbouring lanes hold the bits of a byte of each row, `run` each; each of them writes the byte of every
  // (8 / run)-th row.
  template <int run, class Peer>
  MEMKIT_FN void gather_bits(unsigned sides, uint8_t* bits, Peer&& peer) const {
    constexpr int sharers = 8 / run, all_rows = values / run;
    MEMKIT_UNROLL
    for (int start = 0; start < all_rows; start += sharers) {
      const int row = start + lane % sharers;
      unsigned byte = 0;
      MEMKIT_UNROLL
      for (int d = 0; d < sharers; ++d) {
        const unsigned theirs = peer(sides, d) >> (row * run) & ((1u << run) - 1);
        byte |= theirs << ((lane ^ d) % sharers * run);
      }
      const int64_t index = first / 8 + row * (kLanes * run / 8) + lane / sharers;
      if (row < all_rows && index < bit_bytes(numel)) bits[index] = uint8_t(byte);
    }
  }
};

// The first n values go, and their replacements come last. A loop that does so once round may stay rolled, which unrolled
// would take more registers than there are: a register array has no index known at run time alone.
template <int n, int values, class T>
MEMKIT_FN void turn(T (&x)[values], const T (&last)[n]) {
  MEMKIT_UNROLL
  for (int j = n; j < values; ++j) x[j - n] = x[j];
  MEMKIT_UNROLL
  for (int j = 0; j < n; ++j) x[values - n + j] = last[j];
}

// Tiles that cover the tensor.
template <class Tile>
constexpr int64_t tile_count(int64_t numel) {
  return numel / Tile::elements + (numel % Tile::elements != 0);
}

}  // namespace memkit::cuda
