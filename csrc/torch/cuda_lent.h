// What pools lend torch, in torch's own counters, histories and snapshots of memory.
#pragma once

#ifdef MEMKIT_WITH_CUDA

#include <c10/cuda/CUDACachingAllocator.h>

namespace memkit {

// Something that torch was given: from its making to its end, each told once, from any thread.
struct Lent {
  c10::DeviceIndex device;
  void* stream;
  const void* data;
  std::size_t nbytes, rounded;
};
void count_lent(const Lent& lent);
void count_returned(const Lent& lent);
void count_exhausted(c10::DeviceIndex device);
bool is_lent(c10::DeviceIndex device);  // anything, now

// `torchs`: what torch counts without us. Peaks are those of the sum, which is looked at after each allocation of either.
using DeviceStats = c10::CachingDeviceAllocator::DeviceStats;
void look_at_peaks(c10::DeviceIndex device, const DeviceStats& torchs);
void reset_lent_peaks(c10::DeviceIndex device, const DeviceStats& torchs);
void reset_lent(c10::DeviceIndex device);
void add_lent(c10::DeviceIndex device, DeviceStats* torchs);

// As torch.cuda.memory._record_memory_history() asks; `most` entries.
void keep_history(std::size_t most, c10::cuda::CUDACachingAllocator::CreateContextFn context,
                  c10::cuda::CUDACachingAllocator::RecordContext when, bool clear);
void add_pools(c10::cuda::CUDACachingAllocator::SnapshotInfo* info, bool traces);

}  // namespace memkit

#endif
