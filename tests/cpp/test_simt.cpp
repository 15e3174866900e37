// What plays CUDA's kernels on the CPU (tests/simt): a right kernel gives the right result however threads take turns, and
// one without a barrier does not.
#include <numeric>
#include <vector>

#include "../simt/cuda_runtime.h"
#include "check.h"

namespace {

constexpr unsigned kThreads = 96, kWarps = kThreads / simt::kLanes;

// Every block's sum of its rows, into out; the barriers as a bit each.
template <int barriers>
__global__ void sums(const int* x, int rows, int* out) {
  __shared__ int warps[kWarps];
  for (int row = int(blockIdx.x); row < rows; row += int(gridDim.x)) {
    int sum = x[row * int(kThreads) + int(threadIdx.x)];
    for (int d = simt::kLanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (barriers & 1) __syncthreads();  // the last row's sums have been read
    if (threadIdx.x % simt::kLanes == 0) warps[threadIdx.x / simt::kLanes] = sum;
    if (barriers & 2) __syncthreads();
    sum = 0;
    for (const int each : warps) sum += each;
    out[row * int(kThreads) + int(threadIdx.x)] = sum;
  }
}

template <int barriers>
bool right() {
  constexpr int kRows = 40;
  std::vector<int> x(kRows * kThreads), out(x.size());
  std::iota(x.begin(), x.end(), 1);
  simt::launch(sums<barriers>, 3, kThreads, nullptr, static_cast<const int*>(x.data()), kRows, out.data());
  for (int row = 0; row < kRows; ++row) {
    const auto from = x.begin() + row * int(kThreads);
    for (unsigned t = 0; t < kThreads; ++t)
      if (out[row * kThreads + t] != std::accumulate(from, from + kThreads, 0)) return false;
  }
  return true;
}

__global__ void indices(int* seen, int* any) {
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x, block = blockIdx.y * gridDim.x + blockIdx.x;
  ++seen[block * blockDim.x * blockDim.y + thread];
  if (__syncthreads_or(thread == 5 && block == 2)) any[block] = 1;
}

}  // namespace

int main() {
  CHECK(right<3>(), "with both barriers");
  CHECK(!right<2>(), "without the barrier before the write");
  CHECK(!right<1>(), "without the barrier after it");

  const dim3 grid(3, 2), block(40, 3);
  std::vector<int> seen(6 * 120), any(6);
  simt::launch(indices, grid, block, nullptr, seen.data(), any.data());
  for (size_t i = 0; i < seen.size(); ++i) CHECK(seen[i] == 1, "thread %zu ran %d times", i, seen[i]);
  for (int i = 0; i < 6; ++i) CHECK(any[i] == (i == 2), "block %d voted %d", i, any[i]);
  return finish("simt");
}
