#include "cuda_memory.h"

#ifdef MEMKIT_WITH_CUDA

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "arena/ranges.h"

namespace memkit {
namespace {

// A failure here is an answer, not an error for the next call to find.
bool good(cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaSuccess;
}

class PlainMemory final : public CudaMemory {
 public:
  explicit PlainMemory(int device) : CudaMemory(device) {}

  void* take(std::size_t bytes) override {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);  // a capture may go on
    void* memory = nullptr;
    return good(cudaMalloc(&memory, bytes)) ? memory : nullptr;
  }
  void give(void* memory, std::size_t) override {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    good(cudaFree(memory));
  }
  const char* sleep_blocker() const override { return "its driver maps no virtual memory"; }
  std::size_t discard(void*, std::size_t) override { return 0; }
  void restore(void*, std::size_t) override {}
};

// The driver's entry points, from the library that the runtime has loaded: memkit links the runtime alone.
struct Driver {
  decltype(&cuDeviceGetAttribute) attribute = find<decltype(&cuDeviceGetAttribute)>("cuDeviceGetAttribute");
  decltype(&cuMemGetAllocationGranularity) granularity =
      find<decltype(&cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity");
  decltype(&cuMemAddressReserve) reserve = find<decltype(&cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) unreserve = find<decltype(&cuMemAddressFree)>("cuMemAddressFree");
  decltype(&cuMemCreate) create = find<decltype(&cuMemCreate)>("cuMemCreate");
  decltype(&cuMemRelease) destroy = find<decltype(&cuMemRelease)>("cuMemRelease");
  decltype(&cuMemMap) map = find<decltype(&cuMemMap)>("cuMemMap");
  decltype(&cuMemUnmap) unmap = find<decltype(&cuMemUnmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) access = find<decltype(&cuMemSetAccess)>("cuMemSetAccess");
  decltype(&cuDevicePrimaryCtxGetState) context_state =
      find<decltype(&cuDevicePrimaryCtxGetState)>("cuDevicePrimaryCtxGetState");

  bool complete() const {
    return attribute && granularity && reserve && unreserve && create && destroy && map && unmap && access;
  }
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

 private:
  template <class F>
  static F find(const char* name) {
    static void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<F>(dlsym(library, name)) : nullptr;
  }
};

class MappedMemory;

// Who reads and writes a device's mapped memory beside it, and what there is of that.
struct Peers {
  std::mutex mutex;
  std::map<int, std::vector<int>> of;
  std::vector<MappedMemory*> memories;

  static Peers& get() {
    static Peers& instance = *new Peers;
    return instance;
  }
};

// Pages mapped in a range of addresses that has room for all of the device's memory behind each first chunk, so that any
// page may go and more may come behind the last.
class MappedMemory final : public CudaMemory {
 public:
  explicit MappedMemory(int device) : CudaMemory(device) {
    const std::lock_guard<std::mutex> lock(Peers::get().mutex);
    Peers::get().memories.push_back(this);
    peers_ = Peers::get().of[device];
    // Those that torch may have introduced to each other before the first pool: a device that nobody uses has no context.
    int count = 0;
    good(cudaGetDeviceCount(&count));
    for (int peer = 0; peer < count; ++peer) {
      int can = 0, active = 0;
      unsigned flags = 0;
      const auto state = Driver::get().context_state;
      if (peer == device || !state || state(peer, &flags, &active) != CUDA_SUCCESS || !active) continue;
      if (good(cudaDeviceCanAccessPeer(&can, peer, device)) && can &&
          std::find(peers_.begin(), peers_.end(), peer) == peers_.end())
        peers_.push_back(peer);
    }
  }
  ~MappedMemory() override {
    const std::lock_guard<std::mutex> lock(Peers::get().mutex);
    auto& all = Peers::get().memories;
    all.erase(std::find(all.begin(), all.end(), this));
  }
  int device() const { return device_; }
  void add_peer(int peer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(peers_.begin(), peers_.end(), peer) != peers_.end()) return;
    peers_.push_back(peer);
    for (const auto& [at, handle] : handles_) let_access(at);
  }
  static std::shared_ptr<MappedMemory> make(int device) {
    const Driver& driver = Driver::get();
    int supported = 0;
    if (!driver.complete() ||
        driver.attribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) != CUDA_SUCCESS ||
        !supported)
      return nullptr;
    auto memory = std::make_shared<MappedMemory>(device);
    memory->driver_ = &driver;
    memory->kind_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    memory->kind_.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    const auto best = CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    if (driver.granularity(&memory->page_, &memory->kind_, best) != CUDA_SUCCESS || !memory->page_) return nullptr;
    return memory;
  }

  std::size_t page() const override { return page_; }
  bool present(const void* memory, std::size_t bytes) override {
    const auto start = reinterpret_cast<CUdeviceptr>(memory);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (CUdeviceptr at = start / page_ * page_; at < start + bytes; at += page_)
      if (!handles_.count(at)) return false;
    return true;
  }

  void* take(std::size_t bytes) override {
    const std::size_t size = whole_pages(bytes);
    if (size < bytes) return nullptr;
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);  // a capture may go on
    std::size_t free = 0, total = 0, room = size;
    if (good(cudaMemGetInfo(&free, &total))) room += whole_pages(total);
    CUdeviceptr start = 0;
    if (driver_->reserve(&start, room, 0, 0, 0) != CUDA_SUCCESS) {
      room = size;
      if (driver_->reserve(&start, room, 0, 0, 0) != CUDA_SUCCESS) return nullptr;
    }
    if (!map_pages(start, start + size)) {
      driver_->unreserve(start, room);
      return nullptr;
    }
    ranges_.add({start, room}, bytes);
    return reinterpret_cast<void*>(start);
  }

  bool has_room(const void* end, std::size_t bytes) override {
    return ranges_.has_room(reinterpret_cast<std::uintptr_t>(end), bytes);
  }
  bool take_more(void* end, std::size_t bytes) override {
    const auto first = reinterpret_cast<CUdeviceptr>(end);
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    if (!ranges_.lengthen(first, bytes)) return false;
    if (map_pages(first / page_ * page_, whole_pages(first + bytes))) return true;
    ranges_.take_back(first - 1, bytes);
    return false;
  }

  void give(void* memory, std::size_t bytes) override {
    const auto start = reinterpret_cast<CUdeviceptr>(memory);
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    unmap_pages(whole_pages(start), whole_pages(start + bytes));
    const arena::Ranges::Range whole = ranges_.take_back(start, bytes);
    if (whole.room) driver_->unreserve(whole.start, whole.room);
  }

  const char* sleep_blocker() const override { return nullptr; }

  std::size_t discard(void* memory, std::size_t bytes) override {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    const auto start = reinterpret_cast<CUdeviceptr>(memory);
    const CUdeviceptr first = whole_pages(start), last = (start + bytes) / page_ * page_;
    if (first >= last) return 0;
    unmap_pages(first, last);
    return last - first;
  }

  void restore(void* memory, std::size_t bytes) override {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    const auto start = reinterpret_cast<CUdeviceptr>(memory);
    TORCH_CHECK(map_pages(start / page_ * page_, whole_pages(start + bytes)), "Pool: expected ", bytes,
                " bytes of device memory for what slept, got none from the driver");
  }

 private:
  std::size_t whole_pages(std::size_t bytes) const { return (bytes + page_ - 1) / page_ * page_; }

  // All of those that are not mapped, or none. Memory for all of them comes first: where it ends nothing has been mapped yet.
  bool map_pages(CUdeviceptr first, CUdeviceptr last) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::pair<CUdeviceptr, CUmemGenericAllocationHandle>> made;
    std::vector<CUdeviceptr> done;
    bool well = true;
    for (CUdeviceptr at = first; at < last && well; at += page_) {
      if (handles_.count(at)) continue;
      CUmemGenericAllocationHandle handle = 0;
      well = driver_->create(&handle, page_, &kind_, 0) == CUDA_SUCCESS;
      if (well) made.emplace_back(at, handle);
    }
    for (const auto& [at, handle] : made) {
      well = well && driver_->map(at, page_, 0, handle, 0) == CUDA_SUCCESS;
      if (!well) {
        driver_->destroy(handle);
        continue;
      }
      handles_[at] = handle;
      done.push_back(at);
      well = let_access(at);
    }
    if (!well)
      for (const CUdeviceptr at : done) unmap_page(at);
    return well;
  }

  // To the device, and to its peers if they can.
  bool let_access(CUdeviceptr page) {
    std::vector<CUmemAccessDesc> access{{kind_.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
    for (const int peer : peers_)
      access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, peer}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    return driver_->access(page, page_, access.data(), access.size()) == CUDA_SUCCESS ||
           driver_->access(page, page_, access.data(), 1) == CUDA_SUCCESS;
  }

  void unmap_pages(CUdeviceptr first, CUdeviceptr last) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (CUdeviceptr at = first; at < last; at += page_) unmap_page(at);
  }

  void unmap_page(CUdeviceptr at) {
    const auto found = handles_.find(at);
    if (found == handles_.end()) return;
    driver_->unmap(at, page_);
    driver_->destroy(found->second);
    handles_.erase(found);
  }

  const Driver* driver_ = nullptr;
  CUmemAllocationProp kind_ = {};
  std::size_t page_ = 0;
  arena::Ranges ranges_;
  std::mutex mutex_;  // of what follows
  std::vector<int> peers_;
  std::map<CUdeviceptr, CUmemGenericAllocationHandle> handles_;  // of mapped pages
};

// What is to go to the driver.
struct Gone {
  std::shared_ptr<CudaMemory> owner;
  void* memory;
  std::size_t bytes;
};
struct AllGone {
  std::mutex turn;   // to give
  std::mutex mutex;  // of the list
  std::vector<Gone> list;

  static AllGone& get() {
    static AllGone& instance = *new AllGone;
    return instance;
  }
};

}  // namespace

bool synchronize(int device) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  const c10::cuda::CUDAGuard guard(index);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (!good(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(index), &status)) || status) return false;
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  return good(cudaDeviceSynchronize());
}

template <class Take>
bool CudaMemory::try_to(const Take& take) {
  give_all();
  if (take()) return true;
  if (synchronize(device_)) try {  // torch's allocator may keep what it does not use
      c10::cuda::CUDACachingAllocator::emptyCache();
      return take();
    } catch (const c10::Error&) {  // another thread captures
      (void)cudaGetLastError();
    }
  return false;
}

void* CudaMemory::allocate(std::size_t bytes) {
  void* memory = nullptr;
  return try_to([&] { return (memory = take(bytes)) != nullptr; }) ? memory : nullptr;
}

bool CudaMemory::extend(void* end, std::size_t bytes) {
  give_all();
  if (going_.load() || !has_room(end, bytes)) return false;  // what is still to go may lie there
  return try_to([&] { return take_more(end, bytes); });
}

void CudaMemory::release(void* memory, std::size_t bytes) {
  going_.fetch_add(1);
  {
    const std::lock_guard<std::mutex> lock(AllGone::get().mutex);
    AllGone::get().list.push_back({shared_from_this(), memory, bytes});
  }
  give_all();
}

void CudaMemory::give_all() {
  AllGone& all = AllGone::get();
  const std::lock_guard<std::mutex> turn(all.turn);  // who comes second finds all gone
  std::vector<Gone> list;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    list.swap(all.list);
  }
  std::map<int, bool> done;
  for (Gone& gone : list) {
    const int device = gone.owner->device_;
    if (!done.count(device)) done[device] = synchronize(device);
    if (done[device]) {
      gone.owner->give(gone.memory, gone.bytes);
      gone.owner->going_.fetch_sub(1);
    } else {
      const std::lock_guard<std::mutex> lock(all.mutex);
      all.list.push_back(std::move(gone));
    }
  }
}

void let_peer_access(int device, int peer) {
  Peers& all = Peers::get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& peers = all.of[device];
  if (std::find(peers.begin(), peers.end(), peer) != peers.end()) return;
  peers.push_back(peer);
  for (MappedMemory* memory : all.memories)
    if (memory->device() == device) memory->add_peer(peer);
}

std::shared_ptr<CudaMemory> make_cuda_memory(int device) {
  if (auto mapped = MappedMemory::make(device)) return mapped;
  return std::make_shared<PlainMemory>(device);
}

}  // namespace memkit

#endif
