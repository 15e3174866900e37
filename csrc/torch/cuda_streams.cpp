#include "cuda_streams.h"

#ifdef MEMKIT_WITH_CUDA

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <utility>

namespace memkit {

using c10::cuda::CUDAStream;

CUDAStream stream_of(arena::LaneId lane, c10::DeviceIndex device) {
  return CUDAStream(CUDAStream::UNCHECKED, c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, device),
                                                       static_cast<c10::StreamId>(lane)));
}

CaptureInfo capture_of(const CUDAStream& stream) {
  CaptureInfo info;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 13000
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &info.id, &info.graph, nullptr, nullptr, nullptr);
#else
  const cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, &info.id, &info.graph, nullptr, nullptr);
#endif
  // The legacy default stream refuses while another stream captures: then it does not capture itself.
  if (error != cudaSuccess) (void)cudaGetLastError();
  info.active = error == cudaSuccess && status == cudaStreamCaptureStatusActive;
  return info.active ? info : CaptureInfo();
}

bool finish(const CUDAStream& stream) {
  const c10::cuda::CUDAGuard guard(stream.device_index());
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const cudaError_t error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaSuccess;
}

Moment::Moment(const CUDAStream& stream) : device_(stream.device_index()) {
  const c10::cuda::CUDAGuard guard(device_);
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  const cudaError_t error = cudaEventRecord(event_, stream);
  if (error != cudaSuccess) (void)cudaEventDestroy(event_);
  C10_CUDA_CHECK(error);
}
Moment::Moment(Moment&& other) noexcept : device_(other.device_), event_(std::exchange(other.event_, nullptr)) {}
Moment& Moment::operator=(Moment&& other) noexcept {
  std::swap(event_, other.event_);
  std::swap(device_, other.device_);
  return *this;
}
Moment::~Moment() {
  if (event_) (void)cudaEventDestroy(event_);
}

// Only success counts: a capture of somebody else's may forbid the question, and the memory is in use all the same.
bool Moment::passed() const {
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const cudaError_t error = cudaEventQuery(event_);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaSuccess;
}
void Moment::wait() const {
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  if (cudaEventSynchronize(event_) != cudaSuccess) (void)cudaGetLastError();
}
void Moment::hold(const CUDAStream& stream) const {
  const c10::cuda::CUDAGuard guard(stream.device_index());  // which a default stream's handle does not say
  C10_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0));
}

}  // namespace memkit

#endif
