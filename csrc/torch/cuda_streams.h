// Streams: as the arena's lanes, what captures them, and moments in their work.
#pragma once

#ifdef MEMKIT_WITH_CUDA

#include <c10/cuda/CUDAStream.h>

#include "arena/arena.h"

namespace memkit {

// A lane's id is torch's id of the stream, from which the stream can be had again.
c10::cuda::CUDAStream stream_of(arena::LaneId lane, c10::DeviceIndex device);
inline arena::LaneId lane_of(const c10::cuda::CUDAStream& stream) { return static_cast<arena::LaneId>(stream.id()); }

struct CaptureInfo {
  bool active = false;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
};

CaptureInfo capture_of(const c10::cuda::CUDAStream& stream);

// Waits for the stream's work, also while another stream is captured; false: that failed.
bool finish(const c10::cuda::CUDAStream& stream);

// An event at the end of a stream's work so far.
class Moment {
 public:
  explicit Moment(const c10::cuda::CUDAStream& stream);
  Moment(Moment&& other) noexcept;
  Moment& operator=(Moment&& other) noexcept;
  ~Moment();

  bool passed() const;
  void wait() const;
  void hold(const c10::cuda::CUDAStream& stream) const;

 private:
  c10::DeviceIndex device_;
  cudaEvent_t event_ = nullptr;
};

}  // namespace memkit

#endif
