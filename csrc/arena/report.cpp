// What the arena tells about itself: numbers, holders, blocks, broken invariants.
#include <algorithm>
#include <cstdio>

#include "arena.h"
#include "capture.h"
#include "guest.h"

namespace memkit::arena {
namespace {

std::string readable(std::size_t bytes) {
  const char* const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  double value = double(bytes);
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  char text[48];
  std::snprintf(text, sizeof text, unit ? "%.2f %s" : "%.0f %s", value, units[unit]);
  return text;
}

}  // namespace

std::string Failure::text() const {
  if (reason == inherited) return "the pool was made before a fork() and belongs to the parent process";
  if (reason == asleep) return "what it has sleeps, asked for " + readable(asked);
  if (reason == closed) return "the pool is closed, asked for " + readable(asked);
  if (reason == invalid)
    return "expected a size of at most 2^62 and a power of two as alignment, got size " + std::to_string(asked);
  char percent[16];
  std::snprintf(percent, sizeof percent, "%.0f%%", 100 * fragmentation);
  std::string text = "asked for " + readable(asked);
  switch (refusal.limit) {
    case Refusal::none: break;
    case Refusal::fixed: text += ", must not grow (grow=False)"; break;
    case Refusal::max: text += ", must not grow beyond max=" + readable(max); break;
    case Refusal::available: text += ", the system has " + readable(refusal.left) + " of available memory"; break;
    case Refusal::upstream: text += ", the system refused more memory"; break;
  }
  text += "; " + readable(free) + " free, largest free block " + readable(largest_free) + " (fragmentation " + percent +
          "); " + readable(reserved) + " reserved";
  if (max != SIZE_MAX) text += " of at most " + readable(max);
  for (std::size_t i = 0; i < holders.size(); ++i)
    text += (i ? ", " : "; held by ") + (holders[i].tag.empty() ? "untagged" : holders[i].tag) + ": " +
            readable(holders[i].bytes) + " in " + std::to_string(holders[i].blocks);
  return text;
}

TagId Arena::tag(std::string_view name) {
  if (inherited()) return 0;
  std::string key(name);
  Lock lock(lock_);
  const auto [at, fresh] = tag_numbers_.emplace(key, TagId(tags_.size()));
  if (fresh) tags_.push_back({std::move(key), 0, 0});
  return at->second;
}

std::string Arena::tag_name(TagId tag) const {
  if (inherited()) return "";
  Lock lock(lock_);
  return tag < tags_.size() ? tags_[tag].name : "";
}

std::vector<std::string> Arena::tag_names() const {
  if (inherited()) return {};
  Lock lock(lock_);
  std::vector<std::string> names;
  for (const Tag& tag : tags_) names.push_back(tag.name);
  return names;
}

bool Arena::closed() const {
  if (inherited()) return true;
  Lock lock(lock_);
  return closed_;
}

Block* Arena::find(const void* data) {
  if (inherited()) return nullptr;
  Lock lock(lock_);
  if (!indexed_) {
    pointers_.reserve(stats_.live_blocks);
    for (const auto& chunk : heap_.chunks())
      for (Block* block = chunk->first; block; block = block->after)
        if (block->state == State::live) pointers_.insert(block);
    indexed_ = true;
  }
  return pointers_.find(data);
}

// What one block can serve; of captures' blocks, none.
std::size_t Arena::largest_free() const {
  std::size_t largest = 0;
  const auto look = [&](const FreeIndex& index) {
    if (const Block* block = index.largest()) largest = std::max(largest, block->size);
  };
  look(heap_.clean()->index);
  for (const auto& lane : lanes_) look(lane->index);
  return largest;
}

Stats Arena::stats() const {
  if (inherited()) return {};
  Lock lock(lock_);
  settle_recent();
  Stats stats = stats_;
  stats.hits = stats.allocations - misses_;
  stats.free_blocks = heap_.free_blocks();
  stats.free = heap_.free_bytes();
  stats.chunks = heap_.chunks().size();
  stats.largest_free = largest_free();
  if (stats.free) stats.fragmentation = 1 - double(stats.largest_free) / double(stats.free);
  return stats;
}

void Arena::reset_peaks() {
  if (inherited()) return;
  Lock lock(lock_);
  stats_.allocated_peak = stats_.allocated;
  stats_.active_peak = stats_.active;
  stats_.reserved_peak = stats_.reserved;
}

std::vector<Holder> Arena::holders(std::size_t limit) const {
  if (inherited()) return {};
  Lock lock(lock_);
  return holders_locked(limit);
}

std::vector<Holder> Arena::holders_locked(std::size_t limit) const {
  std::vector<const Tag*> tags;
  for (const Tag& tag : tags_)
    if (tag.blocks) tags.push_back(&tag);
  std::stable_sort(tags.begin(), tags.end(), [](const Tag* a, const Tag* b) { return a->bytes > b->bytes; });
  if (tags.size() > limit) tags.resize(limit);
  std::vector<Holder> holders;
  for (const Tag* tag : tags) holders.push_back({tag->name, tag->bytes, tag->blocks});
  return holders;
}

void Arena::visit(const std::function<void(const ChunkView&)>& chunk,
                  const std::function<void(const BlockView&)>& block) const {
  if (inherited()) return;
  Lock lock(lock_);
  settle_recent();
  std::vector<const Chunk*> chunks;
  for (const auto& one : heap_.chunks()) chunks.push_back(one.get());
  std::sort(chunks.begin(), chunks.end(), [](const Chunk* a, const Chunk* b) {
    return reinterpret_cast<std::uintptr_t>(a->memory) < reinterpret_cast<std::uintptr_t>(b->memory);
  });
  for (const Chunk* one : chunks) {
    if (chunk) chunk({one->memory, one->bytes, !one->kept});
    for (const Block* b = one->first; block && b; b = b->after) {
      void* const address = reinterpret_cast<void*>(b->address);
      if (b->state == State::free)
        block({address, b->size, address, 0, State::free, b->lane->id, 0, 0});
      else
        block({address, b->size, b->data(), b->requested, b->state, b->lane->id, b->tag, b->stack});
    }
  }
}

void Arena::visit_guests(const std::function<void(const BlockView&)>& block) const {
  if (inherited()) return;
  Lock lock(lock_);
  for (const Guest* guest : guests_) guest->visit(block);
}

std::vector<const void*> Arena::homes() const {
  std::vector<const void*> found;
  if (inherited()) return found;
  Lock lock(lock_);
  for (const Guest* guest : guests_)
    if (const Block* home = guest->home()) found.push_back(home->data());
  return found;
}

std::string Arena::check() const {
  if (inherited()) return "";
  Lock lock(lock_);
  settle_recent();
  std::size_t blocks = 0, bytes = 0;
  const auto count = [&](const FreeIndex& index) { return index.check(&blocks, &bytes); };
  std::string wrong = count(heap_.clean()->index);
  for (const auto& lane : lanes_)
    if (wrong.empty()) wrong = count(lane->index);
  for (const auto& capture : captures_)
    for (const auto& [lane, own] : capture->lanes)
      if (wrong.empty()) wrong = count(own->index);
  if (wrong.empty()) wrong = heap_.check(blocks, bytes);
  return wrong.empty() ? check_accounts() : wrong;
}

std::string Arena::check_accounts() const {
  std::size_t reserved = 0, usable = 0, allocated = 0, active = 0, live = 0, parked = 0, listed = 0;
  std::vector<Tag> tags(tags_.size());
  std::vector<const Lane*> lanes = {heap_.clean()};
  for (const auto& lane : lanes_) lanes.push_back(lane.get());
  for (const auto& capture : captures_)
    for (const auto& [lane, own] : capture->lanes) lanes.push_back(own.get());
  for (const auto& chunk : heap_.chunks()) {
    reserved += chunk->bytes;
    usable += Tlsf::usable(*chunk, options_.alignment);
    for (const Block* block = chunk->first; block; block = block->after) {
      if (std::find(lanes.begin(), lanes.end(), block->lane) == lanes.end()) return "a block on an unknown lane";
      if (block->state == State::free) continue;
      active += block->size;
      if (block->state == State::parked) {
        ++parked;
        continue;
      }
      ++live;
      allocated += block->requested;
      tags[block->tag].bytes += block->requested;
      ++tags[block->tag].blocks;
      if (indexed_ && pointers_.find(block->data()) != block) return "a live block that its pointer does not find";
    }
  }
  if (indexed_ && pointers_.size() != live) return "pointers of blocks that are not live";
  if (reserved != stats_.reserved) return "the reserved bytes are not the sum of the chunks";
  if (allocated != stats_.allocated) return "the allocated bytes are not the sum of the live blocks";
  if (active != stats_.active || active + heap_.free_bytes() != usable)
    return "active and free bytes are not the chunks";
  if (live != stats_.live_blocks || parked != stats_.parked_blocks)
    return "the numbers of live or parked blocks are wrong";
  if (stats_.allocations - stats_.frees != live) return "allocations less frees are not the live blocks";
  if (allocated > stats_.allocated_peak || active > stats_.active_peak || reserved > stats_.reserved_peak)
    return "a peak below its value";
  if (reserved > options_.max) return "more reserved than the maximum";
  for (std::size_t i = 0; i < tags.size(); ++i)
    if (tags[i].bytes != tags_[i].bytes || tags[i].blocks != tags_[i].blocks)
      return "a tag that holds something else: " + tags_[i].name;
  for (const auto& [ticket, head] : deferred_)
    for (const Block* block = head; block; block = block->next, ++listed)
      if (block->state != State::parked) return "a deferred block that is not parked";
  for (const auto& capture : captures_)
    for (const Block* block = capture->parked; block; block = block->next, ++listed)
      if (block->state != State::parked) return "a captured block that is not parked";
  if (marks_ ? listed > parked : listed != parked)
    return "parked blocks that nobody will release";  // marks_: see accept()
  return "";
}

}  // namespace memkit::arena
