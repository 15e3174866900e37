// A pool under torch: an arena, a device, and tensors whose storage is a block of the arena.
//
// Who serves an allocation is a short chain: the thread's layers of this pool, the innermost first (a scope; a replay
// would be one, too), then the arena. pool.empty() and pool.use() both go through it.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arena/arena.h"
#include "arena/scope.h"
#include "pool_device.h"
#include "tap.h"

namespace memkit {

class Pool;
class PoolReplay;
struct PoolViolations;

// What stands before the arena for one thread, which owns it until it is left, or until the thread ends.
class PoolLayer {
 public:
  explicit PoolLayer(std::shared_ptr<Pool> pool, bool torch_only = false)
      : pool(std::move(pool)), torch_only(torch_only) {}
  virtual ~PoolLayer() = default;
  virtual arena::Allocation allocate(const arena::Request& request) = 0;  // falls back to the arena by itself

  const std::shared_ptr<Pool> pool;
  const bool torch_only;  // serves what torch allocates in use(), not the tensors that the pool is asked for
  PoolLayer* outer = nullptr;
};

void push_layer(std::unique_ptr<PoolLayer> layer);
std::unique_ptr<PoolLayer> take_layer(PoolLayer* layer);  // one of this thread's

// A name for allocations of one thread, from with pool.tag(name).
struct PoolTag {
  std::int64_t pool;  // its id: the pool may be gone
  arena::TagId tag;
  std::uint64_t number;
  PoolTag* outer;
};

struct PoolThread {
  PoolLayer* layers = nullptr;
  PoolTag* tags = nullptr;
};
// initial-exec: read without a call, from a library that is loaded late; it is two pointers.
inline thread_local PoolThread pool_thread __attribute__((tls_model("initial-exec")));

class Pool final : public CpuSource, public std::enable_shared_from_this<Pool> {
 public:
  using Dtype = at::ScalarType;
  using Tag = std::optional<arena::TagId>;  // none: the thread's

  // Sizes are the caller's to check.
  static std::shared_ptr<Pool> create(std::unique_ptr<PoolDevice> device, arena::Options options);
  static std::shared_ptr<Pool> find(std::int64_t id);  // nullptr: gone
  static std::vector<std::shared_ptr<Pool>> all_cuda();
  ~Pool();

  std::int64_t id() const { return id_; }
  arena::Arena& arena() { return *arena_; }
  PoolDevice& device() { return *device_; }

  at::Tensor empty(at::IntArrayRef size, Dtype dtype, std::optional<at::MemoryFormat> format, Tag tag);
  at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Dtype dtype, Tag tag);
  c10::DataPtr data(std::size_t nbytes, Tag tag);

  // For pool.use(): what torch's CPU allocator asks for on this thread.
  CpuBlock* allocate(std::size_t nbytes) override;
  // The same on CUDA, past scopes: what torch works in lives on behind them. Where there is no room, nothing, and why.
  c10::DataPtr lend(std::size_t nbytes, std::string* refusal);
  // That refusal, once, by its text, of the latest few; nullptr: none of them.
  std::unique_ptr<arena::Failure> refusal(const std::string& text);
  // For resize_: past scopes and tags; nullptr where there is no room.
  arena::Block* spare(std::size_t nbytes);

  // Scopes of the calling thread. The number that enter returns is what leave wants back.
  struct Left {
    std::size_t scopes = 0;                // with those inside it that nobody had left; 0: it was left before
    std::vector<arena::Scope::Held> held;  // what is still alive
  };
  std::size_t enter_scope();
  Left leave_scope(std::size_t number);

  // Tags of the calling thread, likewise; false: it is in none of that number.
  std::uint64_t push_tag(std::string_view name);
  bool pop_tag(std::uint64_t number);

  void add(PoolReplay* replay);
  void remove(PoolReplay* replay);
  bool settle_replays();  // gives back what idle ones hold; whether any did

  // Writes the contents of live blocks to the file and gives their memory back; the rest of the memory too, unless a tag
  // is named, whose blocks sleep alone. Returns the bytes given back. Until wake() nothing of what sleeps can be
  // allocated. A wake() that raises leaves the pool asleep, and may be called again; a closed pool wakes, too.
  std::size_t sleep(const std::string& tag, int file);
  void wake();
  bool asleep() const { return asleep_.load(std::memory_order_relaxed); }
  // Waits until a sleep() or wake() under way has ended; raises if the tag sleeps then.
  void check_awake(arena::TagId tag) {
    if (!arena_->admits(tag)) wait_until_awake(tag);
  }

  std::size_t trim();
  void close();
  void check_own(const char* op) const;   // raises in a forked child
  void check_open(const char* op) const;  // there, too
  std::vector<std::string> violations() const;

 private:
  struct Sleeper {
    char* at;
    std::size_t bytes;
    arena::TagId tag;
  };

  Pool(std::unique_ptr<PoolDevice> device, arena::Options options);
  enum class For { user, torch, torch_past_layers };
  // Raises where there is no room, or gives nullptr and says why.
  arena::Block* take(std::size_t nbytes, Tag tag, For whom = For::user,
                     std::unique_ptr<arena::Failure>* failure = nullptr);
  arena::Allocation allocate(arena::Request* request, PoolLayer* layer);
  arena::Allocation allocate(const arena::Request& request);  // from the arena, waited for
  void wait_until_awake(arena::TagId tag);
  void wake_block(arena::Block* block);
  at::Tensor wrap(std::size_t nbytes, Dtype dtype, Tag tag);

  const std::int64_t id_;
  const std::unique_ptr<PoolDevice> device_;
  std::mutex refusals_mutex_;  // of what follows
  std::deque<std::unique_ptr<arena::Failure>> refusals_;
  const c10::DispatchKeySet keys_;
  c10::Allocator* const allocator_;  // of the storages, for resize_
  bool debug_;
  std::shared_ptr<PoolViolations> violations_;
  arena::ArenaPtr arena_;
  std::atomic<std::size_t> region_{std::size_t(1) << 20};  // bytes that a scope starts with: what the last ones needed
  std::atomic<std::size_t> scopes_{0};                     // entered so far
  std::atomic<bool> asleep_{false};
  mutable std::mutex mutex_;  // of what follows
  int file_ = -1;
  Tag asleep_tag_;
  std::vector<Sleeper> sleepers_;
  std::mutex replays_mutex_;
  std::vector<PoolReplay*> replays_;
};

// pool_python.cpp

// Raises memkit.PoolExhausted, or what else the failure is; with or without the GIL.
[[noreturn]] void raise_pool_failure(const arena::Failure& failure);
std::string pool_failure_text(const arena::Failure& failure);
// The calling thread's Python stack: a number for it, and its lines "file\tline\tfunction\n", innermost first.
arena::StackId capture_python_stack();
std::string python_stack(arena::StackId id);

}  // namespace memkit
