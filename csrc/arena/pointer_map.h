// Blocks by their data pointer: open addressing, linear probing, at most half full.
#pragma once

#include <vector>

#include "block.h"

namespace memkit::arena {

class PointerMap {
 public:
  std::size_t size() const { return used_; }

  // Room for n more, so that insert() cannot fail.
  void reserve(std::size_t n) {
    if (2 * (used_ + n) <= slots_.size()) return;
    std::size_t size = slots_.empty() ? 1024 : slots_.size();
    while (size < 2 * (used_ + n)) size *= 2;
    std::vector<Block*> old(size);
    old.swap(slots_);
    for (Block* block : old)
      if (block) place(block);
  }

  void insert(Block* block) {
    reserve(1);
    place(block);
    ++used_;
  }

  Block* find(const void* data) const {
    if (slots_.empty()) return nullptr;
    for (std::size_t at = home(data);; at = index(at + 1))
      if (!slots_[at] || slots_[at]->data() == data) return slots_[at];
  }

  void erase(const Block* block) {
    std::size_t hole = home(block->data());
    while (slots_[hole] != block) hole = index(hole + 1);
    // What stands behind the hole and may stand in it moves up, so that a search can stop at the first empty slot.
    for (std::size_t at = index(hole + 1); slots_[at]; at = index(at + 1)) {
      if (index(at - home(slots_[at]->data())) < index(at - hole)) continue;
      slots_[hole] = slots_[at];
      hole = at;
    }
    slots_[hole] = nullptr;
    --used_;
  }

 private:
  std::size_t index(std::size_t number) const { return number & (slots_.size() - 1); }
  std::size_t home(const void* data) const {
    const std::uint64_t key = (reinterpret_cast<std::uintptr_t>(data) >> 4) * 0x9E3779B97F4A7C15ull;
    return index(key ^ (key >> 32));
  }
  void place(Block* block) {
    std::size_t at = home(block->data());
    while (slots_[at]) at = index(at + 1);
    slots_[at] = block;
  }

  std::size_t used_ = 0;
  std::vector<Block*> slots_;  // a power of two of them
};

}  // namespace memkit::arena
