// CUDA's runtime and as much of its driver as PyTorch and memkit ask for, on the CPU: devices that are memory of this
// process, streams that are queues. To be preloaded; the real libraries are then not called.
//
// A stream does nothing until somebody waits for it, and then what it waits for first: so work is as late as hardware may be,
// and what reuses memory too early, or reads a result too early, gets wrong bytes. Where several streams have to run, each
// next step is drawn. Device memory can be touched by the work in streams alone: the host that follows such a pointer ends.
// While a stream captures, its work goes into a graph, and calls that CUDA forbids then fail and spoil the capture.
#include "runtime.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using simt::Work;

constexpr int kDevices = 2;
constexpr std::size_t kTotal = std::size_t(4) << 30;  // bytes a device has
constexpr std::size_t kPage = std::size_t(2) << 20;   // that the driver maps

struct Capture;

// The end of a stream's work at some time.
struct Moment {
  bool passed = false;
  struct Stream* stream = nullptr;
  std::shared_ptr<Capture> capture;  // it was recorded in
  int asked = 0;
  std::chrono::steady_clock::time_point time;  // when it passed
};
using MomentPtr = std::shared_ptr<Moment>;

struct Step {
  Work work;  // or
  MomentPtr reached, awaited;
};

struct UserObject {
  void* data;
  cudaHostFn_t destroy;
  int references;
};

void let_go(const std::vector<UserObject*>& objects) {
  for (UserObject* object : objects)
    if (--object->references == 0) {
      object->destroy(object->data);
      delete object;
    }
}

struct Graph {
  std::vector<Work> work;
  std::vector<UserObject*> objects;

  Graph() = default;
  Graph(const Graph& other) : work(other.work), objects(other.objects) {
    for (UserObject* object : objects) ++object->references;
  }
  Graph& operator=(const Graph&) = delete;
  ~Graph() { let_go(objects); }
};

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  struct Stream* origin;
  std::unique_ptr<Graph> graph = std::make_unique<Graph>();
  bool spoilt = false, over = false;
};

struct Stream {
  int device = 0, priority = 0;
  std::deque<Step> steps;
  std::shared_ptr<Capture> capture;
};

struct Event {
  MomentPtr moment;
  int device = 0;
  unsigned flags = 0;
};

struct Range {
  std::size_t bytes;
  int device;  // -1: host memory with locked pages
  bool mapped;
};

struct Runtime {
  std::recursive_mutex mutex;
  Stream defaults[kDevices];
  std::vector<std::unique_ptr<Stream>> streams;
  std::map<std::uintptr_t, Range> memory;
  std::size_t used[kDevices] = {};
  std::vector<std::shared_ptr<Capture>> captures;
  unsigned long long next_capture = 1;
  std::map<const void*, std::string> kernels;
  std::mt19937 dice{1};
  int opened = 0;

  Runtime() {
    for (int device = 0; device < kDevices; ++device) defaults[device].device = device;
  }
};

Runtime& runtime() {
  static Runtime& one = *new Runtime;
  return one;
}
using Guard = std::lock_guard<std::recursive_mutex>;

thread_local int device_now = 0;
thread_local cudaError_t last = cudaSuccess;
thread_local cudaStreamCaptureMode mode_now = cudaStreamCaptureModeGlobal;

cudaError_t say(cudaError_t error) {
  if (error != cudaSuccess) last = error;
  return error;
}

Stream* of(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
    return &runtime().defaults[device_now];
  return reinterpret_cast<Stream*>(stream);
}

bool is_legacy(const Stream& stream) { return &stream == &runtime().defaults[stream.device]; }

// -- memory

void protect(bool open) {
  for (auto& [at, range] : runtime().memory)
    if (range.device >= 0 && range.mapped)
      mprotect(reinterpret_cast<void*>(at), range.bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

struct Opened {
  Opened() {
    if (runtime().opened++ == 0) protect(true);
  }
  ~Opened() {
    if (--runtime().opened == 0) protect(false);
  }
};

std::size_t whole(std::size_t bytes, std::size_t page) { return (bytes + page - 1) / page * page; }

Range* range_of(const void* pointer) {
  auto& memory = runtime().memory;
  const auto at = reinterpret_cast<std::uintptr_t>(pointer);
  auto found = memory.upper_bound(at);
  if (found == memory.begin()) return nullptr;
  --found;
  return at < found->first + found->second.bytes ? &found->second : nullptr;
}

// -- running

void perform(const Work& work) {
  const Opened opened;
  work();
}

bool blocked(const Stream& stream) {
  return !stream.steps.empty() && stream.steps.front().awaited && !stream.steps.front().awaited->passed;
}

void until(const Moment& moment);

// One step of a stream, and before it what it waits for.
void advance(Stream& stream) {
  if (blocked(stream)) {
    const MomentPtr awaited = stream.steps.front().awaited;
    until(*awaited);
  }
  if (stream.steps.empty()) return;
  const Step step = std::move(stream.steps.front());
  stream.steps.pop_front();
  if (step.work) perform(step.work);
  if (step.reached) step.reached->passed = true, step.reached->time = std::chrono::steady_clock::now();
}

void until(const Moment& moment) {
  while (!moment.passed) {
    if (moment.stream->steps.empty()) {
      std::fprintf(stderr, "simt: an event waits for a stream that has nothing to do\n");
      std::abort();
    }
    advance(*moment.stream);
  }
}

void drain(Stream& stream) {
  const Opened opened;
  while (!stream.steps.empty()) advance(stream);
}

void drain_device(int device) {
  const Opened opened;
  auto& all = runtime();
  for (;;) {
    std::vector<Stream*> ready;
    const auto add = [&](Stream& stream) {
      if (stream.device == device && !stream.steps.empty() && !blocked(stream)) ready.push_back(&stream);
    };
    add(all.defaults[device]);
    for (const auto& stream : all.streams) add(*stream);
    if (ready.empty()) break;
    advance(*ready[all.dice() % ready.size()]);
  }
  // What is left waits for another device.
  drain(all.defaults[device]);
  for (std::size_t i = 0; i < all.streams.size(); ++i)
    if (all.streams[i]->device == device) drain(*all.streams[i]);
}

void put(Stream& stream, Work work) {
  if (stream.capture)
    stream.capture->graph->work.push_back(std::move(work));
  else
    stream.steps.push_back({std::move(work), nullptr, nullptr});
}

// Whether a call that CUDA forbids during captures is allowed now.
bool allowed() {
  if (mode_now == cudaStreamCaptureModeRelaxed) return true;
  for (const auto& capture : runtime().captures) {
    const bool own = capture->thread == std::this_thread::get_id();
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    if (own || (capture->mode == cudaStreamCaptureModeGlobal && mode_now == cudaStreamCaptureModeGlobal)) {
      capture->spoilt = true;
      return false;
    }
  }
  return true;
}

// A wait for a device asks the streams that capture there, too, whatever the mode.
bool spoils(int device) {
  bool any = false;
  for (const auto& capture : runtime().captures)
    if (capture->origin->device == device) any = capture->spoilt = true;
  return any;
}

#define REFUSE_IN_CAPTURE() \
  if (!allowed()) return say(cudaErrorStreamCaptureUnsupported)

bool on_device(const void* pointer) {
  const Range* range = range_of(pointer);
  return range && range->device >= 0;
}
bool is_locked(const void* pointer) {
  const Range* range = range_of(pointer);
  return range && range->device < 0;
}

cudaError_t copy(void* to, const void* from, std::size_t bytes, Stream& stream) {
  if (!bytes) return cudaSuccess;
  const bool from_pages = !on_device(from) && !is_locked(from), to_pages = !on_device(to) && !is_locked(to);
  if (from_pages) {  // staged before the call returns
    const auto staged =
        std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    put(stream, [=] { std::memcpy(to, staged->data(), bytes); });
  } else {
    put(stream, [=] { std::memmove(to, from, bytes); });
  }
  if (to_pages) {
    if (stream.capture) return say(cudaErrorStreamCaptureUnsupported);
    drain(stream);
  }
  return cudaSuccess;
}

}  // namespace

namespace simt {

void enqueue(void* stream, Work work) {
  const Guard guard(runtime().mutex);
  put(*of(static_cast<cudaStream_t>(stream)), std::move(work));
}

void run_now(void* stream, const Work& work) {
  const Guard guard(runtime().mutex);
  Stream& own = *of(static_cast<cudaStream_t>(stream));
  drain(own);
  perform(work);
}

bool captures(void* stream) { return of(static_cast<cudaStream_t>(stream))->capture != nullptr; }

}  // namespace simt

extern "C" {

// -- devices

cudaError_t cudaGetDeviceCount(int* count) { return *count = kDevices, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = device_now, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return say(cudaErrorInvalidDevice);
  return device_now = device, cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "the CPU (simt)");
  properties->totalGlobalMem = kTotal;
  properties->major = 9, properties->minor = 0;
  properties->warpSize = 32, properties->multiProcessorCount = 3;
  properties->maxThreadsPerBlock = 1024, properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024, properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 0x7fffffff, properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->sharedMemPerBlock = 48 << 10, properties->sharedMemPerBlockOptin = 227 << 10;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->textureAlignment = 512;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount       ? 3
           : attribute == cudaDevAttrComputeCapabilityMajor  ? 9
           : attribute == cudaDevAttrMaxThreadsPerBlock      ? 1024
           : attribute == cudaDevAttrMaxSharedMemoryPerBlock ? 48 << 10
           : attribute == cudaDevAttrWarpSize                ? 32
                                                             : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) { return *can = device != peer, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return peer == device_now ? say(cudaErrorInvalidDevice) : cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  const Guard guard(runtime().mutex);
  REFUSE_IN_CAPTURE();
  if (spoils(device_now)) return say(cudaErrorStreamCaptureUnsupported);
  drain_device(device_now);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation           ? "cudaErrorMemoryAllocation"
         : error == cudaErrorNotReady                 ? "cudaErrorNotReady"
         : error == cudaErrorStreamCaptureUnsupported ? "cudaErrorStreamCaptureUnsupported"
         : error == cudaErrorStreamCaptureInvalidated ? "cudaErrorStreamCaptureInvalidated"
         : error == cudaErrorNotSupported             ? "cudaErrorNotSupported"
         : error == cudaSuccess                       ? "cudaSuccess"
                                                      : "an error of CUDA's";
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// -- memory

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  auto& all = runtime();
  const Guard guard(all.mutex);
  REFUSE_IN_CAPTURE();
  const std::size_t size = whole(bytes ? bytes : 1, 4096);
  if (all.used[device_now] + size > kTotal) return say(cudaErrorMemoryAllocation);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return say(cudaErrorMemoryAllocation);
  if (!all.opened) mprotect(memory, size, PROT_NONE);
  all.used[device_now] += size;
  all.memory[reinterpret_cast<std::uintptr_t>(memory)] = {size, device_now, true};
  *pointer = memory;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  auto& all = runtime();
  const Guard guard(all.mutex);
  REFUSE_IN_CAPTURE();
  if (!pointer) return cudaSuccess;
  const auto found = all.memory.find(reinterpret_cast<std::uintptr_t>(pointer));
  if (found == all.memory.end() || found->second.device < 0) return say(cudaErrorInvalidValue);
  drain_device(found->second.device);
  munmap(pointer, found->second.bytes);
  all.used[found->second.device] -= found->second.bytes;
  all.memory.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const Guard guard(runtime().mutex);
  *free = kTotal - runtime().used[device_now], *total = kTotal;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  const Guard guard(runtime().mutex);
  REFUSE_IN_CAPTURE();
  *pointer = std::aligned_alloc(4096, whole(bytes ? bytes : 1, 4096));
  runtime().memory[reinterpret_cast<std::uintptr_t>(*pointer)] = {bytes, -1, true};
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  const Guard guard(runtime().mutex);
  for (int device = 0; device < kDevices; ++device) drain_device(device);
  if (!runtime().memory.erase(reinterpret_cast<std::uintptr_t>(pointer))) return say(cudaErrorInvalidValue);
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, std::size_t bytes, unsigned) {
  const Guard guard(runtime().mutex);
  if (range_of(pointer)) return say(cudaErrorHostMemoryAlreadyRegistered);
  runtime().memory[reinterpret_cast<std::uintptr_t>(pointer)] = {bytes, -1, true};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  const Guard guard(runtime().mutex);
  for (int device = 0; device < kDevices; ++device) drain_device(device);
  if (!runtime().memory.erase(reinterpret_cast<std::uintptr_t>(pointer))) return say(cudaErrorHostMemoryNotRegistered);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const Guard guard(runtime().mutex);
  const Range* range = range_of(pointer);
  *attributes = {};
  attributes->type = !range              ? cudaMemoryTypeUnregistered
                     : range->device < 0 ? cudaMemoryTypeHost
                                         : cudaMemoryTypeDevice;
  attributes->device = range && range->device >= 0 ? range->device : 0;
  attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  const Guard guard(runtime().mutex);
  return copy(to, from, bytes, *of(stream));
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t stream) {
  const Guard guard(runtime().mutex);
  return copy(to, from, bytes, *of(stream));
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  const Guard guard(runtime().mutex);
  REFUSE_IN_CAPTURE();
  const cudaError_t error = copy(to, from, bytes, *of(nullptr));
  drain(*of(nullptr));
  return error;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  const Guard guard(runtime().mutex);
  put(*of(stream), [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

// -- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  const Guard guard(runtime().mutex);
  runtime().streams.push_back(std::make_unique<Stream>());
  Stream* made = runtime().streams.back().get();
  made->device = device_now, made->priority = priority;
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Guard guard(runtime().mutex);
  drain(*of(stream));  // and stays, with nothing to do: events may know it
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return *priority = of(stream)->priority, cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -3, cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const Guard guard(runtime().mutex);
  if (of(stream)->capture) of(stream)->capture->spoilt = true;
  if (of(stream)->capture) return say(cudaErrorStreamCaptureUnsupported);
  REFUSE_IN_CAPTURE();
  return of(stream)->steps.empty() ? cudaSuccess : say(cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Guard guard(runtime().mutex);
  if (of(stream)->capture) of(stream)->capture->spoilt = true;
  if (of(stream)->capture) return say(cudaErrorStreamCaptureUnsupported);
  REFUSE_IN_CAPTURE();
  drain(*of(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const Guard guard(runtime().mutex);
  const MomentPtr moment = reinterpret_cast<Event*>(event)->moment;
  Stream& own = *of(stream);
  if (!moment) return cudaSuccess;
  if (moment->capture) {
    if (moment->capture->over || (own.capture && own.capture != moment->capture)) {
      moment->capture->spoilt = true;
      return say(cudaErrorStreamCaptureIsolation);
    }
    if (is_legacy(own)) {
      moment->capture->spoilt = true;
      return say(cudaErrorStreamCaptureImplicit);
    }
    own.capture = moment->capture;  // joins it
    return cudaSuccess;
  }
  if (own.capture) {
    own.capture->spoilt = true;
    return say(cudaErrorStreamCaptureIsolation);
  }
  own.steps.push_back({{}, nullptr, moment});
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  const Guard guard(runtime().mutex);
  put(*of(stream), [=] { callback(stream, cudaSuccess, data); });
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  const Guard guard(runtime().mutex);
  put(*of(stream), [=] { call(data); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{nullptr, device_now, flags});
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Guard guard(runtime().mutex);
  Stream& own = *of(stream);
  Event& mark = *reinterpret_cast<Event*>(event);
  if (mark.device != own.device) return say(cudaErrorInvalidResourceHandle);
  if (own.capture && own.capture->spoilt) return say(cudaErrorStreamCaptureInvalidated);
  mark.moment = std::make_shared<Moment>();
  mark.moment->stream = &own;
  mark.moment->capture = own.capture;
  if (!own.capture) own.steps.push_back({{}, mark.moment, nullptr});
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
// Says no at first. Who asks and asks lets time go by.
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Guard guard(runtime().mutex);
  REFUSE_IN_CAPTURE();
  const MomentPtr moment = reinterpret_cast<Event*>(event)->moment;
  if (!moment) return cudaSuccess;
  if (moment->capture) moment->capture->spoilt = true;
  if (moment->capture) return say(cudaErrorCapturedEvent);
  if (!moment->passed && ++moment->asked > 100) until(*moment);
  return moment->passed ? cudaSuccess : say(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Guard guard(runtime().mutex);
  REFUSE_IN_CAPTURE();
  const MomentPtr moment = reinterpret_cast<Event*>(event)->moment;
  if (!moment) return cudaSuccess;
  if (moment->capture) moment->capture->spoilt = true;
  if (moment->capture) return say(cudaErrorCapturedEvent);
  until(*moment);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const Guard guard(runtime().mutex);
  const Event* const both[] = {reinterpret_cast<Event*>(start), reinterpret_cast<Event*>(end)};
  for (const Event* event : both)
    if (!event->moment || event->moment->capture || (event->flags & cudaEventDisableTiming))
      return say(cudaErrorInvalidResourceHandle);
  if (!both[0]->moment->passed || !both[1]->moment->passed) return say(cudaErrorNotReady);
  const std::chrono::duration<float, std::milli> between = both[1]->moment->time - both[0]->moment->time;
  return *milliseconds = between.count(), cudaSuccess;
}

// -- graphs

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_now);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  auto& all = runtime();
  const Guard guard(all.mutex);
  Stream& own = *of(stream);
  if (stream == nullptr || own.capture) return say(cudaErrorStreamCaptureUnsupported);
  own.capture = std::make_shared<Capture>();
  own.capture->id = all.next_capture++;
  own.capture->mode = mode;
  own.capture->thread = std::this_thread::get_id();
  own.capture->origin = &own;
  all.captures.push_back(own.capture);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  auto& all = runtime();
  const Guard guard(all.mutex);
  const std::shared_ptr<Capture> capture = of(stream)->capture;
  if (!capture || capture->origin != of(stream)) return say(cudaErrorIllegalState);
  capture->over = true;
  for (const auto& each : all.streams)
    if (each->capture == capture) each->capture = nullptr;
  all.captures.erase(std::find(all.captures.begin(), all.captures.end(), capture));
  *graph = nullptr;
  if (capture->spoilt) {
    capture->graph = nullptr;
    return say(cudaErrorStreamCaptureInvalidated);
  }
  *graph = reinterpret_cast<cudaGraph_t>(capture->graph.release());
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const Guard guard(runtime().mutex);
  *status = of(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     std::size_t* count) {
  const Guard guard(runtime().mutex);
  const auto capture = of(stream)->capture;
  *status = !capture          ? cudaStreamCaptureStatusNone
            : capture->spoilt ? cudaStreamCaptureStatusInvalidated
                              : cudaStreamCaptureStatusActive;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? reinterpret_cast<cudaGraph_t>(capture->graph.get()) : nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, std::size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->work.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* instance, cudaGraph_t graph, unsigned long long) {
  const Guard guard(runtime().mutex);
  auto copied = std::make_shared<Graph>(*reinterpret_cast<Graph*>(graph));
  *instance = reinterpret_cast<cudaGraphExec_t>(new std::shared_ptr<Graph>(std::move(copied)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t stream) {
  const Guard guard(runtime().mutex);
  const auto graph = *reinterpret_cast<std::shared_ptr<Graph>*>(instance);
  for (const Work& work : graph->work) put(*of(stream), work);
  put(*of(stream), [graph] {});  // what it uses stays until the launch is done, also when the instance is destroyed
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const Guard guard(runtime().mutex);
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance) {
  const Guard guard(runtime().mutex);
  delete reinterpret_cast<std::shared_ptr<Graph>*>(instance);
  return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destroy, unsigned references,
                                 unsigned) {
  *object = reinterpret_cast<cudaUserObject_t>(new UserObject{data, destroy, static_cast<int>(references)});
  return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  const Guard guard(runtime().mutex);
  for (unsigned i = 0; i < count; ++i) let_go({reinterpret_cast<UserObject*>(object)});
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags) {
  const Guard guard(runtime().mutex);
  for (unsigned i = 0; i < count; ++i)
    reinterpret_cast<Graph*>(graph)->objects.push_back(reinterpret_cast<UserObject*>(object));
  if (!(flags & cudaGraphUserObjectMove)) reinterpret_cast<UserObject*>(object)->references += static_cast<int>(count);
  return cudaSuccess;
}

// -- kernels: PyTorch's own do not run here; simt/operators.cpp has its operators on the CPU

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  runtime().kernels[function] = name;
}
unsigned __cudaPushCallConfiguration(dim3, dim3, std::size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  *grid = *block = {1, 1, 1}, *shared = 0, *static_cast<cudaStream_t*>(stream) = nullptr;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, std::size_t, cudaStream_t) {
  const Guard guard(runtime().mutex);
  const std::string& name = runtime().kernels[function];
  if (name.find("spin_kernel") != std::string::npos) return cudaSuccess;  // every stream is as late as can be
  std::fprintf(stderr, "simt: a kernel of PyTorch's was launched: %s\n", name.c_str());
  return say(cudaErrorNotSupported);
}
cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(void* kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments, 0, config->stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, std::size_t,
                                                                   unsigned) {
  return *count = 1, cudaSuccess;
}

// -- the driver

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "an error of the driver's", CUDA_SUCCESS; }
CUresult cuMemGetAllocationGranularity(std::size_t* page, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  return *page = kPage, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* start, std::size_t bytes, std::size_t, CUdeviceptr, unsigned long long) {
  void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *start = reinterpret_cast<CUdeviceptr>(memory);
  return memory == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr start, std::size_t bytes) {
  munmap(reinterpret_cast<void*>(start), bytes);
  return CUDA_SUCCESS;
}
// A handle is its size and its device.
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes, const CUmemAllocationProp* kind,
                     unsigned long long) {
  const Guard guard(runtime().mutex);
  std::size_t& used = runtime().used[kind->location.id];
  if (bytes % kPage) return CUDA_ERROR_INVALID_VALUE;
  if (used + bytes > kTotal) return CUDA_ERROR_OUT_OF_MEMORY;
  used += bytes;
  *handle = bytes | static_cast<unsigned>(kind->location.id);
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  const Guard guard(runtime().mutex);
  runtime().used[handle % kPage] -= handle / kPage * kPage;
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr start, std::size_t bytes, std::size_t, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  const Guard guard(runtime().mutex);
  if (handle / kPage * kPage != bytes || runtime().memory.count(start)) return CUDA_ERROR_INVALID_VALUE;
  runtime().memory[start] = {bytes, static_cast<int>(handle % kPage), false};
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr start, std::size_t bytes, const CUmemAccessDesc*, std::size_t) {
  const Guard guard(runtime().mutex);
  const auto found = runtime().memory.find(start);
  if (found == runtime().memory.end() || found->second.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
  found->second.mapped = true;
  if (runtime().opened) mprotect(reinterpret_cast<void*>(start), bytes, PROT_READ | PROT_WRITE);
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr start, std::size_t bytes) {
  const Guard guard(runtime().mutex);
  const auto found = runtime().memory.find(start);
  if (found == runtime().memory.end() || found->second.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
  runtime().memory.erase(found);
  mmap(reinterpret_cast<void*>(start), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
       0);
  return CUDA_SUCCESS;
}

// -- what nobody is expected to call
}

// Of other signatures than the header's, under names of the assembler's.
#define ABSENT(NAME)                                          \
  extern "C" int simt_absent_##NAME() __asm__(#NAME);         \
  extern "C" __attribute__((used)) int simt_absent_##NAME() { \
    std::fprintf(stderr, "simt: " #NAME " is not there\n");   \
    return say(cudaErrorNotSupported);                        \
  }
ABSENT(cudaDeviceGetDefaultMemPool)
ABSENT(cudaDeviceGetGraphMemAttribute)
ABSENT(cudaDeviceSetGraphMemAttribute)
ABSENT(cudaFreeAsync)
ABSENT(cudaMallocAsync)
ABSENT(cudaMemPoolGetAttribute)
ABSENT(cudaMemPoolSetAccess)
ABSENT(cudaMemPoolSetAttribute)
ABSENT(cudaMemPoolTrimTo)
ABSENT(cudaGraphNodeGetDependencies)
ABSENT(cudaIpcCloseMemHandle)
ABSENT(cudaIpcGetMemHandle)
ABSENT(cudaIpcOpenMemHandle)
ABSENT(cudaIpcGetEventHandle)
ABSENT(cudaIpcOpenEventHandle)
ABSENT(cudaGetSymbolAddress)
ABSENT(cudaGraphAddNode)
ABSENT(cudaGraphConditionalHandleCreate)
ABSENT(cudaKernelSetAttributeForDevice)
ABSENT(cudaLibraryGetKernel)
ABSENT(cudaLibraryLoadData)
ABSENT(cudaLibraryUnload)
ABSENT(cudaMemcpyToSymbol)
ABSENT(cudaStreamBeginCaptureToGraph)
ABSENT(cudaStreamUpdateCaptureDependencies)
ABSENT(cuCtxGetCurrent)
ABSENT(cuCtxSetCurrent)
ABSENT(cuDevicePrimaryCtxRetain)
ABSENT(cuFuncGetAttribute)
ABSENT(cuFuncSetAttribute)
ABSENT(cuFuncSetCacheConfig)
ABSENT(cuLaunchCooperativeKernel)
ABSENT(cuLaunchKernel)
ABSENT(cuLinkAddData_v2)
ABSENT(cuLinkComplete)
ABSENT(cuLinkCreate_v2)
ABSENT(cuModuleGetFunction)
ABSENT(cuModuleLoad)
ABSENT(cuModuleLoadData)
ABSENT(cuModuleLoadDataEx)
ABSENT(cuModuleUnload)
ABSENT(cuOccupancyMaxActiveBlocksPerMultiprocessor)
ABSENT(cuPointerGetAttribute)
ABSENT(cuTensorMapEncodeTiled)
