// What the CUDA kernels do with each tile, the lanes of a warp played one after the other on the CPU, against the CPU
// engine: every element and bit reached once, whatever the size, the alignment, the bias and the place of the result.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <vector>

#include "../../csrc/cpu/activation.h"
#include "../../csrc/cuda/activation_pass.cuh"
#include "check.h"
#include "random.h"

namespace {

using namespace memkit;
using cuda::Bfloat, cuda::Call, cuda::Half, cuda::kLanes;

template <class S>
struct Type;
template <>
struct Type<float> {
  static constexpr Dtype dtype = Dtype::float32;
  static constexpr double rounding = 2e-6;  // the engines' compilers contract products and sums as they like
};
template <>
struct Type<double> {
  static constexpr Dtype dtype = Dtype::float64;
  static constexpr double rounding = 1e-14;
};
template <>
struct Type<Half> {
  static constexpr Dtype dtype = Dtype::float16;
  static constexpr double rounding = 2e-3;
};
template <>
struct Type<Bfloat> {
  static constexpr Dtype dtype = Dtype::bfloat16;
  static constexpr double rounding = 1.6e-2;
};

// A tensor between two margins that nothing may touch. Its pages cost nothing until they are: it may exceed memory.
template <class S>
class Tensor {
 public:
  Tensor(int64_t n, int64_t shift) : n_(n), bytes_((n + 2 * kMargin) * sizeof(S)), shift_(shift) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) std::perror("mmap"), std::exit(2);
    all_ = static_cast<S*>(p);
    margins([](uint8_t& byte) { byte = kUntouched; });
  }
  ~Tensor() { munmap(all_, bytes_); }
  Tensor(const Tensor&) = delete;

  S* data() { return all_ + kMargin + shift_; }

  void fill(int64_t begin, int64_t end) {
    using T = typename cuda::ComputeType<S>::type;
    for (int64_t i = begin; i < end; ++i) {
      S pair[2];
      cuda::narrow(T(int(generator() % 193) - 96) / 16, T(0), pair);  // exact in every dtype
      data()[i] = pair[0];
    }
  }

  bool margins_untouched() {
    bool untouched = true;
    margins([&](uint8_t& byte) { untouched = untouched && byte == kUntouched; });
    return untouched;
  }

 private:
  template <class F>
  void margins(F f) {
    auto* start = reinterpret_cast<uint8_t*>(all_);
    std::for_each(start, reinterpret_cast<uint8_t*>(data()), f);
    std::for_each(reinterpret_cast<uint8_t*>(data() + n_), start + bytes_, f);
  }

  static constexpr uint8_t kUntouched = 0xa5;
  static constexpr int64_t kMargin = 64;  // elements: a tensor that is not shifted starts at a multiple of 16 bytes
  int64_t n_, bytes_, shift_;
  S* all_;
};

// One tile, as a warp does it: twice, because the lanes exchange bits. The rehearsal learns what each tells the others.
template <class Pass>
void play(const Call& call, int64_t index, void* scratch) {
  unsigned told[kLanes] = {};
  Call rehearsal = call;
  rehearsal.out = scratch;
  for (int lane = 0; lane < kLanes; ++lane)
    Pass::run(rehearsal, typename Pass::Tile(index, lane, call.numel, call.aligned),
              [&](unsigned sides, int) { return told[lane] = sides; });
  for (int lane = 0; lane < kLanes; ++lane)
    Pass::run(call, typename Pass::Tile(index, lane, call.numel, call.aligned),
              [&](unsigned, int distance) { return told[lane ^ distance]; });
}

struct Case {
  int64_t numel;
  int64_t shift = 0;  // elements off the alignment
  bool in_place = false;
  int64_t bias_size = 0, bias_inner = 1, bias_shift = 0;
  bool drop = false;  // dropout, and forward a residual
};

struct Forward {
  template <class S>
  using Pass = cuda::Forward<S>;
  static constexpr auto twin = cpu::activation_forward;
  static constexpr bool takes_bias = true, takes_grad = false;
};
struct BackwardFromInput {
  template <class S>
  using Pass = cuda::BackwardFromInput<S>;
  static constexpr auto twin = cpu::activation_backward_from_input;
  static constexpr bool takes_bias = true, takes_grad = true;
};
struct BackwardFromOutput {
  template <class S>
  using Pass = cuda::BackwardFromOutput<S>;
  static constexpr auto twin = cpu::activation_backward_from_output;
  static constexpr bool takes_bias = false, takes_grad = true;
};
struct BackwardFromBits {
  template <class S>
  using Pass = cuda::BackwardFromBits<S>;
  static constexpr auto twin = cpu::activation_backward_from_bits;
  static constexpr bool takes_bias = false, takes_grad = true;
};

// The tiles [begin, end) of a case by both engines; end < 0: all.
template <class Which, class S, template <class, bool> class Formula>
void compare(Act act, const Case& c, int64_t begin = 0, int64_t end = -1) {
  using Op = Formula<typename cuda::ComputeType<S>::type, sizeof(S) == 2>;
  using Pass = typename Which::template Pass<S>;
  constexpr int64_t elements = Pass::Tile::elements;
  ActivationArgs args{act, {0.25, 0, 0}, Type<S>::dtype, c.numel, {}};
  Tensor<S> x(c.numel, c.shift), grad(c.numel, c.shift), out(c.numel, c.shift), expected(c.numel, 0),
      scratch(c.numel, 0), residual(c.numel, c.shift);
  Tensor<S> bias(c.bias_size, c.bias_shift);
  Tensor<uint8_t> bits(bit_bytes(c.numel), 3), expected_bits(bit_bytes(c.numel), 0);
  S* const result = !c.in_place ? out.data() : Which::takes_grad ? grad.data() : x.data();

  args.x = x.data();
  args.grad = Which::takes_grad ? grad.data() : nullptr;
  args.out = result;
  args.bits = Op::branch || has_two_slopes<Op> ? bits.data() : nullptr;
  if (c.bias_size > 0 && Which::takes_bias) args.bias = {bias.data(), c.bias_size, c.bias_inner};
  const int64_t seed = -0x123456789abcdef;
  if (c.drop) {
    args.drop = {0, &seed, 0.25, 2, 0.5, -0.25};  // a quarter; the scale keeps products exact
    args.residual = Which::takes_grad ? nullptr : residual.data();
  }
  const Call call = Call::of<typename Pass::Tile>(args);
  if (end < 0) end = call.tiles;
  const int64_t from = begin * elements, to = std::min(end * elements, c.numel);
  x.fill(from, to);
  grad.fill(from, to);
  residual.fill(from, to);
  bias.fill(0, c.bias_size);
  for (int64_t i = from / 8; i < bit_bytes(to); ++i) bits.data()[i] = uint8_t(generator());

  ActivationArgs twin = args;
  twin.out = expected.data();
  if (args.bits && !Which::takes_grad) twin.bits = expected_bits.data();
  Which::twin(twin, from, to);
  for (int64_t index = begin; index < end; ++index) play<Pass>(call, index, scratch.data());

  const auto where = [&](int64_t i) {
    static char text[200];
    std::snprintf(text, sizeof(text),
                  "dtype %d act %d numel %lld shift %lld in place %d bias %lld/%lld+%lld drop %d element %lld",
                  int(args.dtype), int(act), (long long)c.numel, (long long)c.shift, c.in_place, (long long)c.bias_size,
                  (long long)c.bias_inner, (long long)c.bias_shift, c.drop, (long long)i);
    return text;
  };
  for (int64_t i = from; i < to; ++i) {
    const double got = cuda::widen(result[i]), wanted = cuda::widen(expected.data()[i]);
    CHECK(std::abs(got - wanted) <= Type<S>::rounding * std::max(1.0, std::abs(wanted)), "%g, expected %g; %s", got,
          wanted, where(i));
  }
  if (args.bits && !Which::takes_grad)
    for (int64_t i = from / 8; i < bit_bytes(to); ++i)
      CHECK(bits.data()[i] == expected_bits.data()[i], "%02x, expected %02x; %s", bits.data()[i],
            expected_bits.data()[i], where(8 * i));
  CHECK(x.margins_untouched() && grad.margins_untouched() && out.margins_untouched() && bits.margins_untouched(), "%s",
        where(0));
}

template <class S>
void compare_all(const Case& c, int64_t begin = 0, int64_t end = -1) {
  compare<Forward, S, LeakyRelu>(Act::leaky_relu, c, begin, end);
  compare<Forward, S, Hardswish>(Act::hardswish, c, begin, end);
  compare<BackwardFromInput, S, Hardswish>(Act::hardswish, c, begin, end);
  compare<BackwardFromOutput, S, LeakyRelu>(Act::leaky_relu, c, begin, end);
  compare<BackwardFromOutput, S, Hardswish>(Act::hardswish, c, begin, end);
  compare<BackwardFromBits, S, LeakyRelu>(Act::leaky_relu, c, begin, end);
}

template <class S>
void sizes_places_and_biases() {
  for (int64_t numel : {0, 1, 7, 8, 9, 31, 32, 255, 256, 257, 512, 1023, 1024, 2049})
    for (int64_t shift : {0, 1, 3})
      for (bool in_place : {false, true}) compare_all<S>({numel, shift, in_place});
  for (int64_t numel : {1, 7, 31, 257, 1023, 1024, 2049})
    for (int64_t shift : {0, 1})
      for (int64_t bias : {0, 5}) compare_all<S>({numel, shift, bias != 0, bias, 3, 0, true});
  struct Layout {
    int64_t size, inner, shift;
  };
  for (int64_t numel : {9, 1023, 2048})
    for (int64_t shift : {0, 1})
      for (Layout bias : {Layout{8, 1, 0},
                          {64, 1, 0},
                          {64, 1, 1},
                          {1000, 1, 0},
                          {5, 1, 0},
                          {1, 1, 0},
                          {4, 3, 0},
                          {3, 7, 0},
                          {3, 8, 0},
                          {5, 9, 0},
                          {7, 49, 0},
                          {2, 2048, 0},
                          {1, 5000, 0}})
        compare_all<S>({numel, shift, true, bias.size, bias.inner, bias.shift});
}

// Element numbers beyond 2^31 and 2^32, at both sides of these and at the end.
void large() {
  for (int64_t shift : {0, 1})
    for (int64_t numel : {(int64_t(1) << 31) + 9, (int64_t(1) << 32) + 9}) {
      const Case c{numel, shift, true, 24, 3};
      for (int64_t middle : {int64_t(1) << 31, int64_t(1) << 32})
        for (int64_t elements : {256, 512})  // of a backward and a forward tile
          if (middle < numel) compare_all<Bfloat>(c, middle / elements - 1, middle / elements + 1);
      const Case plain{numel, shift, false}, drop{numel, shift, true, 0, 1, 0, true};
      compare_all<Bfloat>(drop, numel / 512, numel / 512 + 1);
      compare<Forward, Half, Hardswish>(Act::hardswish, plain, numel / 512, numel / 512 + 1);
      compare<BackwardFromOutput, Half, Hardswish>(Act::hardswish, plain, numel / 256, numel / 256 + 1);
      compare<BackwardFromInput, Half, Hardswish>(Act::hardswish, c, numel / 256, numel / 256 + 1);
    }
}

// The lanes' values are the tile's elements, each once, far beyond what memory holds.
template <class Tile>
void geometry() {
  for (int64_t numel : {(int64_t(1) << 31) + 9, (int64_t(1) << 33) + 1, (int64_t(1) << 50) + 7})
    for (int64_t index : {int64_t(0), cuda::tile_count<Tile>(numel) / 2, cuda::tile_count<Tile>(numel) - 1})
      for (bool aligned : {false, true}) {
        std::vector<int> seen(Tile::elements);
        for (int lane = 0; lane < kLanes; ++lane) {
          const Tile tile(index, lane, numel, aligned);
          CHECK(tile.wide == (aligned && index + 1 < cuda::tile_count<Tile>(numel)), "tile %lld", (long long)index);
          for (int k = 0; k < Tile::values; ++k) {
            const int64_t offset = tile.element(k) - index * Tile::elements;
            CHECK(offset >= 0 && offset < Tile::elements, "offset %lld", (long long)offset);
            if (offset >= 0 && offset < Tile::elements) ++seen[offset];
          }
        }
        CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }), "tile %lld", (long long)index);
      }
}

void division() {
  const auto check = [](int64_t n, int64_t d) {
    const cuda::Divisor divisor(d);
    CHECK(divisor.divide(n) == n / d && divisor.remainder(n) == n % d, "%lld / %lld", (long long)n, (long long)d);
  };
  std::vector<int64_t> numbers{1, 2, 3, 5, 7, 49, 641, INT64_MAX, INT64_MAX - 1};
  for (int bit = 2; bit < 63; ++bit)
    for (int64_t nearby : {-1, 0, 1}) numbers.push_back((int64_t(1) << bit) + nearby);
  for (int i = 0; i < 300; ++i) numbers.push_back(int64_t(generator() >> (1 + generator() % 62)) + 1);
  for (int64_t d : numbers) {
    check(0, d);
    for (int64_t n : numbers) {
      check(n, d);
      check(n / d * d, d);
      if (n >= d) check(n / d * d - 1, d);
    }
  }
}

}  // namespace

int main() {
  sizes_places_and_biases<float>();
  sizes_places_and_biases<double>();
  sizes_places_and_biases<Half>();
  sizes_places_and_biases<Bfloat>();
  large();
  geometry<cuda::Tile<Half, 2>>();
  geometry<cuda::Tile<float, 2>>();
  geometry<cuda::Tile<double, 1>>();
  division();
  return finish("test_cuda_indexing");
}
