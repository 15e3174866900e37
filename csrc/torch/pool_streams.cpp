#include "pool_streams.h"

#ifdef MEMKIT_WITH_CUDA

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <utility>

#include "cuda_memory.h"

namespace memkit {

using arena::Block;
using arena::LaneId;
using c10::cuda::CUDAStream;

struct PoolStreams::Closed {
  void add(std::shared_ptr<PoolStreams> streams) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (std::find(list.begin(), list.end(), streams) == list.end()) list.push_back(std::move(streams));
  }
  void look_after() {
    const std::lock_guard<std::mutex> guard(mutex);
    list.erase(std::remove_if(list.begin(), list.end(), [](const auto& streams) { return !streams->outlives(); }),
               list.end());
  }
  static Closed& get() {
    static Closed& instance = *new Closed;
    return instance;
  }

  std::mutex mutex;
  std::vector<std::shared_ptr<PoolStreams>> list;
};

void PoolStreams::look_after_closed() { Closed::get().look_after(); }

// A moment of a stream that is being recorded would be one of the graph's.
void PoolStreams::Parked::mark() {
  const auto marked = [&](const CUDAStream& stream) {
    if (capture_of(stream).active) return false;
    try {
      moments.emplace_back(stream);
    } catch (const c10::Error&) {  // a capture that failed; or the device did, and nothing matters any more
      (void)cudaGetLastError();
      return false;
    }
    return true;
  };
  streams.erase(std::remove_if(streams.begin(), streams.end(), marked), streams.end());
}
bool PoolStreams::Parked::passed() const {
  return streams.empty() && std::all_of(moments.begin(), moments.end(), [](const Moment& m) { return m.passed(); });
}

arena::CaptureId PoolStreams::prepare(arena::Arena& arena, LaneId lane) {
  const CaptureInfo now = capture_of(stream_of(lane, device_));
  if (!now.active && !recording_.load(std::memory_order_relaxed) && !waiting_.load(std::memory_order_relaxed) &&
      !died_.load(std::memory_order_relaxed))
    return 0;
  const std::lock_guard<std::mutex> guard(mutex_);
  follow_captures(arena);
  if (now.active) {
    record(arena, now, lane);
    return now.id;
  }
  collect(arena, false);
  bury(arena);
  return 0;
}

bool PoolStreams::wait(LaneId lane, const arena::Allocation& got) {
  const CUDAStream stream = stream_of(lane, device_);
  std::vector<CUDAStream> others;
  for (const LaneId other : got.waits) others.push_back(stream_of(other, device_));
  const bool captured = capture_of(stream).active;
  bool waits = true;
  try {
    for (const CUDAStream& other : others) {
      const CaptureInfo theirs = capture_of(other);
      if (captured) {
        waits = waits && !theirs.active && finish(other);
      } else if (theirs.active) {
        const std::lock_guard<std::mutex> guard(mutex_);
        record(*static_cast<arena::Arena*>(got.block->owner), theirs, lane_of(other));
        waits = false;
      } else {
        Moment(other).hold(stream);
      }
    }
  } catch (...) {
    park(got.block, std::move(others));
    throw;
  }
  if (!waits) park(got.block, std::move(others));
  TORCH_CHECK(waits || !captured,
              "Pool: expected memory that the graph being captured can have, got none but what its own stream used ",
              "before; make the pool larger, or synchronize() the device and try again");
  return waits;
}

void PoolStreams::park(Block* block, std::vector<CUDAStream> streams) {
  auto& arena = *static_cast<arena::Arena*>(block->owner);
  Parked parked{0, std::move(streams), {}};
  parked.mark();
  if (arena.closed()) {  // serves no more, and nobody asks
    for (const Moment& moment : parked.moments) moment.wait();
    arena::free(block);
    return;
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  parked.ticket = next_ticket_++;
  if (arena.defer(block, parked.ticket) != arena::Freed::ok) return;
  waiting_.store(true, std::memory_order_relaxed);
  parked_.push_back(std::move(parked));
}

void PoolStreams::reclaim(arena::Arena& arena) {
  bool leaves = false;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    follow_captures(arena);
    collect(arena, true);
    arena_ = &arena;
    leaves = bury(arena);
  }
  if (leaves) Closed::get().add(shared_from_this());
}

bool PoolStreams::recording(arena::Arena& arena) {
  const std::lock_guard<std::mutex> guard(mutex_);
  follow_captures(arena);
  return !captures_.empty();
}

// CUDA must not be called here.
void CUDART_CB PoolStreams::graph_died(void* data) {
  const std::unique_ptr<Graph> graph(static_cast<Graph*>(data));
  const std::lock_guard<std::mutex> guard(graph->streams->dead_mutex_);
  graph->streams->dead_.push_back(graph->id);
  graph->streams->died_.store(true, std::memory_order_relaxed);
}

void PoolStreams::record(arena::Arena& arena, const CaptureInfo& now, LaneId lane) {
  auto at = std::find_if(captures_.begin(), captures_.end(), [&](const Recording& r) { return r.id == now.id; });
  if (at == captures_.end()) {
    settle(arena);
    auto graph = std::make_unique<Graph>(Graph{shared_from_this(), now.id});
    cudaUserObject_t object = nullptr;
    C10_CUDA_CHECK(cudaUserObjectCreate(&object, graph.get(), &graph_died, 1, cudaUserObjectNoDestructorSync));
    graph.release();
    ++graphs_;
    if (const cudaError_t error = cudaGraphRetainUserObject(now.graph, object, 1, cudaGraphUserObjectMove)) {
      (void)cudaUserObjectRelease(object, 1);
      C10_CUDA_CHECK(error);
    }
    captures_.push_back({now.id, {}});
    recording_.store(true, std::memory_order_relaxed);
    at = captures_.end() - 1;
  }
  if (std::find(at->lanes.begin(), at->lanes.end(), lane) != at->lanes.end()) return;
  TORCH_CHECK(arena.pin(now.id, lane), "Pool: expected a stream that one graph records, got one that two do");
  at->lanes.push_back(lane);
}

// A capture cannot wait for other streams, and grows first: so what those are done with becomes clean before.
void PoolStreams::settle(arena::Arena& arena) {
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const std::size_t frees = arena.stats().frees;
  std::vector<LaneId> done;
  for (const LaneId lane : arena.idle_lanes()) {
    const CUDAStream stream = stream_of(lane, device_);
    if (capture_of(stream).active) continue;
    const c10::cuda::CUDAGuard guard(device_);
    if (cudaStreamQuery(stream) == cudaSuccess)
      done.push_back(lane);
    else
      (void)cudaGetLastError();
  }
  if (!done.empty()) arena.settle(frees, &done);
}

// Ends recordings whose capture is over.
void PoolStreams::follow_captures(arena::Arena& arena) {
  if (captures_.empty()) return;
  const auto over = [&](const Recording& recording) {
    for (const LaneId lane : recording.lanes) {
      const CaptureInfo info = capture_of(stream_of(lane, device_));
      if (info.active && info.id == recording.id) return false;
    }
    arena.seal(recording.id);
    return true;
  };
  captures_.erase(std::remove_if(captures_.begin(), captures_.end(), over), captures_.end());
  recording_.store(!captures_.empty(), std::memory_order_relaxed);
}

// Gives back what dead graphs used, after a wait for the device: any stream may have used their results. The arena
// may go with the last. Returns whether something is left that will need this again.
bool PoolStreams::bury(arena::Arena& arena) {
  std::vector<unsigned long long> dead;
  {
    const std::lock_guard<std::mutex> guard(dead_mutex_);
    dead.swap(dead_);
    died_.store(false, std::memory_order_relaxed);
  }
  const std::size_t frees = dead.empty() ? 0 : arena.stats().frees;
  const bool idle = dead.empty() || (captures_.empty() && synchronize(device_));
  if (!dead.empty() && idle) {
    collect(arena, false);
    arena.settle(frees);
  }
  std::vector<unsigned long long> later;
  for (const unsigned long long id : dead)
    if (!idle || !arena.unpin(id, frees)) later.push_back(id);
  graphs_ -= dead.size() - later.size();
  if (!later.empty()) {
    const std::lock_guard<std::mutex> guard(dead_mutex_);
    dead_.insert(dead_.end(), later.begin(), later.end());
    died_.store(true, std::memory_order_relaxed);
  }
  return graphs_ > 0 || !captures_.empty() || !parked_.empty();
}

// A closed pool's: whether it has to be looked after again.
bool PoolStreams::outlives() {
  const std::lock_guard<std::mutex> guard(mutex_);
  follow_captures(*arena_);
  collect(*arena_, false);
  return bury(*arena_);
}

void PoolStreams::collect(arena::Arena& arena, bool wait) {
  if (parked_.empty()) return;
  std::deque<Parked> left;
  for (Parked& parked : parked_) {
    parked.mark();
    if (wait)
      for (const Moment& moment : parked.moments) moment.wait();
    if (parked.passed())
      arena.release_deferred(parked.ticket);
    else
      left.push_back(std::move(parked));
  }
  parked_ = std::move(left);
  waiting_.store(!parked_.empty(), std::memory_order_relaxed);
}

}  // namespace memkit

#endif
