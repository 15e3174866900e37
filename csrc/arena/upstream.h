// What the arena needs of the outside: memory by the chunk and, for debug mode, a way to write and read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#include "block.h"

namespace memkit::arena {

// Called without any lock of the arena, from any thread. Must not throw.
class Upstream {
 public:
  virtual ~Upstream() = default;
  // nullptr: there is no more. Aligned to the arena's alignment, or the ends that are not whole granules are lost.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* memory, std::size_t bytes) = 0;
  // 0: memory comes back as it was given. Else extend() may work, and parts of what was given may come back, from the start
  // of a page or, once, from the end of the capacity: the rest of that page is still in use.
  virtual std::size_t page() const { return 0; }
  // What was given up to `end` goes on for so many bytes more; false: it cannot.
  virtual bool extend(void* end, std::size_t bytes) { return end && !bytes; }
  // What may be asked for without harm, where the system would rather end processes than refuse.
  virtual std::size_t available() { return SIZE_MAX; }
  // Calls what waits until another thread's call above has ended, which may need what this thread holds.
  virtual void wait(const std::function<void()>& until) { until(); }
};

// For canaries and poison. A CUDA pool implements it with memset and copies in the order of the lane.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void fill(LaneId lane, void* at, std::uint8_t byte, std::size_t bytes) = 0;
  virtual bool holds(LaneId lane, const void* at, std::uint8_t byte, std::size_t bytes) = 0;
};

class HostMemory final : public Memory {
 public:
  void fill(LaneId, void* at, std::uint8_t byte, std::size_t bytes) override { std::memset(at, byte, bytes); }
  bool holds(LaneId, const void* at, std::uint8_t byte, std::size_t bytes) override {
    const auto* p = static_cast<const std::uint8_t*>(at);
    // All bytes are the first one, and that is `byte`.
    return !bytes || (p[0] == byte && std::memcmp(p, p + 1, bytes - 1) == 0);
  }
};

}  // namespace memkit::arena
