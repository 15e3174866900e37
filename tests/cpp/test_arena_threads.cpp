// Eight threads that allocate and free across each other, with growth, lanes, scopes and replays; built with the thread
// sanitizer as well. `test_arena_threads long`: ten times as much.
#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "../../csrc/arena/replay.h"
#include "../../csrc/arena/scope.h"
#include "test_arena.h"

namespace {

constexpr int kThreads = 8;

// Blocks in transit: whoever puts one in takes another out.
using Exchange = std::array<std::atomic<Block*>, 256>;

void fill(Block* block, unsigned value) {
  if (block->requested) static_cast<unsigned char*>(block->data())[0] = static_cast<unsigned char>(value);
  if (block->requested)
    static_cast<unsigned char*>(block->data())[block->requested - 1] = static_cast<unsigned char>(value);
  block->depth = value;
}

void drop(Block* block) {
  if (!block) return;
  const auto* bytes = static_cast<const unsigned char*>(block->data());
  if (block->requested)
    CHECK(bytes[0] == block->depth && bytes[block->requested - 1] == block->depth, "someone else wrote here");
  CHECK(free(block) == Freed::ok, "freed");
}

template <class F>
void run(F&& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

template <class From>
void test_arena(bool debug, int operations) {
  auto upstream = std::make_shared<From>(true);
  Options options;
  options.capacity = kMiB;
  options.growth = kMiB;
  options.max = 12 * kMiB;
  options.debug = debug;
  options.memory = std::make_shared<HostMemory>();
  ArenaPtr arena = Arena::create(options, upstream);
  if constexpr (std::is_same_v<From, TestUpstream>) upstream->called = [&] { arena->stats(); };
  Exchange exchange{};
  run([&](int thread) {
    std::mt19937_64 random(static_cast<unsigned>(thread));
    for (int i = 0; i < operations; ++i) {
      Block* block = nullptr;
      if (random() % 4) {
        Allocation got = arena->allocate({random() % (random() % 8 ? 2000 : 200000), random() % 3});
        CHECK(got || got.failure->reason == Failure::exhausted, "%d", i);
        if ((block = got.block)) fill(block, unsigned(random() % 256));
      }
      drop(exchange[random() % exchange.size()].exchange(block));
      if (i % 4096 == 0) CHECK_SOUND(*arena);
      if (i % 8192 == 0) arena->trim();
    }
  });
  for (auto& slot : exchange) drop(slot.exchange(nullptr));
  CHECK_SOUND(*arena);
  const Stats stats = arena->stats();
  CHECK(stats.active == 0 && stats.allocations == stats.frees, "%zu", stats.active);
  upstream->called = nullptr;
}

// The arena's pointer dies while threads still hold its blocks: the last of them takes it along.
void test_end(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    auto upstream = std::make_shared<TestUpstream>(true);
    Options options;
    options.growth = 16 * kKiB;
    ArenaPtr arena = Arena::create(options, upstream);
    std::vector<Block*> blocks;
    for (int i = 0; i < 8 * kThreads; ++i) blocks.push_back(arena->allocate({4 * kKiB}).block);
    run([&](int thread) {
      if (thread == 3) arena.reset();
      for (int i = 0; i < 8; ++i) free(blocks[std::size_t(i * kThreads + thread)]);
    });
    CHECK(upstream->held() == 0, "%zu", upstream->held());
  }
}

// Threads that grow at once, while others trim, find the room that there is, and take no more than one after the other do.
template <class From>
void test_growth(int rounds) {
  constexpr std::size_t size = 3 * kMiB, capacity = 2 * kMiB;
  for (int round = 0; round < rounds; ++round) {
    auto upstream = std::make_shared<From>(true);
    upstream->slow = true;
    Options options;
    options.capacity = capacity;
    options.max = round % 2 ? 100 * kMiB : SIZE_MAX;
    // One chunk more, or what was lacking, a sixteenth, and what pages round up.
    const std::size_t most = upstream->page() ? kThreads * size + capacity + 6 * kMiB : capacity + options.growth;
    ArenaPtr arena = Arena::create(options, upstream);
    std::array<Block*, kThreads> blocks{};
    run([&](int thread) {
      if (thread == 7 && round % 4 < 2)
        for (int i = 0; i < 8; ++i) arena->trim();
      Allocation got = arena->allocate({size, LaneId(thread % 3)});
      CHECK(got, "%s", got.failure->text().c_str());
      if (got) fill(blocks[std::size_t(thread)] = got.block, unsigned(thread));
    });
    const std::size_t reserved = arena->stats().reserved;
    CHECK(reserved <= most, "%zu", reserved);
    for (Block* block : blocks) drop(block);
    CHECK_SOUND(*arena);
  }
}

void test_guests(int operations) {
  Options options;
  options.growth = kMiB;
  ArenaPtr arena = Arena::create(options, std::make_shared<TestUpstream>(true));
  const std::vector<Plan::Slot> slots(64, {1000, 0});
  std::vector<Plan::Slot> apart = slots;
  for (std::size_t i = 0; i < apart.size(); ++i) apart[i].offset = i % 8 * 1024;
  const auto plan = Plan::make(apart, 8192, 64, nullptr);
  Exchange exchange{};
  run([&](int thread) {
    std::mt19937_64 random(static_cast<unsigned>(thread));
    auto scope = Scope::create(*arena, 64 * kKiB, LaneId(thread));
    Allocation base;
    auto replay = Replay::create(*arena, plan, LaneId(thread), 0, &base);
    for (int i = 0; i < operations; ++i) {
      if (i % 64 == 0) replay->rewind();
      const auto mark = scope->mark();
      Block* mine[4];
      for (Block*& block : mine) block = scope->allocate({random() % 3000}).block;
      Block* planned = replay->allocate({1000}).block;
      if (Block* other = exchange[random() % exchange.size()].exchange(planned))
        CHECK(free(other) == Freed::ok, "freed");
      for (Block* block : mine) CHECK(free(block) == Freed::ok, "freed");
      CHECK(scope->release(mark), "released");
      if (i % 64 == 0)
        arena->visit_guests([](const BlockView& block) { CHECK(block.state == State::live, "a dead block"); });
    }
  });
  for (auto& slot : exchange)
    if (Block* block = slot.exchange(nullptr)) free(block);
  CHECK_SOUND(*arena);
  CHECK(arena->stats().live_blocks == 0, "%zu", arena->stats().live_blocks);
}

// While the arena is held nobody gets memory, not by growth that was under way nor from a guest: what lives can only die.
// After that, nobody for the tag that sleeps.
void test_gate(int rounds) {
  auto upstream = std::make_shared<PagedUpstream>(true);
  upstream->slow = true;
  Options options;
  options.capacity = kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  const TagId tag = arena->tag("sleeps");
  const auto plan = Plan::make(std::vector<Plan::Slot>(64, {1000, 0}), 1024, 64, nullptr);
  std::atomic<StackId> next{1};
  std::atomic<bool> stop{false};
  const auto living = [&](bool tagged) {
    std::set<StackId> found;
    const auto see = [&](const BlockView& block) {
      if (block.state == State::live && block.stack && (!tagged || block.tag == tag)) found.insert(block.stack);
    };
    arena->visit(nullptr, see);
    arena->visit_guests(see);
    return found;
  };
  const auto watch = [&](bool tagged) {
    const std::set<StackId> before = living(tagged);
    std::this_thread::sleep_for(std::chrono::microseconds(300));
    for (const StackId id : living(tagged)) CHECK(before.count(id), "got memory behind the gate");
  };
  run([&](int thread) {
    if (thread == 0) {
      for (int round = 0; round < rounds; ++round) {
        arena->hold();
        watch(false);
        arena->let_go(Gate::shut_for(tag));
        watch(true);
        arena->let_go(Gate::open());
        take_time(true);
      }
      stop = true;
      return;
    }
    std::mt19937_64 random(static_cast<unsigned>(thread));
    const auto request = [&](std::size_t most) {
      return Request{random() % most, LaneId(thread % 3), random() % 2 ? tag : 0, next++};
    };
    auto scope = Scope::create(*arena, 64 * kKiB, LaneId(thread));
    Allocation base;
    std::shared_ptr<Replay> replay;
    while (!stop) {
      std::vector<Block*> mine, pieces;
      const auto keep = [&](const Allocation& got, std::vector<Block*>* list) {
        CHECK(got || got.failure->reason == Failure::asleep, "%s", got.failure->text().c_str());
        if (got) list->push_back(got.block);
      };
      const auto mark = scope->mark();
      if (!replay) replay = Replay::create(*arena, plan, LaneId(thread), 0, &base);
      if (replay && replay->position() == plan->size()) replay->rewind();
      for (int i = 0; i < 4; ++i) {
        keep(arena->allocate(request(500 * kKiB)), &mine);
        keep(scope->allocate(request(3000)), &pieces);
        Request planned = request(1);
        planned.size = 1000;
        if (replay) keep(replay->allocate(planned), &pieces);
      }
      for (Block* block : mine) fill(block, unsigned(random() % 256));
      for (Block* block : mine) drop(block);
      for (Block* block : pieces) CHECK(free(block) == Freed::ok, "freed");
      CHECK(scope->release(mark), "released");
      if (random() % 16 == 0) arena->trim();
    }
  });
  CHECK_SOUND(*arena);
}

}  // namespace

int main(int argc, char**) {
  const int more = argc > 1 ? 10 : 1;
  test_arena<TestUpstream>(false, 20000 * more);
  test_arena<TestUpstream>(true, 10000 * more);
  test_growth<TestUpstream>(20 * more);
  test_growth<PagedUpstream>(20 * more);
  test_arena<PagedUpstream>(false, 20000 * more);
  test_arena<PagedUpstream>(true, 10000 * more);
  test_end(100 * more);
  test_guests(5000 * more);
  test_gate(100 * more);
  return finish("test_arena_threads");
}
