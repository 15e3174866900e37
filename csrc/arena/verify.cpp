#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "solve.h"

namespace memkit::arena {

bool verify(const std::vector<Buffer>& buffers, const std::vector<std::int64_t>& offsets, std::int64_t alignment,
            std::string* why) {
  const auto wrong = [&](const std::string& text) {
    if (why) *why = text;
    return false;
  };
  if (offsets.size() != buffers.size())
    return wrong(std::to_string(offsets.size()) + " offsets for " + std::to_string(buffers.size()) + " buffers");

  std::vector<std::tuple<std::int64_t, bool, std::size_t>> events;  // deaths before births
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    if (offsets[i] < 0 || offsets[i] % alignment != 0)
      return wrong("buffer " + std::to_string(i) + " has the offset " + std::to_string(offsets[i]));
    if (b.size <= 0 || b.upper <= b.lower) continue;
    if (offsets[i] > std::numeric_limits<std::int64_t>::max() - b.size)
      return wrong("buffer " + std::to_string(i) + " ends beyond 63 bits");
    events.emplace_back(b.lower, true, i);
    events.emplace_back(b.upper, false, i);
  }
  std::sort(events.begin(), events.end());

  // What is alive lies apart, so a newcomer can only meet its neighbours.
  std::map<std::int64_t, std::size_t> alive;
  for (const auto& [time, born, i] : events) {
    if (!born) {
      alive.erase(offsets[i]);
      continue;
    }
    const auto above = alive.lower_bound(offsets[i]);
    if (above != alive.end() && above->first < offsets[i] + buffers[i].size)
      return wrong("buffers " + std::to_string(i) + " and " + std::to_string(above->second) + " overlap");
    if (above != alive.begin()) {
      const auto& [start, below] = *std::prev(above);
      if (start + buffers[below].size > offsets[i])
        return wrong("buffers " + std::to_string(i) + " and " + std::to_string(below) + " overlap");
    }
    alive.emplace(offsets[i], i);
  }
  return true;
}

}  // namespace memkit::arena
