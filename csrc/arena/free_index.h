// The free blocks of a lane by size: two-level segregated fit (Masmano et al., "TLSF: a new dynamic memory allocator
// for real-time systems", 2004). A row is a power of two of sizes, cut into 32 classes; bitmaps say which hold a block.
// Nothing depends on how many blocks there are, but largest() and find_exact() on how many are in one class.
#pragma once

#include <string>

#include "block.h"

namespace memkit::arena {

class FreeIndex {
 public:
  explicit FreeIndex(std::size_t granule) : shift_(__builtin_ctzll(granule)) {}
  FreeIndex(const FreeIndex&) = delete;
  FreeIndex& operator=(const FreeIndex&) = delete;

  bool empty() const { return !rows_; }
  // Whether a block of one size may get the other where it is, without remove() and insert().
  bool same_class(std::size_t one, std::size_t other) const {
    const Class a = class_of(one >> shift_), b = class_of(other >> shift_);
    return a.row == b.row && a.column == b.column;
  }
  void insert(Block* block);
  void remove(Block* block);

  // Some block of at least this size, or nullptr: the quick answer, which may miss blocks of the request's own class.
  Block* find(std::size_t size) const;
  // As find(), but misses nothing: the first in the request's own class that can hold it, aligned.
  Block* find_exact(std::size_t size, std::size_t alignment) const;
  Block* largest() const;

  // The first violation, or "". Counts the blocks and their bytes.
  std::string check(std::size_t* blocks, std::size_t* bytes) const;

 private:
  static constexpr int kBits = 5, kClasses = 1 << kBits, kRows = 64 - kBits + 1;
  static constexpr int kLook = 4;  // blocks of the request's own class that find() looks at

  struct Class {
    int row, column;
  };
  // The class that holds blocks of so many granules.
  static Class class_of(std::uint64_t granules) {
    if (granules < kClasses) return {0, int(granules)};
    const int top = 63 - __builtin_clzll(granules);
    return {top - kBits + 1, int(granules >> (top - kBits)) - kClasses};
  }

  unsigned shift_;
  std::uint64_t rows_ = 0;
  std::uint32_t columns_[kRows] = {};
  Block* lists_[kRows][kClasses] = {};
};

inline void FreeIndex::insert(Block* block) {
  const Class at = class_of(block->size >> shift_);
  Block*& head = lists_[at.row][at.column];
  block->previous = nullptr;
  block->next = head;
  if (head) head->previous = block;
  head = block;
  rows_ |= 1ull << at.row;
  columns_[at.row] |= 1u << at.column;
}

inline void FreeIndex::remove(Block* block) {
  if (block->next) block->next->previous = block->previous;
  if (block->previous) {
    block->previous->next = block->next;
    return;
  }
  const Class at = class_of(block->size >> shift_);
  lists_[at.row][at.column] = block->next;
  if (block->next) return;
  columns_[at.row] &= ~(1u << at.column);
  if (!columns_[at.row]) rows_ &= ~(1ull << at.row);
}

inline Block* FreeIndex::find(std::size_t size) const {
  const Class own = class_of(size >> shift_);
  // Training asks for the same sizes over and over: the block that fits exactly is mostly the last one freed. Going
  // straight to the next class, as TLSF does, would cut a larger block while the fitting hole stays.
  Block* block = lists_[own.row][own.column];
  for (int look = 0; block && look < kLook; ++look, block = block->next)
    if (block->size >= size) return block;
  int row = own.row;
  std::uint32_t columns = columns_[row] & (~1u << own.column);  // of a class above, every block fits
  if (!columns) {
    const std::uint64_t rows = rows_ & (~1ull << row);
    if (!rows) return nullptr;
    row = __builtin_ctzll(rows);
    columns = columns_[row];
  }
  return lists_[row][__builtin_ctz(columns)];
}

}  // namespace memkit::arena
