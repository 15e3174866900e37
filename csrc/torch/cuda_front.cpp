#include "cuda_front.h"

#ifdef MEMKIT_WITH_CUDA

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda_memory.h"
#include "cuda_streams.h"
#include "pool.h"
#include "pool_use.h"

namespace memkit {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingDeviceAllocator::SegmentInfo;
using c10::CachingDeviceAllocator::Stat;
using c10::CachingDeviceAllocator::StatArray;
using c10::CachingDeviceAllocator::TraceEntry;
using c10::cuda::CUDAStream;

// The counters of torch that count tensors, and how much one that is lent adds.
struct Counter {
  StatArray DeviceStats::* of;
  std::size_t (*amount)(const Lent&);
};
constexpr Counter kCounters[] = {
    {&DeviceStats::allocation, [](const Lent&) -> std::size_t { return 1; }},
    {&DeviceStats::active, [](const Lent&) -> std::size_t { return 1; }},
    {&DeviceStats::allocated_bytes, [](const Lent& lent) { return lent.rounded; }},
    {&DeviceStats::active_bytes, [](const Lent& lent) { return lent.rounded; }},
    {&DeviceStats::reserved_bytes, [](const Lent& lent) { return lent.rounded; }},
    {&DeviceStats::requested_bytes, [](const Lent& lent) { return lent.nbytes; }},
};
constexpr std::size_t kCount = std::size(kCounters);

// torch counts all, and small and large ones apart.
constexpr std::size_t kAll = 0, kKinds = 3, kLargeFrom = (1 << 20) + 1;
std::size_t kind_of(const Lent& lent) { return lent.rounded < kLargeFrom ? 1 : 2; }

// Of one device. A peak is one of torch's bytes and of the pools' together.
struct Tally {
  std::mutex mutex;
  std::atomic<std::int64_t> alive{0}, ooms{0};
  Stat stats[kCount][kKinds];  // what is lent; a peak is that of the sum with torch's own

  // After an allocation of either: peaks are reached there.
  void look(const DeviceStats& torchs) {
    for (std::size_t i = 0; i < kCount; ++i)
      for (std::size_t kind = 0; kind < kKinds; ++kind) {
        Stat& stat = stats[i][kind];
        stat.peak = std::max(stat.peak, stat.current + (torchs.*kCounters[i].of)[kind].current);
      }
  }
  void add_to(DeviceStats* torchs) const {
    for (std::size_t i = 0; i < kCount; ++i)
      for (std::size_t kind = 0; kind < kKinds; ++kind) {
        const Stat& own = stats[i][kind];
        Stat& sum = ((*torchs).*kCounters[i].of)[kind];
        sum.current += own.current;
        sum.peak = std::max(sum.peak, own.peak);
        sum.allocated += own.allocated;
        sum.freed += own.freed;
      }
    torchs->num_ooms += ooms.load(std::memory_order_relaxed);
  }
};

Tally& tally_of(c10::DeviceIndex device) {
  static auto& tallies = *new std::array<Tally, C10_COMPILE_TIME_MAX_GPUS>;
  return tallies.at(static_cast<std::size_t>(device));
}

// What torch.cuda.memory._record_memory_history() asks for, of what is lent.
struct History {
  std::mutex mutex;
  std::deque<TraceEntry> entries;
  std::size_t most = 0;
  caching::CreateContextFn context = nullptr;
  caching::RecordContext when = caching::RecordContext::NEVER;

  static History& get() {
    static History& instance = *new History;
    return instance;
  }
};

void remember(TraceEntry::Action action, const Lent& lent) try {
  History& history = History::get();
  const auto least = action == TraceEntry::ALLOC ? caching::RecordContext::STATE : caching::RecordContext::ALL;
  caching::CreateContextFn gather = nullptr;
  {
    const std::lock_guard<std::mutex> guard(history.mutex);
    if (history.when >= least) gather = history.context;
  }
  std::shared_ptr<c10::GatheredContext> context = gather ? gather() : nullptr;
  const auto now =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  TraceEntry entry(action, lent.device, reinterpret_cast<std::size_t>(lent.data), lent.nbytes, lent.stream, {0, 0}, 0,
                   std::move(context));
  entry.time_.t_ = now;
  const std::lock_guard<std::mutex> guard(history.mutex);
  history.entries.push_back(std::move(entry));
  while (history.entries.size() > history.most) history.entries.pop_front();
} catch (const std::exception&) {  // the memory is what matters
}

std::vector<SegmentInfo> segments_of(Pool& pool) {
  std::vector<SegmentInfo> segments;
  const c10::DeviceIndex device = pool.device().device().index();
  pool.arena().visit(
      [&](const arena::ChunkView& chunk) {
        SegmentInfo segment;
        segment.device = device;
        segment.address = reinterpret_cast<std::size_t>(chunk.address);
        segment.total_size = chunk.size;
        segment.is_large = true;
        segments.push_back(std::move(segment));
      },
      [&](const arena::BlockView& block) {
        SegmentInfo& segment = segments.back();
        c10::CachingDeviceAllocator::BlockInfo info;
        info.size = block.size;
        info.requested_size = block.requested;
        info.allocated = block.state == arena::State::live;
        info.active = info.allocated || block.state == arena::State::parked;
        segment.requested_size += info.allocated ? info.requested_size : 0;
        segment.allocated_size += info.allocated ? info.size : 0;
        segment.active_size += info.active ? info.size : 0;
        segment.blocks.push_back(std::move(info));
      });
  return segments;
}

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
    Tally& own = tally_of(device);
    const std::lock_guard<std::mutex> guard(own.mutex);
    own.look(stats);
    own.add_to(&stats);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    torchs_->resetAccumulatedStats(device);
    Tally& own = tally_of(device);
    const std::lock_guard<std::mutex> guard(own.mutex);
    for (auto& kinds : own.stats)
      for (Stat& stat : kinds) stat.reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    torchs_->resetPeakStats(device);
    const DeviceStats stats = torchs_->getDeviceStats(device);
    Tally& own = tally_of(device);
    const std::lock_guard<std::mutex> guard(own.mutex);
    for (auto& kinds : own.stats)
      for (Stat& stat : kinds) stat.peak = 0;
    own.look(stats);
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
    History& history = History::get();
    const std::lock_guard<std::mutex> guard(history.mutex);
    if (clear || !enabled) history.entries.clear();
    history.most = enabled ? most : 0;
    history.context = enabled ? context : nullptr;
    history.when = enabled ? when : caching::RecordContext::NEVER;
  }
  caching::SnapshotInfo snapshot(c10::MempoolId_t id, bool traces) override {
    caching::SnapshotInfo info = torchs_->snapshot(id, traces);
    if (id != c10::MempoolId_t{0, 0}) return info;
    for (const auto& pool : Pool::all_cuda())
      for (SegmentInfo& segment : segments_of(*pool)) info.segments.push_back(std::move(segment));
    History& history = History::get();
    const std::lock_guard<std::mutex> guard(history.mutex);
    for (std::size_t device = 0; traces && device < info.device_traces.size(); ++device) {
      auto& all = info.device_traces[device];
      for (const TraceEntry& entry : history.entries)
        if (static_cast<std::size_t>(entry.device_) == device) all.push_back(entry);
      std::stable_sort(all.begin(), all.end(),
                       [](const TraceEntry& a, const TraceEntry& b) { return a.time_.t_ < b.time_.t_; });
    }
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
    ++tally_of(device).ooms;
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
    if (tally_of(device).alive.load(std::memory_order_relaxed)) look(device);
  }
  void look(c10::DeviceIndex device) {
    const DeviceStats stats = torchs_->getDeviceStats(device);
    Tally& own = tally_of(device);
    const std::lock_guard<std::mutex> guard(own.mutex);
    own.look(stats);
  }

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

void count_lent(const Lent& lent) {
  Tally& own = tally_of(lent.device);
  {
    const std::lock_guard<std::mutex> guard(own.mutex);
    for (std::size_t i = 0; i < kCount; ++i)
      for (const std::size_t kind : {kAll, kind_of(lent)}) {
        Stat& stat = own.stats[i][kind];
        const std::int64_t peak = stat.peak;  // of the sum with torch's, which is looked at next
        stat.increase(kCounters[i].amount(lent));
        stat.peak = peak;
      }
  }
  own.alive.fetch_add(1, std::memory_order_relaxed);
  if (caching::isHistoryEnabled()) remember(TraceEntry::ALLOC, lent);
}

void count_returned(const Lent& lent) {
  Tally& own = tally_of(lent.device);
  {
    const std::lock_guard<std::mutex> guard(own.mutex);
    for (std::size_t i = 0; i < kCount; ++i)
      for (const std::size_t kind : {kAll, kind_of(lent)}) own.stats[i][kind].decrease(kCounters[i].amount(lent));
  }
  own.alive.fetch_sub(1, std::memory_order_relaxed);
  if (!caching::isHistoryEnabled()) return;
  remember(TraceEntry::FREE_REQUESTED, lent);
  remember(TraceEntry::FREE_COMPLETED, lent);
}

}  // namespace memkit

#endif
