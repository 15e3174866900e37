// One step of an optimizer for one element, how its moments are kept in 8 bits, and how what is kept in bfloat16 is rounded.
#pragma once

#include <cmath>

#include "arguments.h"

namespace memkit {

// Elements of a unit of work. Every tensor of a list starts a new one, and 8-bit blocks divide it.
constexpr int64_t kStepUnit = 1024;

enum class StepRule : int { adamw, sgd };

// One tensor of the list, as flat memory; its moments lie in the order of its elements.
struct StepTensor {
  void* param = nullptr;
  void* grad = nullptr;
  void* first = nullptr;         // AdamW: exp_avg; SGD: momentum_buffer; null without momentum
  void* second = nullptr;        // AdamW: exp_avg_sq
  void* largest = nullptr;       // AdamW with amsgrad: max_exp_avg_sq
  float* first_scale = nullptr;  // one for each block where the moments have 8 bits, else null
  float* second_scale = nullptr;
  float* step = nullptr;  // steps taken so far; null without momentum
  int64_t numel = 0;
  int64_t offset = 0;  // of its first element among all tensors', each rounded up to whole units
  Dtype dtype = Dtype::float32, grad_dtype = Dtype::float32, state_dtype = Dtype::float32;
};

struct StepArgs {
  StepRule rule = StepRule::adamw;
  double lr = 0, weight_decay = 0;
  double beta1 = 0, beta2 = 0, eps = 0;  // AdamW
  double momentum = 0, dampening = 0;    // SGD
  bool nesterov = false, maximize = false;
  int block = 256;                    // elements that share a scale: 64, 128 or 256
  const double* lr_there = nullptr;   // these are in the engine's memory: the learning rate, if not `lr`
  const int64_t* seed = nullptr;      // bfloat16 is rounded stochastically; to nearest without
  const float* grad_scale = nullptr;  // what gradients were multiplied by; they are written back without it
  const float* found_inf = nullptr;   // nothing is done unless it is 0
};

// The last of the tensors, in the order of their offsets, that does not begin behind an offset.
MEMKIT_FN int64_t tensor_at(const StepTensor* tensors, int64_t count, int64_t offset) {
  int64_t below = 0, above = count;
  while (above - below > 1) {
    const int64_t middle = (below + above) / 2;
    if (tensors[middle].offset <= offset)
      below = middle;
    else
      above = middle;
  }
  return below;
}

// What a step's number makes of the constants.
struct StepNumbers {
  double size = 0;     // AdamW: lr / (1 - beta1^step); SGD: lr
  double root = 1;     // AdamW: sqrt(1 - beta2^step)
  bool first = false;  // the first step of a momentum
};

MEMKIT_FN StepNumbers step_numbers(const StepArgs& args, double lr, double step) {
  if (args.rule == StepRule::sgd) return {lr, 1, step == 1};
  return {lr / (1 - std::pow(args.beta1, step)), std::sqrt(1 - std::pow(args.beta2, step)), step == 1};
}

// AdamW (Loshchilov, Hutter: "Decoupled Weight Decay Regularization", 2019), the operations in the order of PyTorch's
// fused kernel, with one division less. Returns the parameter's new value.
template <class T_, bool amsgrad>
struct AdamwStep {
  using T = T_;
  static constexpr bool has_first = true, has_second = true, has_largest = amsgrad;
  T sign, decay, weight, coefficient, beta2, rest, inverse_root, eps, size;

  MEMKIT_FN AdamwStep(const StepArgs& args, double lr, const StepNumbers& numbers)
      : sign(args.maximize ? T(-1) : T(1)),
        decay(T(1 - lr * args.weight_decay)),
        weight(T(1 - args.beta1)),
        coefficient(weight < T(0.5) ? weight : weight - T(1)),
        beta2(T(args.beta2)),
        rest(T(1 - args.beta2)),
        inverse_root(T(1 / numbers.root)),
        eps(T(args.eps)),
        size(T(-numbers.size)) {}

  MEMKIT_FN T operator()(T p, T g, T& m, T& v, T& largest) const {
    g *= sign;
    m = select(weight < T(0.5), m, g) + coefficient * (g - m);
    v = v * beta2 + rest * g * g;
    if (amsgrad) largest = select(largest > v, largest, v);  // NaN in v comes through
    return p * decay + size * m / (memkit::sqrt(amsgrad ? largest : v) * inverse_root + eps);
  }
};

// Stochastic gradient descent as PyTorch has it.
template <class T_, bool momentum>
struct SgdStep {
  using T = T_;
  static constexpr bool has_first = momentum, has_second = false, has_largest = false;
  T sign, decay, keep, rest, ahead, behind, size;

  MEMKIT_FN SgdStep(const StepArgs& args, double lr, const StepNumbers& numbers)
      : sign(args.maximize ? T(-1) : T(1)),
        decay(T(args.weight_decay)),
        keep(T(numbers.first ? 0 : args.momentum)),
        rest(T(numbers.first ? 1 : 1 - args.dampening)),
        ahead(T(args.nesterov ? args.momentum : 1)),
        behind(T(args.nesterov ? 1 : 0)),
        size(T(-lr)) {}

  MEMKIT_FN T operator()(T p, T g, T& m, T&, T&) const {
    g = g * sign + select(decay == T(0), T(0), p * decay);  // an infinite weight times 0 is none
    if (momentum) {
      m = m * keep + g * rest;
      g = g * behind + m * ahead;
    }
    return p + g * size;
  }
};

// Calls f with the rule's step for one tensor.
template <class T, class F>
MEMKIT_FN void with_step(const StepArgs& args, const StepTensor& tensor, double lr, const StepNumbers& numbers,
                         const F& f) {
  if (args.rule == StepRule::sgd) {
    if (tensor.first)
      f(SgdStep<T, true>(args, lr, numbers));
    else
      f(SgdStep<T, false>(args, lr, numbers));
  } else if (tensor.largest) {
    f(AdamwStep<T, true>(args, lr, numbers));
  } else {
    f(AdamwStep<T, false>(args, lr, numbers));
  }
}

// The larger of two magnitudes, NaN where one is.
MEMKIT_FN float larger(float a, float b) { return select(b <= a, a, select(a == a, b, a)); }

// Moments in 8 bits, in blocks that share a scale, their largest magnitude (Dettmers, Lewis, Shleifer, Zettlemoyer:
// "8-bit Optimizers via Block-wise Quantization", 2022). Levels are powers of whole numbers, q^4 for the first moment and
// q^8 for the second: their spacing is in proportion where gradients of a block differ a lot, and a root is two or three
// square roots. A second moment above 0 never becomes 0, which would make the step that it divides huge.
template <bool is_signed>
struct Code8 {
  static constexpr int levels = is_signed ? 127 : 255;
  MEMKIT_FN static constexpr float power(float level) {
    const float square = level * level, fourth = square * square;
    return is_signed ? fourth : fourth * fourth;
  }

  // What magnitudes are multiplied by before `encode`; 0 where the largest is too small to be divided by.
  MEMKIT_FN static float inverse(float largest) { return select(largest >= 1.17549435e-38f, 1.0f / largest, 0.0f); }

  // The nearest level.
  MEMKIT_FN static int encode(float x, float inverse) {
    constexpr float unit = power(levels), top = levels - 1;
    const float scaled = absolute(x) * inverse * unit;
    const float fourth = memkit::sqrt(memkit::sqrt(scaled)), root = is_signed ? fourth : memkit::sqrt(fourth);
    const float near = select(root >= top, top, select(root >= 0.0f, root, 0.0f));  // 0 for NaN: its scale is NaN, too
    const int below = int(near);
    const float low = power(float(below)), high = power(float(below + 1));
    const int code = below + int(scaled - low > 0.5f * (high - low));
    if (is_signed) return select(x < 0.0f, -code, code);
    return code + int((code == 0) & (x > 0.0f));
  }
  MEMKIT_FN static float decode(int code, float largest) {
    constexpr float unit = 1.0f / power(levels);
    const float magnitude = power(float(code)) * unit * largest;
    return is_signed ? select(code < 0, -magnitude, magnitude) : magnitude;
  }
};

// Random bits for the elements [8 * group, 8 * group + 8) of all tensors, 16 for each: of the parameter's rounding, and of the
// moments'.
enum class RandomStream : uint64_t { param, first, second, largest };
MEMKIT_FN Words step_words(int64_t group, RandomStream stream, uint64_t key) {
  return philox(uint64_t(group) | uint64_t(stream) << 61, key);
}
MEMKIT_FN uint32_t half_word(const Words& words, int i) { return words.at[i / 2] >> (i % 2 * 16) & 0xffffu; }

// The bits of a bfloat16 next to x, the farther one with the probability of how near the other is.
MEMKIT_FN uint16_t stochastic_bfloat(float x, uint32_t random) {
  const uint32_t bits = detail::bits_of(x);
  const uint32_t rounded = (bits + random) >> 16;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

}  // namespace memkit
