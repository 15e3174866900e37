#include "lean.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include "saved_node.h"

namespace memkit {
namespace {

using at::Tensor;

// The node that made the tensor whole, and where in its result the tensor lies. The consumer's node has the producer
// among its edges anyway, so a recipe keeps nothing alive that would not be.
struct Recipe {
  NodePtr node;
  std::vector<int64_t> made;  // the result's own strides
  std::vector<int64_t> sizes, strides;
  int64_t offset;
};

std::optional<Recipe> pack(const Tensor& x) {
  if (!x.requires_grad() || x.is_leaf() || x.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return std::nullopt;
  const Tensor made = x.is_view() ? Tensor(x._base()) : x;
  const NodePtr& node = made.grad_fn();
  // Written to since it was made: the node would rebuild another tensor.
  if (!node || made._version() != 0) return std::nullopt;
  const auto* own = dynamic_cast<const SavedNode*>(node.get());
  if (!own || !own->can_rebuild(made.output_nr())) return std::nullopt;
  return Recipe{node, made.strides().vec(), x.sizes().vec(), x.strides().vec(), x.storage_offset()};
}

Tensor unpack(const Recipe& recipe) {
  const at::AutoGradMode off(false);
  Tensor made = dynamic_cast<SavedNode&>(*recipe.node).rebuild();
  // Hooks inside this one may have handed the node its input in another order of memory.
  if (made.strides() != recipe.made) made = at::empty_strided(made.sizes(), recipe.made, made.options()).copy_(made);
  if (made.sizes() == recipe.sizes && made.strides() == recipe.strides) return made;
  return made.as_strided(recipe.sizes, recipe.strides, recipe.offset);
}

}  // namespace

void bind_lean(pybind11::module_& m) {
  pybind11::class_<Recipe>(m, "Recipe", "How to compute a saved tensor again.");
  m.def("pack", pack);
  m.def("unpack", unpack, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace memkit
