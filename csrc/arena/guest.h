// What scopes and replays share: they live in an arena, hand out blocks of their own, and go with the last of them.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "arena.h"

namespace memkit::arena {

class Guest : public Owner {
 public:
  Guest(const Guest&) = delete;
  Guest& operator=(const Guest&) = delete;

  // Instead of delete: blocks that are live stay valid.
  void dispose() noexcept {
    if (arena_.inherited()) return;
    Lock lock(lock_);
    disposed_ = true;
    leave(lock);
  }

  // When this returns, who had found the gate open has its block.
  void pass() const { const std::lock_guard<SpinLock> guard(lock_); }
  // The block of the arena that it lies in, where that is one with a name. Under the arena's lock.
  virtual const Block* home() const { return nullptr; }
  // Its live blocks. Likewise.
  void visit(const std::function<void(const BlockView&)>& block) const {
    const std::lock_guard<SpinLock> guard(lock_);
    for (const auto& [nodes, count] : pieces_)
      for (const Block* b = nodes; b != nodes + count; ++b)
        if (b->state == State::live)
          block({b->data(), b->size, b->data(), b->requested, b->state, 0, b->tag, b->stack});
  }

 protected:
  using Lock = std::unique_lock<SpinLock>;

  explicit Guest(Arena& arena) : arena_(arena) { arena_.welcome(this); }
  virtual ~Guest() { arena_.unhold(); }

  static Allocation refused(const Request& request) {
    Allocation result;
    result.failure = std::make_unique<Failure>();
    result.failure->reason = Failure::asleep;
    result.failure->asked = request.size;
    return result;
  }

  // The end of a call that may have been the last.
  void leave(Lock& lock) noexcept {
    const bool last = disposed_ && !live_;
    lock.unlock();
    if (!last) return;
    arena_.forget(this);
    delete this;
  }

  mutable SpinLock lock_;  // never held while the arena is called
  bool disposed_ = false;
  std::size_t live_ = 0;
  std::vector<std::pair<const Block*, std::size_t>> pieces_;  // its nodes
  Arena& arena_;
};

struct DisposeGuest {
  void operator()(Guest* guest) const noexcept { guest->dispose(); }
};

}  // namespace memkit::arena
