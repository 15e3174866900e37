// Lanes, deferred blocks and captures: who may have which memory, and what must be waited for. Nobody gets bytes that
// another lane freed without being told so, and nobody gets bytes of a capture.
#include <algorithm>
#include <set>
#include <vector>

#include "test_arena.h"

namespace {

ArenaPtr make(std::size_t capacity, bool grow = false, bool debug = false) {
  Options options;
  options.capacity = capacity;
  options.grow = grow;
  options.growth = capacity;
  options.debug = debug;
  return Arena::create(options, std::make_shared<TestUpstream>(false));
}

using Lanes = std::vector<LaneId>;

void test_order() {
  ArenaPtr arena = make(64 * kKiB);
  Block* first = arena->allocate({16 * kKiB, 1}).block;
  Block* second = arena->allocate({16 * kKiB, 2}).block;
  Block* guard = arena->allocate({64, 1}).block;
  const void* place = first->data();
  free(first);
  Allocation other = arena->allocate({16 * kKiB, 2});
  CHECK(other.waits.empty() && other.block->data() != place, "clean memory before another lane's");
  Allocation same = arena->allocate({16 * kKiB, 1});
  CHECK(same.waits.empty() && same.block->data() == place, "one's own memory at once");
  free(same.block);
  Allocation all = arena->allocate({15 * kKiB, 3});
  CHECK(all && all.waits.empty(), "the clean rest");
  Allocation taken = arena->allocate({8 * kKiB, 3});
  CHECK(taken.waits == Lanes{1} && taken.block->data() == place, "then another lane's, to be waited for");
  Allocation rest = arena->allocate({8 * kKiB, 1});
  CHECK(rest.waits.empty(), "what was left is still lane 1's");
  free(taken.block);
  Allocation again = arena->allocate({8 * kKiB, 3});
  CHECK(again.waits.empty() && again.block->data() == place, "what was waited for is lane 3's");
  // Neighbours freed on several lanes serve one request.
  free(again.block), free(rest.block), free(second);
  CHECK(arena->stats().largest_free == 16 * kKiB, "in pieces");
  Allocation joined = arena->allocate({30 * kKiB, 2});
  std::sort(joined.waits.begin(), joined.waits.end());
  CHECK(joined && joined.waits == (Lanes{1, 3}) && joined.block->data() == place, "joined");
  CHECK_SOUND(*arena);
  free(joined.block);
  Allocation left = arena->allocate({2 * kKiB, 9});
  CHECK(left.waits == Lanes{2}, "the rest of the last piece");
  for (Block* block : {guard, other.block, all.block, left.block}) free(block);
  CHECK(arena->stats().free_blocks > 1, "several lanes");
  arena->settle(arena->stats().frees);
  CHECK_SOUND(*arena);
  Allocation clean = arena->allocate({64 * kKiB, 7});
  CHECK(clean && clean.waits.empty(), "all clean");
  free(clean.block);
}

void test_defer() {
  ArenaPtr arena = make(4 * kKiB);
  Block* one = arena->allocate({2 * kKiB}).block;
  Block* two = arena->allocate({2 * kKiB}).block;
  CHECK(arena->defer(one, 5) == Freed::ok && arena->defer(one, 5) == Freed::double_free, "once");
  CHECK(free(one) == Freed::double_free, "it was given back");
  CHECK(arena->defer(two, 6) == Freed::ok, "deferred");
  Stats stats = arena->stats();
  CHECK(stats.allocated == 0 && stats.active == 4 * kKiB && stats.parked_blocks == 2, "%zu", stats.active);
  CHECK_SOUND(*arena);
  CHECK(!arena->allocate({64}) && arena->release_deferred(7) == 0, "not before its ticket");
  CHECK(arena->release_deferred(5) == 1, "its ticket");
  Allocation after = arena->allocate({2 * kKiB});
  CHECK(after, "after it");
  CHECK(arena->release_deferred(5) == 0, "once");
  CHECK_SOUND(*arena);
  free(after.block);
  CHECK(arena->release_deferred(6) == 1 && arena->stats().active == 0, "all back");
}

void test_deferred_arena_ends() {
  auto upstream = std::make_shared<TestUpstream>(false);
  Options options;
  options.capacity = 4 * kKiB;
  ArenaPtr owner = Arena::create(options, upstream);
  Arena* arena = owner.get();
  arena->defer(owner->allocate({1}).block, 1);
  owner.reset();
  CHECK(upstream->held() == 4 * kKiB, "parked");
  arena->release_deferred(1);
  CHECK(upstream->held() == 0, "the last one");
}

void test_capture() {
  ArenaPtr arena = make(64 * kKiB, true);
  Block* before = arena->allocate({kKiB, 1}).block;
  CHECK(arena->pin(77, 1) && arena->pin(77, 1) && !arena->pin(78, 1), "one capture a lane");
  Block* inside = arena->allocate({kKiB, 1}).block;
  const void* place = inside->data();
  Block* elsewhere = arena->allocate({kKiB, 2}).block;
  free(inside);
  Block* reused = arena->allocate({kKiB, 1}).block;
  CHECK(reused->data() == place, "a capture reuses its own");
  Block* kept = arena->allocate({3 * kKiB, 1}).block;
  free(before);  // the graph may read it
  free(elsewhere);
  free(kept);
  CHECK(arena->stats().parked_blocks == 1, "parked");
  CHECK_SOUND(*arena);
  arena->seal(77);
  free(reused);
  std::set<const void*> seen;
  std::vector<Block*> all;
  while (arena->stats().growths == 0) {
    all.push_back(arena->allocate({kKiB, 1}).block);
    seen.insert(all.back()->data());
  }
  CHECK(all.size() >= 58 && !seen.count(place), "general use stays out of a capture: %zu", all.size());
  CHECK_SOUND(*arena);
  CHECK(arena->pin(77, 1), "captured again");
  all.push_back(arena->allocate({kKiB, 1}).block);
  CHECK(all.back()->data() == place, "with its own memory");
  arena->unpin(77, arena->stats().frees);
  CHECK_SOUND(*arena);
  CHECK(arena->stats().parked_blocks == 0, "unpinned");
  for (Block* block : all) free(block);
  arena->unpin(77, arena->stats().frees);  // nothing to do
  CHECK_SOUND(*arena);
  CHECK(arena->stats().active == 0, "all back");
}

void test_recorded_lanes_lend_nothing() {
  ArenaPtr arena = make(64 * kKiB, false);
  std::vector<Block*> all;
  for (int i = 0; i < 64; ++i) all.push_back(arena->allocate({kKiB, i % 2 && i < 32 ? LaneId(1) : LaneId(2)}).block);
  for (Block* block : all) free(block);
  CHECK(arena->pin(5, 1), "pinned");
  CHECK(arena->idle_lanes() == Lanes{2}, "one can be asked");
  std::vector<Block*> got;
  while (Block* block = arena->allocate({kKiB, 2}).block) got.push_back(block);
  CHECK(got.size() == 48, "its own alone: %zu", got.size());
  for (Block* block : got) free(block);
  CHECK(!arena->allocate({40 * kKiB, 3}), "nor in pieces");
  Allocation told = arena->allocate({kKiB, 1});
  CHECK(told.waits == Lanes{2}, "a capture cannot wait, and is told");
  const void* place = told.block->data();
  free(told.block);
  const Lanes done{2};
  CHECK(!arena->settle(arena->stats().frees - 1, &done) && arena->settle(arena->stats().frees, &done), "settled");
  CHECK_SOUND(*arena);
  Allocation again = arena->allocate({kKiB, 1}), clean = arena->allocate({30 * kKiB, 1});
  CHECK(again.block->data() == place && again.waits.empty(), "its own");
  free(again.block);
  CHECK(clean && clean.waits.empty(), "needs not");
  free(clean.block);
  arena->unpin(5, arena->stats().frees);
}

void test_nothing_goes_upstream_while_a_capture_records() {
  auto upstream = std::make_shared<TestUpstream>(false);
  Options options;
  options.growth = kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  free(arena->allocate({kKiB, 2}).block);
  CHECK(arena->pin(1, 1), "pinned");
  CHECK(arena->trim() == 0, "a release waits for the device");
  arena->close();
  CHECK(upstream->held() == kMiB, "when closed, too");
  arena->seal(1);
  CHECK(upstream->held() == 0, "then");
  arena->unpin(1, arena->stats().frees);
}

void test_capture_keeps_chunks() {
  auto upstream = std::make_shared<TestUpstream>(false);
  Options options;
  options.growth = kMiB;
  ArenaPtr owner = Arena::create(options, upstream);
  Arena* arena = owner.get();
  arena->pin(1, 0);
  free(arena->allocate({kKiB}).block);
  arena->seal(1);
  CHECK(arena->trim() == 0 && upstream->held() == kMiB, "a graph writes there");
  CHECK(!arena->unpin(1, arena->stats().frees - 1), "freed since");
  owner.reset();
  CHECK(upstream->held() == kMiB, "even when the arena's pointer is gone");
  arena->unpin(1, arena->stats().frees);
  CHECK(upstream->held() == 0, "the graph is gone");
}

// Bytes remember the lane that used them last (0: none). Whoever gets them is that lane, or is told to wait for it.
void test_random(bool debug, int operations) {
  constexpr std::size_t kBytes = 256 * kKiB, kUnit = 64;
  ArenaPtr arena = make(kBytes, false, debug);
  struct Cell {
    LaneId lane = 0;
    CaptureId capture = 0;
    bool used = false;
  };
  std::vector<Cell> cells(kBytes / kUnit);
  const std::uintptr_t base = [&] {
    std::uintptr_t address = 0;
    arena->visit([&](const ChunkView& chunk) { address = reinterpret_cast<std::uintptr_t>(chunk.address); },
                 [](const BlockView&) {});
    return address;
  }();
  const auto each = [&](std::uintptr_t address, std::size_t size, auto&& f) {
    for (std::size_t i = (address - base) / kUnit; i < (address - base + size) / kUnit; ++i) f(cells[i]);
  };
  struct Live {
    Block* block;
    LaneId lane;
    CaptureId capture;
  };
  struct Range {
    std::uintptr_t address;
    std::size_t size;
  };
  std::vector<Live> live;
  std::map<Ticket, std::vector<Range>> tickets;
  CaptureId recording = 0, sealed = 0, next_capture = 1;  // always of lane 1
  Ticket next_ticket = 1;
  std::vector<Range> parked;
  std::mt19937_64 random(11 + debug);
  int served = 0, waited = 0;
  for (int i = 0; i < operations; ++i) {
    const unsigned choice = random() % 1000;
    if (choice < 500) {
      const LaneId lane = 1 + random() % 4;
      Allocation got = arena->allocate({random() % (random() % 16 ? 2000 : 60000), lane, 0, 0,
                                        random() % 8 ? 0 : std::size_t(1) << (random() % 14)});
      if (!got) continue;
      ++served;
      waited += !got.waits.empty();
      const CaptureId capture = lane == 1 ? recording : 0;
      CHECK(!recording || lane == 1 || !std::count(got.waits.begin(), got.waits.end(), 1),
            "nobody can wait for lane 1");
      each(got.block->address, got.block->size, [&](Cell& cell) {
        CHECK(!cell.used, "in use, or parked");
        CHECK(!cell.capture || cell.capture == capture, "of a capture");
        const bool own = cell.lane == 0 || (capture ? cell.capture == capture : cell.lane == lane);
        CHECK(own || std::count(got.waits.begin(), got.waits.end(), cell.lane), "lane %zu, unawaited",
              std::size_t(cell.lane));
        cell = {lane, capture, true};
      });
      live.push_back({got.block, lane, capture});
    } else if (choice < 985) {
      if (live.empty()) continue;
      Live& at = live[random() % live.size()];
      const Live one = at;
      at = live.back();
      live.pop_back();
      const Range range{one.block->address, one.block->size};
      if (random() % 8 == 0) {
        CHECK(arena->defer(one.block, next_ticket) == Freed::ok, "deferred");
        tickets[next_ticket].push_back(range);
        next_ticket += random() % 2;
      } else {
        CHECK(free(one.block) == Freed::ok, "freed");
        if (one.lane == 1 && recording && one.capture != recording && one.capture == 0)
          parked.push_back(range);
        else
          each(range.address, range.size, [](Cell& cell) { cell.used = false; });
      }
    } else if (choice < 990) {
      // Tickets are released outside of recordings here, so that nothing deferred is parked a second time.
      if (recording) continue;
      for (const auto& [ticket, ranges] : tickets) {
        CHECK(arena->release_deferred(ticket) == ranges.size(), "ticket");
        for (const Range& range : ranges) each(range.address, range.size, [](Cell& cell) { cell.used = false; });
      }
      tickets.clear();
    } else if (choice < 993) {
      const Lanes some{1 + random() % 4, 1 + random() % 4};
      const bool all = random() % 2;
      CHECK(!arena->settle(arena->stats().frees + 1), "freed since");
      CHECK(arena->settle(arena->stats().frees, all ? nullptr : &some), "settled");
      for (Cell& cell : cells)
        if (!cell.used && !cell.capture && (all || std::count(some.begin(), some.end(), cell.lane))) cell.lane = 0;
    } else if (choice < 996) {
      if (!recording && !sealed) CHECK(arena->pin(recording = next_capture++, 1), "pinned");
    } else if (choice < 998) {
      if (recording) arena->seal(sealed = recording), recording = 0;
    } else if (sealed) {
      arena->unpin(sealed, arena->stats().frees);
      for (const Range& range : parked) each(range.address, range.size, [](Cell& cell) { cell.used = false; });
      parked.clear();
      for (Cell& cell : cells)
        if (cell.capture == sealed) {
          cell.capture = 0;
          if (!cell.used) cell.lane = 0;
        }
      for (Live& one : live)
        if (one.capture == sealed) one.capture = 0;
      sealed = 0;
    }
    if (i % (operations / 400) == 0) CHECK_SOUND(*arena);
  }
  CHECK(served > operations / 10 && waited > 0, "%d served, %d waited", served, waited);
  if (recording) arena->seal(sealed = recording);
  arena->unpin(sealed, arena->stats().frees);
  for (const auto& [ticket, ranges] : tickets) arena->release_deferred(ticket);
  for (const Live& one : live) free(one.block);
  arena->settle(arena->stats().frees);
  CHECK_SOUND(*arena);
  CHECK(arena->stats().free_blocks == 1 && arena->stats().active == 0, "all back");
}

}  // namespace

int main() {
  test_order();
  test_defer();
  test_deferred_arena_ends();
  test_capture();
  test_recorded_lanes_lend_nothing();
  test_nothing_goes_upstream_while_a_capture_records();
  test_capture_keeps_chunks();
  test_random(false, 100000);
  test_random(true, 100000);
  return finish("test_arena_lanes");
}
