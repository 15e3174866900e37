// What the threads of the CUDA kernels do with gated units, played one after the other on the CPU, against the CPU engine:
// split and packed, in halves and interleaved, in words and one by one, out of place and over the operands.
#include <algorithm>
#include <cmath>
#include <vector>

#include "../../csrc/cpu/glu.h"
#include "../../csrc/cuda/glu_pass.cuh"
#include "check.h"
#include "random.h"

namespace {

using namespace memkit;
using cuda::Bfloat, cuda::GluCall, cuda::Half, cuda::Word;

template <class S>
Dtype dtype_of() {
  if (std::is_same_v<S, float>) return Dtype::float32;
  if (std::is_same_v<S, double>) return Dtype::float64;
  return std::is_same_v<S, Half> ? Dtype::float16 : Dtype::bfloat16;
}

template <class S>
struct Numbers {
  using T = typename cuda::ComputeType<S>::type;
  explicit Numbers(int64_t n) : space(n + 32) {
    for (int64_t i = 0; i < n + 32; ++i) {
      S pair[2];
      cuda::narrow(T(int(generator() % 193) - 96) / 16, T(0), pair);
      space[i] = pair[0];
    }
  }
  S* data() {  // on a word
    const auto address = reinterpret_cast<uintptr_t>(space.data());
    return space.data() + (sizeof(Word) - address % sizeof(Word)) % sizeof(Word) / sizeof(S);
  }
  std::vector<S> space;
};

struct Layout {
  int64_t row, step, up;  // `up`: elements from gate to up
};

template <template <class> class Pass, class S>
bool play(const GluArgs& args) {
  const GluCall call = GluCall::of<S>(args);
  for (int64_t item = 0; item < call.items; ++item) {
    if (call.wide)
      Pass<S>::template run<sizeof(Word) / sizeof(S)>(call, item);
    else
      Pass<S>::template run<1>(call, item);
  }
  return call.wide;
}

template <class S>
void same(const std::vector<S>& got, const std::vector<S>& want, const char* what, Act act, int64_t width) {
  // The engines' compilers contract products and sums as they like.
  const double rounding = sizeof(S) == 8 ? 1e-13 : sizeof(S) == 4 ? 2e-5 : std::is_same_v<S, Half> ? 2e-3 : 1.6e-2;
  for (size_t i = 0; i < got.size(); ++i) {
    const double a = cuda::widen(got[i]), b = cuda::widen(want[i]);
    CHECK(std::abs(a - b) <= rounding * std::max(1.0, std::abs(b)), "%s act %d width %lld at %zu: %g, expected %g",
          what, int(act), (long long)width, i, a, b);
  }
}

// Whether words were moved.
template <class S>
bool compare(Act act, int64_t rows, int64_t width, const Layout& layout, int64_t shift, bool in_place) {
  const int64_t n = rows * layout.row + layout.up + shift;
  Numbers<S> operands(n), grad(rows * width), own(rows * width), twins(rows * width), other(n);
  std::copy(operands.space.begin(), operands.space.end(), other.space.begin());
  const auto args_of = [&](Numbers<S>& from, Numbers<S>& out) {
    GluArgs args{act, dtype_of<S>(), rows, width, layout.row, layout.step};
    args.gate = from.data() + shift, args.up = from.data() + shift + layout.up;
    args.grad = grad.data(), args.out = out.data();
    return args;
  };
  GluArgs args = args_of(operands, own), twin = args_of(other, twins);
  bool wide = play<cuda::GluForward, S>(args);
  cpu::glu_forward(twin, 0, rows * width);
  same(std::vector<S>(own.data(), own.data() + rows * width), {twins.data(), twins.data() + rows * width}, "product",
       act, width);
  Numbers<S> gradients(n), expected(n);
  const auto aim = [&](GluArgs& to, Numbers<S>& from, Numbers<S>& result) {
    Numbers<S>& target = in_place ? from : result;
    to.grad_gate = target.data() + shift, to.grad_up = target.data() + shift + layout.up;
  };
  std::copy_n(gradients.data(), n, expected.data());  // what lies between stays
  aim(args, operands, gradients), aim(twin, other, expected);
  wide = play<cuda::GluBackward, S>(args) && wide;
  cpu::glu_backward(twin, 0, rows * width);
  S* const got = in_place ? operands.data() : gradients.data();
  S* const want = in_place ? other.data() : expected.data();
  same(std::vector<S>(got, got + n), {want, want + n}, in_place ? "gradients in place" : "gradients", act, width);
  return wide;
}

template <class S>
void all() {
  bool words = false, single = false;
  for (Act act : {Act::identity, Act::relu, Act::sigmoid, Act::gelu, Act::gelu_tanh, Act::silu})
    for (int64_t width : {1, 3, 16, 24, 1032})
      for (const Layout& layout : {Layout{width, 1, 3 * width}, {2 * width, 1, width}, {2 * width, 2, 1}})
        for (int64_t shift : {0, 1})
          for (bool in_place : {false, true})
            (compare<S>(act, 3, width, layout, shift, in_place) ? words : single) = true;
  CHECK(words && single, "both widths are met: %d", int(words) + int(single));
}

}  // namespace

int main() {
  all<float>();
  all<double>();
  all<Half>();
  all<Bfloat>();
  return finish("test_cuda_glu");
}
