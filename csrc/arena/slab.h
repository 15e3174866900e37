// Block nodes, made by the thousand and recycled, so that a steady state does not touch the heap.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "block.h"

namespace memkit::arena {

class Slab {
 public:
  // As many nodes stay dead before one is reused; so long a second free of a block is recognised.
  explicit Slab(std::size_t delay = 0) : delay_(delay) {}

  Block* take() {
    if (dead_ <= delay_) grow();
    Block* block = head_;
    head_ = block->next;
    --dead_;
    block->next = nullptr;
    return block;
  }

  // The node keeps its owner, which is how a second free finds back.
  void give(Block* block) {
    block->state = State::dead;
    block->chunk = nullptr;
    if (delay_) {
      block->next = nullptr;
      tail_->next = block;
      tail_ = block;
    } else {
      block->next = head_;
      head_ = block;
    }
    ++dead_;
  }

  // take() needs no heap for the next n nodes.
  void reserve(std::size_t n) {
    while (dead_ < delay_ + n) grow();
  }

  std::size_t made() const { return made_; }
  std::size_t dead() const { return dead_; }

 private:
  static constexpr std::size_t kNodes = 1024, kHugePage = std::size_t(2) << 20;

  struct Release {
    void operator()(Block* nodes) const noexcept { std::free(nodes); }
  };

  // Many nodes stand in huge pages: each touch of a cold one in a small page is a miss of the address translation, too.
  void grow() {
    const bool many = made_ * sizeof(Block) >= kHugePage;
    const std::size_t bytes = many ? kHugePage : kNodes * sizeof(Block), count = bytes / sizeof(Block);
    void* memory = std::aligned_alloc(many ? kHugePage : alignof(Block), bytes);
    if (!memory) throw std::bad_alloc();
#if defined(__linux__)
    if (many) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    auto* nodes = static_cast<Block*>(memory);
    slabs_.emplace_back(nodes);
    std::uninitialized_value_construct_n(nodes, count);
    for (std::size_t i = 0; i + 1 < count; ++i) nodes[i].next = &nodes[i + 1];
    Block* last = &nodes[count - 1];
    last->next = head_;  // in front, so that dead ones keep their place in the queue
    if (!head_) tail_ = last;
    head_ = nodes;
    dead_ += count;
    made_ += count;
  }

  std::size_t delay_;
  std::vector<std::unique_ptr<Block[], Release>> slabs_;
  Block* head_ = nullptr;
  Block* tail_ = nullptr;
  std::size_t made_ = 0, dead_ = 0;
};

}  // namespace memkit::arena
