// Nanoseconds an allocation and its free take, one JSON object a line. No memory is touched: addresses are made up.
//   holes  so many free blocks that are too small, then pairs of one size with a window of live blocks
//   live   so many live blocks of training's sizes; each pair frees a random one and allocates another
//   latency  10^6 live blocks: a pair on top of them, one with a random victim, and one touch of a node
#include <sys/utsname.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/arena/replay.h"
#include "../../csrc/arena/scope.h"
#include "baselines.h"

namespace {

using namespace memkit;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kSpace = std::size_t(1) << 46;
// Pairs before its turn, the place of a random victim in the benchmark's own table is fetched: 8 MB of pointers miss the
// cache, too, whichever allocator they are of.
constexpr std::size_t kAhead = 8;

struct FakeUpstream final : arena::Upstream {
  void* allocate(std::size_t) override { return reinterpret_cast<void*>(std::size_t(1) << 40); }
  void release(void*, std::size_t) override {}
};

struct OurArena {
  using Block = arena::Block;
  explicit OurArena(std::size_t bytes, bool indexed = false) {
    arena::Options options;
    options.capacity = bytes;
    arena = arena::Arena::create(options, std::make_shared<FakeUpstream>());
    if (indexed) arena->find(nullptr);
  }
  Block* allocate(std::size_t size) { return arena->allocate({size}).block; }
  void free(Block* block) { arena::free(block); }
  arena::ArenaPtr arena;
};

struct IndexedArena : OurArena {
  explicit IndexedArena(std::size_t bytes) : OurArena(bytes, true) {}
};

template <class F>
double best_ns(int repeats, std::size_t operations, F&& run) {
  double best = 1e300;
  for (int i = 0; i < repeats; ++i) {
    const auto start = Clock::now();
    run();
    best = std::min(best, std::chrono::duration<double, std::nano>(Clock::now() - start).count() / double(operations));
  }
  return best;
}

void print(const char* bench, const char* allocator, std::size_t n, double ns) {
  std::printf("{\"bench\": \"%s\", \"allocator\": \"%s\", \"n\": %zu, \"ns\": %.2f}\n", bench, allocator, n, ns);
  std::fflush(stdout);
}

// Holes of 64 to 4096 bytes between small live blocks; the pairs ask for more than any hole has.
template <class A>
void holes(const char* name, std::size_t n, std::size_t pairs) {
  A a(kSpace);
  std::mt19937_64 random(n);
  std::vector<typename A::Block*> keep, drop;
  for (std::size_t i = 0; i < n; ++i) {
    drop.push_back(a.allocate(64 + random() % 4032));
    keep.push_back(a.allocate(64));
  }
  for (auto* block : drop) a.free(block);
  typename A::Block* window[16];
  for (auto& block : window) block = a.allocate(8192);
  const double ns = best_ns(3, pairs, [&] {
    for (std::size_t i = 0; i < pairs; ++i) {
      auto& block = window[i * 7 % 16];
      a.free(block);
      block = a.allocate(8192 + i % 5 * 64);
    }
  });
  print("holes", name, n, ns);
  for (auto* block : window) a.free(block);
  for (auto* block : keep) a.free(block);
}

template <class A>
void live(const char* name, std::size_t n, std::size_t pairs) {
  A a(kSpace);
  std::mt19937_64 random(n);
  std::vector<std::size_t> sizes(4096), order(1 << 16);
  for (std::size_t& size : sizes) size = random() % 4 ? 64 + random() % 8192 : std::size_t(1) << (10 + random() % 12);
  std::vector<typename A::Block*> blocks(n);
  for (auto& block : blocks) block = a.allocate(sizes[random() % sizes.size()]);
  for (std::size_t& at : order) at = random() % n;
  const double ns = best_ns(3, pairs, [&] {
    for (std::size_t i = 0; i < pairs; ++i) {
      __builtin_prefetch(&blocks[order[(i + kAhead) % order.size()]], 1);
      auto& block = blocks[order[i % order.size()]];
      a.free(block);
      block = a.allocate(sizes[random() % sizes.size()]);
    }
  });
  print("live", name, n, ns);
  for (auto* block : blocks) a.free(block);
}

// What so many live blocks cost. Last made: pairs on top of them. Random: each pair frees a random one and allocates
// another size; which and what was drawn before.
template <class A>
void latency(const char* name, std::size_t n, std::size_t pairs) {
  A a(kSpace);
  std::mt19937_64 random(n);
  const auto size = [&] { return random() % 4 ? 64 + random() % 8192 : std::size_t(1) << (10 + random() % 12); };
  std::vector<typename A::Block*> blocks(n);
  for (auto& block : blocks) block = a.allocate(size());
  std::vector<std::size_t> victims(pairs), sizes(pairs);
  for (std::size_t i = 0; i < pairs; ++i) victims[i] = random() % n, sizes[i] = size();
  print("latency, last made", name, n, best_ns(5, pairs, [&] {
          for (std::size_t i = 0; i < pairs; ++i) a.free(a.allocate(4096));
        }));
  print("latency, random", name, n, best_ns(5, pairs, [&] {
          for (std::size_t i = 0; i < pairs; ++i) {
            __builtin_prefetch(&blocks[victims[(i + kAhead) % pairs]], 1);
            auto& block = blocks[victims[i]];
            a.free(block);
            block = a.allocate(sizes[i]);
          }
        }));
  for (auto* block : blocks) a.free(block);
}

// One node, read and written at random among those of so many blocks: a miss.
void touch(std::size_t n, std::size_t pairs) {
  arena::Slab slab;
  std::vector<arena::Block*> nodes(n), order(pairs);
  for (auto& node : nodes) node = slab.take();
  std::mt19937_64 random(n);
  for (auto& node : order) node = nodes[random() % n];
  std::size_t last = 0;  // each touch waits for the one before it, as a walk over blocks does
  print("latency, one touch", "memory", n, best_ns(5, pairs, [&] {
          for (std::size_t i = 0; i < pairs; ++i) {
            arena::Block& node = order[i][last];
            last = node.requested & 1;
            node.requested = 2 * i;
          }
        }));
}

void bump() {
  OurArena a(kSpace);
  auto scope = arena::Scope::create(*a.arena, std::size_t(1) << 30);
  constexpr std::size_t kStep = 1000, kSteps = 2000;
  arena::Block* blocks[kStep];
  print("bump", "memkit", kStep, best_ns(5, kStep * kSteps, [&] {
          for (std::size_t step = 0; step < kSteps; ++step) {
            const auto mark = scope->mark();
            for (auto& block : blocks) block = scope->allocate({1024}).block;
            for (auto* block : blocks) arena::free(block);
            scope->release(mark);
          }
        }));
  print("bump, quick part", "memkit", kStep, best_ns(5, kStep * kSteps, [&] {
          for (std::size_t step = 0; step < kSteps; ++step) {
            const auto mark = scope->mark();
            for (auto& block : blocks) block = scope->bump({1024});
            for (auto* block : blocks) scope->take_back(block);
            scope->release(mark);
          }
        }));
}

void replay() {
  OurArena a(kSpace);
  constexpr std::size_t kStep = 1000, kSteps = 2000;
  std::vector<arena::Plan::Slot> slots(kStep);  // eight live at a time, in turn
  for (std::size_t i = 0; i < kStep; ++i) slots[i] = {1024, i % 8 * 1024};
  arena::Allocation base;
  auto replay = arena::Replay::create(*a.arena, arena::Plan::make(slots, 8192, 64, nullptr), 0, 0, &base);
  const auto steps = [&](auto&& allocate) {
    return best_ns(5, kStep * kSteps, [&] {
      arena::Block* window[8] = {};
      for (std::size_t step = 0; step < kSteps; ++step) {
        replay->rewind();
        for (std::size_t i = 0; i < kStep; ++i) {
          auto& block = window[i % 8];
          if (block) arena::free(block);
          block = allocate();
        }
        for (auto& block : window) arena::free(block), block = nullptr;
      }
    });
  };
  print("replay", "memkit", kStep, steps([&] { return replay->allocate({1024}).block; }));
  print("replay, quick part", "memkit", kStep, steps([&] { return replay->serve({1024}); }));
  if (replay->counts().fell_back) std::printf("{\"error\": \"replay fell back\"}\n");
}

// Taking and releasing the lock, by so many threads at once; nanoseconds of wall time each.
template <class L>
void lock(const char* name, std::size_t threads) {
  L one;
  const std::size_t times = 4000000 / threads;
  volatile std::size_t count = 0;
  const double ns = best_ns(3, times * threads, [&] {
    std::vector<std::thread> running;
    for (std::size_t t = 0; t < threads; ++t)
      running.emplace_back([&] {
        for (std::size_t i = 0; i < times; ++i) {
          const std::lock_guard<L> guard(one);
          count = count + 1;
        }
      });
    for (std::thread& thread : running) thread.join();
  });
  print("lock", name, threads, ns);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc < 2 ? "" : argv[1];
  const bool full = mode != "quick", only_latency = mode == "latency";
  utsname host{};
  uname(&host);
  std::printf("{\"machine\": \"%s\", \"compiler\": \"%s\", \"unit\": \"ns per allocation and free\"}\n", host.machine,
              __VERSION__);
  const std::size_t pairs = full ? 2000000 : 200000;
  for (std::size_t n : {0, 16, 256, 4096, 65536}) {
    if (only_latency) break;
    holes<OurArena>("memkit", n, pairs);
    holes<baseline::BestFitSet>("std::set", n, pairs);
    holes<baseline::BestFitList>("list", n, n > 256 ? 20000 : pairs / 10);
  }
  for (std::size_t n : {16, 1024, 32768, 1000000}) {
    if (only_latency) break;
    live<OurArena>("memkit", n, pairs);
    live<IndexedArena>("memkit, by pointer", n, pairs);
    live<baseline::BestFitSet>("std::set", n, pairs);
    if (n <= 32768) live<baseline::BestFitList>("list", n, n > 1024 ? 5000 : pairs / 10);
  }
  const std::size_t many = 1000000;
  latency<OurArena>("memkit", many, pairs / 4);
  latency<baseline::BestFitSet>("std::set", many, pairs / 4);
  touch(many, pairs / 4);
  if (only_latency) return 0;
  bump();
  replay();
  for (std::size_t threads : {1, 2, 8}) {
    lock<arena::SpinLock>("memkit", threads);
    lock<std::mutex>("std::mutex", threads);
  }
}
