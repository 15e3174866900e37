// What the arena's tests share: upstreams that watch.
#pragma once

#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "../../csrc/arena/arena.h"
#include "check.h"

namespace {

using namespace memkit::arena;

#define CHECK_SOUND(ARENA)                     \
  do {                                         \
    const std::string wrong = (ARENA).check(); \
    CHECK(wrong.empty(), "%s", wrong.c_str()); \
  } while (0)

constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB;

inline void take_time(bool slow) {
  if (slow) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

// Addresses that nobody may touch, or memory; says so when what it gave does not come back as it was given.
class TestUpstream final : public Upstream {
 public:
  explicit TestUpstream(bool real, std::size_t limit = SIZE_MAX) : real_(real), limit_(limit) {}
  ~TestUpstream() override { CHECK(given_.empty(), "%zu chunks were not returned", given_.size()); }

  std::size_t available() override { return available_; }
  void say_available(std::size_t bytes) { available_ = bytes; }

  void* allocate(std::size_t bytes) override {
    CHECK(bytes <= available_, "asked for more than is available");
    if (called) called();
    take_time(slow);
    const std::lock_guard<std::mutex> guard(mutex_);
    if (bytes > limit_ - held_) return nullptr;
    void* memory =
        real_ ? std::aligned_alloc(4096, (bytes + 4095) & ~std::size_t(4095)) : reinterpret_cast<void*>(next_);
    next_ += bytes + (std::size_t(1) << 21);
    held_ += bytes;
    given_[memory] = bytes;
    return memory;
  }

  void release(void* memory, std::size_t bytes) override {
    if (called) called();
    take_time(slow);
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto at = given_.find(memory);
    CHECK(at != given_.end() && at->second == bytes, "returned what was not given");
    if (at == given_.end()) return;
    given_.erase(at);
    held_ -= bytes;
    if (real_) std::free(memory);
  }

  std::size_t held() const { return held_; }

  std::function<void()> called;
  bool slow = false;

 private:
  bool real_;
  std::size_t limit_, held_ = 0, available_ = SIZE_MAX;
  std::uintptr_t next_ = std::uintptr_t(1) << 44;
  std::map<void*, std::size_t> given_;
  std::mutex mutex_;
};

constexpr std::size_t kPage = 2 * kMiB, kRoom = std::size_t(1) << 33;

// The same page by page, each chunk with room behind it.
class PagedUpstream final : public Upstream {
 public:
  explicit PagedUpstream(bool real, std::size_t limit = SIZE_MAX) : real_(real), limit_(limit) {}
  ~PagedUpstream() override {
    CHECK(pages_.empty(), "%zu pages were not returned", pages_.size());
    for (void* room : rooms_) munmap(room, kRoom);
  }

  std::size_t page() const override { return kPage; }
  void* allocate(std::size_t bytes) override {
    tell();
    const std::lock_guard<std::mutex> guard(mutex_);
    next_ += kRoom;
    if (real_) {
      rooms_.push_back(
          mmap(nullptr, kRoom, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      CHECK(rooms_.back() != MAP_FAILED, "no addresses");
      next_ = round_up(reinterpret_cast<std::uintptr_t>(rooms_.back()), kPage);
    }
    if (!capacity_end_) capacity_end_ = next_ + bytes;
    return map(next_, bytes) ? reinterpret_cast<void*>(next_) : nullptr;
  }
  bool extend(void* end, std::size_t bytes) override {
    tell();
    const std::lock_guard<std::mutex> guard(mutex_);
    return !refuses && map(reinterpret_cast<std::uintptr_t>(end), bytes);
  }
  void release(void* memory, std::size_t bytes) override {
    tell();
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto start = reinterpret_cast<std::uintptr_t>(memory);
    CHECK(start % kPage == 0 || start == capacity_end_, "part of a page came back");
    for (std::uintptr_t at = round_up(start, kPage); at < start + bytes; at += kPage)
      CHECK(pages_.erase(at), "not out, and came back");
  }
  std::size_t held() const { return pages_.size() * kPage; }
  // Whether the pages that are out are those of the chunks.
  bool agrees(const Arena& arena) const {
    std::set<std::uintptr_t> seen;
    const auto add = [&](const ChunkView& chunk) {
      const auto start = reinterpret_cast<std::uintptr_t>(chunk.address);
      for (std::uintptr_t at = start; at < start + chunk.size; at += kPage) seen.insert(at);
    };
    arena.visit(add, nullptr);
    return seen == pages_;
  }

  std::function<void()> called;  // once, by the next call
  bool refuses = false, slow = false;

 private:
  void tell() {
    take_time(slow);
    if (const auto now = std::exchange(called, nullptr)) now();
  }
  bool map(std::uintptr_t start, std::size_t bytes) {
    const std::uintptr_t first = start & ~(kPage - 1);
    std::vector<std::uintptr_t> fresh;
    for (std::uintptr_t at = first; at < start + bytes; at += kPage)
      if (!pages_.count(at)) fresh.push_back(at);
    CHECK(start % kPage || fresh.size() == (bytes + kPage - 1) / kPage, "given twice");
    if (held() + fresh.size() * kPage > limit_) return false;
    pages_.insert(fresh.begin(), fresh.end());
    return true;
  }

  bool real_;
  std::size_t limit_;
  std::uintptr_t next_ = std::uintptr_t(1) << 44, capacity_end_ = 0;
  std::set<std::uintptr_t> pages_;
  std::vector<void*> rooms_;
  std::mutex mutex_;
};

}  // namespace
