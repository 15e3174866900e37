#include "pool_replay.h"

#include <c10/util/Exception.h>

#include <sstream>
#include <utility>

namespace memkit {

using arena::Replay;

// Before the arena for what torch allocates; tensors that the pool is asked for were not recorded.
class PoolReplay::Layer final : public PoolLayer {
 public:
  Layer(std::shared_ptr<Pool> pool, std::shared_ptr<Replay> replay, std::shared_ptr<UnderWay> under_way)
      : PoolLayer(std::move(pool), /*torch_only=*/true), replay_(std::move(replay)), under_way_(std::move(under_way)) {}
  ~Layer() override { *under_way_ = false; }
  arena::Allocation allocate(const arena::Request& request) override {
    arena::Allocation got;
    got.block = replay_->serve(request);
    if (!got.block) got = replay_->allocate(request);
    return got;
  }

 private:
  const std::shared_ptr<Replay> replay_;
  const std::shared_ptr<UnderWay> under_way_;
};

PoolReplay::PoolReplay(std::shared_ptr<Pool> pool, std::vector<arena::Plan::Slot> slots, std::size_t total,
                       std::size_t alignment)
    : pool_(std::move(pool)) {
  TORCH_CHECK(pool_->device().device().is_cpu(), "Pool.replay: expected a pool on the CPU, got one on ",
              pool_->device().device());
  step_.planned = slots.size();
  std::string why;
  plan_ = arena::Plan::make(std::move(slots), total, alignment, &why);
  TORCH_CHECK_VALUE(plan_, "Pool.replay: expected a sound plan, got ", why);
  const std::size_t least = pool_->device().alignment();
  TORCH_CHECK_VALUE(alignment % least == 0, "Pool.replay: expected a plan aligned to multiples of ", least,
                    " bytes, got one to ", alignment);
  pool_->add(this);
}

PoolReplay::~PoolReplay() { pool_->remove(this); }

void PoolReplay::enter() {
  pool_->check_open("Pool.replay");
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    TORCH_CHECK(!under_way_->exchange(true),
                "Pool.replay: expected one step of a plan at a time, got a second before the first had ended");
  }
  pool_->settle_replays();  // memory of other plans' steps
  if (!replay_) try {
      take_memory();
    } catch (...) {
      *under_way_ = false;
      throw;
    }
  replay_->rewind();
  auto layer = std::make_unique<Layer>(pool_, replay_, under_way_);
  layer_ = layer.get();
  push_layer(std::move(layer));
  enter_cpu_source(pool_);
}

void PoolReplay::take_memory() {
  const arena::TagId tag = pool_->arena().tag("plan");
  arena::Allocation base;
  do {
    pool_->check_awake(tag);
    replay_ = Replay::create(pool_->arena(), plan_, pool_->device().lane(), tag, &base);
    if (replay_) return;
  } while (base.failure->reason == arena::Failure::asleep);
  raise_pool_failure(*base.failure);
}

std::optional<bool> PoolReplay::leave() {
  const PoolLayer* own = *under_way_ ? pool_thread.layers : nullptr;
  while (own && own != layer_) own = own->outer;
  if (!own) return std::nullopt;
  const bool last = own == pool_thread.layers, innermost = leave_cpu_source(pool_.get()).value_or(false);
  count();
  take_layer(layer_);
  return last && innermost;
}

bool PoolReplay::settle() {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (!replay_ || *under_way_ || replay_->live()) return false;
  replay_.reset();
  return true;
}

void PoolReplay::count() {
  const Replay::Counts counts = replay_->counts();
  step_.served = counts.served;
  step_.fell_back = counts.fell_back;
  step_.mismatch.clear();
  if (!counts.fell_back) return;
  const Replay::Mismatch& first = counts.first;
  std::ostringstream text;
  text << "allocation " << first.index << " of " << step_.planned << ": expected ";
  switch (first.reason) {
    case Replay::Mismatch::size: text << first.expected << " bytes, got " << first.got; break;
    case Replay::Mismatch::overlap:
      text << "its place to be free, got allocation " << first.other << " alive there";
      break;
    case Replay::Mismatch::alignment: text << "the plan's alignment, got a larger one"; break;
    case Replay::Mismatch::beyond: text << "no more allocations, got one of " << first.got << " bytes"; break;
    case Replay::Mismatch::none: break;
  }
  step_.mismatch = text.str();
}

}  // namespace memkit
