// From the host to a kernel.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace memkit::cuda {

template <class T>
struct Same {
  using type = T;
};

template <class... P>
void launch_kernel(void (*kernel)(P...), dim3 grid, dim3 block, cudaStream_t stream,
                   typename Same<P>::type... arguments) {
#if defined(__CUDACC__)
  kernel<<<grid, block, 0, stream>>>(arguments...);
#else  // a test plays its threads on the CPU
  simt::launch(kernel, grid, block, stream, arguments...);
#endif
}

// Multiprocessors of the current device, asked once.
inline cudaError_t processor_count(int& count) {
  static std::atomic<int> known[64];
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  std::atomic<int>& slot = known[device % 64];
  if (device < 64 && (count = slot.load(std::memory_order_relaxed)) != 0) return cudaSuccess;
  if (const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device)) return error;
  if (device < 64) slot.store(count, std::memory_order_relaxed);
  return cudaSuccess;
}

}  // namespace memkit::cuda
