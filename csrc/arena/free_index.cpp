#include "free_index.h"

namespace memkit::arena {

// From the request's class upwards: with an alignment above the granule, larger blocks may be needed.
Block* FreeIndex::find_exact(std::size_t size, std::size_t alignment) const {
  const Class own = class_of(size >> shift_);
  for (int row = own.row; row < kRows; ++row) {
    if (!(rows_ >> row & 1)) continue;
    for (int column = row == own.row ? own.column : 0; column < kClasses; ++column)
      for (Block* block = lists_[row][column]; block; block = block->next) {
        const std::uintptr_t start = round_up(block->address, alignment);
        if (start < block->end() && block->end() - start >= size) return block;
      }
  }
  return nullptr;
}

Block* FreeIndex::largest() const {
  if (!rows_) return nullptr;
  const int row = 63 - __builtin_clzll(rows_);
  Block* best = lists_[row][31 - __builtin_clz(columns_[row])];
  for (Block* block = best; block; block = block->next)
    if (block->size > best->size) best = block;
  return best;
}

std::string FreeIndex::check(std::size_t* blocks, std::size_t* bytes) const {
  for (int row = 0; row < kRows; ++row) {
    if (bool(rows_ >> row & 1) != (columns_[row] != 0))
      return "the bitmap of rows differs from that of row " + std::to_string(row);
    for (int column = 0; column < kClasses; ++column) {
      const std::string place = "class " + std::to_string(row) + "." + std::to_string(column);
      const Block* head = lists_[row][column];
      if (bool(columns_[row] >> column & 1) != (head != nullptr)) return "the bitmap differs from the list of " + place;
      for (const Block *block = head, *previous = nullptr; block; previous = block, block = block->next) {
        if (block->previous != previous) return "a broken link in " + place;
        if (block->state != State::free) return "a block that is not free in " + place;
        const Class at = class_of(block->size >> shift_);
        if (at.row != row || at.column != column) return "a block of another size in " + place;
        ++*blocks;
        *bytes += block->size;
      }
    }
  }
  return "";
}

}  // namespace memkit::arena
