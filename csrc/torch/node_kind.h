// What memkit knows of autograd nodes by their type.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstdint>

namespace memkit {

enum class NodeKind : uintptr_t {
  other,
  own,      // a SavedNode
  saver,    // of PyTorch, which keeps its result for backward
  add,      // AddBackward0
  cast,     // ToCopyBackward0
  cat,      // CatBackward0
  slices,   // CopySlices: a write to a view
  pad,      // ConstantPadNdBackward0, or another that pads
  product,  // MulBackward0, DivBackward0
  of_kept,  // of a function of one tensor: see cheap_nodes.h
  view,     // ViewBackward0, or another of the same memory
};

// Looked up once a type, of which there are a few in a program: autograd saves thousands of tensors a second.
NodeKind kind_of(const torch::autograd::Node& node);

// What made the memory.
const torch::autograd::Edge& behind_views(const torch::autograd::Edge& edge);

inline bool is_kind(const torch::autograd::Node* node, NodeKind kind) { return node && kind_of(*node) == kind; }

}  // namespace memkit
