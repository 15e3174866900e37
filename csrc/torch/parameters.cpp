#include "parameters.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "checks.h"
#include "node_kind.h"

namespace memkit {

using at::Tensor;

bool is_parameter(const torch::autograd::Edge& edge, int64_t elements) {
  const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(behind_views(edge).function.get());
  return leaf && leaf->variable.numel() >= elements;
}

bool may_be_freed(const Tensor& x) {
  return !x.grad_fn() || is_parameter({x.grad_fn(), static_cast<uint32_t>(x.output_nr())});
}

void check_there(const Tensor& x) {
  if (x.layout() != at::kStrided || x.is_nested() || !is_plain(x)) return;
  if (x.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return;
  const size_t needed =
      at::detail::computeStorageNbytes(x.sizes(), x.strides(), x.element_size(), size_t(x.storage_offset()));
  TORCH_CHECK(x.storage().nbytes() >= needed,
              "memkit.lean: expected, to compute a result again, all memory of what it is of, got a tensor of ",
              describe(x), " whose memory was freed after forward, as engines that shard parameters do; initialize ",
              "torch.distributed before, so that copies of them are kept, or run that layer outside of lean()");
}

}  // namespace memkit
