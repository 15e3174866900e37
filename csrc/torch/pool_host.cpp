// Pools in host memory: ordinary pages, touched in advance, and page-locked ones for transfers to a GPU.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "arena/available.h"
#include "arena/ranges.h"
#include "no_gil.h"
#include "pool_device.h"

namespace memkit {
namespace {

constexpr std::size_t kHugePage = std::size_t(2) << 20;

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

// Has every page backed now, contents kept: a first touch later costs some 0.25 ms a MiB.
bool populate_pages(void* memory, std::size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  static const bool known = [] {  // since Linux 5.14
    alignas(64) static char own[1];
    const auto page = reinterpret_cast<std::uintptr_t>(own) & ~(page_size() - 1);
    return madvise(reinterpret_cast<void*>(page), 1, MADV_POPULATE_WRITE) == 0;
  }();
  if (known) return madvise(memory, bytes, MADV_POPULATE_WRITE) == 0;
#endif
  for (std::size_t at = 0; at < bytes; at += page_size()) {
    __atomic_fetch_or(static_cast<char*>(memory) + at, 0, __ATOMIC_RELAXED);  // others may write there now
  }
  return true;
}

// Anonymous pages, whole huge ones where there are enough. In a range of addresses with `room` for all of the machine's
// memory behind each first chunk, unless addresses are limited: so that more may come behind the last, and any may go.
class HostUpstream final : public arena::Upstream {
 public:
  explicit HostUpstream(bool room = true) : room_(room && !limited()) {}

  void* allocate(std::size_t bytes) override {
    const WithoutGil no_gil;
    const std::size_t size = arena::round_up(bytes, page_size()), all = room_ ? machine_bytes() : 0;
    if (size < bytes || size + kHugePage + all < size) return nullptr;
    for (const std::size_t more : {all, std::size_t(0)}) {
      const std::size_t room = size + kHugePage + more;
      void* const mapped = mmap(nullptr, room, PROT_NONE, kReserved, -1, 0);
      if (mapped == MAP_FAILED) continue;
      const auto start = reinterpret_cast<std::uintptr_t>(mapped), aligned = arena::round_up(start, kHugePage);
      if (make(aligned, size)) {
        ranges_.add({start, room}, bytes);
        return reinterpret_cast<void*>(aligned);
      }
      munmap(mapped, room);
      break;
    }
    return nullptr;
  }
  std::size_t page() const override { return kHugePage; }
  bool extend(void* end, std::size_t bytes) override {
    const WithoutGil no_gil;
    const auto first = reinterpret_cast<std::uintptr_t>(end), from = arena::round_up(first, page_size());
    const std::uintptr_t to = arena::round_up(first + bytes, page_size());
    if (!ranges_.lengthen(first, bytes)) return false;
    if (make(from, to - from)) return true;
    unmake(from, to - from);
    ranges_.take_back(first - 1, bytes);
    return false;
  }
  void release(void* memory, std::size_t bytes) override {
    const auto start = reinterpret_cast<std::uintptr_t>(memory);
    const std::uintptr_t first = arena::round_up(start, page_size());
    unmake(first, arena::round_up(start + bytes, page_size()) - first);
    const arena::Ranges::Range whole = ranges_.take_back(start, bytes);
    if (whole.room) munmap(reinterpret_cast<void*>(whole.start), whole.room);
  }
  std::size_t available() override { return arena::available_memory(); }
  void wait(const std::function<void()>& until) override {
    const WithoutGil no_gil;
    until();
  }

 private:
  static constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

  static bool limited() {
    rlimit limit{};
    return getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY;
  }
  static std::size_t machine_bytes() {
    const long pages = sysconf(_SC_PHYS_PAGES);
    return pages > 0 ? static_cast<std::size_t>(pages) * page_size() : 0;
  }
  static bool make(std::uintptr_t start, std::size_t bytes) {
    void* const memory = reinterpret_cast<void*>(start);
    if (!bytes) return true;
    if (mprotect(memory, bytes, PROT_READ | PROT_WRITE) != 0) return false;
    madvise(memory, bytes, MADV_HUGEPAGE);
    return populate_pages(memory, bytes);
  }
  // The pages, and not the addresses: each piece that may not be touched would be one more of the kernel's few.
  static void unmake(std::uintptr_t start, std::size_t bytes) {
    void* const memory = reinterpret_cast<void*>(start);
    if (!bytes || madvise(memory, bytes, MADV_DONTNEED) == 0) return;
    mmap(memory, bytes, PROT_NONE, kReserved | MAP_FIXED, -1, 0);  // pages that were locked
  }

  const bool room_;
  arena::Ranges ranges_;
};

// The CUDA runtime that torch loaded, found by name: a build without memkit's CUDA half can lock pages, too.
struct Runtime {
  int (*lock)(void*, std::size_t, unsigned) = nullptr;
  int (*unlock)(void*) = nullptr;

  Runtime() {
    lock = reinterpret_cast<decltype(lock)>(dlsym(RTLD_DEFAULT, "cudaHostRegister"));
    unlock = reinterpret_cast<decltype(unlock)>(dlsym(RTLD_DEFAULT, "cudaHostUnregister"));
  }
};

const Runtime& runtime() {
  static const Runtime found;
  return found;
}

// A chunk is locked as a whole, and goes as one.
class PinnedUpstream final : public arena::Upstream {
 public:
  void* allocate(std::size_t bytes) override {
    const WithoutGil no_gil;
    void* memory = pages_.allocate(bytes);
    constexpr unsigned kPortable = 1;  // for every context
    if (memory && runtime().lock(memory, bytes, kPortable) != 0) {
      pages_.release(memory, bytes);
      return nullptr;
    }
    return memory;
  }
  void release(void* memory, std::size_t bytes) override {
    runtime().unlock(memory);
    pages_.release(memory, bytes);
  }
  std::size_t available() override { return pages_.available(); }
  void wait(const std::function<void()>& until) override { pages_.wait(until); }

 private:
  HostUpstream pages_{/*room=*/false};
};

void free_block(void* context) { arena::free(static_cast<arena::Block*>(context)); }

// Of what torch.profiler saw born.
void free_reported(void* context) {
  c10::profiledCPUMemoryReporter().Delete(static_cast<arena::Block*>(context)->data());
  free_block(context);
}

class CpuDevice : public PoolDevice {
 public:
  c10::Device device() const override { return c10::Device(c10::DeviceType::CPU); }
  c10::DispatchKeySet keys() const override { return c10::DispatchKeySet(c10::DispatchKey::CPU); }
  std::size_t alignment() const override { return 64; }
  std::shared_ptr<arena::Upstream> upstream() override { return std::make_shared<HostUpstream>(); }
  std::shared_ptr<arena::Memory> memory() override { return std::make_shared<arena::HostMemory>(); }
  c10::Allocator* stock() const override { return c10::GetCPUAllocator(); }

  c10::DataPtr wrap(arena::Block* block, std::size_t nbytes) override {
    if (!c10::memoryProfilingEnabled()) return {block->data(), block, &free_block, device()};
    c10::profiledCPUMemoryReporter().New(block->data(), nbytes);
    return {block->data(), block, &free_reported, device()};
  }

  void save(int file, const void* memory, std::size_t bytes) override { save_bytes(file, memory, bytes); }
  void load(int file, void* memory, std::size_t bytes) override { load_bytes(file, memory, bytes); }
  std::size_t discard(void* memory, std::size_t bytes) override {
    const auto start = reinterpret_cast<std::uintptr_t>(memory), first = arena::round_up(start, page_size());
    const std::uintptr_t last = (start + bytes) & ~(page_size() - 1);
    if (first >= last || madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED) != 0) return 0;
    return last - first;
  }
  void restore(void* memory, std::size_t bytes) override {
    const auto start = reinterpret_cast<std::uintptr_t>(memory), first = start & ~(page_size() - 1);
    TORCH_CHECK(populate_pages(reinterpret_cast<void*>(first), arena::round_up(start + bytes, page_size()) - first),
                "Pool: expected ", bytes, " bytes of memory for what slept, got none from the system");
  }
};

// A copy to a GPU may read a block after its tensor has died, on a stream nobody told us of. So blocks are parked, and
// come back when memory is needed: after one wait for all devices.
class PinnedDevice final : public CpuDevice {
 public:
  std::shared_ptr<arena::Upstream> upstream() override { return std::make_shared<PinnedUpstream>(); }
  c10::Allocator* stock() const override { return at::globalContext().getPinnedMemoryAllocator(c10::DeviceType::CUDA); }

  arena::CaptureId make_room(arena::Arena& arena, std::size_t bytes) override {
    if (parked_->any.load(std::memory_order_relaxed) && arena.stats().largest_free < bytes) reclaim(arena);
    return 0;
  }

  void reclaim(arena::Arena& arena) override {
    parked_->any.store(false, std::memory_order_relaxed);
    const arena::Ticket ticket = parked_->ticket.fetch_add(1);
    finish();
    // The ticket before this one, too: somebody may have parked a block on it while its wait was over already.
    arena.release_deferred(ticket - 1);
    arena.release_deferred(ticket);
  }

  void finish() override {
    const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
    const int count = hooks.getNumGPUs();
    for (int i = 0; i < count; ++i)
      if (hooks.hasPrimaryContext(static_cast<c10::DeviceIndex>(i)))
        hooks.deviceSynchronize(static_cast<c10::DeviceIndex>(i));
  }

  c10::DataPtr wrap(arena::Block* block, std::size_t nbytes) override {
    if (c10::memoryProfilingEnabled()) c10::profiledCPUMemoryReporter().New(block->data(), nbytes);
    return {block->data(), new Held{block, parked_}, &park, device()};
  }

  const char* sleep_blocker(arena::Arena&) const override { return "its pages are locked for transfers"; }

  static void park(void* context) {
    const std::unique_ptr<Held> held(static_cast<Held*>(context));
    if (c10::memoryProfilingEnabled()) c10::profiledCPUMemoryReporter().Delete(held->block->data());
    // A scope waits for the devices itself, and its blocks have no chunk.
    auto* arena = held->block->chunk ? static_cast<arena::Arena*>(held->block->owner) : nullptr;
    if (!arena || arena->closed()) {
      arena::free(held->block);
      return;
    }
    arena->defer(held->block, held->parked->ticket.load());
    held->parked->any.store(true, std::memory_order_relaxed);
  }

 private:
  struct Parked {
    std::atomic<bool> any{false};
    std::atomic<arena::Ticket> ticket{1};
  };
  struct Held {
    arena::Block* block;
    std::shared_ptr<Parked> parked;
  };

  std::shared_ptr<Parked> parked_ = std::make_shared<Parked>();
};

template <class Step>
void transfer(std::size_t bytes, Step step) {
  for (std::size_t at = 0; at < bytes;) {
    const ssize_t moved = step(at);
    if (moved < 0 && errno == EINTR) continue;
    TORCH_CHECK(moved > 0, "pool: expected a file that holds what sleeps, got ",
                moved ? std::strerror(errno) : "its end");
    at += static_cast<std::size_t>(moved);
  }
}

}  // namespace

void save_bytes(int file, const void* memory, std::size_t bytes) {
  transfer(bytes, [&](std::size_t at) { return write(file, static_cast<const char*>(memory) + at, bytes - at); });
}
void load_bytes(int file, void* memory, std::size_t bytes) {
  transfer(bytes, [&](std::size_t at) { return read(file, static_cast<char*>(memory) + at, bytes - at); });
}

bool is_pool_memory(const c10::DataPtr& data) {
  const c10::DeleterFnPtr deleter = data.get_deleter();
  return deleter == &free_block || deleter == &free_reported || deleter == &PinnedDevice::park ||
         is_cuda_pool_memory(data);
}

std::unique_ptr<PoolDevice> make_cpu_device() { return std::make_unique<CpuDevice>(); }

std::unique_ptr<PoolDevice> make_pinned_device() {
  TORCH_CHECK(runtime().lock && runtime().unlock && at::detail::getCUDAHooks().hasCUDA(),
              "Pool: expected a CUDA device and driver for pin_memory=True, got a machine or a torch without");
  return std::make_unique<PinnedDevice>();
}

}  // namespace memkit
