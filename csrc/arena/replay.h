// A recorded step served again: allocation i gets its planned offset, without a search.
#pragma once

#include <string>
#include <vector>

#include "guest.h"

namespace memkit::arena {

// The allocations of a step in their order, with the offsets that a solver gave them.
class Plan {
 public:
  struct Slot {
    std::size_t size, offset;
  };

  // nullptr, and why, unless offsets are multiples of `alignment` and all slots lie within `total`.
  static std::shared_ptr<const Plan> make(std::vector<Slot> slots, std::size_t total, std::size_t alignment,
                                          std::string* why);

  std::size_t size() const { return slots_.size(); }
  std::size_t total() const { return total_; }
  std::size_t alignment() const { return alignment_; }
  const Slot& slot(std::size_t i) const { return slots_[i]; }
  // The slots before i that were the last to use a byte of slot i: once these are dead, so is everything under it.
  const std::uint32_t* begin(std::size_t i) const { return below_.data() + first_[i]; }
  const std::uint32_t* end(std::size_t i) const { return below_.data() + first_[i + 1]; }

 private:
  std::vector<Slot> slots_;
  std::size_t total_ = 0, alignment_ = 0;
  std::vector<std::uint32_t> below_;
  std::vector<std::size_t> first_;
};

class Replay final : public Guest {
 public:
  struct Mismatch {
    enum Reason { none, size, alignment, overlap, beyond } reason = none;  // beyond: after the plan's last
    std::size_t index = 0;
    std::size_t expected = 0, got = 0;  // bytes
    std::size_t other = 0;              // overlap: the slot that is live
  };
  struct Counts {  // since rewind()
    std::size_t served = 0;
    std::size_t fell_back = 0;  // served by the arena instead
    Mismatch first;             // of them
  };

  using Pointer = std::unique_ptr<Replay, DisposeGuest>;
  // Takes the plan's memory from the arena; nullptr, and the arena's answer, if that has not enough.
  static Pointer create(Arena& arena, std::shared_ptr<const Plan> plan, LaneId lane, TagId tag, Allocation* base);

  // The lane of a request is the replay's. A request that is not the plan's next, or whose slot is still in use, goes
  // to the arena; requests of other sizes or too many do not keep the rest of the step from its places.
  Allocation allocate(const Request& request);
  // The quick part of it: nullptr when the plan does not say so. Moves on only if it serves.
  Block* serve(const Request& request);
  Freed take_back(Block* block) noexcept override;

  const Block* home() const override { return base_; }
  void rewind();  // before each step
  std::size_t position() const;
  std::size_t live() const;
  Counts counts() const;

 private:
  enum : std::uint8_t { kLive = 1, kSkipped = 2 };

  Replay(Arena& arena, std::shared_ptr<const Plan> plan, LaneId lane, Block* base);
  ~Replay() override;

  Block* place(const Request& request);
  bool find_again(std::size_t size);
  bool overlaps(std::size_t a, std::size_t b) const;
  std::size_t blocker(std::size_t i);

  std::size_t next_ = 0;
  std::size_t astray_ = 0;  // requests of other sizes since the last that went by the plan
  std::size_t size_;
  const std::shared_ptr<const Plan> plan_;
  std::vector<std::uint8_t> flags_;       // by slot
  std::vector<std::uint32_t> survivors_;  // slots that were live when the step began
  std::vector<Block> nodes_;
  Counts counts_;
  LaneId lane_;
  Block* base_;
};

inline Block* Replay::serve(const Request& request) {
  if (arena_.inherited()) return nullptr;
  const std::lock_guard<SpinLock> guard(lock_);
  return arena_.admits(request.tag) ? place(request) : nullptr;
}

// Under the lock.
inline Block* Replay::place(const Request& request) {
  const std::size_t i = next_;
  if (i == size_ || plan_->slot(i).size != request.size) return nullptr;
  std::uint8_t below = flags_[i] | std::uint8_t(!survivors_.empty());
  for (const std::uint32_t *j = plan_->begin(i), *end = plan_->end(i); j != end; ++j) below |= flags_[*j];
  if (below && blocker(i) != size_) return nullptr;
  Block* block = &nodes_[i];
  flags_[i] = kLive;
  block->state = State::live;
  block->tag = request.tag;
  block->stack = request.stack;
  next_ = i + 1;
  astray_ = 0;
  ++live_;
  ++counts_.served;
  return block;
}

}  // namespace memkit::arena
