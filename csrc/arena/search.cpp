#include "search.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace memkit::arena {
namespace {

constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
constexpr int kDeepest = 10000;  // calls: they must fit the stack of any thread

}  // namespace

Search::Search(std::vector<Item> items, std::uint64_t seed) : items_(std::move(items)), random_(seed) {
  const int n = int(items_.size());
  for (const Item& item : items_) sections_ = std::max(sections_, item.last);
  starting_.resize(sections_);
  ending_.resize(sections_);
  covering_.resize(sections_);
  touching_.resize(n);
  for (int i = 0; i < n; ++i) {
    starting_[items_[i].first].push_back(i);
    ending_[items_[i].last - 1].push_back(i);
    for (int s = items_[i].first; s < items_[i].last; ++s) covering_[s].push_back(i);
  }
  for (int s = 0; s < sections_; ++s)
    for (int a : starting_[s])
      for (int b : covering_[s])
        if (a != b && (items_[b].first < s || a < b)) touching_[a].push_back(b), touching_[b].push_back(a);
  const Set empty((n + 63) / 64, 0);
  const auto set_of = [&](const std::vector<int>& members) {
    Set set = empty;
    for (int i : members) set[i / 64] |= std::uint64_t(1) << (i % 64);
    return set;
  };
  for (const auto& members : covering_) covered_.push_back(set_of(members));
  for (const auto& members : touching_) touched_.push_back(set_of(members));
  weight_.assign(sections_, 1);
  taste_.assign(n, 1);
}

Search::Outcome Search::fit(std::int64_t ceiling, std::int64_t patience, const std::function<bool()>& expired,
                            const std::vector<int>& below) {
  ceiling_ = ceiling;
  patience_ = patience;
  expired_ = &expired;
  dead_ends_ = 0;
  stopped_ = false;
  placed_count_ = 0;
  offsets_.assign(items_.size(), 0);
  placed_.assign(items_.size(), 0);
  floor_.assign(sections_, 0);
  left_.assign(sections_, 0);
  on_top_.assign(sections_, -1);
  is_dirty_.assign(sections_, 0);
  dirty_.clear();
  trail_.clear();
  std::int64_t bound = 0;
  for (int s = 0; s < sections_; ++s) {
    for (int i : covering_[s]) left_[s] += items_[i].size;
    bound = std::max(bound, left_[s]);
  }
  if (bound > ceiling) return Outcome::impossible;
  reach_ = left_;
  look_ahead_ = ceiling > bound && random_() % 2;
  soft_ = double(ceiling) / 64;
  waste_taste_ = std::uniform_real_distribution<double>(0, 1)(random_);
  skip_taste_ = std::uniform_real_distribution<double>(0, 1)(random_);
  style_ = int(random_() % 6);
  std::uniform_real_distribution<double> noise(0.7, 1.3);
  for (double& t : taste_) t = noise(random_);
  for (int i : below) put(i);
  if (!settle()) return Outcome::gave_up;
  if (descend(0)) return Outcome::found;
  return stopped_ || !below.empty() ? Outcome::gave_up : Outcome::impossible;
}

std::vector<int> Search::below(const Offsets& plan, int first, int last, std::int64_t level,
                               std::int64_t ceiling) const {
  std::vector<int> order(items_.size()), rest;
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return plan[a] < plan[b]; });
  std::vector<char> moves(items_.size(), 0);
  for (int i : order) {
    const bool asked = plan[i] >= level && items_[i].first < last && items_[i].last > first;
    if (asked || plan[i] + items_[i].size > ceiling) moves[i] = 1;
    if (!moves[i]) {
      rest.push_back(i);
      continue;
    }
    for (int j : touching_[i])
      if (plan[j] > plan[i]) moves[j] = 1;
  }
  return rest;
}

bool Search::descend(int depth) {
  if (placed_count_ == int(items_.size())) return true;
  const Choice choice = choose();
  if (depth > kDeepest || ((++nodes_ & 255) == 0 && (*expired_)())) {
    stopped_ = true;
    return false;
  }
  std::vector<int> options;
  candidates(choice, options);
  const std::size_t mark = trail_.size();
  std::vector<std::pair<double, int>> ranked;  // -1: the corner stays empty
  Set blame = covered_[choice.section];
  if (floor_[choice.section] + left_[choice.section] < ceiling_)
    for (int i : covering_[choice.section])
      if (!placed_[i] && offsets_[i] == floor_[choice.section]) join(blame, touched_[i]);
  const auto fails = [&](int section) {
    weight_[section] += 1;
    if (++dead_ends_ > patience_) stopped_ = true;
  };
  if (options.empty() && !choice.may_skip) fails(choice.section);
  const bool ranking = look_ahead_ && options.size() + choice.may_skip > 1;
  if (choice.may_skip) options.push_back(-1);
  for (int i : options) {
    const double value = i < 0 ? -skip_taste_ : worth(i);
    if (!ranking) {
      ranked.emplace_back(-value, i);
      continue;
    }
    waste_ = 0;
    if (i < 0 ? skip(choice) : place(i)) {
      ranked.emplace_back(waste_ * waste_taste_ - value, i);
    } else {
      fails(culprit_);
      join(blame, covered_[culprit_]);
    }
    retract(mark, i);
  }
  std::sort(ranked.begin(), ranked.end());
  for (const auto& [score, i] : ranked) {
    if (stopped_) return false;
    if (i < 0 ? skip(choice) : place(i)) {
      if (descend(depth + 1)) return true;
      if (stopped_) return false;  // before any failure, perhaps: nothing is to blame yet
    } else {
      fails(culprit_);
      blame_ = covered_[culprit_];
    }
    const bool involved = concerns(mark, i);
    retract(mark, i);
    if (!involved) return false;
    join(blame, blame_);
  }
  blame_ = std::move(blame);
  return false;
}

void Search::join(Set& set, const Set& other) {
  for (std::size_t k = 0; k < set.size(); ++k) set[k] |= other[k];
}

// Whether the step since the mark changed anything that is to blame for the failure after it.
bool Search::concerns(std::size_t mark, int item) const {
  if (item >= 0 && has(blame_, item)) return true;
  const std::less<const std::int64_t*> before;
  for (std::size_t k = mark; k < trail_.size(); ++k) {
    const std::int64_t* where = trail_[k].first;
    if (before(where, offsets_.data()) || !before(where, offsets_.data() + offsets_.size())) continue;
    if (has(blame_, int(where - offsets_.data()))) return true;
  }
  return false;
}

void Search::retract(std::size_t mark, int item) {
  undo(mark);
  if (item < 0 || !placed_[item]) return;
  placed_[item] = 0;
  --placed_count_;
}

int Search::count(int section, bool left) const {
  int n = 0;
  for (int i : left ? starting_[section] : ending_[section]) n += !placed_[i] && offsets_[i] == floor_[section];
  return n;
}

Search::Choice Search::choose() {
  Choice best;
  for (int s = 0; s < sections_;) {
    int end = s + 1;
    while (end < sections_ && floor_[end] == floor_[s]) ++end;
    const std::int64_t before = s ? floor_[s - 1] : kNone, after = end < sections_ ? floor_[end] : kNone;
    if (floor_[s] != kNone && before > floor_[s] && after > floor_[s]) {
      for (bool left : {true, false}) {
        Choice choice{left ? s : end - 1, left};
        const int options = count(choice.section, left);
        if (floor_[choice.section] + left_[choice.section] < ceiling_)
          choice.may_skip = skip_floor(choice, nullptr, nullptr) <= ceiling_ - left_[choice.section];
        choice.cost = options + choice.may_skip <= 1 ? 0 : (options + choice.may_skip) / weight_[choice.section];
        if (choice.cost < best.cost) best = choice;
        if (best.cost == 0) return best;
      }
    }
    s = end;
  }
  return best;
}

void Search::candidates(const Choice& choice, std::vector<int>& out) const {
  const int s = choice.section;
  for (int i : choice.left ? starting_[s] : ending_[s]) {
    if (placed_[i] || offsets_[i] != floor_[s]) continue;
    // Of two alike, and of two of one lifetime on top of each other, one order will do.
    const int below = int(on_top_[s]);
    if (below > i && same_kind(below, i) && offsets_[below] + items_[below].size == floor_[s]) continue;
    bool alike = false;
    for (int j : out) alike = alike || (same_kind(i, j) && items_[i].size == items_[j].size);
    if (!alike) out.push_back(i);
  }
}

double Search::worth(int i) const {
  const Item& item = items_[i];
  const std::int64_t top = offsets_[i] + item.size;
  const double high = double(item.size) / double(ceiling_), wide = double(item.last - item.first) / sections_;
  double worth = (style_ % 3 == 0 ? high : style_ % 3 == 1 ? high * wide : wide) * taste_[i];
  if (style_ < 3) {  // level with what stands beside it
    worth += item.first > 0 && floor_[item.first - 1] == top;
    worth += item.last < sections_ && floor_[item.last] == top;
  }
  return worth;
}

void Search::raise(int item, std::int64_t offset) {
  const std::int64_t old = offsets_[item];
  if (offset <= old) return;
  set(offsets_[item], offset);
  for (int s = items_[item].first; s < items_[item].last; ++s)
    if (floor_[s] == old && !is_dirty_[s]) is_dirty_[s] = 1, dirty_.push_back(s);
}

bool Search::place(int i) {
  put(i);
  return settle();
}

// Leaves the floors to `settle`.
void Search::put(int i) {
  const Item& item = items_[i];
  const std::int64_t top = offsets_[i] + item.size;
  placed_[i] = 1;
  ++placed_count_;
  for (int s = item.first; s < item.last; ++s) {
    set(left_[s], left_[s] - item.size);
    set(on_top_[s], i);
    if (!is_dirty_[s]) is_dirty_[s] = 1, dirty_.push_back(s);
  }
  for (int j : touching_[i])
    if (!placed_[j]) raise(j, top);
}

// The lowest floor there is where none of the items that could stand in the section's corner does. In a plan where
// nothing can slide down, each of them then rests on another item that is not yet placed.
std::int64_t Search::skip_floor(const Choice& choice, std::vector<int>* standing, std::int64_t* common) const {
  const int s = choice.section;
  std::int64_t rest = kNone, others = kNone;
  for (int i : covering_[s]) {
    if (placed_[i]) continue;
    if (offsets_[i] != floor_[s]) {
      others = std::min(others, offsets_[i]);
      continue;
    }
    if (standing) standing->push_back(i);
    for (int j : touching_[i]) {
      if (placed_[j]) continue;
      const bool corner = items_[j].first <= s && s < items_[j].last && offsets_[j] == floor_[s];
      if (!corner) rest = std::min(rest, offsets_[j] + items_[j].size);
    }
  }
  if (common) *common = rest;
  return std::min(rest, others);
}

bool Search::skip(const Choice& choice) {
  std::vector<int> standing;
  std::int64_t common = 0;
  skip_floor(choice, &standing, &common);
  if (common == kNone) return false;
  for (int i : standing) raise(i, common);
  return settle();
}

bool Search::settle() {
  bool good = true;
  for (int s : dirty_) {
    is_dirty_[s] = 0;
    if (!good) continue;
    std::int64_t lowest = kNone;
    for (int i : covering_[s]) {
      if (!placed_[i]) lowest = std::min(lowest, offsets_[i]);
      if (lowest == floor_[s]) break;  // floors only rise
    }
    if (lowest != floor_[s]) set(floor_[s], lowest);
    if (lowest == kNone) continue;
    const std::int64_t reach = lowest + left_[s];
    if (reach > ceiling_) {
      good = false;
      culprit_ = s;
    } else if (reach > reach_[s]) {
      waste_ += double(reach - reach_[s]) / (double(ceiling_ - reach_[s]) + soft_);
      set(reach_[s], reach);
    }
  }
  dirty_.clear();
  return good;
}

void Search::undo(std::size_t mark) {
  while (trail_.size() > mark) {
    *trail_.back().first = trail_.back().second;
    trail_.pop_back();
  }
}

}  // namespace memkit::arena
