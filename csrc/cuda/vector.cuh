// Eight neighbouring elements at a time, of a dtype known at run time, in the type computed in; and sums over a block.
//
// Loads are kept apart from conversions, so that a thread has several of them under way.
#pragma once

#include "../formulas/arguments.h"
#include "launch.cuh"
#include "tile.cuh"

namespace memkit::cuda {

constexpr int kWidth = 8;

MEMKIT_FN int bytes_of(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }

template <class T>
struct Vector {
  T x[kWidth];
};

// The words of eight elements as they lie in memory: one for a half dtype, two for float32, four for float64.
template <class T>
struct RawVector {
  static constexpr int words = kWidth * sizeof(T) / sizeof(Word);
  Word word[words];

  // From element i on, which is a multiple of 8 in an aligned array.
  __device__ void load(const void* array, Dtype dtype, int64_t i) {
    const Word* from = reinterpret_cast<const Word*>(static_cast<const char*>(array) + i * bytes_of(dtype));
    word[0] = from[0];
    if (sizeof(T) == 8 || dtype == Dtype::float32) {
      MEMKIT_UNROLL
      for (int k = 1; k < words; ++k) word[k] = from[k];
    }
  }

  template <class S>
  __device__ void widen_from(Vector<T>& v) const {
    S parts[kWidth];
    memcpy(parts, word, sizeof(parts));
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) v.x[k] = widen(parts[k]);
  }

  __device__ Vector<T> values(Dtype dtype) const {
    Vector<T> v;
    if constexpr (sizeof(T) == 8) {
      widen_from<double>(v);
    } else if (dtype == Dtype::float32) {
      widen_from<float>(v);
    } else if (dtype == Dtype::float16) {
      widen_from<Half>(v);
    } else {
      widen_from<Bfloat>(v);
    }
    return v;
  }
};

template <class T>
MEMKIT_FN T load_one(const void* array, Dtype dtype, int64_t i) {
  if constexpr (sizeof(T) == 8) {
    return static_cast<const double*>(array)[i];
  } else if (dtype == Dtype::float32) {
    return static_cast<const float*>(array)[i];
  } else if (dtype == Dtype::float16) {
    return widen(static_cast<const Half*>(array)[i]);
  } else {
    return widen(static_cast<const Bfloat*>(array)[i]);
  }
}

template <class T>
MEMKIT_FN void store_one(T x, void* array, Dtype dtype, int64_t i) {
  if constexpr (sizeof(T) == 8) {
    static_cast<double*>(array)[i] = x;
  } else if (dtype == Dtype::float32) {
    static_cast<float*>(array)[i] = x;
  } else if (dtype == Dtype::float16) {
    narrow(x, static_cast<Half*>(array) + i);
  } else {
    narrow(x, static_cast<Bfloat*>(array) + i);
  }
}

// The elements [i, i + 8), of which those from `end` on do not exist: 0 is read for them and nothing written.
// wide: all exist, i is a multiple of 8 and arrays are aligned.
template <class T>
__device__ Vector<T> load_eight(const void* array, Dtype dtype, int64_t i, int64_t end, bool wide) {
  if (wide) {
    RawVector<T> raw;
    raw.load(array, dtype, i);
    return raw.values(dtype);
  }
  Vector<T> v;
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k) v.x[k] = i + k < end ? load_one<T>(array, dtype, i + k) : T(0);
  return v;
}

template <class S, class T>
__device__ void store_words(const Vector<T>& v, void* array, int64_t i) {
  S parts[kWidth];
  narrow_all(v.x, parts);
  MEMKIT_UNROLL
  for (int k = 0; k < int(sizeof(parts) / (sizeof(Word))); ++k) {
    Word word;
    memcpy(&word, reinterpret_cast<const char*>(parts) + k * sizeof(Word), sizeof(Word));
    store_word(word, static_cast<S*>(array) + i + k * (sizeof(Word) / sizeof(S)));
  }
}

template <class T>
__device__ void store_eight(const Vector<T>& v, void* array, Dtype dtype, int64_t i, int64_t end, bool wide) {
  if (!wide) {
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k)
      if (i + k < end) store_one(v.x[k], array, dtype, i + k);
  } else if constexpr (sizeof(T) == 8) {
    store_words<double>(v, array, i);
  } else if (dtype == Dtype::float32) {
    store_words<float>(v, array, i);
  } else if (dtype == Dtype::float16) {
    store_words<Half>(v, array, i);
  } else {
    store_words<Bfloat>(v, array, i);
  }
}

// As by load_eight(), with the load still under way.
template <class T, bool wide>
struct Pending {
  RawVector<T> raw;

  __device__ void load(const void* array, Dtype dtype, int64_t i, int64_t end) {
    if constexpr (wide) {
      raw.load(array, dtype, i);
    } else {
      const Vector<T> v = load_eight<T>(array, dtype, i, end, false);
      memcpy(raw.word, v.x, sizeof(v.x));
    }
  }
  __device__ Vector<T> values(Dtype dtype) const {
    if constexpr (wide) return raw.values(dtype);
    Vector<T> v;
    memcpy(v.x, raw.word, sizeof(v.x));
    return v;
  }
};

// Eight elements of a dtype that the kernel knows, as they lie in memory.
template <class S>
struct Eight {
  static constexpr int words = kWidth * sizeof(S) / sizeof(Word);
  Word word[words];

  __device__ void load(const S* from) {
    MEMKIT_UNROLL
    for (int k = 0; k < words; ++k) word[k] = reinterpret_cast<const Word*>(from)[k];
  }
  // Of which so many exist; the others are 0.
  __device__ void load_some(const S* from, int exist) {
    S parts[kWidth] = {};
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k)
      if (k < exist) parts[k] = from[k];
    memcpy(word, parts, sizeof(parts));
  }
  __device__ auto values() const {
    S parts[kWidth];
    memcpy(parts, word, sizeof(parts));
    Vector<typename ComputeType<S>::type> v;
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) v.x[k] = widen(parts[k]);
    return v;
  }
};

// What a store to `dtype` and a load give back.
template <class S, class T>
__device__ void round_to(Vector<T>& v) {
  S parts[kWidth];
  narrow_all(v.x, parts);
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k) v.x[k] = widen(parts[k]);
}
template <class T>
__device__ void round_to(Dtype dtype, Vector<T>& v) {
  if constexpr (sizeof(T) == 8) return;
  if (dtype == Dtype::float16) round_to<Half>(v);
  if (dtype == Dtype::bfloat16) round_to<Bfloat>(v);
}

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(Word) == 0; }

template <class T>
struct Pair {
  T a, b;
};

// The sums over a row of a block's threads, for all of them: a power of two of them up to a warp, or whole warps. The block
// may have several rows.
template <class T, int n>
__device__ void block_sums(Pair<T> (&own)[n]) {
  for (int d = (blockDim.x < kLanes ? int(blockDim.x) : kLanes) / 2; d > 0; d /= 2) {
    MEMKIT_UNROLL
    for (int i = 0; i < n; ++i) {
      own[i].a += __shfl_xor_sync(0xffffffffu, own[i].a, d);
      own[i].b += __shfl_xor_sync(0xffffffffu, own[i].b, d);
    }
  }
  if (blockDim.x <= kLanes) return;
  __shared__ Pair<T> warps[n][kLanes];
  const auto first = [](unsigned row) { return int(row * (blockDim.x / kLanes)); };
  __syncthreads();  // the last sums have been read
  MEMKIT_UNROLL
  for (int i = 0; i < n; ++i) {
    if (threadIdx.x % kLanes == 0) warps[i][first(threadIdx.y) + threadIdx.x / kLanes] = own[i];
    own[i] = {0, 0};
  }
  __syncthreads();
  for (int w = first(threadIdx.y); w < first(threadIdx.y + 1); ++w) {
    MEMKIT_UNROLL
    for (int i = 0; i < n; ++i) own[i].a += warps[i][w].a, own[i].b += warps[i][w].b;
  }
}

template <class T>
__device__ Pair<T> block_sum(Pair<T> own) {
  Pair<T> sums[1] = {own};
  block_sums(sums);
  return sums[0];
}

}  // namespace memkit::cuda
