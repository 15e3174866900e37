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
  return info;
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
  void wait() const { (void)cudaEventSynchronize(event_); }
  void hold(const CUDAStream& stream) const { C10_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0)); }

 private:
  c10::DeviceIndex device_;
  cudaEvent_t event_ = nullptr;
};

struct Parked {
  Ticket ticket;
  std::vector<LaneId> lanes;    // whose end is still to be marked, because a capture was on
  std::vector<Moment> moments;  // that must pass
};

// What outlives the pool with its tensors: blocks that other streams use, and captures.
class State : public std::enable_shared_from_this<State> {
 public:
  explicit State(c10::DeviceIndex device) : device_(device) {}

  // Before an allocation on a lane.
  void prepare(arena::Arena& arena, LaneId lane) {
    const CUDAStream stream = stream_of(lane, device_);
    const CaptureInfo now = capture_of(stream);
    if (!now.active && !recording_.load(std::memory_order_relaxed) && !waiting_.load(std::memory_order_relaxed) &&
        !died_.load(std::memory_order_relaxed))
      return;
    const std::lock_guard<std::mutex> guard(mutex_);
    follow_captures(arena);
    if (now.active) {
      record(arena, now, lane);
    } else if (captures_.empty()) {
      collect(arena, false);
    }
  }

  bool capturing(LaneId lane) const { return capture_of(stream_of(lane, device_)).active; }

  // A block that other streams use as well comes back when they are where they are now.
  void park(Block* block, const std::vector<LaneId>& lanes) {
    auto& arena = *static_cast<arena::Arena*>(block->owner);
    if (arena.closed()) {  // serves no more: the memory goes upstream, which waits for the device
      arena::free(block);
      return;
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    const Ticket ticket = next_ticket_++;
    if (arena.defer(block, ticket) != arena::Freed::ok) return;
    waiting_.store(true, std::memory_order_relaxed);
    parked_.push_back({ticket, lanes, {}});
    if (captures_.empty()) mark(parked_.back());
  }

  // Waits for all that is parked.
  void reclaim(arena::Arena& arena) {
    const std::lock_guard<std::mutex> guard(mutex_);
    follow_captures(arena);
    collect(arena, true);
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
      auto graph = std::make_unique<Graph>(Graph{shared_from_this(), now.id});
      cudaUserObject_t object = nullptr;
      C10_CUDA_CHECK(cudaUserObjectCreate(&object, graph.get(), &graph_died, 1, cudaUserObjectNoDestructorSync));
      graph.release();
      C10_CUDA_CHECK(cudaGraphRetainUserObject(now.graph, object, 1, cudaGraphUserObjectMove));
      captures_.push_back({now.id, {}});
      recording_.store(true, std::memory_order_relaxed);
      at = captures_.end() - 1;
    }
    if (std::find(at->lanes.begin(), at->lanes.end(), lane) != at->lanes.end()) return;
    TORCH_CHECK(arena.pin(now.id, lane), "Pool: expected a stream that one graph records, got one that two do");
    at->lanes.push_back(lane);
  }

  // Ends recordings whose capture is over, and gives back what dead graphs used.
  void follow_captures(arena::Arena& arena) {
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
    const std::lock_guard<std::mutex> guard(dead_mutex_);
    for (const unsigned long long id : dead_) arena.unpin(id);
    dead_.clear();
    died_.store(false, std::memory_order_relaxed);
  }

  void mark(Parked& parked) {
    for (const LaneId lane : parked.lanes) parked.moments.emplace_back(stream_of(lane, device_));
    parked.lanes.clear();
  }

  void collect(arena::Arena& arena, bool wait) {
    std::deque<Parked> left;
    for (Parked& parked : parked_) {
      mark(parked);
      if (wait)
        for (const Moment& moment : parked.moments) moment.wait();
      const bool passed =
          std::all_of(parked.moments.begin(), parked.moments.end(), [](const Moment& m) { return m.passed(); });
      if (passed) {
        arena.release_deferred(parked.ticket);
      } else {
        left.push_back(std::move(parked));
      }
    }
    parked_ = std::move(left);
    waiting_.store(!parked_.empty(), std::memory_order_relaxed);
  }

  const c10::DeviceIndex device_;
  std::atomic<bool> recording_{false}, waiting_{false}, died_{false};
  std::mutex mutex_;
  Ticket next_ticket_ = 1;
  std::deque<Parked> parked_;
  std::vector<Recording> captures_;
  std::mutex dead_mutex_;
  std::vector<unsigned long long> dead_;
};

// The context of a tensor's data pointer.
struct Held {
  Block* block;
  std::shared_ptr<State> state;
  c10::DeviceIndex device;
  LaneId lane;
  std::size_t nbytes;
  std::mutex mutex;
  std::vector<LaneId> users;  // streams other than its own that record_stream() named
};

void report(const Held& held, int64_t change) {
  if (c10::memoryProfilingEnabled())
    c10::reportMemoryUsageToProfiler(held.block->data(), change, 0, 0, c10::Device(c10::DeviceType::CUDA, held.device));
}

void release(void* context) {
  const std::unique_ptr<Held> held(static_cast<Held*>(context));
  report(*held, -static_cast<int64_t>(held->nbytes));
  Block* block = held->block;
  if (held->users.empty()) {
    arena::free(block);
  } else if (block->chunk) {
    held->state->park(block, held->users);
  } else {  // in a scope: its stream waits, and what comes after on it may have the memory
    for (const LaneId user : held->users)
      Moment(stream_of(user, held->device)).hold(stream_of(held->lane, held->device));
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
  const LaneId user = lane_of(CUDAStream(stream));
  if (held->lane == user) return;
  const std::lock_guard<std::mutex> guard(held->mutex);
  if (std::find(held->users.begin(), held->users.end(), user) == held->users.end()) held->users.push_back(user);
}

// With the first CUDA pool, for good. The dispatcher warns of replaced kernels; this one passes on what is not ours.
void take_over_record_stream() {
  static const bool once = [] {
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
  void fill(LaneId lane, void* at, std::uint8_t byte, std::size_t bytes) override {
    const c10::cuda::CUDAGuard guard(device_);
    (void)cudaMemsetAsync(at, byte, bytes, stream_of(lane, device_));
  }
  bool holds(LaneId lane, const void* at, std::uint8_t byte, std::size_t bytes) override {
    const CUDAStream stream = stream_of(lane, device_);
    if (!bytes || capture_of(stream).active) return true;  // a capture runs later
    const c10::cuda::CUDAGuard guard(device_);
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

  void wait(LaneId lane, const arena::Allocation& got) override {
    if (state_->capturing(lane)) {
      state_->park(got.block, got.waits);
      TORCH_CHECK(false, "Pool: expected memory that no other stream used before, for a graph that is being captured, ",
                  "got none free; make the pool larger, or synchronize() the device and try again");
    }
    const CUDAStream stream = stream_of(lane, index_);
    for (const LaneId other : got.waits) Moment(stream_of(other, index_)).hold(stream);
  }

  void make_room(arena::Arena& arena, std::size_t) override { state_->prepare(arena, lane()); }
  void reclaim(arena::Arena& arena) override { state_->reclaim(arena); }

  c10::DataPtr wrap(Block* block, std::size_t nbytes) override {
    auto* held = new Held{block, state_, index_, lane(), nbytes, {}, {}};
    report(*held, static_cast<int64_t>(nbytes));
    return {block->data(), held, &release, device()};
  }

  const char* sleep_blocker() const override { return memory_->sleep_blocker(); }
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
  take_over_record_stream();
  return std::make_unique<CudaDevice>(static_cast<c10::DeviceIndex>(index));
}

}  // namespace memkit

#endif
