#include "solve.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>

#include "greedy.h"
#include "reduce.h"
#include "search.h"

namespace memkit::arena {
namespace {

// Dead ends that a search is given; every second one gets twice as many, every fourth four times, and so on: most
// problems yield to a lucky start or to a long search, and it does not show which.
constexpr std::int64_t kPatience = 500;
constexpr std::int64_t kTouchUp = 100;  // and to one that moves only a part of a plan
constexpr std::int64_t kTurns = 4;      // at a reduced problem
constexpr std::size_t kMost = 20000;    // items to reduce

// Items that share no time with those of other parts, above a base that they cannot go below.
struct Part {
  std::vector<int> members;  // of the problem
  std::vector<Item> items;   // in sections of time
  std::vector<Item> full;    // in all instants of the part
  std::int64_t base = 0, bound = 0, height = 0;
  Offsets offsets;
  const char* method = "";
  std::unique_ptr<Search> search;
  std::int64_t patience = kPatience;
  std::vector<int> order;         // the best for the fitter so far
  std::int64_t order_height = 0;  // what it gave
  Offsets order_offsets;
  int round = 0;
};

// Only the largest sets of items alive together matter: time is cut into one section for each of them. A new one
// begins where something is born after a death. Times of different buffers become sections [first, last).
std::vector<Item> sections_of(const std::vector<int>& members, const std::vector<Item>& items) {
  struct Event {
    int time;
    bool birth;
    int index;
  };
  std::vector<Event> events;
  for (std::size_t k = 0; k < members.size(); ++k) {
    events.push_back({items[members[k]].first, true, int(k)});
    events.push_back({items[members[k]].last, false, int(k)});
  }
  std::sort(events.begin(), events.end(),
            [](const Event& a, const Event& b) { return std::pair(a.time, a.birth) < std::pair(b.time, b.birth); });
  std::vector<Item> result(members.size());
  int section = -1;
  bool died = true;
  for (const Event& event : events) {
    if (event.birth) {
      section += died;
      result[event.index] = {section, section, items[members[event.index]].size};
    } else {
      result[event.index].last = section + 1;
    }
    died = !event.birth;
  }
  return result;
}

// The instants of some items as their ranks.
std::vector<Item> ranked(const std::vector<int>& members, const std::vector<Item>& items) {
  std::vector<int> times;
  for (int i : members) times.push_back(items[i].first), times.push_back(items[i].last);
  std::sort(times.begin(), times.end());
  times.erase(std::unique(times.begin(), times.end()), times.end());
  const auto rank = [&](int time) { return int(std::lower_bound(times.begin(), times.end(), time) - times.begin()); };
  std::vector<Item> result;
  for (int i : members) result.push_back({rank(items[i].first), rank(items[i].last), items[i].size});
  return result;
}

std::int64_t most_alive(const std::vector<Item>& items) {
  int sections = 0;
  for (const Item& item : items) sections = std::max(sections, item.last);
  std::vector<std::int64_t> live(sections + 1, 0);
  for (const Item& item : items) {
    live[item.first] += item.size;
    live[item.last] -= item.size;
  }
  std::partial_sum(live.begin(), live.end(), live.begin());
  return live.empty() ? 0 : *std::max_element(live.begin(), live.end());
}

// Cuts time where nothing is alive, lays items that live as long as their part at its bottom, and cuts again.
std::vector<Part> divide(const std::vector<Item>& items, Offsets& offsets) {
  std::vector<Part> parts, work(1);
  work[0].members.resize(items.size());
  std::iota(work[0].members.begin(), work[0].members.end(), 0);
  std::int64_t effort = 64 * std::int64_t(items.size()) + 4096;
  while (!work.empty()) {
    Part part = std::move(work.back());
    work.pop_back();
    std::vector<Item> local = sections_of(part.members, items);
    effort -= std::int64_t(local.size());
    std::vector<int> order(local.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) { return local[a].first < local[b].first; });
    for (std::size_t begin = 0, end; begin < order.size(); begin = end) {
      const int first = local[order[begin]].first;
      int last = first;
      for (end = begin; end < order.size() && (end == begin || local[order[end]].first < last); ++end)
        last = std::max(last, local[order[end]].last);
      Part piece;
      piece.base = part.base;
      for (std::size_t k = begin; k < end; ++k) {
        const Item& item = local[order[k]];
        const int member = part.members[order[k]];
        if (item.first == first && item.last == last) {
          offsets[member] = piece.base;
          piece.base += item.size;
        } else {
          piece.members.push_back(member);
        }
      }
      if (piece.members.empty()) continue;
      if (piece.members.size() < local.size() && effort > 0) {
        work.push_back(std::move(piece));
        continue;
      }
      piece.items = sections_of(piece.members, items);
      piece.full = ranked(piece.members, items);
      piece.bound = most_alive(piece.items);
      parts.push_back(std::move(piece));
    }
  }
  return parts;
}

// The search keeps lists and sets of what lives together.
bool searchable(const std::vector<Item>& items) {
  if (items.size() > 5000) return false;
  std::vector<std::int64_t> born(2 * items.size() + 1, 0), live(born);
  for (const Item& item : items) {
    ++born[item.first];
    ++live[item.first];
    --live[item.last];
  }
  std::partial_sum(live.begin(), live.end(), live.begin());
  std::int64_t covers = 0, pairs = 0;
  for (std::size_t s = 0; s < live.size(); ++s) {
    covers += live[s];
    pairs += born[s] * live[s];
  }
  return covers < 8000000 && pairs < 8000000;
}

void place(const Part& part, Offsets& offsets) {
  for (std::size_t k = 0; k < part.members.size(); ++k) offsets[part.members[k]] = part.base + part.offsets[k];
}

class Planner {
 public:
  Planner(std::vector<Part> parts, std::int64_t bound, std::uint64_t seed, const std::function<bool()>& expired)
      : parts_(std::move(parts)), bound_(bound), seed_(seed), random_(seed), expired_(expired) {}

  // Takes so many turns at most; `reduces`: also at smaller problems.
  std::vector<Part>& run(std::int64_t turns, bool reduces) {
    for (Part& part : parts_) {
      keep(part, plan_online(part.items), "online");
      greedy(part);
    }
    // Only the highest part matters.
    for (Part* part = highest(); part && turns > 0; part = highest(), --turns) {
      if (target(*part) >= part->height || expired_()) break;
      if (reduces && part->round == 0) reduce(*part);
      if (!improve(*part)) break;
    }
    return parts_;
  }

  Part* highest() {
    Part* top = nullptr;
    for (Part& part : parts_)
      if (!top || part.base + part.height > top->base + top->height) top = &part;
    return top;
  }

 private:
  std::int64_t target(const Part& part) const { return std::max(part.bound, bound_ - part.base); }

  void keep(Part& part, Offsets offsets, const char* method) {
    if (offsets.empty()) return;
    const std::int64_t height = height_of(part.items, offsets);
    if (!part.offsets.empty() && height >= part.height) return;
    part.height = height;
    part.offsets = std::move(offsets);
    part.method = method;
  }

  void greedy(Part& part) {
    if (part.height <= target(part)) return;
    Fitter fitter(part.items);
    for (const std::vector<int>& order : greedy_orders(part.items)) {
      for (bool best : {false, true}) {
        Offsets offsets = fitter.plan(order, best, expired_);
        if (offsets.empty()) return;
        const std::int64_t height = height_of(part.items, offsets);
        if (!best && (part.order.empty() || height < part.order_height)) {
          part.order = order;
          part.order_height = height;
        }
        keep(part, std::move(offsets), "greedy");
        if (part.height <= target(part) || expired_()) return;
      }
    }
  }

  // Plans what is left when all is put together that fits without waste.
  void reduce(Part& part) {
    if (part.full.size() > kMost) return;
    const Reduction reduction(part.full, seed_, expired_);
    const std::vector<Item>& items = reduction.items();
    if (items.size() == part.full.size()) return;
    Offsets offsets(items.size(), 0);
    Planner planner(divide(items, offsets), target(part), seed_, expired_);
    for (const Part& piece : planner.run(kTurns, false)) place(piece, offsets);
    keep(part, reduction.expand(offsets), "reduced");
  }

  // False where nothing more can be done.
  bool improve(Part& part) {
    if (!part.search) {
      if (!searchable(part.items)) return false;
      part.search = std::make_unique<Search>(part.items, seed_);
    }
    const std::int64_t low = target(part), gap = part.height - low;
    // The bound itself, and steps on the way for when it is out of reach.
    const std::int64_t goals[] = {low, low + gap / 2, low, low + gap * 7 / 8};
    const std::int64_t goal = std::min(goals[part.round % 4], part.height - 1);
    const Search::Outcome outcome = part.search->fit(goal, part.patience, expired_);
    if (outcome == Search::Outcome::found) {
      keep(part, part.search->offsets(), "search");
    } else if (outcome == Search::Outcome::impossible) {
      part.bound = goal + 1;
    }
    if (part.round % 2 == 1) shuffle(part);
    repair(part);
    if (++part.round % 4 == 0) {
      const int turn = part.round / 4 + 1;
      part.patience = kPatience * (turn & -turn);
    }
    return true;
  }

  // Items that stick out on top come earlier in the order; some others change places.
  void shuffle(Part& part) {
    if (part.order.empty()) return;
    Fitter fitter(part.items);
    const int n = int(part.items.size());
    const auto draw = [&](int below) { return int(random_() % std::uint64_t(below)); };
    for (std::int64_t tries = part.patience / 20; tries > 0 && part.height > target(part); --tries) {
      std::vector<int> order = part.order;
      if (!part.order_offsets.empty() && draw(4) > 0) {
        std::vector<int> high;
        for (int k = 0; k < n; ++k)
          if (part.order_offsets[order[k]] + part.items[order[k]].size > part.order_height - part.order_height / 50)
            high.push_back(k);
        const int from = high[draw(int(high.size()))], to = draw(from + 1);
        std::rotate(order.begin() + to, order.begin() + from, order.begin() + from + 1);
      } else {
        for (int swaps = 1 + draw(3); swaps > 0; --swaps) {
          const int a = draw(n), b = std::min(n - 1, a + draw(1 + n / 8));
          std::rotate(order.begin() + a, order.begin() + b, order.begin() + b + 1);
        }
      }
      Offsets offsets = fitter.plan(order, false, expired_);
      if (offsets.empty()) return;
      const std::int64_t height = height_of(part.items, offsets);
      if (height > part.order_height) continue;
      part.order = std::move(order);
      part.order_height = height;
      part.order_offsets = offsets;
      keep(part, std::move(offsets), "shuffle");
    }
  }

  // Keeps the lower part of the plan, or of the plan upside down, and looks for a better upper one.
  void repair(Part& part) {
    const auto draw = [&](std::int64_t below) { return std::int64_t(random_() % std::uint64_t(below)); };
    const auto flip = [&](Offsets& offsets, std::int64_t height) {
      for (std::size_t i = 0; i < offsets.size(); ++i) offsets[i] = height - offsets[i] - part.items[i].size;
    };
    for (std::int64_t tries = part.patience / 5; tries > 0 && part.height > target(part) && !expired_(); --tries) {
      const std::int64_t gap = part.height - target(part);
      const std::int64_t goal = part.height - (draw(6) ? 1 + draw(1 + gap / 8) : 0);
      const bool flipped = draw(2);
      Offsets plan = part.offsets;
      if (flipped) flip(plan, part.height);
      const int sections = part.search->sections();
      const int wide = draw(2) ? sections : 1 + int(draw(sections)), first = int(draw(sections - wide + 1));
      const std::vector<int> below = part.search->below(plan, first, first + wide, draw(part.height), goal);
      if (part.search->fit(goal, kTouchUp, expired_, below) != Search::Outcome::found) continue;
      plan = part.search->offsets();
      if (flipped) flip(plan, goal);
      if (height_of(part.items, plan) < part.height) {
        keep(part, std::move(plan), "repair");
      } else {
        part.offsets = std::move(plan);  // another one of the same height: a new start
      }
    }
  }

  std::vector<Part> parts_;
  std::int64_t bound_;
  std::uint64_t seed_;
  std::mt19937_64 random_;
  const std::function<bool()>& expired_;
};

// Times become their ranks, sizes units of the alignment.
std::vector<Item> items_of(const std::vector<Buffer>& buffers, std::int64_t alignment, std::vector<int>& members) {
  if (alignment < 1) throw std::invalid_argument("the alignment must be at least 1");
  if (buffers.size() > std::size_t(std::numeric_limits<int>::max() / 4))
    throw std::invalid_argument("too many buffers");
  std::vector<std::int64_t> times;
  std::int64_t room = std::numeric_limits<std::int64_t>::max() / alignment;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    if (b.size < 0) throw std::invalid_argument("buffer " + std::to_string(i) + " has a negative size");
    if (b.upper < b.lower) throw std::invalid_argument("buffer " + std::to_string(i) + " ends before it starts");
    if (b.size == 0 || b.lower == b.upper) continue;
    const std::int64_t units = (b.size - 1) / alignment + 1;
    if (units > room) throw std::overflow_error("the sizes of the buffers add up to more than 63 bits hold");
    room -= units;
    members.push_back(int(i));
    times.push_back(b.lower);
    times.push_back(b.upper);
  }
  std::sort(times.begin(), times.end());
  times.erase(std::unique(times.begin(), times.end()), times.end());
  const auto rank = [&](std::int64_t time) {
    return int(std::lower_bound(times.begin(), times.end(), time) - times.begin());
  };
  std::vector<Item> items;
  for (int i : members)
    items.push_back({rank(buffers[i].lower), rank(buffers[i].upper), (buffers[i].size - 1) / alignment + 1});
  return items;
}

}  // namespace

Solution solve(const std::vector<Buffer>& buffers, std::int64_t alignment, double budget, std::uint64_t seed) {
  Solution solution;
  solution.offsets.assign(buffers.size(), 0);
  std::vector<int> members;
  const std::vector<Item> items = items_of(buffers, alignment, members);
  const std::int64_t bound = most_alive(items);
  Offsets offsets(items.size(), 0);
  std::vector<Part> parts = divide(items, offsets);
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  const std::function<bool()> expired = [&] { return seconds() > budget; };
  Planner planner(std::move(parts), bound, seed, expired);
  for (const Part& part : planner.run(std::numeric_limits<std::int64_t>::max(), true)) place(part, offsets);
  const std::int64_t height = height_of(items, offsets);
  const Part* top = planner.highest();
  solution.method = top ? top->method : "stacked";
  solution.optimal = height == bound || (top && top->base + top->bound >= height);
  for (std::size_t k = 0; k < members.size(); ++k) solution.offsets[members[k]] = offsets[k] * alignment;
  solution.height = height * alignment;
  solution.lower_bound = bound * alignment;
  solution.seconds = seconds();
  return solution;
}

}  // namespace memkit::arena
