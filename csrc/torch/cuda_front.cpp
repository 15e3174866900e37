#include "cuda_front.h"

#ifdef MEMKIT_WITH_CUDA

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda_lent.h"
#include "cuda_memory.h"
#include "cuda_streams.h"
#include "pool.h"
#include "pool_use.h"

namespace memkit {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::cuda::CUDAStream;

// Where torch says that a graph or a MemPool allocates now.
struct Turns {
  struct Turn {
    c10::DeviceIndex device;
    c10::MempoolId_t id;
    std::function<bool(cudaStream_t)> filter;
    std::uint64_t number;
  };
  std::mutex mutex;
  std::atomic<std::size_t> count{0};
  std::atomic<std::uint64_t> next{1};
  std::vector<Turn> open;

  static Turns& get() {
    static Turns& instance = *new Turns;
    return instance;
  }
  // Whether one that began after `since` wants what is allocated on the stream.
  bool want(const CUDAStream& stream, std::uint64_t since) {
    if (!count.load(std::memory_order_relaxed)) return false;
    const std::lock_guard<std::mutex> guard(mutex);
    return std::any_of(open.begin(), open.end(), [&](const Turn& turn) {
      return turn.number > since && turn.device == stream.device_index() && turn.filter(stream.stream());
    });
  }
};

class Front : public caching::CUDAAllocator {
 public:
  explicit Front(caching::CUDAAllocator* torchs) : torchs_(torchs) {}

  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::DeviceIndex device = c10::cuda::current_device();
    if (const auto pool = nbytes ? server(device) : nullptr) {
      c10::DataPtr data = lend(*pool, device, nbytes);
      look(device);
      return data;
    }
    c10::DataPtr data = torchs_->allocate(nbytes);
    look_if_lent(device);
    return data;
  }
  void* raw_alloc(std::size_t nbytes) override {
    void* memory = torchs_->raw_alloc(nbytes);
    look_if_lent(c10::cuda::current_device());
    return memory;
  }
  void* raw_alloc_with_stream(std::size_t nbytes, cudaStream_t stream) override {
    void* memory = torchs_->raw_alloc_with_stream(nbytes, stream);
    look_if_lent(c10::cuda::current_device());
    return memory;
  }
  void recordStream(const c10::DataPtr& data, CUDAStream stream) override {
    if (is_cuda_pool_memory(data)) return record_cuda_stream(data, stream);
    torchs_->recordStream(data, stream);
  }

  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    DeviceStats stats = torchs_->getDeviceStats(device);
    add_lent(device, &stats);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    torchs_->resetAccumulatedStats(device);
    reset_lent(device);
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    torchs_->resetPeakStats(device);
    reset_lent_peaks(device, torchs_->getDeviceStats(device));
  }

  // Mapped memory needs to be told who else reads it, and what copies it that it is another device's.
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex other) override {
    torchs_->enablePeerAccess(device, other);
    let_peer_access(/*memory of=*/other, /*peer=*/device);
  }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, std::size_t nbytes,
                          cudaStream_t stream, bool p2p) override {
    if (to_device == from_device) return torchs_->memcpyAsync(to, to_device, from, from_device, nbytes, stream, p2p);
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, nbytes, stream);
  }

  void recordHistory(bool enabled, caching::CreateContextFn context, std::size_t most, caching::RecordContext when,
                     bool clear, const std::vector<std::string>& skipped) override {
    torchs_->recordHistory(enabled, context, most, when, clear, skipped);
    keep_history(enabled ? most : 0, context, when, clear);
  }
  caching::SnapshotInfo snapshot(c10::MempoolId_t id, bool traces) override {
    caching::SnapshotInfo info = torchs_->snapshot(id, traces);
    if (id == c10::MempoolId_t{0, 0}) add_pools(&info, traces);
    return info;
  }

  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    torchs_->attachOutOfMemoryObserver(observer);
    const std::lock_guard<std::mutex> guard(observers_mutex_);
    observers_.push_back(std::move(observer));
  }

  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id,
                           std::function<bool(cudaStream_t)> filter) override {
    torchs_->beginAllocateToPool(device, id, filter);
    Turns& turns = Turns::get();
    const std::lock_guard<std::mutex> guard(turns.mutex);
    turns.open.push_back({device, id, std::move(filter), next_turn()});
    turns.count = turns.open.size();
  }
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id) override {
    {
      Turns& turns = Turns::get();
      const std::lock_guard<std::mutex> guard(turns.mutex);
      const auto found = std::find_if(turns.open.rbegin(), turns.open.rend(),
                                      [&](const Turns::Turn& turn) { return turn.device == device && turn.id == id; });
      if (found != turns.open.rend()) turns.open.erase(std::next(found).base());
      turns.count = turns.open.size();
    }
    torchs_->endAllocateToPool(device, id);
  }

  // -- torch's, as they are
#define MEMKIT_PASS(RESULT, NAME, PARAMETERS, ARGUMENTS) \
  RESULT NAME PARAMETERS override { return torchs_->NAME ARGUMENTS; }
  using Index = c10::DeviceIndex;
  using Id = c10::MempoolId_t;
  using MemoryInfo = std::pair<std::size_t, std::size_t>;
  c10::DeleterFnPtr raw_deleter() const override { return torchs_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t n) const override { torchs_->copy_data(to, from, n); }
  bool isEnabled() const override { return torchs_->isEnabled(); }
  MEMKIT_PASS(bool, initialized, (), ())
  MEMKIT_PASS(void, emptyCache, (Id id), (id))
  MEMKIT_PASS(void, raw_delete, (void* at), (at))
  MEMKIT_PASS(void, init, (int devices), (devices))
  MEMKIT_PASS(double, getMemoryFraction, (Index device), (device))
  MEMKIT_PASS(void, setMemoryFraction, (double fraction, Index device), (fraction, device))
  MEMKIT_PASS(std::vector<caching::StreamSegmentSize>, getExpandableSegmentSizes, (Index device), (device))
  MEMKIT_PASS(void, enable, (bool value), (value))
  MEMKIT_PASS(void, cacheInfo, (Index device, std::size_t* largest), (device, largest))
  MEMKIT_PASS(void*, getBaseAllocation, (void* at, std::size_t* size), (at, size))
  MEMKIT_PASS(void, releasePool, (Index device, Id id), (device, id))
  MEMKIT_PASS(int, getPoolUseCount, (Index device, Id id), (device, id))
  MEMKIT_PASS(void, createOrIncrefPool, (Index device, Id id, std::shared_ptr<caching::CUDAAllocator> own),
              (device, id, std::move(own)))
  MEMKIT_PASS(void, setUseOnOOM, (Index device, Id id, bool use), (device, id, use))
  MEMKIT_PASS(void, setNoSplit, (Index device, Id id), (device, id))
  MEMKIT_PASS(bool, checkPoolLiveAllocations, (Index device, Id id, const std::unordered_set<void*>& expected),
              (device, id, expected))
  MEMKIT_PASS(caching::ShareableHandle, shareIpcHandle, (void* at), (at))
  MEMKIT_PASS(std::shared_ptr<void>, getIpcDevPtr, (std::string handle), (std::move(handle)))
  MEMKIT_PASS(bool, isHistoryEnabled, (), ())
  MEMKIT_PASS(void, recordAnnotation, (const std::vector<std::pair<std::string, std::string>>& texts), (texts))
  MEMKIT_PASS(void, pushCompileContext, (std::string & text), (text))
  MEMKIT_PASS(void, popCompileContext, (), ())
  MEMKIT_PASS(void, setUserMetadata, (const std::string& text), (text))
  MEMKIT_PASS(std::string, getUserMetadata, (), ())
  MEMKIT_PASS(void, attachAllocatorTraceTracker, (caching::AllocatorTraceTracker tracker), (std::move(tracker)))
  MEMKIT_PASS(std::shared_ptr<caching::AllocatorState>, getCheckpointState, (Index device, Id id), (device, id))
  MEMKIT_PASS(caching::CheckpointDelta, setCheckpointPoolState,
              (Index device, std::shared_ptr<caching::AllocatorState> state), (device, std::move(state)))
  MEMKIT_PASS(std::string, name, (), ())
  MEMKIT_PASS(MemoryInfo, getMemoryInfo, (Index device), (device))
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
  MEMKIT_PASS(std::shared_ptr<c10::GatheredContext>, getContextForPointer, (const void* at), (at))
  MEMKIT_PASS(void, attachOomRejectionObserver, (caching::OomRejectionObserver observer), (std::move(observer)))
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  MEMKIT_PASS(void, markCaptureBegin, (Index device), (device))
  MEMKIT_PASS(void, markCaptureEnd, (Index device), (device))
  MEMKIT_PASS(c10::DataPtr, allocateWithAddress, (std::size_t n, void* at), (n, at))
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  MEMKIT_PASS(bool, supportsUserMetadata, (), ())
  MEMKIT_PASS(void, annotateMemory, (const void* at, const std::string& text), (at, text))
#endif
#undef MEMKIT_PASS

 private:
  // The pool whose turn it is, or nullptr: torch's own.
  static std::shared_ptr<Pool> server(c10::DeviceIndex device) {
    if (!cuda_uses.load(std::memory_order_relaxed)) return nullptr;
    const CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
    CudaServer server = cuda_server(stream);
    return server.pool && !Turns::get().want(stream, server.since) ? std::move(server.pool) : nullptr;
  }
  // Kernels that try with less memory want torch's own error; its text is the pool's.
  c10::DataPtr lend(Pool& pool, c10::DeviceIndex device, std::size_t nbytes) {
    std::string refusal;
    c10::DataPtr data = pool.lend(nbytes, &refusal);
    if (refusal.empty()) return data;
    count_exhausted(device);
    std::size_t free = 0, total = 0;
    (void)cudaMemGetInfo(&free, &total);
    std::vector<caching::OutOfMemoryObserver> observers;
    {
      const std::lock_guard<std::mutex> guard(observers_mutex_);
      observers = observers_;
    }
    for (const auto& observer : observers) observer(device, nbytes, total, free);
    TORCH_CHECK_WITH(OutOfMemoryError, false, refusal);
  }
  void look_if_lent(c10::DeviceIndex device) {
    if (is_lent(device)) look(device);
  }
  void look(c10::DeviceIndex device) { look_at_peaks(device, torchs_->getDeviceStats(device)); }

  caching::CUDAAllocator* const torchs_;
  std::mutex observers_mutex_;
  std::vector<caching::OutOfMemoryObserver> observers_;
};

// Not where a later PyTorch has functions that nobody here passes on.
template <class Passes>
caching::CUDAAllocator* make_front(caching::CUDAAllocator* torchs) {
  if constexpr (std::is_abstract_v<Passes>)
    return nullptr;
  else
    return new Passes(torchs);
}

}  // namespace

void stand_before_torch() {
  static caching::CUDAAllocator* const front = make_front<Front>(caching::get());
  TORCH_CHECK(front, "Pool: expected a PyTorch whose CUDA allocator this memkit knows, got " TORCH_VERSION);
  static const bool once = [] {
    caching::allocator.store(front);
    c10::SetAllocator(c10::DeviceType::CUDA, front, /*priority=*/1);
    return true;
  }();
  (void)once;
}

std::uint64_t next_turn() { return Turns::get().next.fetch_add(1, std::memory_order_relaxed); }

}  // namespace memkit

#endif
