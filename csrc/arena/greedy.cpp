#include "greedy.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

namespace memkit::arena {

std::int64_t height_of(const std::vector<Item>& items, const Offsets& offsets) {
  std::int64_t top = 0;
  for (std::size_t i = 0; i < items.size(); ++i) top = std::max(top, offsets[i] + items[i].size);
  return top;
}

Offsets plan_online(const std::vector<Item>& items) {
  const int n = int(items.size());
  std::vector<int> births(n), deaths(n);
  std::iota(births.begin(), births.end(), 0);
  deaths = births;
  std::stable_sort(births.begin(), births.end(), [&](int a, int b) {
    return items[a].first != items[b].first ? items[a].first < items[b].first : items[a].size > items[b].size;
  });
  std::stable_sort(deaths.begin(), deaths.end(), [&](int a, int b) { return items[a].last < items[b].last; });

  Offsets offsets(n, 0);
  std::map<std::int64_t, std::int64_t> holes;               // start to end
  std::set<std::pair<std::int64_t, std::int64_t>> by_size;  // length and start
  std::int64_t top = 0;
  const auto add = [&](std::int64_t start, std::int64_t end) {
    holes[start] = end;
    by_size.insert({end - start, start});
  };
  const auto remove = [&](std::map<std::int64_t, std::int64_t>::iterator hole) {
    by_size.erase({hole->second - hole->first, hole->first});
    holes.erase(hole);
  };
  auto death = deaths.begin();
  for (int i : births) {
    for (; items[*death].last <= items[i].first; ++death) {
      std::int64_t start = offsets[*death], end = start + items[*death].size;
      auto next = holes.lower_bound(start);
      if (next != holes.end() && next->first == end) {
        end = next->second;
        remove(next);
      }
      next = holes.lower_bound(start);
      if (next != holes.begin() && std::prev(next)->second == start) {
        start = std::prev(next)->first;
        remove(std::prev(next));
      }
      if (end == top) {
        top = start;
      } else {
        add(start, end);
      }
    }
    const auto fit = by_size.lower_bound({items[i].size, 0});
    if (fit == by_size.end()) {
      offsets[i] = top;
      top += items[i].size;
      continue;
    }
    const auto [length, start] = *fit;
    offsets[i] = start;
    remove(holes.find(start));
    if (length > items[i].size) add(start + items[i].size, start + length);
  }
  return offsets;
}

Fitter::Fitter(const std::vector<Item>& items) : items_(items), by_first_(items.size()), rank_(items.size()) {
  std::iota(by_first_.begin(), by_first_.end(), 0);
  std::sort(by_first_.begin(), by_first_.end(),
            [&](int a, int b) { return std::pair(items[a].first, a) < std::pair(items[b].first, b); });
  for (std::size_t k = 0; k < items.size(); ++k) rank_[by_first_[k]] = int(k);
  while (leaves_ < int(items.size())) leaves_ *= 2;
}

void Fitter::mark(int item, int last) {
  for (int node = leaves_ + rank_[item]; node > 0; node /= 2) latest_[node] = std::max(latest_[node], last);
}

// What is placed already and lives at some time together with the item.
void Fitter::collect(int node, int low, int high, int item) {
  if (latest_[node] <= items_[item].first || items_[by_first_[low]].first >= items_[item].last) return;
  if (high - low == 1) {
    const int other = by_first_[low];
    taken_.emplace_back(offsets_[other], offsets_[other] + items_[other].size);
    return;
  }
  const int middle = (low + high) / 2;
  collect(2 * node, low, middle, item);
  if (middle < int(items_.size())) collect(2 * node + 1, middle, high, item);
}

Offsets Fitter::plan(const std::vector<int>& order, bool best, const std::function<bool()>& expired) {
  offsets_.assign(items_.size(), 0);
  latest_.assign(2 * leaves_, 0);
  std::int64_t height = 0;
  int count = 0;
  for (int i : order) {
    if (++count % 64 == 0 && expired()) return {};
    taken_.clear();
    collect(1, 0, leaves_, i);
    std::sort(taken_.begin(), taken_.end());
    const std::int64_t size = items_[i].size;
    std::int64_t bottom = 0, chosen = -1, spare = 0;
    for (const auto& [start, end] : taken_) {
      const std::int64_t room = start - bottom - size;
      if (room >= 0 && (chosen < 0 || room < spare)) {
        chosen = bottom;
        spare = room;
        if (!best || room == 0) break;
      }
      bottom = std::max(bottom, end);
    }
    offsets_[i] = chosen < 0 ? bottom : chosen;
    height = std::max(height, offsets_[i] + size);
    mark(i, items_[i].last);
  }
  return offsets_;
}

std::vector<std::vector<int>> greedy_orders(const std::vector<Item>& items) {
  int sections = 0;
  for (const Item& item : items) sections = std::max(sections, item.last);
  // How contended an item's busiest section is: a sparse table of the live sizes.
  std::vector<std::vector<double>> live(1, std::vector<double>(sections + 1, 0));
  for (const Item& item : items) {
    live[0][item.first] += double(item.size);
    live[0][item.last] -= double(item.size);
  }
  std::partial_sum(live[0].begin(), live[0].end(), live[0].begin());
  for (int step = 1; 2 * step <= sections; step *= 2) {
    std::vector<double> next(live.back());
    for (int s = 0; s + step <= sections; ++s) next[s] = std::max(next[s], live.back()[s + step]);
    live.push_back(std::move(next));
  }
  const auto busiest = [&](const Item& item) {
    int level = 0;
    while ((2 << level) <= item.last - item.first) ++level;
    return std::max(live[level][item.first], live[level][item.last - (1 << level)]);
  };

  using Key = std::pair<double, double>;  // larger first
  const std::function<Key(const Item&)> keys[] = {
      [](const Item& i) { return Key(i.size, i.last - i.first); },
      [](const Item& i) { return Key(double(i.size) * (i.last - i.first), i.size); },
      [](const Item& i) { return Key(i.last - i.first, i.size); },
      [&](const Item& i) { return Key(busiest(i), double(i.size) * (i.last - i.first)); },
      [&](const Item& i) { return Key(busiest(i), i.last - i.first); },
      [](const Item& i) { return Key(-i.first, i.size); },
      [](const Item& i) { return Key(i.last, i.size); },
  };
  std::vector<std::vector<int>> orders;
  for (const auto& key : keys) {
    std::vector<std::pair<Key, int>> ranked;
    for (std::size_t i = 0; i < items.size(); ++i) ranked.emplace_back(key(items[i]), -int(i));
    std::sort(ranked.rbegin(), ranked.rend());
    orders.emplace_back();
    for (const auto& [unused, negative] : ranked) orders.back().push_back(-negative);
  }
  return orders;
}

}  // namespace memkit::arena
