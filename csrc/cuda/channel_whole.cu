// Batch and group norm with a block for each statistic: it reads the statistic's elements from memory once, finds them in a
// cache at its later looks, and makes statistics, terms and gradients in between. One launch each way, two for group norm's
// gradients with those of parameters, which are sums over samples. Not in float64.
#include "channel_kernels.cuh"
#include "team.cuh"

namespace memkit::cuda {
namespace {

constexpr int kWholeSets = 256;  // of a statistic, the most: their terms are in shared memory
constexpr int64_t kWholeMost = int64_t(1) << 28;

// Threads of a block, the most, and of a multiprocessor, which tells the compiler how many registers each has.
constexpr int kWholeThreads = 512, kForwardResident = 768, kBackwardResident = 640;

// Divisor for 0 <= n < 2^31, in half the registers.
struct ShortDivisor {
  uint32_t multiplier = 0;  // 0: division by 1
  int shift = 0;

  ShortDivisor() = default;
  explicit ShortDivisor(int64_t value) {
    if (value == 1) return;
    while (int64_t(1) << (shift + 1) < value) ++shift;
    multiplier = uint32_t(((uint64_t(1) << (32 + shift)) + uint64_t(value) - 1) / uint64_t(value));
  }
  MEMKIT_FN int divide(int n) const {
    return multiplier == 0 ? n : int(uint32_t(uint64_t(uint32_t(n)) * multiplier >> 32) >> shift);
  }
};

// How a block shares out the elements of its statistic, which are numbered set by set in the order of memory. Teams of
// neighbouring lanes have a range each; what it has of one set is a piece.
struct WholeShape {
  int threads, sets, size;  // size: elements of the statistic
  int of_set;               // elements
  int lane_bits = 0;        // 1 << lane_bits lanes are a team
  int share;                // elements of a team
  int pieces;               // of a team, the most
  int64_t stride, gap;      // in memory: from a statistic to the next, between its runs
  ShortDivisor run;
  int near_bits = 0;  // 1 << near_bits neighbouring elements a lane reads or writes at once, its team's lanes beside it
};

// A thread's place in it. single: its elements are read and written one by one.
template <bool single>
struct Walk {
  const WholeShape& shape;
  int64_t first;  // element of the statistic, in memory
  int team, lane;

  __device__ explicit Walk(const WholeShape& shape)
      : shape(shape),
        first(blockIdx.x * shape.stride),
        team(int(threadIdx.x) >> shape.lane_bits),
        lane(int(threadIdx.x) & ((1 << shape.lane_bits) - 1)) {}

  __device__ int64_t at(int i) const { return first + i + (shape.gap ? shape.run.divide(i) * shape.gap : 0); }
  __device__ int begin() const { return at_most(team * shape.share, shape.size); }
  __device__ int end() const { return at_most((team + 1) * shape.share, shape.size); }

  // Of a thread's eight elements, the first being i: where number k is that begins neighbours, and how many there are.
  __device__ int element(int i, int k) const { return i + (k << shape.lane_bits); }
  __device__ int exist(int i, int end) const {
    if (i >= end) return 0;
    const int bits = shape.near_bits;
    return at_most((((end - i - 1) >> (bits + shape.lane_bits)) + 1) << bits, kWidth);
  }
  // As they lie in memory; single ones each in a register of its own, since to put them together would wait for each.
  __device__ void load(const void* array, Dtype dtype, int i, int end, RawVector<float>& raw) const {
    with_stored(dtype, [&](auto stored, auto nearest) {
      using S = decltype(stored);
      constexpr int near = decltype(nearest)::value;
      const S* from = static_cast<const S*>(array);
      if constexpr (near == 1) {
        uint32_t slots[kWidth] = {};
        MEMKIT_UNROLL
        for (int k = 0; k < kWidth; ++k) {
          if (element(i, k) >= end) continue;
          const S x = from[at(element(i, k))];
          Slot<S> bits;
          memcpy(&bits, &x, sizeof(x));
          slots[k] = bits;
        }
        memcpy(raw.word, slots, sizeof(slots));
      } else {
        S x[kWidth] = {};
        MEMKIT_UNROLL
        for (int k = 0; k < kWidth; k += near)
          if (element(i, k) < end) load_raw<near>(from + at(element(i, k)), x + k);
        memcpy(raw.word, x, sizeof(x));
      }
    });
  }
  __device__ Vector<float> values(const RawVector<float>& raw, Dtype dtype) const {
    if constexpr (!single) return raw.values(dtype);
    uint32_t slots[kWidth];
    memcpy(slots, raw.word, sizeof(slots));
    Vector<float> v;
    with_stored(dtype, [&](auto stored, auto) {
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) {
        const auto bits = Slot<decltype(stored)>(slots[k]);
        memcpy(&stored, &bits, sizeof(stored));
        v.x[k] = widen(stored);
      }
    });
    return v;
  }
  __device__ void store(const Vector<float>& v, void* array, Dtype dtype, int i, int end) const {
    with_stored(dtype, [&](auto stored, auto nearest) {
      using S = decltype(stored);
      constexpr int near = decltype(nearest)::value;
      S x[kWidth];
      narrow_all(v.x, x);
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; k += near)
        if (element(i, k) < end) store_raw<near>(x + k, static_cast<S*>(array) + at(element(i, k)));
    });
  }

  // f(i, step): the thread's first elements are i, i + step, ..., n of them, as far as they are below `end`. What was seen
  // last is the likeliest to be in a cache: a second pass goes backwards.
  template <int n, bool backwards, class F>
  __device__ void for_chunks(int begin, int end, F&& f) const {
    const int step = kWidth << shape.lane_bits, own = lane << shape.near_bits;
    const int chunks = (end - begin + step * n - 1) / (step * n);
    MEMKIT_ROLL
    for (int c = 0; c < chunks; ++c) f(begin + (backwards ? chunks - 1 - c : c) * (step * n) + own, step);
  }

  // f(set, begin, end): all threads of a block come equally often, some with nothing to do, where begin == end.
  template <bool backwards, class F>
  __device__ void for_pieces(F&& f) const {
    const int first_set = begin() / shape.of_set;
    MEMKIT_ROLL
    for (int p = 0; p < shape.pieces; ++p) {
      const int set = first_set + (backwards ? shape.pieces - 1 - p : p);
      const int from = at_least(begin(), set * shape.of_set);
      f(set, from, at_least(from, at_most(end(), (set + 1) * shape.of_set)));
    }
  }

 private:
  template <int n>
  using Near = std::integral_constant<int, single ? 1 : n>;
  template <class S>
  using Slot = typename std::conditional<sizeof(S) == 4, uint32_t, uint16_t>::type;

  // f(S(), how many are near) for the type that is stored.
  template <class F>
  __device__ void with_stored(Dtype dtype, F&& f) const {
    if (dtype == Dtype::float32) {
      f(float(), Near<4>());
    } else if (dtype == Dtype::float16) {
      with_halves(Half(), f);
    } else {
      with_halves(Bfloat(), f);
    }
  }
  template <class S, class F>
  __device__ void with_halves(S stored, F&& f) const {
    if (!single && 1 << shape.near_bits == kWidth / 2) {
      f(stored, Near<kWidth / 2>());
    } else {
      f(stored, Near<kWidth>());
    }
  }
};

// The terms of the block's sets, in shared memory. Sets differ in scale and shift alone.
struct WholeTerms {
  Pair<float> sets[kWholeSets];
  ChannelTerms<float> first;

  // made(set), by a thread for each; all threads come.
  template <class F>
  __device__ void make(int count, F&& made) {
    for (int set = threadIdx.x; set < count; set += blockDim.x) {
      const ChannelTerms<float> terms = made(set);
      sets[set] = {terms.scale, terms.shift};
      if (set == 0) first = terms;
    }
    __syncthreads();
  }
  __device__ ChannelTerms<float> of(int set) const {
    return {first.center, sets[set].a, sets[set].b, first.offset, first.slope};
  }
};

struct WholeSquares : TeamSum<double> {};
struct WholeSums {
  double dz = 0, distance = 0;
  __device__ void merge(const WholeSums& other) { dz += other.dz, distance += other.distance; }
};

// A thread takes distances from the mean of its first elements, which is some deviations from that of all unless those few are
// unlike the rest; the sums are double. All threads have the result.
template <bool single>
__device__ Moments<double> whole_moments(const ChannelArgs& args, const Walk<single>& walk) {
  constexpr int n = 2;
  const int end = walk.end();
  int count = 0;
  float about = 0;
  Pair<double> distance{0, 0};
  walk.template for_chunks<n, false>(walk.begin(), end, [&](int i, int step) {
    RawVector<float> raw[n];
    MEMKIT_UNROLL
    for (int a = 0; a < n; ++a) walk.load(args.x, args.dtype, i + a * step, end, raw[a]);
    const auto over = [&](auto&& term) {
      MEMKIT_UNROLL
      for (int a = 0; a < n; ++a) {
        const int exist = walk.exist(i + a * step, end);
        const Vector<float> x = walk.values(raw[a], args.dtype);
        MEMKIT_UNROLL
        for (int k = 0; k < kWidth; ++k)
          if (k < exist) term(x.x[k]);
      }
    };
    int exist = 0;
    MEMKIT_UNROLL
    for (int a = 0; a < n; ++a) exist += walk.exist(i + a * step, end);
    if (exist == 0) return;
    if (count == 0) {
      float sum = 0;
      over([&](float x) { sum += x; });
      about = sum / float(exist);
    }
    Pair<float> own{0, 0};
    over([&](float x) { own.a += x - about, own.b += (x - about) * (x - about); });
    distance.a += double(own.a), distance.b += double(own.b), count += exist;
  });
  const double size = walk.shape.size;
  TeamSum<double> sum;
  sum.value = count * double(about) + distance.a;
  const double mean = team_merge(sum).value / size, off = double(about) - mean;
  WholeSquares squares;
  squares.value = distance.b + off * (2 * distance.a + count * off);
  return {size, mean, at_least(team_merge(squares).value, 0.0)};
}

template <bool single>
__global__ void __launch_bounds__(kForwardResident)
    whole_forward_kernel(const ChannelArgs args, const Statistics<float> s, const WholeShape shape,
                         const Running running) {
  constexpr int n = 2;
  __shared__ WholeTerms terms;
  const Walk<single> walk(shape);
  const int64_t i = blockIdx.x, first_set = i * shape.sets;
  const Moments<double> all = whole_moments(args, walk);
  const double variance = all.m2 / all.count;
  if (threadIdx.x == 0) {
    s.mean.put(i, all.mean), s.variance.put(i, variance);
    if (running.mean) move(running, i, all.mean, variance);
  }
  terms.make(shape.sets, [&](int set) {
    return s.terms_from(all.mean, reciprocal_root(variance, s.eps), (first_set + set) % s.channels);
  });
  walk.template for_pieces<true>([&](int set, int begin, int end) {
    if (begin == end) return;
    const ChannelTerms<float> t = terms.of(set);
    walk.template for_chunks<n, true>(begin, end, [&](int at, int step) {
      RawVector<float> raw[n];
      MEMKIT_UNROLL
      for (int a = 0; a < n; ++a) walk.load(args.x, args.dtype, at + a * step, end, raw[a]);
      MEMKIT_UNROLL
      for (int a = 0; a < n; ++a) {
        if (at + a * step >= end) continue;
        Vector<float> x = walk.values(raw[a], args.dtype);
        MEMKIT_UNROLL
        for (int k = 0; k < kWidth; ++k) x.x[k] = t.value(x.x[k]);
        visit(act_of(args), ActValue<float>{}, args.params, x);
        walk.store(x, args.y, args.out_dtype, at + a * step, end);
      }
    });
  });
}

// A piece's sums have a place of their own, the set's number and the team's together: from a piece to the next one of them
// grows. grad_input may be grad's memory: both passes give a thread the same elements, which it reads before it writes them.
template <bool single, bool acts>
__global__ void __launch_bounds__(kBackwardResident)
    whole_backward_kernel(const ChannelArgs args, const Statistics<float> s, const WholeShape shape, double* dz,
                          double* dz_distance, const FromSums<float> to) {
  constexpr int n = 2;
  __shared__ WholeTerms terms;
  __shared__ Pair<double> pieces[kWholeSets + kWholeThreads];
  const Walk<single> walk(shape);
  const int64_t i = blockIdx.x, first_set = i * shape.sets;
  // f(x, gradient, the first of their eight elements) for a chunk's vectors, which are all read before.
  const auto over = [&](int at, int step, int end, auto&& f) {
    RawVector<float> x[n], g[n];
    MEMKIT_UNROLL
    for (int a = 0; a < n; ++a) {
      walk.load(args.x, args.dtype, at + a * step, end, x[a]);
      walk.load(args.grad, args.out_dtype, at + a * step, end, g[a]);
    }
    MEMKIT_UNROLL
    for (int a = 0; a < n; ++a)
      if (at + a * step < end) f(walk.values(x[a], args.dtype), walk.values(g[a], args.out_dtype), at + a * step);
  };

  terms.make(shape.sets, [&](int set) { return s.terms_from(s.mean[i], s.rstd(i), (first_set + set) % s.channels); });
  walk.template for_pieces<false>([&](int set, int begin, int end) {
    Pair<double> sum{0, 0};
    if (begin < end) {
      const ChannelTerms<float> t = terms.of(set);
      walk.template for_chunks<n, false>(begin, end, [&](int at, int step) {
        Pair<float> own{0, 0};
        over(at, step, end, [&](const Vector<float>& x, const Vector<float>& g, int first) {
          add_sums<float, acts>(args, t, x, g, walk.exist(first, end), own);
        });
        sum.a += double(own.a), sum.b += double(own.b);
      });
    }
    for (int d = (1 << shape.lane_bits) / 2; d > 0; d /= 2) {
      sum.a += __shfl_xor_sync(0xffffffffu, sum.a, d);
      sum.b += __shfl_xor_sync(0xffffffffu, sum.b, d);
    }
    if (walk.lane == 0 && begin < end) pieces[set + walk.team] = sum;
  });
  __syncthreads();

  WholeSums own;
  for (int set = threadIdx.x; set < shape.sets; set += blockDim.x) {
    Pair<double> sum{0, 0};
    const int last = ((set + 1) * shape.of_set - 1) / shape.share;
    for (int team = set * shape.of_set / shape.share; team <= last; ++team)
      sum.a += pieces[set + team].a, sum.b += pieces[set + team].b;
    const int64_t plane = first_set + set;
    if (dz) dz[plane] = sum.a, dz_distance[plane] = sum.b;
    const double weight = s.weight_in_sums(plane);
    own.dz += weight * sum.a, own.distance += weight * sum.b;
  }
  own = team_merge(own);
  terms.make(shape.sets, [&](int set) {
    const double mean = s.mean[i], root = s.rstd(i);
    const auto sums = s.normalised({own.dz, own.distance}, mean, root), share = s.share_of(i, sums);
    if (s.groups == 0) put_parameters(to, i, sums);
    return s.terms_from(mean, root, (first_set + set) % s.channels, share.dz, share.distance);
  });
  walk.template for_pieces<true>([&](int set, int begin, int end) {
    if (begin == end) return;
    const ChannelTerms<float> t = terms.of(set);
    walk.template for_chunks<n, true>(begin, end, [&](int at, int step) {
      over(at, step, end, [&](const Vector<float>& x, Vector<float> g, int first) {
        to_dz<acts>(args, t, x, g);
        MEMKIT_UNROLL
        for (int k = 0; k < kWidth; ++k) g.x[k] = t.gradient(x.x[k], g.x[k]);
        walk.store(g, args.grad_input, args.dtype, first, end);
      });
    });
  });
}

// Of a word, or of half a word where the other tensor's elements take twice the bytes.
int most_near_bits(const ChannelArgs& args) {
  return args.dtype == Dtype::float32 || args.out_dtype == Dtype::float32 ? 2 : 3;
}

WholeShape whole_shape(const ChannelArgs& args, const Statistics<float>& s, bool backward, int processors) {
  WholeShape shape;
  shape.sets = int(s.sets_of_one()), shape.size = int(s.size), shape.of_set = shape.size / shape.sets;
  while (shape.near_bits < most_near_bits(args) && args.inner % (2 << shape.near_bits) == 0) ++shape.near_bits;
  if (!channel_aligned(args) || shape.near_bits == 1) shape.near_bits = 0;
  shape.stride = s.groups ? s.size : args.inner;
  shape.gap = s.groups ? 0 : (args.channels - 1) * args.inner;
  shape.run = ShortDivisor(args.inner);
  // A team's lanes have so much of a plane that what one load waits for others hide. As many threads as the device has at
  // work; of many statistics fewer for each, as its blocks hide each other's waiting.
  const int own = shape.near_bits ? 4 * kWidth : 2 * kWidth;
  while ((1 << shape.lane_bits) < kLanes && own << shape.lane_bits < shape.of_set) ++shape.lane_bits;
  const auto threads_for = [&](int each, int most) {
    int threads = kLanes;
    while (threads < most && threads * each < shape.size) threads *= 2;
    return threads;
  };
  const int least = std::max(threads_for(8 * kWidth, kWholeThreads / 2), backward ? 2 * kLanes : kLanes);
  shape.threads = std::max(least, threads_for(kWidth, kWholeThreads));
  while (shape.threads > least && s.statistics * shape.threads > int64_t(processors) * kWholeThreads)
    shape.threads /= 2;
  const int teams = shape.threads >> shape.lane_bits, unit = 1 << shape.near_bits;
  shape.share = (shape.size + teams * unit - 1) / (teams * unit) * unit;
  shape.pieces = shape.share % shape.of_set == 0   ? shape.share / shape.of_set
                 : shape.of_set % shape.share == 0 ? 1
                                                   : (shape.share + shape.of_set - 2) / shape.of_set + 1;
  return shape;
}

// f(whether elements are read one by one).
template <class F>
void with_single(const WholeShape& shape, const F& f) {
  shape.near_bits ? f(std::false_type()) : f(std::true_type());
}

}  // namespace

int channel_by_statistics(const ChannelArgs& args, const Statistics<float>& s, bool& whole) {
  constexpr int64_t kSmall = int64_t(1) << 15, kShort = kLanes * kWidth;
  whole = false;
  if (args.columns() || s.sets_of_one() > kWholeSets || s.size > kWholeMost) return cudaSuccess;
  int processors = 0;
  if (const cudaError_t error = processor_count(processors)) return error;
  const bool idle = s.size > kSmall && 2 * s.statistics < processors;             // most of the device
  const bool empty = s.size < kShort && s.statistics > 64 * int64_t(processors);  // most of each block
  whole = !idle && !empty;
  return cudaSuccess;
}

int channel_whole_forward(const ChannelArgs& args, const Statistics<float>& s, const Running& running,
                          CUstream_st* stream) {
  int processors = 0;
  if (const cudaError_t error = processor_count(processors)) return error;
  const WholeShape shape = whole_shape(args, s, false, processors);
  with_single(shape, [&](auto single) {
    launch_kernel(whole_forward_kernel<single>, unsigned(s.statistics), shape.threads, stream, args, s, shape, running);
  });
  return cudaGetLastError();
}

int channel_whole_backward(const ChannelArgs& args, const Statistics<float>& s, double* dz, double* dz_distance,
                           const FromSums<float>& to, CUstream_st* stream) {
  int processors = 0;
  if (const cudaError_t error = processor_count(processors)) return error;
  const WholeShape shape = whole_shape(args, s, true, processors);
  with_single(shape, [&](auto single) {
    launch_kernel(args.has_act ? whole_backward_kernel<single, true> : whole_backward_kernel<single, false>,
                  unsigned(s.statistics), shape.threads, stream, args, s, shape, dz, dz_distance, to);
  });
  return cudaGetLastError();
}

}  // namespace memkit::cuda
