// What a thread puts before a pool's arena: scopes and tags.
#include <algorithm>

#include "pool.h"

namespace memkit {
namespace {

using arena::Scope;

class ScopeLayer final : public PoolLayer {
 public:
  ScopeLayer(Pool* pool, std::size_t region)
      : PoolLayer(pool), scope(Scope::create(pool->arena(), region, pool->device().lane())) {}

  arena::Allocation allocate(const arena::Request& request) override {
    arena::Allocation got;
    got.block = scope->bump(request);
    if (!got.block) got = scope->allocate(request);
    return got;
  }

  const Scope::Pointer scope;
  std::vector<Scope::Mark> marks;
  const std::shared_ptr<Pool> keep = pool->shared_from_this();
};

ScopeLayer* scope_layer(const Pool* pool) {
  for (PoolLayer* layer = pool_thread.layers; layer; layer = layer->outer)
    if (layer->pool == pool)
      if (auto* found = dynamic_cast<ScopeLayer*>(layer)) return found;
  return nullptr;
}

void unlink(PoolLayer* layer) {
  PoolLayer** link = &pool_thread.layers;
  while (*link != layer) link = &(*link)->outer;
  *link = layer->outer;
}

}  // namespace

std::size_t Pool::enter_scope() {
  TORCH_CHECK(!arena_->closed(), "Pool.scope: expected an open pool, got one that was closed");
  ScopeLayer* layer = scope_layer(this);
  if (!layer) {
    // No more than an eighth of the pool at first, so that a small pool keeps room for the rest.
    const std::size_t capacity = arena_->options().capacity, wish = region_.load(std::memory_order_relaxed);
    layer = new ScopeLayer(this, capacity ? std::min(wish, std::max<std::size_t>(capacity / 8, 1)) : wish);
    layer->outer = pool_thread.layers;
    pool_thread.layers = layer;
  }
  layer->marks.push_back(layer->scope->mark());
  return layer->marks.size();
}

Pool::Left Pool::leave_scope(std::size_t depth) {
  ScopeLayer* layer = scope_layer(this);
  if (!layer || layer->marks.size() != depth) return {false, {}};
  device_->finish();
  const std::size_t reserved = layer->scope->reserved();
  Scope::Released released = layer->scope->release(layer->marks.back());
  layer->marks.pop_back();
  if (layer->marks.empty()) {
    if (reserved > region_.load(std::memory_order_relaxed)) region_.store(reserved, std::memory_order_relaxed);
    unlink(layer);
    delete layer;  // its memory goes back at once, or with the last block that is still alive
  }
  return {true, std::move(released.held)};
}

void Pool::push_tag(std::string_view name) {
  pool_thread.tags = new PoolTag{this, arena_->tag(name), pool_thread.tags};
}

void Pool::pop_tag() {
  for (PoolTag** link = &pool_thread.tags; *link; link = &(*link)->outer)
    if ((*link)->pool == this) {
      const std::unique_ptr<PoolTag> tag(*link);
      *link = tag->outer;
      return;
    }
}

}  // namespace memkit
