// Canaries before and after the user's bytes, poison in them. Called without the lock, on blocks nobody else can get.
#include <cstdio>

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

// What is wrong with a block that is being freed, or "". Poisons it.
std::string Arena::inspect(const Block* block) const {
  Memory& memory = *options_.memory;
  const LaneId lane = block->lane->id;
  std::string wrong;
  if (!memory.holds(lane, front(block).at, kCanary, front(block).bytes)) wrong = "before";
  if (!memory.holds(lane, back(block).at, kCanary, back(block).bytes)) wrong += wrong.empty() ? "after" : " and after";
  memory.fill(lane, block->data(), options_.poison_freed, block->requested);
  return wrong.empty() ? "" : "arena: something wrote " + wrong + " its block: " + describe(block);
}

std::string Arena::describe(const Block* block) const {
  const std::string name = tag_name(block->tag);
  char address[32];
  std::snprintf(address, sizeof address, "%p", block->data());
  return std::to_string(block->requested) + " bytes at " + address + (name.empty() ? "" : " of " + name) + ", stack " +
         std::to_string(block->stack);
}

}  // namespace memkit::arena
