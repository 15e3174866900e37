// pool.use() on CUDA: torch's caching allocator cuts tensors from segments that the pool gives it (torch.cuda.MemPool),
// so that streams, events and graphs go on as they do without the pool.
#include "pool_use.h"

#ifndef MEMKIT_WITH_CUDA

#include <c10/util/Exception.h>

namespace memkit {
std::shared_ptr<PoolUse> make_cuda_use(std::shared_ptr<Pool>) {
  TORCH_CHECK(false, "Pool.use: expected a memkit that was built with CUDA, got one without");
}
}  // namespace memkit

#else

#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <map>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "pool.h"

namespace memkit {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using Allocator = std::shared_ptr<caching::CUDAAllocator>;

// A MemPool for each memkit pool, for good: tensors and graphs may outlive both (pytorch#146431).
struct Route {
  c10::DeviceIndex device;
  Allocator allocator;
  std::unique_ptr<at::cuda::MemPool> pool;
};

// An allocator of raw pointers before PyTorch 2.12, of shared ones since.
template <class Pool = at::cuda::MemPool>
std::unique_ptr<Pool> make_mempool(const Allocator& allocator) {
  if constexpr (std::is_constructible_v<Pool, Allocator>) {
    return std::make_unique<Pool>(allocator);
  } else {
    return std::make_unique<Pool>(allocator.get());
  }
}

Route& route_of(const std::shared_ptr<Pool>& pool) {
  static std::mutex& mutex = *new std::mutex;
  static auto& routes = *new std::map<std::int64_t, Route>;
  const std::lock_guard<std::mutex> guard(mutex);
  const auto found = routes.find(pool->id());
  if (found != routes.end()) return found->second;
  const c10::DeviceIndex device = pool->device().device().index();
  const c10::cuda::CUDAGuard current(device);
  const std::weak_ptr<Pool> weak = pool;
  // The arena outlives its pool for as long as a segment lives in it.
  arena::Arena* const arena = &pool->arena();
  const auto allocate = [weak](std::size_t bytes, int, cudaStream_t) -> void* {
    const std::shared_ptr<Pool> pool = weak.lock();
    return pool ? pool->segment(bytes) : nullptr;  // nullptr: torch frees what it caches, tries again, and raises
  };
  const auto release = [arena](void* memory, std::size_t, int, cudaStream_t) { arena->free_pointer(memory); };
  Route route{device, torch::cuda::CUDAPluggableAllocator::createCustomAllocator(allocate, release), nullptr};
  route.pool = make_mempool(route.allocator);
  return routes.emplace(pool->id(), std::move(route)).first->second;
}

class CudaUse;
thread_local std::vector<std::shared_ptr<CudaUse>> entered;

class CudaUse final : public PoolUse, public std::enable_shared_from_this<CudaUse> {
 public:
  explicit CudaUse(std::shared_ptr<Pool> pool) : pool_(std::move(pool)), route_(route_of(pool_)) {}

  void enter() override {
    pool_->check_open("Pool.use");
    stream_ = c10::cuda::getCurrentCUDAStream(route_.device).stream();
    if (CudaUse* outer = enclosing()) outer->end();
    entered.push_back(shared_from_this());
    begin();
  }

  bool leave() override {
    if (entered.empty() || entered.back().get() != this) return false;
    end();
    entered.pop_back();
    if (CudaUse* outer = enclosing()) outer->begin();
    return true;
  }

 private:
  // Torch asks the filters in the order of their beginning: an outer one must stand aside.
  CudaUse* enclosing() const {
    for (auto at = entered.rbegin(); at != entered.rend(); ++at)
      if ((*at)->route_.device == route_.device) return at->get();
    return nullptr;
  }

  // What this thread allocates, and on its stream whoever does: backward runs on a thread of its own.
  void begin() {
    const auto mine = [thread = std::this_thread::get_id(), stream = stream_](cudaStream_t asked) {
      return asked == stream || std::this_thread::get_id() == thread;
    };
    caching::beginAllocateToPool(route_.device, route_.pool->id(), mine);
  }
  void end() {
    caching::endAllocateToPool(route_.device, route_.pool->id());
    caching::releasePool(route_.device, route_.pool->id());
  }

  const std::shared_ptr<Pool> pool_;
  Route& route_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

std::shared_ptr<PoolUse> make_cuda_use(std::shared_ptr<Pool> pool) {
  return std::make_shared<CudaUse>(std::move(pool));
}

}  // namespace memkit

#endif
