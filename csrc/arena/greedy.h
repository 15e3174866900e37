// Plans made in one pass.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace memkit::arena {

// Alive in the sections [first, last) of time; the size is in any unit.
struct Item {
  int first, last;
  std::int64_t size;
};

using Offsets = std::vector<std::int64_t>;

std::int64_t height_of(const std::vector<Item>& items, const Offsets& offsets);

// As an allocator would that does not know the future: in order of birth, the smallest hole that is large enough.
// Quick at any size.
Offsets plan_online(const std::vector<Item>& items);

// In the given order, each at the lowest place that is free for its whole life (or, best, the tightest one under the
// height reached so far). Empty if `expired` said so on the way.
class Fitter {
 public:
  explicit Fitter(const std::vector<Item>& items);
  Offsets plan(const std::vector<int>& order, bool best, const std::function<bool()>& expired);

 private:
  void collect(int node, int low, int high, int item);
  void mark(int item, int last);

  const std::vector<Item>& items_;
  std::vector<int> by_first_, rank_;  // items in order of their first section; where each stands in it
  std::vector<int> latest_;           // a tree over that order: the last section of the items placed so far
  int leaves_ = 1;
  Offsets offsets_;
  std::vector<std::pair<std::int64_t, std::int64_t>> taken_;
};

// Orders worth trying, the most promising first.
std::vector<std::vector<int>> greedy_orders(const std::vector<Item>& items);

}  // namespace memkit::arena
