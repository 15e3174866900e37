// What a pool needs of its device: where slabs come from, which order of execution an allocation belongs to, how the
// storage of a tensor holds a block, and how memory goes to sleep. Everything else of a pool knows no device.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/DispatchKeySet.h>

#include <memory>
#include <vector>

#include "arena/arena.h"

namespace memkit {

class PoolDevice {
 public:
  virtual ~PoolDevice() = default;

  virtual c10::Device device() const = 0;
  virtual c10::DispatchKeySet keys() const = 0;
  virtual std::size_t alignment() const = 0;
  virtual std::shared_ptr<arena::Upstream> upstream() = 0;
  virtual std::shared_ptr<arena::Memory> memory() = 0;  // of debug mode
  virtual c10::Allocator* stock() const = 0;            // torch's own: what serves when the pool does not

  // A CUDA pool's lane is the current stream; an allocation that takes over another lane's memory waits for it.
  virtual arena::LaneId lane() const { return 0; }
  // Where it cannot wait it keeps the block until others are done with it, and answers false, which says to allocate
  // anew, or raises.
  virtual bool wait(arena::LaneId, const arena::Allocation&) { return true; }

  // Before an allocation: blocks that work in flight may still read come back here, if they are needed. Returns the
  // capture that records the current lane, or 0.
  virtual arena::CaptureId make_room(arena::Arena&, std::size_t) { return 0; }
  // Takes back all blocks that were freed and wait for work in flight, after a wait for it.
  virtual void reclaim(arena::Arena&) {}
  // Before memory is taken from tensors at once (the end of a scope, sleep): all work that may use it is done.
  virtual void finish() {}

  // The data pointer that frees the block when it dies: from any thread, without Python, after the pool too.
  virtual c10::DataPtr wrap(arena::Block* block, std::size_t nbytes) = 0;
  // The same for torch, whose counters it enters.
  virtual c10::DataPtr lend(arena::Block* block, std::size_t nbytes) { return wrap(block, nbytes); }

  // Why this device's memory cannot sleep now, or nullptr.
  virtual const char* sleep_blocker(arena::Arena&) const { return nullptr; }
  virtual void save(int file, const void* memory, std::size_t bytes) = 0;  // at the file's position, which moves on
  virtual void load(int file, void* memory, std::size_t bytes) = 0;
  // Gives the whole pages in a range back, keeps addresses; how many bytes.
  virtual std::size_t discard(void* memory, std::size_t bytes) = 0;
  // Gets all pages again that the range touches, where they were given back; raises where there are none.
  virtual void restore(void* memory, std::size_t bytes) = 0;
};

// Whether the memory is a pool's block, which goes back when its storage dies.
bool is_pool_memory(const c10::DataPtr& data);
bool is_cuda_pool_memory(const c10::DataPtr& data);

// At the file's position, which moves on; raise where the file ends, or the disk does.
void save_bytes(int file, const void* memory, std::size_t bytes);
void load_bytes(int file, void* memory, std::size_t bytes);

std::unique_ptr<PoolDevice> make_cpu_device();
std::unique_ptr<PoolDevice> make_cuda_device(int index);  // raises in a build without CUDA
// Raises where there is no CUDA driver to lock pages with.
std::unique_ptr<PoolDevice> make_pinned_device();

}  // namespace memkit
