// Which lane's memory serves a request, and what must wait before it is free: deferred blocks and captures.
#include <algorithm>

#include "arena.h"
#include "capture.h"

namespace memkit::arena {

Lane* Arena::lane_of(LaneId id) {
  if (last_lane_ && last_lane_->id == id) return last_lane_;
  for (const auto& lane : lanes_)
    if (lane->id == id) return last_lane_ = lane.get();
  lanes_.push_back(std::make_unique<Lane>(id, options_.alignment));
  return last_lane_ = lanes_.back().get();
}

// A free block that holds the request, without growing. An event and a wait cost more than a look at a whole size
// class, so other lanes come after the exact search.
Block* Arena::search(Lane* lane, std::size_t size, std::size_t alignment, std::vector<LaneId>* waits) {
  settle_recent();
  const Lane* own = lane->serving();
  for (bool exact : {false, true})
    for (const Lane* from : {own, std::as_const(heap_).clean()})
      if (Block* block = heap_.find(*from, size, alignment, exact)) return block;
  return own->pinned ? nullptr : borrow(lane, size, alignment, waits);  // a capture grows first: it cannot wait
}

// A block of another lane, or joined from several.
Block* Arena::borrow(Lane* lane, std::size_t size, std::size_t alignment, std::vector<LaneId>* waits) {
  for (bool exact : {false, true})
    for (const auto& other : lanes_) {
      if (other.get() == lane ? !lane->redirect : other->capture && !lane->redirect) continue;
      if (Block* block = heap_.find(*other, size, alignment, exact)) {
        waits->push_back(other->id);
        return block;
      }
    }
  const auto holds = [](const auto& one) { return !one->index.empty(); };
  if (std::count_if(lanes_.begin(), lanes_.end(), holds) < 2) return nullptr;  // a single lane's have coalesced
  Block* block = heap_.join(size, alignment, !lane->redirect, waits);
  if (block && !lane->redirect) waits->erase(std::remove(waits->begin(), waits->end(), lane->id), waits->end());
  return block;
}

Freed Arena::defer(Block* block, Ticket ticket) {
  if (inherited()) return Freed::inherited;
  if (block->owner != this) return misuse(block, Freed::foreign);
  Lock lock(lock_);
  if (block->state != State::live) {
    lock.unlock();
    return misuse(block, Freed::double_free);
  }
  Block*& head = deferred_[ticket];
  retire(block);
  block->next = head;
  head = block;
  return Freed::ok;
}

std::size_t Arena::release_deferred(Ticket ticket) {
  if (inherited()) return 0;
  Lock lock(lock_);
  const auto at = deferred_.find(ticket);
  if (at == deferred_.end()) return 0;
  Block* const first = at->second;
  deferred_.erase(at);
  std::vector<std::string> wrong;
  if (marks_) {  // as in accept(), only later: others were using them
    lock.unlock();
    for (const Block* block = first; block; block = block->next)
      if (block->front)
        if (std::string text = inspect(block); !text.empty()) wrong.push_back(std::move(text));
    if (options_.violated)
      for (const std::string& text : wrong) options_.violated(text);
    lock.lock();
  }
  std::size_t count = 0;
  for (Block *block = first, *next; block; block = next, ++count) {
    next = block->next;
    reuse(block);
  }
  leave(lock);
  return count;
}

bool Arena::pin(CaptureId id, LaneId lane_id) {
  if (inherited()) return false;
  Lock lock(lock_);
  settle_recent();
  Lane* lane = lane_of(lane_id);
  if (lane->capture) return lane->capture->id == id;
  auto at = std::find_if(captures_.begin(), captures_.end(), [&](const auto& one) { return one->id == id; });
  if (at == captures_.end()) {
    captures_.push_back(std::make_unique<Capture>());
    at = captures_.end() - 1;
    (*at)->id = id;
  }
  Capture* capture = at->get();
  for (const auto& [from, own] : capture->lanes)
    if (from == lane) lane->redirect = own.get();
  if (!lane->redirect) {
    capture->lanes.emplace_back(lane, std::make_unique<Lane>(lane_id, options_.alignment, true));
    lane->redirect = capture->lanes.back().second.get();
  }
  lane->capture = capture;
  return true;
}

void Arena::seal(CaptureId id) {
  if (inherited()) return;
  Lock lock(lock_);
  for (const auto& lane : lanes_)
    if (lane->capture && lane->capture->id == id) lane->capture = nullptr, lane->redirect = nullptr;
  settle_recent();
  heap_.coalesce_all();
  leave(lock);
}

bool Arena::recording() const {
  return !captures_.empty() && std::any_of(lanes_.begin(), lanes_.end(), [](const auto& one) { return one->capture; });
}

bool Arena::unpin(CaptureId id, std::size_t frees) {
  if (inherited()) return true;
  Lock lock(lock_);
  if (stats_.frees != frees) return false;
  const auto at = std::find_if(captures_.begin(), captures_.end(), [&](const auto& one) { return one->id == id; });
  if (at == captures_.end()) return true;
  settle_recent();
  const std::unique_ptr<Capture> capture = std::move(*at);
  captures_.erase(at);
  for (const auto& [lane, own] : capture->lanes) {
    if (lane->capture == capture.get()) lane->capture = nullptr, lane->redirect = nullptr;
    heap_.move(own.get(), lane);
  }
  for (Block *block = capture->parked, *next; block; block = next) {
    next = block->next;
    reuse(block);
  }
  leave(lock);
  return true;
}

bool Arena::settle(std::size_t frees, const std::vector<LaneId>* lanes) {
  if (inherited()) return true;
  Lock lock(lock_);
  if (stats_.frees != frees) return false;
  settle_recent();
  heap_.settle([&](const Lane& lane) {
    return !lane.pinned && (!lanes || std::find(lanes->begin(), lanes->end(), lane.id) != lanes->end());
  });
  return true;
}

std::vector<LaneId> Arena::idle_lanes() const {
  std::vector<LaneId> ids;
  if (inherited()) return ids;
  const Lock lock(lock_);
  settle_recent();
  for (const auto& lane : lanes_)
    if (!lane->index.empty() && !lane->capture) ids.push_back(lane->id);
  return ids;
}

}  // namespace memkit::arena
