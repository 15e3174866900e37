// Max pooling: what the threads of the CUDA kernels do, played one after the other, against the CPU engine; and the CPU engine
// against itself, its work cut into other shares. Both layouts, places of one byte and of four, ties and NaN.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
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

// n elements, `shift` past where words are aligned.
template <class S>
struct Shifted {
  std::vector<S> room;
  S* data;
  int64_t n;

  Shifted(int64_t n, int64_t shift) : room(size_t(n + shift) + 16), n(n) {
    char* aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(room.data()) + 15) / 16 * 16);
    data = reinterpret_cast<S*>(aligned) + shift;
  }
  Shifted(const std::vector<S>& from, int64_t shift) : Shifted(int64_t(from.size()), shift) {
    std::copy(from.begin(), from.end(), data);
  }
  void clear() { std::fill(room.begin(), room.end(), S()); }
  std::vector<S> values() const { return {data, data + n}; }
  // Nothing beside them was written.
  bool is_within() const {
    const auto untouched = [](const S* from, const S* to) {
      return std::all_of(reinterpret_cast<const char*>(from), reinterpret_cast<const char*>(to),
                         [](char byte) { return byte == 0; });
    };
    return untouched(room.data(), data) && untouched(data + n, room.data() + room.size());
  }
};

std::map<std::string, int> played;  // of each pass, the calls

template <class Pass>
void play(const PoolArgs& args) {
  ++played[__PRETTY_FUNCTION__];
  const auto call = Pass::call(args);
  for (int64_t i = 0; i < call.items; ++i) Pass::run(call, i);
}

// Every pass that fits.
template <class... Passes, class F>
void each_fit(cuda::PoolPasses<Passes...>, const PoolArgs& args, const F& check) {
  ((Passes::fits(args) ? check([&] { play<Passes>(args); }) : void()), ...);
}

template <class S, class P>
void test(PoolArgs args, int64_t shift = 0) {
  args.dtype = dtype_of<S>();
  args.wide = sizeof(P) == 4;
  for (PoolAxis* axis : {&args.rows, &args.columns})
    if (axis->results == 0)
      axis->results = results(axis->size, axis->kernel, axis->stride, axis->padding, axis->dilation);
  const int64_t elements = args.planes * args.rows.size * args.columns.size * args.channels;
  const auto n = static_cast<size_t>(args.results());
  const Shifted<S> x(numbers<S>(elements, true), shift), grad(numbers<S>(args.results(), false), shift);
  std::vector<S> out(n), dx(static_cast<size_t>(elements));
  Shifted<P> places(args.results(), shift);

  args.x = x.data, args.out = out.data(), args.places = places.data;
  const int64_t rows = args.planes * args.rows.results;
  cpu::max_pool_forward(args, 0, rows / 2);
  cpu::max_pool_forward(args, rows / 2, rows);
  const auto check = [&](bool right) {
    CHECK(right, "dtype %d, channels %d, columns %d, kernel %d, stride %d, dilation %d, shift %d", int(args.dtype),
          int(args.channels), int(args.columns.size), int(args.columns.kernel), int(args.columns.stride),
          int(args.rows.dilation), int(shift));
  };
  using Passes = cuda::MaxPoolPasses<S>;
  Shifted<S> out2(args.results(), shift), dx2(elements, shift);
  Shifted<P> places2(args.results(), shift);
  args.out = out2.data, args.places = places2.data;
  each_fit(typename Passes::Forward(), args, [&](auto play) {
    out2.clear(), places2.clear();
    play();
    check(same(out, out2.values()) && out2.is_within());
    check(places.values() == places2.values() && places2.is_within());
  });

  args.x = grad.data, args.out = dx.data(), args.places = places.data;
  const int64_t units = cpu::max_pool_units(args);
  cpu::max_pool_backward(args, units / 2, units);
  cpu::max_pool_backward(args, 0, units / 2);
  args.out = dx2.data;
  each_fit(typename Passes::Backward(), args, [&](auto play) {
    dx2.clear();
    play();
    check(same(dx, dx2.values()) && dx2.is_within());
  });
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

// The windows that have passes of their own: rows that are whole words and such that are not, pictures that end within a
// tile, the last result beyond the picture's edge (ceil_mode), and pointers that are not aligned.
template <class S>
void test_known_windows() {
  struct {
    int64_t kernel, stride, padding;
  } windows[] = {{2, 2, 0}, {3, 2, 1}, {3, 2, 0}, {3, 1, 1}};
  for (const auto [kernel, stride, padding] : windows)
    for (const int64_t channels : {1, 8, 12, 16})
      for (const int64_t rows : {3, 8})
        for (const int64_t columns : {4, 8, 9, 16, 24, 32, 40})
          for (const int64_t shift : {0, 1, 4}) {
            if (channels > 1 && columns > 16) continue;
            PoolArgs args;
            args.planes = 3, args.channels = channels;
            args.rows = {rows, 0, kernel, stride, padding, 1};
            args.columns = {columns, 0, kernel, stride, padding, 1};
            test<S, uint8_t>(args, shift);
            args.rows.results = (rows + stride - 1) / stride, args.columns.results = (columns + stride - 1) / stride;
            test<S, uint8_t>(args, shift);
          }
}

void test_divisor() {
  constexpr int64_t most = (int64_t(1) << 31) - 1;
  for (int64_t by : {1, 2, 3, 5, 7, 12, 641, 65535, 65536, 65537, 1 << 30, (1 << 30) + 1})
    for (int k = -1; k < 200; ++k) {
      const int64_t drawn = k < 0 ? most : int64_t(generator() % uint64_t(most));
      for (const int64_t n : {drawn, drawn / by * by, drawn / by * by + by - 1, k < 0 ? most - 1 : k})
        if (n >= 0 && n <= most)
          CHECK(cuda::SmallDivisor(by).divide(int32_t(n)) == n / by, "%lld / %lld", (long long)n, (long long)by);
    }
  CHECK(cuda::SmallDivisor(most).divide(int32_t(most)) == 1 && cuda::SmallDivisor(most).divide(int32_t(most - 1)) == 0,
        "most");
}

// Past what 32 bits hold, in a plane or in all, and in windows that reach far.
void test_large() {
  PoolArgs args;
  args.planes = int64_t(1) << 32;
  args.rows = {1 << 15, 1 << 14, 2, 2, 0, 1}, args.columns = {1 << 14, 1 << 13, 2, 2, 0, 1};
  CHECK(cuda::is_pool_small(args), "planes");
  const auto check = [](PoolArgs args, const char* what) { CHECK(!cuda::is_pool_small(args), "%s", what); };
  args.rows.size *= 2, check(args, "rows"), args.rows.size /= 2;
  args.rows.padding = 1 << 20, check(args, "padding"), args.rows.padding = 0;
  args.rows.stride = 1 << 30, check(args, "stride"), args.rows.stride = 2;
  args.columns.dilation = 1 << 30, check(args, "dilation"), args.columns.dilation = 1;
  args.channels = 3, check(args, "channels");
  args.channels = int64_t(1) << 40, check(args, "channels");

  args.channels = 1;
  const cuda::PoolCall<int32_t> call(args, 1 << 14, 1 << 13, 1);
  const auto at = call.item((int64_t(123456) << 27) + (int64_t(16383) << 13) + 8191);
  CHECK(at.plane == 123456 && at.row == 16383 && at.column == 8191 && at.channel == 0, "item");
}

}  // namespace

int main() {
  test_all<float>();
  test_all<double>();
  test_all<Half>();
  test_all<Bfloat>();
  test_known_windows<float>();
  test_known_windows<Half>();
  test_known_windows<Bfloat>();
  test_divisor();
  test_large();
  // 16 each way, of which float has 4 twice; of double, 3.
  CHECK(played.size() == 2 * (3 * 16 + 3) - 4, "%d passes played", int(played.size()));
  return finish("max pooling");
}
