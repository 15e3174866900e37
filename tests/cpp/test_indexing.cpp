// The CPU engine's indices and conversions: any split of the work gives the same result, nothing outside a share is
// touched, element numbers beyond 2^31 and 2^32 find their memory and their bias, halves round to nearest, ties to even.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "../../csrc/cpu/activation.h"
#include "../../csrc/cpu/convert.h"
#include "check.h"

namespace {

using namespace memkit;
using cpu::Bfloat, cpu::Half;

void test_bit_bytes() {
  static_assert(bit_bytes(0) == 0 && bit_bytes(1) == 1 && bit_bytes(8) == 1 && bit_bytes(9) == 2);
  static_assert(bit_bytes((int64_t(1) << 31) + 1) == (int64_t(1) << 28) + 1);
  static_assert(bit_bytes(INT64_MAX) == (int64_t(1) << 60));  // no overflow on the way
}

// Values that tell their place, on both sides of silu's minimum.
float value_at(int64_t i) { return float(uint64_t(i) * 2654435761u % 4093) / 512.0f - 4.0f; }

struct Run {
  std::vector<float> y, from_input, from_output;
  std::vector<uint8_t> bits;
};

// All three passes over n elements, cut at multiples of `step`, with margins that must stay as they were.
Run run(int64_t n, int64_t step, Bias bias) {
  constexpr int64_t kMargin = 64;
  std::vector<float> x(n), grad(n, 1.5f), y(n + 2 * kMargin, 77.0f), a(y), b(y);
  std::vector<uint8_t> bits(bit_bytes(n) + 2 * kMargin, 0xa5);
  for (int64_t i = 0; i < n; ++i) x[i] = value_at(i);
  ActivationArgs args{Act::silu, {}, Dtype::float32, n, bias};
  for (int64_t begin = 0; begin < n; begin += step) {
    const int64_t end = std::min(begin + step, n);
    args.grad = grad.data();
    args.x = x.data();
    args.bias = bias;
    args.out = y.data() + kMargin;
    args.bits = bits.data() + kMargin;
    cpu::activation_forward(args, begin, end);
    args.out = a.data() + kMargin;
    cpu::activation_backward_from_input(args, begin, end);
    args.bias = {};
    args.x = y.data() + kMargin;
    args.out = b.data() + kMargin;
    cpu::activation_backward_from_output(args, begin, end);
  }
  for (int64_t i = 0; i < kMargin; ++i) {
    for (const auto* v : {&y, &a, &b})
      CHECK((*v)[i] == 77.0f && (*v)[v->size() - 1 - i] == 77.0f, "margin %lld of %lld", (long long)i, (long long)n);
    CHECK(bits[i] == 0xa5 && bits[bits.size() - 1 - i] == 0xa5, "margin %lld of the bits", (long long)i);
  }
  auto inner = [&](const std::vector<float>& v) { return std::vector<float>(v.begin() + kMargin, v.end() - kMargin); };
  return {inner(y), inner(a), inner(b), {bits.begin() + kMargin, bits.end() - kMargin}};
}

void test_shares() {
  std::vector<float> bias(5003);
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = value_at(3 * i) / 4;
  const Bias biases[] = {{}, {bias.data(), 7, 1}, {bias.data(), 5003, 1}, {bias.data(), 3, 5}, {bias.data(), 11, 1030}};
  for (const Bias& b : biases) {
    for (int64_t n : {1, 7, 8, 9, 511, 512, 513, 1023, 1024, 1025, 4999, 5003}) {
      const Run whole = run(n, n, b);
      for (int64_t i = 0; i < n; ++i) {
        const float x = value_at(i) + (b.data ? bias[i / b.inner % b.size] : 0);
        const double s = 1 / (1 + std::exp(-double(x))), slope = 1.5 * s * (1 + x * (1 - s));
        CHECK(std::fabs(whole.y[i] - x * s) < 2e-6, "value %lld of %lld", (long long)i, (long long)n);
        CHECK(std::fabs(whole.from_input[i] - slope) < 2e-6, "slope %lld of %lld", (long long)i, (long long)n);
        CHECK(std::fabs(whole.from_output[i] - slope) < 4e-4, "slope from y %lld of %lld", (long long)i, (long long)n);
        const bool right = whole.bits[i / 8] >> i % 8 & 1;
        CHECK(right == (x >= -1.27846454276f), "bit %lld of %lld", (long long)i, (long long)n);
      }
      for (int64_t i = n; i < 8 * bit_bytes(n); ++i)
        CHECK((whole.bits[i / 8] >> i % 8 & 1) == 0, "bit %lld past the end at %lld", (long long)i, (long long)n);
      for (int64_t step : {8, 512, 1024, 1536}) {
        const Run parts = run(n, step, b);
        CHECK(parts.bits == whole.bits, "bits of %lld in steps of %lld", (long long)n, (long long)step);
        for (int64_t i = 0; i < n; ++i)  // the vectorised part and the rest may round apart
          CHECK(
              std::fabs(parts.y[i] - whole.y[i]) < 2e-6 && std::fabs(parts.from_input[i] - whole.from_input[i]) < 2e-6,
              "element %lld of %lld in steps of %lld", (long long)i, (long long)n, (long long)step);
      }
    }
  }
}

// Memory for numel elements whose pages cost nothing until they are touched.
template <class S>
class Sparse {
 public:
  explicit Sparse(int64_t numel) : bytes_(size_t(numel) * sizeof(S)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) std::perror("mmap"), std::exit(1);
  }
  ~Sparse() { munmap(data_, bytes_); }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  S* data() { return static_cast<S*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

void test_large_element_numbers() {
  const int64_t numel = (int64_t(1) << 32) + 2057;
  Sparse<Bfloat> x(numel), y(numel), grad(numel);
  Sparse<uint8_t> bits(bit_bytes(numel));
  std::vector<Bfloat> bias(1031);
  for (size_t i = 0; i < bias.size(); ++i) cpu::from_compute(value_at(i) / 4, bias[i]);
  const Bias biases[] = {{}, {bias.data(), 1031, 1}, {bias.data(), 1031, int64_t(1) << 22}};
  for (const Bias& b : biases) {
    for (int64_t middle : {int64_t(1) << 31, int64_t(1) << 32, numel - 520}) {
      const int64_t begin = (middle - 512) & ~int64_t(7), end = std::min(middle + 512, numel);
      for (int64_t i = begin; i < end; ++i) {
        cpu::from_compute(value_at(i), x.data()[i]);
        cpu::from_compute(2.0f, grad.data()[i]);
      }
      ActivationArgs args{Act::hardswish, {}, Dtype::bfloat16, numel, b};
      args.x = x.data();
      args.out = y.data();
      args.bits = bits.data();
      cpu::activation_forward(args, begin, end);
      args.x = y.data();
      args.grad = args.out = grad.data();  // in place
      args.bias = {};
      cpu::activation_backward_from_output(args, begin, end);
      for (int64_t i = begin; i < end; ++i) {
        const float v = cpu::to_compute(x.data()[i]) + (b.data ? cpu::to_compute(bias[i / b.inner % b.size]) : 0);
        const float want = v * std::fmin(std::fmax(v + 3, 0), 6) / 6;
        const float slope = v <= -3 ? 0 : v >= 3 ? 2 : 2 * (v / 3 + 0.5f);
        CHECK(std::fabs(cpu::to_compute(y.data()[i]) - want) < 2e-2, "value at %lld", (long long)i);
        CHECK((bits.data()[i / 8] >> i % 8 & 1) == (v >= -1.5f), "bit at %lld", (long long)i);
        CHECK(std::fabs(cpu::to_compute(grad.data()[i]) - slope) < 7e-2, "slope at %lld", (long long)i);
      }
    }
  }
}

// -- conversions -----------------------------------------------------------------------------------------------------

// From the definition: sign, `exponent_bits` of exponent, `fraction_bits` of fraction.
double decode(uint16_t bits, int exponent_bits, int fraction_bits) {
  const int exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1), bias = (1 << (exponent_bits - 1)) - 1;
  const int fraction = bits & ((1 << fraction_bits) - 1), top = (1 << exponent_bits) - 1;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == top) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
}

template <class S>
float widen(uint16_t bits) {
  S s{bits};
  float f;
  cpu::load(&s, &f, 1);
  return f;
}

template <class S>
uint16_t narrow(float f) {
  S s;
  cpu::store(&f, &s, 1);
  return s.bits;
}

template <class S>
void test_half(const char* name, int exponent_bits, int fraction_bits) {
  const int infinity = ((1 << exponent_bits) - 1) << fraction_bits;
  for (int bits = 0; bits < 1 << 16; ++bits) {
    const double want = decode(uint16_t(bits), exponent_bits, fraction_bits);
    const float got = widen<S>(uint16_t(bits));
    CHECK(std::isnan(want) ? std::isnan(got) : got == want && std::signbit(got) == std::signbit(want), "%s %04x", name,
          bits);
    CHECK(std::isnan(want) ? std::isnan(widen<S>(narrow<S>(got))) : narrow<S>(got) == bits, "%s %04x back", name, bits);
  }
  // Each value, the middle to the next one, and the floats next to both.
  for (int bits = 0; bits < infinity; ++bits) {
    const double low = decode(uint16_t(bits), exponent_bits, fraction_bits);
    const double high = bits + 1 < infinity ? decode(uint16_t(bits + 1), exponent_bits, fraction_bits)
                                            : 2 * low - decode(uint16_t(bits - 1), exponent_bits, fraction_bits);
    const double middle = (low + high) / 2;
    for (double around : {low, middle, high}) {
      const float centre = float(around);
      for (float f : {std::nextafterf(centre, -1), centre, std::nextafterf(centre, INFINITY)}) {
        if (!(f >= low && f <= high) || std::isinf(f)) continue;
        const bool up = f > middle || (f == middle && bits % 2 == 1);
        CHECK(narrow<S>(f) == bits + up, "%s of %a", name, f);
        CHECK(narrow<S>(-f) == (0x8000 | (bits + up)), "%s of %a", name, -f);
      }
    }
  }
  CHECK(narrow<S>(INFINITY) == infinity && narrow<S>(-INFINITY) == (0x8000 | infinity), "%s of infinity", name);
  for (uint32_t payload : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffffffffu})
    CHECK(std::isnan(widen<S>(narrow<S>(cpu::bit_cast<float>(payload)))), "%s of NaN %08x", name, payload);
}

}  // namespace

int main() {
  test_bit_bytes();
  test_shares();
  test_large_element_numbers();
  test_half<Half>("float16", 5, 10);
  test_half<Bfloat>("bfloat16", 8, 7);
  return finish("test_indexing");
}
