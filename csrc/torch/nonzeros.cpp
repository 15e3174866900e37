#include "nonzeros.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/set.h>

#include <atomic>
#include <utility>

#include "../cpu/nonzeros.h"
#include "checks.h"
#include "engine.h"

namespace memkit {
namespace {

using at::Tensor;

// What is smaller, or has shorter rows, stays as it is: the products around it take too little time for packing not to show.
constexpr int64_t kRow = 1024, kElements = 1 << 18;

cpu::NonzerosArgs arguments(const Tensor& x, const Nonzeros& nonzeros) {
  cpu::NonzerosArgs args;
  args.numel = x.numel();
  args.element_size = x.element_size();
  args.elements = x.data_ptr();
  if (nonzeros.values.defined()) args.nonzeros = nonzeros.values.data_ptr();
  args.bits = reinterpret_cast<uint64_t*>(nonzeros.bits.data_ptr<int64_t>());
  args.starts = const_cast<int64_t*>(nonzeros.starts.data());
  return args;
}

// pass(begin, end) over all units, on torch's threads.
template <class Function>
void on_threads(const cpu::NonzerosArgs& args, const Function& pass) {
  at::parallel_for(0, cpu::nonzeros_units(args.numel), kGrain / cpu::kNonzerosUnit, pass);
}

}  // namespace

std::optional<Nonzeros> nonzeros_of(const Tensor& x) {
  if (!x.is_cpu() || !is_plain(x) || !at::isFloatingType(x.scalar_type()) || x.element_size() < 2 || x.is_neg() ||
      x.numel() < kElements || x.size(-1) < kRow || !x.is_non_overlapping_and_dense())
    return std::nullopt;
  Nonzeros found;
  found.bits = at::empty({cpu::nonzeros_words(x.numel())}, x.options().dtype(at::kLong));
  found.starts.resize(size_t(cpu::nonzeros_units(x.numel()) + 1));
  std::atomic<bool> negative_zero{false};
  cpu::NonzerosArgs args = arguments(x, found);
  on_threads(args, [&](int64_t begin, int64_t end) {
    if (cpu::find_nonzeros(args, begin, end)) negative_zero = true;
  });
  int64_t before = 0;
  for (int64_t& start : found.starts) before += std::exchange(start, before);
  if (size_t(found.count()) * x.element_size() + found.bits.nbytes() > x.nbytes() / 4 * 3) return std::nullopt;
  found.values = at::empty({found.count()}, x.options());
  args.nonzeros = found.values.data_ptr();
  on_threads(args, [&](int64_t begin, int64_t end) { cpu::gather_nonzeros(args, begin, end); });
  found.dtype = x.scalar_type();
  found.sizes = x.sizes().vec();
  found.strides = x.strides().vec();
  found.version = x._version();
  found.negative_zero = negative_zero;
  return found;
}

Tensor Nonzeros::spread() const {
  const Tensor x = at::empty_strided(sizes, strides, at::dtype(dtype));
  const cpu::NonzerosArgs args = arguments(x, *this);
  on_threads(args, [&](int64_t begin, int64_t end) { cpu::spread_nonzeros(args, begin, end); });
  return x;
}

int64_t Nonzeros::words() const { return cpu::nonzeros_words(c10::multiply_integers(sizes)); }

bool Nonzeros::fits() const {
  constexpr int64_t kWords = cpu::kNonzerosUnit / 64;
  const auto* const word = reinterpret_cast<const uint64_t*>(bits.const_data_ptr<int64_t>());
  for (int64_t i = 0, seen = 0; i < words(); ++i) {
    if (i % kWords == 0 && seen != starts[size_t(i / kWords)]) return false;
    seen += __builtin_popcountll(word[i]);
    if (i + 1 == words() && seen != count()) return false;
  }
  const int64_t last = c10::multiply_integers(sizes) % 64;
  return last == 0 || word[words() - 1] >> last == 0;
}

NonzerosRef::NonzerosRef(Nonzeros nonzeros)
    : frame_(std::move(nonzeros)),
      values_(frame_.values.storage().getWeakStorageImpl()),
      bits_(frame_.bits.storage().getWeakStorageImpl()) {
  frame_.values = frame_.bits = Tensor();
}

std::optional<Nonzeros> NonzerosRef::lock() const {
  auto values = values_.lock(), bits = bits_.lock();
  if (!values || !bits) return std::nullopt;
  Nonzeros nonzeros = frame_;
  const auto over = [](auto&& memory, at::ScalarType dtype, int64_t count) {
    return at::empty({0}, at::dtype(dtype)).set_(c10::Storage(std::move(memory)), 0, {count});
  };
  nonzeros.values = over(values, nonzeros.dtype, nonzeros.count());
  nonzeros.bits = over(bits, at::kLong, nonzeros.words());
  return nonzeros;
}

}  // namespace memkit
