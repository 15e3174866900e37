#include "cuda_lent.h"

#ifdef MEMKIT_WITH_CUDA

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "pool.h"

namespace memkit {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::CachingDeviceAllocator::SegmentInfo;
using c10::CachingDeviceAllocator::Stat;
using c10::CachingDeviceAllocator::StatArray;
using c10::CachingDeviceAllocator::TraceEntry;

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
std::size_t size_kind_of(const Lent& lent) { return lent.rounded < kLargeFrom ? 1 : 2; }

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

}  // namespace

void count_lent(const Lent& lent) {
  Tally& own = tally_of(lent.device);
  {
    const std::lock_guard<std::mutex> guard(own.mutex);
    for (std::size_t i = 0; i < kCount; ++i)
      for (const std::size_t kind : {kAll, size_kind_of(lent)}) {
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
      for (const std::size_t kind : {kAll, size_kind_of(lent)}) own.stats[i][kind].decrease(kCounters[i].amount(lent));
  }
  own.alive.fetch_sub(1, std::memory_order_relaxed);
  if (!caching::isHistoryEnabled()) return;
  remember(TraceEntry::FREE_REQUESTED, lent);
  remember(TraceEntry::FREE_COMPLETED, lent);
}

void count_exhausted(c10::DeviceIndex device) { ++tally_of(device).ooms; }
bool is_lent(c10::DeviceIndex device) { return tally_of(device).alive.load(std::memory_order_relaxed) > 0; }

void look_at_peaks(c10::DeviceIndex device, const DeviceStats& torchs) {
  Tally& own = tally_of(device);
  const std::lock_guard<std::mutex> guard(own.mutex);
  own.look(torchs);
}

void reset_lent_peaks(c10::DeviceIndex device, const DeviceStats& torchs) {
  Tally& own = tally_of(device);
  const std::lock_guard<std::mutex> guard(own.mutex);
  for (auto& kinds : own.stats)
    for (Stat& stat : kinds) stat.peak = 0;
  own.look(torchs);
}

void reset_lent(c10::DeviceIndex device) {
  Tally& own = tally_of(device);
  const std::lock_guard<std::mutex> guard(own.mutex);
  for (auto& kinds : own.stats)
    for (Stat& stat : kinds) stat.reset_accumulated();
  own.ooms = 0;
}

void add_lent(c10::DeviceIndex device, DeviceStats* torchs) {
  Tally& own = tally_of(device);
  const std::lock_guard<std::mutex> guard(own.mutex);
  own.look(*torchs);
  own.add_to(torchs);
}

void keep_history(std::size_t most, caching::CreateContextFn context, caching::RecordContext when, bool clear) {
  History& history = History::get();
  const std::lock_guard<std::mutex> guard(history.mutex);
  if (clear || !most) history.entries.clear();
  history.most = most;
  history.context = most ? context : nullptr;
  history.when = most ? when : caching::RecordContext::NEVER;
}

void add_pools(caching::SnapshotInfo* info, bool traces) {
  for (const auto& pool : Pool::all_cuda())
    for (SegmentInfo& segment : segments_of(*pool)) info->segments.push_back(std::move(segment));
  History& history = History::get();
  const std::lock_guard<std::mutex> guard(history.mutex);
  for (std::size_t device = 0; traces && device < info->device_traces.size(); ++device) {
    auto& all = info->device_traces[device];
    for (const TraceEntry& entry : history.entries)
      if (static_cast<std::size_t>(entry.device_) == device) all.push_back(entry);
    std::stable_sort(all.begin(), all.end(),
                     [](const TraceEntry& a, const TraceEntry& b) { return a.time_.t_ < b.time_.t_; });
  }
}

}  // namespace memkit

#endif
