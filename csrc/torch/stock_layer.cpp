// Linear layers and convolutions as PyTorch leaves them in the graph.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "linear_scale.h"

namespace memkit {
namespace {

namespace autograd = torch::autograd;
using at::Tensor;
using autograd::Edge;
using autograd::Node;
using autograd::SavedVariable;
using autograd::variable_list;
using autograd::generated::AddmmBackward0;
using autograd::generated::ConvolutionBackward0;
using autograd::generated::MmBackward0;
using autograd::generated::ToCopyBackward0;

bool all_valid(const Node& node, size_t first, size_t count) {
  const auto begin = node.next_edges().begin() + first;
  return std::all_of(begin, begin + count, [](const Edge& edge) { return edge.is_valid(); });
}

// A bias, if it is a parameter, or one in another dtype.
Tensor parameter_of(const Node& layer, const Edge& edge) {
  if (!edge.is_valid()) return {};
  const Node* node = edge.function.get();
  if (dynamic_cast<const ToCopyBackward0*>(node)) node = node->next_edge(0).function.get();
  const auto* leaf = dynamic_cast<const autograd::AccumulateGrad*>(node);
  const bool fits = leaf && leaf->variable.dim() == 1 && leaf->variable.device() == layer.input_metadata(0).device();
  return fits ? leaf->variable : Tensor();
}

// Lets go of what it keeps: nobody asks it again.
void drop(SavedVariable& input, SavedVariable& weight, bool last) {
  if (!last || autograd::get_current_graph_task_keep_graph()) return;
  input = SavedVariable(), weight = SavedVariable();
}

struct Linear : ScalableLayer {
  Linear(Node& node, SavedVariable& input, SavedVariable& weight, bool has_bias, Tensor bias)
      : node(node), input(input), turned(weight), has_bias(has_bias), bias(std::move(bias)) {}

  bool is_conv() const override { return false; }
  std::optional<size_t> weight_edge() const override { return has_bias ? 2 : 1; }

  Tensor result_again() override {
    return has_bias ? at::addmm(bias, input.unpack(), turned.unpack()) : at::mm(input.unpack(), turned.unpack());
  }

  variable_list scaled_backward(const Tensor& grad, LinearScale& scale, bool last) override {
    const auto is_wanted = [&](size_t i) { return node.task_should_compute_output(i); };
    const size_t first = has_bias ? 1 : 0;
    variable_list found(first + 2);
    const Tensor w = turned.unpack().t();
    if (scale.wanted || is_wanted(first + 1)) {
      auto [of_weight, of_bias] = scale.of_layer(grad, input.unpack(), w, bias);
      found[first + 1] = of_weight.t();
      if (has_bias) found[0] = of_bias;
    } else if (has_bias && is_wanted(0)) {
      found[0] = scale.times(grad).sum(0);
    }
    drop(input, turned, last);
    if (is_wanted(first)) found[first] = at::mm(scale.times(grad).to(w.scalar_type()), w);
    return found;
  }

  Node& node;
  SavedVariable &input, &turned;
  bool has_bias;
  Tensor bias;
};

// A convolution with a kernel of one pixel, each for itself.
struct Conv : ScalableLayer {
  Conv(ConvolutionBackward0& node, Tensor bias) : node(node), bias(std::move(bias)) {}

  bool is_conv() const override { return true; }
  std::optional<size_t> weight_edge() const override { return 1; }

  Tensor result_again() override {
    const std::optional<Tensor> with = bias.defined() ? std::optional(bias) : std::nullopt;
    return at::convolution_symint(node.input_.unpack(), node.weight_.unpack(), with, node.stride, node.padding,
                                  node.dilation, node.transposed, node.output_padding, node.groups);
  }

  variable_list scaled_backward(const Tensor& grad, LinearScale& scale, bool last) override {
    const auto is_wanted = [&](size_t i) { return node.task_should_compute_output(i); };
    variable_list found(3);
    const Tensor w = node.weight_.unpack();
    Tensor input = node.input_.unpack();
    if (scale.wanted || is_wanted(1)) {
      const auto product = [&](const Tensor& g, const Tensor& x) {
        return std::get<1>(gradients(g, x, w, {false, true, false}));
      };
      std::tie(found[1], found[2]) = scale.of_layer(grad, input, w, bias, product);
    } else if (bias.defined() && is_wanted(2)) {
      found[2] = std::get<2>(gradients(scale.times(grad).to(w.scalar_type()), input, w, {false, false, true}));
    }
    if (!bias.defined()) found[2].reset();
    drop(node.input_, node.weight_, last);
    if (is_wanted(0))
      found[0] = std::get<0>(gradients(scale.times(grad).to(w.scalar_type()), input, w, {true, false, false}));
    return found;
  }

  std::tuple<Tensor, Tensor, Tensor> gradients(const Tensor& grad, const Tensor& input, const Tensor& w,
                                               std::array<bool, 3> wanted) const {
    return at::convolution_backward_symint(grad, input, w, c10::SymIntArrayRef{w.sym_size(0)}, node.stride,
                                           node.padding, node.dilation, node.transposed, node.output_padding,
                                           node.groups, wanted);
  }

  static bool is_pointwise(const ConvolutionBackward0& node) {
    const auto sizes = shape_of(node.next_edge(1));
    const auto all = [](const auto& numbers, int64_t value) {
      return std::all_of(numbers.begin(), numbers.end(), [&](const auto& each) { return each == value; });
    };
    return !node.transposed && node.groups == 1 && all(node.stride, 1) && all(node.padding, 0) &&
           all(c10::SymIntArrayRef(sizes).slice(2), 1);
  }

  ConvolutionBackward0& node;
  Tensor bias;
};

// Of the dtype that the layer computes in.
Tensor cast(const Tensor& bias, const Node& node) {
  return bias.defined() ? bias.to(c10::typeMetaToScalarType(node.input_metadata(0).dtype())) : bias;
}

}  // namespace

std::unique_ptr<ScalableLayer> stock_layer(Node& node, Tensor& bias) {
  if (auto* mm = dynamic_cast<MmBackward0*>(&node))
    return all_valid(node, 0, 2) ? std::make_unique<Linear>(node, mm->self_, mm->mat2_, false, Tensor()) : nullptr;
  if (auto* addmm = dynamic_cast<AddmmBackward0*>(&node)) {
    if (!bias.defined()) bias = parameter_of(node, node.next_edge(0));
    if (!all_valid(node, 0, 3) || !addmm->alpha.equal(1) || !addmm->beta.equal(1) || !bias.defined()) return nullptr;
    return std::make_unique<Linear>(node, addmm->mat1_, addmm->mat2_, true, cast(bias, node));
  }
  if (auto* conv = dynamic_cast<ConvolutionBackward0*>(&node)) {
    if (!bias.defined()) bias = parameter_of(node, node.next_edge(2));
    const auto& sizes = conv->bias_sym_sizes_opt.list;  // without a bias, of none or of a tensor of no elements
    const bool has_bias = sizes && sizes->size() == 1 && sizes->front() != 0;
    if (!all_valid(node, 0, 2) || !Conv::is_pointwise(*conv) || has_bias != bias.defined()) return nullptr;
    return std::make_unique<Conv>(*conv, cast(bias, node));
  }
  return nullptr;
}

}  // namespace memkit
