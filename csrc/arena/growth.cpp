// Memory from upstream and back: chunks, what makes them longer, and what is free of them.
#include <algorithm>
#include <new>
#include <utility>

#include "guest.h"

namespace memkit::arena {

struct Arena::Need {
  Lane* lane;
  TagId tag;
  std::size_t size, alignment;
  std::vector<LaneId>* waits;
  std::size_t bytes;  // of fresh memory that holds it wherever that starts
};

// Growth, one call at a time, while no memory goes upstream: two that grow at once would take a chunk each, or take for
// refused what the other has asked for and may leave. Who finds a block need not wait.
class Arena::Growing {
 public:
  Growing(Arena& arena, Lock& lock) : arena_(arena) {
    waited = !quiet();
    wait(lock, [this] { return quiet(); });
    arena.growing_ = true;
  }
  ~Growing() {
    arena_.growing_ = false;
    arena_.moved_.notify_all();
  }
  // Others may have begun since to send memory upstream.
  void settle(Lock& lock) {
    wait(lock, [this] { return !arena_.sending_; });
  }

  bool waited;

 private:
  bool quiet() const { return !arena_.growing_ && !arena_.sending_; }
  template <class Until>
  void wait(Lock& lock, const Until& until) {
    while (!until()) {
      ++arena_.busy_;
      lock.unlock();
      arena_.upstream_->wait([&] {
        Lock own(arena_.lock_);
        arena_.moved_.wait(own, until);
      });
      lock.lock();
      --arena_.busy_;
    }
  }

  Arena& arena_;
};

// Whether the arena closed or the gate was shut while the lock was open. Asked before each search: what a search has
// joined is for those alone who wait for its lanes, and take it.
bool Arena::in_vain(const Need& need) const { return closed_ || !admits(need.tag); }

// A block of new memory, or what others freed while the lock was open, or nullptr.
Block* Arena::grow(Lock& lock, Lane* lane, TagId tag, std::size_t size, std::size_t alignment,
                   std::vector<LaneId>* waits, Refusal* refusal) {
  const Need need{lane, tag, size, alignment, waits, size + (alignment - options_.alignment)};
  refusal->limit = options_.grow ? Refusal::max : Refusal::fixed;
  if (!options_.grow) return borrow(lane, size, alignment, waits);
  Growing growing(*this, lock);
  if (in_vain(need)) return nullptr;
  if (growing.waited)
    if (Block* block = search(lane, size, alignment, waits)) return block;
  for (bool trimmed : {false, true}) {
    if (trimmed && need.bytes > options_.max) break;
    if (trimmed && !send_back(lock, detach_pages())) break;
    growing.settle(lock);
    if (in_vain(need)) return nullptr;
    if (Block* block = extend(lock, need, refusal)) return block;
    if (in_vain(need)) return nullptr;
    if (Block* block = add_chunk(lock, need, refusal)) return block;
    if (in_vain(need)) return nullptr;
  }
  if (Block* block = search(lane, size, alignment, waits)) return block;
  return borrow(lane, size, alignment, waits);
}

// Asks upstream for bytes by `ask`, with the lock open; false: it has no more.
template <class Ask>
bool Arena::ask_upstream(Lock& lock, std::size_t bytes, Refusal* refusal, const Ask& ask) {
  moving_ += bytes;
  ++busy_;
  lock.unlock();
  refusal->left = upstream_->available();
  const bool harmless = bytes <= refusal->left;
  refusal->limit = harmless ? Refusal::upstream : Refusal::available;
  const bool got = harmless && ask();
  lock.lock();
  --busy_;
  moving_ -= bytes;
  return got;
}

// Whole granules up to the limit.
std::size_t Arena::growth_left() const {
  const std::size_t taken = stats_.reserved + moving_;
  return options_.max > taken ? (options_.max - taken) & ~(options_.alignment - 1) : 0;
}

void Arena::count_growth(std::size_t bytes) {
  stats_.reserved += bytes;
  stats_.reserved_peak = std::max(stats_.reserved_peak, stats_.reserved);
  ++stats_.growths;
}

// Makes the newest chunk longer by what its free end lacks. Addresses behind it are there for that, but others may be
// on their way upstream.
Block* Arena::extend(Lock& lock, const Need& need, Refusal* refusal) {
  const std::size_t page = upstream_->page();
  settle_recent();
  Chunk* const chunk = heap_.chunks().empty() ? nullptr : heap_.chunks().back().get();
  if (!page || !chunk || sending_ || closed_) return nullptr;
  const std::size_t tail = heap_.tail(*chunk, need.lane->serving());
  const std::size_t left = growth_left();
  const std::size_t lacking = need.bytes > tail ? need.bytes - tail : 1;
  const std::size_t missing = round_up(chunk->end() + lacking, page) - chunk->end();
  const std::size_t least = std::min(missing, left);
  if (tail + least < need.bytes) return nullptr;
  const std::size_t more = std::min(options_.growth, stats_.reserved / 16) & ~(page - 1);
  for (std::size_t bytes = std::max(least, std::min(more, left & ~(page - 1)));; bytes = least) {
    void* const end = reinterpret_cast<void*>(chunk->end());
    chunk->moving = true;
    const bool longer = ask_upstream(lock, bytes, refusal, [&] { return upstream_->extend(end, bytes); });
    chunk->moving = false;
    if (!longer && bytes > least) continue;
    if (!longer) return nullptr;
    heap_.lengthen(chunk, bytes);
    count_growth(bytes);
    break;
  }
  if (closed_) {
    send_back(lock, detach_empty());
    return nullptr;
  }
  Block* block = in_vain(need) ? nullptr : search(need.lane, need.size, need.alignment, need.waits);
  if (block) ++misses_;
  return block;  // or nullptr: another thread was quicker
}

Block* Arena::add_chunk(Lock& lock, const Need& need, Refusal* refusal) {
  for (const std::size_t wish : {std::max(options_.growth, need.bytes), need.bytes}) {
    const std::size_t bytes = std::min(wish, growth_left());
    if (bytes < need.bytes || closed_) {
      refusal->limit = Refusal::max;
      continue;
    }
    void* memory = nullptr;
    if (!ask_upstream(lock, bytes, refusal, [&] { return (memory = upstream_->allocate(bytes)) != nullptr; })) {
      if (wish == need.bytes) continue;
      if (in_vain(need)) return nullptr;
      if (Block* block = search(need.lane, need.size, need.alignment, need.waits)) return block;
      continue;
    }
    Chunk* chunk = heap_.add(memory, bytes, 0);
    count_growth(bytes);
    if (!closed_ && in_vain(need)) return nullptr;
    Block* block = chunk->first;
    const std::uintptr_t start = round_up(block->address, need.alignment);
    if (!closed_ && start < block->end() && block->end() - start >= need.size) {
      ++misses_;
      return block;
    }
    send_back(lock, detach_empty());  // closed meanwhile, or upstream aligns to less than the granule
    return nullptr;
  }
  return nullptr;
}

// Unhooks the chunks that nobody uses, but for the capacity. Blocks that a capture may write again keep their chunk.
Chunk* Arena::detach_empty(Chunk* detached) {
  if (recording() || held_) return detached;
  settle_recent();
  const auto goes = [](const Chunk& chunk) {
    if (chunk.used || chunk.kept || chunk.moving) return false;
    for (const Block* block = chunk.first; block; block = block->after)
      if (block->lane->pinned) return false;
    return true;
  };
  heap_.remove(goes, [&](std::unique_ptr<Chunk> chunk) { detach(std::move(chunk), &detached); });
  return detached;
}

// Those, and what is free of others, where upstream takes that back.
Chunk* Arena::detach_pages() {
  Chunk* detached = detach_empty();
  if (!upstream_->page() || recording() || held_) return detached;
  std::vector<std::unique_ptr<Chunk>> removed;
  try {
    heap_.carve(upstream_->page(), &removed);
  } catch (const std::bad_alloc&) {  // no room to cut: they stay
  }
  for (auto& chunk : removed) detach(std::move(chunk), &detached);
  return detach_empty(detached);  // less than a page that was left behind
}

void Arena::hold() {
  if (inherited()) return;
  Lock lock(lock_);
  held_ = true;
  gate_.store(Gate::shut(), std::memory_order_release);
  for (const Guest* guest : guests_) guest->pass();
}

void Arena::let_go(Gate gate) {
  if (inherited()) return;
  Lock lock(lock_);
  held_ = false;
  gate_.store(gate, std::memory_order_release);
  if (closed_) send_back(lock, detach_pages());
}

void Arena::detach(std::unique_ptr<Chunk> chunk, Chunk** list) {
  stats_.reserved -= chunk->bytes;
  moving_ += chunk->bytes;  // still upstream's bytes, until send_back() has returned them
  chunk->next = *list;
  *list = chunk.release();
}

std::size_t Arena::send_back(Lock& lock, Chunk* detached) noexcept {
  if (!detached) return 0;
  std::size_t bytes = 0;
  ++busy_;
  ++sending_;
  lock.unlock();
  while (detached) {
    const std::unique_ptr<Chunk> chunk(detached);
    detached = chunk->next;
    upstream_->release(chunk->memory, chunk->bytes);
    bytes += chunk->bytes;
  }
  lock.lock();
  moving_ -= bytes;
  --sending_;
  --busy_;
  moved_.notify_all();
  return bytes;
}

}  // namespace memkit::arena
