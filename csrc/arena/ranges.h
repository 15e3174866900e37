// Ranges of reserved addresses, whose memory is given out from their start on and comes back in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>

namespace memkit::arena {

class Ranges {
 public:
  struct Range {
    std::uintptr_t start = 0;
    std::size_t room = 0;  // bytes
  };

  void add(Range range, std::size_t given) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_[range.start] = {range.room, given};
  }
  // Whether so many bytes from `end` on, where a piece that was given ends, are in the same range.
  bool has_room(std::uintptr_t end, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return fits(find(end - 1), end, bytes);
  }
  // Gives them; false: they are not.
  bool lengthen(std::uintptr_t end, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto range = find(end - 1);
    if (!fits(range, end, bytes)) return false;
    range->second.given += bytes;
    return true;
  }
  // Of the range that holds the address. Returns the range if that were the last, which is forgotten then; else one of 0 bytes.
  Range take_back(std::uintptr_t at, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto range = find(at);
    if (range->second.given -= bytes) return {};
    const Range whole{range->first, range->second.room};
    all_.erase(range);
    return whole;
  }

 private:
  struct Given {
    std::size_t room, given;  // bytes
  };
  using All = std::map<std::uintptr_t, Given>;  // by their first address

  All::iterator find(std::uintptr_t at) { return std::prev(all_.upper_bound(at)); }
  static bool fits(All::iterator range, std::uintptr_t end, std::size_t bytes) {
    return bytes <= range->first + range->second.room - end;
  }

  std::mutex mutex_;
  All all_;
};

}  // namespace memkit::arena
