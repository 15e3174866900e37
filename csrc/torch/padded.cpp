#include "padded.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/reflection_pad1d.h>
#include <ATen/ops/reflection_pad2d.h>
#include <ATen/ops/reflection_pad3d.h>
#include <ATen/ops/replication_pad1d.h>
#include <ATen/ops/replication_pad2d.h>
#include <ATen/ops/replication_pad3d.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "node_kind.h"
#include "rebuild.h"
#include "saved_node.h"

namespace memkit {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::generated::ConstantPadNdBackward0;

namespace {

using Paddings = std::vector<int64_t>;  // of the last dimension first: before it, behind it

std::optional<Paddings> plain(const std::vector<c10::SymInt>& pad) {
  Paddings found;
  for (const c10::SymInt& each : pad) {
    const auto size = each.maybe_as_int();
    if (!size || *size < 0) return std::nullopt;  // a negative one cuts off
    found.push_back(*size);
  }
  return found;
}

std::optional<Paddings> constant_of(const Node& node) {
  const auto* constant = dynamic_cast<const ConstantPadNdBackward0*>(&node);
  return constant ? plain(constant->pad) : std::nullopt;
}

template <class N>
std::optional<Paddings> sizes_of(const Node& node) {
  const auto* padding = dynamic_cast<const N*>(&node);
  return padding ? plain(padding->padding) : std::nullopt;
}

// By a function of PyTorch's that repeats elements of what is padded; calls `found` with that and the sizes.
template <class Found>
bool repeats(const Node& node, const Found& found) {
  using namespace torch::autograd::generated;
  const auto is = [&](const std::optional<Paddings>& sizes, const auto& function) {
    if (sizes) found(function, *sizes);
    return sizes.has_value();
  };
  return is(sizes_of<ReflectionPad1DBackward0>(node), [](auto&&... x) { return at::reflection_pad1d(x...); }) ||
         is(sizes_of<ReflectionPad2DBackward0>(node), [](auto&&... x) { return at::reflection_pad2d(x...); }) ||
         is(sizes_of<ReflectionPad3DBackward0>(node), [](auto&&... x) { return at::reflection_pad3d(x...); }) ||
         is(sizes_of<ReplicationPad1DBackward0>(node), [](auto&&... x) { return at::replication_pad1d(x...); }) ||
         is(sizes_of<ReplicationPad2DBackward0>(node), [](auto&&... x) { return at::replication_pad2d(x...); }) ||
         is(sizes_of<ReplicationPad3DBackward0>(node), [](auto&&... x) { return at::replication_pad3d(x...); });
}

Tensor filled_up(const Tensor& source, const Paddings& pad, const Tensor& fill) {
  if (!fill.defined()) return at::constant_pad_nd(source, pad, 0);  // of no element
  std::vector<int64_t> sizes = source.sizes().vec();
  for (size_t i = 0; i < pad.size(); ++i) sizes[sizes.size() - 1 - i / 2] += pad[i];
  Tensor made = fill.expand(sizes).clone(at::MemoryFormat::Contiguous), inner = made;
  for (size_t i = 0; i < pad.size(); i += 2) {
    const int64_t dim = source.dim() - 1 - int64_t(i) / 2;
    inner = inner.narrow(dim, pad[i], source.size(dim));
  }
  inner.copy_(source);  // without waiting for the device to know the number
  return made;
}

}  // namespace

bool pads_rebuildable(const Node& node) {
  if (!is_kind(&node, NodeKind::pad) || !source_of(node.next_edge(0))) return false;
  return constant_of(node) || repeats(node, [](const auto&, const Paddings&) {});
}

Tensor fill_of(const Node& node, const Tensor& made) {
  const auto pad = constant_of(node);
  const auto side =
      pad ? std::find_if(pad->begin(), pad->end(), [](int64_t size) { return size > 0; }) : Paddings::iterator();
  if (!pad || side == pad->end() || made.numel() == 0) return {};
  const int64_t i = side - pad->begin(), dim = made.dim() - 1 - i / 2;
  Tensor one = made.detach().narrow(dim, i % 2 ? made.size(dim) - 1 : 0, 1);
  for (int64_t other = 0; other < made.dim(); ++other) one = one.narrow(other, 0, 1);
  return one.clone();
}

Tensor pad_again(const Node& node, const Tensor& fill) {
  const Tensor source = rebuild(*node.next_edge(0).function);
  if (const auto pad = constant_of(node)) return filled_up(source, *pad, fill);
  Tensor made;
  repeats(node, [&](const auto& function, const Paddings& sizes) { made = function(source, sizes); });
  return made;
}

}  // namespace memkit
