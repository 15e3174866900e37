// Concatenations inside lean(): dropped where what they join is kept by others, or can be made again.
//
// DenseNet joins the results of all layers before each layer, a U-Net what its first half has kept, a block with branches
// their activations: without this each of them is kept twice or more often.
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "node.h"

namespace memkit {

// Of a tensor whose elements lie somewhere, of known sizes; 0 of others.
inline size_t bytes_of(const at::Tensor& x) {
  const bool is_known = x.layout() == at::kStrided && !x.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  return is_known ? x.nbytes() : 0;
}

// A tensor that autograd keeps as it is, by itself or by what the saved-tensor hooks around made of it; or that its node
// makes again. Destroyed under the GIL.
struct Original {
  explicit Original(const at::Tensor& x, at::Tensor value = {}, NodePtr node = {})
      : value(std::move(value)),
        node(std::move(node)),
        counter(torch::autograd::impl::version_counter(x)),
        version(uint32_t(x._version())),
        nbytes(bytes_of(x)) {}

  // Raises where it was changed since and no hooks took it.
  at::Tensor unpack() const;
  bool is_unchanged() const { return counter.current_version() == version; }

  at::Tensor value;  // without its graph; where hooks took it, if they keep it as it is
  NodePtr node;
  pybind11::object packed, give_back;
  c10::VariableVersion counter;
  uint32_t version;
  size_t nbytes;
  // Of the first node made after it was kept, and its thread.
  uint64_t sequence = at::sequence_number::peek(), thread = at::RecordFunction::currentThreadId();
};

// Raises where a tensor that was kept at one version is at another `now`, or its memory is gone.
void check_unchanged(const at::Tensor& kept, uint32_t version, uint32_t now);

// Something of what is joined.
struct Part {
  NodePtr node;                          // makes it again, or
  std::shared_ptr<const Original> kept;  // holds it: as a whole, or between these places of a dimension
  int64_t dim = -1, start = 0, length = 0;

  at::Tensor of(const at::Tensor& original) const;
};

struct Joined {
  explicit Joined(int64_t dim) : dim(dim) {}

  // The last one of all that was made stays until the next is, as several consumers ask for it one after the other.
  at::Tensor made_again() const;

  std::vector<Part> parts;
  int64_t dim;

 private:
  struct Held {
    at::Tensor made;
    int64_t version = 0;
  };
  std::shared_ptr<Held> held_ = std::make_shared<Held>();
};

// How a copy is kept: as it is, or by the hooks around.
struct Keeper {
  std::function<std::shared_ptr<const Original>(const at::Tensor&)> keep;
  pybind11::handle give_back;
};

// Where x is a concatenation: what it is made of, if by far the most of that is kept anyway or can be made again; what is
// neither is copied, and kept by the keeper. nullptr: x has to be kept.
std::shared_ptr<const Joined> joined_of(const at::Tensor& x, const Keeper& keeper);

// Whether this result of the node has been dropped so.
bool is_joined(const torch::autograd::Node& node, uint32_t output);

// By who concatenated: of which tensors. What is shared with other concatenations of this thread is then known by their
// versions, which else has to be compared number by number, on the CPU alone. For the concatenation that is kept next.
void note_joined(const at::Tensor& x, const std::vector<at::Tensor>& tensors);

// From now on a concatenation with x may count on this.
void note_kept(const at::Tensor& x, const std::shared_ptr<const Original>& kept);

}  // namespace memkit
