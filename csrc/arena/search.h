// A tree search for one question: do these items fit under a ceiling?
//
// Plans are built from the bottom up. Every section of time has a floor, below which nothing more can go, and where the
// floor is lower than on both sides there is a niche. In its outermost section either one of the items that start
// (or end) just there stands on the floor, or none does and the floor rises to the lowest place that an item of the
// section can still have. Where the items left in a section no longer fit between its floor and the ceiling, the
// branch is dead. Tight problems leave few choices, and those are made first.
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

  // Gives up after `patience` dead ends, or when `expired` says so. Dead ends are remembered, as a preference, by later calls.
  Outcome fit(std::int64_t ceiling, std::int64_t patience, const std::function<bool()>& expired);

  // After `found`.
  const std::vector<std::int64_t>& offsets() const { return offsets_; }
  std::int64_t height() const;
  std::int64_t dead_ends = 0;

 private:
  using Set = std::vector<std::uint64_t>;  // of items

  struct Choice {
    int section = -1;
    bool left = true;   // the niche's first section, or its last
    bool may_skip = false;
    double cost = 1e300;
  };

  bool descend();
  Choice choose();
  bool place(int item);
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
  bool same_kind(int a, int b) const {
    return items_[a].first == items_[b].first && items_[a].last == items_[b].last;
  }

  std::vector<Item> items_;
  int sections_ = 0;
  std::vector<std::vector<int>> starting_, ending_, covering_, touching_;

  std::vector<Set> covered_, touched_;  // the same as sets
  Set blame_;  // after a failure: items but for whose places it could have been avoided
  std::int64_t ceiling_ = 0, patience_ = 0, nodes_ = 0;
  int placed_count_ = 0;
  bool stopped_ = false, look_ahead_ = false;
  const std::function<bool()>* expired_ = nullptr;
  std::vector<std::int64_t> offsets_;  // of a placed item; else the lowest it can have
  std::vector<char> placed_;
  std::vector<std::int64_t> floor_, left_, on_top_, reach_;
  std::vector<int> dirty_;
  std::vector<char> is_dirty_;
  std::vector<std::pair<std::int64_t*, std::int64_t>> trail_;
  std::vector<double> weight_, taste_;
  std::mt19937_64 random_;
  int style_ = 0, culprit_ = 0;
  double waste_ = 0, waste_taste_ = 1, skip_taste_ = 0, soft_ = 1;
};

}  // namespace memkit::arena
