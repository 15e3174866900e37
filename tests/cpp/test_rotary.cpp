// Rotary embeddings without torch: both engines against plain sums in double, in both styles, forward and back, in place and
// not, aligned and not; the CUDA kernel's threads played one after the other.
#include <cmath>
#include <vector>

#include "../../csrc/cpu/rotary.h"
#include "../../csrc/cuda/rotary_pass.cuh"
#include "check.h"
#include "random.h"

namespace {

using namespace memkit;

struct Case {
  int64_t width, rotary;
  bool interleaved, back, heads_outside, ids, wide_tables, in_place;
  int64_t shift;  // elements that the heads lie off an alignment
};

template <class S, bool interleaved, bool wide>
void play(const cuda::RotaryCall& call) {
  for (int64_t item = 0; item < call.items; ++item) {
    const int64_t i = call.row_items.divide(item);
    const RotaryRow row = call.row(i);
    CHECK(call.is_known(row.position), "position %d", int(row.position));
    const int64_t part = item - i * call.row_items.value;
    if (call.args.back)
      cuda::RotaryPass<S, interleaved, wide, true>::run(call, row, part);
    else
      cuda::RotaryPass<S, interleaved, wide, false>::run(call, row, part);
  }
}

template <class S>
void play_cuda(const RotaryArgs& args) {
  const auto call = cuda::RotaryCall::of<S>(args);
  if (args.interleaved)
    call.wide ? play<S, true, true>(call) : play<S, true, false>(call);
  else
    call.wide ? play<S, false, true>(call) : play<S, false, false>(call);
}

template <class S>
void test(const Case& c, Dtype dtype, double tolerance) {
  using T = typename cpu::ComputeType<S>::type;
  constexpr int64_t batch = 2, length = 3, rows = 5, heads[2] = {3, 2};
  const int64_t columns = c.wide_tables ? c.rotary : c.rotary / 2;
  std::vector<T> cos(rows * columns), sin(rows * columns);
  for (auto* table : {&cos, &sin})
    for (T& x : *table) x = T(normal());  // whatever they are
  const std::vector<int64_t> ids{4, 0, 2, 1, 1, 3};

  // q and k packed, [batch, length, heads, width] with a column to spare.
  const int64_t head = c.width + c.shift, step = (heads[0] + heads[1]) * head, numel = batch * length * step + 16;
  std::vector<S> x(numel);
  for (S& each : x) cpu::from_compute(T(normal()), each);
  for (int engine = 0; engine < 2; ++engine) {
    std::vector<S> in = x, out = x;
    RotaryArgs args;
    args.dtype = dtype, args.table_dtype = sizeof(T) == 8 ? Dtype::float64 : Dtype::float32;
    args.batch = batch, args.length = length, args.width = c.width, args.rotary = c.rotary;
    args.interleaved = c.interleaved, args.back = c.back, args.heads_outside = c.heads_outside;
    RotaryHeads* both[] = {&args.q, &args.k};
    for (int i = 0; i < 2; ++i) {
      const int64_t offset = c.shift + i * heads[0] * head;
      both[i]->x = in.data() + offset;
      both[i]->out = (c.in_place ? in : out).data() + offset;
      both[i]->heads = heads[i];
      both[i]->batch = both[i]->out_batch = length * step;
      both[i]->head = both[i]->out_head = head;
      both[i]->step = both[i]->out_step = step;
    }
    args.cos = cos.data(), args.sin = sin.data();
    args.table_row = columns, args.table_rows = rows;
    if (c.wide_tables) args.pair = c.interleaved ? 2 : 1, args.other = c.interleaved ? 1 : c.rotary / 2;
    if (c.ids) args.positions = ids.data(), args.position_batch = length, args.position_step = 1;
    if (engine == 0) {
      for (int64_t i = 0; i < args.rows(); i += 4) cpu::rotary(args, i, std::min(i + 4, args.rows()));
    } else {
      play_cuda<S>(args);
    }
    const std::vector<S>& got = c.in_place ? in : out;
    std::vector<double> want(numel);
    for (int64_t i = 0; i < numel; ++i) want[i] = cpu::to_compute(x[i]);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t s = 0; s < length; ++s)
        for (int64_t h = 0; h < heads[0] + heads[1]; ++h)
          for (int64_t p = 0; p < c.rotary / 2; ++p) {
            const int64_t at = c.shift + b * length * step + s * step + h * head;
            const int64_t one = at + (c.interleaved ? 2 * p : p),
                          two = at + (c.interleaved ? 2 * p + 1 : p + c.rotary / 2);
            const int64_t row = (c.ids ? ids[b * length + s] : s) * columns;
            const int64_t a = row + p * args.pair, e = a + args.other;
            const double u = want[one], v = want[two];
            want[one] = c.back ? u * cos[a] + v * sin[e] : u * cos[a] - v * sin[a];
            want[two] = c.back ? v * cos[e] - u * sin[a] : v * cos[e] + u * sin[e];
          }
    for (int64_t i = 0; i < numel; ++i)
      CHECK(std::abs(cpu::to_compute(got[i]) - want[i]) <= tolerance * (1 + std::abs(want[i])),
            "element %d of width %d, rotary %d, engine %d: %g, not %g", int(i), int(c.width), int(c.rotary), engine,
            double(cpu::to_compute(got[i])), want[i]);
  }
}

}  // namespace

int main() {
  for (int64_t width : {2, 16, 24, 64, 1100}) {
    for (int64_t rotary : {width, width / 2 / 2 * 2}) {
      if (rotary == 0) continue;
      for (int bits = 0; bits < 128; ++bits) {
        if (width > 1000 && bits % 5) continue;
        const auto bit = [&](int i) { return (bits >> i & 1) != 0; };
        const Case c{width, rotary, bit(0), bit(1), bit(2), bit(3), bit(4), bit(5), bit(6) ? 3 : 0};
        test<float>(c, Dtype::float32, 2e-6);
        test<double>(c, Dtype::float64, 1e-14);
        test<cpu::Bfloat>(c, Dtype::bfloat16, 8e-3);
      }
    }
  }
  return finish("rotary");
}
