// Offline planning: buffers whose sizes and lifetimes are known get offsets, so that buffers alive together never
// overlap and the storage that holds them all is as small as can be found. No torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace memkit::arena {

// Alive in the half-open interval [lower, upper) of any clock. One that is never alive, or empty, takes no room.
struct Buffer {
  std::int64_t lower = 0;
  std::int64_t upper = 0;
  std::int64_t size = 0;  // bytes
};

struct Solution {
  std::vector<std::int64_t> offsets;  // multiples of the alignment
  std::int64_t height = 0;            // bytes: the highest end of a buffer, sizes rounded up to the alignment
  std::int64_t lower_bound = 0;       // the most bytes alive at once, sizes rounded up; no plan is lower
  double seconds = 0;
  bool optimal = false;  // no plan is lower: the bound is met, or the search has left nothing out
  std::string method;    // what found it
};

// Looks for at most about `budget` seconds, and stops at once at the lower bound. The first plan, by a greedy rule,
// is made whatever the budget. The same seed gives the same plan, unless time ran out elsewhere.
// Throws std::invalid_argument for a negative size, a lifetime that ends before it starts or an alignment below 1,
// and std::overflow_error where the sizes do not add up within 63 bits.
Solution solve(const std::vector<Buffer>& buffers, std::int64_t alignment = 1, double budget = 1,
               std::uint64_t seed = 0);

// Whether the offsets are aligned, not negative, and keep buffers that are alive together apart.
// Shares no code with the solver. `why`, if given, says what is wrong.
bool verify(const std::vector<Buffer>& buffers, const std::vector<std::int64_t>& offsets, std::int64_t alignment = 1,
            std::string* why = nullptr);

}  // namespace memkit::arena
