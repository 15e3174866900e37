// Conversions and bits of every instruction set this machine has, against the plain loops.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/lanes.h"

using namespace memkit::cpu;

namespace {

void check(bool good, const char* lanes, const char* what, long i) { CHECK(good, "%s: %s at %ld", lanes, what, i); }

std::vector<float> floats() {
  std::vector<float> x;
  std::mt19937 random(1);
  for (uint32_t high = 0; high < 65536;
       ++high)  // every bfloat16 with what makes ties and their neighbours, every NaN's kind
    for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0x1000u, 0x0fffu, 0x3001u, 0xffffu})
      x.push_back(bit_cast<float>(high << 16 | low));
  for (int i = 0; i < 100000; ++i) x.push_back(bit_cast<float>(uint32_t(random())));
  return x;
}

template <class Lanes, class S>
void conversions(const char* name) {
  std::vector<S> all(65536);
  for (uint32_t i = 0; i < all.size(); ++i) all[i].bits = uint16_t(i);
  std::vector<float> wide(kBlock), expected(kBlock);
  for (size_t first = 0; first < all.size(); first += kBlock) {
    Lanes::widen(all.data() + first, wide.data(), kBlock);
    BaseLanes::widen(all.data() + first, expected.data(), kBlock);
    for (int64_t i = 0; i < kBlock; ++i)  // a signalling NaN may come out quiet
      check(bit_cast<uint32_t>(wide[i]) == bit_cast<uint32_t>(expected[i]) ||
                (std::isnan(wide[i]) && std::isnan(expected[i])),
            name, "widen", long(first) + i);
  }
  const std::vector<float> x = floats();
  std::vector<S> got(kBlock), want(kBlock);
  for (size_t first = 0; first < x.size();) {
    const int64_t n = std::min<int64_t>(x.size() - first, kBlock - int64_t(first % 37));
    Lanes::narrow(x.data() + first, got.data(), n);
    BaseLanes::narrow(x.data() + first, want.data(), n);
    for (int64_t i = 0; i < n; ++i)
      check(got[i].bits == want[i].bits || (std::isnan(to_compute(got[i])) && std::isnan(to_compute(want[i]))), name,
            "narrow", long(first) + i);
    first += n;
  }
}

// A tile holds the elements of memory in an order that `apart` and `together` know.
template <class Lanes, class S>
void tiles(const char* name) {
  constexpr bool dense = !std::is_same_v<S, Bfloat>;
  const std::vector<float> x = floats();
  std::vector<S> from(kTile), to(kTile);
  alignas(64) float tile[kTile];
  for (size_t first = 0; first + kTile <= x.size(); first += kTile) {
    BaseLanes::narrow(x.data() + first, from.data(), kTile);
    Lanes::take_tile(from.data(), tile);
    for (int k = 0; k < kTile; ++k) {  // where the bit of element k goes, there element k lies
      const uint64_t bit = uint64_t(1) << k, moved = dense ? bit : apart<Lanes::kLanes>(bit);
      const float got = tile[__builtin_ctzll(moved)], want = to_compute(from[k]);
      check(bit_cast<uint32_t>(got) == bit_cast<uint32_t>(want) || (std::isnan(got) && std::isnan(want)), name,
            "take_tile", long(first) + k);
    }
    Lanes::put_tile(tile, to.data());
    for (int k = 0; k < kTile; ++k)
      check(to[k].bits == from[k].bits || (std::isnan(to_compute(to[k])) && std::isnan(to_compute(from[k]))), name,
            "put_tile of what was taken", long(first) + k);
    const uint64_t packed = Lanes::pack_tile(tile, 0.5f), word = dense ? packed : together<Lanes::kLanes>(packed);
    uint64_t want;
    BaseLanes::pack(from.data(), 0.5f, reinterpret_cast<uint8_t*>(&want), kTile);
    check(word == want, name, "pack_tile", long(first));
    check((dense ? word : apart<Lanes::kLanes>(word)) == packed, name, "apart", long(first));

    std::copy_n(x.data() + first, kTile, tile);  // rounding
    Lanes::put_tile(tile, to.data());
    for (int k = 0; k < kTile; ++k) {
      const uint64_t bit = uint64_t(1) << k, moved = dense ? bit : apart<Lanes::kLanes>(bit);
      S rounded;
      from_compute(tile[__builtin_ctzll(moved)], rounded);
      check(to[k].bits == rounded.bits || (std::isnan(to_compute(to[k])) && std::isnan(to_compute(rounded))), name,
            "put_tile", long(first) + k);
    }
  }
}

template <class Lanes, class S>
void bits(const char* name, const std::vector<S>& x) {
  for (int64_t n = 0; n <= 100; ++n) {
    std::vector<uint8_t> got(size_t(n + 7) / 8 + 1, 0xa5), want(got);
    Lanes::pack(x.data(), typename ComputeType<S>::type(-0.5), got.data(), n);
    BaseLanes::pack(x.data(), typename ComputeType<S>::type(-0.5), want.data(), n);
    check(got == want, name, "pack", n);
    std::vector<int32_t> sides(size_t(n + 7) / 8 * 8), expected(sides);
    Lanes::spread(want.data(), sides.data(), n);
    for (int64_t i = 0; i < n; ++i) expected[i] = to_compute(x[i]) >= -0.5f ? -1 : 0;
    check(sides == expected, name, "spread", n);
  }
}

template <class Lanes>
void run(const char* name) {
  conversions<Lanes, Half>(name);
  conversions<Lanes, Bfloat>(name);
  std::vector<float> x(100);
  std::mt19937 random(2);
  for (float& each : x) each = std::normal_distribution<float>()(random);
  x[3] = -0.5f, x[20] = std::numeric_limits<float>::quiet_NaN(), x[40] = -INFINITY, x[41] = INFINITY;
  std::vector<Half> half(100);
  std::vector<Bfloat> bfloat(100);
  BaseLanes::narrow(x.data(), half.data(), 100);
  BaseLanes::narrow(x.data(), bfloat.data(), 100);
  bits<Lanes>(name, x);
  bits<Lanes>(name, std::vector<double>(x.begin(), x.end()));
  bits<Lanes>(name, half);
  bits<Lanes>(name, bfloat);
}

}  // namespace

int main() {
  run<BaseLanes>("base");
#if MEMKIT_X86
  if (isa() >= Isa::v3) run<V3Lanes>("v3"), tiles<V3Lanes, Half>("v3"), tiles<V3Lanes, Bfloat>("v3");
  if (isa() >= Isa::v4) run<V4Lanes>("v4"), tiles<V4Lanes, Half>("v4"), tiles<V4Lanes, Bfloat>("v4");
#endif
  return finish("test_lanes");
}
