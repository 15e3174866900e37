// Blocks and their neighbours: cutting, coalescing, chunks. A two-level segregated fit over any number of address
// ranges, with every node outside the memory it describes. Takes and gives in constant time. The arena locks.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "free_index.h"
#include "slab.h"

namespace memkit::arena {

struct Capture;

// A lane's free blocks. The lanes of a capture are its own: no other lane takes or coalesces with what is free there.
struct Lane {
  Lane(LaneId id, std::size_t granule, bool pinned = false) : id(id), pinned(pinned), index(granule) {}

  Lane* serving() { return redirect ? redirect : this; }
  // Whether clean memory joins what is free here. A capture needs it clean: nothing else comes without a wait.
  bool mixes() const { return !pinned && !capture; }

  LaneId id;
  bool pinned;                 // of a capture
  Capture* capture = nullptr;  // that records this lane now
  Lane* redirect = nullptr;    // while it does: the capture's own lane, which serves this one
  FreeIndex index;
};

class Tlsf {
 public:
  // `delay`: see Slab. Blocks get `owner`.
  Tlsf(Owner* owner, std::size_t granule, std::size_t delay);

  std::size_t granule() const { return granule_; }
  Lane* clean() { return &clean_; }
  const Lane* clean() const { return &clean_; }

  // Bytes of memory between the first and the last granule in it become one free, clean block.
  Chunk* add(void* memory, std::size_t bytes, std::size_t kept);
  // A chunk that goes on for so many bytes more, free and clean.
  void lengthen(Chunk* chunk, std::size_t bytes);
  // What is free at its end, that the lane may use and that would be one with what lengthens it.
  std::size_t tail(const Chunk& chunk, const Lane* lane) const;
  // Without the chunks that go, all of whose blocks are free; each of them to use().
  template <class Goes, class Use>
  void remove(const Goes& goes, const Use& use) {
    auto end = chunks_.begin();
    for (auto& chunk : chunks_) {
      if (!goes(*chunk)) {
        *end++ = std::move(chunk);
        continue;
      }
      clear(chunk.get());
      use(std::move(chunk));
    }
    chunks_.erase(end, chunks_.end());
  }
  // Cuts whole free pages out of chunks, beyond what is kept, and appends them; what is behind becomes a chunk of its own.
  void carve(std::size_t page, std::vector<std::unique_ptr<Chunk>>* removed);

  // A free block of at least this size in the lane; `exact` as in FreeIndex::find_exact.
  Block* find(const Lane& lane, std::size_t size, std::size_t alignment, bool exact) const {
    if (exact) return lane.index.find_exact(size, alignment);
    return lane.index.find(size + (alignment - granule_));  // room to start at a multiple of the alignment
  }
  // Cuts `size` bytes out of a free block, aligned, live on `lane`. What is left stays free on the lane it was on.
  Block* take(Block* block, std::size_t size, std::size_t alignment, Lane* lane);
  // Frees a block on its lane and coalesces it.
  void give(Block* block);
  // Makes one free block out of neighbours free on different lanes, when that gives `size` bytes, aligned. Appends the
  // lanes it joined. Looks at every block. `spares`: not those of a lane that is being recorded.
  Block* join(std::size_t size, std::size_t alignment, bool spares, std::vector<LaneId>* lanes);
  // Every free block of a lane that is done becomes clean, and coalesces.
  template <class Done>
  void settle(const Done& done) {
    for (const auto& chunk : chunks_)
      for (Block* block = chunk->first; block; block = block->after)
        if (block->state == State::free && block->lane != &clean_ && done(*block->lane)) cleanse(block);
    coalesce_all();
  }
  // All that may be; after the end of a capture.
  void coalesce_all();
  // What is free on `from` becomes clean, what is in use goes to `to`.
  void move(Lane* from, Lane* to);

  const std::vector<std::unique_ptr<Chunk>>& chunks() const { return chunks_; }
  std::size_t free_bytes() const { return free_bytes_; }
  std::size_t free_blocks() const { return free_blocks_; }
  // How much of a chunk blocks may use.
  static std::size_t usable(const Chunk& chunk, std::size_t granule);

  // The first violation, or "". `indexed_*`: what all the lanes' indices hold.
  std::string check(std::size_t indexed_blocks, std::size_t indexed_bytes) const;

 private:
  void link(Block* block);
  void unlink(Block* block);
  Block* split(Block* block, std::size_t size);
  void absorb(Block* block, Block* after);
  [[gnu::noinline]] Block* cut(Block* block, std::size_t size, std::size_t alignment, Lane* lane);
  [[gnu::noinline]] Block* renew(Block* old);
  void cleanse(Block* block);
  [[gnu::noinline]] void coalesce(Block* block, bool joins_before, bool joins_after);
  void replace(const Block* block, Block* by) { (block->before ? block->before->after : block->chunk->first) = by; }
  void precede(Block* block, Block* after) { (after ? after->before : block->chunk->last) = block; }
  void clear(Chunk* chunk);
  template <class Use>
  static void each_hole(const Chunk& chunk, std::size_t page, const Use& use);
  void cut_out(Chunk* chunk, Block* block, std::uintptr_t first, std::uintptr_t last, Chunk* hole, Chunk* behind);
  bool coalesces(const Block* block, const Lane* lane) const {
    return block && block->state == State::free && (block->lane == lane || (block->lane == &clean_ && lane->mixes()));
  }
  std::string check_chunk(const Chunk& chunk, std::size_t* nodes, std::size_t* blocks, std::size_t* bytes) const;

  Owner* owner_;
  std::size_t granule_;
  bool replaces_;  // a freed block gets a new node, so that the old one tells of a second free
  Slab slab_;
  Lane clean_;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::size_t free_bytes_ = 0;
  std::size_t free_blocks_ = 0;
};

}  // namespace memkit::arena
