// Planning problems whose best height is known: a rectangle of time by memory, cut into pieces without waste.
#pragma once

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../../csrc/arena/solve.h"

namespace memkit::arena {

struct Instance {
  std::string name;
  std::vector<Buffer> buffers;  // shuffled
  std::int64_t height;          // the best there is
};

class Cutter {
 public:
  struct Shape {
    int pieces = 200;
    int times = 1 << 20;  // instants at which a piece may start or end
    std::int64_t height = 1 << 20;
    std::int64_t grain = 1024;  // sizes are multiples of it
    double across = 0.5;        // share of cuts that part time and not memory
    double pinwheel = 0;        // share of cuts into five pieces around a middle one, which no straight cut makes
    double drop = 0;            // share of pieces left out at the end, where room is spare
    int skinny = 0;             // long-living thin pieces laid aside first
  };

  Cutter(const Shape& shape, std::uint64_t seed) : shape_(shape), random_(seed) {}

  Instance make(std::string name) {
    pieces_ = {{0, shape_.times, 0, shape_.height}};
    for (int i = 0; i < shape_.skinny; ++i) slice(pieces_.front());
    for (int stuck = 0; int(pieces_.size()) < shape_.pieces && stuck < 10000;) stuck = cut() ? 0 : stuck + 1;
    Instance result{std::move(name), {}, shape_.height};
    std::shuffle(pieces_.begin(), pieces_.end(), random_);
    // One moment keeps all of its pieces, and with them the known height.
    const int kept = draw(0, shape_.times - 1);
    for (const Piece& p : pieces_)
      if (!chance(shape_.drop) || (p.left <= kept && kept < p.right))
        result.buffers.push_back({p.left, p.right, p.top - p.bottom});
    return result;
  }

 private:
  struct Piece {
    int left, right;
    std::int64_t bottom, top;
  };

  std::int64_t draw(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  bool chance(double share) { return std::uniform_real_distribution<double>(0, 1)(random_) < share; }

  void slice(Piece& p) {
    if (p.top - p.bottom < 4 * shape_.grain) return;
    Piece thin = p;
    thin.bottom = thin.top = p.top - shape_.grain * draw(1, 3);
    thin.top = p.top;
    p.top = thin.bottom;
    pieces_.push_back(thin);
  }

  // The larger of a few random pieces is cut, so that pieces differ in size but not wildly.
  bool cut() {
    std::size_t at = draw(0, pieces_.size() - 1);
    for (int i = 0; i < 2; ++i) {
      const std::size_t other = draw(0, pieces_.size() - 1);
      if (area(pieces_[other]) > area(pieces_[at])) at = other;
    }
    const Piece p = pieces_[at];
    const std::int64_t rows = (p.top - p.bottom) / shape_.grain;
    const int columns = p.right - p.left;
    const auto replace = [&](std::initializer_list<Piece> parts) {
      pieces_[at] = *parts.begin();
      pieces_.insert(pieces_.end(), parts.begin() + 1, parts.end());
      return true;
    };
    if (chance(shape_.pinwheel) && rows >= 3 && columns >= 3) {
      const int a = p.left + draw(1, columns - 2), b = draw(a + 1, p.right - 1);
      const std::int64_t y = draw(1, rows - 2), c = p.bottom + shape_.grain * y,
                         d = p.bottom + shape_.grain * draw(y + 1, rows - 1);
      return replace({{p.left, b, p.bottom, c},
                      {b, p.right, p.bottom, d},
                      {a, p.right, d, p.top},
                      {p.left, a, c, p.top},
                      {a, b, c, d}});
    }
    if (chance(shape_.across)) {
      if (columns < 2) return false;
      const int t = p.left + middle(columns);
      return replace({{p.left, t, p.bottom, p.top}, {t, p.right, p.bottom, p.top}});
    }
    if (rows < 2) return false;
    const std::int64_t y = p.bottom + shape_.grain * middle(rows);
    return replace({{p.left, p.right, p.bottom, y}, {p.left, p.right, y, p.top}});
  }

  std::int64_t middle(std::int64_t n) { return n < 8 ? draw(1, n - 1) : draw(n / 8, n - n / 8); }
  static double area(const Piece& p) { return double(p.right - p.left) * double(p.top - p.bottom); }

  Shape shape_;
  std::mt19937_64 random_;
  std::vector<Piece> pieces_;
};

// A file with the columns id,lower,upper,size.
inline std::vector<Buffer> read_trace(const std::string& path) {
  std::vector<Buffer> buffers;
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  while (std::getline(file, line)) {
    Buffer b;
    if (std::sscanf(line.c_str(), "%*[^,],%" SCNd64 ",%" SCNd64 ",%" SCNd64, &b.lower, &b.upper, &b.size) == 3)
      buffers.push_back(b);
  }
  return buffers;
}

inline std::vector<Instance> hard_instances(std::uint64_t seed) {
  using Shape = Cutter::Shape;
  std::vector<Instance> all;
  const auto add = [&](const std::string& name, Shape shape) {
    for (int n : {150, 300, 500}) {
      shape.pieces = n;
      all.push_back(Cutter(shape, seed * 1000 + all.size()).make(name + "-" + std::to_string(n)));
    }
  };
  constexpr std::int64_t kHeight = 1 << 20;
  //                    times    height   grain across pinwheel drop skinny
  add("guillotine", {0, 1 << 20, kHeight, 1024, 0.5, 0, 0, 0});
  add("chains", {0, 1 << 20, kHeight, 1024, 0.7, 0, 0, 0});
  add("tall", {0, 1 << 20, kHeight, 1024, 0.3, 0, 0, 0});
  add("pinwheel", {0, 1 << 20, kHeight, 1024, 0.5, 0.5, 0, 0});
  add("few-times", {0, 24, kHeight, 1024, 0.5, 0.2, 0, 0});
  add("very-few-times", {0, 10, kHeight, 1024, 0.4, 0.2, 0, 0});
  add("coarse", {0, 64, kHeight, kHeight / 48, 0.5, 0.2, 0, 0});
  add("skinny", {0, 1 << 20, kHeight, 1024, 0.5, 0.2, 0, 30});
  add("spare", {0, 1 << 20, kHeight, 1024, 0.5, 0.2, 0.05, 0});
  add("spare-few", {0, 32, kHeight, 1024, 0.5, 0.2, 0.1, 0});
  return all;
}

}  // namespace memkit::arena
