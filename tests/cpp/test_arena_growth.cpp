// Chunks that become longer, and pages that go back out of their middle, against an upstream that knows each of them.
#include <algorithm>
#include <ctime>
#include <vector>

#include "test_arena.h"

namespace {

void test_longer() {
  auto upstream = std::make_shared<PagedUpstream>(false);
  Options options;
  options.capacity = 8 * kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  Block* first = arena->allocate({6 * kMiB}).block;
  Block* second = arena->allocate({7 * kMiB}).block;  // 2 of them are there
  CHECK(upstream->held() == 14 * kMiB && arena->stats().chunks == 1, "what is missing: %zu", upstream->held());
  CHECK(second->address == first->end(), "one behind the other");
  CHECK(arena->stats().reserved == 14 * kMiB && arena->stats().growths == 1, "counted");
  free(first);
  CHECK(arena->trim() == 0 && upstream->held() == 14 * kMiB, "the capacity stays");
  free(second);
  Block* third = arena->allocate({13 * kMiB}).block;
  CHECK(third && arena->stats().growths == 1, "what was cut is whole again");
  free(third);
  CHECK(arena->trim() == 6 * kMiB && upstream->held() == 8 * kMiB, "back to the capacity");
  CHECK(arena->trim() == 0, "once");
  CHECK_SOUND(*arena);
  Block* fourth = arena->allocate({9 * kMiB}).block;
  CHECK(fourth && upstream->held() == 10 * kMiB, "grows again: %zu", upstream->held());
  free(fourth);
}

void test_capacity_in_a_page() {
  auto upstream = std::make_shared<PagedUpstream>(false);
  Options options;
  options.capacity = 3 * kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  for (int i = 0; i < 2; ++i) {
    Block* first = arena->allocate({3 * kMiB}).block;
    Block* second = arena->allocate({2 * kMiB}).block;
    CHECK(first && second && arena->stats().reserved == 6 * kMiB, "to the end of a page");
    free(second);
    CHECK(arena->trim() == 3 * kMiB && arena->stats().reserved == 3 * kMiB, "exactly the capacity");
    free(first);
    CHECK(upstream->agrees(*arena) && arena->trim() == 0, "its page stays");
    CHECK_SOUND(*arena);
  }
}

void test_steps() {
  auto upstream = std::make_shared<PagedUpstream>(false);
  Options options;
  options.capacity = 320 * kMiB;
  options.growth = 16 * kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  Block* all = arena->allocate({320 * kMiB}).block;
  Block* one = arena->allocate({kMiB}).block;
  CHECK(upstream->held() == 336 * kMiB, "no more than `growth`: %zu", upstream->held());
  Block* large = arena->allocate({100 * kMiB}).block;
  CHECK(upstream->held() == 336 * kMiB + 86 * kMiB, "what a large one lacks: %zu", upstream->held());
  for (Block* block : {all, one, large}) free(block);
}

void test_pages_from_the_middle() {
  auto upstream = std::make_shared<PagedUpstream>(false, 30 * kMiB);
  Options options;
  options.capacity = 2 * kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  std::vector<Block*> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(arena->allocate({3 * kMiB}).block);
  CHECK(upstream->held() == 30 * kMiB && arena->stats().chunks == 1, "full");
  for (const int i : {1, 2, 5, 6, 7}) free(blocks[i]);
  // [3, 9) and [15, 24) MiB are free, and 9 of them cannot be had in one piece with the end full.
  CHECK(arena->stats().largest_free == 9 * kMiB, "holes");
  Block* large = arena->allocate({10 * kMiB}).block;
  CHECK(large && large->address >= blocks[9]->end(), "pages of the holes went to the end");
  CHECK(upstream->agrees(*arena) && arena->stats().chunks == 3, "%zu chunks", arena->stats().chunks);
  CHECK_SOUND(*arena);
  for (const int i : {0, 3, 4, 8, 9}) free(blocks[i]);
  CHECK_SOUND(*arena);
  free(large);
  arena->trim();
  CHECK(upstream->held() == 2 * kMiB && upstream->agrees(*arena), "the capacity is left: %zu", upstream->held());
}

void test_others_in_between() {
  auto upstream = std::make_shared<PagedUpstream>(false);
  Options options;
  options.capacity = 2 * kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  Block* stolen = nullptr;
  // While upstream maps: another thread takes the free end that was counted on.
  upstream->called = [&] { stolen = arena->allocate({2 * kMiB}).block; };
  Block* block = arena->allocate({3 * kMiB}).block;
  CHECK(block && stolen && block != stolen, "both have memory");
  CHECK_SOUND(*arena);
  // Another thread trims the chunk that is becoming longer.
  free(stolen);
  free(block);
  std::size_t went = 1;
  upstream->called = [&] { went = arena->trim(); };
  block = arena->allocate({arena->stats().reserved + kMiB}).block;
  CHECK(block, "it has memory, whoever trims");
  CHECK(upstream->agrees(*arena), "nothing lost; %zu trimmed", went);
  CHECK_SOUND(*arena);
  // And closes.
  free(block);
  upstream->called = [&] { arena->close(); };
  CHECK(!arena->allocate({arena->stats().reserved + kMiB}), "closed");
  CHECK(upstream->held() == 0, "all is back: %zu", upstream->held());
}

void test_what_cannot_be_longer() {
  auto upstream = std::make_shared<PagedUpstream>(false);
  upstream->refuses = true;
  Options options;
  options.capacity = 2 * kMiB;
  options.growth = 4 * kMiB;
  options.max = 20 * kMiB + 64 * kKiB;
  ArenaPtr arena = Arena::create(options, upstream);
  Block* first = arena->allocate({3 * kMiB}).block;
  CHECK(first && arena->stats().chunks == 2 && arena->stats().reserved == 6 * kMiB, "a chunk of its own");
  upstream->refuses = false;
  Block* second = arena->allocate({15 * kMiB + 32 * kKiB}).block;  // to within less than a page of the limit
  CHECK(second && arena->stats().reserved <= options.max, "up to the limit: %zu", arena->stats().reserved);
  const Allocation none = arena->allocate({2 * kMiB + 64 * kKiB});
  CHECK(!none && none.failure->refusal.limit == Refusal::max, "the limit");
  free(first);
  free(second);
  CHECK_SOUND(*arena);
}

void test_neighbours_on_several_lanes() {
  auto upstream = std::make_shared<PagedUpstream>(false);
  Options options;
  options.capacity = kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  std::vector<Block*> blocks;
  for (LaneId i = 0; i < 21; ++i) blocks.push_back(arena->allocate({kMiB, i % 3}).block);
  std::swap(blocks[10], blocks.back());
  Block* const kept = blocks.back();
  blocks.pop_back();
  for (Block* block : blocks) free(block);
  const std::size_t before = arena->stats().reserved, went = arena->trim();
  CHECK(before - went == arena->stats().reserved && arena->stats().reserved <= 3 * kMiB, "all but a page or two: %zu",
        arena->stats().reserved);
  CHECK(arena->trim() == 0, "at once");
  CHECK(upstream->agrees(*arena), "the same pages");
  CHECK_SOUND(*arena);
  free(kept);
}

void test_chunks_that_are_held() {
  auto upstream = std::make_shared<PagedUpstream>(false);
  Options options;
  options.capacity = 2 * kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  const TagId tag = arena->tag("sleeps");
  free(arena->allocate({20 * kMiB}).block);
  const std::size_t before = upstream->held();
  arena->hold();
  CHECK(arena->trim() == 0, "somebody looks");
  CHECK(!arena->serve({1}) && arena->allocate({1}).failure->reason == Failure::asleep, "nothing for anybody");
  CHECK(arena->allocate({30 * kMiB}).failure->reason == Failure::asleep && upstream->held() == before, "nor growth");
  arena->let_go(Gate::shut_for(tag));
  CHECK(!arena->serve({1, 0, tag}) && arena->allocate({1, 0, tag}).failure->reason == Failure::asleep,
        "not for the tag");
  Block* block = arena->allocate({30 * kMiB}).block;
  CHECK(block && upstream->held() > before, "for others");
  free(block);
  arena->hold();
  arena->close();
  CHECK(upstream->held() > before, "not even then");
  CHECK(arena->allocate({1}).failure->reason == Failure::closed, "closed");
  arena->let_go(Gate::shut());
  CHECK(upstream->held() == 0, "all is back: %zu", upstream->held());
}

// While memory comes from upstream: nobody may have it, nor what others have freed, and nothing of it is lost.
void test_a_gate_that_shuts_in_between() {
  Options options;
  options.capacity = 2 * kMiB;
  options.growth = 4 * kMiB;
  for (const bool refuses : {false, true}) {
    auto upstream = std::make_shared<PagedUpstream>(false);
    upstream->refuses = refuses;
    ArenaPtr arena = Arena::create(options, upstream);
    Block* first = arena->allocate({2 * kMiB}).block;
    upstream->called = [&] {
      arena->hold();
      free(first);
    };
    const Allocation none = arena->allocate({2 * kMiB});
    CHECK(!none && none.failure->reason == Failure::asleep, "what was freed meanwhile is nobody's");
    CHECK(arena->stats().growths <= 1 && arena->stats().failures == 0, "one try: %zu", arena->stats().growths);
    CHECK_SOUND(*arena);
    arena->let_go(Gate::open());
    const std::size_t growths = arena->stats().growths;
    first = arena->allocate({2 * kMiB}).block;
    CHECK(first && arena->stats().growths == growths && arena->stats().hits == arena->stats().allocations,
          "it is there");
    free(first);
    CHECK(upstream->agrees(*arena), "nothing lost");
  }
}

// What is joined of several lanes' goes to who waits for all of them.
void test_lanes_behind_a_gate() {
  auto upstream = std::make_shared<PagedUpstream>(false, 2 * kMiB);
  Options options;
  options.capacity = 2 * kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  Block *first = arena->allocate({kMiB, 1}).block, *second = arena->allocate({kMiB, 2}).block;
  upstream->called = [&] {
    arena->hold();
    free(first);
    free(second);
  };
  CHECK(arena->allocate({2 * kMiB, 3}).failure->reason == Failure::asleep, "nothing yet");
  arena->let_go(Gate::open());
  const Allocation both = arena->allocate({2 * kMiB, 3});
  CHECK(both && both.waits.size() == 2, "%zu lanes", both.waits.size());
  if (both) free(both.block);
}

// Seconds of this process until the pages of so many holes are back, and after that the chunks that they left.
double seconds_to_trim(std::size_t holes) {
  auto upstream = std::make_shared<PagedUpstream>(false);
  ArenaPtr arena = Arena::create({}, upstream);
  std::vector<Block*> blocks;
  for (std::size_t i = 0; i < 2 * holes; ++i) blocks.push_back(arena->allocate({kPage, 0, 0, 0, kPage}).block);
  double seconds = 0;
  for (const std::size_t odd : {1, 0}) {
    for (std::size_t i = odd; i < 2 * holes; i += 2) free(blocks[i]);
    const std::clock_t start = std::clock();
    const std::size_t went = arena->trim();
    seconds += static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    CHECK(went >= holes * kPage, "%zu bytes of %zu holes", went, holes);
    CHECK_SOUND(*arena);
  }
  CHECK(upstream->agrees(*arena), "the same pages");
  return seconds;
}

void test_many_holes() {
  double few = 1e9, many = 1e9;
  for (int i = 0; i < 3; ++i) {
    few = std::min(few, seconds_to_trim(2000));
    many = std::min(many, seconds_to_trim(32000));
  }
  CHECK(many < 64 * few, "16 times the holes, %.0f times the time", many / few);  // their square would be 256
}

void test_random() {
  std::mt19937_64 random(7);
  for (int round = 0; round < 30; ++round) {
    auto upstream = std::make_shared<PagedUpstream>(false, (64 + random() % 64) * kMiB);
    Options options;
    options.capacity = (random() % 5) * kMiB + 64;
    options.growth = kMiB << random() % 6;
    if (random() % 3 == 0) options.max = 60 * kMiB + random() % kMiB;
    ArenaPtr arena = Arena::create(options, upstream);
    std::vector<Block*> live;
    for (int step = 0; step < 1500; ++step) {
      if (random() % 5 < 3 && live.size() < 60) {
        Request request{random() % (kMiB << random() % 4)};
        request.lane = random() % 3;
        if (random() % 4 == 0) request.alignment = std::size_t(64) << random() % 16;
        if (Block* block = arena->allocate(request).block) live.push_back(block);
      } else if (!live.empty()) {
        std::swap(live[random() % live.size()], live.back());
        free(live.back());
        live.pop_back();
      }
      if (random() % 50 == 0) arena->trim();
      if (step % 10 == 0) {
        CHECK_SOUND(*arena);
        CHECK(upstream->agrees(*arena), "pages and chunks differ");
        CHECK(arena->stats().reserved <= options.max, "beyond max");
      }
    }
    if (round % 2) arena->close();
    for (Block* block : live) free(block);
  }
}

}  // namespace

int main() {
  test_longer();
  test_capacity_in_a_page();
  test_steps();
  test_pages_from_the_middle();
  test_others_in_between();
  test_what_cannot_be_longer();
  test_neighbours_on_several_lanes();
  test_chunks_that_are_held();
  test_a_gate_that_shuts_in_between();
  test_lanes_behind_a_gate();
  test_many_holes();
  test_random();
  return finish("test_arena_growth");
}
