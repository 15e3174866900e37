// Tensors with many zeros, kept as their other elements and a bit each.
#pragma once

#include <cstdint>

namespace memkit::cpu {

constexpr int64_t kNonzerosUnit = 4096;  // elements that are found, gathered or spread in one go; a multiple of 64

inline int64_t nonzeros_words(int64_t numel) { return (numel + 63) / 64; }
inline int64_t nonzeros_units(int64_t numel) { return (numel + kNonzerosUnit - 1) / kNonzerosUnit; }

// Elements are of 2, 4 or 8 bytes, floating point, and nonzero where one of their bits is: -0.0 and NaN are.
struct NonzerosArgs {
  int64_t numel = 0, element_size = 4;
  void* elements = nullptr;  // all of them; only `spread` writes here
  void* nonzeros = nullptr;  // those that are not zero, in their order; only `gather` writes here
  uint64_t* bits = nullptr;  // nonzeros_words(numel); only `find` writes here
  // Of each unit, and one more: `find` writes how many a unit has, the others read how many there are before it, and in all.
  int64_t* starts = nullptr;
};

// Each works on the units [begin, end), for a whole tensor or a thread's share of it.
// Returns whether one of the elements is -0.0.
bool find_nonzeros(const NonzerosArgs& args, int64_t begin, int64_t end);
void gather_nonzeros(const NonzerosArgs& args, int64_t begin, int64_t end);
void spread_nonzeros(const NonzerosArgs& args, int64_t begin, int64_t end);

}  // namespace memkit::cpu
