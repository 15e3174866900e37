// pool.use(): torch's allocations go to a pool.
#pragma once

#include <memory>

namespace memkit {

class Pool;

// One `with pool.use()`, entered and left once by one thread, which keeps the pool until then.
class PoolUse {
 public:
  virtual ~PoolUse() = default;
  virtual void enter() = 0;
  virtual bool leave() = 0;  // false: another one was entered since and not left; nothing changes
};

std::shared_ptr<PoolUse> make_cuda_use(std::shared_ptr<Pool> pool);  // raises in a build without CUDA

}  // namespace memkit
