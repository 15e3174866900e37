#include "rebuild.h"

#include <ATen/ops/add.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>

#include "checks.h"
#include "joined.h"
#include "saved_node.h"

namespace memkit {

using at::Tensor;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::generated::AddBackward0;
using torch::autograd::generated::ToCopyBackward0;

namespace {

// What the edge's node made is memkit's, and can be made again. Changed in place since it was made, it may have been another
// tensor when it was used.
const SavedNode* source_of(const Edge& edge) {
  const auto* source = edge.is_valid() ? dynamic_cast<const SavedNode*>(edge.function.get()) : nullptr;
  return source && can_rebuild(*source, edge.input_nr) && source->is_result_unchanged() ? source : nullptr;
}

// Of another dtype, on the same device.
bool is_cast(const Node& node) {
  if (!dynamic_cast<const ToCopyBackward0*>(&node) || node.num_outputs() != 1) return false;
  const Edge& edge = node.next_edge(0);
  const auto* source = source_of(edge);
  return source && source->input_metadata(edge.input_nr).device() == node.input_metadata(0).device();
}

}  // namespace

bool can_rebuild(const Node& node, uint32_t output) {
  if (const auto* own = dynamic_cast<const SavedNode*>(&node))
    return own->can_rebuild(output) && rebuild_depth(node) <= kRebuildDepth;
  if (is_cast(node)) return rebuild_depth(node) <= kRebuildDepth;
  const auto* add = dynamic_cast<const AddBackward0*>(&node);
  if (!add || !add->alpha.equal(1) || add->num_outputs() != 2) return false;
  const auto& sum = node.input_metadata(0);
  for (const Edge& edge : add->next_edges()) {
    const auto* source = source_of(edge);
    if (!source) return false;
    const auto& summand = source->input_metadata(edge.input_nr);
    if (summand.shape_as_dim_vector() != sum.shape_as_dim_vector() || summand.dtype() != sum.dtype()) return false;
  }
  return rebuild_depth(node) <= kRebuildDepth;
}

int rebuild_depth(const Node& node) {
  const auto* own = dynamic_cast<const SavedNode*>(&node);
  if (own && own->depth) return own->depth;
  int deepest = 0;
  for (const Edge& edge : node.next_edges())
    if (edge.is_valid() && (can_rebuild(*edge.function, edge.input_nr) || is_joined(*edge.function, edge.input_nr)))
      deepest = std::max(deepest, rebuild_depth(*edge.function));
  if (own) own->depth = deepest + 1;
  return deepest + 1;
}

Tensor rebuild(Node& node) {
  if (auto* own = dynamic_cast<SavedNode*>(&node)) return own->rebuild();
  const Tensor first = rebuild(*node.next_edge(0).function);
  if (node.num_outputs() == 1) return first.to(c10::typeMetaToScalarType(node.input_metadata(0).dtype()));
  const Tensor second = rebuild(*node.next_edge(1).function);
  return is_sole_owner(first) && first.strides() == second.strides() ? first.add_(second) : first + second;
}

}  // namespace memkit
