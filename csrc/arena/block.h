// What everything in the arena is about: the block, and who takes it back.
//
//   chunk      one piece of memory from upstream; never moves, never shrinks
//   block      a range of a chunk, free or in use; its node lies outside the memory, which is never read or written
//   granule    the arena's alignment: addresses and sizes of blocks are multiples of it
//   lane       an order of execution (a CUDA stream): what is freed on a lane may be reused on it at once
//   clean      memory that no lane has used since it came or since settle(): anyone may have it, without waiting
//   parked     given back by its user, not in the heap yet: deferred, pinned by a capture, or freed last
#pragma once

#include <cstddef>
#include <cstdint>

namespace memkit::arena {

using LaneId = std::uint64_t;
using TagId = std::uint32_t;
using StackId = std::uint64_t;  // opaque: whatever the caller's stack store hands out

struct Block;
struct Chunk;
struct Lane;

enum class State : std::uint8_t { dead, free, live, parked };  // dead: the node is in use for nothing

enum class Freed {
  ok,
  double_free,  // not live: freed before. Known until the node is reused; debug mode delays that
  foreign,      // of another arena, or of none
  corrupted,    // freed, but its canaries were overwritten (debug mode)
  inherited,    // made before a fork(), freed in the child: nothing was done
};

// Whose block it is: the arena's, a scope's or a replay's.
class Owner {
 public:
  virtual Freed take_back(Block* block) noexcept = 0;

 protected:
  ~Owner() = default;
};

// What coalescing asks of a neighbour stands first: with 10^6 blocks every cache line is a miss.
struct alignas(64) Block {
  std::uintptr_t address = 0;
  std::size_t size = 0;     // a multiple of the granule
  Block* before = nullptr;  // its neighbours in the chunk
  Block* after = nullptr;
  Block* previous = nullptr;  // its neighbours in the list that it is in: of a size class, or of what is parked
  Block* next = nullptr;
  Lane* lane = nullptr;
  std::uint32_t depth = 0;  // in a scope: how many marks were open; in a replay: its number
  State state = State::dead;

  Chunk* chunk = nullptr;
  Owner* owner = nullptr;
  std::size_t requested = 0;
  StackId stack = 0;
  TagId tag = 0;
  std::uint32_t front = 0;  // bytes before the user's: the canary of debug mode

  void* data() const { return reinterpret_cast<void*>(address + front); }
  std::uintptr_t end() const { return address + size; }
};

// Gives a block back to whoever made it. From any thread.
inline Freed free(Block* block) noexcept {
  __builtin_prefetch(block, 1);  // while its owner, on the next line, comes
  return block->owner ? block->owner->take_back(block) : Freed::foreign;
}

struct Chunk {
  void* memory = nullptr;  // as upstream gave it
  std::size_t bytes = 0;
  std::size_t kept = 0;  // of the capacity: never goes back before the arena's end
  Block* first = nullptr;
  Block* last = nullptr;
  std::size_t used = 0;   // blocks that are not free
  bool moving = false;    // upstream makes it longer now
  Chunk* next = nullptr;  // among chunks on their way upstream

  std::uintptr_t start() const { return reinterpret_cast<std::uintptr_t>(memory); }
  std::uintptr_t end() const { return start() + bytes; }
};

constexpr bool is_power_of_two(std::size_t n) { return n && !(n & (n - 1)); }
constexpr std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) & ~(unit - 1); }

}  // namespace memkit::arena
