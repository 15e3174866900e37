#include "replay.h"

#include <algorithm>
#include <map>
#include <utility>

namespace memkit::arena {

std::shared_ptr<const Plan> Plan::make(std::vector<Slot> slots, std::size_t total, std::size_t alignment,
                                       std::string* why) {
  const auto refuse = [&](const std::string& text) -> std::shared_ptr<const Plan> {
    if (why) *why = "plan: " + text;
    return nullptr;
  };
  if (!is_power_of_two(alignment))
    return refuse("expected a power of two as alignment, got " + std::to_string(alignment));
  if (slots.size() > UINT32_MAX) return refuse("expected fewer than 2^32 slots");
  auto plan = std::make_shared<Plan>();
  // Which slot used each byte last, as ranges: from the key up to `end`.
  struct Range {
    std::size_t end;
    std::uint32_t slot;
  };
  std::map<std::size_t, Range> last;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const auto [size, begin] = slots[i];
    if (size > total || begin > total - size)
      return refuse("expected slot " + std::to_string(i) + " within " + std::to_string(total) + " bytes, got " +
                    std::to_string(size) + " at " + std::to_string(begin));
    if (begin % alignment)
      return refuse("expected slot " + std::to_string(i) + " at a multiple of " + std::to_string(alignment) + ", got " +
                    std::to_string(begin));
    plan->first_.push_back(plan->below_.size());
    if (!size) continue;
    const std::size_t end = begin + size;
    auto at = last.upper_bound(begin);
    if (at != last.begin() && std::prev(at)->second.end > begin) --at;
    while (at != last.end() && at->first < end) {
      const auto [range_begin, range] = *at;
      plan->below_.push_back(range.slot);
      at = last.erase(at);
      if (range_begin < begin) last.emplace(range_begin, Range{begin, range.slot});
      if (range.end > end) at = last.emplace(end, range).first;
    }
    last.emplace(begin, Range{end, std::uint32_t(i)});
    const auto mine = plan->below_.begin() + std::ptrdiff_t(plan->first_.back());
    std::sort(mine, plan->below_.end());
    plan->below_.erase(std::unique(mine, plan->below_.end()), plan->below_.end());
  }
  plan->first_.push_back(plan->below_.size());
  plan->slots_ = std::move(slots);
  plan->total_ = total;
  plan->alignment_ = alignment;
  return plan;
}

Replay::Pointer Replay::create(Arena& arena, std::shared_ptr<const Plan> plan, LaneId lane, TagId tag,
                               Allocation* base) {
  *base = arena.allocate({plan->total(), lane, tag, 0, plan->alignment()});
  return Pointer(*base ? new Replay(arena, std::move(plan), lane, base->block) : nullptr);
}

Replay::Replay(Arena& arena, std::shared_ptr<const Plan> plan, LaneId lane, Block* base)
    : Guest(arena),
      size_(plan->size()),
      plan_(std::move(plan)),
      flags_(size_),
      nodes_(size_),
      lane_(lane),
      base_(base) {
  for (std::size_t i = 0; i < size_; ++i) {
    const auto [size, offset] = plan_->slot(i);
    nodes_[i].address = reinterpret_cast<std::uintptr_t>(base->data()) + offset;
    nodes_[i].size = nodes_[i].requested = size;
    nodes_[i].owner = this;
    nodes_[i].depth = std::uint32_t(i);
  }
  const Lock lock(lock_);
  pieces_.emplace_back(nodes_.data(), size_);
}

Replay::~Replay() { free(base_); }

Allocation Replay::allocate(const Request& request) {
  if (!arena_.inherited()) {
    Allocation result;
    const Lock lock(lock_);
    if (!arena_.admits(request.tag)) return refused(request);
    const bool fits = request.alignment <= plan_->alignment();
    if (fits && (result.block = place(request))) return result;
    if (find_again(request.size) && fits && (result.block = place(request))) return result;
    Mismatch& first = counts_.first;
    if (!counts_.fell_back++) {
      first.index = next_;
      first.got = request.size;
      first.reason = next_ == size_ ? Mismatch::beyond : Mismatch::size;
      if (next_ < size_) {
        first.expected = plan_->slot(next_).size;
        first.other = blocker(next_);
        if (first.expected == first.got) first.reason = first.other != size_ ? Mismatch::overlap : Mismatch::alignment;
      }
    }
    // Of another size: it may be one too many, or stand for the plan's next. The one after it tells.
    if (next_ < size_ && plan_->slot(next_).size == request.size) {
      flags_[next_++] |= kSkipped;
    } else {
      ++astray_;
    }
  }
  Request other = request;
  other.lane = lane_;
  return arena_.allocate(other);
}

// Under the lock, after requests of other sizes: they stood for as many of the plan's, or fewer, if what comes next says so.
bool Replay::find_again(std::size_t size) {
  constexpr std::size_t kFar = 16;
  for (std::size_t k = 1; k <= std::min(astray_, kFar) && next_ + k < size_; ++k)
    if (plan_->slot(next_ + k).size == size) {
      for (; k; --k) flags_[next_++] |= kSkipped;
      return true;
    }
  return false;
}

bool Replay::overlaps(std::size_t a, std::size_t b) const {
  const auto &x = plan_->slot(a), &y = plan_->slot(b);
  return x.size && y.size && x.offset < y.offset + y.size && y.offset < x.offset + x.size;
}

// A live slot that is in the way of slot i, or size_. Exact, where the quick check is not sure.
std::size_t Replay::blocker(std::size_t i) {
  if (flags_[i] & kLive) return i;
  const auto dead = [&](std::uint32_t j) { return !(flags_[j] & kLive); };
  survivors_.erase(std::remove_if(survivors_.begin(), survivors_.end(), dead), survivors_.end());
  for (std::uint32_t j : survivors_)
    if (overlaps(i, j)) return j;
  bool skipped = false;
  for (const std::uint32_t* j = plan_->begin(i); j != plan_->end(i); ++j) {
    if (flags_[*j] & kLive) return *j;
    skipped |= flags_[*j] & kSkipped;
  }
  // What a skipped slot should have replaced may be live still.
  if (skipped)
    for (std::size_t j = 0; j < i; ++j)
      if (flags_[j] & kLive && overlaps(i, j)) return j;
  return size_;
}

Freed Replay::take_back(Block* block) noexcept {
  if (arena_.inherited()) return Freed::inherited;
  Lock lock(lock_);
  if (block->state != State::live) return Freed::double_free;
  block->state = State::dead;
  flags_[block->depth] &= std::uint8_t(~kLive);
  --live_;
  leave(lock);
  return Freed::ok;
}

void Replay::rewind() {
  if (arena_.inherited()) return;
  const Lock lock(lock_);
  next_ = astray_ = 0;
  counts_ = {};
  survivors_.clear();
  for (std::size_t i = 0; i < size_; ++i) {
    flags_[i] &= kLive;
    if (flags_[i]) survivors_.push_back(std::uint32_t(i));
  }
}

std::size_t Replay::position() const {
  if (arena_.inherited()) return 0;
  const std::lock_guard<SpinLock> guard(lock_);
  return next_;
}

std::size_t Replay::live() const {
  if (arena_.inherited()) return 0;
  const std::lock_guard<SpinLock> guard(lock_);
  return live_;
}

Replay::Counts Replay::counts() const {
  if (arena_.inherited()) return {};
  const std::lock_guard<SpinLock> guard(lock_);
  return counts_;
}

}  // namespace memkit::arena
