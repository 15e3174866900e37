// CUDA's runtime as far as the kernels of csrc/cuda use it, on the CPU: a launch runs block after block, a block's threads
// take turns at every barrier and exchange. What hardware leaves open is drawn anew: the order of blocks, and after each
// barrier that of warps, each of which runs on to the next barrier before another starts, so that a missing barrier shows as
// a wrong result. A barrier or an exchange that not all threads of the block or the warp come to ends the program.
#pragma once

#include <math.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "runtime.h"

#define MEMKIT_SIMT_DEVICE 1  // the formulas' branches for a device

#define __global__
#define __device__
#define __noinline__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // one launch runs at a time

struct __attribute__((may_alias)) uint2 {
  uint32_t x, y;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
using cudaStream_t = struct CUstream_st*;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

namespace simt {

constexpr unsigned kLanes = 32;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "simt: %s\n", what);
  std::abort();
}

enum class Wait { none, block, warp, over };

struct Thread {
  void* stack_pointer = nullptr;
  Wait wait = Wait::none;
  dim3 index;
  int where = 0;                        // it waits, a line: two exchanges of a warp may not be taken for one
  alignas(16) unsigned char value[16];  // what it brings to an exchange
  int vote = 0;
};

// One block under way.
struct Block {
  dim3 grid, block, index;
  std::vector<Thread> threads;
  Thread* current = nullptr;
  int any = 0;  // of the last vote
  void* scheduler = nullptr;
  const void* body = nullptr;
  void (*run)(const void*) = nullptr;
};

inline Block* running = nullptr;

inline std::mutex& device() {
  static std::mutex mutex;
  return mutex;
}

inline std::mt19937& dice() {
  static std::mt19937 drawn(1);
  return drawn;
}

// Saves the registers that a function has to keep, and goes on where `to` was saved.
extern "C" void simt_switch(void** from, void* to);
asm(R"(
.weak simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStack = 256 << 10;
#else
constexpr size_t kStack = (64 << 10) + 448;
#endif

inline void yield(Wait wait, int where) {
  Block& block = *running;
  Thread& self = *block.current;
  self.wait = wait, self.where = where;
  simt_switch(&self.stack_pointer, block.scheduler);
}

inline void enter() {
  running->run(running->body);
  yield(Wait::over, 0);
  fail("a thread that had ended went on");
}

inline char* stacks(size_t count) {
  static std::unique_ptr<char[]> memory;
  static size_t room = 0;
  if (room < count) memory.reset(new char[count * kStack + 64]), room = count;
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
}

inline void start(Thread& thread, char* stack) {
  void** top = reinterpret_cast<void**>(stack + kStack);
  *--top = nullptr;  // a return address nobody uses: a function finds the stack aligned as after a call
  *--top = reinterpret_cast<void*>(&enter);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  thread.stack_pointer = top;
  thread.wait = Wait::none;
}

// Whether all threads of [begin, end) that are not over wait for `what`; then they go on.
inline bool release(std::vector<Thread>& threads, size_t begin, size_t end, Wait what) {
  int where = 0;
  bool some = false;
  for (size_t i = begin; i < end; ++i) {
    const Thread& t = threads[i];
    if (t.wait == Wait::over) continue;
    if (t.wait != what) return false;
    if (some && t.where != where) fail("threads wait at different places");
    where = t.where, some = true;
  }
  if (!some) return false;
  for (size_t i = begin; i < end; ++i)
    if (threads[i].wait != Wait::over) threads[i].wait = Wait::none;
  return true;
}

// Lets a warp run ahead of all others, until its threads are over or wait at a barrier of the block.
inline void run_warp(Block& block, size_t begin, size_t end) {
  std::vector<size_t> lanes(end - begin);
  std::iota(lanes.begin(), lanes.end(), begin);
  std::shuffle(lanes.begin(), lanes.end(), dice());
  do {
    for (const size_t i : lanes) {
      Thread& thread = block.threads[i];
      if (thread.wait != Wait::none) continue;
      block.current = &thread;
      simt_switch(&block.scheduler, thread.stack_pointer);
    }
  } while (release(block.threads, begin, end, Wait::warp));
}

inline void run_block(Block& block) {
  const size_t count = size_t(block.block.x) * block.block.y;
  block.threads.resize(count);
  char* memory = stacks(count);
  for (size_t i = 0; i < count; ++i) {
    block.threads[i].index = dim3(unsigned(i % block.block.x), unsigned(i / block.block.x));
    start(block.threads[i], memory + i * kStack);
  }
  std::vector<size_t> warps((count + kLanes - 1) / kLanes);
  std::iota(warps.begin(), warps.end(), size_t(0));
  running = &block;
  do {
    std::shuffle(warps.begin(), warps.end(), dice());
    for (const size_t warp : warps) run_warp(block, warp * kLanes, std::min<size_t>((warp + 1) * kLanes, count));
    block.any = 0;
    for (const Thread& thread : block.threads)
      if (thread.wait == Wait::block) block.any |= thread.vote;
  } while (release(block.threads, 0, count, Wait::block));
  running = nullptr;
  for (const Thread& thread : block.threads)
    if (thread.wait != Wait::over) fail("some threads wait at a barrier, others at another or in an exchange");
}

template <class... P>
void play(void (*kernel)(P...), dim3 grid, dim3 block, P... arguments) {
  const std::lock_guard<std::mutex> lock(device());
  const auto body = [&] { kernel(arguments...); };
  Block own;
  own.grid = grid, own.block = block, own.body = &body;
  own.run = [](const void* f) { (*static_cast<decltype(body)*>(f))(); };
  std::vector<size_t> order(size_t(grid.x) * grid.y);
  std::iota(order.begin(), order.end(), size_t(0));
  std::shuffle(order.begin(), order.end(), dice());
  for (const size_t i : order) {
    own.index = dim3(unsigned(i % grid.x), unsigned(i / grid.x));
    run_block(own);
  }
}

// At once, or as work of the stream where there are streams (simt/runtime.cpp is loaded).
template <class... P>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, cudaStream_t stream, P... arguments) {
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (threads == 0 || threads > 1024 || grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 || grid.y > 65535 ||
      block.z != 1 || grid.z != 1)
    fail("a launch that hardware refuses");
  if (enqueue)
    enqueue(stream, [=] { play(kernel, grid, block, arguments...); });
  else
    play(kernel, grid, block, arguments...);
}

template <class T>
T exchange(unsigned mask, T value, unsigned distance, int where) {
  static_assert(sizeof(T) <= 16);
  if (mask != 0xffffffffu) fail("an exchange of part of a warp");
  Block& block = *running;
  Thread& self = *block.current;
  const size_t own = size_t(&self - block.threads.data()), peer = own ^ distance;
  if (distance >= kLanes || peer >= block.threads.size()) fail("an exchange with a lane that is not there");
  std::memcpy(self.value, &value, sizeof value);
  yield(Wait::warp, where);
  if (block.threads[peer].wait == Wait::over) fail("an exchange with a thread that is over");
  T theirs;
  std::memcpy(&theirs, block.threads[peer].value, sizeof theirs);
  yield(Wait::warp, where);  // all have read
  return theirs;
}

inline int meet(int vote, int where) {
  running->current->vote = vote;
  yield(Wait::block, where);
  return running->any;
}

}  // namespace simt

#define threadIdx (simt::running->current->index)
#define blockIdx (simt::running->index)
#define blockDim (simt::running->block)
#define gridDim (simt::running->grid)
#define __syncthreads() void(simt::meet(0, __LINE__))
#define __syncthreads_or(VOTE) simt::meet(VOTE, __LINE__)
#define __syncwarp() simt::yield(simt::Wait::warp, __LINE__)
#define __shfl_xor_sync(MASK, VALUE, DISTANCE) simt::exchange(MASK, VALUE, unsigned(DISTANCE), __LINE__)
#define __trap() simt::fail("__trap")

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 3, cudaSuccess; }

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int threads, std::size_t) {
  return *blocks = threads > 256 ? 1 : 2, cudaSuccess;
}

inline float __logf(float x) { return std::log(x); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return uint64_t((unsigned __int128)(a)*b >> 64); }
