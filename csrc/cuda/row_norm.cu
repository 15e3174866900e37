// A block works on a row at a time and on many rows in turn. Up to kHeld elements a thread are held in registers, so that
// memory is read once; of longer rows the passes after the first read again. A thread meets the same columns in every row:
// it sums its part of the gradients of weight and bias in registers, writes the sums once, and a second kernel adds up
// those of all blocks, in order.
#include <algorithm>

#include "row_norm.h"
#include "vector.cuh"

namespace memkit::cuda {
namespace {

// Vectors that a thread holds, and their elements.
template <class T>
constexpr int kVectors = sizeof(T) == 8 ? 1 : 2;
template <class T>
constexpr int kHeld = kVectors<T> * kWidth;
constexpr int kMostThreads = 512;
constexpr int kThreadsPerProcessor = 1024;

int held_by(const RowNormArgs& args) { return args.dtype == Dtype::float64 ? kHeld<double> : kHeld<float>; }

int threads_for(const RowNormArgs& args) {
  const int64_t of_warp = held_by(args) * kLanes;
  return int(std::min<int64_t>((args.columns + of_warp - 1) / of_warp * kLanes, kMostThreads));
}

bool fits(const RowNormArgs& args) { return args.columns <= int64_t(held_by(args)) * kMostThreads; }

cudaError_t blocks_for(const RowNormArgs& args, int64_t& blocks) {
  int count = 0;
  if (const cudaError_t error = processor_count(count)) return error;
  blocks = std::min<int64_t>(args.rows, int64_t(count) * (kThreadsPerProcessor / threads_for(args)));
  return cudaSuccess;
}

// The column at which a thread's vector v of a row begins, in the pass number `turn` over a long row.
template <class T>
__device__ int64_t column_of(int v, int64_t turn) {
  return ((turn * kVectors<T> + v) * blockDim.x + threadIdx.x) * int64_t(kWidth);
}
template <class T>
__device__ int64_t turns_of(int64_t columns) {
  const int64_t each = int64_t(kHeld<T>) * blockDim.x;
  return (columns + each - 1) / each;
}

template <class T>
struct Share {
  Vector<T> v[kVectors<T>];
};

// A thread's share of a row of `array`; the loads of all vectors are under way before the first is converted.
template <class T>
__device__ Share<T> load_share(const void* array, Dtype dtype, int64_t row, int64_t columns, int64_t turn, bool wide) {
  Share<T> share;
  const int64_t at = row * columns;
  if (wide) {
    RawVector<T> raw[kVectors<T>] = {};
    MEMKIT_UNROLL
    for (int v = 0; v < kVectors<T>; ++v)
      if (column_of<T>(v, turn) < columns) raw[v].load(array, dtype, at + column_of<T>(v, turn));
    MEMKIT_UNROLL
    for (int v = 0; v < kVectors<T>; ++v) share.v[v] = raw[v].values(dtype);
  } else {
    MEMKIT_UNROLL
    for (int v = 0; v < kVectors<T>; ++v)
      share.v[v] = load_eight<T>(array, dtype, at + column_of<T>(v, turn), at + columns, false);
  }
  return share;
}

template <class T>
__device__ void store_share(const Share<T>& share, void* array, Dtype dtype, int64_t row, int64_t columns, int64_t turn,
                            bool wide) {
  const int64_t at = row * columns;
  MEMKIT_UNROLL
  for (int v = 0; v < kVectors<T>; ++v)
    if (column_of<T>(v, turn) < columns)
      store_eight(share.v[v], array, dtype, at + column_of<T>(v, turn), at + columns, wide);
}

// Weight or bias; `missing` where there is none.
template <class T>
__device__ Share<T> load_parameter(const void* array, Dtype dtype, int64_t columns, int64_t turn, T missing,
                                   bool wide) {
  if (array) return load_share<T>(array, dtype, 0, columns, turn, wide);
  Share<T> share;
  MEMKIT_UNROLL
  for (int v = 0; v < kVectors<T>; ++v) MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k) share.v[v].x[k] = missing;
  return share;
}

// f(v, k, column) for each of the thread's elements that exist.
template <class T, class F>
__device__ void for_share(int64_t columns, int64_t turn, F&& f) {
  MEMKIT_UNROLL
  for (int v = 0; v < kVectors<T>; ++v) MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k)
    if (column_of<T>(v, turn) + k < columns) f(v, k);
}

template <class T>
__device__ Share<T> load_input(const RowNormArgs& args, int64_t row, int64_t turn, bool wide, bool first) {
  if (!args.residual) return load_share<T>(args.x, args.dtype, row, args.columns, turn, wide);
  if (!first) return load_share<T>(args.sum, args.dtype, row, args.columns, turn, wide);
  Share<T> x = load_share<T>(args.x, args.dtype, row, args.columns, turn, wide);
  const Share<T> r = load_share<T>(args.residual, args.dtype, row, args.columns, turn, wide);
  for_share<T>(args.columns, turn, [&](int v, int k) { x.v[v].x[k] += r.v[v].x[k]; });
  store_share(x, args.sum, args.dtype, row, args.columns, turn, wide);
  // What is normalised is the sum as it is stored.
  return load_share<T>(args.sum, args.dtype, row, args.columns, turn, wide);
}

template <class T, bool centered>
__global__ void __launch_bounds__(kMostThreads, 1) forward_kernel(const RowNormArgs args, const bool wide) {
  const int64_t columns = args.columns, turns = turns_of<T>(columns);
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    Share<T> x;
    T mean = 0, squares = 0;
    Pair<T> sum{0, 0};
    for (int64_t turn = 0; turn < turns; ++turn) {
      x = load_input<T>(args, row, turn, wide, true);
      for_share<T>(columns, turn, [&](int v, int k) {
        if constexpr (centered) {
          sum.a += x.v[v].x[k];
        } else {
          sum.b += x.v[v].x[k] * x.v[v].x[k];
        }
      });
    }
    sum = block_sum(sum);
    squares = sum.b;
    if constexpr (centered) {
      const T about = sum.a / T(columns);
      Pair<T> distance{0, 0};
      for (int64_t turn = 0; turn < turns; ++turn) {
        if (turns > 1) x = load_input<T>(args, row, turn, wide, false);
        for_share<T>(columns, turn, [&](int v, int k) {
          const T d = x.v[v].x[k] - about;
          distance.a += d, distance.b += d * d;
        });
      }
      distance = block_sum(distance);
      const Moments<T> moments = Moments<T>::from_sums(T(columns), about, distance.a, distance.b);
      mean = moments.mean, squares = moments.m2;
    }
    const T rstd = reciprocal_root(squares / T(columns), T(args.eps));
    if (threadIdx.x == 0) {
      if (args.mean) static_cast<T*>(args.mean)[row] = mean;
      static_cast<T*>(args.rstd)[row] = rstd;
    }
    for (int64_t turn = 0; turn < turns; ++turn) {
      if (turns > 1) x = load_input<T>(args, row, turn, wide, false);
      const Share<T> w = load_parameter<T>(args.weight, args.weight_dtype, columns, turn, T(1), wide);
      const Share<T> b = load_parameter<T>(args.bias, args.weight_dtype, columns, turn, T(0), wide);
      for_share<T>(columns, turn, [&](int v, int k) {
        x.v[v].x[k] = normalised(x.v[v].x[k], mean, rstd) * w.v[v].x[k] + b.v[v].x[k];
      });
      store_share(x, args.y, args.out_dtype, row, columns, turn, wide);
    }
  }
}

// held: a row fits into the block's registers.
template <class T, bool held, bool parameters>
__global__ void __launch_bounds__(kMostThreads, 1) backward_kernel(const RowNormArgs args, const bool wide) {
  const int64_t columns = args.columns, turns = held ? 1 : turns_of<T>(columns);
  const Dtype saved_dtype = args.from_output ? args.out_dtype : args.dtype;
  Share<T> grad_weight = {}, grad_bias = {};
  Share<T> x_hat, gw;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const T mean = args.mean ? static_cast<const T*>(args.mean)[row] : T(0);
    const T rstd = static_cast<const T*>(args.rstd)[row];
    const auto load = [&](int64_t turn, auto&& each) {
      x_hat = load_share<T>(args.saved, saved_dtype, row, columns, turn, wide);
      gw = load_share<T>(args.grad, args.out_dtype, row, columns, turn, wide);
      const Share<T> w = load_parameter<T>(args.weight, args.weight_dtype, columns, turn, T(1), wide);
      const Share<T> b =
          load_parameter<T>(args.from_output ? args.bias : nullptr, args.weight_dtype, columns, turn, T(0), wide);
      for_share<T>(columns, turn, [&](int v, int k) {
        T& x = x_hat.v[v].x[k];
        const T weight = w.v[v].x[k], g = gw.v[v].x[k];
        x = args.from_output ? from_output(x, inverse_weight(weight), b.v[v].x[k]) : normalised(x, mean, rstd);
        gw.v[v].x[k] = g * weight;
        each(v, k, g);
      });
    };
    Pair<T> sum{0, 0};
    for (int64_t turn = 0; turn < turns; ++turn) {
      load(turn, [&](int v, int k, T g) {
        const T x = x_hat.v[v].x[k];
        if (args.centered) sum.a += gw.v[v].x[k];
        sum.b += gw.v[v].x[k] * x;
        if constexpr (parameters && held) grad_weight.v[v].x[k] += g * x, grad_bias.v[v].x[k] += g;
      });
    }
    if (!args.grad_input) continue;
    sum = block_sum(sum);
    const T mean_gw = sum.a / T(columns), mean_gw_x_hat = sum.b / T(columns);
    for (int64_t turn = 0; turn < turns; ++turn) {
      if (!held) load(turn, [](int, int, T) {});
      for_share<T>(columns, turn, [&](int v, int k) {
        gw.v[v].x[k] = norm_gradient(gw.v[v].x[k], x_hat.v[v].x[k], rstd, mean_gw, mean_gw_x_hat);
      });
      if (args.grad_sum) {
        const Share<T> more = load_share<T>(args.grad_sum, args.dtype, row, columns, turn, wide);
        for_share<T>(columns, turn, [&](int v, int k) { gw.v[v].x[k] += more.v[v].x[k]; });
      }
      store_share(gw, args.grad_input, args.dtype, row, columns, turn, wide);
    }
  }
  if constexpr (parameters && held) {
    T* partial = static_cast<T*>(args.partial) + int64_t(blockIdx.x) * 2 * columns;
    for_share<T>(columns, 0, [&](int v, int k) {
      const int64_t column = column_of<T>(v, 0) + k;
      partial[column] = grad_weight.v[v].x[k];
      partial[columns + column] = grad_bias.v[v].x[k];
    });
  }
}

// Rows too long for registers: each thread takes 8 columns over some of the rows. Runs before backward_kernel, which may
// overwrite the gradient.
template <class T>
__global__ void parameters_kernel(const RowNormArgs args, const bool wide) {
  const int64_t columns = args.columns;
  const int64_t column = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * kWidth;
  if (column >= columns) return;
  const bool whole = wide && column + kWidth <= columns;
  const Dtype saved_dtype = args.from_output ? args.out_dtype : args.dtype;
  Vector<T> inverse, bias, grad_weight = {}, grad_bias = {};
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k) {
    const bool exists = column + k < columns;
    inverse.x[k] =
        args.weight && exists ? inverse_weight(load_one<T>(args.weight, args.weight_dtype, column + k)) : T(1);
    bias.x[k] = args.bias && exists ? load_one<T>(args.bias, args.weight_dtype, column + k) : T(0);
  }
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const T mean = args.mean ? static_cast<const T*>(args.mean)[row] : T(0);
    const T rstd = static_cast<const T*>(args.rstd)[row];
    const int64_t at = row * columns + column, end = (row + 1) * columns;
    const Vector<T> s = load_eight<T>(args.saved, saved_dtype, at, end, whole);
    const Vector<T> g = load_eight<T>(args.grad, args.out_dtype, at, end, whole);
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) {
      const T x_hat = args.from_output ? from_output(s.x[k], inverse.x[k], bias.x[k]) : normalised(s.x[k], mean, rstd);
      grad_weight.x[k] += g.x[k] * x_hat;
      grad_bias.x[k] += g.x[k];
    }
  }
  T* partial = static_cast<T*>(args.partial) + int64_t(blockIdx.x) * 2 * columns + column;
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k)
    if (column + k < columns) partial[k] = grad_weight.x[k], partial[columns + k] = grad_bias.x[k];
}

constexpr int kReduceColumns = 32, kReduceRows = 16;

// blockIdx.y: weight or bias.
template <class T>
__global__ void reduce_kernel(const RowNormArgs args, const int64_t parts, void* grad_weight, void* grad_bias) {
  void* target = blockIdx.y == 0 ? grad_weight : grad_bias;
  if (!target) return;
  const int64_t column = int64_t(blockIdx.x) * kReduceColumns + threadIdx.x;
  T sum = 0;
  if (column < args.columns) {
    const T* from = static_cast<const T*>(args.partial) + blockIdx.y * args.columns + column;
    for (int64_t part = threadIdx.y; part < parts; part += kReduceRows) sum += from[part * 2 * args.columns];
  }
  __shared__ T rows[kReduceRows][kReduceColumns];
  rows[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= args.columns) return;
  MEMKIT_UNROLL
  for (int r = 1; r < kReduceRows; ++r) sum += rows[r][threadIdx.x];
  store_one(sum, target, args.weight_dtype, column);
}

template <class T>
__global__ void flaws_kernel(const RowNormArgs args, const WeightCheck<T> check, int* found) {
  int flaws = 0;
  for (int64_t i = threadIdx.x; i < args.columns; i += blockDim.x) {
    const T weight = args.weight ? load_one<T>(args.weight, args.weight_dtype, i) : T(1);
    flaws |= check.flaws(weight, args.bias ? load_one<T>(args.bias, args.weight_dtype, i) : T(0));
  }
  const int ill = __syncthreads_or(flaws & kIllConditioned), lost = __syncthreads_or(flaws & kNotInvertible);
  if (threadIdx.x == 0) *found = (ill ? kIllConditioned : 0) | (lost ? kNotInvertible : 0);
}

bool all_aligned(const RowNormArgs& args) {
  if (args.columns % kWidth != 0) return false;
  for (const void* pointer :
       {args.x, args.residual, static_cast<const void*>(args.sum), static_cast<const void*>(args.y), args.weight,
        args.bias, args.saved, args.grad, args.grad_sum, static_cast<const void*>(args.grad_input)})
    if (!is_aligned(pointer)) return false;
  return true;
}

// f(float()) or f(double()).
template <class F>
int with_computed(const RowNormArgs& args, const F& f) {
  return args.dtype == Dtype::float64 ? f(double()) : f(float());
}

}  // namespace

int row_norm_forward(const RowNormArgs& args, CUstream_st* stream) {
  int64_t blocks = 0;
  if (const cudaError_t error = blocks_for(args, blocks)) return error;
  // Without partial sums at stake the hardware's scheduler may even out the end.
  const unsigned grid = unsigned(std::min<int64_t>(args.rows, blocks * 16));
  const int threads = threads_for(args);
  const bool wide = all_aligned(args);
  return with_computed(args, [&](auto computed) {
    using T = decltype(computed);
    if (args.centered) {
      launch_kernel(forward_kernel<T, true>, grid, threads, stream, args, wide);
    } else {
      launch_kernel(forward_kernel<T, false>, grid, threads, stream, args, wide);
    }
    return int(cudaGetLastError());
  });
}

int row_norm_parts(const RowNormArgs& args, int64_t& parts) { return blocks_for(args, parts); }

int row_norm_backward(const RowNormArgs& args, int64_t parts, CUstream_st* stream) {
  const int threads = threads_for(args);
  const unsigned grid = unsigned(parts);
  const bool wide = all_aligned(args);
  return with_computed(args, [&](auto computed) {
    using T = decltype(computed);
    if (fits(args)) {
      if (args.partial) {
        launch_kernel(backward_kernel<T, true, true>, grid, threads, stream, args, wide);
      } else {
        launch_kernel(backward_kernel<T, true, false>, grid, threads, stream, args, wide);
      }
      return int(cudaGetLastError());
    }
    if (args.partial) {
      const unsigned tiles = unsigned((args.columns + 128 * kWidth - 1) / (128 * kWidth));
      launch_kernel(parameters_kernel<T>, dim3(grid, tiles), 128, stream, args, wide);
      if (const cudaError_t error = cudaGetLastError()) return int(error);
    }
    launch_kernel(backward_kernel<T, false, false>, grid, threads, stream, args, wide);
    return int(cudaGetLastError());
  });
}

int row_norm_reduce(const RowNormArgs& args, int64_t parts, void* grad_weight, void* grad_bias, CUstream_st* stream) {
  const dim3 grid(unsigned((args.columns + kReduceColumns - 1) / kReduceColumns), 2);
  const dim3 threads(kReduceColumns, kReduceRows);
  return with_computed(args, [&](auto computed) {
    launch_kernel(reduce_kernel<decltype(computed)>, grid, threads, stream, args, parts, grad_weight, grad_bias);
    return int(cudaGetLastError());
  });
}

int row_norm_flaws(const RowNormArgs& args, int* flaws, CUstream_st* stream) {
  return with_computed(args, [&](auto computed) {
    using T = decltype(computed);
    launch_kernel(flaws_kernel<T>, 1, 256, stream, args, weight_check<T>(args.out_dtype, args.columns), flaws);
    return int(cudaGetLastError());
  });
}

}  // namespace memkit::cuda
