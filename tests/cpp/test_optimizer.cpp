// Optimizer steps without torch: the CPU engine against plain double, for every dtype and way to keep moments, however
// the work is split; the 8-bit codes; stochastic rounding.
#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "../../csrc/cpu/convert.h"
#include "../../csrc/cpu/optimizer.h"
#include "check.h"
#include "random.h"

namespace {

using namespace memkit;

// An array of a dtype, exactly as long as it says.
struct Array {
  Dtype dtype;
  std::vector<double> wide;
  std::vector<float> single;
  std::vector<cpu::Half> half;
  std::vector<cpu::Bfloat> bfloat;

  Array(Dtype dtype, const std::vector<double>& values) : dtype(dtype) {
    wide.resize(dtype == Dtype::float64 ? values.size() : 0);
    single.resize(dtype == Dtype::float32 ? values.size() : 0);
    half.resize(dtype == Dtype::float16 ? values.size() : 0);
    bfloat.resize(dtype == Dtype::bfloat16 ? values.size() : 0);
    for (size_t i = 0; i < values.size(); ++i) {
      if (dtype == Dtype::float64) wide[i] = values[i];
      if (dtype == Dtype::float32) single[i] = float(values[i]);
      if (dtype == Dtype::float16) cpu::from_compute(float(values[i]), half[i]);
      if (dtype == Dtype::bfloat16) cpu::from_compute(float(values[i]), bfloat[i]);
    }
  }
  void* data() {
    switch (dtype) {
      case Dtype::float64: return wide.data();
      case Dtype::float32: return single.data();
      case Dtype::float16: return half.data();
      default: return bfloat.data();
    }
  }
  double operator[](size_t i) const {
    switch (dtype) {
      case Dtype::float64: return wide[i];
      case Dtype::float32: return single[i];
      case Dtype::float16: return cpu::to_compute(half[i]);
      default: return cpu::to_compute(bfloat[i]);
    }
  }
  double precision() const {
    switch (dtype) {
      case Dtype::float64: return 1e-15;
      case Dtype::float32: return 3e-7;
      case Dtype::float16: return 1.0 / 2048;
      default: return 1.0 / 256;
    }
  }
};

std::vector<double> values(size_t n, double scale, bool positive) {
  std::vector<double> made(n);
  for (double& x : made) x = normal() * scale, x = positive ? std::abs(x) : x;
  return made;
}

// One step in double.
void plain(const StepArgs& a, double t, double& p, double g, double& m, double& v, double& most, bool momentum,
           bool amsgrad) {
  if (a.maximize) g = -g;
  if (a.rule == StepRule::adamw) {
    p *= 1 - a.lr * a.weight_decay;
    m = a.beta1 * m + (1 - a.beta1) * g;
    v = a.beta2 * v + (1 - a.beta2) * g * g;
    most = std::max(most, v);
    const double second = (amsgrad ? most : v) / (1 - std::pow(a.beta2, t));
    p -= a.lr * m / (1 - std::pow(a.beta1, t)) / (std::sqrt(second) + a.eps);
    return;
  }
  g += a.weight_decay * p;
  if (momentum) {
    m = t == 1 ? g : a.momentum * m + (1 - a.dampening) * g;
    g = a.nesterov ? g + a.momentum * m : m;
  }
  p -= a.lr * g;
}

void check_step(const StepArgs& args, Dtype dtype, Dtype state, bool momentum, bool amsgrad, float step) {
  const std::vector<size_t> sizes = {1, 7, 1024, 1025, 3000};
  std::vector<Array> ps, gs, ms, vs, ls;
  std::vector<StepTensor> tensors;
  std::vector<StepNumbers> numbers;
  int64_t offset = 0;
  for (const size_t n : sizes) {
    ps.emplace_back(dtype, values(n, 1, false));
    gs.emplace_back(dtype, values(n, 1, false));
    ms.emplace_back(state, values(n, 0.5, false));
    vs.emplace_back(state, values(n, 0.5, true));
    ls.emplace_back(state, values(n, 0.5, true));
  }
  const auto before = std::make_tuple(ps, ms, vs, ls);
  for (size_t i = 0; i < sizes.size(); ++i) {
    StepTensor t;
    t.param = ps[i].data(), t.grad = gs[i].data();
    if (momentum) t.first = ms[i].data();
    if (args.rule == StepRule::adamw) t.second = vs[i].data();
    if (amsgrad) t.largest = ls[i].data();
    t.dtype = t.grad_dtype = dtype, t.state_dtype = state;
    t.numel = int64_t(sizes[i]), t.offset = offset;
    offset += (t.numel + kStepUnit - 1) / kStepUnit * kStepUnit;
    tensors.push_back(t);
    numbers.push_back(step_numbers(args, args.lr, step));
  }
  // In parts, as threads do them.
  const int64_t units = offset / kStepUnit;
  for (int64_t begin = 0; begin < units; begin += 3)
    cpu::optimizer_step(args, args.lr, tensors.data(), numbers.data(), int64_t(tensors.size()), begin,
                        std::min(units, begin + 3));
  for (size_t i = 0; i < sizes.size(); ++i)
    for (size_t k = 0; k < sizes[i]; ++k) {
      const auto& [p0, m0, v0, l0] = before;
      double p = p0[i][k], m = m0[i][k], v = v0[i][k], most = l0[i][k];
      const double start = std::abs(p);
      plain(args, step, p, gs[i][k], m, v, most, momentum, amsgrad);
      const double exact = std::max(ps[i].precision(), 4e-7 * (dtype != Dtype::float64));
      CHECK(std::abs(ps[i][k] - p) <= (4 * start + 4) * exact, "p[%zu][%zu] %g, expected %g", i, k, ps[i][k], p);
      if (momentum) CHECK(std::abs(ms[i][k] - m) <= 4 * ms[i].precision(), "m %g, expected %g", ms[i][k], m);
      if (args.rule == StepRule::adamw)
        CHECK(std::abs(vs[i][k] - v) <= 4 * vs[i].precision(), "v %g, expected %g", vs[i][k], v);
    }
}

void test_steps() {
  const Dtype all[] = {Dtype::float32, Dtype::float64, Dtype::float16, Dtype::bfloat16};
  for (const Dtype dtype : all)
    for (const Dtype state : all) {
      if ((dtype == Dtype::float64) != (state == Dtype::float64)) continue;
      for (const float step : {1.0f, 10.0f}) {
        StepArgs args;
        args.lr = 0.1, args.weight_decay = 0.2, args.beta1 = 0.9, args.beta2 = 0.99, args.eps = 1e-3;
        check_step(args, dtype, state, true, false, step);
        args.maximize = true, args.beta1 = 0.25;
        check_step(args, dtype, state, true, true, step);
        args.rule = StepRule::sgd;
        args.momentum = 0.8, args.dampening = 0.3;
        check_step(args, dtype, state, false, false, step);
        check_step(args, dtype, state, true, false, step);
        args.dampening = 0, args.nesterov = true, args.maximize = false;
        check_step(args, dtype, state, true, false, step);
      }
    }
}

template <bool is_signed>
void test_codes() {
  using Code = Code8<is_signed>;
  for (const float largest : {1.0f, 3e-20f, 7e20f}) {
    const float inverse = Code::inverse(largest);
    for (int code = is_signed ? -Code::levels : 0; code <= Code::levels; ++code) {
      const float x = Code::decode(code, largest);
      if (x == 0 || std::abs(x) < 1e-37f) continue;
      CHECK(Code::encode(x, inverse) == code, "code %d of %g became %d", code, x, Code::encode(x, inverse));
      if (code == Code::levels) continue;
      const double next = Code::decode(code + 1, largest), middle = (double(x) + next) / 2;
      const double off = (next - x) * 1e-3;
      CHECK(Code::encode(float(middle - off), inverse) == code, "below the middle of %d", code);
      CHECK(Code::encode(float(middle + off), inverse) == code + 1, "above the middle of %d", code);
    }
    CHECK(Code::encode(largest, inverse) == Code::levels, "the largest");
  }
  CHECK(Code::encode(0.0f, 1.0f) == 0, "zero");
  CHECK(Code::encode(1e-30f, 1.0f) == (is_signed ? 0 : 1), "a tiny second moment is kept above 0");
  CHECK(Code::encode(NAN, 1.0f) == 0 && Code::inverse(NAN) == 0 && Code::inverse(0.0f) == 0, "not numbers");
  CHECK(std::isnan(larger(NAN, 1.0f)) && std::isnan(larger(1.0f, NAN)) && larger(1.0f, 2.0f) == 2, "larger");
}

// 8-bit moments of odd sizes: scales are the largest of each block, and what is left behind decodes to the moments.
void test_blocks() {
  for (const int block : {64, 128, 256})
    for (const int64_t n : {1, 63, 64, 1000, 2500}) {
      std::vector<float> p(n, 1), g(n);
      for (float& x : g) x = float(normal());
      std::vector<int8_t> m(n);
      std::vector<uint8_t> v(n);
      std::vector<float> ms((n + block - 1) / block), vs(ms.size());
      StepTensor t;
      t.param = p.data(), t.grad = g.data(), t.first = m.data(), t.second = v.data();
      t.first_scale = ms.data(), t.second_scale = vs.data();
      t.numel = n;
      StepArgs args;
      args.lr = 0.1, args.beta1 = 0.5, args.beta2 = 0.75, args.eps = 1e-8, args.block = block;
      const StepNumbers numbers = step_numbers(args, args.lr, 1);
      cpu::optimizer_step(args, args.lr, &t, &numbers, 1, 0, (n + kStepUnit - 1) / kStepUnit);
      for (int64_t i = 0; i < n; ++i) {
        float most = 0;
        for (int64_t k = i / block * block; k < std::min(n, (i / block + 1) * block); ++k)
          most = std::max(most, std::abs(0.5f * g[k]));
        CHECK(std::abs(ms[i / block] - most) < 1e-6f, "scale %g, expected %g", ms[i / block], most);
        const float kept = Code8<true>::decode(m[i], ms[i / block]);
        CHECK(std::abs(kept - 0.5f * g[i]) <= 0.017f * most, "m %g, expected %g", kept, 0.5f * g[i]);
        const float second = Code8<false>::decode(v[i], vs[i / block]);
        CHECK(std::abs(second - 0.25f * g[i] * g[i]) <= 0.017f * vs[i / block], "v %g", second);
      }
    }
}

void test_rounding() {
  const auto value = [](uint16_t bits) { return cpu::to_compute(cpu::Bfloat{bits}); };
  for (const float x : {1.0f, -2.5f, 0.0f, INFINITY, -INFINITY})
    for (const uint32_t random : {0u, 0x7fffu, 0xffffu})
      CHECK(value(stochastic_bfloat(x, random)) == x, "%g is a bfloat16", x);
  for (const uint32_t random : {0u, 0xffffu}) CHECK(std::isnan(value(stochastic_bfloat(NAN, random))), "NaN stays one");
  const float x = 1 + 3 * 0x1p-9f;  // three quarters of the way up
  int up = 0;
  for (uint32_t random = 0; random < 0x10000; ++random) up += value(stochastic_bfloat(x, random)) > x;
  CHECK(up == 0xc000, "%d of 65536", up);
  const Words words = step_words(5, RandomStream::first, 7), other = step_words(5, RandomStream::second, 7);
  CHECK(words.at[0] != other.at[0], "streams differ");
  CHECK((half_word(words, 0) | half_word(words, 1) << 16) == words.at[0], "halves of a word");
}

void test_search() {
  std::vector<StepTensor> tensors(41);
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].offset = int64_t(i * (i + 1) / 2) * kStepUnit;
  for (int64_t count = 1; count <= 41; ++count)
    for (int64_t unit = 0; unit < 900; ++unit) {
      int64_t expected = 0;
      while (expected + 1 < count && tensors[expected + 1].offset <= unit * kStepUnit) ++expected;
      const int64_t found = tensor_at(tensors.data(), count, unit * kStepUnit);
      CHECK(found == expected, "unit %d of %d", int(unit), int(count));
    }
}

}  // namespace

int main() {
  test_steps();
  test_codes<true>();
  test_codes<false>();
  test_blocks();
  test_rounding();
  test_search();
  return finish("optimizer");
}
