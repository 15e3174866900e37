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

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "cuda_front.h"
#include "cuda_lent.h"
#include "cuda_memory.h"
#include "pool_streams.h"

namespace memkit {
namespace {

using arena::Block;
using arena::LaneId;
using c10::cuda::CUDAStream;

// torch asks before it asks the driver for memory.
class LookAfterClosed final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    PoolStreams::look_after_closed();
    return false;  // nothing of torch's own
  }
};

// The context of a tensor's data pointer.
struct Held {
  Block* block;
  std::shared_ptr<PoolStreams> streams;
  CUDAStream stream;
  bool captured;  // made in a capture
  bool lent;      // to torch, by pool.use()
  std::size_t nbytes;
  int generation;  // of the process, as forks count
  std::mutex mutex;
  std::vector<CUDAStream> users;  // streams other than its own that record_stream() named
};

void report(const Held& held, int64_t change) try {
  if (!c10::memoryProfilingEnabled()) return;
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(held.stream.device_index());
  c10::reportMemoryUsageToProfiler(held.block->data(), change,
                                   static_cast<std::size_t>(stats.allocated_bytes[0].current),
                                   static_cast<std::size_t>(stats.reserved_bytes[0].current), held.stream.device());
} catch (const std::exception&) {  // of an allocator that does not count
}

Lent lent_from(const Held& held) {
  return {held.stream.device_index(), held.stream.stream(), held.block->data(), held.nbytes, held.block->size};
}

// The stream waits for another, where both are recorded by one capture or by none.
void follow(const CUDAStream& stream, const CUDAStream& other) noexcept try {
  const CaptureInfo own = capture_of(stream), theirs = capture_of(other);
  if (own.active == theirs.active && own.id == theirs.id) Moment(other).hold(stream);
} catch (const c10::Error&) {  // the device's error: its own next call raises it
}

void release_block(void* context) {
  const std::unique_ptr<Held> held(static_cast<Held*>(context));
  if (held->generation != arena::fork_generation.load(std::memory_order_relaxed)) return;  // the parent's
  if (held->lent) count_returned(lent_from(*held));
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
    held->streams->park(block, std::move(held->users));
  } else {  // in a scope: its stream waits, and what comes after on it may have the memory
    for (const CUDAStream& user : held->users) follow(held->stream, user);
    arena::free(block);
  }
}

// With the first CUDA pool, for good.
void join_torch() {
  stand_before_torch();
  static const bool once = [] {
    c10::FreeCudaMemoryCallbacksRegistry()->Register("memkit", [] { return std::make_unique<LookAfterClosed>(); });
    return true;
  }();
  (void)once;
}

// Canaries and poison, in the order of the lane.
class DebugMemory final : public arena::Memory {
 public:
  DebugMemory(c10::DeviceIndex device, std::shared_ptr<CudaMemory> memory)
      : device_(device), memory_(std::move(memory)) {}
  // A capture would do both later, again and again. What sleeps cannot be touched.
  void fill(LaneId lane, void* at, std::uint8_t byte, std::size_t bytes) override {
    const CUDAStream stream = stream_of(lane, device_);
    if (capture_of(stream).active || !memory_->present(at, bytes)) return;
    const c10::cuda::CUDAGuard guard(device_);
    (void)cudaMemsetAsync(at, byte, bytes, stream);
  }
  bool holds(LaneId lane, const void* at, std::uint8_t byte, std::size_t bytes) override {
    const CUDAStream stream = stream_of(lane, device_);
    if (!bytes || capture_of(stream).active || !memory_->present(at, bytes)) return true;
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
  const std::shared_ptr<CudaMemory> memory_;
};

class CudaDevice final : public PoolDevice {
 public:
  explicit CudaDevice(c10::DeviceIndex index)
      : index_(index), memory_(make_cuda_memory(index)), streams_(std::make_shared<PoolStreams>(index)) {}

  c10::Device device() const override { return {c10::DeviceType::CUDA, index_}; }
  c10::DispatchKeySet keys() const override { return c10::DispatchKeySet(c10::DispatchKey::CUDA); }
  std::size_t alignment() const override { return 512; }
  std::shared_ptr<arena::Upstream> upstream() override { return memory_; }
  std::shared_ptr<arena::Memory> memory() override { return std::make_shared<DebugMemory>(index_, memory_); }
  c10::Allocator* stock() const override { return c10::cuda::CUDACachingAllocator::get(); }

  LaneId lane() const override { return lane_of(c10::cuda::getCurrentCUDAStream(index_)); }

  bool wait(LaneId lane, const arena::Allocation& got) override {
    if (!streams_->wait(lane, got)) return false;
    if (!got.waits.empty()) static_cast<arena::Arena*>(got.block->owner)->mark_again(got.block);
    return true;
  }

  arena::CaptureId make_room(arena::Arena& arena, std::size_t) override { return streams_->prepare(arena, lane()); }
  void reclaim(arena::Arena& arena) override {
    streams_->reclaim(arena);
    PoolStreams::look_after_closed();
  }

  c10::DataPtr wrap(Block* block, std::size_t nbytes) override { return wrap(block, nbytes, false); }
  c10::DataPtr lend(Block* block, std::size_t nbytes) override { return wrap(block, nbytes, true); }

  const char* sleep_blocker(arena::Arena& arena) const override {
    if (capture_of(c10::cuda::getCurrentCUDAStream(index_)).active || streams_->recording(arena))
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
  c10::DataPtr wrap(Block* block, std::size_t nbytes, bool lent) {
    const CUDAStream stream = c10::cuda::getCurrentCUDAStream(index_);
    const int generation = arena::fork_generation.load(std::memory_order_relaxed);
    auto* held = new Held{block, streams_, stream, capture_of(stream).active, lent, nbytes, generation, {}, {}};
    if (lent) count_lent(lent_from(*held));
    report(*held, static_cast<int64_t>(nbytes));
    return {block->data(), held, &release_block, device()};
  }

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
  const std::shared_ptr<PoolStreams> streams_;
};

}  // namespace

bool is_cuda_pool_memory(const c10::DataPtr& data) { return data.get_deleter() == &release_block; }

void record_cuda_stream(const c10::DataPtr& data, CUDAStream user) {
  auto* held = static_cast<Held*>(data.get_context());
  if (held->stream == user) return;
  const std::lock_guard<std::mutex> guard(held->mutex);
  if (std::find(held->users.begin(), held->users.end(), user) == held->users.end()) held->users.push_back(user);
}

std::unique_ptr<PoolDevice> make_cuda_device(int index) {
  join_torch();
  PoolStreams::look_after_closed();
  return std::make_unique<CudaDevice>(static_cast<c10::DeviceIndex>(index));
}

}  // namespace memkit

#endif
