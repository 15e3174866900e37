#include "tlsf.h"

#include <algorithm>
#include <utility>

namespace memkit::arena {

Tlsf::Tlsf(Owner* owner, std::size_t granule, std::size_t delay)
    : owner_(owner), granule_(granule), replaces_(delay > 0), slab_(delay), clean_(0, granule) {}

void Tlsf::link(Block* block) {
  block->state = State::free;
  block->lane->index.insert(block);
  free_bytes_ += block->size;
  ++free_blocks_;
}

void Tlsf::unlink(Block* block) {
  block->lane->index.remove(block);
  free_bytes_ -= block->size;
  --free_blocks_;
}

// Shortens an unlinked block and returns the rest of it, unlinked too.
Block* Tlsf::split(Block* block, std::size_t size) {
  Block* rest = slab_.take();
  rest->address = block->address + size;
  rest->size = block->size - size;
  rest->before = block;
  rest->after = block->after;
  rest->chunk = block->chunk;
  rest->lane = block->lane;
  rest->owner = owner_;
  precede(rest, rest->after);
  block->after = rest;
  block->size = size;
  return rest;
}

// The neighbour's bytes join the block; both are unlinked.
void Tlsf::absorb(Block* block, Block* after) {
  block->size += after->size;
  block->after = after->after;
  precede(block, block->after);
  slab_.give(after);
}

std::size_t Tlsf::usable(const Chunk& chunk, std::size_t granule) {
  const auto start = reinterpret_cast<std::uintptr_t>(chunk.memory), first = round_up(start, granule);
  const std::uintptr_t end = (start + chunk.bytes) & ~(granule - 1);
  return end > first ? end - first : 0;
}

Chunk* Tlsf::add(void* memory, std::size_t bytes, std::size_t kept) {
  slab_.reserve(1);
  auto chunk = std::make_unique<Chunk>();
  chunk->memory = memory;
  chunk->bytes = bytes;
  chunk->kept = kept;
  chunks_.push_back(std::move(chunk));
  Block* block = slab_.take();
  *block = Block{};
  block->address = round_up(reinterpret_cast<std::uintptr_t>(memory), granule_);
  block->size = usable(*chunks_.back(), granule_);
  block->chunk = chunks_.back().get();
  block->lane = &clean_;
  block->owner = owner_;
  block->chunk->first = block->chunk->last = block;
  link(block);
  return block->chunk;
}

void Tlsf::lengthen(Chunk* chunk, std::size_t bytes) {
  slab_.reserve(1);
  Block* before = chunk->last;
  chunk->bytes += bytes;
  const std::uintptr_t end = chunk->end() & ~(granule_ - 1);
  if (end == before->end()) return;
  Block* block = slab_.take();
  *block = Block{};
  block->address = before->end();
  block->size = end - before->end();
  block->chunk = chunk;
  block->lane = &clean_;
  block->owner = owner_;
  block->before = before;
  before->after = chunk->last = block;
  if (!coalesces(before, &clean_) && !(before->state == State::free && before->lane->mixes())) return link(block);
  unlink(before);
  absorb(before, block);
  link(before);
}

std::size_t Tlsf::tail(const Chunk& chunk, const Lane* lane) const {
  const Block* last = chunk.last;
  const bool ours = last->lane == &clean_ || (last->lane == lane && lane->mixes());
  return last->state == State::free && ours ? last->size : 0;
}

void Tlsf::clear(Chunk* chunk) {
  for (Block *block = chunk->first, *after; block; block = after) {
    after = block->after;
    unlink(block);
    slab_.give(block);
  }
  chunk->first = nullptr;
}

// Calls use(block, first, last) with each range of whole pages in free neighbours, whichever lanes they are free on, from
// `block` on. From the last to the first, and use() may take the range out.
template <class Use>
void Tlsf::each_hole(const Chunk& chunk, std::size_t page, const Use& use) {
  const auto goes = [](const Block* block) { return block && block->state == State::free && !block->lane->pinned; };
  if (chunk.moving) return;
  const std::uintptr_t floor = chunk.start() + chunk.kept;
  for (Block *block = chunk.last, *before; block; block = before) {
    const std::uintptr_t last = block->end() & ~(page - 1);
    for (before = block->before; goes(block) && goes(before); before = block->before) block = before;
    const std::uintptr_t first = block->address <= floor ? floor : round_up(block->address, page);
    if (goes(block) && first < last) use(block, first, last);
  }
}

void Tlsf::carve(std::size_t page, std::vector<std::unique_ptr<Chunk>>* removed) {
  std::size_t holes = 0;
  for (const auto& chunk : chunks_) each_hole(*chunk, page, [&](Block*, std::uintptr_t, std::uintptr_t) { ++holes; });
  if (!holes) return;
  // What can fail comes first.
  slab_.reserve(holes + 1);
  std::vector<std::unique_ptr<Chunk>> kept, spare(2 * holes);
  kept.reserve(chunks_.size() + holes);
  removed->reserve(removed->size() + holes);
  for (auto& chunk : spare) chunk = std::make_unique<Chunk>();
  for (auto& chunk : chunks_) {
    const std::size_t at = kept.size();
    each_hole(*chunk, page, [&](Block* block, std::uintptr_t first, std::uintptr_t last) {
      removed->push_back(std::move(spare.back()));
      spare.pop_back();
      cut_out(chunk.get(), block, first, last, removed->back().get(), spare.back().get());
      if (!spare.back()->first) return;
      kept.push_back(std::move(spare.back()));
      spare.pop_back();
    });
    if (chunk->first) kept.push_back(std::move(chunk));
    std::reverse(kept.begin() + std::ptrdiff_t(at), kept.end());
  }
  chunks_.swap(kept);
}

// Takes [first, last), of free neighbours from `block` on, out of a chunk, which ends there. It becomes `hole`; what comes
// after it, if anything does, `behind`.
void Tlsf::cut_out(Chunk* chunk, Block* block, std::uintptr_t first, std::uintptr_t last, Chunk* hole, Chunk* behind) {
  const auto split_at = [&](Block* at, std::uintptr_t address) {
    unlink(at);
    Block* rest = split(at, address - at->address);
    link(at);
    link(rest);
    return rest;
  };
  while (block->end() <= first) block = block->after;
  if (block->address < first) block = split_at(block, first);
  Block *const before = block->before, *after = block;
  while (after && after->address < last) {
    if (after->end() > last) split_at(after, last);
    Block* const gone = after;
    after = gone->after;
    unlink(gone);
    slab_.give(gone);
  }
  hole->memory = reinterpret_cast<void*>(first);
  hole->bytes = (after ? last : chunk->end()) - first;
  (before ? before->after : chunk->first) = nullptr;
  chunk->last = before;
  if (after) {
    behind->memory = reinterpret_cast<void*>(last);
    behind->bytes = chunk->end() - last;
    behind->first = after;
    after->before = nullptr;
    for (Block* each = after; each; each = each->after) {
      each->chunk = behind;
      behind->last = each;
      if (each->state != State::free) ++behind->used;
    }
    chunk->used -= behind->used;
  }
  chunk->bytes = first - chunk->start();
}

Block* Tlsf::take(Block* block, std::size_t size, std::size_t alignment, Lane* lane) {
  slab_.reserve(2);  // what can fail comes first
  const std::size_t rest = block->size - size;
  if ((block->address & (alignment - 1)) || !rest || !block->lane->index.same_class(block->size, rest))
    return cut(block, size, alignment, lane);
  // The rest keeps its node and its place in the list.
  Block* front = slab_.take();
  front->address = block->address;
  front->size = size;
  front->before = block->before;
  front->after = block;
  front->chunk = block->chunk;
  front->owner = owner_;
  replace(block, front);
  block->before = front;
  block->address += size;
  block->size = rest;
  free_bytes_ -= size;
  front->lane = lane;
  front->state = State::live;
  ++front->chunk->used;
  return front;
}

Block* Tlsf::cut(Block* block, std::size_t size, std::size_t alignment, Lane* lane) {
  unlink(block);
  if (const std::size_t skip = round_up(block->address, alignment) - block->address) {
    Block* rest = split(block, skip);
    link(block);
    block = rest;
  }
  if (block->size > size) link(split(block, size));
  block->lane = lane;
  block->state = State::live;
  ++block->chunk->used;
  return block;
}

void Tlsf::give(Block* block) {
  --block->chunk->used;
  if (replaces_) block = renew(block);
  Lane* lane = block->lane;
  Block *before = block->before, *after = block->after;
  const bool joins_before = coalesces(before, lane), joins_after = coalesces(after, lane);
  if (joins_before == joins_after) return coalesce(block, joins_before, joins_after);
  Block* other = joins_after ? after : before;
  const std::size_t size = other->size + block->size;
  if (other->lane != lane || !lane->index.same_class(other->size, size))
    return coalesce(block, joins_before, joins_after);
  // The neighbour keeps its place in the list.
  if (joins_after) {
    replace(block, after);
    after->before = before;
    after->address = block->address;
  } else {
    before->after = after;
    precede(before, after);
  }
  other->size = size;
  free_bytes_ += block->size;
  slab_.give(block);
}

// A node of its own for a freed block: the old one stays dead for a while.
Block* Tlsf::renew(Block* old) {
  const Block copy = *old;
  slab_.give(old);
  Block* block = slab_.take();
  *block = copy;
  replace(block, block);
  precede(block, block->after);
  return block;
}

void Tlsf::coalesce(Block* block, bool joins_before, bool joins_after) {
  Lane* lane = block->lane;
  if (Block* after = block->after; joins_after) {
    unlink(after);
    absorb(block, after);
  }
  if (Block* before = block->before; joins_before) {
    unlink(before);
    absorb(before, block);
    block = before;
    block->lane = lane;
  }
  link(block);
}

Block* Tlsf::join(std::size_t size, std::size_t alignment, bool spares, std::vector<LaneId>* lanes) {
  if (free_bytes_ < size) return nullptr;
  for (const auto& chunk : chunks_) {
    // A run of free blocks from `first` to `last`; its first block holds an aligned start.
    Block* first = nullptr;
    for (Block* last = chunk->first; last; last = last->after) {
      if (last->state != State::free || last->lane->pinned || (spares && last->lane->capture)) {
        first = nullptr;
        continue;
      }
      if (!first) first = last;
      while (first != last && round_up(first->address, alignment) >= first->end()) first = first->after;
      const std::uintptr_t start = round_up(first->address, alignment);
      if (start >= last->end() || last->end() - start < size) continue;
      // Only what is asked for changes lanes: the rest before and behind stays where it is.
      slab_.reserve(2);
      for (Block* block = first;; block = block->after) {
        if (block->lane != &clean_ && std::find(lanes->begin(), lanes->end(), block->lane->id) == lanes->end())
          lanes->push_back(block->lane->id);
        if (block == last) break;
      }
      if (start > first->address) {
        unlink(first);
        Block* rest = split(first, start - first->address);
        link(first);
        if (last == first) last = rest;
        link(rest);
        first = rest;
      }
      if (last->end() - start > size) {
        unlink(last);
        Block* rest = split(last, start + size - last->address);
        link(rest);
        link(last);
      }
      unlink(first);
      while (first->size < size) {
        unlink(first->after);
        absorb(first, first->after);
      }
      link(first);
      return first;
    }
  }
  return nullptr;
}

void Tlsf::cleanse(Block* block) {
  unlink(block);
  block->lane = &clean_;
  link(block);
}

void Tlsf::coalesce_all() {
  const auto join = [&](const Block* block, const Block* after) {
    return coalesces(after, block->lane) || (after && after->state == State::free && coalesces(block, after->lane));
  };
  for (const auto& chunk : chunks_)
    for (Block* block = chunk->first; block; block = block->after) {
      if (block->state != State::free) continue;
      while (join(block, block->after)) {
        Block* after = block->after;
        unlink(block);
        unlink(after);
        if (block->lane == &clean_) block->lane = after->lane;
        absorb(block, after);
        link(block);
      }
    }
}

void Tlsf::move(Lane* from, Lane* to) {
  for (const auto& chunk : chunks_)
    for (Block* block = chunk->first; block; block = block->after) {
      if (block->lane != from) continue;
      if (block->state == State::free)
        cleanse(block);
      else
        block->lane = to;
    }
  coalesce_all();
}

std::string Tlsf::check_chunk(const Chunk& chunk, std::size_t* nodes, std::size_t* blocks, std::size_t* bytes) const {
  std::uintptr_t address = round_up(reinterpret_cast<std::uintptr_t>(chunk.memory), granule_);
  const std::uintptr_t end = address + usable(chunk, granule_);
  std::size_t used = 0;
  const Block* before = nullptr;
  if (!chunk.first) return "a chunk without blocks";
  for (const Block* block = chunk.first; block; before = block, block = block->after) {
    ++*nodes;
    if (block->state == State::dead) return "a dead block in a chunk";
    if (block->address != address) return "a gap or an overlap between blocks";
    if (block->before != before) return "a block with the wrong neighbour before it";
    if (block->chunk != &chunk) return "a block that names another chunk";
    if (block->owner != owner_) return "a block that names another owner";
    if (!block->lane) return "a block without a lane";
    if (!block->size || block->size % granule_ || block->address % granule_)
      return "a block that is not whole granules";
    address += block->size;
    if (block->state != State::free) {
      ++used;
      if (block->front + block->requested > block->size) return "a block smaller than what was asked for";
      continue;
    }
    ++*blocks;
    *bytes += block->size;
    if (coalesces(block->before, block->lane) || coalesces(block->after, block->lane))
      return "free neighbours that were not coalesced";
  }
  if (before != chunk.last) return "a chunk that ends with another block";
  if (address != end) return "blocks that do not fill their chunk";
  if (used != chunk.used) return "a chunk with the wrong number of blocks in use";
  return "";
}

std::string Tlsf::check(std::size_t indexed_blocks, std::size_t indexed_bytes) const {
  std::size_t nodes = 0, blocks = 0, bytes = 0;
  for (const auto& chunk : chunks_)
    if (std::string wrong = check_chunk(*chunk, &nodes, &blocks, &bytes); !wrong.empty()) return wrong;
  if (blocks != free_blocks_ || bytes != free_bytes_) return "counts of what is free that differ from the chunks";
  if (blocks != indexed_blocks || bytes != indexed_bytes) return "free blocks that are in no list, or in two";
  if (nodes + slab_.dead() != slab_.made()) return "nodes lost";
  return "";
}

}  // namespace memkit::arena
