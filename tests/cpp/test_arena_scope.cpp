// Scopes and replays: what is handed out never overlaps what is live, marks nest, what outlives its mark is named and
// stays valid, and a step that differs from its plan is served all the same.
#include <cstring>
#include <string>
#include <vector>

#include "../../csrc/arena/replay.h"
#include "../../csrc/arena/scope.h"
#include "test_arena.h"

namespace {

ArenaPtr make(std::size_t capacity, bool grow = true, std::shared_ptr<Upstream> upstream = nullptr) {
  Options options;
  options.capacity = capacity;
  options.grow = grow;
  options.growth = kMiB;
  return Arena::create(options, upstream ? upstream : std::make_shared<TestUpstream>(false));
}

class Ranges {
 public:
  void add(const Block* block) {
    const std::size_t begin = block->address, end = begin + std::max<std::size_t>(block->requested, 1);
    const auto after = live_.lower_bound(begin);
    CHECK(
        (after == live_.end() || end <= after->first) && (after == live_.begin() || std::prev(after)->second <= begin),
        "overlap at %zx", begin);
    live_[begin] = end;
  }
  void remove(const Block* block) { live_.erase(block->address); }

 private:
  std::map<std::size_t, std::size_t> live_;
};

void test_marks() {
  ArenaPtr arena = make(kMiB, false);
  const TagId lost = arena->tag("lost");
  auto scope = Scope::create(*arena, 64 * kKiB);
  const auto outer = scope->mark();
  Block* first = scope->allocate({100}).block;
  const auto inner = scope->mark();
  Block* second = scope->allocate({100, 0, lost, 42}).block;
  CHECK(second->address == first->address + 128 && second->address % 64 == 0, "bumped");
  Block* wide = scope->allocate({1, 0, 0, 0, 4096}).block;
  CHECK(wide->address % 4096 == 0 && scope->live() == 3, "aligned");
  CHECK(!scope->release(outer).in_order, "an inner mark is open");
  free(wide);
  const Scope::Released held = scope->release(inner);
  CHECK(!held && held.in_order && held.held.size() == 1 && held.held[0].tag == lost && held.held[0].bytes == 100 &&
            held.held[0].stack == 42,
        "named");
  Block* third = scope->allocate({100}).block;
  CHECK(third->address > second->address, "nothing was freed");
  CHECK(free(second) == Freed::ok && free(second) == Freed::double_free, "twice");
  free(third), free(first);
  CHECK(scope->release(outer) && scope->live() == 0, "all dead");
  const auto again = scope->mark();
  Block* zero = scope->allocate({0}).block;
  Block* zero_too = scope->allocate({0}).block;
  CHECK(zero->address == first->address && zero_too->address != zero->address, "from the start; empty blocks differ");
  free(zero), free(zero_too);
  CHECK(scope->release(again), "released");
  CHECK(scope->allocate({2 * kMiB}).failure->asked == 2 * kMiB, "the arena's answer");
  CHECK(scope->allocate({1, 0, 0, 0, 3}).failure->reason == Failure::invalid, "nonsense");
  CHECK(scope->allocate({SIZE_MAX}).failure->reason == Failure::invalid, "nonsense");
  CHECK_SOUND(*arena);
}

void test_regions() {
  ArenaPtr arena = make(0);
  auto scope = Scope::create(*arena, 4 * kKiB);
  for (int step = 0; step < 5; ++step) {
    const auto mark = scope->mark();
    std::vector<Block*> blocks;
    for (int i = 0; i < 100; ++i) blocks.push_back(scope->allocate({std::size_t(i) * 100}).block);
    for (Block* block : blocks) free(block);
    CHECK(scope->release(mark), "released");
    if (step) CHECK(arena->stats().live_blocks == 1, "a single region from the second step on");
  }
  CHECK_SOUND(*arena);
}

void test_scope_outlived() {
  auto upstream = std::make_shared<TestUpstream>(true);
  ArenaPtr arena = make(kMiB, false, upstream);
  auto scope = Scope::create(*arena, 64 * kKiB);
  const auto mark = scope->mark();
  Block* block = scope->allocate({100}).block;
  CHECK(!scope->release(mark), "held");
  scope.reset();
  arena.reset();
  std::memset(block->data(), 1, 100);
  CHECK(upstream->held() == kMiB, "valid");
  free(block);  // and the scope, and the arena
  CHECK(upstream->held() == 0, "%zu", upstream->held());
}

void test_random_scopes() {
  ArenaPtr arena = make(0);
  auto scope = Scope::create(*arena, 16 * kKiB);
  std::mt19937_64 random(3);
  struct Level {
    Scope::Mark mark;
    std::vector<Block*> live;
  };
  std::vector<Level> levels(1);
  Ranges ranges;
  std::size_t kept = 0;
  for (int i = 0; i < 200000; ++i) {
    const unsigned choice = random() % 100;
    Level& top = levels.back();
    if (choice < 3 && levels.size() < 8) {
      levels.push_back({scope->mark(), {}});
    } else if (choice < 7 && levels.size() > 1) {
      if (random() % 4) {
        for (Block* block : top.live) ranges.remove(block), free(block);
        top.live.clear();
      }
      const auto released = scope->release(top.mark);
      CHECK(released.in_order && released.held.size() == top.live.size(), "%zu held of %zu", released.held.size(),
            top.live.size());
      kept += released.held.size();
      std::vector<Block*> rest = std::move(top.live);
      levels.pop_back();
      levels.back().live.insert(levels.back().live.end(), rest.begin(), rest.end());
    } else if (choice < 60) {
      Block* block = scope->allocate({random() % (random() % 50 ? 600 : 40000)}).block;
      ranges.add(block);
      top.live.push_back(block);
    } else if (Level& any = levels[random() % levels.size()]; !any.live.empty()) {
      Block*& block = any.live[random() % any.live.size()];
      ranges.remove(block);
      CHECK(free(block) == Freed::ok, "freed");
      block = any.live.back();
      any.live.pop_back();
    }
  }
  CHECK(kept > 0, "some outlived their mark");
  CHECK_SOUND(*arena);
  for (Level& level : levels)
    for (Block* block : level.live) free(block);
  scope.reset();
  CHECK(arena->stats().live_blocks == 0, "%zu regions", arena->stats().live_blocks);
}

void test_plan() {
  std::string why;
  CHECK(!Plan::make({{10, 0}, {10, 60}}, 128, 64, &why) && why.find("slot 1 at a multiple of 64") != std::string::npos,
        "%s", why.c_str());
  CHECK(!Plan::make({{10, 128}}, 128, 64, &why) && why.find("slot 0 within 128 bytes") != std::string::npos, "%s",
        why.c_str());
  CHECK(!Plan::make({{SIZE_MAX, 64}}, 128, 64, &why), "no overflow");
  auto plan = Plan::make({{64, 0}, {64, 64}, {128, 0}, {64, 64}, {64, 0}, {192, 0}}, 192, 64, &why);
  const auto below = [&](std::size_t i) { return std::vector<std::uint32_t>(plan->begin(i), plan->end(i)); };
  using Slots = std::vector<std::uint32_t>;
  CHECK(below(0) == Slots{} && below(1) == Slots{} && below(2) == (Slots{0, 1}) && below(3) == Slots{2}, "last users");
  CHECK(below(4) == Slots{2} && below(5) == (Slots{3, 4}), "last users");
}

void test_replay() {
  ArenaPtr arena = make(kMiB);
  auto plan = Plan::make({{100, 0}, {50, 128}, {100, 0}, {300, 0}}, 512, 64, nullptr);
  Allocation base;
  auto replay = Replay::create(*arena, plan, 0, 0, &base);
  const std::uintptr_t start = base.block->address;
  for (int step = 0; step < 3; ++step) {
    replay->rewind();
    Block* a = replay->allocate({100}).block;
    Block* b = replay->allocate({50}).block;
    free(a);
    Block* c = replay->allocate({100}).block;
    CHECK(a->address == start && b->address == start + 128 && c->address == start, "as planned");
    free(b), free(c);
    CHECK(free(c) == Freed::double_free, "twice");
    Block* d = replay->allocate({300}).block;
    CHECK(d->address == start, "as planned");
    free(d);
  }
  CHECK(replay->counts().served == 4 && replay->counts().fell_back == 0, "%zu", replay->counts().served);
  replay->rewind();
  Block* a = replay->allocate({100}).block;
  Block* other = replay->allocate({51}).block;
  CHECK(other->owner == arena.get(), "another size");
  Block* c = replay->allocate({100}).block;  // a is live
  CHECK(c->owner == arena.get(), "overlap");
  const Replay::Counts counts = replay->counts();
  CHECK(counts.fell_back == 2 && counts.first.reason == Replay::Mismatch::size && counts.first.index == 1 &&
            counts.first.expected == 50 && counts.first.got == 51,
        "the first mismatch");
  Block* d = replay->allocate({300}).block;  // what lay under slot 2 is live, slot 2 was skipped
  CHECK(d->owner == arena.get(), "overlap, found behind a skipped slot");
  Block* e = replay->allocate({1}).block;
  CHECK(e->owner == arena.get() && replay->position() == 4, "after the plan's end");
  replay->rewind();
  Block* again = replay->allocate({100}).block;
  CHECK(again->owner == arena.get(), "its slot is live since the last step");
  Block* b = replay->allocate({50}).block;
  CHECK(b->address == start + 128, "this one is free");
  for (Block* block : {a, other, c, d, e, again, b}) CHECK(free(block) == Freed::ok, "freed");
  Block* wide = replay->allocate({100, 0, 0, 0, 4096}).block;
  CHECK(wide->owner == arena.get() && wide->address % 4096 == 0, "an alignment that was not planned");
  free(wide);
  CHECK_SOUND(*arena);
  replay->rewind();
  Block* last = replay->allocate({100}).block;
  CHECK(last->address == start, "served");
  replay.reset();
  CHECK(arena->stats().live_blocks == 1, "its memory stays");
  free(last);
  CHECK(arena->stats().live_blocks == 0, "and goes");

  auto empty = Replay::create(*arena, Plan::make({{0, 0}, {0, 0}}, 64, 64, nullptr), 0, 0, &base);
  Block* zero = empty->allocate({0}).block;
  Block* zero_too = empty->allocate({0}).block;
  CHECK(zero->owner == empty.get() && zero_too->owner == empty.get(), "empty slots are in nobody's way");
  empty->rewind();
  Block* elsewhere = empty->allocate({0}).block;
  CHECK(elsewhere->owner == arena.get(), "its node is in use");
  for (Block* block : {zero, zero_too, elsewhere}) CHECK(free(block) == Freed::ok, "freed");

  // One too many, one of another size, two of other sizes: the rest of the step goes by the plan.
  auto apart = Plan::make({{100, 0}, {200, 128}, {300, 384}, {400, 704}}, 1152, 64, nullptr);
  for (const std::vector<std::size_t>& sizes : std::vector<std::vector<std::size_t>>{
           {100, 7, 200, 300, 400}, {100, 201, 300, 400}, {7, 100, 200, 8, 300, 400}, {100, 7, 8, 400}}) {
    auto stray = Replay::create(*arena, apart, 0, 0, &base);
    std::vector<Block*> blocks;
    for (const std::size_t size : sizes) {
      blocks.push_back(stray->allocate({size}).block);
      const bool planned = size % 100 == 0;
      CHECK((blocks.back()->owner == stray.get()) == planned, "%zu", size);
    }
    CHECK(stray->position() == 4, "%zu", stray->position());
    for (Block* block : blocks) CHECK(free(block) == Freed::ok, "freed");
  }

  auto small = make(64, false);
  CHECK(!Replay::create(*small, plan, 0, 0, &base) && base.failure->asked == 512, "no room");
}

// Who has memory of the arena hands out none of it while the arena does not, and goes on where it was.
void test_gate() {
  ArenaPtr arena = make(kMiB);
  const TagId tag = arena->tag("sleeps");
  auto scope = Scope::create(*arena, 64 * kKiB);
  const auto mark = scope->mark();
  Block* first = scope->allocate({100}).block;
  Allocation base;
  auto replay = Replay::create(*arena, Plan::make({{100, 0}, {50, 128}}, 256, 64, nullptr), 0, 0, &base);
  Block* planned = replay->allocate({100}).block;
  const auto asleep = [](const Allocation& got) { return !got && got.failure->reason == Failure::asleep; };
  for (const Gate gate : {Gate::shut(), Gate::shut_for(tag)}) {
    arena->hold();
    CHECK(!scope->bump({100}) && asleep(scope->allocate({100})) && asleep(scope->allocate({kMiB})), "held");
    CHECK(!replay->serve({50}) && asleep(replay->allocate({50})) && asleep(replay->allocate({51})), "held");
    arena->let_go(gate);
    CHECK(!scope->bump({100, 0, tag}) && asleep(scope->allocate({100, 0, tag})), "asleep");
    CHECK(!replay->serve({50, 0, tag}) && asleep(replay->allocate({50, 0, tag})), "asleep");
  }
  Block* second = scope->allocate({100}).block;
  CHECK(second && second->address == first->address + 128, "one behind the other");
  Block* other = replay->allocate({50}).block;
  CHECK(other && other->owner == replay.get() && !replay->counts().fell_back, "by the plan");
  arena->let_go(Gate::open());
  for (Block* block : {first, second, planned, other}) CHECK(free(block) == Freed::ok, "freed");
  CHECK(scope->release(mark), "released");
}

// Plans of random lifetimes, replayed with random deviations.
void test_random_replay() {
  std::mt19937_64 random(5);
  for (int round = 0; round < 200; ++round) {
    struct Event {
      std::size_t slot;
      bool frees;
    };
    std::vector<Event> events;
    std::vector<Plan::Slot> slots;
    std::vector<std::size_t> live;
    const std::size_t total = 64 * kKiB;
    for (int i = 0; i < 400; ++i) {
      if (live.empty() || random() % 2) {
        const std::size_t size = random() % 6000, offset = random() % ((total - size) / 64 + 1) * 64;
        bool fits = true;
        for (std::size_t j : live)
          fits &= offset >= slots[j].offset + slots[j].size || slots[j].offset >= offset + size;
        if (!fits || size == 0) continue;
        live.push_back(slots.size());
        events.push_back({slots.size(), false});
        slots.push_back({size, offset});
      } else {
        std::swap(live[random() % live.size()], live.back());
        events.push_back({live.back(), true});
        live.pop_back();
      }
    }
    ArenaPtr arena = make(kMiB);
    Allocation base;
    auto replay = Replay::create(*arena, Plan::make(slots, total, 64, nullptr), 0, 0, &base);
    Ranges ranges;
    const auto add = [&](Block* block) { ranges.add(block); };
    const auto drop = [&](Block* block) { ranges.remove(block), free(block); };
    std::vector<Block*> survivors;
    for (int step = 0; step < 6; ++step) {
      replay->rewind();
      const bool exact = step < 2 || step == 5;
      if (step == 5) {
        for (Block* block : survivors) drop(block);
        survivors.clear();
      }
      const std::size_t fell_back = replay->counts().fell_back;
      std::vector<Block*> blocks(slots.size());
      for (const Event& event : events) {
        Block*& block = blocks[event.slot];
        if (event.frees) {
          if (!block || (!exact && random() % 10 == 0)) continue;  // freed late, or in the next step
          drop(block), block = nullptr;
        } else {
          add(block = replay->allocate({slots[event.slot].size + (!exact && random() % 10 == 0)}).block);
        }
      }
      if (exact) CHECK(replay->counts().fell_back == fell_back, "an exact step falls back nowhere");
      for (Block* block : blocks) {
        if (!block) continue;
        if (!exact && random() % 4 == 0)
          survivors.push_back(block);
        else
          drop(block);
      }
      CHECK_SOUND(*arena);
    }
    CHECK(replay->live() == 0, "%zu", replay->live());
  }
}

}  // namespace

int main() {
  test_marks();
  test_regions();
  test_scope_outlived();
  test_random_scopes();
  test_plan();
  test_replay();
  test_gate();
  test_random_replay();
  return finish("test_arena_scope");
}
