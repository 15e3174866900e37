// Canaries before and after the user's bytes, poison in them. Called without the lock, on blocks nobody else can get, but for
// check_guards().
#include <cstdio>
#include <thread>

#include "arena.h"

namespace memkit::arena {
namespace {

constexpr std::uint8_t kCanary = 0xca;
constexpr std::size_t kFront = 64;  // bytes of the front canary; what else alignment put there is left alone

struct Canary {
  void* at;
  std::size_t bytes;
};

Canary front(const Block* block) {
  const std::size_t bytes = block->front < kFront ? block->front : kFront;
  return {reinterpret_cast<void*>(block->address + block->front - bytes), bytes};
}

Canary back(const Block* block) {
  const std::uintptr_t start = block->address + block->front + block->requested;
  return {reinterpret_cast<void*>(start), block->end() - start};
}

}  // namespace

void Arena::mark(const Block* block) const {
  Memory& memory = *options_.memory;
  const LaneId lane = block->lane->id;
  memory.fill(lane, front(block).at, kCanary, front(block).bytes);
  memory.fill(lane, block->data(), options_.poison_new, block->requested);
  memory.fill(lane, back(block).at, kCanary, back(block).bytes);
}

// On which sides of a block something was written, or "".
std::string Arena::overwritten(const Block* block) const {
  Memory& memory = *options_.memory;
  const LaneId lane = block->lane->id;
  std::string sides;
  if (!memory.holds(lane, front(block).at, kCanary, front(block).bytes)) sides = "before";
  if (!memory.holds(lane, back(block).at, kCanary, back(block).bytes)) sides += sides.empty() ? "after" : " and after";
  return sides;
}

std::string Arena::damage(const std::string& sides, const Block* block) const {
  return sides.empty() ? "" : "arena: something wrote " + sides + " its block: " + describe(block);
}

// What is wrong with a block that is being freed, or "". Poisons it.
std::string Arena::inspect(const Block* block) const {
  const std::string wrong = damage(overwritten(block), block);
  options_.memory->fill(block->lane->id, block->data(), options_.poison_freed, block->requested);
  return wrong;
}

// Under the lock, so that none of them is freed meanwhile: the one time that it is held while a device is read.
std::string Arena::check_guards() const {
  if (inherited() || !marks_) return "";
  Lock lock(lock_);
  while (marking_.load()) {  // guards that are being written
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
  for (const auto& chunk : heap_.chunks())
    for (const Block* block = chunk->first; block; block = block->after) {
      if (block->state != State::live || !block->front) continue;
      const std::string sides = overwritten(block);
      if (sides.empty()) continue;
      const Block found = *block;  // it may be freed as soon as the lock is
      lock.unlock();
      return damage(sides, &found);
    }
  return "";
}

std::string Arena::describe(const Block* block) const {
  const std::string name = tag_name(block->tag);
  char address[32];
  std::snprintf(address, sizeof address, "%p", block->data());
  return std::to_string(block->requested) + " bytes at " + address + (name.empty() ? "" : " of " + name) + ", stack " +
         std::to_string(block->stack);
}

}  // namespace memkit::arena
