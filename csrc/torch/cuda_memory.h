// Device memory by the chunk, whose pages can go and come back under addresses that stay.
#pragma once

#include <atomic>
#include <memory>

#include "arena/upstream.h"

#ifdef MEMKIT_WITH_CUDA

namespace memkit {

class CudaMemory : public arena::Upstream, public std::enable_shared_from_this<CudaMemory> {
 public:
  void* allocate(std::size_t bytes) final;
  // After all work of the device, as cudaFree does; where a capture forbids the wait, when it is over.
  void release(void* memory, std::size_t bytes) final;
  bool extend(void* end, std::size_t bytes) final;

  virtual bool present(const void*, std::size_t) { return true; }  // all pages
  virtual const char* sleep_blocker() const = 0;                   // why pages cannot go, or nullptr
  // As in PoolDevice; what uses the range is done.
  virtual std::size_t discard(void* memory, std::size_t bytes) = 0;
  virtual void restore(void* memory, std::size_t bytes) = 0;

 protected:
  explicit CudaMemory(int device) : device_(device) {}
  virtual void* take(std::size_t bytes) = 0;  // nullptr: there is no more
  virtual void give(void* memory, std::size_t bytes) = 0;
  virtual bool has_room(const void*, std::size_t) { return false; }  // of addresses
  virtual bool take_more(void*, std::size_t) { return false; }

  const int device_;

 private:
  std::atomic<int> going_{0};  // pieces that were released, and may still be mapped
  static void give_all();
  template <class Take>
  bool try_to(const Take& take);
};

// Waits for all work of the device; false where it cannot: a capture is on, which the call would end.
bool synchronize(int device);

// From now on the peer, another device, reads and writes what pools of the device have, and will have.
void let_peer_access(int device, int peer);

// By the driver's virtual memory where there is that, else by cudaMalloc.
std::shared_ptr<CudaMemory> make_cuda_memory(int device);

}  // namespace memkit

#endif
