// Makes a planning problem smaller: what fits together without waste becomes one item.
//
// Where a plan has no room to spare, what starts at an instant takes exactly the place of what ends there. So if all that
// ends at it started together, and all that starts at it ends together, the two make a rectangle, which can lie anywhere
// as a whole. The same holds for a few instants at once whose items begin and end nowhere else. Room to spare is filled
// with items of its own first. A problem that was made by cutting up a rectangle comes together again, cut by cut.
//
// It is a heuristic: plans of the smaller problem are plans of the whole one, but not the other way round.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "greedy.h"

namespace memkit::arena {

class Reduction {
 public:
  Reduction(const std::vector<Item>& items, std::uint64_t seed, const std::function<bool()>& expired);

  const std::vector<Item>& items() const { return items_; }  // what is left
  Offsets expand(const Offsets& offsets) const;              // of what is left to those of all items

 private:
  struct Piece {
    Item item;
    bool room = false;                                // nothing but room to spare
    std::vector<std::pair<int, std::int64_t>> parts;  // pieces, and where in this one
  };
  using Members = std::vector<int>;

  void fill();
  int add(const Item& item, bool room);
  void put_together(const Members& members, const Offsets& offsets, const Item& whole);
  void put_together(const Members& ending, const Members& starting);
  void settle();
  bool join_at(int time);
  bool join_around(int time);
  bool close(std::vector<int>& inside, int depth);

  std::size_t count_;  // of the items given
  std::vector<Piece> pieces_;
  std::vector<char> whole_;                 // is in no other
  std::vector<Members> starting_, ending_;  // at an instant
  std::vector<int> changed_;                // instants to look at again
  std::uint64_t seed_;
  const std::function<bool()>& expired_;
  std::vector<Item> items_;
  Members left_;
};

}  // namespace memkit::arena
