// Norms over rows of any dtypes and lengths; row_norm_held_*.cu have what is usual.
//
// A row is worked on by 8, 16 or 32 threads, or by the warps of a block, which take many rows in turn. Up to `held` elements
// a thread are held in registers, so that memory is read once; of longer rows the passes after the first read again. A
// thread meets the same columns in every row: it sums its part of the gradients of weight and bias in registers, writes the
// sums once, and a second kernel adds up those of all blocks, in order.
#include <algorithm>

#include "row_norm.h"
#include "row_norm_held.h"
#include "vector.cuh"

namespace memkit::cuda {
namespace {

// Threads of a row at most, and of a block, where rows are short, at least.
constexpr int kForwardThreads = 256, kBackwardThreads = 512, kShortRowThreads = 128;

// Vectors that a thread holds: the backward holds twice as much, and two sums.
constexpr int kForwardVectors = 2;
template <class T>
constexpr int kBackwardVectors = sizeof(T) == 8 ? 1 : 2;

bool in_double(const RowNormArgs& args) { return args.dtype == Dtype::float64; }

// Threads for a row, of which each holds `vectors`.
int threads_for(const RowNormArgs& args, int vectors, int most) {
  const int64_t each = (args.columns + kWidth - 1) / kWidth;
  int64_t threads = 8;
  while (threads < kLanes && threads < each) threads *= 2;
  const int64_t warps = (each + vectors * kLanes - 1) / (vectors * kLanes);
  return int(std::min<int64_t>(std::max<int64_t>(threads, warps * kLanes), most));
}

int backward_vectors(const RowNormArgs& args) {
  return in_double(args) ? kBackwardVectors<double> : kBackwardVectors<float>;
}
int backward_threads(const RowNormArgs& args) { return threads_for(args, backward_vectors(args), kBackwardThreads); }
bool fits(const RowNormArgs& args) {
  return args.columns <= int64_t(backward_vectors(args)) * kWidth * kBackwardThreads;
}

// Several rows of up to a warp each, of `least` threads together; longer rows have a block to themselves, as its sums want it.
dim3 block_of(int threads, int least) { return dim3(threads, threads > kLanes ? 1 : std::max(1, least / threads)); }

// The rows [begin, end) in the order that the threads of a block meet them: f(row, whether it exists). All threads come to
// every sum; where rows are left for some of them only, the others take the last row again and write nothing.
template <class F>
__device__ void for_rows(const RowNormArgs& args, F&& f) {
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < args.rows; first += step) {
    const int64_t row = first + threadIdx.y;
    f(row < args.rows ? row : args.rows - 1, row < args.rows);
  }
}

// The column at which a thread's vector v of a row begins, in the pass number `turn` over a long row.
template <int vectors>
__device__ int64_t column_of(int v, int64_t turn) {
  return ((turn * vectors + v) * blockDim.x + threadIdx.x) * int64_t(kWidth);
}
template <int vectors>
__device__ int64_t turns_of(int64_t columns) {
  const int64_t each = int64_t(vectors) * kWidth * blockDim.x;
  return (columns + each - 1) / each;
}

template <class T, int vectors>
struct Share {
  Vector<T> v[vectors];
};

// A thread's share of a row of `array`, 0 where there is nothing; the loads of all vectors are under way before the first is
// converted.
template <class T, int vectors>
__device__ Share<T, vectors> load_share(const void* array, Dtype dtype, int64_t row, int64_t columns, int64_t turn,
                                        bool wide) {
  Share<T, vectors> share;
  const int64_t at = row * columns;
  if (wide) {
    RawVector<T> raw[vectors] = {};
    MEMKIT_UNROLL
    for (int v = 0; v < vectors; ++v)
      if (column_of<vectors>(v, turn) < columns) raw[v].load(array, dtype, at + column_of<vectors>(v, turn));
    MEMKIT_UNROLL
    for (int v = 0; v < vectors; ++v) share.v[v] = raw[v].values(dtype);
  } else {
    MEMKIT_UNROLL
    for (int v = 0; v < vectors; ++v)
      share.v[v] = load_eight<T>(array, dtype, at + column_of<vectors>(v, turn), at + columns, false);
  }
  return share;
}

// Eight elements of weight or bias, which exist; `missing` where there is no such parameter.
template <class T>
__device__ Vector<T> load_parameter(const void* array, Dtype dtype, int64_t column, int64_t columns, T missing,
                                    bool wide) {
  if (array) return load_eight<T>(array, dtype, column, columns, wide);
  Vector<T> v;
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k) v.x[k] = missing;
  return v;
}

// f(v, column) for each of the thread's vectors that exist.
template <int vectors, class F>
__device__ void for_vectors(int64_t columns, int64_t turn, F&& f) {
  MEMKIT_UNROLL
  for (int v = 0; v < vectors; ++v)
    if (column_of<vectors>(v, turn) < columns) f(v, column_of<vectors>(v, turn));
}

// x, or the sum of x and residual, which the first look at it writes.
template <class T, int vectors>
__device__ Share<T, vectors> load_input(const RowNormArgs& args, int64_t row, int64_t turn, bool wide, bool writes) {
  const int64_t columns = args.columns, at = row * columns;
  const bool sum = args.residual && !writes;
  Share<T, vectors> x = load_share<T, vectors>(sum ? args.sum : args.x, args.dtype, row, columns, turn, wide);
  if (!args.residual || sum) return x;
  const Share<T, vectors> r = load_share<T, vectors>(args.residual, args.dtype, row, columns, turn, wide);
  for_vectors<vectors>(columns, turn, [&](int v, int64_t column) {
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) x.v[v].x[k] += r.v[v].x[k];
    round_to(args.dtype, x.v[v]);  // what is normalised is the sum as it is stored
    store_eight(x.v[v], args.sum, args.dtype, at + column, at + columns, wide);
  });
  return x;
}

template <class T, bool centered>
__global__ void __launch_bounds__(kForwardThreads, 2) forward_kernel(const RowNormArgs args, const bool wide) {
  constexpr int vectors = kForwardVectors;
  const int64_t columns = args.columns, turns = turns_of<vectors>(columns);
  for_rows(args, [&](int64_t row, bool exists) {
    Share<T, vectors> x;
    T mean = 0;
    Pair<T> sum{0, 0};
    for (int64_t turn = 0; turn < turns; ++turn) {
      // A row that is met again has been overwritten where y or sum is x.
      x = load_input<T, kForwardVectors>(args, row, turn, wide, exists);
      MEMKIT_UNROLL
      for (int v = 0; v < vectors; ++v) MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) {
        if constexpr (centered) {
          sum.a += x.v[v].x[k];
        } else {
          sum.b += x.v[v].x[k] * x.v[v].x[k];
        }
      }
    }
    sum = block_sum(sum);
    T squares = sum.b;
    if constexpr (centered) {
      const T about = sum.a / T(columns);
      Pair<T> distance{0, 0};
      for (int64_t turn = 0; turn < turns; ++turn) {
        if (turns > 1) x = load_input<T, kForwardVectors>(args, row, turn, wide, false);
        for_vectors<vectors>(columns, turn, [&](int v, int64_t column) {
          MEMKIT_UNROLL
          for (int k = 0; k < kWidth; ++k) {
            const T d = wide || column + k < columns ? x.v[v].x[k] - about : T(0);
            distance.a += d, distance.b += d * d;
          }
        });
      }
      distance = block_sum(distance);
      const Moments<T> moments = Moments<T>::from_sums(T(columns), about, distance.a, distance.b);
      mean = moments.mean, squares = moments.m2;
    }
    if (!exists) return;
    const T rstd = args.reciprocal(squares);
    if (threadIdx.x == 0) {
      if (args.mean) static_cast<T*>(args.mean)[row] = mean;
      if (args.rstd) static_cast<T*>(args.rstd)[row] = rstd;
    }
    const int64_t at = row * columns;
    for (int64_t turn = 0; turn < turns; ++turn) {
      if (turns > 1) x = load_input<T, kForwardVectors>(args, row, turn, wide, false);
      for_vectors<vectors>(columns, turn, [&](int v, int64_t column) {
        const Vector<T> w = load_parameter<T>(args.weight, args.weight_dtype, column, columns, T(1), wide);
        const Vector<T> b = load_parameter<T>(args.bias, args.weight_dtype, column, columns, T(0), wide);
        MEMKIT_UNROLL
        for (int k = 0; k < kWidth; ++k) x.v[v].x[k] = normalised(x.v[v].x[k], mean, rstd) * w.x[k] + b.x[k];
        store_eight(x.v[v], args.y, args.out_dtype, at + column, at + columns, wide);
      });
    }
  });
}

// held: a row fits into the registers of its threads.
template <class T, bool held, bool parameters>
__global__ void __launch_bounds__(kBackwardThreads, 1) backward_kernel(const RowNormArgs args, const bool wide) {
  constexpr int vectors = kBackwardVectors<T>;
  const int64_t columns = args.columns, turns = held ? 1 : turns_of<vectors>(columns);
  const Dtype saved_dtype = args.from_output ? args.out_dtype : args.dtype;
  Share<T, vectors> grad_weight = {}, grad_bias = {};
  for_rows(args, [&](int64_t row, bool exists) {
    const T mean = args.mean ? static_cast<const T*>(args.mean)[row] : T(0);
    const T rstd = static_cast<const T*>(args.rstd)[row];
    Share<T, vectors> x_hat, gw;
    const auto load = [&](int64_t turn, auto&& each) {
      x_hat = load_share<T, vectors>(args.saved, saved_dtype, row, columns, turn, wide);
      gw = load_share<T, vectors>(args.grad, args.out_dtype, row, columns, turn, wide);
      for_vectors<vectors>(columns, turn, [&](int v, int64_t column) {
        const Vector<T> w = load_parameter<T>(args.weight, args.weight_dtype, column, columns, T(1), wide);
        const Vector<T> b =
            load_parameter<T>(args.from_output ? args.bias : nullptr, args.weight_dtype, column, columns, T(0), wide);
        MEMKIT_UNROLL
        for (int k = 0; k < kWidth; ++k) {
          T& x = x_hat.v[v].x[k];
          const T weight = w.x[k], g = gw.v[v].x[k];
          x = args.from_output ? from_output(x, inverse_weight(weight), b.x[k]) : normalised(x, mean, rstd);
          gw.v[v].x[k] = g * weight;
          if (wide || column + k < columns) each(v, k, g);
        }
      });
    };
    Pair<T> sum{0, 0};
    for (int64_t turn = 0; turn < turns; ++turn) {
      load(turn, [&](int v, int k, T g) {
        const T x = x_hat.v[v].x[k];
        if (args.centered) sum.a += gw.v[v].x[k];
        sum.b += gw.v[v].x[k] * x;
        if constexpr (parameters && held)
          if (exists) grad_weight.v[v].x[k] += g * x, grad_bias.v[v].x[k] += g;
      });
    }
    if (!args.grad_input) return;
    sum = block_sum(sum);
    if (!exists) return;
    const T mean_gw = sum.a / T(columns), mean_gw_x_hat = args.projection(sum.b, rstd);
    const int64_t at = row * columns;
    for (int64_t turn = 0; turn < turns; ++turn) {
      if (!held) load(turn, [](int, int, T) {});
      for_vectors<vectors>(columns, turn, [&](int v, int64_t column) {
        MEMKIT_UNROLL
        for (int k = 0; k < kWidth; ++k)
          gw.v[v].x[k] = norm_gradient(gw.v[v].x[k], x_hat.v[v].x[k], rstd, mean_gw, mean_gw_x_hat);
        if (args.grad_sum) {
          const Vector<T> more = load_eight<T>(args.grad_sum, args.dtype, at + column, at + columns, wide);
          MEMKIT_UNROLL
          for (int k = 0; k < kWidth; ++k) gw.v[v].x[k] += more.x[k];
        }
        store_eight(gw.v[v], args.grad_input, args.dtype, at + column, at + columns, wide);
      });
    }
  });
  if constexpr (parameters && held) {
    T* partial = static_cast<T*>(args.partial) + int64_t(blockIdx.x) * 2 * columns;
    MEMKIT_UNROLL
    for (int v = 0; v < vectors; ++v) MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) {
      Pair<T> sums{grad_weight.v[v].x[k], grad_bias.v[v].x[k]};
      // The rows of a block are those of its one warp.
      for (unsigned d = blockDim.x; d < blockDim.x * blockDim.y; d *= 2) {
        sums.a += __shfl_xor_sync(0xffffffffu, sums.a, d);
        sums.b += __shfl_xor_sync(0xffffffffu, sums.b, d);
      }
      const int64_t column = column_of<vectors>(v, 0) + k;
      if (threadIdx.y == 0 && column < columns) partial[column] = sums.a, partial[columns + column] = sums.b;
    }
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

constexpr int kReduceColumns = 32, kReduceRows = 32;

// blockIdx.y: weight or bias. In double, as a GPU has it: there is little of it, and what rows were summed before stays.
template <class T>
__global__ void __launch_bounds__(kReduceColumns* kReduceRows)
    reduce_kernel(const RowNormArgs args, const int64_t parts, void* grad_weight, void* grad_bias) {
  void* target = blockIdx.y == 0 ? grad_weight : grad_bias;
  if (!target) return;
  const int64_t column = int64_t(blockIdx.x) * kReduceColumns + threadIdx.x;
  double sum = 0;
  if (column < args.columns) {
    const T* from = static_cast<const T*>(args.partial) + blockIdx.y * args.columns + column;
    for (int64_t part = threadIdx.y; part < parts; part += kReduceRows) sum += double(from[part * 2 * args.columns]);
  }
  __shared__ double rows[kReduceRows][kReduceColumns];
  rows[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= args.columns) return;
  MEMKIT_UNROLL
  for (int r = 1; r < kReduceRows; ++r) sum += rows[r][threadIdx.x];
  store_one(T(sum), target, args.weight_dtype, column);
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
  const bool wide = all_aligned(args);
  if (const auto held = wide ? row_norm_forward_held(args, stream) : std::nullopt) return *held;
  const dim3 block = block_of(threads_for(args, kForwardVectors, kForwardThreads), kShortRowThreads);
  const auto blocks = unsigned(std::min<int64_t>((args.rows + block.y - 1) / block.y, 1 << 30));
  return with_computed(args, [&](auto computed) {
    using T = decltype(computed);
    launch_kernel(args.centered ? forward_kernel<T, true> : forward_kernel<T, false>, blocks, block, stream, args,
                  wide);
    return int(cudaGetLastError());
  });
}

int row_norm_parts(const RowNormArgs& args, bool parameters, int64_t& parts) {
  int count = 0;
  if (const cudaError_t error = processor_count(count)) return error;
  if (const auto held = all_aligned(args) ? row_norm_backward_held_parts(args, parameters, count, parts) : std::nullopt)
    return *held;
  const dim3 block = block_of(backward_threads(args), kLanes);
  // As many as are at work at a time, with the registers that they take.
  constexpr int threads = 512;
  const int64_t blocks = (args.rows + block.y - 1) / block.y;
  parts = std::min<int64_t>(blocks, int64_t(count) * (threads / int(block.x * block.y)));
  return cudaSuccess;
}

int row_norm_backward(const RowNormArgs& args, int64_t parts, CUstream_st* stream) {
  const dim3 block = block_of(backward_threads(args), kLanes);
  const bool wide = all_aligned(args);
  if (const auto held = wide ? row_norm_backward_held(args, parts, stream) : std::nullopt) return *held;
  return with_computed(args, [&](auto computed) {
    using T = decltype(computed);
    if (args.partial && !fits(args)) {
      const unsigned tiles = unsigned((args.columns + 128 * kWidth - 1) / (128 * kWidth));
      launch_kernel(parameters_kernel<T>, dim3(unsigned(parts), tiles), 128, stream, args, wide);
      if (const cudaError_t error = cudaGetLastError()) return int(error);
    }
    const auto kernel = !fits(args)    ? backward_kernel<T, false, false>
                        : args.partial ? backward_kernel<T, true, true>
                                       : backward_kernel<T, true, false>;
    launch_kernel(kernel, unsigned(parts), block, stream, args, wide);
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
