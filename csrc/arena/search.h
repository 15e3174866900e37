// A tree search for one question: do these items fit under a ceiling?
//
// Plans are built from the bottom up. Every section of time has a floor, below which nothing more can go, and where the
// floor is lower than on both sides there is a niche. In its outermost section either one of the items that start
// (or end) just there stands on the floor, or none does and the floor rises to the lowest place that an item of the
// section can still have. Where the items left in a section no longer fit between its floor and the ceiling, the
// branch is dead. Tight problems leave few choices, and those are made first.
//
// A dead end is blamed on the items whose places led to it. A step that changed none of those is not to blame, and its
// alternatives are not tried: distant parts of the timeline do not multiply each other's failures. Sections where
// branches die gain weight and are decided earlier, also after a restart with other tastes.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "greedy.h"

namespace memkit::arena {

class Search {
 public:
  enum class Outcome { found, impossible, gave_up };

  Search(std::vector<Item> items, std::uint64_t seed);

  // Gives up after `patience` dead ends, or when `expired` says so. Later calls learn from them where to decide first.
  // Items in `below` are set first, each as low as those before it allow; the rest goes on top of them.
  Outcome fit(std::int64_t ceiling, std::int64_t patience, const std::function<bool()>& expired,
              const std::vector<int>& below = {});

  // What of a plan may stay, from the bottom up, when three kinds of items move: those in the sections [first, last) that
  // start at `level` or higher, those that end above the ceiling, and whatever lies over one of either.
  std::vector<int> below(const Offsets& plan, int first, int last, std::int64_t level, std::int64_t ceiling) const;
  int sections() const { return sections_; }

  // After `found`.
  const Offsets& offsets() const { return offsets_; }

 private:
  using Set = std::vector<std::uint64_t>;  // of items

  struct Choice {
    int section = -1;
    bool left = true;  // the niche's first section, or its last
    bool may_skip = false;
    double cost = 1e300;
  };

  // Each step returns false at a dead end; what it did stands until it is taken back.
  bool descend(int depth);
  Choice choose();
  bool place(int item);
  void put(int item);
  bool skip(const Choice& choice);
  std::int64_t skip_floor(const Choice& choice, std::vector<int>* standing, std::int64_t* common) const;
  void raise(int item, std::int64_t offset);
  bool settle();
  void undo(std::size_t mark);
  void retract(std::size_t mark, int item);
  void candidates(const Choice& choice, std::vector<int>& out) const;
  int count(int section, bool left) const;
  double worth(int item) const;
  bool concerns(std::size_t mark, int item) const;
  static void join(Set& set, const Set& other);
  static bool has(const Set& set, int i) { return set[i / 64] >> (i % 64) & 1; }
  void set(std::int64_t& where, std::int64_t value) {
    trail_.emplace_back(&where, where);
    where = value;
  }
  bool same_kind(int a, int b) const { return items_[a].first == items_[b].first && items_[a].last == items_[b].last; }

  std::vector<Item> items_;
  int sections_ = 0;
  std::vector<std::vector<int>> starting_, ending_, covering_, touching_;

  std::vector<Set> covered_, touched_;  // the same as sets
  Set blame_;                           // after a failure: items but for whose places it could have been avoided
  std::int64_t ceiling_ = 0, patience_ = 0, dead_ends_ = 0, nodes_ = 0;
  const std::function<bool()>* expired_ = nullptr;
  bool stopped_ = false;

  std::vector<std::int64_t> offsets_;  // of a placed item; else the lowest that it can still have
  std::vector<char> placed_;
  int placed_count_ = 0;
  std::vector<std::int64_t> floor_, left_;  // of a section: the floor, and the size of what is still to be placed
  std::vector<std::int64_t> reach_;         // the height that a section needs at least
  std::vector<std::int64_t> on_top_;        // the item placed last
  std::vector<std::pair<std::int64_t*, std::int64_t>> trail_;  // what was where, to take steps back
  std::vector<int> dirty_;                                     // sections whose floor may have risen
  std::vector<char> is_dirty_;
  int culprit_ = 0;  // the section where the last step failed

  // Preferences, drawn anew for every call; the weights alone are learned.
  std::mt19937_64 random_;
  std::vector<double> weight_, taste_;
  int style_ = 0;
  bool look_ahead_ = false;
  double waste_ = 0, waste_taste_ = 1, skip_taste_ = 0, soft_ = 1;
};

}  // namespace memkit::arena
