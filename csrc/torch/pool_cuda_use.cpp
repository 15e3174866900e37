// pool.use() on CUDA: whose turn it is to serve what torch allocates (cuda_front.h asks).
#include "pool_use.h"

#ifndef MEMKIT_WITH_CUDA

#include <c10/util/Exception.h>

namespace memkit {
std::shared_ptr<PoolUse> make_cuda_use(std::shared_ptr<Pool>) {
  TORCH_CHECK(false, "Pool.use: expected a memkit that was built with CUDA, got one without");
}
}  // namespace memkit

#else

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_front.h"
#include "cuda_streams.h"
#include "pool.h"

namespace memkit {
namespace {

using c10::cuda::CUDAStream;

class CudaUse;

// Those of all threads, as they were entered. Leaked on purpose: threads may look after static objects have died.
struct Uses {
  std::mutex mutex;
  std::vector<CudaUse*> list;

  static Uses& get() {
    static Uses& instance = *new Uses;
    return instance;
  }
};

class CudaUse final : public PoolUse, public std::enable_shared_from_this<CudaUse> {
 public:
  explicit CudaUse(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
  void enter() override;
  std::optional<bool> leave() override;
  // Serves no more.
  void withdraw() {
    const std::lock_guard<std::mutex> guard(Uses::get().mutex);
    auto& list = Uses::get().list;
    list.erase(std::remove(list.begin(), list.end(), this), list.end());
    cuda_uses.store(static_cast<int>(list.size()), std::memory_order_relaxed);
  }

  c10::DeviceIndex device() const { return pool_->device().device().index(); }
  const CudaServer& server() const { return server_; }

  // Under the lock.
  bool works_on(const CUDAStream& stream) const {
    return std::find(streams_.begin(), streams_.end(), stream) != streams_.end();
  }
  // By its own thread.
  void works_on_too(const CUDAStream& stream) {
    if (streams_.back() == stream || works_on(stream)) return;  // nobody else writes
    const std::lock_guard<std::mutex> guard(Uses::get().mutex);
    streams_.push_back(stream);
  }

 private:
  const std::shared_ptr<Pool> pool_;
  CudaServer server_;
  std::vector<CUDAStream> streams_;  // that its thread has allocated on
};

// Those of a thread, which leaves with its end what it has not left.
struct Entered {
  std::vector<std::shared_ptr<CudaUse>> list;

  ~Entered();
};
thread_local Entered* entered = nullptr;  // where the thread has been in one, and has not come to its end
Entered& make_entered() {
  static thread_local Entered own;
  return *(entered = &own);
}
Entered::~Entered() {
  entered = nullptr;
  for (const auto& use : list) use->withdraw();
}

void CudaUse::enter() {
  pool_->check_open("Pool.use");
  const CUDAStream current = c10::cuda::getCurrentCUDAStream(device());
  make_entered().list.push_back(shared_from_this());
  const std::lock_guard<std::mutex> guard(Uses::get().mutex);
  server_ = {pool_, next_turn()};
  streams_.assign(1, current);
  Uses::get().list.push_back(this);
  cuda_uses.store(static_cast<int>(Uses::get().list.size()), std::memory_order_relaxed);
}

std::optional<bool> CudaUse::leave() {
  if (!entered) return std::nullopt;
  auto& all = entered->list;
  const auto own = std::find_if(all.begin(), all.end(), [&](const auto& use) { return use.get() == this; });
  if (own == all.end()) return std::nullopt;
  const bool innermost = std::next(own) == all.end();
  withdraw();
  all.erase(own);
  return innermost;
}

}  // namespace

// What the threads within use() allocate, and on their streams who is in none: backward runs on a thread of its own.
// Not what a graph records: torch keeps that apart for the graph.
CudaServer cuda_server(const CUDAStream& stream) {
  if (capture_of(stream).active) return {};
  if (entered)
    for (auto own = entered->list.rbegin(); own != entered->list.rend(); ++own)
      if ((*own)->device() == stream.device_index()) {
        (*own)->works_on_too(stream);
        return (*own)->server();
      }
  const std::lock_guard<std::mutex> guard(Uses::get().mutex);
  const auto& list = Uses::get().list;
  const auto other =
      std::find_if(list.rbegin(), list.rend(), [&](const CudaUse* use) { return use->works_on(stream); });
  return other == list.rend() ? CudaServer() : (*other)->server();
}

std::shared_ptr<PoolUse> make_cuda_use(std::shared_ptr<Pool> pool) {
  return std::make_shared<CudaUse>(std::move(pool));
}

}  // namespace memkit

#endif
