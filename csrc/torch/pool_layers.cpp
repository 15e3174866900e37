// What a thread puts before a pool's arena: scopes and tags.
#include <algorithm>

#include "pool_replay.h"

namespace memkit {
namespace {

using arena::Scope;

// A scope for each lane that allocates in it, and for each capture apart, whose memory a graph keeps.
class ScopeLayer final : public PoolLayer {
 public:
  ScopeLayer(std::shared_ptr<Pool> owner, std::size_t region) : PoolLayer(std::move(owner)), region_(region) {}

  arena::Allocation allocate(const arena::Request& request) override {
    Part& part = part_of(request);
    arena::Allocation got;
    got.block = part.scope->bump(request);
    if (!got.block)
      got = part.scope->allocate(
          request, [&](const arena::Allocation& region) { return pool->device().wait(request.lane, region); });
    return got;
  }

  void enter(std::size_t number) {
    open_.push_back(number);
    for (Part& part : parts_) part.marks.push_back(part.scope->mark());
  }
  // How many scopes end with this one; 0: it has ended.
  std::size_t depth(std::size_t number) const {
    const auto mine = std::find(open_.rbegin(), open_.rend(), number);
    return mine == open_.rend() ? 0 : static_cast<std::size_t>(mine - open_.rbegin()) + 1;
  }
  // Ends the innermost. What outlived an inner one is the outer one's.
  std::vector<Scope::Held> leave() {
    std::vector<Scope::Held> held;
    for (Part& part : parts_) {
      const std::vector<Scope::Held> here = part.scope->release(part.marks.back()).held;
      held.insert(held.end(), here.begin(), here.end());
      part.marks.pop_back();
    }
    open_.pop_back();
    return held;
  }
  bool ended() const { return open_.empty(); }
  std::size_t reserved() const {
    std::size_t most = 0;
    for (const Part& part : parts_) most = std::max(most, part.scope->reserved());
    return most;
  }

 private:
  struct Part {
    arena::LaneId lane;
    arena::CaptureId capture;
    Scope::Pointer scope;
    std::vector<Scope::Mark> marks;  // of the open scopes
  };

  Part& part_of(const arena::Request& request) {
    const auto serves = [&](const Part& part) { return part.lane == request.lane && part.capture == request.capture; };
    if (last_ < parts_.size() && serves(parts_[last_])) return parts_[last_];
    last_ = static_cast<std::size_t>(std::find_if(parts_.begin(), parts_.end(), serves) - parts_.begin());
    if (last_ == parts_.size()) {
      parts_.push_back({request.lane, request.capture, Scope::create(pool->arena(), region_, request.lane), {}});
      while (parts_.back().marks.size() < open_.size()) parts_.back().marks.push_back(parts_.back().scope->mark());
    }
    return parts_[last_];
  }

  const std::size_t region_;
  std::size_t last_ = 0;
  std::vector<Part> parts_;
  std::vector<std::size_t> open_;
};

ScopeLayer* scope_layer(const Pool* pool) {
  for (PoolLayer* layer = pool_thread.layers; layer; layer = layer->outer)
    if (layer->pool.get() == pool)
      if (auto* found = dynamic_cast<ScopeLayer*>(layer)) return found;
  return nullptr;
}

void drop_tag(PoolTag** link) {
  const std::unique_ptr<PoolTag> tag(*link);
  *link = tag->outer;
}

// A thread that ends leaves what it has not left.
struct ThreadEnd {
  ~ThreadEnd() {
    while (PoolLayer* layer = pool_thread.layers) try {
        const std::unique_ptr<PoolLayer> taken = take_layer(layer);
        taken->pool->device().finish();
      } catch (...) {  // the device's error: its own next call raises it
      }
    while (pool_thread.tags) drop_tag(&pool_thread.tags);
  }
};
void watch_thread() { static thread_local ThreadEnd end; }

}  // namespace

void push_layer(std::unique_ptr<PoolLayer> layer) {
  watch_thread();
  layer->outer = pool_thread.layers;
  pool_thread.layers = layer.release();
}

std::unique_ptr<PoolLayer> take_layer(PoolLayer* layer) {
  PoolLayer** link = &pool_thread.layers;
  while (*link != layer) link = &(*link)->outer;
  *link = layer->outer;
  return std::unique_ptr<PoolLayer>(layer);
}

std::size_t Pool::enter_scope() {
  check_open("Pool.scope");
  ScopeLayer* layer = scope_layer(this);
  if (!layer) {
    // No more than an eighth of the pool at first, so that a small pool keeps room for the rest.
    const std::size_t capacity = arena_->options().capacity, wish = region_.load(std::memory_order_relaxed);
    const std::size_t region = capacity ? std::min(wish, std::max<std::size_t>(capacity / 8, 1)) : wish;
    auto fresh = std::make_unique<ScopeLayer>(shared_from_this(), region);
    layer = fresh.get();
    push_layer(std::move(fresh));
  }
  const std::size_t number = scopes_.fetch_add(1, std::memory_order_relaxed);
  layer->enter(number);
  return number;
}

Pool::Left Pool::leave_scope(std::size_t number) {
  ScopeLayer* layer = scope_layer(this);
  if (!layer) return {};
  Left left{layer->depth(number), {}};
  if (!left.scopes) return left;
  device_->finish();
  const std::size_t reserved = layer->reserved();
  for (std::size_t i = 0; i < left.scopes; ++i) left.held = layer->leave();
  if (layer->ended()) {
    if (reserved > region_.load(std::memory_order_relaxed)) region_.store(reserved, std::memory_order_relaxed);
    take_layer(layer);  // its memory goes back at once, or with the last block that is still alive
  }
  return left;
}

std::uint64_t Pool::push_tag(std::string_view name) {
  static std::atomic<std::uint64_t> numbers{0};
  watch_thread();
  pool_thread.tags = new PoolTag{id_, arena_->tag(name), numbers.fetch_add(1), pool_thread.tags};
  return pool_thread.tags->number;
}

bool Pool::pop_tag(std::uint64_t number) {
  PoolTag** link = &pool_thread.tags;
  while (*link && (*link)->number != number) link = &(*link)->outer;
  if (!*link) return false;
  drop_tag(link);
  return true;
}

void Pool::add(PoolReplay* replay) {
  if (arena_->inherited()) return;  // so may be a mutex that is locked for good
  const std::lock_guard<std::mutex> guard(replays_mutex_);
  replays_.push_back(replay);
}

void Pool::remove(PoolReplay* replay) {
  if (arena_->inherited()) return;
  const std::lock_guard<std::mutex> guard(replays_mutex_);
  replays_.erase(std::remove(replays_.begin(), replays_.end(), replay), replays_.end());
}

bool Pool::settle_replays() {
  if (arena_->inherited()) return false;
  const std::lock_guard<std::mutex> guard(replays_mutex_);
  bool any = false;
  for (PoolReplay* replay : replays_) any |= replay->settle();
  return any;
}

}  // namespace memkit
