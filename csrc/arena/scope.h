// Bump allocation with nested marks: a pointer moves forward, and back to the mark when all that came after it is dead.
#pragma once

#include <functional>
#include <vector>

#include "guest.h"

namespace memkit::arena {

// Any thread may free; allocating is for one thread at a time wherever an allocation's waits matter.
class Scope final : public Guest {
 public:
  struct Mark {
    std::size_t depth;  // how many marks were open
    std::size_t count;  // blocks handed out so far
    std::size_t region;
    std::uintptr_t cursor;
  };
  struct Held {
    TagId tag;
    std::size_t bytes;
    StackId stack;
    const void* data;
  };
  struct Released {
    bool in_order = true;    // false: an inner mark is still open; nothing was done
    std::vector<Held> held;  // what is live: its memory was not released, it belongs to the enclosing mark now

    explicit operator bool() const { return in_order && held.empty(); }
  };

  using Pointer = std::unique_ptr<Scope, DisposeGuest>;
  // Takes regions of so many bytes from the arena, the first when it is needed. When everything is released, several
  // regions are given back for one of their sum: a steady state lives in a single one.
  static Pointer create(Arena& arena, std::size_t region_bytes, LaneId lane = 0, TagId tag = 0);

  // What is done with each region that must wait for other lanes, before it is used; false: it is kept back there, and
  // another is asked for.
  using Wait = std::function<bool(const Allocation&)>;
  // The lane of the request is the scope's; debug mode adds no canaries here. Without `wait` the result says what to
  // wait for.
  Allocation allocate(const Request& request, const Wait& wait = nullptr);
  // The quick part of it: nullptr when there is no room in the region.
  Block* bump(const Request& request);
  Freed take_back(Block* block) noexcept override;

  Mark mark();
  Released release(const Mark& mark);
  std::size_t live() const;
  std::size_t reserved() const;  // bytes of the regions

 private:
  static constexpr std::size_t kPage = 256;  // nodes

  Scope(Arena& arena, std::size_t region_bytes, LaneId lane, TagId tag);
  ~Scope() override;

  Block* node(std::size_t i) const { return &pages_[i / kPage][i % kPage]; }
  void enter(std::size_t region);
  void rewind(std::size_t count, std::size_t region, std::uintptr_t cursor);
  bool next_region(std::size_t bytes);

  std::uintptr_t cursor_ = 0, limit_ = 0;
  std::size_t count_ = 0, nodes_ = 0;
  std::size_t granule_;
  std::vector<std::size_t> live_at_{0};  // live blocks by depth
  std::vector<std::unique_ptr<Block[]>> pages_;
  std::vector<Block*> regions_;
  std::size_t region_ = 0;  // where the cursor is, if there are any
  std::size_t region_bytes_;
  LaneId lane_;
  TagId tag_;
};

inline Block* Scope::bump(const Request& request) {
  if (arena_.inherited()) return nullptr;
  const std::lock_guard<SpinLock> guard(lock_);
  const std::uintptr_t start = request.alignment > granule_ ? round_up(cursor_, request.alignment) : cursor_;
  if (count_ == nodes_ || start > limit_ || request.size > limit_ - start || !arena_.admits(request.tag))
    return nullptr;
  const std::size_t size = round_up(request.size + !request.size, granule_);
  if (size > limit_ - start) return nullptr;
  cursor_ = start + size;
  Block* block = node(count_++);
  block->address = start;
  block->size = size;
  block->requested = request.size;
  block->tag = request.tag;
  block->stack = request.stack;
  block->depth = std::uint32_t(live_at_.size() - 1);
  block->state = State::live;
  ++live_at_.back();
  ++live_;
  return block;
}

}  // namespace memkit::arena
