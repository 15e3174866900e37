// How much memory the system can still give. Linux promises more than it has, and ends processes that take its word.
#pragma once

#include <cstddef>
#include <string>

namespace memkit::arena {

// Bytes, swap included: what the machine has available and what the limits of this process's control groups leave,
// whichever is less. Caches that can be dropped count as available. SIZE_MAX where the system does not tell.
// `root` stands before /proc and /sys.
std::size_t available_memory(const std::string& root = "");

}  // namespace memkit::arena
