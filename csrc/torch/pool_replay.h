// pool.replay(plan): torch's allocations of a step get the places that a plan has for them.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arena/replay.h"
#include "pool.h"
#include "pool_use.h"

namespace memkit {

// A plan and a pool, for any number of steps one after the other. Between steps it holds memory while something that a
// step made is alive, or until someone lacks it.
class PoolReplay final : public PoolUse {
 public:
  // Raises where the plan is not sound.
  PoolReplay(std::shared_ptr<Pool> pool, std::vector<arena::Plan::Slot> slots, std::size_t total,
             std::size_t alignment);
  ~PoolReplay() override;

  // Raises when a step is under way already, one at a time, and where the pool has no room for the plan.
  void enter() override;
  std::optional<bool> leave() override;
  bool settle();  // gives the memory back, if no step is under way and nothing in it is alive; whether it did

  struct Step {  // the last one, or so far
    std::size_t planned = 0, served = 0, fell_back = 0;
    std::string mismatch;  // the first of those that fell back
  };
  const Step& step() const { return step_; }

 private:
  class Layer;
  using UnderWay = std::atomic<bool>;
  void take_memory();
  void count();

  const std::shared_ptr<Pool> pool_;
  std::shared_ptr<const arena::Plan> plan_;
  std::mutex mutex_;  // of a step that begins, and settle()
  std::shared_ptr<arena::Replay> replay_;
  const std::shared_ptr<UnderWay> under_way_ = std::make_shared<UnderWay>(false);  // until the layer dies
  Layer* layer_ = nullptr;  // of the step under way, its thread's
  Step step_;
};

}  // namespace memkit
