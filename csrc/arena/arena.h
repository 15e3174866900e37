// The arena: memory from upstream by the chunk, handed out by the block, from any thread.
//
// One short lock guards everything; upstream and the debug memory are called without it. Free blocks are kept by lane.
// A request is served by its own lane, then by clean memory, then by another lane, whose id it returns for the caller
// to wait for; after that neighbours free on different lanes are joined, and at last the arena grows. Scopes (scope.h)
// and replays (replay.h) take a block of the arena and hand it out in pieces.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lock.h"
#include "pointer_map.h"
#include "tlsf.h"
#include "upstream.h"

namespace memkit::arena {

using Ticket = std::uint64_t;
using CaptureId = std::uint64_t;

struct Options {
  std::size_t capacity = 0;    // bytes taken at once
  std::size_t max = SIZE_MAX;  // never more bytes than this from upstream
  bool grow = true;            // beyond the capacity
  std::size_t alignment = 64;  // the granule, a power of two; 512 for CUDA
  // Bytes of a new chunk; a larger request gets a chunk of its own size. Where a chunk can be made longer, that is by what
  // is missing, and a sixteenth of what there is if that is less than this.
  std::size_t growth = 64u << 20;
  bool debug = false;  // a second free is recognised for long; with `memory`, canaries and poison
  std::shared_ptr<Memory> memory;
  std::uint8_t poison_new = 0xff;                    // NaN in every floating-point type
  std::uint8_t poison_freed = 0x7f;                  // 3.4e38 in float, NaN in half
  std::function<void(const std::string&)> violated;  // told of wrong frees and overwritten canaries; must not throw
};

struct Request {
  std::size_t size;  // 0 gives a block of one granule with an address of its own
  LaneId lane = 0;
  TagId tag = 0;
  StackId stack = 0;
  std::size_t alignment = 0;  // a power of two; 0: the arena's
  CaptureId capture = 0;      // that records the lane, for those who stand before the arena
};

struct Holder {
  std::string tag;
  std::size_t bytes;  // requested
  std::size_t blocks;
};

// What stood in the way of growth.
struct Refusal {
  enum Limit { none, fixed, max, available, upstream } limit = none;  // fixed: it must not grow
  std::size_t left = 0;                                               // available: bytes of it
};

struct Failure {
  enum Reason { exhausted, closed, inherited, invalid, asleep } reason = exhausted;  // asleep: the gate is shut
  Refusal refusal;
  std::size_t asked = 0;
  std::size_t free = 0;
  std::size_t largest_free = 0;
  std::size_t reserved = 0;
  std::size_t max = 0;
  double fragmentation = 0;
  std::vector<Holder> holders;  // the largest

  std::string text() const;
};

// No capacity from upstream.
struct NoCapacity final : std::bad_alloc {
  explicit NoCapacity(Failure failure) : failure(std::move(failure)) {}
  Failure failure;
};

struct Allocation {
  Block* block = nullptr;
  std::vector<LaneId> waits;         // the request's lane must wait for these before it uses the block
  std::unique_ptr<Failure> failure;  // if there is no block

  explicit operator bool() const { return block; }
};

struct Stats {
  std::size_t allocated = 0, allocated_peak = 0;  // requested bytes of live blocks
  std::size_t active = 0, active_peak = 0;        // bytes that cannot be handed out: live and parked blocks, rounded
  std::size_t reserved = 0, reserved_peak = 0;    // bytes from upstream
  std::size_t allocations = 0, frees = 0;
  std::size_t failures = 0;
  std::size_t hits = 0;     // allocations served without upstream
  std::size_t growths = 0;  // chunks taken after the capacity
  std::size_t live_blocks = 0, parked_blocks = 0, free_blocks = 0;
  std::size_t chunks = 0;
  std::size_t free = 0, largest_free = 0;
  double fragmentation = 0;  // 1 - largest_free / free
};

struct ChunkView {
  const void* address;
  std::size_t size;
  bool grown;
};

struct BlockView {
  const void* address;
  std::size_t size;
  const void* data;  // the user's bytes in it; in debug mode canaries stand before and after them
  std::size_t requested;
  State state;
  LaneId lane;
  TagId tag;
  StackId stack;
};

// For whom there is memory.
class Gate {
 public:
  static constexpr Gate open() { return Gate(0); }
  static constexpr Gate shut() { return Gate(1); }
  static constexpr Gate shut_for(TagId tag) { return Gate(std::uint64_t(tag) + 2); }
  bool admits(TagId tag) const { return !code_ || (code_ > 1 && code_ - 2 != tag); }

 private:
  explicit constexpr Gate(std::uint64_t code) : code_(code) {}
  std::uint64_t code_;
};

class Arena;
class Guest;
struct DisposeArena {
  void operator()(Arena* arena) const noexcept;
};
using ArenaPtr = std::unique_ptr<Arena, DisposeArena>;

class Arena final : public Owner {
 public:
  // Raises std::invalid_argument on wrong options, NoCapacity when upstream has not as much. The arena closes when its
  // pointer dies, and goes with its last block.
  static ArenaPtr create(Options options, std::shared_ptr<Upstream> upstream);

  Allocation allocate(const Request& request);
  // The quick part of it: a block of the lane's own, or nullptr, whatever the reason: then allocate() has the answer.
  Block* serve(const Request& request);
  // In debug mode, once the lane has waited: what others had yet to write may have overwritten the canaries.
  void mark_again(const Block* block) const {
    if (marks_ && block->front) mark(block);
  }
  Freed take_back(Block* block) noexcept override;  // what arena::free() calls
  Freed free_pointer(const void* data) noexcept;
  // The live block whose data this is, or nullptr; not of a scope or a replay. The first call makes an index of all
  // pointers, kept from then on: an allocation and its free then cost some 40 to 70 ns more.
  Block* find(const void* data);

  // The caller is done with the block, other lanes are not: it is parked until its ticket is released.
  Freed defer(Block* block, Ticket ticket);
  std::size_t release_deferred(Ticket ticket);  // how many blocks

  // A capture on a lane: from pin() to seal() what is allocated on the lane belongs to the capture, and what is freed
  // there and did not belong to it is parked. Blocks of a capture are reused by itself only (after another pin() also),
  // until unpin(), when all work is done, makes them clean. Waits that an allocation of a capture returns cannot be
  // captured: settle() before makes them unlikely. While a capture records, no other lane gets memory of its lanes, and
  // no chunk goes upstream, which would wait for the device.
  bool pin(CaptureId capture, LaneId lane);  // false: another capture records this lane
  void seal(CaptureId capture);
  bool unpin(CaptureId capture, std::size_t frees);  // false: as in settle()

  // The work of these lanes is done, or of all: what is free on them is clean. Looked at when so many frees had been
  // counted (stats()); false, and nothing done, if there was another since, whose work may go on.
  bool settle(std::size_t frees, const std::vector<LaneId>* lanes = nullptr);
  std::vector<LaneId> idle_lanes() const;  // that have free memory, and that no capture records
  std::size_t trim();                      // gives what is free beyond the capacity upstream; how many bytes
  // Between these nothing is allocated, in scopes and replays neither, and nothing goes upstream: who looked at chunks and
  // blocks goes on with their memory, and what is freed meanwhile is nobody's. One call at a time.
  void hold();
  void let_go(Gate gate);
  // Asked at the moment at which memory is taken, under the lock of whoever hands it out.
  bool admits(TagId tag) const { return gate_.load(std::memory_order_acquire).admits(tag); }
  void close();  // allocates no more; chunks go upstream as their last blocks are freed
  bool closed() const;

  TagId tag(std::string_view name);  // the number of a name, for good
  std::string tag_name(TagId tag) const;
  std::vector<std::string> tag_names() const;  // by number

  Stats stats() const;
  void reset_peaks();
  std::vector<Holder> holders(std::size_t limit = SIZE_MAX) const;  // largest first
  std::string check() const;                                        // the first violated invariant, or ""
  std::string check_guards() const;  // in debug mode, where nothing sleeps: the first live block written around, or ""
  // In address order, under the lock: the callbacks must not call the arena.
  void visit(const std::function<void(const ChunkView&)>& chunk,
             const std::function<void(const BlockView&)>& block) const;
  // The live blocks of scopes and replays, which lie in blocks of the arena; likewise.
  void visit_guests(const std::function<void(const BlockView&)>& block) const;
  // The data of the blocks that replays lie in.
  std::vector<const void*> homes() const;

  const Options& options() const { return options_; }
  // Made before a fork(), seen in the child.
  bool inherited() const { return fork_generation.load(std::memory_order_relaxed) != generation_; }
  // A guest keeps a disposed arena.
  void welcome(Guest* guest);
  void forget(Guest* guest);  // before it dies
  void unhold();              // then

 private:
  friend DisposeArena;
  using Lock = std::unique_lock<SpinLock>;

  struct Tag {
    std::string name;
    std::size_t bytes = 0;
    std::size_t blocks = 0;
  };

  Arena(Options options, std::shared_ptr<Upstream> upstream);
  ~Arena() = default;
  void shut();
  void dispose() noexcept;
  void leave(Lock& lock) noexcept;

  // growth.cpp
  struct Need;
  class Growing;
  Block* grow(Lock& lock, Lane* lane, TagId tag, std::size_t size, std::size_t alignment, std::vector<LaneId>* waits,
              Refusal* refusal);
  bool in_vain(const Need& need) const;
  Block* extend(Lock& lock, const Need& need, Refusal* refusal);
  Block* add_chunk(Lock& lock, const Need& need, Refusal* refusal);
  Chunk* detach_empty(Chunk* detached = nullptr);
  Chunk* detach_pages();
  void detach(std::unique_ptr<Chunk> chunk, Chunk** list);
  template <class Ask>
  bool ask_upstream(Lock& lock, std::size_t bytes, Refusal* refusal, const Ask& ask);
  std::size_t growth_left() const;
  void count_growth(std::size_t bytes);
  std::size_t send_back(Lock& lock, Chunk* detached) noexcept;

  // arena.cpp
  void fail(Allocation* result, Failure::Reason reason, const Request& request, const Refusal& refusal = {});
  void admit(Block* block, const Request& request);
  void dismiss(Block* block);
  void retire(Block* block);
  void reuse(Block* block);
  void settle_recent() const {
    if (Block* block = recent_) recent_ = nullptr, heap_.give(block);
  }
  Freed misuse(Block* block, Freed what) noexcept;
  Freed accept(Lock& lock, Block* block) noexcept;

  // lanes.cpp
  Lane* lane_of(LaneId id);
  Block* search(Lane* lane, std::size_t size, std::size_t alignment, std::vector<LaneId>* waits);
  Block* borrow(Lane* lane, std::size_t size, std::size_t alignment, std::vector<LaneId>* waits);
  bool recording() const;

  // debug.cpp
  void mark(const Block* block) const;
  std::string overwritten(const Block* block) const;
  std::string damage(const std::string& sides, const Block* block) const;
  std::string inspect(const Block* block) const;
  std::string describe(const Block* block) const;

  std::size_t largest_free() const;
  std::vector<Holder> holders_locked(std::size_t limit) const;
  std::string check_accounts() const;

  mutable SpinLock lock_;
  Lane* last_lane_ = nullptr;
  mutable Tlsf heap_;
  // Freed last, and not in the heap yet: a request for its size takes it as it is, any other call puts it back first.
  mutable Block* recent_ = nullptr;
  bool closed_ = false;
  bool disposed_ = false;
  bool indexed_ = false;
  const bool marks_;             // debug mode with memory that can be written
  std::atomic<int> marking_{0};  // blocks that are being marked, without the lock
  struct Marking {
    explicit Marking(std::atomic<int>& count) : count(count) { ++count; }
    ~Marking() { --count; }  // also where the device has failed
    std::atomic<int>& count;
  };
  const int generation_;
  std::atomic<Gate> gate_{Gate::open()};
  Stats stats_;  // without what stats() computes
  std::vector<Tag> tags_;
  PointerMap pointers_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::unique_ptr<Capture>> captures_;
  std::unordered_map<Ticket, Block*> deferred_;
  std::unordered_map<std::string, TagId> tag_numbers_;
  std::vector<Guest*> guests_;
  std::size_t misses_ = 0;             // allocations that took a new chunk
  std::size_t busy_ = 0;               // calls outside the lock, and holders
  std::size_t moving_ = 0;             // bytes on their way from or to upstream
  bool held_ = false;                  // a call wants the chunks to stay
  std::size_t sending_ = 0;            // calls that send some there
  bool growing_ = false;               // a call has asked for more
  std::condition_variable_any moved_;  // one of these two has ended
  const Options options_;
  const std::shared_ptr<Upstream> upstream_;
};

}  // namespace memkit::arena
