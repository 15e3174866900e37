// Device memory by the chunk, whose pages can go and come back under addresses that stay.
#pragma once

#include <memory>

#include "arena/upstream.h"

#ifdef MEMKIT_WITH_CUDA

namespace memkit {

class CudaMemory : public arena::Upstream {
 public:
  virtual const char* sleep_blocker() const = 0;  // why pages cannot go, or nullptr
  // As in PoolDevice; what uses the range is done.
  virtual std::size_t discard(void* memory, std::size_t bytes) = 0;
  virtual void restore(void* memory, std::size_t bytes) = 0;
};

// By the driver's virtual memory where there is that, else by cudaMalloc.
std::shared_ptr<CudaMemory> make_cuda_memory(int device);

}  // namespace memkit

#endif
