// pool.use() on CUDA: torch's caching allocator cuts tensors from segments that the pool gives it (torch.cuda.MemPool),
// so that streams, events and graphs go on as they do without the pool.
#include "pool_use.h"

#ifndef MEMKIT_WITH_CUDA

#include <c10/util/Exception.h>

namespace memkit {
std::shared_ptr<PoolUse> make_cuda_use(std::shared_ptr<Pool>) {
  TORCH_CHECK(false, "Pool.use: expected a memkit that was built with CUDA, got one without");
}
void empty_cuda_use(std::int64_t, bool) {}
}  // namespace memkit

#else

#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "pool.h"

namespace memkit {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using Allocator = std::shared_ptr<caching::CUDAAllocator>;

class CudaUse;
thread_local std::vector<std::shared_ptr<CudaUse>> entered;

// A MemPool for each memkit pool, for good: tensors and graphs may outlive both (pytorch#146431).
struct Route {
  c10::DeviceIndex device;
  Allocator allocator;
  std::unique_ptr<at::cuda::MemPool> pool;
  bool closed = false;
  std::mutex turn;   // to begin and to end; taken before torch's own lock
  std::mutex mutex;  // of what follows; taken after it
  std::vector<CudaUse*> uses;

  bool serves(cudaStream_t stream);
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

// By the pool's id.
struct Routes {
  std::mutex mutex;
  std::map<std::int64_t, Route> map;

  static Routes& get() {
    static Routes& instance = *new Routes;
    return instance;
  }
  Route* find(std::int64_t id) {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto found = map.find(id);
    return found == map.end() ? nullptr : &found->second;
  }
};

Route& route_of(const std::shared_ptr<Pool>& pool) {
  if (Route* known = Routes::get().find(pool->id())) return *known;
  const std::lock_guard<std::mutex> guard(Routes::get().mutex);
  const c10::DeviceIndex device = pool->device().device().index();
  const c10::cuda::CUDAGuard current(device);
  const std::weak_ptr<Pool> weak = pool;
  // The arena outlives its pool for as long as a segment lives in it.
  arena::Arena* const arena = &pool->arena();
  const auto allocate = [weak](std::size_t bytes, int, cudaStream_t) -> void* {
    const std::shared_ptr<Pool> pool = weak.lock();
    arena::Block* block = pool ? pool->spare(bytes) : nullptr;
    return block ? block->data() : nullptr;  // nullptr: torch frees what it caches, tries again, and raises
  };
  const auto release = [arena](void* memory, std::size_t, int, cudaStream_t) { arena->free_pointer(memory); };
  Route& route = Routes::get().map[pool->id()];
  if (route.pool) return route;
  route.device = device;
  route.allocator = torch::cuda::CUDAPluggableAllocator::createCustomAllocator(allocate, release);
  route.pool = make_mempool(route.allocator);
  return route;
}

class CudaUse final : public PoolUse, public std::enable_shared_from_this<CudaUse> {
 public:
  explicit CudaUse(std::shared_ptr<Pool> pool) : pool_(std::move(pool)), route_(route_of(pool_)) {}

  void enter() override {
    pool_->check_open("Pool.use");
    const cudaStream_t current = c10::cuda::getCurrentCUDAStream(route_.device).stream();
    CudaUse* outer = innermost(route_.device);
    entered.push_back(shared_from_this());
    if (outer) outer->end();
    begin(current);
  }

  bool leave() override {
    if (entered.empty() || entered.back().get() != this) return false;
    end();
    entered.pop_back();
    if (CudaUse* outer = innermost(route_.device)) outer->begin(nullptr);
    return true;
  }

  // Of this thread.
  static CudaUse* innermost(c10::DeviceIndex device) {
    for (auto at = entered.rbegin(); at != entered.rend(); ++at)
      if ((*at)->route_.device == device) return at->get();
    return nullptr;
  }

  bool goes_by(const Route* route) const { return &route_ == route; }
  bool works_on(cudaStream_t stream) const {
    return std::find(streams_.begin(), streams_.end(), stream) != streams_.end();
  }
  void add(cudaStream_t stream) {
    if (!works_on(stream)) streams_.push_back(stream);
  }

 private:
  // An outer one stands aside, or it would go on serving the streams of its thread.
  void begin(cudaStream_t stream) {
    const std::lock_guard<std::mutex> turn(route_.turn);
    bool first = false;
    {
      const std::lock_guard<std::mutex> guard(route_.mutex);
      if (streams_.empty()) streams_.push_back(stream);
      first = route_.uses.empty();
      route_.uses.push_back(this);
    }
    Route* const route = &route_;
    if (first)
      caching::beginAllocateToPool(route_.device, route_.pool->id(),
                                   [route](cudaStream_t asked) { return route->serves(asked); });
  }
  void end() {
    const std::lock_guard<std::mutex> turn(route_.turn);
    {
      const std::lock_guard<std::mutex> guard(route_.mutex);
      route_.uses.erase(std::find(route_.uses.begin(), route_.uses.end(), this));
      if (!route_.uses.empty()) return;
    }
    caching::endAllocateToPool(route_.device, route_.pool->id());
    caching::releasePool(route_.device, route_.pool->id());
  }

  const std::shared_ptr<Pool> pool_;
  Route& route_;
  std::vector<cudaStream_t> streams_;  // that its thread has allocated on
};

// What the threads within use() allocate, and on their streams who is in none: backward runs on a thread of its own.
// Not what a graph records: torch keeps that apart for the graph.
bool Route::serves(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) (void)cudaGetLastError();
  if (status != cudaStreamCaptureStatusNone) return false;
  CudaUse* const own = CudaUse::innermost(device);
  if (own && !own->goes_by(this)) return false;
  const std::lock_guard<std::mutex> guard(mutex);
  if (own) own->add(stream);
  return own || std::any_of(uses.begin(), uses.end(), [&](const CudaUse* use) { return use->works_on(stream); });
}

}  // namespace

// torch.cuda.empty_cache() passes over the segments of a MemPool that lives: so there is a new one for what comes next.
void empty_cuda_use(std::int64_t pool, bool close) {
  Route* const route = Routes::get().find(pool);
  if (!route) return;
  const std::lock_guard<std::mutex> turn(route->turn);
  if (route->closed || (!close && !route->uses.empty())) return;
  route->closed = close;
  const auto old = route->pool->id();
  caching::releasePool(route->device, old);
  if (!close) {
    const c10::cuda::CUDAGuard current(route->device);
    (void)route->pool.release();  // whose end would do what follows, and may not fail
    route->pool = make_mempool(route->allocator);
  }
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(route->device), &status) != cudaSuccess)
    (void)cudaGetLastError();
  if (status == cudaStreamCaptureStatusNone) try {
      caching::emptyCache(old);
    } catch (
        const c10::Error&) {  // another thread is within use(), or captures: torch.cuda.empty_cache() does it later
    }
}

std::shared_ptr<PoolUse> make_cuda_use(std::shared_ptr<Pool> pool) {
  return std::make_shared<CudaUse>(std::move(pool));
}

}  // namespace memkit

#endif
