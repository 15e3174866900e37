// The threads of a row: blockDim.x of them, a power of two up to a warp's or some warps; a block has blockDim.y rows.
#pragma once

#include <algorithm>

#include "launch.cuh"
#include "row.cuh"

namespace memkit::cuda {

__device__ inline int64_t team_row() {
  return (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * blockDim.y + threadIdx.y;
}

template <class V>
__device__ V team_lane(const V& own, int distance) {
  uint32_t parts[sizeof(V) / sizeof(uint32_t)];
  memcpy(parts, &own, sizeof(V));
  MEMKIT_UNROLL
  for (uint32_t& part : parts) part = __shfl_xor_sync(0xffffffffu, part, distance);
  V other;
  memcpy(&other, parts, sizeof(V));
  return other;
}

// The values of a warp's threads merged, or of a team's that is smaller, in all of them.
template <class V>
__device__ V warp_merge(V own) {
  static_assert(sizeof(V) % sizeof(uint32_t) == 0);
  MEMKIT_UNROLL
  for (int d = kLanes / 2; d > 0; d /= 2)
    if (d < int(blockDim.x)) own.merge(team_lane(own, d));
  return own;
}

// All threads' values merged, in all of them; once a kernel for each type.
template <class V>
__device__ V team_merge(V own) {
  own = warp_merge(own);
  if (blockDim.x <= kLanes) return own;
  __shared__ uint32_t warps[kLanes][sizeof(V) / sizeof(uint32_t)];
  if (threadIdx.x % kLanes == 0) memcpy(warps[threadIdx.x / kLanes], &own, sizeof(V));
  __syncthreads();
  own = V();
  if (threadIdx.x % kLanes < blockDim.x / kLanes) memcpy(&own, warps[threadIdx.x % kLanes], sizeof(V));
  MEMKIT_UNROLL
  for (int d = kLanes / 2; d > 0; d /= 2) own.merge(team_lane(own, d));
  return own;
}

template <class T>
struct TeamLargest {
  T value = -std::numeric_limits<T>::infinity();
  MEMKIT_FN void merge(const TeamLargest& other) { value = select(other.value > value, other.value, value); }
};
template <class T>
__device__ T team_largest(T own) {
  return team_merge(TeamLargest<T>{own}).value;
}

template <class T>
struct TeamSum {
  T value = 0;
  MEMKIT_FN void merge(const TeamSum& other) { value += other.value; }
};

// How a launch shares out rows.
struct TeamShape {
  int words;  // of a thread at a time: 2, 4 or 8
  bool held;  // these are all
  dim3 block, grid;
};

constexpr int kTeamMost = 1024;  // threads

// The fewest threads that hold a row with up to `most` words each; more than `least` only where four threads are left. Of few
// rows, which leave the card idle, more threads with fewer words each, down to `least`.
inline cudaError_t team_shape(int64_t rows, int64_t words, bool singles, int least, int most, int threads_most,
                              TeamShape& shape) {
  constexpr int kFew = 4;
  int processors = 0;
  if (const cudaError_t error = processor_count(processors)) return error;
  const auto threads_of = [&](int each) {
    const int64_t need = std::max<int64_t>((words + each - 1) / each, singles ? kMostSingles : 1);
    if (need > kLanes) return (need + kLanes - 1) / kLanes * kLanes;
    int64_t power = 1;
    while (power < need) power *= 2;
    return power;
  };
  int each = least;
  while (each < most && words >= 2 * each * kFew) each *= 2;
  while (each > least && rows * threads_of(each) < int64_t(processors) * kTeamMost / 2 &&
         threads_of(each / 2) <= threads_most)
    each /= 2;
  int64_t threads = threads_of(each);
  shape.words = each, shape.held = threads <= threads_most;
  if (!shape.held) {  // as many words for all, in several goes
    const int64_t goes = (threads + threads_most - 1) / threads_most;
    threads = (threads / kLanes + goes - 1) / goes * kLanes;
  }
  constexpr int64_t together = 128, blocks_most = (int64_t(1) << 31) - 1;
  shape.block = dim3(unsigned(threads), unsigned(std::max<int64_t>(together / threads, 1)));
  if (threads > kLanes) shape.block.y = 1;
  const int64_t blocks = (rows + shape.block.y - 1) / shape.block.y;
  shape.grid = dim3(unsigned(std::min(blocks, blocks_most)), unsigned((blocks + blocks_most - 1) / blocks_most));
  return cudaSuccess;
}

}  // namespace memkit::cuda
