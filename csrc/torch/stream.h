// Where an engine's kernels run: on the CPU's threads, or on the current stream of a CUDA device.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#ifdef MEMKIT_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

struct CUstream_st;

namespace memkit {

// MEMKIT_SIMT: CUDA's kernels, compiled for the CPU, serve the tensors there (tests/simt).
inline bool runs_on_threads([[maybe_unused]] c10::Device device) {
#ifdef MEMKIT_SIMT
  return false;
#else
  return device.is_cpu();
#endif
}

inline bool runs_on_cuda(c10::Device device) {
#ifdef MEMKIT_SIMT
  return device.is_cpu();
#else
  return device.is_cuda();
#endif
}

// launch(stream), which gives a cudaError_t, with the device current. A generic lambda: without CUDA nothing calls it.
template <class Launch>
void on_stream(c10::Device device, [[maybe_unused]] const Launch& launch) {
#if defined(MEMKIT_SIMT)
  const int error = launch(static_cast<CUstream_st*>(nullptr));
  TORCH_CHECK(error == 0, "memkit: a launch failed with error ", error);
#elif defined(MEMKIT_WITH_CUDA)
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(static_cast<cudaError_t>(launch(c10::cuda::getCurrentCUDAStream().stream())));
#else
  TORCH_CHECK(false, "memkit: expected a CPU tensor, got one on ", device,
              "; this memkit was built without CUDA: rebuild with MEMKIT_CUDA=1");
#endif
}

}  // namespace memkit
