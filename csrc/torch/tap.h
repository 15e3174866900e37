// The memory tap: memkit's place in front of torch's CPU allocator.
// It counts CPU tensor storage for memkit.memory, and lets a thread take that storage from elsewhere
// (pool.use()).
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

namespace pybind11 {
class module_;
}

namespace memkit {

// One block of a source, embedded in the source's own bookkeeping.
struct CpuBlock {
  void* data;                           // aligned to 64 bytes
  void (*release)(CpuBlock*) noexcept;  // called once: from any thread, also long after the scope was left
};

// Where CPU tensor storage may come from instead of torch's allocator. Its blocks may outlive it.
class CpuSource {
 public:
  // nullptr: this one from torch's allocator, please. nbytes > 0.
  virtual CpuBlock* allocate(std::size_t nbytes) = 0;

 protected:
  ~CpuSource() = default;
};

// Makes `source` this thread's, which owns it until it is left, or until the thread ends.
void enter_cpu_source(std::shared_ptr<CpuSource> source);
// The thread leaves it, and says whether it was its innermost: those inside of it go on. Nothing: it is not the thread's.
std::optional<bool> leave_cpu_source(const CpuSource* source);

// Sees CPU tensor storage come and go: each call under the tap's lock, so one at a time and in order, from any thread.
// An address is released before it can be allocated anew. The calls must not allocate tensors or take Python's lock.
class CpuObserver {
 public:
  virtual void allocated(void* address, std::size_t nbytes) noexcept = 0;
  virtual void released(void* address, std::size_t nbytes) noexcept = 0;

 protected:
  ~CpuObserver() = default;
};

// Throws c10::Error, naming `op`, where another extension's allocator stands in the tap's place.
void add_cpu_observer(CpuObserver* observer, const char* op);
void remove_cpu_observer(CpuObserver* observer);  // of one that was removed before: nothing

// Installs the tap in the process, for good, and adds `Tap` to the module.
void bind_tap(pybind11::module_& module);

}  // namespace memkit
