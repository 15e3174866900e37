#include "checks.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>
#include <sstream>

#include "node.h"
#include "node_kind.h"
#include "pool_device.h"
#include "saved_node.h"

namespace memkit {

using at::Tensor;
namespace autograd = torch::autograd;

namespace {

bool saves_output(const autograd::Node& node, uint32_t number) {
  const NodeKind kind = kind_of(node);
  return kind == NodeKind::own ? static_cast<const SavedNode&>(node).keeps_output(number) : kind == NodeKind::saver;
}

bool overlaps_itself(const Tensor& x) {
  if (x.is_non_overlapping_and_dense() || x.sym_numel() < 2) return false;
  std::vector<int64_t> order(x.dim());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x.sym_stride(a) < x.sym_stride(b); });
  c10::SymInt extent = 1;  // elements spanned by the dimensions so far
  for (int64_t d : order) {
    if (x.sym_size(d) == 1) continue;
    if (x.sym_stride(d) < extent) return true;
    extent += (x.sym_size(d) - 1) * x.sym_stride(d);
  }
  return false;
}

// Whether torch's own allocator or a pool made x's memory, and its storage is all that knows it. An array of numpy, a
// file that is mapped or a buffer of another library has an owner that no reference count shows, and may be read-only.
bool is_own_memory(const Tensor& x) {
  const c10::DataPtr& data = x.storage().data_ptr();
  const c10::DeleterFnPtr deleter = data.get_deleter();
  if (x.is_meta() || !data.get()) return true;
  if (x.is_cpu() && deleter == c10::GetDefaultCPUAllocator()->raw_deleter()) return true;
  if (is_pool_memory(data)) return true;
  const c10::Allocator* allocator = c10::GetAllocator(x.device().type());
  return deleter && allocator && deleter == allocator->raw_deleter();
}

std::optional<std::string> producer_blocker(const Tensor& x) {
  const auto& producer = x.grad_fn();
  if (producer && saves_output(*producer, x.output_nr())) {
    return "the output of " + producer->name() + ", which keeps it for its backward";
  }
  return std::nullopt;
}

}  // namespace

std::string describe(const Tensor& x) {
  std::ostringstream out;
  std::string dtype = c10::toString(x.scalar_type());
  if (const auto names = c10::getDtypeNames(x.scalar_type()); !names.first.empty()) dtype = names.first;
  out << "torch." << dtype << " " << x.sym_sizes();
  return out.str();
}

void check_float_tensor(std::string_view op, const Tensor& x) {
  TORCH_CHECK(x.defined(), op, ": expected a tensor, got None");
  TORCH_CHECK(!x.is_nested(), op, ": expected a dense tensor, got a nested tensor");
  TORCH_CHECK(x.layout() == at::kStrided, op, ": expected a dense (strided) tensor, got layout ", x.layout());
  const auto dtype = x.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16, op,
                   ": expected float32, float64, float16 or bfloat16, got ", describe(x));
  TORCH_CHECK(x.is_cpu() || x.is_cuda() || x.is_meta(), op, ": expected a CPU or CUDA tensor, got one on ", x.device());
}

void check_bias(std::string_view op, const Tensor& x, const Tensor& bias, int64_t dim) {
  check_float_tensor(op, bias);
  TORCH_CHECK(x.dim() > 0, op, ": expected an input with at least 1 dimension beside a bias, got 0");
  TORCH_CHECK_INDEX(dim >= -x.dim() && dim < x.dim(), op, ": expected dim in [", -x.dim(), ", ", x.dim() - 1, "], got ",
                    dim);
  TORCH_CHECK_VALUE(bias.dim() == 1 && bias.sym_size(0) == x.sym_size(dim), op, ": expected a bias of shape [",
                    x.sym_size(dim), "] for dim ", dim, " of input ", x.sym_sizes(), ", got ", bias.sym_sizes());
  TORCH_CHECK_TYPE(bias.scalar_type() == x.scalar_type(), op, ": expected input and bias of one dtype, got ",
                   describe(x), " and ", describe(bias));
  TORCH_CHECK(bias.device() == x.device(), op, ": expected input and bias on one device, got ", x.device(), " and ",
              bias.device());
}

void check_arguments(std::string_view op, const Tensor& x, const std::optional<Tensor>& bias, int64_t dim) {
  check_float_tensor(op, x);
  if (bias) check_bias(op, x, *bias, dim);
}

std::optional<std::string> memory_blocker(const Tensor& x) {
  if (x.is_inference() && !c10::InferenceMode::is_enabled()) return "an inference tensor outside inference_mode";
  if (x._is_zerotensor()) return "a tensor of zeros that has no memory";
  if (x.is_neg()) return "a view that negates its base";
  if (overlaps_itself(x)) return "expanded or self-overlapping memory (strides " + c10::str(x.sym_strides()) + ")";
  return std::nullopt;
}

std::optional<std::string> inplace_blocker(const Tensor& x) {
  if (auto blocker = memory_blocker(x)) return blocker;
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return std::nullopt;
  if (x.is_leaf()) return "a leaf that requires grad";
  if (const auto* view = autograd::impl::get_view_autograd_meta(x); view && view->has_bw_view()) {
    switch (view->get_creation_meta()) {
      case autograd::CreationMeta::DEFAULT: break;
      case autograd::CreationMeta::MULTI_OUTPUT_NODE:
        return "one of several views made by one call (split, chunk or unbind)";
      default: return "a view made under no_grad, inference_mode or by a custom function";
    }
    if (x._base().is_leaf()) return "a view of a leaf that requires grad";
    if (auto blocker = producer_blocker(view->get_backward_view().base_)) return blocker;
  }
  return producer_blocker(x);
}

std::optional<std::string> inplace_blocker_strict(const Tensor& x, size_t idle_base_handles) {
  if (auto blocker = inplace_blocker(x)) return blocker;
  // Autograd recorded x and is switched off now: a checkpointed block's first run, which will read x again.
  if (!at::GradMode::is_enabled() && x.requires_grad()) return "a tensor that requires grad, under no_grad";
  if (x.is_leaf() && x.requires_grad()) return "a leaf that requires grad";  // a parameter, under no_grad
  if (!x.has_storage()) return "a tensor without storage";
  if (!is_own_memory(x)) return "memory that neither PyTorch nor a pool allocated";
  size_t holders = 1;
  if (const auto* view = autograd::impl::get_view_autograd_meta(x); view && view->has_bw_view()) {
    if (view->get_backward_view().base_.use_count() > 1 + idle_base_handles)
      return "a view whose base is still referenced";
    ++holders;
  }
  if (x.use_count() > 1) return "a tensor that an operation saved for its backward";
  if (x.storage().use_count() > holders) return "memory that another tensor shares";
  return std::nullopt;
}

std::optional<std::string> saver_blocker(const Tensor& x) {
  if (!at::GradMode::is_enabled() || !x.requires_grad() || !x.has_storage() || !is_plain(x)) return std::nullopt;
  if (x.use_count() <= x.storage().use_count()) return std::nullopt;
  return "a tensor that an operation saved for its backward";
}

void check_inplace(std::string_view op, const Tensor& x, const std::optional<std::string>& blocker) {
  TORCH_CHECK(!blocker, op, ": expected, in place, a tensor that nothing else needs, got ", describe(x), ", ", *blocker,
              "; use inplace=False or inplace='auto', or pass a clone");
}

bool is_plain(const Tensor& x) { return !at::isTensorSubclassLike(x); }

bool is_sole_owner(const Tensor& x, size_t idle_handles) {
  if (x.use_count() != 1 + idle_handles || !x.has_storage()) return false;
  // A view, as Linear's backward makes of more than two dimensions, has its base to itself if it alone holds it.
  const bool is_view = x.is_view();
  if (is_view && x._base().use_count() != 1) return false;
  return x.storage().use_count() == size_t(is_view ? 2 : 1) && x.is_non_overlapping_and_dense() && is_plain(x) &&
         is_own_memory(x);
}

}  // namespace memkit
