// Loops over the optimizers' formula: parameter, gradient and moments once through the caches, a unit at a time.
#include "optimizer.h"

#include "chunks.h"

namespace memkit::cpu {
namespace {

// The random halves of a unit of elements, where rounding is stochastic.
struct Halves {
  uint16_t at[kStepUnit];

  MEMKIT_FN void draw(const StepArgs& args, RandomStream stream, int64_t first, int64_t n) {
    uint32_t words[kStepUnit / 2];
    const uint64_t key = uint64_t(*args.seed);
    MEMKIT_LOOP
    for (int64_t i = 0; i < (n + 7) / 8; ++i) {
      const Words drawn = step_words(first / 8 + i, stream, key);
      words[4 * i] = drawn.at[0];
      words[4 * i + 1] = drawn.at[1];
      words[4 * i + 2] = drawn.at[2];
      words[4 * i + 3] = drawn.at[3];
    }
    std::memcpy(at, words, sizeof at);  // half_word(words, i) on a little-endian machine
  }
};

template <bool is_signed>
using Stored8 = std::conditional_t<is_signed, int8_t, uint8_t>;

// The block's largest magnitude, NaN if it holds one.
MEMKIT_FN float largest_of(const float* x, int64_t n) {
  constexpr int kSide = 32;
  float most[kSide] = {};
  int64_t i = 0;
  for (; i + kSide <= n; i += kSide) {
    MEMKIT_LOOP
    for (int k = 0; k < kSide; ++k) most[k] = larger(most[k], absolute(x[i + k]));
  }
  for (; i < n; ++i) most[0] = larger(most[0], absolute(x[i]));
  for (int half = kSide / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) most[k] = larger(most[k], most[k + half]);
  return most[0];
}

template <bool is_signed>
MEMKIT_FN void decode(const void* codes, const float* scales, int block, int64_t first, int64_t n, float* x) {
  const auto* from = static_cast<const Stored8<is_signed>*>(codes) + first;
  for (int64_t b = 0; b < n; b += block) {
    const float scale = scales[(first + b) / block];
    const int64_t end = std::min(n, b + block);
    MEMKIT_LOOP
    for (int64_t k = b; k < end; ++k) x[k] = Code8<is_signed>::decode(from[k], scale);
  }
}

template <bool is_signed>
MEMKIT_FN void encode(const float* x, void* codes, float* scales, int block, int64_t first, int64_t n) {
  auto* to = static_cast<Stored8<is_signed>*>(codes) + first;
  for (int64_t b = 0; b < n; b += block) {
    const int64_t end = std::min(n, b + block);
    const float largest = largest_of(x + b, end - b), inverse = Code8<is_signed>::inverse(largest);
    scales[(first + b) / block] = largest;
    MEMKIT_LOOP
    for (int64_t k = b; k < end; ++k) to[k] = Stored8<is_signed>(Code8<is_signed>::encode(x[k], inverse));
  }
}

template <class Lanes>
struct Step {
  // What a tensor keeps of one kind, in and out of the type computed in.
  template <RandomStream stream, class T>
  struct Kept {
    void* data;
    float* scales;
    Dtype dtype;
    T* x;  // the unit's values: in their place, or in `space`

    MEMKIT_FN void load(const StepArgs& args, int64_t first, int64_t n, T* space) {
      if constexpr (std::is_same_v<T, float>) {
        if (scales) return decode<stream == RandomStream::first>(data, scales, args.block, first, n, x = space);
      }
      x = const_cast<T*>(read<Lanes>(data, dtype, first, n, space));
    }
    MEMKIT_FN void store(const StepArgs& args, int64_t offset, int64_t first, int64_t n) const {
      if constexpr (std::is_same_v<T, float>) {
        if (scales) return encode<stream == RandomStream::first>(x, data, scales, args.block, first, n);
        if (args.seed && dtype == Dtype::bfloat16) {
          Halves halves;
          halves.draw(args, stream, offset + first, n);
          uint16_t* to = static_cast<uint16_t*>(data) + first;
          MEMKIT_LOOP
          for (int64_t k = 0; k < n; ++k) to[k] = stochastic_bfloat(x[k], halves.at[k]);
          return;
        }
      }
      written<Lanes>(x, data, dtype, first, n);
    }
  };

  // The elements [begin, end) of a tensor; begin is a multiple of the unit.
  template <class Rule>
  MEMKIT_FN static void walk(const Rule& rule, const StepArgs& args, const StepTensor& t, int64_t begin, int64_t end) {
    using T = typename Rule::T;
    constexpr int64_t space = kStepUnit + 64 / sizeof(T);  // not a power of two: stores would seem to hit later loads
    T params[space], grads[space], firsts[space], seconds[space], mosts[space], none[1] = {};
    Kept<RandomStream::param, T> p{t.param, nullptr, t.dtype, none};
    Kept<RandomStream::first, T> m{t.first, t.first_scale, t.state_dtype, none};
    Kept<RandomStream::second, T> v{t.second, t.second_scale, t.state_dtype, none};
    Kept<RandomStream::largest, T> most{t.largest, nullptr, t.state_dtype, none};
    for (int64_t i = begin; i < end; i += kStepUnit) {
      const int64_t n = std::min(kStepUnit, end - i);
      p.load(args, i, n, params);
      if constexpr (Rule::has_first) m.load(args, i, n, firsts);
      if constexpr (Rule::has_second) v.load(args, i, n, seconds);
      if constexpr (Rule::has_largest) most.load(args, i, n, mosts);
      T* g = const_cast<T*>(read<Lanes>(t.grad, t.grad_dtype, i, n, grads));
      if (args.grad_scale) {
        const T scale = T(*args.grad_scale);
        MEMKIT_LOOP
        for (int64_t k = 0; k < n; ++k) g[k] = g[k] / scale;
        written<Lanes>(g, t.grad, t.grad_dtype, i, n);
      }
      constexpr int64_t one = Rule::has_first, two = Rule::has_second, three = Rule::has_largest;
      T *const ps = p.x, *const ms = m.x, *const vs = v.x, *const ls = most.x;
      const auto step = [&](int64_t k)
                            MEMKIT_INLINE { ps[k] = rule(ps[k], g[k], ms[one * k], vs[two * k], ls[three * k]); };
      for_elements<true>(n, step, ps, g, ms, vs);
      p.store(args, t.offset, i, n);
      if constexpr (Rule::has_first) m.store(args, t.offset, i, n);
      if constexpr (Rule::has_second) v.store(args, t.offset, i, n);
      if constexpr (Rule::has_largest) most.store(args, t.offset, i, n);
    }
  }

  MEMKIT_FN static void run(const StepArgs& args, double lr, const StepTensor& t, const StepNumbers& numbers,
                            int64_t begin, int64_t end) {
    const auto go = [&](const auto& rule) MEMKIT_INLINE { walk(rule, args, t, begin, end); };
    if (t.dtype == Dtype::float64) return with_step<double>(args, t, lr, numbers, go);
    with_step<float>(args, t, lr, numbers, go);
  }
};

}  // namespace

void optimizer_step(const StepArgs& args, double lr, const StepTensor* tensors, const StepNumbers* numbers,
                    int64_t count, int64_t begin, int64_t end) {
  begin *= kStepUnit;
  end *= kStepUnit;
  const StepTensor* t = tensors + tensor_at(tensors, count, begin);
  for (; t < tensors + count && t->offset < end; ++t)
    Compiled<Step>::run(args, lr, *t, numbers[t - tensors], std::max<int64_t>(begin - t->offset, 0),
                        std::min(end - t->offset, t->numel));
}

}  // namespace memkit::cpu
