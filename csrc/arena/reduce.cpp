#include "reduce.h"

#include <algorithm>
#include <utility>

#include "search.h"

namespace memkit::arena {
namespace {

constexpr int kInstants = 5;             // that a group may have inside
constexpr std::size_t kMembers = 24;     // of a group
constexpr std::int64_t kDeadEnds = 200;  // to find out whether a group fits

}  // namespace

Reduction::Reduction(const std::vector<Item>& items, std::uint64_t seed, const std::function<bool()>& expired)
    : count_(items.size()), seed_(seed), expired_(expired) {
  int instants = 0;
  for (const Item& item : items) instants = std::max(instants, item.last);
  starting_.resize(instants + 1);
  ending_.resize(instants + 1);
  for (const Item& item : items) add(item, false);
  fill();
  settle();
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (!whole_[i] || pieces_[i].room) continue;
    left_.push_back(int(i));
    items_.push_back(pieces_[i].item);
  }
}

// Room to spare becomes items: what is given up at one instant and taken again at another is one of them.
void Reduction::fill() {
  const int instants = int(starting_.size());
  Offsets change(instants, 0);
  std::int64_t live = 0, most = 0;
  for (int t = 0; t < instants; ++t) {
    for (int i : starting_[t]) change[t] += pieces_[i].item.size;
    for (int i : ending_[t]) change[t] -= pieces_[i].item.size;
    most = std::max(most, live += change[t]);
  }
  change.front() -= most;
  change.back() += most;
  std::vector<Item> open;
  for (int t = 0; t < instants; ++t) {
    if (change[t] < 0) open.push_back({t, t, -change[t]});
    while (change[t] > 0) {
      auto room = std::find_if(open.begin(), open.end(), [&](const Item& each) { return each.size == change[t]; });
      if (room == open.end()) --room;
      const std::int64_t size = std::min(room->size, change[t]);
      add({room->first, t, size}, true);
      change[t] -= size;
      room->size -= size;
      if (room->size == 0) open.erase(room);
    }
  }
}

int Reduction::add(const Item& item, bool room) {
  const int i = int(pieces_.size());
  pieces_.push_back({item, room, {}});
  whole_.push_back(1);
  starting_[item.first].push_back(i);
  ending_[item.last].push_back(i);
  changed_.push_back(item.first);
  changed_.push_back(item.last);
  return i;
}

void Reduction::put_together(const Members& members, const Offsets& offsets, const Item& whole) {
  const auto remove = [](Members& from, int i) { from.erase(std::find(from.begin(), from.end(), i)); };
  const int made = add(whole, true);
  for (std::size_t k = 0; k < members.size(); ++k) {
    const int i = members[k];
    whole_[i] = 0;
    remove(starting_[pieces_[i].item.first], i);
    remove(ending_[pieces_[i].item.last], i);
    pieces_[made].parts.emplace_back(i, offsets[k]);
    pieces_[made].room &= pieces_[i].room;
  }
}

// What ends stands on top of each other, and what starts does in its place.
void Reduction::put_together(const Members& ending, const Members& starting) {
  Members members;
  Offsets offsets;
  Item whole{pieces_[ending[0]].item.first, pieces_[starting[0]].item.last, 0};
  for (const Members* side : {&ending, &starting}) {
    whole.size = 0;
    for (int i : *side) {
      members.push_back(i);
      offsets.push_back(whole.size);
      whole.size += pieces_[i].item.size;
    }
  }
  put_together(members, offsets, whole);
}

void Reduction::settle() {
  std::vector<int> seen;
  for (;;) {
    while (!changed_.empty()) {
      const int time = changed_.back();
      changed_.pop_back();
      seen.push_back(time);
      join_at(time);
    }
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    bool found = false;
    while (!found && !seen.empty() && !expired_()) {
      const int time = seen.back();
      seen.pop_back();
      found = join_around(time);
    }
    if (!found) return;
  }
}

bool Reduction::join_at(int time) {
  const Members &ending = ending_[time], &starting = starting_[time];
  if (ending.empty() || starting.empty()) return false;
  for (int i : ending)
    if (pieces_[i].item.first != pieces_[ending[0]].item.first) return false;
  for (int i : starting)
    if (pieces_[i].item.last != pieces_[starting[0]].item.last) return false;
  put_together(Members(ending), Members(starting));
  return true;
}

bool Reduction::join_around(int time) {
  if (ending_[time].empty() || starting_[time].empty()) return false;
  std::vector<int> inside{time};
  return close(inside, 1);
}

// Whether what starts or ends inside does so between two instants, or can be made to by more instants inside.
bool Reduction::close(std::vector<int>& inside, int depth) {
  const auto within = [&](int time) { return std::find(inside.begin(), inside.end(), time) != inside.end(); };
  Members members;
  std::vector<int> outside;
  for (int time : inside) {
    for (int i : ending_[time]) {
      members.push_back(i);
      if (!within(pieces_[i].item.first)) outside.push_back(pieces_[i].item.first);
    }
    for (int i : starting_[time]) {
      if (!within(pieces_[i].item.last)) members.push_back(i), outside.push_back(pieces_[i].item.last);
    }
    if (members.size() > kMembers) return false;
  }
  std::sort(outside.begin(), outside.end());
  outside.erase(std::unique(outside.begin(), outside.end()), outside.end());
  const auto [least, most] = std::minmax_element(inside.begin(), inside.end());
  if (outside.size() == 2 && outside[0] < *least && outside[1] > *most) {
    Item whole{outside[0], outside[1], 0};
    std::vector<int> times(inside);
    times.insert(times.end(), outside.begin(), outside.end());
    std::sort(times.begin(), times.end());
    const auto rank = [&](int time) { return int(std::lower_bound(times.begin(), times.end(), time) - times.begin()); };
    std::vector<Item> local;
    for (int i : members) {
      const Item& item = pieces_[i].item;
      local.push_back({rank(item.first), rank(item.last), item.size});
      if (item.first == whole.first) whole.size += item.size;
    }
    Search search(local, seed_);
    if (search.fit(whole.size, kDeadEnds, expired_) != Search::Outcome::found) return false;
    put_together(members, search.offsets(), whole);
    return true;
  }
  if (depth == kInstants) return false;
  for (int time : outside) {
    if (ending_[time].empty() || starting_[time].empty()) continue;
    inside.push_back(time);
    if (close(inside, depth + 1)) return true;
    inside.pop_back();
  }
  return false;
}

Offsets Reduction::expand(const Offsets& offsets) const {
  Offsets all(pieces_.size(), 0);
  for (std::size_t k = 0; k < left_.size(); ++k) all[left_[k]] = offsets[k];
  for (std::size_t i = pieces_.size(); i-- > 0;)  // made of earlier ones
    for (const auto& [part, offset] : pieces_[i].parts) all[part] = all[i] + offset;
  all.resize(count_);
  return all;
}

}  // namespace memkit::arena
