// The offline planner: the recorded traces reach the lower bound, small problems the best there is, every plan is sound,
// and odd input, the budget and the seed are honoured.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../benchmarks/arena/instances.h"
#include "../../csrc/arena/search.h"
#include "../../csrc/arena/solve.h"
#include "check.h"

namespace {

using namespace memkit::arena;

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

Solution plan(const char* name, const std::vector<Buffer>& buffers, std::int64_t alignment, double budget,
              std::uint64_t seed = 1) {
  const Solution s = solve(buffers, alignment, budget, seed);
  std::string why;
  CHECK(verify(buffers, s.offsets, alignment, &why), "%s: %s", name, why.c_str());
  std::int64_t top = 0;
  for (std::size_t i = 0; i < buffers.size(); ++i)
    if (buffers[i].upper > buffers[i].lower && buffers[i].size > 0) top = std::max(top, s.offsets[i] + buffers[i].size);
  CHECK(top <= s.height && s.height < top + alignment, "%s: height %lld, top %lld", name, (long long)s.height,
        (long long)top);
  CHECK(s.height >= s.lower_bound, "%s: below the bound", name);
  return s;
}

std::vector<Buffer> random_buffers(std::mt19937_64& random, int n, int times, int most) {
  std::vector<Buffer> buffers;
  for (int i = 0; i < n; ++i) {
    std::int64_t a = random() % (times + 1), b = random() % (times + 1);
    buffers.push_back({std::min(a, b), std::max(a, b), std::int64_t(random() % (most + 1))});
  }
  return buffers;
}

// Every order, each buffer as low as those before it allow: some order gives the best plan.
std::int64_t best_height(const std::vector<Buffer>& buffers) {
  std::vector<int> order;
  for (std::size_t i = 0; i < buffers.size(); ++i)
    if (buffers[i].upper > buffers[i].lower && buffers[i].size > 0) order.push_back(int(i));
  std::int64_t best = order.empty() ? 0 : kMost;
  do {
    std::vector<std::int64_t> tops(order.size());
    std::int64_t height = 0;
    for (std::size_t k = 0; k < order.size(); ++k) {
      const Buffer& b = buffers[order[k]];
      std::int64_t offset = 0;
      for (std::size_t j = 0; j < k; ++j) {
        const Buffer& other = buffers[order[j]];
        if (other.lower < b.upper && b.lower < other.upper) offset = std::max(offset, tops[j]);
      }
      tops[k] = offset + b.size;
      height = std::max(height, tops[k]);
    }
    best = std::min(best, height);
  } while (std::next_permutation(order.begin(), order.end()));
  return best;
}

void test_verify() {
  const std::vector<Buffer> two{{0, 2, 10}, {1, 3, 10}};
  std::string why;
  CHECK(verify(two, {0, 10}), "apart");
  CHECK(!verify(two, {0, 9}, 1, &why) && why == "buffers 1 and 0 overlap", "%s", why.c_str());
  CHECK(!verify(two, {9, 0}) && !verify(two, {5, 5}), "overlap");
  CHECK(!verify(two, {0, 10}, 8, &why) && why == "buffer 1 has the offset 10", "%s", why.c_str());
  CHECK(!verify(two, {-1, 10}) && !verify(two, {0}) && !verify(two, {kMost, 0}), "refused");
  CHECK(verify({{0, 2, 10}, {2, 3, 10}}, {0, 0}), "one dies as the other is born");
  CHECK(verify({{0, 2, 10}, {1, 1, 10}, {0, 2, 0}}, {0, 0, 0}), "what takes no room is in nobody's way");
}

void test_odd_input() {
  CHECK(plan("nothing", {}, 64, 1).height == 0, "nothing");
  const std::vector<Buffer> empty{{0, 0, 5}, {3, 9, 0}, {5, 5, 0}};
  CHECK(plan("empty", empty, 64, 1).offsets == std::vector<std::int64_t>(3, 0), "empty");
  const Solution one = plan("one", {{-7, kMost, 65}}, 64, 1);
  CHECK(one.height == 128 && one.lower_bound == 128 && one.optimal && one.offsets[0] == 0, "one");
  CHECK(plan("far apart", {{-kMost, kMost, 1}, {0, 1, 1}, {5, 6, 1}}, 1, 1).height == 2, "far apart");
  CHECK(plan("clique", std::vector<Buffer>(50, {1, 2, 3}), 4, 1).height == 200, "clique");
  CHECK(plan("large", {{0, 2, kMost / 2}, {1, 3, kMost / 2}}, 1, 1).height == kMost / 2 * 2, "large");

  const auto refused = [](const std::vector<Buffer>& buffers, std::int64_t alignment) {
    try {
      solve(buffers, alignment);
    } catch (const std::invalid_argument&) {
      return std::string("invalid");
    } catch (const std::overflow_error&) {
      return std::string("overflow");
    }
    return std::string();
  };
  CHECK(refused({{0, 1, -1}}, 1) == "invalid" && refused({{1, 0, 1}}, 1) == "invalid", "bad buffer");
  CHECK(refused({{0, 1, 1}}, 0) == "invalid" && refused({{0, 1, 1}}, -8) == "invalid", "bad alignment");
  CHECK(refused({{0, 1, kMost}}, 512) == "overflow", "rounded up beyond 63 bits");
  CHECK(refused({{0, 2, kMost / 2 + 2}, {1, 3, kMost / 2 + 2}}, 1) == "overflow", "a sum beyond 63 bits");
}

void test_small(int count) {
  std::mt19937_64 random(5);
  for (int k = 0; k < count; ++k) {
    const std::vector<Buffer> buffers = random_buffers(random, 2 + k % 6, 3 + k % 7, 2 + k % 9);
    const Solution s = plan("small", buffers, 1, 5);
    const std::int64_t best = best_height(buffers);
    CHECK(s.height == best && s.optimal, "problem %d: %lld, the best is %lld", k, (long long)s.height, (long long)best);
  }
  // The bound is out of reach, and the planner knows it without using up its time.
  const std::vector<Buffer> knot{{0, 2, 2}, {1, 4, 1}, {3, 6, 2}, {5, 7, 1}, {0, 4, 1}, {3, 7, 1}, {1, 6, 1}};
  CHECK(plan("knot", knot, 1, 5).height == best_height(knot), "knot");
}

void test_random() {
  std::mt19937_64 random(6);
  for (int k = 0; k < 60; ++k) {
    const int n = 1 + int(random() % 300);
    plan("random", random_buffers(random, n, 1 + int(random() % 200), 1 << (k % 20)), 1 << (k % 10), 0.02, k);
  }
}

void test_traces() {
  const struct {
    const char* file;
    double mebibytes;
  } traces[] = {{"gpt", 388.6}, {"gpt_ckpt", 208.1}, {"gpt_varlen", 320.3}};
  for (const auto& trace : traces) {
    const std::vector<Buffer> buffers = read_trace(std::string("../traces/") + trace.file + ".csv");
    const Solution s = plan(trace.file, buffers, 512, 10);
    CHECK(buffers.size() > 3000 && s.height == s.lower_bound && s.optimal, "%s: %lld", trace.file, (long long)s.height);
    CHECK(std::abs(double(s.height) / 1048576 - trace.mebibytes) < 0.06, "%s: %lld", trace.file, (long long)s.height);
  }
}

void test_hard() {
  for (const Instance& in : hard_instances(1)) {
    const bool small = in.buffers.size() <= 160;
    bool tight = false;  // what touches what is known by its times
    for (const char* name : {"guillotine", "chains", "tall", "pinwheel", "skinny"})
      tight |= in.name.rfind(name, 0) == 0;
    if (!small && !tight) continue;
    Solution s = plan(in.name.c_str(), in.buffers, 1, tight ? 20 : 1);
    // Under sanitizers on a busy machine a second may hold little work.
    if (double(s.height) >= 1.10 * double(in.height)) s = plan(in.name.c_str(), in.buffers, 1, 15);
    CHECK(!tight || s.height == in.height, "%s: %lld", in.name.c_str(), (long long)s.height);
    CHECK(s.lower_bound <= in.height && s.height >= in.height, "%s: below the best", in.name.c_str());
    CHECK(double(s.height) < 1.10 * double(in.height), "%s: %lld", in.name.c_str(), (long long)s.height);
  }
}

void test_budget_and_seed() {
  std::mt19937_64 random(7);
  const std::vector<Buffer> many = random_buffers(random, 3000, 100000, 1 << 20);
  const Solution s = plan("many", many, 64, 0.2);
  CHECK(s.seconds < 3, "%.2f s", s.seconds);  // sanitizers and a busy machine

  // Done before time is up: the same plan every time.
  const Instance in = hard_instances(1)[0];
  const Solution a = plan("seed", in.buffers, 1, 30, 3), b = plan("seed", in.buffers, 1, 30, 3);
  CHECK(a.optimal && a.offsets == b.offsets && a.method == b.method, "%s, %s", a.method.c_str(), b.method.c_str());
}

// Time that is up before anything has failed: with this much room every item finds a place.
void test_expired() {
  std::mt19937_64 random(5);
  std::vector<Item> items;
  std::int64_t room = 0;
  for (int i = 0; i < 600; ++i) {
    const int first = int(random() % 40);
    items.push_back({first, first + 1 + int(random() % 8), std::int64_t(1 + random() % 1000)});
    room += items.back().size;
  }
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    Search search(items, seed);
    int asked = 0;
    const auto expired = [&] { return ++asked > 0; };
    CHECK(search.fit(room, 1 << 30, expired) == Search::Outcome::gave_up && asked == 1, "asked %d times", asked);
    CHECK(search.fit(room, 1 << 30, [] { return false; }) == Search::Outcome::found, "and goes on");
  }
}

}  // namespace

int main() {
  test_verify();
  test_odd_input();
  test_small(300);
  test_random();
  test_traces();
  test_hard();
  test_budget_and_seed();
  test_expired();
  return finish("test_solve");
}
