// How far above the known best height the planner ends on hard instances.
//   plan_instances [seconds] [part of the name] [seed] [trace.csv ...]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "instances.h"

namespace {

using namespace memkit::arena;

void report(const Instance& in, std::int64_t alignment, double seconds) {
  const Solution s = solve(in.buffers, alignment, seconds, 1);
  std::string why;
  const bool good = verify(in.buffers, s.offsets, alignment, &why);
  const std::int64_t best = in.height ? in.height : s.lower_bound;
  std::printf("%-20s %6zu buffers  %+6.2f%%  %6.2f s  %-7s%s%s\n", in.name.c_str(), in.buffers.size(),
              100.0 * double(s.height - best) / double(best), s.seconds, s.method.c_str(), s.optimal ? " optimal" : "",
              good ? "" : (" WRONG: " + why).c_str());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
  const char* only = argc > 2 ? argv[2] : "";
  for (const Instance& in : hard_instances(argc > 3 ? std::atoi(argv[3]) : 1))
    if (std::strstr(in.name.c_str(), only)) report(in, 1, seconds);
  for (int i = 4; i < argc; ++i) report({argv[i], read_trace(argv[i]), 0}, 512, seconds);
}
