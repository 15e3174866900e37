// How others find a free block: best fit in an ordered set, as caching allocators of deep-learning frameworks do, and
// best fit by walking a list in address order, as older memory pools do. Both coalesce at once and keep their nodes
// outside the memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <mutex>
#include <set>
#include <unordered_map>

namespace baseline {

constexpr std::size_t round_up(std::size_t n) { return n ? (n + 63) & ~std::size_t(63) : 64; }

class BestFitSet {
 public:
  struct Block {
    std::uintptr_t address;
    std::size_t size;
    Block *before, *after;
    bool free;
  };

  explicit BestFitSet(std::size_t bytes) { free_.insert(new Block{1 << 20, bytes, nullptr, nullptr, true}); }
  ~BestFitSet() {
    for (Block *block = first(), *after; block; block = after) {
      after = block->after;
      delete block;
    }
  }

  Block* allocate(std::size_t size) {
    const std::lock_guard<std::mutex> guard(mutex_);
    Block key{0, round_up(size), nullptr, nullptr, true};
    const auto at = free_.lower_bound(&key);
    if (at == free_.end()) return nullptr;
    Block* block = *at;
    free_.erase(at);
    if (block->size > key.size) {
      Block* rest = new Block{block->address + key.size, block->size - key.size, block, block->after, true};
      if (rest->after) rest->after->before = rest;
      block->after = rest;
      block->size = key.size;
      free_.insert(rest);
    }
    block->free = false;
    live_.emplace(reinterpret_cast<void*>(block->address), block);
    return block;
  }

  void free(Block* given) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto at = live_.find(reinterpret_cast<void*>(given->address));
    Block* block = at->second;
    live_.erase(at);
    block = merge(merge(block, block->after), block->before);
    block->free = true;
    free_.insert(block);
  }

 private:
  struct Less {
    bool operator()(const Block* a, const Block* b) const {
      return a->size != b->size ? a->size < b->size : a->address < b->address;
    }
  };

  Block* merge(Block* block, Block* other) {
    if (!other || !other->free) return block;
    free_.erase(other);
    Block *low = other == block->before ? other : block, *high = low == block ? other : block;
    low->size += high->size;
    low->after = high->after;
    if (low->after) low->after->before = low;
    delete high;
    return low;
  }

  Block* first() {
    Block* block = !free_.empty() ? *free_.begin() : live_.empty() ? nullptr : live_.begin()->second;
    while (block && block->before) block = block->before;
    return block;
  }

  std::mutex mutex_;
  std::set<Block*, Less> free_;
  std::unordered_map<void*, Block*> live_;
};

class BestFitList {
 public:
  struct Block {
    std::uintptr_t address;
    std::size_t size;
  };

  explicit BestFitList(std::size_t bytes) { free_.push_back({1 << 20, bytes}); }

  Block* allocate(std::size_t size) {
    const std::lock_guard<std::mutex> guard(mutex_);
    size = round_up(size);
    auto best = free_.end();
    for (auto at = free_.begin(); at != free_.end(); ++at)
      if (at->size >= size && (best == free_.end() || at->size < best->size)) {
        best = at;
        if (at->size == size) break;
      }
    if (best == free_.end()) return nullptr;
    Block* block = new Block{best->address, size};
    best->address += size;
    best->size -= size;
    if (!best->size) free_.erase(best);
    return block;
  }

  void free(Block* block) {
    const std::lock_guard<std::mutex> guard(mutex_);
    auto after = free_.begin();
    while (after != free_.end() && after->address < block->address) ++after;
    auto at = free_.insert(after, *block);
    delete block;
    if (after != free_.end() && at->address + at->size == after->address) {
      at->size += after->size;
      free_.erase(after);
    }
    if (at != free_.begin())
      if (const auto before = std::prev(at); before->address + before->size == at->address) {
        before->size += at->size;
        free_.erase(at);
      }
  }

 private:
  std::mutex mutex_;
  std::list<Block> free_;
};

}  // namespace baseline
