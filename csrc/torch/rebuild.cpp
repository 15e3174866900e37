#include "rebuild.h"

#include <ATen/ops/add.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>

#include "cheap_nodes.h"
#include "checks.h"
#include "joined.h"
#include "node_kind.h"
#include "parameters.h"
#include "saved_node.h"

namespace memkit {

using at::Tensor;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::generated::AddBackward0;

namespace {

// Of PyTorch's operators: smaller results are not worth the time.
constexpr int64_t kLeastElements = 1 << 14;

// Of another dtype, on the same device.
bool is_cast(const Node& node) {
  if (node.num_outputs() != 1) return false;
  const Edge& edge = node.next_edge(0);
  const auto* source = source_of(edge);
  return source && source->input_metadata(edge.input_nr).device() == node.input_metadata(0).device();
}

bool is_sum(const AddBackward0& add) {
  if (!add.alpha.equal(1) || add.num_outputs() != 2) return false;
  const auto& sum = add.input_metadata(0);
  for (const Edge& edge : add.next_edges()) {
    const auto* source = source_of(edge);
    if (!source) return false;
    const auto& summand = source->input_metadata(edge.input_nr);
    if (summand.shape_as_dim_vector() != sum.shape_as_dim_vector() || summand.dtype() != sum.dtype()) return false;
  }
  return true;
}

// What other hooks took may run an engine that frees parameters, or a checkpoint in one of its layers.
bool is_safe(const SavedNode& own, uint32_t output) {
  return own.can_rebuild(output) && (!copies_parameters || own.made_in_lean());
}

bool can_run_again(const Node& node, uint32_t output) {
  switch (kind_of(node)) {
    case NodeKind::own: return is_safe(static_cast<const SavedNode&>(node), output);
    case NodeKind::cast: return is_cast(node);
    case NodeKind::add: return is_sum(static_cast<const AddBackward0&>(node));
    case NodeKind::product: return has_factors(node);
    case NodeKind::of_kept: return true;
    default: return false;
  }
}

// As rebuild_depth, looking at no more nodes of PyTorch's, one before the other, than that.
int depth_within(const Node& node, int nodes) {
  const auto* own = is_kind(&node, NodeKind::own) ? static_cast<const SavedNode*>(&node) : nullptr;
  if (own && own->depth) return own->depth;
  if (!own && nodes == 0) return kRebuildDepth + 1;
  int deepest = 0;
  for (const Edge& each : node.next_edges()) {
    const Edge& edge = behind_views(each);
    if (!edge.is_valid()) continue;
    const bool again = can_run_again(*edge.function, edge.input_nr);
    if (!again && !is_joined(*edge.function, edge.input_nr)) continue;
    const int depth = depth_within(*edge.function, own ? kRebuildDepth : nodes - 1);
    // What takes too many is kept. Of PyTorch's nodes, which have no place to note it, nobody knows.
    const bool is_kept = again && depth > kRebuildDepth && (own || is_kind(edge.function.get(), NodeKind::own));
    if (!is_kept) deepest = std::max(deepest, depth);
  }
  if (own) own->depth = deepest + 1;
  return deepest + 1;
}

}  // namespace

bool can_rebuild(const Tensor& made, bool asks_again) {
  const NodePtr& node = made.grad_fn();
  if (!node || made._version() != 0) return false;
  if (is_rebuilt_by_stock(*node)) {
    if (!asks_again || made.numel() < kLeastElements || !is_plain(made) || !gives_twice(*node)) return false;
    // It has no place for copies. What is as large is itself a weight, which other graphs may step before this one's end.
    if (takes_parameter(*node, copies_parameters ? 0 : made.numel())) return false;
  }
  return can_rebuild(*node, made.output_nr());
}

bool is_rebuilt_by_stock(const Node& node) {
  return is_kind(&node, NodeKind::product) || is_kind(&node, NodeKind::of_kept);
}

bool can_rebuild(const Node& node, uint32_t output) {
  return can_run_again(node, output) && rebuild_depth(node) <= kRebuildDepth;
}

const SavedNode* source_of(const Edge& edge) {
  if (!is_kind(edge.function.get(), NodeKind::own)) return nullptr;
  const auto& source = static_cast<const SavedNode&>(*edge.function);
  return can_rebuild(source, edge.input_nr) && source.is_result_unchanged() ? &source : nullptr;
}

int rebuild_depth(const Node& node) { return depth_within(node, kRebuildDepth); }

Tensor rebuild(Node& node) {
  if (is_kind(&node, NodeKind::own)) return static_cast<SavedNode&>(node).rebuild();
  if (is_rebuilt_by_stock(node)) return cheap_result(node);
  const Tensor first = rebuild(*node.next_edge(0).function);
  if (node.num_outputs() == 1) return first.to(c10::typeMetaToScalarType(node.input_metadata(0).dtype()));
  const Tensor second = rebuild(*node.next_edge(1).function);
  return is_sole_owner(first) && first.strides() == second.strides() ? first.add_(second) : first + second;
}

}  // namespace memkit
