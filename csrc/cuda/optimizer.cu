// The optimizers' formula over a list of tensors: a block of threads a unit, a thread eight neighbouring elements. The
// list travels in the kernel's parameters, so that a captured graph has it.
#include <algorithm>

#include "optimizer.h"
#include "vector.cuh"

namespace memkit::cuda {
namespace {

constexpr int kThreads = kStepUnit / kWidth;

struct Table {
  static constexpr int most = 40;
  StepTensor tensors[most];
  StepArgs args;
  StepNumbers* numbers;
  int count;
};
static_assert(sizeof(Table) <= 4096, "what a kernel's parameters may take on every device");

__device__ bool skipped(const StepArgs& args) { return args.found_inf && *args.found_inf != 0; }
__device__ double rate(const StepArgs& args) { return args.lr_there ? *args.lr_there : args.lr; }

// Counts the step and works its numbers out, once a tensor.
__global__ void count_kernel(const __grid_constant__ Table table) {
  const int i = threadIdx.x;
  if (i >= table.count || skipped(table.args)) return;
  float* step = table.tensors[i].step;
  if (step) *step += 1;
  table.numbers[i] = step_numbers(table.args, rate(table.args), step ? *step : 0);
}

// Eight codes in and out.
template <bool is_signed>
struct Eight8 {
  __device__ static bool whole(const void* place, int64_t i, int64_t end) {
    return i + kWidth <= end && reinterpret_cast<uintptr_t>(place) % kWidth == 0;
  }

  __device__ static Vector<float> load(const void* codes, const float* scales, int block, int64_t i, int64_t end) {
    Vector<float> v;
    if (i >= end) {
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k) v.x[k] = 0;
      return v;
    }
    const uint8_t* from = static_cast<const uint8_t*>(codes) + i;
    uint8_t packed[kWidth] = {};
    if (whole(from, i, end)) {
      const uint2 word = *reinterpret_cast<const uint2*>(from);
      memcpy(packed, &word, sizeof word);
    } else {
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k)
        if (i + k < end) packed[k] = from[k];
    }
    const float scale = scales[i / block];
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k)
      v.x[k] = Code8<is_signed>::decode(is_signed ? int(int8_t(packed[k])) : int(packed[k]), scale);
    return v;
  }

  // A block is 8, 16 or 32 neighbouring lanes; all lanes come here. What is beyond the end is 0.
  __device__ static void store(const Vector<float>& v, void* codes, float* scales, int block, int64_t i, int64_t end) {
    float largest = 0;
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) largest = larger(largest, i + k < end ? absolute(v.x[k]) : 0.0f);
    for (int distance = block / kWidth / 2; distance > 0; distance /= 2)
      largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    if (i >= end) return;
    if (i % block == 0) scales[i / block] = largest;
    const float inverse = Code8<is_signed>::inverse(largest);
    uint8_t packed[kWidth];
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) packed[k] = uint8_t(Code8<is_signed>::encode(v.x[k], inverse));
    uint8_t* to = static_cast<uint8_t*>(codes) + i;
    if (whole(to, i, end)) {
      uint2 word;
      memcpy(&word, packed, sizeof word);
      *reinterpret_cast<uint2*>(to) = word;
    } else {
      MEMKIT_UNROLL
      for (int k = 0; k < kWidth; ++k)
        if (i + k < end) to[k] = packed[k];
    }
  }
};

// What a tensor keeps of one kind.
template <RandomStream stream, class T>
struct Kept {
  void* data;
  float* scales;
  Dtype dtype;
  bool aligned;

  __device__ Kept(void* data, float* scales, Dtype dtype)
      : data(data), scales(scales), dtype(dtype), aligned(reinterpret_cast<uintptr_t>(data) % sizeof(Word) == 0) {}

  __device__ Vector<T> load(const StepArgs& args, int64_t i, int64_t end) const {
    if constexpr (std::is_same_v<T, float> && stream != RandomStream::param) {
      if (scales) return Eight8<stream == RandomStream::first>::load(data, scales, args.block, i, end);
    }
    return load_eight<T>(data, dtype, i, end, aligned && i + kWidth <= end);
  }

  __device__ void store(const Vector<T>& v, const StepArgs& args, int64_t offset, int64_t i, int64_t end) const {
    const bool wide = aligned && i + kWidth <= end;
    if constexpr (std::is_same_v<T, float>) {
      if constexpr (stream != RandomStream::param) {
        if (scales) return Eight8<stream == RandomStream::first>::store(v, data, scales, args.block, i, end);
      }
      if (args.seed && dtype == Dtype::bfloat16) {
        const Words words = step_words((offset + i) / kWidth, stream, uint64_t(*args.seed));
        uint16_t bits[kWidth];
        MEMKIT_UNROLL
        for (int k = 0; k < kWidth; ++k) bits[k] = stochastic_bfloat(v.x[k], half_word(words, k));
        uint16_t* to = static_cast<uint16_t*>(data) + i;
        if (wide) {
          Word word;
          memcpy(&word, bits, sizeof word);
          store_word(word, to);
        } else {
          MEMKIT_UNROLL
          for (int k = 0; k < kWidth; ++k)
            if (i + k < end) to[k] = bits[k];
        }
        return;
      }
    }
    store_eight(v, data, dtype, i, end, wide);
  }
};

// Blocks a multiprocessor: so few that the registers do.
template <class Rule>
__global__ void __launch_bounds__(kThreads, sizeof(typename Rule::T) == 8 ? 3 : 4)
    step_kernel(const __grid_constant__ Table table) {
  using T = typename Rule::T;
  const StepArgs& args = table.args;
  if (skipped(args)) return;
  const int64_t unit = table.tensors[0].offset + int64_t(blockIdx.x) * kStepUnit;
  const int64_t tensor = tensor_at(table.tensors, table.count, unit);
  const StepTensor& t = table.tensors[tensor];
  if ((t.dtype == Dtype::float64) != (sizeof(T) == 8)) return;
  const int64_t i = unit - t.offset + int64_t(threadIdx.x) * kWidth;

  const Kept<RandomStream::param, T> params(t.param, nullptr, t.dtype);
  const Kept<RandomStream::first, T> firsts(t.first, t.first_scale, t.state_dtype);
  const Kept<RandomStream::second, T> seconds(t.second, t.second_scale, t.state_dtype);
  const Kept<RandomStream::largest, T> mosts(t.largest, nullptr, t.state_dtype);
  const Kept<RandomStream::param, T> grads(t.grad, nullptr, t.grad_dtype);
  Vector<T> p = params.load(args, i, t.numel), g = grads.load(args, i, t.numel), m{}, v{}, most{};
  if constexpr (Rule::has_first) m = firsts.load(args, i, t.numel);
  if constexpr (Rule::has_second) v = seconds.load(args, i, t.numel);
  if constexpr (Rule::has_largest) most = mosts.load(args, i, t.numel);
  if (args.grad_scale) {
    const T scale = T(*args.grad_scale);
    MEMKIT_UNROLL
    for (int k = 0; k < kWidth; ++k) g.x[k] /= scale;
    store_eight(g, t.grad, t.grad_dtype, i, t.numel, grads.aligned && i + kWidth <= t.numel);
  }
  const Rule rule(args, rate(args), table.numbers[tensor]);
  MEMKIT_UNROLL
  for (int k = 0; k < kWidth; ++k) p.x[k] = rule(p.x[k], g.x[k], m.x[k], v.x[k], most.x[k]);
  params.store(p, args, t.offset, i, t.numel);
  if constexpr (Rule::has_first) firsts.store(m, args, t.offset, i, t.numel);
  if constexpr (Rule::has_second) seconds.store(v, args, t.offset, i, t.numel);
  if constexpr (Rule::has_largest) mosts.store(most, args, t.offset, i, t.numel);
}

template <class T>
void launch(const Table& table, unsigned units, cudaStream_t stream) {
  const StepTensor& t = table.tensors[0];
  if (table.args.rule == StepRule::sgd) {
    if (t.first)
      launch_kernel(step_kernel<SgdStep<T, true>>, units, kThreads, stream, table);
    else
      launch_kernel(step_kernel<SgdStep<T, false>>, units, kThreads, stream, table);
  } else if (t.largest) {
    launch_kernel(step_kernel<AdamwStep<T, true>>, units, kThreads, stream, table);
  } else {
    launch_kernel(step_kernel<AdamwStep<T, false>>, units, kThreads, stream, table);
  }
}

}  // namespace

int optimizer_step(const StepArgs& args, const StepTensor* tensors, int64_t count, StepNumbers* numbers,
                   cudaStream_t stream) {
  for (int64_t first = 0; first < count; first += Table::most) {
    Table table;
    table.args = args;
    table.numbers = numbers + first;
    table.count = int(std::min<int64_t>(Table::most, count - first));
    std::copy_n(tensors + first, table.count, table.tensors);
    launch_kernel(count_kernel, 1, 64, stream, table);
    const StepTensor& last = table.tensors[table.count - 1];
    const int64_t units = (last.offset - table.tensors[0].offset + last.numel + kStepUnit - 1) / kStepUnit;
    if (units >= int64_t(1) << 31) return cudaErrorInvalidValue;
    const auto wide = [](const StepTensor& t) { return t.dtype == Dtype::float64; };
    const auto end = table.tensors + table.count;
    if (units > 0 && std::any_of(table.tensors, end, wide)) launch<double>(table, unsigned(units), stream);
    if (units > 0 && !std::all_of(table.tensors, end, wide)) launch<float>(table, unsigned(units), stream);
    if (const cudaError_t error = cudaGetLastError()) return error;
  }
  return cudaSuccess;
}

}  // namespace memkit::cuda
