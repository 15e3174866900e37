// prototype driver
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include "instances.h"
#include "../../csrc/arena/search.h"
using namespace memkit::arena;
static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
std::vector<Item> items_of(const std::vector<Buffer>& b, int* M) {
  // events
  std::vector<std::int64_t> ts;
  for (auto& x : b) ts.push_back(x.lower), ts.push_back(x.upper);
  std::sort(ts.begin(), ts.end()); ts.erase(std::unique(ts.begin(), ts.end()), ts.end());
  std::map<std::int64_t,int> starts, ends;
  for (auto& x : b) starts[x.lower]++, ends[x.upper]++;
  // sections: a new one begins at a start whose previous event (in order) was an end
  std::map<std::int64_t,int> sec_of_start, sec_of_end; int s = -1; bool last_end = true;
  for (auto t : ts) {
    if (ends.count(t)) { sec_of_end[t] = s + 1; last_end = true; }
    if (starts.count(t)) { if (last_end) ++s; sec_of_start[t] = s; last_end = false; }
  }
  std::vector<Item> r; for (auto& x : b) r.push_back({sec_of_start[x.lower], sec_of_end[x.upper], x.size});
  *M = s + 1; return r;
}
int main(int argc, char** argv) {
  double budget = argc > 1 ? atof(argv[1]) : 2; const char* only = argc > 2 ? argv[2] : "";
  double percent = argc > 3 ? atof(argv[3]) : 0; int seed = argc > 4 ? atoi(argv[4]) : 1;
  for (auto& in : hard_instances(seed)) {
    if (!strstr(in.name.c_str(), only)) continue;
    int M; auto items = items_of(in.buffers, &M);
    Search search(items, 1); double t0 = now(); long fails = 0; int runs = 0; bool ok = false;
    std::int64_t c = in.height * (1 + percent / 100), pat = 200;
    auto exp = std::function<bool()>([&] { return now() - t0 > budget; });
    while (!exp()) { auto r = search.fit(c, pat, exp); fails += search.dead_ends; ++runs; if (r == Search::Outcome::found) { ok = true; break; } if (r == Search::Outcome::impossible) { puts("IMPOSSIBLE"); break; } pat = pat * 1.1 + 10; }
    printf("%-20s n=%zu M=%d %s %.2fs runs %d fails %ld\n", in.name.c_str(), in.buffers.size(), M, ok ? "found" : "-----", now() - t0, runs, fails); fflush(stdout);
  }
}
