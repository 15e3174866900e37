// Pools in CUDA memory: a stream is a lane of the arena, a captured graph keeps what it uses.
#include "pool_device.h"

#ifndef MEMKIT_WITH_CUDA

#include <c10/util/Exception.h>

namespace memkit {
std::unique_ptr<PoolDevice> make_cuda_device(int) {
  TORCH_CHECK(false, "Pool: expected device 'cpu', got 'cuda' in a memkit that was built without CUDA: ",
              "rebuild with MEMKIT_CUDA=1");
}
bool is_cuda_pool_memory(const c10::DataPtr&) { return false; }
}  // namespace memkit

#else

#include <ATen/core/Tensor.h>
#include <ATen/ops/record_stream_ops.h>
#include <c10/core/impl/InlineStreamGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <utility>

#include "cuda_memory.h"

namespace memkit {
namespace {

using arena::Block;
using arena::LaneId;
using arena::Ticket;
using c10::cuda::CUDAStream;

// A lane's id is torch's id of the stream, from which the stream can be had again.
CUDAStream stream_of(LaneId lane, c10::DeviceIndex device) {
  return CUDAStream(CUDAStream::UNCHECKED, c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, device),
                                                       static_cast<c10::StreamId>(lane)));
}
LaneId lane_of(const CUDAStream& stream) { return static_cast<LaneId>(stream.id()); }

struct CaptureInfo {
  bool active = false;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
};

CaptureInfo capture_of(const CUDAStream& stream) {
  CaptureInfo info;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 13000
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &info.id, &info.graph, nullptr, nullptr, nullptr);
#else
  const cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, &info.id, &info.graph, nullptr, nullptr);
#endif
  // The legacy default stream refuses while another stream captures: then it does not capture itself.
  if (error != cudaSuccess) (void)cudaGetLastError();
  info.active = error == cudaSuccess && status == cudaStreamCaptureStatusActive;
  return info.active ? info : CaptureInfo();
}

// An event at the end of a stream's work so far.
class Moment {
 public:
  explicit Moment(const CUDAStream& stream) : device_(stream.device_index()) {
    const c10::cuda::CUDAGuard guard(device_);
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    C10_CUDA_CHECK(cudaEventRecord(event_, stream));
  }
  Moment(Moment&& other) noexcept : device_(other.device_), event_(std::exchange(other.event_, nullptr)) {}
  Moment& operator=(Moment&& other) noexcept {
    std::swap(event_, other.event_);
    std::swap(device_, other.device_);
    return *this;
  }
  ~Moment() {
    if (event_) (void)cudaEventDestroy(event_);
  }

  // Only success counts: a capture of somebody else's may forbid the question, and the memory is in use all the same.
  bool passed() const {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    const cudaError_t error = cudaEventQuery(event_);
    if (error != cudaSuccess) (void)cudaGetLastError();
    return error == cudaSuccess;
  }
  void wait() const {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    if (cudaEventSynchronize(event_) != cudaSuccess) (void)cudaGetLastError();
  }
  void hold(const CUDAStream& stream) const {
    const c10::cuda::CUDAGuard guard(stream.device_index());  // which a default stream's handle does not say
    C10_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0));
  }

 private:
  c10::DeviceIndex device_;
  cudaEvent_t event_ = nullptr;
};

struct Parked {
  Ticket ticket;
  std::vector<CUDAStream> streams;  // whose end is still to be marked, because a capture records them
  std::vector<Moment> moments;      // that must pass

  // A moment of a stream that is being recorded would be one of the graph's.
  void mark() {
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
  bool passed() const {
    return streams.empty() && std::all_of(moments.begin(), moments.end(), [](const Moment& m) { return m.passed(); });
  }
};

// What outlives the pool with its tensors: blocks that other streams use, and captures.
class State : public std::enable_shared_from_this<State> {
 public:
  explicit State(c10::DeviceIndex device) : device_(device) {}

  // Before an allocation on a lane. Returns the capture that records it, or 0.
  arena::CaptureId prepare(arena::Arena& arena, LaneId lane) {
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

  // Whether the lane may use the block now; false: it is parked, and no lane that is recorded lends any more.
  bool wait(LaneId lane, const arena::Allocation& got) {
    const CUDAStream stream = stream_of(lane, device_);
    std::vector<CUDAStream> streams;
    for (const LaneId other : got.waits) streams.push_back(stream_of(other, device_));
    const bool captured = capture_of(stream).active;
    bool waits = !captured;
    try {
      for (const LaneId other : got.waits) {
        if (captured) break;
        const CUDAStream from = stream_of(other, device_);
        if (const CaptureInfo theirs = capture_of(from); theirs.active) {
          const std::lock_guard<std::mutex> guard(mutex_);
          record(*static_cast<arena::Arena*>(got.block->owner), theirs, other);
          waits = false;
        } else {
          Moment(from).hold(stream);
        }
      }
    } catch (...) {
      park(got.block, std::move(streams));
      throw;
    }
    if (!waits) park(got.block, std::move(streams));
    TORCH_CHECK(!captured,
                "Pool: expected memory that no other stream used before, for a graph that is being captured, ",
                "got none free; make the pool larger, or synchronize() the device and try again");
    return waits;
  }

  // A block that other streams use as well comes back when they are where they are now.
  void park(Block* block, std::vector<CUDAStream> streams) {
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

  // Waits for all that is parked, at a pool's end.
  void reclaim(arena::Arena& arena) {
    bool leaves = false;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      follow_captures(arena);
      collect(arena, true);
      arena_ = &arena;
      leaves = bury(arena);
    }
    if (leaves) orphans().add(shared_from_this());
  }

  bool recording(arena::Arena& arena) {
    const std::lock_guard<std::mutex> guard(mutex_);
    follow_captures(arena);
    return !captures_.empty();
  }

  // Pools that are closed, but not all of their graphs are gone: who next needs memory looks after them.
  class Orphans {
   public:
    void add(std::shared_ptr<State> state) {
      const std::lock_guard<std::mutex> guard(mutex_);
      if (std::find(states_.begin(), states_.end(), state) == states_.end()) states_.push_back(std::move(state));
    }
    void look_after() {
      const std::lock_guard<std::mutex> guard(mutex_);
      states_.erase(
          std::remove_if(states_.begin(), states_.end(), [](const auto& state) { return !state->outlives(); }),
          states_.end());
    }

   private:
    std::mutex mutex_;
    std::vector<std::shared_ptr<State>> states_;
  };
  static Orphans& orphans() {
    static Orphans& instance = *new Orphans;
    return instance;
  }

 private:
  struct Recording {
    unsigned long long id;
    std::vector<LaneId> lanes;
  };
  // Handed to a graph, which destroys it with its last instance. CUDA must not be called there.
  struct Graph {
    std::shared_ptr<State> state;
    unsigned long long id;
  };
  static void CUDART_CB graph_died(void* data) {
    const std::unique_ptr<Graph> graph(static_cast<Graph*>(data));
    const std::lock_guard<std::mutex> guard(graph->state->dead_mutex_);
    graph->state->dead_.push_back(graph->id);
    graph->state->died_.store(true, std::memory_order_relaxed);
  }

  void record(arena::Arena& arena, const CaptureInfo& now, LaneId lane) {
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

  // A capture cannot wait for other streams: so what those are done with becomes clean before.
  void settle(arena::Arena& arena) {
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
  void follow_captures(arena::Arena& arena) {
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
  bool bury(arena::Arena& arena) {
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
  bool outlives() {
    const std::lock_guard<std::mutex> guard(mutex_);
    follow_captures(*arena_);
    collect(*arena_, false);
    return bury(*arena_);
  }

  void collect(arena::Arena& arena, bool wait) {
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

  const c10::DeviceIndex device_;
  std::atomic<bool> recording_{false}, waiting_{false}, died_{false};
  std::mutex mutex_;
  arena::Arena* arena_ = nullptr;  // of a closed pool; it stays as long as something of it is left here
  Ticket next_ticket_ = 1;
  std::deque<Parked> parked_;
  std::vector<Recording> captures_;
  std::size_t graphs_ = 0;  // that are alive, or not buried
  std::mutex dead_mutex_;
  std::vector<unsigned long long> dead_;
};

// torch asks before it asks the driver for memory.
class LookAfterOrphans final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    State::orphans().look_after();
    return false;  // nothing of torch's own
  }
};

// The context of a tensor's data pointer.
struct Held {
  Block* block;
  std::shared_ptr<State> state;
  CUDAStream stream;
  bool captured;  // made in a capture
  std::size_t nbytes;
  int generation;  // of the process, as forks count
  std::mutex mutex;
  std::vector<CUDAStream> users;  // streams other than its own that record_stream() named
};

void report(const Held& held, int64_t change) {
  if (c10::memoryProfilingEnabled())
    c10::reportMemoryUsageToProfiler(held.block->data(), change, 0, 0, held.stream.device());
}

// The stream waits for another, where both are recorded by one capture or by none.
void follow(const CUDAStream& stream, const CUDAStream& other) noexcept try {
  const CaptureInfo own = capture_of(stream), theirs = capture_of(other);
  if (own.active == theirs.active && own.id == theirs.id) Moment(other).hold(stream);
} catch (const c10::Error&) {  // the device's error: its own next call raises it
}

void release(void* context) {
  const std::unique_ptr<Held> held(static_cast<Held*>(context));
  if (held->generation != arena::fork_generation.load(std::memory_order_relaxed)) return;  // the parent's
  report(*held, -static_cast<int64_t>(held->nbytes));
  Block* block = held->block;
  // A graph's result belongs to the stream that recorded it, and is used on others, after a replay.
  if (held->captured) {
    const CUDAStream now = c10::cuda::getCurrentCUDAStream(held->stream.device_index());
    if (now != held->stream && !capture_of(now).active) held->users.push_back(now);
  }
  if (held->users.empty()) {
    arena::free(block);
  } else if (block->chunk) {
    held->state->park(block, std::move(held->users));
  } else {  // in a scope: its stream waits, and what comes after on it may have the memory
    for (const CUDAStream& user : held->users) follow(held->stream, user);
    arena::free(block);
  }
}

// torch's allocator says nothing of memory that is not its own, and does nothing: so the operator asks us first.
void record_stream(at::Tensor& self, c10::Stream stream) {
  const c10::DataPtr& data = self.storage().data_ptr();
  if (!is_cuda_pool_memory(data)) {
    c10::cuda::CUDACachingAllocator::recordStream(data, CUDAStream(stream));
    return;
  }
  auto* held = static_cast<Held*>(data.get_context());
  const CUDAStream user(stream);
  if (held->stream == user) return;
  const std::lock_guard<std::mutex> guard(held->mutex);
  if (std::find(held->users.begin(), held->users.end(), user) == held->users.end()) held->users.push_back(user);
}

// With the first CUDA pool, for good. The dispatcher warns of replaced kernels; this one passes on what is not ours.
void join_torch() {
  static const bool once = [] {
    c10::FreeCudaMemoryCallbacksRegistry()->Register("memkit", [] { return std::make_unique<LookAfterOrphans>(); });
    struct Quiet final : c10::WarningHandler {
      void process(const c10::Warning&) override {}
    } quiet;
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    static torch::Library& library =
        *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    library.impl("record_stream", &record_stream);
    return true;
  }();
  (void)once;
}

// Canaries and poison, in the order of the lane.
class DebugMemory final : public arena::Memory {
 public:
  explicit DebugMemory(c10::DeviceIndex device) : device_(device) {}
  // A capture would do both later, again and again.
  void fill(LaneId lane, void* at, std::uint8_t byte, std::size_t bytes) override {
    const CUDAStream stream = stream_of(lane, device_);
    if (capture_of(stream).active) return;
    const c10::cuda::CUDAGuard guard(device_);
    (void)cudaMemsetAsync(at, byte, bytes, stream);
  }
  bool holds(LaneId lane, const void* at, std::uint8_t byte, std::size_t bytes) override {
    const CUDAStream stream = stream_of(lane, device_);
    if (!bytes || capture_of(stream).active) return true;
    const c10::cuda::CUDAGuard guard(device_);
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);  // another's may go on
    std::vector<std::uint8_t> copy(bytes);
    if (cudaMemcpyAsync(copy.data(), at, bytes, cudaMemcpyDeviceToHost, stream) != cudaSuccess ||
        cudaStreamSynchronize(stream) != cudaSuccess)
      return true;  // the error is the kernel's that caused it, and stays for the next call to find
    return std::all_of(copy.begin(), copy.end(), [&](std::uint8_t each) { return each == byte; });
  }

 private:
  const c10::DeviceIndex device_;
};

class CudaDevice final : public PoolDevice {
 public:
  explicit CudaDevice(c10::DeviceIndex index)
      : index_(index), memory_(make_cuda_memory(index)), state_(std::make_shared<State>(index)) {}

  c10::Device device() const override { return {c10::DeviceType::CUDA, index_}; }
  c10::DispatchKeySet keys() const override { return c10::DispatchKeySet(c10::DispatchKey::CUDA); }
  std::size_t alignment() const override { return 512; }
  std::shared_ptr<arena::Upstream> upstream() override { return memory_; }
  std::shared_ptr<arena::Memory> memory() override { return std::make_shared<DebugMemory>(index_); }
  c10::Allocator* stock() const override { return c10::cuda::CUDACachingAllocator::get(); }

  LaneId lane() const override { return lane_of(c10::cuda::getCurrentCUDAStream(index_)); }

  bool wait(LaneId lane, const arena::Allocation& got) override { return state_->wait(lane, got); }

  arena::CaptureId make_room(arena::Arena& arena, std::size_t) override { return state_->prepare(arena, lane()); }
  void reclaim(arena::Arena& arena) override {
    state_->reclaim(arena);
    State::orphans().look_after();
  }

  c10::DataPtr wrap(Block* block, std::size_t nbytes) override {
    const CUDAStream stream = c10::cuda::getCurrentCUDAStream(index_);
    auto* held = new Held{block,  state_,
                          stream, capture_of(stream).active,
                          nbytes, arena::fork_generation.load(std::memory_order_relaxed),
                          {},     {}};
    report(*held, static_cast<int64_t>(nbytes));
    return {block->data(), held, &release, device()};
  }

  const char* sleep_blocker(arena::Arena& arena) const override {
    if (capture_of(c10::cuda::getCurrentCUDAStream(index_)).active || state_->recording(arena))
      return "a graph is being captured";
    return memory_->sleep_blocker();
  }
  void save(int file, const void* memory, std::size_t bytes) override {
    transfer(file, const_cast<void*>(memory), bytes, true);
  }
  void load(int file, void* memory, std::size_t bytes) override { transfer(file, memory, bytes, false); }
  std::size_t discard(void* memory, std::size_t bytes) override { return memory_->discard(memory, bytes); }
  void restore(void* memory, std::size_t bytes) override { memory_->restore(memory, bytes); }

 private:
  // Through a piece of host memory, after all work of the device.
  void transfer(int file, void* memory, std::size_t bytes, bool out) {
    const c10::cuda::CUDAGuard guard(index_);
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<char> piece(std::min<std::size_t>(bytes, std::size_t(16) << 20));
    for (std::size_t at = 0; at < bytes;) {
      const std::size_t size = std::min(piece.size(), bytes - at);
      char* place = static_cast<char*>(memory) + at;
      if (out) C10_CUDA_CHECK(cudaMemcpy(piece.data(), place, size, cudaMemcpyDeviceToHost));
      out ? save_bytes(file, piece.data(), size) : load_bytes(file, piece.data(), size);
      if (!out) C10_CUDA_CHECK(cudaMemcpy(place, piece.data(), size, cudaMemcpyHostToDevice));
      at += size;
    }
  }

  const c10::DeviceIndex index_;
  const std::shared_ptr<CudaMemory> memory_;
  const std::shared_ptr<State> state_;
};

}  // namespace

bool is_cuda_pool_memory(const c10::DataPtr& data) { return data.get_deleter() == &release; }

std::unique_ptr<PoolDevice> make_cuda_device(int index) {
  join_torch();
  State::orphans().look_after();
  return std::make_unique<CudaDevice>(static_cast<c10::DeviceIndex>(index));
}

}  // namespace memkit

#endif
