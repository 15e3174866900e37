// How rows are walked: each element once, in its lane, nothing read past the end, and what stands in for that adds nothing.
#include <limits>
#include <vector>

#include "check.h"
#include "cpu/reductions.h"

using namespace memkit::cpu;

namespace {

void put(double x, float& y) { y = float(x); }
void put(double x, double& y) { y = x; }
void put(double x, Bfloat& y) { from_compute(float(x), y); }

template <class Lanes, int sums, class S>
void walk_in(const char* name) {
  using T = typename ComputeType<S>::type;
  for (int64_t n = 0; n <= 4 * sums; ++n) {
    std::vector<S> x(n);  // on the heap, so that the sanitizer sees what is read past the end
    for (int64_t i = 0; i < n; ++i) put(-1 - double(i), x[i]);
    std::vector<int> seen(n);
    in_runs<Lanes, sums>(
        n, nothing_before,
        [&](int64_t i, int k, bool here, S each) {
          CHECK(here == (i < n) && k == i % sums, "%s: %ld of %ld in lane %d", name, long(i), long(n), k);
          CHECK(to_compute(each) == (here ? to_compute(x[i]) : T(0)), "%s: %ld of %ld", name, long(i), long(n));
          if (here) ++seen[i];
        },
        x.data());
    CHECK(seen == std::vector<int>(n, 1), "%s: of %ld", name, long(n));
  }
}

// Short rows with a vector of sums, others with more.
template <class Lanes, class S>
void walk(const char* name) {
  walk_in<Lanes, kVector<Lanes, S>, S>(name);
  walk_in<Lanes, kSums<Lanes, typename ComputeType<S>::type>, S>(name);
}

template <class Lanes, class T>
void reduce(const char* name) {
  const T none = -std::numeric_limits<T>::infinity();
  for (int64_t n = 0; n <= 4 * kSums<Lanes, T>; ++n) {
    std::vector<T> x(n), w(n, T(2));
    for (int64_t i = 0; i < n; ++i) x[i] = -1 - T(i * 7 % 31);
    T sum = 0, largest = none;
    for (const T each : x) sum += each, largest = std::max(largest, each);
    CHECK((largest_of<Lanes, T>(x.data(), n, none) == largest), "%s: %ld", name, long(n));
    CHECK((largest_of<Lanes, T>(x.data(), n, T(3)) == 3), "%s: %ld", name, long(n));
    const T more = sum_of<Lanes, T>(n, [](int64_t, bool here, T each) { return here ? each + 5 : T(0); }, x.data());
    CHECK(more == sum + T(5 * n), "%s: %ld", name, long(n));
    const Sums<T> both = sums_of<Lanes, T>(
        n, [](int64_t, bool, T each, T twice, T& a, T& b) { a += each, b += each * twice; }, x.data(), w.data());
    CHECK(both.a == sum && both.b == 2 * sum, "%s: %ld", name, long(n));
  }
}

template <class Lanes>
void run(const char* name) {
  walk<Lanes, float>(name);
  walk<Lanes, double>(name);
  walk<Lanes, Bfloat>(name);
  reduce<Lanes, float>(name);
  reduce<Lanes, double>(name);
}

}  // namespace

int main() {
  run<BaseLanes>("base");
#if MEMKIT_X86
  if (isa() >= Isa::v3) run<V3Lanes>("v3");
  if (isa() >= Isa::v4) run<V4Lanes>("v4");
#endif
  return finish("reductions");
}
