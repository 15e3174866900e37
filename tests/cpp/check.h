// What every test here counts with: CHECK says where and why, for the first twenty that fail; finish() is main's result.
#pragma once

#include <atomic>
#include <cstdio>

namespace {

std::atomic<int> checks{0}, failures{0};

#define CHECK(CONDITION, ...)                                     \
  do {                                                            \
    ++checks;                                                     \
    if (!(CONDITION) && ++failures <= 20) {                       \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #CONDITION); \
      std::printf(__VA_ARGS__);                                   \
      std::puts("");                                              \
    }                                                             \
  } while (0)

inline int finish(const char* name) {
  std::printf("%s: %d checks, %d failures\n", name, checks.load(), failures.load());
  return failures != 0;
}

}  // namespace
