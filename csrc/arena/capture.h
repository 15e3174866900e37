#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "tlsf.h"

namespace memkit::arena {

using CaptureId = std::uint64_t;

// What a captured graph uses, and may use again whenever it is replayed.
struct Capture {
  CaptureId id = 0;
  std::vector<std::pair<Lane*, std::unique_ptr<Lane>>> lanes;  // a lane of the arena, and the capture's own for it
  Block* parked = nullptr;  // freed while it recorded, not of its own lanes; linked by `next`
};

}  // namespace memkit::arena
