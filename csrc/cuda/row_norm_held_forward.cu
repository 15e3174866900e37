// The forward of norms over rows that are held in registers. What a thread has of a row stays as narrow as it lies in memory
// between two looks at it, and weight and bias are loaded last: few registers a row, so that many rows are at work at a time.
#include "row_norm_held.cuh"
#include "team.cuh"

namespace memkit::cuda {
namespace {

constexpr int kLeastWords = 2, kMostWords = 4;  // of a thread

// The sums of x - about and of its square.
struct Distances {
  float sum = 0, squares = 0;
  MEMKIT_FN void merge(const Distances& other) { sum += other.sum, squares += other.squares; }
};

// What a warp has of a row: elements, what they are near, their mean's distance from that, and m2.
struct WarpMoments {
  float count, about, rest, m2;
};

// The elements of a row of so many words that the thread's warp has, or its team, if that is smaller.
template <class X, int W>
__device__ float warp_count(int64_t words) {
  const int threads = int(blockDim.x), team = at_most(threads, kLanes);
  const int first = int(threadIdx.x) / kLanes * kLanes;
  int count = 0;
  MEMKIT_UNROLL
  for (int w = 0; w < W; ++w) count += at_most(at_least(int(words) - first - w * threads, 0), team);
  return float(count * RowWalk<X>::width);
}

// The row's moments, with one wait for the other warps. The first one's elements are a place near all: sums are taken from
// there, and that warp's own part in m2 bounds what is lost where their means differ.
__device__ Moments<float> row_moments(const WarpMoments& own, float count) {
  if (blockDim.x <= kLanes) return {own.count, own.about + own.rest, own.m2};
  __shared__ WarpMoments warps[kLanes];
  if (threadIdx.x % kLanes == 0) warps[threadIdx.x / kLanes] = own;
  __syncthreads();
  const float about = warps[0].about;
  const unsigned lane = threadIdx.x % kLanes;
  const WarpMoments each = lane < blockDim.x / kLanes ? warps[lane] : WarpMoments{};
  // Means, where sums would overflow for a row whose mean does not.
  const float distance = (each.about - about) + each.rest, part = each.count / count * distance;
  const Distances all = warp_merge(Distances{part, each.m2 / count + part * distance});
  const Moments<float> one = Moments<float>::from_sums(1, about, all.sum, all.squares);
  return {count, one.mean, count * one.m2};
}

// Weight or bias of some columns; `missing` where there is none.
template <class P, int n>
__device__ void load_parameter(const void* array, int column, float missing, float (&x)[n]) {
  if (array) return load_values(static_cast<const P*>(array) + column, x);
  MEMKIT_UNROLL
  for (int k = 0; k < n; ++k) x[k] = missing;
}

// W words of X a thread.
template <class X, class Y, int W, bool centered, bool adds>
__global__ void __launch_bounds__(kTeamMost) forward_held_kernel(const RowNormArgs args) {
  constexpr int width = RowWalk<X>::width;
  const int64_t row = team_row();
  const bool real = row < args.rows;
  const int thread = int(threadIdx.x), threads = int(blockDim.x);
  const float count = float(args.columns);
  const RowWalk<X> walk(real ? args.columns : 0);
  const int64_t first = real ? row * args.columns : 0;
  const auto has = [&](int w) { return thread + w * threads < int(walk.words); };
  const auto column = [&](int w) { return (thread + w * threads) * width; };
  RowWords<X, W> words;
  words.load(static_cast<const X*>(args.x) + first, walk, thread, threads, walk.words);
  if constexpr (adds) {
    RowWords<X, W> more;
    more.load(static_cast<const X*>(args.residual) + first, walk, thread, threads, walk.words);
    MEMKIT_UNROLL
    for (int w = 0; w < W; ++w) {
      float x[width], r[width];
      words.values(w, x);
      more.values(w, r);
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) x[k] += r[k];
      words.hold(w, x);  // what is normalised is the sum as it is stored
      if (has(w)) store_word(words.word[w], static_cast<X*>(args.sum) + first + column(w));
    }
  }
  TeamSum<float> sum;
  MEMKIT_UNROLL
  for (int w = 0; w < W; ++w) {
    float x[width];
    words.values(w, x);
    MEMKIT_UNROLL
    for (int k = 0; k < width; ++k) sum.value += centered ? x[k] : x[k] * x[k];
  }
  float mean = 0, squares = 0;
  if constexpr (!centered) {
    squares = team_merge(sum).value;
  } else {
    words.stay_narrow();
    WarpMoments own{warp_count<X, W>(walk.words)};
    const float one_of = 1 / at_least(own.count, 1.f);
    own.about = warp_merge(sum).value * one_of;
    Distances distances;
    MEMKIT_UNROLL
    for (int w = 0; w < W; ++w) {
      if (!has(w)) continue;
      float x[width];
      words.values(w, x);
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) {
        const float d = x[k] - own.about;
        distances.sum += d, distances.squares += d * d;
      }
    }
    distances = warp_merge(distances);
    own.rest = distances.sum * one_of;
    own.m2 = Moments<float>::from_sums(at_least(own.count, 1.f), own.about, distances.sum, distances.squares).m2;
    const Moments<float> moments = row_moments(own, count);
    mean = moments.mean, squares = moments.m2;
  }
  const float rstd = args.reciprocal(squares);
  if (real && thread == 0) {
    if (args.mean) static_cast<float*>(args.mean)[row] = mean;
    if (args.rstd) static_cast<float*>(args.rstd)[row] = rstd;
  }
  words.stay_narrow();
  with_stored<Half, Bfloat>(args.weight_dtype, [&](auto parameter) {
    using P = decltype(parameter);
    MEMKIT_UNROLL
    for (int w = 0; w < W; ++w) {
      if (!has(w)) continue;
      float x[width], weight[width];
      [[maybe_unused]] float bias[width];
      load_parameter<P>(args.weight, column(w), 1, weight);
      if constexpr (centered) load_parameter<P>(args.bias, column(w), 0, bias);
      words.values(w, x);
      MEMKIT_UNROLL
      for (int k = 0; k < width; ++k) {
        x[k] = normalised(x[k], mean, rstd) * weight[k];
        if constexpr (centered) x[k] += bias[k];
      }
      store_values(x, static_cast<Y*>(args.y) + first + column(w));
    }
  });
}

using ForwardKernel = void (*)(RowNormArgs);

template <class X, class Y, bool centered>
ForwardKernel forward_kernel(int words, bool adds) {
  if (words == kLeastWords)
    return adds ? forward_held_kernel<X, Y, kLeastWords, centered, true>
                : forward_held_kernel<X, Y, kLeastWords, centered, false>;
  return adds ? forward_held_kernel<X, Y, kMostWords, centered, true>
              : forward_held_kernel<X, Y, kMostWords, centered, false>;
}

}  // namespace

std::optional<int> row_norm_forward_held(const RowNormArgs& args, cudaStream_t stream) {
  return with_dtypes(args, [&](auto x, auto y) -> std::optional<int> {
    using X = decltype(x);
    using Y = decltype(y);
    TeamShape shape;
    const int64_t words = args.columns / RowWalk<X>::width;
    if (const cudaError_t error = team_shape(args.rows, words, false, kLeastWords, kMostWords, kTeamMost, shape))
      return int(error);
    if (!shape.held) return std::nullopt;
    const bool adds = args.residual;
    launch_kernel(
        args.centered ? forward_kernel<X, Y, true>(shape.words, adds) : forward_kernel<X, Y, false>(shape.words, adds),
        shape.grid, shape.block, stream, args);
    return int(cudaGetLastError());
  });
}

}  // namespace memkit::cuda
