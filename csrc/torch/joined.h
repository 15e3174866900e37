// Concatenations inside lean(): dropped where what they join is kept by others, or can be made again.
//
// DenseNet joins the results of all layers before each layer, a U-Net what its first half has kept, a block with branches
// their activations: without this each of them is kept twice or more often.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "node.h"

namespace memkit {

// A tensor that autograd keeps as it is, by itself or by what the saved-tensor hooks around made of it. Destroyed under the
// GIL, as capsules are.
struct Original {
  // Raises where it was changed since and no hooks took it.
  at::Tensor unpack() const;
  bool is_unchanged() const { return counter.current_version() == version; }

  at::Tensor value;  // without its graph, or
  pybind11::object packed, give_back;
  c10::VariableVersion counter;
  uint32_t version;
};

// Something of what is joined.
struct Part {
  at::Tensor made_again() const;

  NodePtr node;                          // makes it again, or
  std::shared_ptr<const Original> kept;  // holds it: as a whole, or between these places of a dimension
  int64_t dim = -1, start = 0, length = 0;
};

struct Joined {
  explicit Joined(int64_t dim) : dim(dim) {}

  // The last one of all that was made stays until the next is, as several consumers ask for it one after the other.
  at::Tensor made_again() const;

  std::vector<Part> parts;
  int64_t dim;
  std::shared_ptr<at::Tensor> held = std::make_shared<at::Tensor>();
};

using Keep = std::function<std::shared_ptr<const Original>(const at::Tensor&)>;

// Where x is a concatenation: what it is made of, if by far the most of that is kept anyway or can be made again; what is
// neither is copied, and kept by `keep`. nullptr: x has to be kept.
std::shared_ptr<const Joined> joined_of(const at::Tensor& x, const Keep& keep);

// From now on a concatenation with x may count on this.
void note_kept(const at::Tensor& x, const std::shared_ptr<const Original>& kept);

}  // namespace memkit
