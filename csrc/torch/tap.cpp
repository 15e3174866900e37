// A block is one allocation of CPU tensor storage. A tap (class Tap) is one measurement in progress. The
// epoch is the number of taps started so far: a block born in a tap's epoch or a later one is younger than
// the tap.
#include "tap.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "ledger.h"

namespace memkit {
namespace {

struct State {
  Ledger ledger;
  std::atomic<std::uint64_t> epoch{0};
  std::atomic<bool> observed{false};  // whether anyone looks; read without the mutex
  std::mutex mutex;                   // guards the observers and all they know, so that it is exact with any threads
  std::vector<CpuObserver*> observers;
  std::atomic<bool> sourced{false};  // whether any thread ever had a source: quicker to read than thread_source
  c10::Allocator* wrapped = nullptr;
  c10::DeleterFnPtr release_wrapped = nullptr;
};

// Leaked on purpose: tensors die after static objects do.
State& state = *new State;

thread_local CpuSource* thread_source = nullptr;  // the innermost of the thread's, quicker to read
struct ThreadSources {
  std::vector<std::shared_ptr<CpuSource>> entered;

  void choose() { thread_source = entered.empty() ? nullptr : entered.back().get(); }
  ~ThreadSources() { thread_source = nullptr; }
};
thread_local ThreadSources thread_sources;

class Tap final : public CpuObserver {
 public:
  explicit Tap(std::size_t samples);
  ~Tap() { stop(); }
  Tap(const Tap&) = delete;
  Tap& operator=(const Tap&) = delete;

  void stop();
  void allocated(void*, std::size_t nbytes) noexcept override { count(static_cast<std::int64_t>(nbytes)); }
  void released(void*, std::size_t nbytes) noexcept override { count(-static_cast<std::int64_t>(nbytes)); }
  pybind11::tuple read() const;
  pybind11::list samples() const;
  bool covers(std::uintptr_t storage) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Sample {
    Clock::duration time;
    std::int64_t live;
  };
  void count(std::int64_t nbytes);
  void record();

  bool running_ = true;
  std::uint64_t epoch_;
  std::int64_t live_ = 0;
  std::int64_t peak_ = 0;
  std::int64_t allocations_ = 0;
  std::size_t limit_;       // of samples_; even
  std::size_t stride_ = 1;  // events a sample stands for
  std::size_t filled_ = 0;  // events in the last sample
  std::vector<Sample> samples_;
  Clock::time_point start_;
  Clock::time_point end_;
};

using Notice = void (CpuObserver::*)(void* address, std::size_t nbytes) noexcept;

void tell(Notice notice, void* address, std::size_t nbytes) {
  if (!state.observed.load(std::memory_order_relaxed)) return;
  std::lock_guard<std::mutex> guard(state.mutex);
  for (CpuObserver* observer : state.observers) (observer->*notice)(address, nbytes);
}

void release(void* address) {
  if (!address) return;
  const std::optional<LedgerEntry> entry = state.ledger.take(address);
  if (entry) tell(&CpuObserver::released, address, entry->nbytes);
  if (entry && entry->block) {
    c10::profiledCPUMemoryReporter().Delete(address);
    entry->block->release(entry->block);
  } else {
    // Without an entry: raw_allocate before the installation, raw_deallocate after (oneDNN's packed weights).
    state.release_wrapped(address);
  }
}

// oneDNN's raw_allocate (in gelu, say) aborts unless data pointers are their own context and there is a raw_deleter().
class TapAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    if (state.sourced.load(std::memory_order_relaxed) && thread_source && nbytes)
      if (CpuBlock* block = thread_source->allocate(nbytes)) return from_source(block, nbytes);
    c10::DataPtr data = state.wrapped->allocate(nbytes);
    if (data) admit(data.get(), nbytes, nullptr);
    return wrap(data.release_context());
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t nbytes) const override { default_copy_data(to, from, nbytes); }

 private:
  static c10::DataPtr wrap(void* data) { return {data, data, &release, c10::Device(c10::DeviceType::CPU)}; }

  static void admit(void* data, std::size_t nbytes, CpuBlock* block) {
    state.ledger.add({data, nbytes, state.epoch.load(std::memory_order_relaxed), block});
    tell(&CpuObserver::allocated, data, nbytes);
  }

  static c10::DataPtr from_source(CpuBlock* block, std::size_t nbytes) {
    try {
      admit(block->data, nbytes, block);
    } catch (...) {
      block->release(block);
      throw;
    }
    c10::profiledCPUMemoryReporter().New(block->data, nbytes);
    return wrap(block->data);
  }
};

TapAllocator& allocator() {
  static TapAllocator& instance = *new TapAllocator;
  return instance;
}

// Once. An allocator of another extension that has no raw interface stays alone; Tap() then says so.
void install() {
  c10::Allocator* wrapped = c10::GetCPUAllocator();
  if (state.wrapped || !wrapped->raw_deleter()) return;
  state.wrapped = wrapped;
  state.release_wrapped = wrapped->raw_deleter();
  // A child of fork() must not inherit a lock that another thread held.
  const auto lock = [] {
    state.mutex.lock();
    state.ledger.lock();
  };
  const auto unlock = [] {
    state.ledger.unlock();
    state.mutex.unlock();
  };
  pthread_atfork(lock, unlock, unlock);
  c10::SetCPUAllocator(&allocator());
}

void check_installed(const char* op) {
  TORCH_CHECK(c10::GetCPUAllocator() == &allocator(), op,
              ": expected memkit's tap as torch's CPU allocator, got one that another extension set");
}

// Both under the mutex.
void add(CpuObserver* observer) {
  state.observers.push_back(observer);
  state.observed.store(true, std::memory_order_relaxed);
}

void remove(CpuObserver* observer) {
  state.observers.erase(std::remove(state.observers.begin(), state.observers.end(), observer), state.observers.end());
  state.observed.store(!state.observers.empty(), std::memory_order_relaxed);
}

Tap::Tap(std::size_t samples) : limit_(samples + samples % 2) {
  check_installed("memkit.memory");
  samples_.reserve(limit_);
  std::lock_guard<std::mutex> guard(state.mutex);
  add(this);
  epoch_ = state.epoch.fetch_add(1, std::memory_order_relaxed) + 1;
  start_ = Clock::now();
}

void Tap::stop() {
  std::lock_guard<std::mutex> guard(state.mutex);
  if (!running_) return;
  end_ = Clock::now();
  running_ = false;
  remove(this);
}

void Tap::count(std::int64_t nbytes) {
  live_ += nbytes;
  peak_ = std::max(peak_, live_);
  allocations_ += nbytes > 0;
  if (limit_) record();
}

// When the buffer is full, of two neighbours the higher stays, so that no peak is ever lost.
void Tap::record() {
  const Sample now{Clock::now() - start_, live_};
  if (filled_ == 0) {
    if (samples_.size() == limit_) {
      for (std::size_t i = 0; i < limit_ / 2; ++i) {
        const Sample &left = samples_[2 * i], &right = samples_[2 * i + 1];
        samples_[i] = left.live > right.live ? left : right;
      }
      samples_.resize(limit_ / 2);
      stride_ *= 2;
    }
    samples_.push_back(now);
  } else if (now.live > samples_.back().live) {
    samples_.back() = now;
  }
  filled_ = (filled_ + 1) % stride_;
}

pybind11::tuple Tap::read() const {
  std::unique_lock<std::mutex> guard(state.mutex);
  const auto live = live_, peak = peak_, allocations = allocations_;
  guard.unlock();
  return pybind11::make_tuple(live, peak, allocations);
}

pybind11::list Tap::samples() const {
  std::unique_lock<std::mutex> guard(state.mutex);
  std::vector<Sample> copy = samples_;
  copy.push_back({(running_ ? Clock::now() : end_) - start_, live_});
  guard.unlock();
  pybind11::list list;
  list.append(pybind11::make_tuple(0.0, 0));
  for (const Sample& sample : copy)
    list.append(pybind11::make_tuple(std::chrono::duration<double>(sample.time).count(), sample.live));
  return list;
}

bool Tap::covers(std::uintptr_t storage) const {
  const c10::DataPtr& data = reinterpret_cast<const c10::StorageImpl*>(storage)->data_ptr();
  if (data.get_deleter() != &release) return false;  // of numpy, of another process, of before the installation
  const std::optional<LedgerEntry> entry = state.ledger.find(data.get_context());
  return entry && entry->epoch >= epoch_;
}

}  // namespace

void enter_cpu_source(std::shared_ptr<CpuSource> source) {
  thread_sources.entered.push_back(std::move(source));
  thread_sources.choose();
  state.sourced.store(true, std::memory_order_relaxed);
}

std::optional<bool> leave_cpu_source(const CpuSource* source) {
  auto& all = thread_sources.entered;
  const auto last = std::find_if(all.rbegin(), all.rend(), [&](const auto& each) { return each.get() == source; });
  if (last == all.rend()) return std::nullopt;
  const bool innermost = last == all.rbegin();
  const std::shared_ptr<CpuSource> left = std::move(*last);  // dies when it is out of use
  all.erase(std::next(last).base());
  thread_sources.choose();
  return innermost;
}

void add_cpu_observer(CpuObserver* observer, const char* op) {
  check_installed(op);
  std::lock_guard<std::mutex> guard(state.mutex);
  add(observer);
}

void remove_cpu_observer(CpuObserver* observer) {
  std::lock_guard<std::mutex> guard(state.mutex);
  remove(observer);
}

// A tensor's storage, known without a Python object of its own, which would count among the storage's holders. Keeps its
// address from naming another one, and nothing else.
class StorageRef {
 public:
  explicit StorageRef(const pybind11::handle& tensor) : StorageRef(THPVariable_Unpack(tensor.ptr())) {}
  explicit StorageRef(const at::Tensor& tensor)
      : weak_(tensor.storage().getWeakStorageImpl()),
        key_(reinterpret_cast<std::intptr_t>(tensor.storage().unsafeGetStorageImpl())),
        address_(reinterpret_cast<std::intptr_t>(
            tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get())),
        nbytes_(tensor.storage().nbytes()) {}
  std::intptr_t key() const { return key_; }
  std::intptr_t address() const { return address_; }
  std::size_t nbytes() const { return nbytes_; }
  bool is_alive() const { return weak_.use_count() > 0; }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> weak_;
  std::intptr_t key_, address_;
  std::size_t nbytes_;
};

void bind_tap(pybind11::module_& module) {
  install();
  namespace py = pybind11;
  py::class_<StorageRef>(module, "StorageRef", "A tensor's storage, not kept alive; no address names another one.")
      .def(py::init<py::handle>(), py::arg("tensor"))
      .def_property_readonly("key", &StorageRef::key)
      .def_property_readonly("address", &StorageRef::address)
      .def_property_readonly("nbytes", &StorageRef::nbytes)
      .def_property_readonly("is_alive", &StorageRef::is_alive);
  py::class_<Tap>(module, "Tap", "Counts the CPU tensor storage of the process, from its creation until stop().")
      .def(py::init<std::size_t>(), py::arg("samples") = 0)
      .def("stop", &Tap::stop)
      .def("read", &Tap::read)
      .def("samples", &Tap::samples)
      .def("covers", &Tap::covers, py::arg("storage"));
}

}  // namespace memkit
