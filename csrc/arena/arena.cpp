#include "arena.h"

#include <pthread.h>

#include <algorithm>
#include <new>
#include <stdexcept>

#include "capture.h"

namespace memkit::arena {
namespace {

constexpr std::size_t kLargest = std::size_t(1) << 62;     // sizes beyond are mistakes; sums stay in range
constexpr std::size_t kAlignments = std::size_t(1) << 30;  // likewise
constexpr std::size_t kDelay = 4096;                       // nodes that stay dead in debug mode

int current_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1); });
  (void)registered;
  return fork_generation.load(std::memory_order_relaxed);
}

}  // namespace

void DisposeArena::operator()(Arena* arena) const noexcept { arena->dispose(); }

ArenaPtr Arena::create(Options options, std::shared_ptr<Upstream> upstream) {
  const auto require = [](bool good, const char* text) {
    if (!good) throw std::invalid_argument(text);
  };
  require(upstream != nullptr, "arena: expected an upstream, got none");
  require(is_power_of_two(options.alignment) && options.alignment >= 16 && options.alignment <= kAlignments,
          "arena: expected an alignment that is a power of two from 16 to 2^30");
  require(options.capacity <= options.max, "arena: expected a capacity of at most max");
  require(options.capacity <= kLargest, "arena: expected a capacity of at most 2^62");
  require(options.capacity || options.grow, "arena: expected a capacity, as it must not grow");
  options.growth = round_up(std::clamp<std::size_t>(options.growth, 1, kLargest), options.alignment);
  options.capacity = std::min(round_up(options.capacity, options.alignment), options.max);
  ArenaPtr arena(new Arena(std::move(options), std::move(upstream)));
  if (const std::size_t bytes = arena->options_.capacity) {
    Refusal refusal{Refusal::available, arena->upstream_->available()};
    void* memory = nullptr;
    if (bytes <= refusal.left) {
      refusal.limit = Refusal::upstream;
      memory = arena->upstream_->allocate(bytes);
    }
    if (!memory) {
      Failure failure;
      failure.refusal = refusal;
      failure.asked = bytes;
      failure.max = arena->options_.max;
      throw NoCapacity(std::move(failure));
    }
    arena->heap_.add(memory, bytes, bytes);
    arena->stats_.reserved = arena->stats_.reserved_peak = bytes;
  }
  return arena;
}

Arena::Arena(Options options, std::shared_ptr<Upstream> upstream)
    : heap_(this, options.alignment, options.debug ? kDelay : 0),
      marks_(options.debug && options.memory),
      generation_(current_generation()),
      tags_(1),
      options_(std::move(options)),
      upstream_(std::move(upstream)) {
  tag_numbers_.emplace("", 0);
}

inline void Arena::admit(Block* block, const Request& request) {
  block->requested = request.size;
  block->tag = request.tag < tags_.size() ? request.tag : 0;
  block->stack = request.stack;
  stats_.allocated += request.size;
  stats_.allocated_peak = std::max(stats_.allocated_peak, stats_.allocated);
  stats_.active += block->size;
  stats_.active_peak = std::max(stats_.active_peak, stats_.active);
  ++stats_.allocations;
  ++stats_.live_blocks;
  Tag& tag = tags_[block->tag];
  tag.bytes += request.size;
  ++tag.blocks;
  if (indexed_) pointers_.insert(block);
}

// The common case: nothing to wait for, no failure to report, no memory to mark.
Block* Arena::serve(const Request& request) {
  const std::size_t granule = options_.alignment;
  if (inherited() || marks_ || request.alignment || request.size > kLargest) return nullptr;
  const std::size_t size = round_up(std::max<std::size_t>(request.size, 1), granule);
  const std::lock_guard<SpinLock> lock(lock_);
  Lane* lane = last_lane_;
  if (closed_ || indexed_ || !lane || lane->id != request.lane || lane->redirect || !admits(request.tag))
    return nullptr;
  Block* block = recent_;
  if (block && block->size == size && block->lane == lane) {
    recent_ = nullptr;
    block->state = State::live;
  } else {
    settle_recent();
    block = heap_.find(*lane, size, granule, false);
    if (!block) return nullptr;
    block = heap_.take(block, size, granule, lane);
    block->front = 0;
  }
  admit(block, request);
  return block;
}

Allocation Arena::allocate(const Request& request) {
  Allocation result;  // returned by every path, so that it is built in place
  const std::size_t granule = options_.alignment, alignment = std::max(request.alignment, granule);
  if (inherited()) {
    fail(&result, Failure::inherited, request);
    return result;
  }
  Lock lock(lock_);
  const bool valid =
      request.size <= kLargest && alignment <= kAlignments && !(request.alignment & (request.alignment - 1));
  if (closed_ || !valid || !admits(request.tag)) {
    fail(&result, closed_ ? Failure::closed : valid ? Failure::asleep : Failure::invalid, request);
    return result;
  }
  Lane* lane = last_lane_ && last_lane_->id == request.lane ? last_lane_ : lane_of(request.lane);
  // A capture writes when it is replayed, which nobody tells us of: its blocks have no canaries.
  const bool guarded = marks_ && !lane->redirect;
  const std::size_t front = guarded ? alignment : 0, back = guarded ? granule : 0;
  const std::size_t size = round_up(std::max<std::size_t>(front + request.size + back, 1), granule);
  settle_recent();
  Block* block = heap_.find(*lane->serving(), size, alignment, false);
  if (!block) block = search(lane, size, alignment, &result.waits);
  Refusal refusal;
  if (!block) block = grow(lock, lane, request.tag, size, alignment, &result.waits, &refusal);
  if (!block) {
    const bool admitted = admits(request.tag);  // the lock may have been open since
    fail(&result, closed_ ? Failure::closed : admitted ? Failure::exhausted : Failure::asleep, request, refusal);
    return result;
  }
  if (indexed_) pointers_.reserve(1);  // what can fail comes first
  block = result.block = heap_.take(block, size, alignment, lane->serving());
  block->front = std::uint32_t(front);
  admit(block, request);
  if (!guarded) return result;
  const Marking marking(marking_);
  lock.unlock();
  mark(block);
  return result;
}

// Under the lock; in a forked child, where nobody may take it, without numbers.
void Arena::fail(Allocation* result, Failure::Reason reason, const Request& request, const Refusal& refusal) {
  result->waits.clear();
  result->failure = std::make_unique<Failure>();
  Failure& failure = *result->failure;
  failure.reason = reason;
  failure.refusal = refusal;
  failure.asked = request.size;
  failure.max = options_.max;
  if (reason == Failure::inherited || reason == Failure::asleep) return;
  ++stats_.failures;
  failure.free = heap_.free_bytes();
  failure.largest_free = largest_free();
  failure.reserved = stats_.reserved;
  if (failure.free) failure.fragmentation = 1 - double(failure.largest_free) / double(failure.free);
  failure.holders = holders_locked(5);
}

// Its user is done with a live block.
inline void Arena::dismiss(Block* block) {
  if (indexed_) pointers_.erase(block);
  stats_.allocated -= block->requested;
  ++stats_.frees;
  --stats_.live_blocks;
  Tag& tag = tags_[block->tag];
  tag.bytes -= block->requested;
  --tag.blocks;
}

// From live to parked.
void Arena::retire(Block* block) {
  dismiss(block);
  block->state = State::parked;
  ++stats_.parked_blocks;
}

// From parked to free, unless a capture that records its lane keeps it.
void Arena::reuse(Block* block) {
  if (Capture* capture = block->lane->capture) {
    block->next = capture->parked;
    capture->parked = block;
    return;
  }
  --stats_.parked_blocks;
  stats_.active -= block->size;
  heap_.give(block);
}

Freed Arena::take_back(Block* block) noexcept {
  if (inherited()) return Freed::inherited;
  Lock lock(lock_);
  if (block->state != State::live || options_.debug || closed_ || block->lane->capture) return accept(lock, block);
  dismiss(block);
  stats_.active -= block->size;
  settle_recent();
  block->state = State::parked;
  recent_ = block;
  return Freed::ok;
}

// Frees under the lock, and releases it.
Freed Arena::accept(Lock& lock, Block* block) noexcept {
  if (block->state != State::live) {
    lock.unlock();
    return misuse(block, Freed::double_free);
  }
  retire(block);
  std::string wrong;
  if (marks_ && block->front) {
    // Parked, so that nobody else gets it and a second free is seen, while its memory is read and written.
    lock.unlock();
    wrong = inspect(block);
    lock.lock();
  }
  reuse(block);
  ++busy_;  // stays until the end of this call, whatever others free
  if (!wrong.empty() && options_.violated) {
    lock.unlock();
    options_.violated(wrong);
    lock.lock();
  }
  --busy_;
  leave(lock);
  return wrong.empty() ? Freed::ok : Freed::corrupted;
}

Freed Arena::misuse(Block* block, Freed what) noexcept {
  if (options_.violated)
    options_.violated(what == Freed::double_free ? "arena: freed a second time: " + describe(block)
                                                 : "arena: freed what is not of this arena");
  return what;
}

Freed Arena::free_pointer(const void* data) noexcept {
  if (inherited()) return Freed::inherited;
  Block* block = find(data);
  Lock lock(lock_);
  // Another thread may have freed it since: then its node is dead, or has another address.
  if (block && block->state == State::live && block->data() == data) return accept(lock, block);
  bool ours = false;
  for (const auto& chunk : heap_.chunks())
    ours |= reinterpret_cast<std::uintptr_t>(data) - reinterpret_cast<std::uintptr_t>(chunk->memory) < chunk->bytes;
  lock.unlock();
  if (options_.violated)
    options_.violated(ours ? "arena: freed a second time, or never allocated: an address of this arena"
                           : "arena: freed an address that is not of this arena");
  return ours ? Freed::double_free : Freed::foreign;
}

std::size_t Arena::trim() {
  if (inherited()) return 0;
  Lock lock(lock_);
  return send_back(lock, detach_pages());
}

void Arena::close() {
  if (inherited()) return;
  Lock lock(lock_);
  shut();
  send_back(lock, detach_pages());
}

void Arena::shut() {
  closed_ = true;
  for (const auto& chunk : heap_.chunks()) chunk->kept = 0;
}

void Arena::dispose() noexcept {
  if (inherited()) return;  // the parent's memory; in the child nothing is given back
  Lock lock(lock_);
  shut();
  disposed_ = true;
  leave(lock);
}

// The end of a call that may have been the last: returns chunks of a closed arena, deletes a disposed one.
void Arena::leave(Lock& lock) noexcept {
  if (closed_) send_back(lock, detach_empty());
  const bool last = disposed_ && !busy_ && !stats_.live_blocks && !stats_.parked_blocks && captures_.empty();
  lock.unlock();
  if (last) delete this;
}

void Arena::welcome(Guest* guest) {
  if (inherited()) return;
  Lock lock(lock_);
  guests_.push_back(guest);
  ++busy_;
}

void Arena::forget(Guest* guest) {
  if (inherited()) return;
  Lock lock(lock_);
  guests_.erase(std::remove(guests_.begin(), guests_.end(), guest), guests_.end());
}

void Arena::unhold() {
  if (inherited()) return;
  Lock lock(lock_);
  --busy_;
  leave(lock);
}

}  // namespace memkit::arena
