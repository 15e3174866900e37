// What lean() can compute again: results of cheap operators, memkit's and PyTorch's, sums of two of memkit's, and casts.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace memkit {

struct SavedNode;

// A result is kept where rebuilding it would take more operators than this, one after the other: in a chain of residual
// sums, each of which needs the one before it, every second one is kept.
constexpr int kRebuildDepth = 3;

// Whether this result of the node can be made again, without more operators than that.
bool can_rebuild(const torch::autograd::Node& node, uint32_t output);

// What the edge's node made is memkit's, and can be made again; nullptr: not. Changed in place since it was made, it may have
// been another tensor when it was used.
const SavedNode* source_of(const torch::autograd::Edge& edge);

// How many operators run for it, one after the other; of PyTorch's, more than kRebuildDepth where that would take a longer
// way to find out.
int rebuild_depth(const torch::autograd::Node& node);

// The same of a tensor, changed by nobody; asks_again: whether the hooks that took what its node keeps may be asked for each
// of it twice, as for what PyTorch's nodes keep.
bool can_rebuild(const at::Tensor& made, bool asks_again);

// Whether the node is PyTorch's, and keeps what it needs for that for its own backward too.
bool is_rebuilt_by_stock(const torch::autograd::Node& node);

// Without autograd.
at::Tensor rebuild(torch::autograd::Node& node);

}  // namespace memkit
