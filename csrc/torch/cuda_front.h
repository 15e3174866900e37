// memkit's place in front of torch's CUDA allocator, as the tap is on the CPU: torch's allocations go to a pool where a
// thread says so, and torch's counters, snapshots and record_stream know of them. Everything else is torch's.
#pragma once

#ifdef MEMKIT_WITH_CUDA

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <memory>

namespace memkit {

class Pool;

// With the first CUDA pool, for good. Raises where torch's allocator has functions that this build does not know.
void stand_before_torch();
// Notes that another stream uses a pool's memory.
void record_cuda_stream(const c10::DataPtr& data, c10::cuda::CUDAStream user);
// Numbers the turns to allocate: of those that are on, of uses, graphs and MemPools, the one that began last has it.
std::uint64_t next_turn();

}  // namespace memkit

#endif
