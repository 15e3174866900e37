// Max pooling: what the threads of the CUDA kernels do, played one after the other, against the CPU engine; and the CPU engine
// against itself, its work cut into other shares. Both layouts, places of one byte and of four, ties and NaN.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../../csrc/cpu/pooling.h"
#include "../../csrc/cuda/pooling_pass.cuh"
#include "check.h"
#include "random.h"

namespace {

using namespace memkit;
using cuda::Bfloat, cuda::Half;

template <class S>
Dtype dtype_of() {
  if (std::is_same_v<S, float>) return Dtype::float32;
  if (std::is_same_v<S, double>) return Dtype::float64;
  return std::is_same_v<S, Half> ? Dtype::float16 : Dtype::bfloat16;
}

// Few values, so that windows have several maxima; one in 29 is a NaN, half of them -infinity.
template <class S>
std::vector<S> numbers(int64_t n, bool nan) {
  using T = typename cuda::ComputeType<S>::type;
  std::vector<S> all(static_cast<size_t>(n));
  for (S& each : all) {
    const auto drawn = generator();
    S pair[2];
    T value = T(int(drawn % 17) - 8);
    if (nan && drawn % 29 == 0) value = std::numeric_limits<T>::quiet_NaN();
    if (nan && drawn % 31 < 16) value = -std::numeric_limits<T>::infinity();
    cuda::narrow(value, T(0), pair);
    each = pair[0];
  }
  return all;
}

template <class S>
bool same(const std::vector<S>& a, const std::vector<S>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](S x, S y) {
    const auto u = cuda::widen(x), v = cuda::widen(y);
    return u == v || (u != u && v != v);
  });
}

int64_t results(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  return (size + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
}

template <class S, class P>
void test(PoolArgs args) {
  args.dtype = dtype_of<S>();
  args.wide = sizeof(P) == 4;
  for (PoolAxis* axis : {&args.rows, &args.columns})
    axis->results = results(axis->size, axis->kernel, axis->stride, axis->padding, axis->dilation);
  const int64_t elements = args.planes * args.rows.size * args.columns.size * args.channels;
  const auto n = static_cast<size_t>(args.results());
  const std::vector<S> x = numbers<S>(elements, true), grad = numbers<S>(args.results(), false);
  std::vector<S> out(n), out2(n), dx(x.size()), dx2(x.size());
  std::vector<P> places(n), places2(n);

  args.x = x.data(), args.out = out.data(), args.places = places.data();
  const int64_t rows = args.planes * args.rows.results;
  cpu::max_pool_forward(args, 0, rows / 2);
  cpu::max_pool_forward(args, rows / 2, rows);
  args.out = out2.data(), args.places = places2.data();
  for (int64_t i = 0; i < cuda::MaxPoolForward<S, P>::items(args); ++i) cuda::MaxPoolForward<S, P>::run(args, i);
  const auto check = [&](bool right) {
    CHECK(right, "dtype %d, channels %d, columns %d, kernel %d, stride %d, dilation %d", int(args.dtype),
          int(args.channels), int(args.columns.size), int(args.columns.kernel), int(args.columns.stride),
          int(args.rows.dilation));
  };
  check(same(out, out2));
  check(places == places2);

  args.x = grad.data(), args.out = dx.data();
  const int64_t units = cpu::max_pool_units(args);
  cpu::max_pool_backward(args, units / 2, units);
  cpu::max_pool_backward(args, 0, units / 2);
  args.out = dx2.data();
  for (int64_t i = 0; i < cuda::MaxPoolBackward<S, P>::items(args); ++i) cuda::MaxPoolBackward<S, P>::run(args, i);
  check(same(dx, dx2));
}

template <class S>
void test_all() {
  for (const int64_t channels : {1, 3, 64, 130})
    for (const int64_t columns : {3, 7, 600}) {
      PoolArgs args;
      args.planes = 2, args.channels = channels;
      for (const int64_t kernel : {1, 2, 3})
        for (const int64_t stride : {1, 2, 3})
          for (const int64_t dilation : {1, 2}) {
            if (columns == 600 && channels > 1 && stride != 2) continue;
            args.rows = {5, 0, kernel, stride, kernel / 2, dilation};
            args.columns = {columns, 0, kernel, stride, kernel / 2, 1};
            test<S, uint8_t>(args);
            args.columns = {columns, 0, kernel, stride, 0, dilation};
            if (dilation * (kernel - 1) < columns) test<S, uint8_t>(args);
          }
      args.rows = {9, 0, 1, 1, 0, 1};
      args.columns = {columns, 0, 7, 4, 3, 1};
      test<S, int32_t>(args);
    }
}

}  // namespace

int main() {
  test_all<float>();
  test_all<double>();
  test_all<Half>();
  test_all<Bfloat>();
  return finish("max pooling");
}
