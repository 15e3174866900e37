#include "scope.h"

#include <algorithm>
#include <utility>

namespace memkit::arena {

Scope::Pointer Scope::create(Arena& arena, std::size_t region_bytes, LaneId lane, TagId tag) {
  return Pointer(new Scope(arena, region_bytes, lane, tag));
}

Scope::Scope(Arena& arena, std::size_t region_bytes, LaneId lane, TagId tag)
    : Guest(arena), granule_(arena.options().alignment), region_bytes_(region_bytes), lane_(lane), tag_(tag) {}

Scope::~Scope() {
  for (Block* region : regions_) free(region);
}

Allocation Scope::allocate(const Request& request, const Wait& wait) {
  Allocation result;
  const std::size_t alignment = std::max(request.alignment, granule_);
  const bool valid =
      !(request.alignment & (request.alignment - 1)) && request.size <= SIZE_MAX / 4 && alignment <= SIZE_MAX / 4;
  const std::size_t room = round_up(std::max<std::size_t>(request.size, 1), granule_) + (alignment - granule_);
  for (;;) {
    if (valid && (result.block = bump(request))) return result;
    if (valid && !arena_.inherited()) {
      const Lock lock(lock_);
      if (!arena_.admits(request.tag)) return refused(request);
      if (count_ == nodes_) {
        pages_.push_back(std::make_unique<Block[]>(kPage));
        for (std::size_t i = 0; i < kPage; ++i) pages_.back()[i].owner = this;
        pieces_.emplace_back(pages_.back().get(), kPage);
        nodes_ += kPage;
        continue;
      }
      if (next_region(room)) continue;
    }
    Request wish{std::max(room, region_bytes_), lane_, tag_, request.stack, 0};
    if (!valid) wish = request;  // the arena says what is wrong with it
    Allocation region = arena_.allocate(wish);
    if (!region && valid && wish.size > room) {
      wish.size = room;
      region = arena_.allocate(wish);
    }
    if (!region) {
      region.failure->asked = request.size;
      return region;
    }
    if (wait && !region.waits.empty()) {
      if (!wait(region)) continue;
      region.waits.clear();
    }
    result.waits.insert(result.waits.end(), region.waits.begin(), region.waits.end());
    const Lock lock(lock_);
    regions_.push_back(region.block);
    enter(regions_.size() - 1);
  }
}

void Scope::enter(std::size_t region) {
  region_ = region;
  cursor_ = reinterpret_cast<std::uintptr_t>(regions_[region]->data());
  limit_ = cursor_ + (regions_[region]->requested & ~(granule_ - 1));
}

// Enters the next of the regions that has room for so many bytes.
bool Scope::next_region(std::size_t bytes) {
  for (std::size_t next = region_ + 1; next < regions_.size(); ++next)
    if (regions_[next]->requested >= bytes) return enter(next), true;
  return false;
}

Freed Scope::take_back(Block* block) noexcept {
  if (arena_.inherited()) return Freed::inherited;
  Lock lock(lock_);
  if (block->state != State::live) return Freed::double_free;
  block->state = State::dead;
  --live_at_[block->depth];
  --live_;
  leave(lock);
  return Freed::ok;
}

Scope::Mark Scope::mark() {
  if (arena_.inherited()) return {};
  const Lock lock(lock_);
  live_at_.reserve(live_at_.size() + 1);
  // What outlived its mark may be dead by now.
  if (live_at_.size() == 1 && !live_) rewind(0, 0, 0);
  live_at_.push_back(0);
  return {live_at_.size() - 1, count_, region_, cursor_};
}

void Scope::rewind(std::size_t count, std::size_t region, std::uintptr_t cursor) {
  count_ = count;
  if (cursor) {
    enter(region);
    cursor_ = cursor;
  } else if (!regions_.empty()) {
    enter(0);  // the mark is older than the first region
  }
}

Scope::Released Scope::release(const Mark& mark) {
  Released result;
  std::vector<Block*> spare;
  if (arena_.inherited()) return result;
  Lock lock(lock_);
  if (mark.depth == 0 || mark.depth + 1 != live_at_.size()) {
    result.in_order = false;
    return result;
  }
  const std::size_t live = live_at_.back();
  result.held.reserve(live);
  if (live) {
    for (std::size_t i = mark.count; i < count_; ++i) {
      Block* block = node(i);
      if (block->state != State::live) continue;
      block->depth = std::uint32_t(mark.depth - 1);
      result.held.push_back({block->tag, block->requested, block->stack, block->data()});
    }
    live_at_[mark.depth - 1] += live;
  } else {
    rewind(mark.count, mark.region, mark.cursor);
    if (!count_ && regions_.size() > 1) {
      spare.swap(regions_);
      std::size_t bytes = 0;
      for (const Block* region : spare) bytes += region->requested;
      region_bytes_ = std::max(region_bytes_, bytes);
      cursor_ = limit_ = region_ = 0;
    }
  }
  live_at_.pop_back();
  lock.unlock();
  for (Block* region : spare) free(region);
  return result;
}

std::size_t Scope::live() const {
  if (arena_.inherited()) return 0;
  const std::lock_guard<SpinLock> guard(lock_);
  return live_;
}

std::size_t Scope::reserved() const {
  if (arena_.inherited()) return 0;
  const std::lock_guard<SpinLock> guard(lock_);
  std::size_t bytes = 0;
  for (const Block* region : regions_) bytes += region->requested;
  return bytes;
}

}  // namespace memkit::arena
