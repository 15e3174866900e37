// What the arena's tests share: upstreams that watch.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>

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

 private:
  bool real_;
  std::size_t limit_, held_ = 0, available_ = SIZE_MAX;
  std::uintptr_t next_ = std::uintptr_t(1) << 44;
  std::map<void*, std::size_t> given_;
  std::mutex mutex_;
};

}  // namespace
