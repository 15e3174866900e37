// What a thread puts before a pool's arena: scopes and tags.
#include <algorithm>

#include "pool.h"

namespace memkit {
namespace {

using arena::Scope;

class ScopeLayer final : public PoolLayer {
 public:
  struct Open {
    std::size_t number;
    Scope::Mark mark;
  };

  ScopeLayer(std::shared_ptr<Pool> owner, std::size_t region)
      : PoolLayer(std::move(owner)), scope(Scope::create(pool->arena(), region, pool->device().lane())) {}

  arena::Allocation allocate(const arena::Request& request) override {
    arena::Allocation got;
    got.block = scope->bump(request);
    if (!got.block) got = scope->allocate(request);
    return got;
  }

  const Scope::Pointer scope;
  std::vector<Open> open;
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
  layer->open.push_back({number, layer->scope->mark()});
  return number;
}

Pool::Left Pool::leave_scope(std::size_t number) {
  ScopeLayer* layer = scope_layer(this);
  if (!layer) return {};
  auto& open = layer->open;
  const auto mine = std::find_if(open.rbegin(), open.rend(), [&](const auto& one) { return one.number == number; });
  if (mine == open.rend()) return {};
  Left left{static_cast<std::size_t>(mine - open.rbegin()) + 1, {}};
  device_->finish();
  const std::size_t reserved = layer->scope->reserved();
  for (std::size_t i = 0; i < left.scopes; ++i) {
    left.held = layer->scope->release(open.back().mark).held;  // what outlived an inner scope is the outer one's
    open.pop_back();
  }
  if (open.empty()) {
    if (reserved > region_.load(std::memory_order_relaxed)) region_.store(reserved, std::memory_order_relaxed);
    take_layer(layer);  // its memory goes back at once, or with the last block that is still alive
  }
  return left;
}

void Pool::push_tag(std::string_view name) {
  watch_thread();
  pool_thread.tags = new PoolTag{id_, arena_->tag(name), pool_thread.tags};
}

void Pool::pop_tag() {
  for (PoolTag** link = &pool_thread.tags; *link; link = &(*link)->outer)
    if ((*link)->pool == id_) return drop_tag(link);
}

}  // namespace memkit
