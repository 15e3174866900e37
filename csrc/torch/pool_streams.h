// The work of a CUDA pool's streams: blocks that other streams use as well, and what graphs keep.
#pragma once

#ifdef MEMKIT_WITH_CUDA

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_streams.h"

namespace memkit {

// Outlives the pool with its tensors and graphs.
class PoolStreams : public std::enable_shared_from_this<PoolStreams> {
 public:
  explicit PoolStreams(c10::DeviceIndex device) : device_(device) {}

  // Before an allocation on a lane. Returns the capture that records it, or 0.
  arena::CaptureId prepare(arena::Arena& arena, arena::LaneId lane);
  // Whether the lane may use the block now; false: it is parked, and no lane that is recorded lends any more. The stream
  // waits, or this thread does for a capture, which could not.
  bool wait(arena::LaneId lane, const arena::Allocation& got);
  // A block that other streams use as well comes back when they are where they are now.
  void park(arena::Block* block, std::vector<c10::cuda::CUDAStream> streams);
  // Waits for all that is parked, at a pool's end.
  void reclaim(arena::Arena& arena);
  bool recording(arena::Arena& arena);

  // Pools that are closed, but not all of their graphs are gone: who next needs memory looks after them.
  static void look_after_closed();

 private:
  struct Parked {
    arena::Ticket ticket;
    std::vector<c10::cuda::CUDAStream> streams;  // whose end is still to be marked, because a capture records them
    std::vector<Moment> moments;                 // that must pass

    void mark();
    bool passed() const;
  };
  struct Recording {
    unsigned long long id;
    std::vector<arena::LaneId> lanes;
  };
  // Handed to a graph, which destroys it with its last instance.
  struct Graph {
    std::shared_ptr<PoolStreams> streams;
    unsigned long long id;
  };
  struct Closed;

  static void CUDART_CB graph_died(void* data);
  void record(arena::Arena& arena, const CaptureInfo& now, arena::LaneId lane);
  void settle(arena::Arena& arena);
  void follow_captures(arena::Arena& arena);
  bool bury(arena::Arena& arena);
  bool outlives();
  void collect(arena::Arena& arena, bool wait);

  const c10::DeviceIndex device_;
  std::atomic<bool> recording_{false}, waiting_{false}, died_{false};
  std::mutex mutex_;               // of what follows
  arena::Arena* arena_ = nullptr;  // of a closed pool; it stays as long as something of it is left here
  arena::Ticket next_ticket_ = 1;
  std::deque<Parked> parked_;
  std::vector<Recording> captures_;
  std::size_t graphs_ = 0;  // that are alive, or not buried
  std::mutex dead_mutex_;
  std::vector<unsigned long long> dead_;
};

}  // namespace memkit

#endif
