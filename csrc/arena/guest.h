// What scopes and replays share: they live in an arena, hand out blocks of their own, and go with the last of them.
#pragma once

#include <memory>
#include <mutex>

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

 protected:
  using Lock = std::unique_lock<SpinLock>;

  explicit Guest(Arena& arena) : arena_(arena) { arena_.hold(); }
  virtual ~Guest() { arena_.unhold(); }

  // The end of a call that may have been the last.
  void leave(Lock& lock) noexcept {
    const bool last = disposed_ && !live_;
    lock.unlock();
    if (last) delete this;
  }

  mutable SpinLock lock_;  // never held while the arena is called
  bool disposed_ = false;
  std::size_t live_ = 0;
  Arena& arena_;
};

struct DisposeGuest {
  void operator()(Guest* guest) const noexcept { guest->dispose(); }
};

}  // namespace memkit::arena
