#include "seed.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <limits>
#include <mutex>

#include "../formulas/random.h"
#include "transforms.h"

#ifdef MEMKIT_WITH_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace memkit {

using at::Tensor;

namespace {

using Limits = std::numeric_limits<int64_t>;

#ifdef MEMKIT_WITH_CUDA
// What torch.randint draws on the device, without its kernel: the first words of the generator's Philox at its offset. While
// a graph is captured the kernel has to draw, anew in each replay.
std::optional<Tensor> drawn_here(const Tensor& input, const std::optional<at::Generator>& generator) {
  if (!input.is_cuda() || !is_unseen(input) ||
      c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None)
    return std::nullopt;
  auto* const source = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      generator, at::cuda::detail::getDefaultCUDAGenerator(input.device().index()));
  uint64_t key, offset;
  {
    const std::lock_guard<std::mutex> lock(source->mutex_);
    std::tie(key, offset) = source->philox_engine_inputs(4);
  }
  const Words words = philox(offset / 4, key);
  const uint64_t drawn = uint64_t(words.at[0]) << 32 | words.at[1];
  const Tensor seed(at::detail::empty_cpu({}, at::kLong));
  *seed.mutable_data_ptr<int64_t>() = int64_t(drawn % std::numeric_limits<uint64_t>::max() + uint64_t(Limits::min()));
  return seed;
}
#endif

// Of what a mode sees, which may trace it.
Tensor kept(const Tensor& seed) {
  if (!c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::Python)) return seed;
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("memkit::_kept", "").typed<Tensor(const Tensor&)>();
  return op.call(seed);
}

}  // namespace

Tensor draw_seed(const Tensor& input, const std::optional<at::Generator>& generator) {
  const bool given = generator && generator->defined();
  const auto owner = given ? generator->device() : input.device();
  const bool fits = owner.type() == input.device().type() && (!owner.has_index() || owner == input.device());
  TORCH_CHECK(fits || owner.is_cpu(), "dropout: expected a generator on ", input.device(), " or the CPU, got one on ",
              owner);
#ifdef MEMKIT_WITH_CUDA
  if (fits)
    if (const std::optional<Tensor> seed = drawn_here(input, generator)) return *seed;
#endif
  const auto device = fits ? input.device() : owner;
  const Tensor seed =
      at::randint(Limits::min(), Limits::max(), {}, generator, input.options().dtype(at::kLong).device(device));
  return kept(device == input.device() ? seed : seed.to(input.device(), /*non_blocking=*/true));
}

TORCH_LIBRARY_IMPL(memkit, CompositeExplicitAutograd, m) {
  m.impl("_kept", [](const Tensor& seed) { return seed.clone(); });
}

}  // namespace memkit
