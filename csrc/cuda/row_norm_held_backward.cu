// The backward of norms over rows that are held in registers. A thread takes a vector of a row, of two up to 256 columns, as
// long as that fits; it holds weight and bias of its columns and has the next row's words under way.
#include <algorithm>
#include <type_traits>

#include "row_norm_held.cuh"
#include "vector.cuh"

namespace memkit::cuda {
namespace {

constexpr int kHeldBackward = 512;  // threads of a block at most
constexpr int kShortColumns = kLanes * kWidth, kHeldBackwardRows = 2;
constexpr int kHeldBackwardSlots = 2;                                   // vectors of a long row
constexpr int64_t kOneVectorColumns = int64_t(kHeldBackward) * kWidth;  // rows of which a thread takes one

// Where a thread's slots lie: of `rows` rows a vector each, or of one row several.
template <int rows>
struct Slots {
  int64_t first;  // row of the block's first
  int64_t all;
  int columns;

  __device__ int64_t row(int s) const { return first + (rows == 1 ? 0 : s * int(blockDim.y)) + threadIdx.y; }
  __device__ int column(int s) const { return ((rows == 1 ? s * int(blockDim.x) : 0) + int(threadIdx.x)) * kWidth; }
  __device__ bool exists(int s) const { return row(s) < all && column(s) < columns; }
  __device__ int64_t at(int s) const { return row(s) * columns + column(s); }
};

// Weight or bias; `missing` where there is none, or no such column.
__device__ Vector<float> held_parameter(const void* array, Dtype dtype, int column, int columns, float missing) {
  if (array && column < columns) return load_eight<float>(array, dtype, column, columns, true);
  Vector<float> v;
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k) v.x[k] = missing;
  return v;
}

// What a thread reads of its slots of two tensors.
template <class X, class Y, int rows, int slots>
struct Incoming {
  Eight<X> saved[slots] = {};
  Eight<Y> grad[slots] = {};
  float mean[rows] = {}, rstd[rows] = {};

  __device__ void load(const RowNormArgs& args, const Slots<rows>& slot) {
    *this = Incoming();  // 0 where there is nothing: it counts in no sum
    MEMKIT_UNROLL
    for (int s = 0; s < slots; ++s) {
      if (!slot.exists(s)) continue;
      saved[s].load(static_cast<const X*>(args.saved) + slot.at(s));
      grad[s].load(static_cast<const Y*>(args.grad) + slot.at(s));
    }
    MEMKIT_UNROLL
    for (int r = 0; r < rows; ++r) {
      if (slot.row(r) >= args.rows) continue;
      if (args.mean) mean[r] = static_cast<const float*>(args.mean)[slot.row(r)];
      rstd[r] = static_cast<const float*>(args.rstd)[slot.row(r)];
    }
  }
};

// The sums of a block's rows, of eight columns a thread, to its part of the partial sums.
__device__ void store_sums(const RowNormArgs& args, int column, const Vector<float>& weight,
                           const Vector<float>& bias) {
  constexpr int kinds = 2 * kWidth;
  __shared__ float shared[kinds][kHeldBackward];
  float sums[kinds];
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k) sums[k] = weight.x[k], sums[kWidth + k] = bias.x[k];
  // Of several rows in a warp first.
  for (unsigned d = blockDim.x; d < kLanes; d *= 2) MEMKIT_UNROLL
  for (int j = 0; j < kinds; ++j) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], d);
  float* const partial = static_cast<float*>(args.partial) + int64_t(blockIdx.x) * 2 * args.columns;
  const auto store = [&](int j, float sum) {
    if (column < args.columns) partial[(j < kWidth ? 0 : args.columns) + column + j % kWidth] = sum;
  };
  const int each =
      blockDim.x < kLanes ? kLanes : int(blockDim.x);  // threads of the columns, of which there are `sharers`
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, sharers = int(blockDim.x * blockDim.y) / each;
  if (sharers == 1) {
    if (threadIdx.y == 0) MEMKIT_UNROLL
    for (int j = 0; j < kinds; ++j) store(j, sums[j]);
    return;
  }
  __syncthreads();
  MEMKIT_UNROLL
  for (int j = 0; j < kinds; ++j) shared[j][thread] = sums[j];
  __syncthreads();
  if (thread % each >= int(blockDim.x)) return;
  for (int j = thread / each; j < kinds; j += sharers) {
    float sum = 0;
    for (int other = 0; other < sharers; ++other) sum += shared[j][other * each + thread % each];
    store(j, sum);
  }
}

// across: vectors of a row that a thread takes; with one it holds the parameters of its columns.
template <class X, class Y, int rows, int across, bool parameters, bool from_output>
__global__ void __launch_bounds__(kHeldBackward) backward_held_kernel(const RowNormArgs args) {
  constexpr int slots = rows * across;
  constexpr bool ahead = across == 1 && rows * sizeof(Y) < 8;  // where there are registers for it
  const float count = float(args.columns);
  Vector<float> weight, inverse, bias, grad_weight[across] = {}, grad_bias[across] = {};
  const auto load_parameters = [&](int column) {
    weight = held_parameter(args.weight, args.weight_dtype, column, int(args.columns), 1);
    if (!from_output) return;
    bias = held_parameter(args.bias, args.weight_dtype, column, int(args.columns), 0);
    if constexpr (across == 1) MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) inverse.x[k] = inverse_weight(weight.x[k]);
  };
  if (across == 1) load_parameters(threadIdx.x * kWidth);
  const int64_t each = int64_t(blockDim.y) * rows, step = gridDim.x * each;
  Incoming<X, Y, rows, slots> next;
  if (ahead) next.load(args, Slots<rows>{int64_t(blockIdx.x) * each, args.rows, int(args.columns)});
  for (int64_t first = blockIdx.x * each; first < args.rows; first += step) {
    const Slots<rows> slot{first, args.rows, int(args.columns)};
    Incoming<X, Y, rows, slots> now;
    if (ahead) {
      now = next;
      next.load(args, Slots<rows>{first + step, args.rows, int(args.columns)});
    } else {
      now.load(args, slot);
    }
    Vector<float> x_hat[slots], gw[slots];
    Pair<float> sums[rows] = {};
    MEMKIT_UNROLL
    for (int s = 0; s < slots; ++s) {
      const int r = across > 1 ? 0 : s, v = across > 1 ? s : 0;
      if (across > 1) load_parameters(slot.column(s));
      x_hat[s] = now.saved[s].values(), gw[s] = now.grad[s].values();
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) {
        float& x = x_hat[s].x[k];
        const float g = gw[s].x[k];
        x = !from_output ? normalised(x, now.mean[r], now.rstd[r])
                         : memkit::from_output(x, across > 1 ? inverse_weight(weight.x[k]) : inverse.x[k], bias.x[k]);
        gw[s].x[k] = g * weight.x[k];
        sums[r].a += gw[s].x[k];
        sums[r].b += gw[s].x[k] * x;
        if constexpr (parameters) grad_weight[v].x[k] += g * x, grad_bias[v].x[k] += g;
      }
    }
    if (!args.grad_input) continue;
    block_sums(sums);
    MEMKIT_UNROLL
    for (int s = 0; s < slots; ++s) {
      if (!slot.exists(s)) continue;
      const int r = across > 1 ? 0 : s;
      const float mean_gw = args.centered ? sums[r].a / count : 0.0f;
      const float mean_gw_x_hat = args.projection(sums[r].b, now.rstd[r]);
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k)
        gw[s].x[k] = norm_gradient(gw[s].x[k], x_hat[s].x[k], now.rstd[r], mean_gw, mean_gw_x_hat);
      if (args.grad_sum) {
        Eight<X> more;
        more.load(static_cast<const X*>(args.grad_sum) + slot.at(s));
        const Vector<float> m = more.values();
        MEMKIT_UNROLL
        for (int k = 0; k < kWidth; ++k) gw[s].x[k] += m.x[k];
      }
      store_words<X>(gw[s], args.grad_input, slot.at(s));
    }
  }
  if constexpr (parameters) {
    MEMKIT_UNROLL
    for (int v = 0; v < across; ++v)
      store_sums(args, (v * int(blockDim.x) + int(threadIdx.x)) * kWidth, grad_weight[v], grad_bias[v]);
  }
}

int threads_of(const RowNormArgs& args, int slots) {
  const int64_t each = args.columns / kWidth;
  if (args.columns > kShortColumns) return int((each + slots * kLanes - 1) / (slots * kLanes)) * kLanes;
  int threads = 1;
  while (threads < each) threads *= 2;
  return threads;
}

using BackwardKernel = void (*)(RowNormArgs);

template <class X, class Y, int rows, int across>
BackwardKernel backward_kernel(const RowNormArgs& args, bool parameters) {
  if constexpr (std::is_same_v<X, Y>) {
    if (args.from_output)
      return parameters ? backward_held_kernel<X, Y, rows, across, true, true>
                        : backward_held_kernel<X, Y, rows, across, false, true>;
  }
  return parameters ? backward_held_kernel<X, Y, rows, across, true, false>
                    : backward_held_kernel<X, Y, rows, across, false, false>;
}

struct BackwardShape {
  BackwardKernel kernel = nullptr;  // null: none for such a call
  dim3 block;
  int64_t rows = 1;  // of a block at a time
};

BackwardShape backward_shape(const RowNormArgs& args, bool parameters) {
  BackwardShape shape;
  if (args.columns > kOneVectorColumns * kHeldBackwardSlots) return shape;
  if (args.from_output && args.dtype != args.out_dtype) return shape;
  const bool few = args.columns <= kShortColumns, one = args.columns <= kOneVectorColumns;
  with_dtypes(args, [&](auto x, auto y) {
    using X = decltype(x);
    using Y = decltype(y);
    shape.kernel = few   ? backward_kernel<X, Y, kHeldBackwardRows, 1>(args, parameters)
                   : one ? backward_kernel<X, Y, 1, 1>(args, parameters)
                         : backward_kernel<X, Y, 1, kHeldBackwardSlots>(args, parameters);
    return 0;
  });
  // Few blocks of many rows make few sums for row_norm_reduce to add up, which is most of the time that a small tensor
  // takes; in a large one the blocks of a multiprocessor hide each other's waiting.
  constexpr int64_t kSmall = int64_t(1) << 23;
  const bool half = few || args.rows * args.columns > kSmall;
  const int threads = threads_of(args, one ? 1 : kHeldBackwardSlots);
  shape.block = dim3(threads, std::max(1, kHeldBackward / (half ? 2 : 1) / threads));
  shape.rows = int64_t(shape.block.y) * (few ? kHeldBackwardRows : 1);
  return shape;
}

}  // namespace

std::optional<int> row_norm_backward_held_parts(const RowNormArgs& args, bool parameters, int processors,
                                                int64_t& parts) {
  const BackwardShape shape = backward_shape(args, parameters);
  if (!shape.kernel) return std::nullopt;
  int resident = 0;
  const int threads = int(shape.block.x * shape.block.y);
  if (const int error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, shape.kernel, threads, 0))
    return error;
  parts = std::min<int64_t>((args.rows + shape.rows - 1) / shape.rows, int64_t(processors) * std::max(1, resident));
  return int(cudaSuccess);
}

std::optional<int> row_norm_backward_held(const RowNormArgs& args, int64_t parts, cudaStream_t stream) {
  const BackwardShape shape = backward_shape(args, args.partial);
  if (!shape.kernel) return std::nullopt;
  launch_kernel(shape.kernel, unsigned(parts), shape.block, stream, args);
  return int(cudaGetLastError());
}

}  // namespace memkit::cuda
