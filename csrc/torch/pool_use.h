// pool.use(): torch's allocations go to a pool.
#pragma once

#include <memory>

#ifdef MEMKIT_WITH_CUDA
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <cstdint>
#endif

#include <optional>

namespace memkit {

class Pool;

// One `with pool.use()`, entered and left once by one thread, which keeps the pool until then.
class PoolUse {
 public:
  virtual ~PoolUse() = default;
  virtual void enter() = 0;
  virtual std::optional<bool> leave() = 0;  // as leave_cpu_source
};

std::shared_ptr<PoolUse> make_cuda_use(std::shared_ptr<Pool> pool);  // raises in a build without CUDA

#ifdef MEMKIT_WITH_CUDA
// Who serves what torch allocates on a stream, and since which turn (cuda_front.h).
struct CudaServer {
  std::shared_ptr<Pool> pool;  // nullptr: torch itself
  std::uint64_t since = 0;
};
CudaServer cuda_server(const c10::cuda::CUDAStream& stream);
inline std::atomic<int> cuda_uses{0};  // that are entered now
#endif

}  // namespace memkit
