// Sleep and wake: contents to a file, memory back to the system, addresses kept.
#include <unistd.h>

#include <set>
#include <utility>

#include "pool.h"

namespace memkit {

using arena::BlockView;
using arena::ChunkView;
using arena::State;

std::size_t Pool::sleep(Tag tag, int file) {
  const std::lock_guard<std::mutex> guard(mutex_);
  TORCH_CHECK(!arena_->inherited(), "Pool.sleep: expected this process's own pool, got one made before a fork()");
  TORCH_CHECK(!arena_->closed(), "Pool.sleep: expected an open pool, got one that was closed");
  TORCH_CHECK(!asleep(), "Pool.sleep: expected a pool that is awake, got one that sleeps already");
  const char* blocker = device_->sleep_blocker();
  TORCH_CHECK(!blocker, "Pool.sleep: expected memory that can be given back, got a pool that cannot: ", blocker);
  device_->finish();
  asleep_tag_ = tag;
  asleep_.store(true);
  std::vector<Sleeper> sleepers, idle;
  // What rounding added sleeps with the user's bytes, but canaries stay.
  const auto sleeper = [debug = debug_](const BlockView& block) -> Sleeper {
    char* const data = const_cast<char*>(static_cast<const char*>(block.data));
    const char* const end = static_cast<const char*>(block.address) + block.size;
    const bool guarded = debug && block.state == State::live;
    return {data, guarded ? block.requested : static_cast<std::size_t>(end - data), block.tag};
  };
  arena_->visit([](const ChunkView&) {},
                [&](const BlockView& block) {
                  if (block.state == State::live && (!tag || block.tag == *tag))
                    sleepers.push_back(sleeper(block));
                  else if (!tag && block.state == State::free)
                    idle.push_back(sleeper(block));
                });
  // Without a tag the blocks that scopes and replays lie in sleep as wholes.
  if (tag)
    arena_->visit_guests([&](const BlockView& block) {
      if (block.tag == *tag) sleepers.push_back(sleeper(block));
    });
  std::size_t bytes = 0;
  const int copy = dup(file);
  try {
    TORCH_CHECK(copy >= 0, "Pool.sleep: expected an open file, got ", file);
    for (const Sleeper& one : sleepers) device_->save(file, one.at, one.bytes);
  } catch (...) {
    if (copy >= 0) ::close(copy);
    asleep_.store(false);
    throw;
  }
  for (const auto* list : {&sleepers, &idle})
    for (const Sleeper& one : *list) {
      device_->discard(one.at, one.bytes);
      bytes += one.bytes;
    }
  file_ = copy;
  sleepers_ = std::move(sleepers);
  return bytes;
}

void Pool::check_awake(arena::TagId tag) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (!asleep() || (asleep_tag_ && *asleep_tag_ != tag)) return;
  TORCH_CHECK(false, "Pool: expected memory that is awake, got an allocation from ", asleep_tag_ ? "a tag" : "a pool",
              " that sleeps; call wake() first");
}

void Pool::wake() {
  const std::lock_guard<std::mutex> guard(mutex_);
  TORCH_CHECK(asleep(), "Pool.wake: expected a pool that sleeps, got one that is awake");
  TORCH_CHECK(!arena_->inherited(), "Pool.wake: expected this process's own pool, got one made before a fork()");
  // What was freed meanwhile stays out: its memory may be another tag's by now. Nobody can have got it for the tag that
  // sleeps, so a live block of that tag there is the same block.
  std::set<std::pair<const void*, arena::TagId>> alive;
  std::vector<Sleeper> chunks;
  arena_->visit(
      [&](const ChunkView& chunk) {
        if (!asleep_tag_) chunks.push_back({const_cast<char*>(static_cast<const char*>(chunk.address)), chunk.size, 0});
      },
      [&](const BlockView& block) {
        if (block.state == State::live) alive.emplace(block.data, block.tag);
      });
  if (asleep_tag_) arena_->visit_guests([&](const BlockView& block) { alive.emplace(block.data, block.tag); });
  for (const Sleeper& chunk : chunks) device_->restore(chunk.at, chunk.bytes);
  off_t position = 0;
  for (const Sleeper& one : sleepers_) {
    if (alive.count({one.at, one.tag})) {
      TORCH_CHECK(lseek(file_, position, SEEK_SET) == position, "Pool.wake: expected a file, got one closed");
      if (asleep_tag_) device_->restore(one.at, one.bytes);
      device_->load(file_, one.at, one.bytes);
    }
    position += static_cast<off_t>(one.bytes);
  }
  ::close(file_);
  file_ = -1;
  sleepers_.clear();
  asleep_.store(false);
}

}  // namespace memkit
