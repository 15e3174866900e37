// The arena against a model, on addresses that cannot be touched and on memory: no overlap, alignment, exact accounts,
// growth and its limits, failures that say why, debug mode, closing, fork. `test_arena long`: 10^7 operations.
#include "test_arena.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <set>
#include <stdexcept>
#include <vector>

namespace {

std::size_t address(const Block* block) { return reinterpret_cast<std::size_t>(block->data()); }

// Sizes as they come in training: many small ones, some of megabytes, some repeated exactly.
std::size_t some_size(std::mt19937_64& random) {
  static const std::size_t usual[] = {4, 512, 3072, 40960, 196608, 1 << 20};
  switch (random() % 4) {
    case 0: return usual[random() % 6];
    case 1: return random() % 300;
    case 2: return random() % 20000;
    default: return std::size_t(1) << (random() % 20);
  }
}

struct Model {
  std::map<std::size_t, Block*> live;  // by address
  std::size_t allocated = 0;

  void add(Block* block, std::size_t size, std::size_t alignment) {
    CHECK(address(block) % alignment == 0, "%zx at %zu", address(block), alignment);
    const auto after = live.lower_bound(address(block));
    CHECK(after == live.end() || address(block) + std::max<std::size_t>(size, 1) <= after->first, "overlap");
    if (after != live.begin()) {
      const Block* before = std::prev(after)->second;
      CHECK(address(before) + std::max<std::size_t>(before->requested, 1) <= address(block), "overlap");
    }
    live[address(block)] = block;
    allocated += size;
  }
  Block* take(std::mt19937_64& random) {
    auto at = live.lower_bound(live.begin()->first + random() % (live.rbegin()->first - live.begin()->first + 1));
    if (at == live.end()) --at;
    Block* block = at->second;
    live.erase(at);
    allocated -= block->requested;
    return block;
  }
};

void test_random(bool real, bool debug, std::size_t granule, int operations) {
  auto upstream = std::make_shared<TestUpstream>(real);
  Options options;
  options.capacity = 4 * kMiB;
  options.growth = 2 * kMiB;
  options.max = 48 * kMiB;
  options.alignment = granule;
  options.debug = debug;
  if (real) options.memory = std::make_shared<HostMemory>();
  ArenaPtr arena = Arena::create(options, upstream);
  upstream->called = [&] { arena->stats(); };  // would hang if the lock were held
  const TagId tags[] = {0, arena->tag("weights"), arena->tag("activations")};
  Model model;
  std::mt19937_64 random(granule + debug);
  std::size_t peak = 0;
  const int every = operations / 100;
  for (int i = 0; i < operations; ++i) {
    const bool filling = (i / (operations / 8)) % 2 == 0;
    if (model.live.empty() || random() % 16 < (filling ? 9u : 7u)) {
      const std::size_t size = some_size(random);
      const std::size_t alignment = random() % 8 ? 0 : std::size_t(1) << (random() % 14);
      Allocation got = arena->allocate({size, 0, tags[random() % 3], random(), alignment});
      if (got) {
        CHECK(got.waits.empty() && got.block->requested == size, "%zu", size);
        model.add(got.block, size, std::max(alignment, granule));
        peak = std::max(peak, model.allocated);
        if (real) std::memset(got.block->data(), int(size), size);
      } else {
        CHECK(
            got.failure->reason == Failure::exhausted && got.failure->largest_free < size + 2 * alignment + 4 * granule,
            "%s", got.failure->text().c_str());
      }
    } else {
      Block* block = model.take(random);
      if (real)
        for (std::size_t at : {std::size_t(0), block->requested / 2, block->requested - 1})
          if (at < block->requested)
            CHECK(static_cast<unsigned char*>(block->data())[at] == block->requested % 256, "lost");
      CHECK((random() % 4 ? free(block) : arena->free_pointer(block->data())) == Freed::ok, "a good free");
    }
    if (i % every == 0) {
      CHECK_SOUND(*arena);
      const Stats stats = arena->stats();
      CHECK(
          stats.allocated == model.allocated && stats.allocated_peak == peak && stats.live_blocks == model.live.size(),
          "%zu against %zu", stats.allocated, model.allocated);
      CHECK(stats.reserved == upstream->held() && stats.hits + stats.growths == stats.allocations, "%zu",
            stats.reserved);
      std::size_t held = 0;
      for (const Holder& holder : arena->holders()) held += holder.bytes;
      CHECK(held == model.allocated, "%zu by tags", held);
      if (i % (10 * every) == 0) arena->trim();
    }
  }
  std::size_t seen = 0;
  const void* last = nullptr;
  arena->visit([](const ChunkView&) {},
               [&](const BlockView& block) {
                 const char* const end = static_cast<const char*>(block.address) + block.size;
                 CHECK(block.address >= last, "blocks that overlap");
                 CHECK(block.data >= block.address && static_cast<const char*>(block.data) + block.requested <= end,
                       "a user's bytes beyond the block");
                 last = end;
                 seen += block.state == State::live;
               });
  CHECK(seen == model.live.size(), "%zu", seen);
  while (!model.live.empty()) free(model.take(random));
  CHECK_SOUND(*arena);
  arena->trim();
  const Stats stats = arena->stats();
  CHECK(stats.reserved == 4 * kMiB && stats.free_blocks == 1 && stats.largest_free == 4 * kMiB &&
            stats.fragmentation == 0,
        "%zu reserved, %zu blocks", stats.reserved, stats.free_blocks);
  upstream->called = nullptr;
}

void test_growth() {
  auto upstream = std::make_shared<TestUpstream>(false, 20 * kMiB);
  Options options;
  options.growth = 4 * kMiB;
  options.max = 14 * kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  Allocation small = arena->allocate({1000});
  CHECK(arena->stats().reserved == 4 * kMiB && arena->stats().growths == 1 && arena->stats().hits == 0, "one chunk");
  Allocation large = arena->allocate({7 * kMiB, 0, arena->tag("large")});
  CHECK(arena->stats().reserved == 11 * kMiB, "a chunk of its own");
  Allocation third = arena->allocate({4 * kMiB});
  CHECK(!third && third.failure->reason == Failure::exhausted && third.failure->asked == 4 * kMiB,
        "beyond the maximum");
  CHECK(third.failure->holders.size() == 2 && third.failure->holders[0].tag == "large", "holders");
  const std::string text = third.failure->text();
  CHECK(text.find("asked for 4.00 MiB, must not grow beyond max=14.00 MiB; 4.00 MiB free") == 0 &&
            text.find("large: 7.00 MiB in 1") != std::string::npos,
        "%s", text.c_str());
  Allocation clipped = arena->allocate({3 * kMiB});  // fits into the first chunk
  CHECK(clipped && arena->stats().growths == 2, "no growth");
  Allocation rest = arena->allocate({2 * kMiB});
  CHECK(rest && arena->stats().reserved == 14 * kMiB - 0 * kMiB, "the last chunk is smaller: %zu",
        arena->stats().reserved);
  free(large.block);
  free(rest.block);
  Allocation other = arena->allocate({8 * kMiB});  // only when empty chunks went back
  CHECK(other && arena->stats().reserved == 12 * kMiB, "%zu", arena->stats().reserved);
  CHECK_SOUND(*arena);
  for (Block* block : {small.block, clipped.block, other.block}) free(block);
  CHECK(arena->trim() == 12 * kMiB && upstream->held() == 0, "everything goes back");
  CHECK(arena->allocate({SIZE_MAX}).failure->reason == Failure::invalid, "nonsense");
  CHECK(arena->allocate({1, 0, 0, 0, 3}).failure->reason == Failure::invalid, "nonsense");
  CHECK(arena->allocate({16 * kMiB}).failure->reason == Failure::exhausted, "too much");

  Options fixed;
  fixed.capacity = kMiB;
  fixed.grow = false;
  ArenaPtr still = Arena::create(fixed, upstream);
  Allocation all = still->allocate({kMiB});
  CHECK(all && !still->allocate({0}), "all of it, and no more");
  free(all.block);
  for (std::size_t size = 64; size <= kMiB; size += 64 * 37) {  // whatever is free in one piece can be had
    Allocation part = still->allocate({kMiB - size}), other_part = still->allocate({size});
    CHECK((size == kMiB || part) && other_part, "%zu", size);
    if (part) free(part.block);
    free(other_part.block);
  }
  Allocation none = still->allocate({0}), none_too = still->allocate({0});
  CHECK(none && none_too && none.block->data() != none_too.block->data(), "empty blocks differ");
  free(none.block), free(none_too.block);
  CHECK(still->trim() == 0, "the capacity stays");
  bool raised = false;
  for (std::size_t alignment : {0, 8, 96}) {
    raised = false;
    fixed.alignment = alignment;
    try {
      Arena::create(fixed, upstream);
    } catch (const std::invalid_argument&) {
      raised = true;
    }
    CHECK(raised, "alignment %zu", alignment);
  }
}

void check_refusal(const Failure& failure, Refusal::Limit limit, const char* text) {
  CHECK(failure.reason == Failure::exhausted && failure.refusal.limit == limit, "limit %d", failure.refusal.limit);
  CHECK(failure.text().find(text) != std::string::npos, "%s", failure.text().c_str());
}

void test_refusals() {
  auto upstream = std::make_shared<TestUpstream>(false, 20 * kMiB);
  Options options;
  options.capacity = options.growth = 4 * kMiB;
  options.max = 16 * kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  const auto refuses = [&](std::size_t size, Refusal::Limit limit, const char* text) {
    const Allocation got = arena->allocate({size});
    CHECK(!got, "%zu", size);
    if (!got) check_refusal(*got.failure, limit, text);
    CHECK(arena->stats().reserved == 4 * kMiB && upstream->held() == 4 * kMiB, "nothing was taken");
    CHECK_SOUND(*arena);
  };
  refuses(13 * kMiB, Refusal::max, "must not grow beyond max=16.00 MiB");
  upstream->say_available(6 * kMiB);
  refuses(7 * kMiB, Refusal::available, "the system has 6.00 MiB of available memory");
  upstream->say_available(3 * kMiB);
  Allocation first = arena->allocate({4 * kMiB}), small = arena->allocate({kMiB});
  CHECK(small && arena->stats().reserved == 5 * kMiB, "less than a whole chunk is available");
  free(first.block), free(small.block);
  upstream->say_available(SIZE_MAX);
  arena->trim();
  auto poor = std::make_shared<TestUpstream>(false, 5 * kMiB);
  arena = Arena::create(options, upstream = poor);
  refuses(5 * kMiB, Refusal::upstream, "the system refused more memory");
  options.grow = false;
  arena = nullptr;
  arena = Arena::create(options, upstream);
  refuses(5 * kMiB, Refusal::fixed, "must not grow (grow=False)");

  arena = nullptr;
  for (const auto limit : {Refusal::upstream, Refusal::available}) {
    poor->say_available(limit == Refusal::available ? 7 * kMiB : SIZE_MAX);
    options.capacity = 8 * kMiB;
    bool raised = false;
    try {
      Arena::create(options, upstream);
    } catch (const NoCapacity& error) {
      raised = true;
      check_refusal(error.failure, limit, "asked for 8.00 MiB, the system ");
    }
    CHECK(raised, "no memory for the capacity");
  }
}

// Memory that starts in the middle of a granule.
class SkewedUpstream final : public Upstream {
 public:
  void* allocate(std::size_t bytes) override {
    held += bytes;
    return reinterpret_cast<void*>((next_ += kMiB * 16) + 32);
  }
  void release(void*, std::size_t bytes) override { held -= bytes; }

  std::size_t held = 0;

 private:
  std::uintptr_t next_ = std::uintptr_t(1) << 44;
};

void test_skewed() {
  auto upstream = std::make_shared<SkewedUpstream>();
  Options options;
  options.capacity = options.growth = kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  CHECK(!arena->allocate({kMiB}) && upstream->held == kMiB, "too short; the capacity stays: %zu", upstream->held);
  Allocation got = arena->allocate({kMiB - 64});
  CHECK(got && address(got.block) % 64 == 0, "aligned");
  CHECK_SOUND(*arena);
  free(got.block);
}

void test_debug(bool real) {
  auto upstream = std::make_shared<TestUpstream>(real);
  std::vector<std::string> told;
  Options options;
  options.capacity = kMiB;
  options.debug = true;
  if (real) options.memory = std::make_shared<HostMemory>();
  options.violated = [&](const std::string& text) { told.push_back(text); };
  ArenaPtr arena = Arena::create(options, upstream), stranger = Arena::create(options, upstream);
  Block* block = arena->allocate({100, 0, arena->tag("mine"), 7}).block;
  void* data = block->data();
  CHECK(arena->find(data) == block && !arena->find(static_cast<char*>(data) + 1) && !stranger->find(data),
        "by pointer");
  CHECK(stranger->free_pointer(data) == Freed::foreign && told.size() == 1, "foreign");
  CHECK(stranger->defer(block, 1) == Freed::foreign && told.size() == 2, "foreign");
  if (real) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    CHECK(bytes[0] == 0xff && bytes[99] == 0xff, "poison");
  }
  CHECK(free(block) == Freed::ok && told.size() == 2, "good");
  if (real) CHECK(static_cast<const unsigned char*>(data)[50] == 0x7f, "poison");
  CHECK(free(block) == Freed::double_free && told.size() == 3, "twice");
  CHECK(arena->free_pointer(data) == Freed::double_free && told.size() == 4, "twice");
  Block* again = arena->allocate({100}).block;
  CHECK(again->data() == data && again != block, "another node for the same place");
  CHECK(free(block) == Freed::double_free, "still known");
  if (real) {
    static_cast<char*>(again->data())[100] = 1;
    CHECK(free(again) == Freed::corrupted && told.back().find("after its block: 100 bytes") != std::string::npos, "%s",
          told.back().c_str());
    again = arena->allocate({100, 0, arena->tag("mine")}).block;
    static_cast<char*>(again->data())[-1] = 1;
    CHECK(free(again) == Freed::corrupted && told.back().find("before its block") != std::string::npos &&
              told.back().find("of mine") != std::string::npos,
          "%s", told.back().c_str());
  } else {
    CHECK(free(again) == Freed::ok, "good");
  }
  CHECK_SOUND(*arena);
  CHECK(arena->stats().active == 0, "all back");
}

void test_close() {
  auto upstream = std::make_shared<TestUpstream>(true);
  Options options;
  options.capacity = kMiB;
  options.growth = kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  Block* first = arena->allocate({kMiB}).block;
  Block* second = arena->allocate({kMiB}).block;
  arena->close();
  CHECK(arena->closed() && arena->allocate({1}).failure->reason == Failure::closed, "closed");
  std::memset(second->data(), 1, kMiB);
  CHECK(upstream->held() == 2 * kMiB, "%zu", upstream->held());
  free(second);
  CHECK(upstream->held() == kMiB, "%zu", upstream->held());
  arena.reset();
  std::memset(first->data(), 1, kMiB);
  CHECK(upstream->held() == kMiB, "%zu", upstream->held());
  free(first);  // and the arena
  CHECK(upstream->held() == 0, "%zu", upstream->held());
}

void test_fork() {
  auto upstream = std::make_shared<TestUpstream>(true);
  Options options;
  options.capacity = kMiB;
  ArenaPtr arena = Arena::create(options, upstream);
  Block* block = arena->allocate({1000}).block;
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    bool good = free(block) == Freed::inherited && arena->free_pointer(block->data()) == Freed::inherited;
    good &= !arena->allocate({1}) && arena->allocate({1}).failure->reason == Failure::inherited;
    good &= block->state == State::live && arena->stats().reserved == 0 && arena->check().empty();
    ArenaPtr own = Arena::create(options, std::make_shared<TestUpstream>(true));
    Block* mine = own->allocate({10}).block;
    good &= mine && free(mine) == Freed::ok && own->check().empty();
    arena.reset();
    own.reset();
    _exit(good ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child: %d", status);
  CHECK(free(block) == Freed::ok, "the parent");
  CHECK_SOUND(*arena);
}

std::size_t resident_pages() {
  std::size_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident;
}

// The bookkeeping does not grow with the number of operations.
void test_steady(int operations) {
  Options options;
  options.capacity = std::size_t(1) << 34;
  ArenaPtr arena = Arena::create(options, std::make_shared<TestUpstream>(false));
  std::vector<Block*> live(4096);
  std::mt19937_64 random(1);
  std::size_t before = 0;
  for (int i = 0; i < operations; ++i) {
    Block*& block = live[random() % live.size()];
    if (block) free(block);
    block = arena->allocate({some_size(random)}).block;
    CHECK(block, "operation %d", i);
    if (i == operations / 5) before = resident_pages();
    if (i % (operations / 8) == 0) CHECK_SOUND(*arena);
  }
  const std::size_t after = resident_pages();
  CHECK(after <= before + 64, "%zu pages, then %zu", before, after);
  for (Block* block : live)
    if (block) free(block);
  CHECK_SOUND(*arena);
}

// What was freed last waits for a request of its size; for everybody else it is free.
void test_freed_last() {
  Options options;
  options.capacity = options.growth = kMiB;
  options.max = 2 * kMiB;
  ArenaPtr arena = Arena::create(options, std::make_shared<TestUpstream>(false));
  Block* first = arena->allocate({4 * kKiB}).block;
  Block* rest = arena->allocate({kMiB - 4 * kKiB}).block;
  CHECK(free(first) == Freed::ok && free(first) == Freed::double_free, "twice");
  CHECK(arena->serve({4 * kKiB}) == first, "the same block for the same size");
  free(first);
  const Stats stats = arena->stats();
  CHECK(stats.free == 4 * kKiB && stats.largest_free == stats.free && stats.free_blocks == 1, "%zu", stats.free);
  CHECK_SOUND(*arena);
  free(rest);
  free(arena->allocate({4 * kKiB}).block);
  Block* all = arena->serve({kMiB});
  CHECK(all && arena->stats().growths == 0, "coalesced for a larger request");
  free(all);
  Block* small = arena->serve({64});
  CHECK(small && small->size == 64, "cut for a smaller request");
  Block* grown = arena->allocate({kMiB}).block;
  CHECK(grown && free(grown) == Freed::ok && arena->trim() == kMiB, "its chunk can go");
  free(small);
  arena->settle(arena->stats().frees);
  arena->pin(1, 0);
  Block* captured = arena->allocate({kMiB}).block;
  CHECK(captured && arena->stats().growths == 1, "clean after settle()");
  free(captured);
  arena->unpin(1, arena->stats().frees);
  CHECK(arena->stats().largest_free == kMiB, "%zu", arena->stats().largest_free);
  CHECK_SOUND(*arena);
}

// Many nodes lie where the system may use huge pages.
void test_nodes_of_many_blocks() {
  if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled")) return;
  Options options;
  options.capacity = std::size_t(1) << 34;
  ArenaPtr arena = Arena::create(options, std::make_shared<TestUpstream>(false));
  std::vector<Block*> blocks(100000);
  for (Block*& block : blocks) block = arena->allocate({64}).block;
  const auto last = reinterpret_cast<std::uintptr_t>(blocks.back());
  std::ifstream maps("/proc/self/smaps");
  std::string flags;
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t start = 0, end = 0;
    if (std::sscanf(line.c_str(), "%zx-%zx", &start, &end) == 2) inside = start <= last && last < end;
    if (inside && line.rfind("VmFlags:", 0) == 0) flags = line;
  }
  CHECK(flags.find(" hg") != std::string::npos, "%s", flags.c_str());
  for (Block* block : blocks) free(block);
  CHECK_SOUND(*arena);
}

}  // namespace

int main(int argc, char**) {
  const bool thorough = argc > 1;
  const int operations = thorough ? 400000 : 40000;
  for (bool debug : {false, true}) {
    test_random(false, debug, 64, operations);
    test_random(false, debug, 512, operations);
    test_random(true, debug, 64, operations);
  }
  test_freed_last();
  test_nodes_of_many_blocks();
  test_growth();
  test_refusals();
  test_skewed();
  test_debug(false);
  test_debug(true);
  test_close();
  test_fork();
  test_steady(thorough ? 10000000 : 1000000);
  return finish("test_arena");
}
