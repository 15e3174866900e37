// What a linear layer made, times few numbers: its result is not kept for their gradient.
#include "linear_scale.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>

#include "checks.h"
#include "eager.h"
#include "named_ops.h"
#include "optional.h"
#include "saved_node.h"
#include "transforms.h"

namespace memkit {

namespace autograd = torch::autograd;
using at::Tensor;

namespace {

// In which many of a dtype are added.
at::ScalarType wider(at::ScalarType dtype) { return dtype == at::kBFloat16 ? at::kFloat : dtype; }

}  // namespace

std::pair<Tensor, Tensor> LinearScale::of_layer(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                const Tensor& bias) {
  const int64_t groups = scale.size(0), rows = grad.size(0) / groups;
  const at::ScalarType wide = wider(grad.scalar_type());
  Tensor of_weight, of_bias;
  std::vector<Tensor> of_scale;
  for (int64_t i = 0; i < groups; ++i) {
    const Tensor g = grad.narrow(0, i * rows, rows), by = scale[i];
    Tensor product = at::mm(g.t(), input.narrow(0, i * rows, rows));
    Tensor sum = g.sum(0, false, wide);
    if (wanted) {
      Tensor found = (product * weight).sum(1, false, wide);
      of_scale.push_back(bias.defined() ? found.add_(sum * bias) : found);
    }
    product.mul_(by.unsqueeze(1)), sum.mul_(by);
    of_weight = of_weight.defined() ? of_weight.add_(product) : product;
    of_bias = of_bias.defined() ? of_bias.add_(sum) : sum;
  }
  if (wanted) gradient = at::stack(of_scale).to(scale.scalar_type());
  return {of_weight, of_bias.to(grad.scalar_type())};
}

Tensor LinearScale::times(const Tensor& grad) const {
  return (grad.view({scale.size(0), -1, grad.size(1)}) * scale.unsqueeze(1)).to(grad.scalar_type()).view(grad.sizes());
}

namespace {

using autograd::Edge;
using autograd::Node;
using namespace autograd::generated;

// Smaller ones are not worth the time.
constexpr int64_t kLeastScaled = 1 << 16;

template <class... N>
bool is_one_of(const Node& node) {
  return (dynamic_cast<const N*>(&node) || ...);
}

// Whether its result has the elements of its input in the same memory.
bool is_view(const Node& node) {
  return is_one_of<ViewBackward0, UnsafeViewBackward0, ReshapeAliasBackward0, PermuteBackward0, TransposeBackward0,
                   TBackward0, UnsqueezeBackward0, SqueezeBackward0, SqueezeBackward1, AliasBackward0>(node);
}

// What torch.nn.functional.linear leaves in the graph.
class StockLinear {
 public:
  explicit StockLinear(Node& node)
      : node_(&node), addmm_(dynamic_cast<AddmmBackward0*>(&node)), mm_(dynamic_cast<MmBackward0*>(&node)) {}

  // With all that backward needs of it.
  bool is_linear() const {
    if (!addmm_ && !mm_) return false;
    const auto& edges = node_->next_edges();
    if (!std::all_of(edges.begin(), edges.end(), [](const Edge& e) { return e.is_valid(); })) return false;
    return mm_ || (addmm_->alpha.equal(1) && addmm_->beta.equal(1) && bias().defined());
  }

  Tensor input() const { return (addmm_ ? addmm_->mat1_ : mm_->self_).unpack(); }
  Tensor weight() const { return (addmm_ ? addmm_->mat2_ : mm_->mat2_).unpack().t(); }

  // The parameter, or undefined: of the dtype that it has, and where another is computed in, before the cast.
  Tensor bias() const {
    if (!addmm_) return {};
    const Node* node = node_->next_edge(0).function.get();
    if (is_one_of<ToCopyBackward0>(*node)) node = node->next_edge(0).function.get();
    const auto* leaf = dynamic_cast<const autograd::AccumulateGrad*>(node);
    return leaf && leaf->variable.dim() == 1 ? leaf->variable : Tensor();
  }

  Tensor result_again(const Tensor& bias) const {
    return bias.defined() ? at::addmm(bias, input(), weight().t()) : at::mm(input(), weight().t());
  }

  autograd::variable_list scaled_backward(const Tensor& grad, const Tensor& bias, LinearScale& scale,
                                          const std::function<bool(size_t)>& is_wanted) const {
    const size_t first = addmm_ ? 1 : 0;
    autograd::variable_list found(first + 2);
    const Tensor w = weight();
    if (scale.wanted || is_wanted(first + 1)) {
      auto [of_weight, of_bias] = scale.of_layer(grad, input(), w, bias);
      found[first + 1] = of_weight.t();
      if (addmm_) found[0] = of_bias;
    } else if (addmm_ && is_wanted(0)) {
      found[0] = scale.times(grad).sum(0);
    }
    if (is_wanted(first)) found[first] = at::mm(scale.times(grad), w);
    return found;
  }

  // Nobody asks it again.
  void let_go() const {
    (addmm_ ? addmm_->mat1_ : mm_->self_) = autograd::SavedVariable();
    (addmm_ ? addmm_->mat2_ : mm_->mat2_) = autograd::SavedVariable();
  }

 private:
  Node* node_;
  AddmmBackward0* addmm_;
  MmBackward0* mm_;
};

// How the rows of features that the layer made lie in a view of them.
class Rows {
 public:
  // Nothing where it is not all of them.
  static std::optional<Rows> of(const Tensor& y) {
    const Tensor base = y.is_view() ? Tensor(y._base()) : y;
    const int64_t features = base.size(-1);
    Rows found;
    found.sizes_ = y.sizes(), found.order_.resize(y.dim());
    std::iota(found.order_.begin(), found.order_.end(), 0);
    const auto step = [&](int64_t d) { return y.size(d) == 1 ? INT64_MAX : y.stride(d); };
    std::stable_sort(found.order_.begin(), found.order_.end(), [&](int64_t a, int64_t b) { return step(a) > step(b); });
    const Tensor ordered = y.permute(found.order_);
    const bool is_all = base.is_contiguous() && base.numel() == y.numel() && ordered.is_contiguous();
    if (!is_all || features < 2 || ordered.size(-1) != features) return std::nullopt;
    return found;
  }

  Tensor rows(const Tensor& x) const { return x.permute(order_).reshape({-1, x.size(order_.back())}); }

  // As y was.
  Tensor back(const Tensor& rows) const {
    c10::DimVector sizes;
    for (const int64_t d : order_) sizes.push_back(sizes_[d]);
    return in_place_of_order(rows.reshape(sizes));
  }

  // For how many of the dimensions, in order, few numbers have values of their own.
  int64_t depth(const Tensor& few) const {
    const Tensor ordered = few.expand(sizes_).permute(order_);
    int64_t found = 0;
    for (int64_t d = 0; d + 1 < ordered.dim(); ++d)
      if (ordered.size(d) > 1 && ordered.stride(d) != 0) found = d + 1;
    return found;
  }

  Tensor groups(const Tensor& few) const {
    Tensor ordered = few.expand(sizes_).permute(order_);
    for (int64_t d = depth(few); d + 1 < ordered.dim(); ++d) ordered = ordered.narrow(d, 0, 1);
    return ordered.reshape({-1, ordered.size(-1)});
  }

  // From [groups, features] to the shape of few.
  Tensor few(const Tensor& groups, at::IntArrayRef shape, int64_t depth) const {
    c10::DimVector sizes;
    for (int64_t d = 0; d < int64_t(order_.size()); ++d)
      sizes.push_back(d < depth || d + 1 == int64_t(order_.size()) ? sizes_[order_[d]] : 1);
    return at::sum_to(in_place_of_order(groups.reshape(sizes)), shape);
  }

 private:
  Tensor in_place_of_order(const Tensor& ordered) const {
    c10::DimVector inverse(order_.size());
    for (size_t d = 0; d < order_.size(); ++d) inverse[order_[d]] = int64_t(d);
    return ordered.permute(inverse);
  }

  c10::DimVector sizes_, order_;
};

bool has_hooks(Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty();
}

bool is_captured(Node& node) {
  const auto* asked = autograd::get_current_graph_task_exec_info();
  if (!asked) return false;
  const auto found = asked->find(&node);
  return found != asked->end() && found->second.captures_;
}

// Its first edges are y, which waits for it although it is given nothing mostly, and the numbers; then those of the layer,
// whose work it does. Where somebody wants to see y's gradient, y is made again, and the layer does its own work.
struct LinearScaleBackward : SavedNode {
  std::optional<Rows> place;
  c10::DimVector scale_sizes;

  // Saved: the numbers, the bias where the layer is PyTorch's.
  std::string name() const override { return "memkit::linear_scale_backward"; }

 protected:
  autograd::variable_list backward(autograd::variable_list&& grads) override {
    autograd::variable_list found(num_outputs());
    if (!grads[0].defined()) return found;
    const Tensor grad = std::move(grads[0]), scale = unpack(0), bias = unpack(1);
    auto* own = dynamic_cast<LinearNode*>(&layer());
    const StockLinear stock(layer());
    if (at::GradMode::is_enabled() || !is_unseen(grad) || needs_stock(grad) || is_asked_for()) {
      if (task_should_compute_output(1)) {
        const Tensor y = place->back(own ? own->result_again() : stock.result_again(cast(bias)));
        found[1] = at::sum_to(grad * y, scale_sizes);
      }
      found[0] = grad * scale;
      return found;
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    LinearScale rows{place->groups(scale), task_should_compute_output(1), {}};
    const Tensor of_rows = place->rows(grad).to(dtype());
    auto of_layer = own ? own->scaled_backward(of_rows, rows, is_alone())
                        : stock.scaled_backward(of_rows, cast(bias), rows,
                                                [&](size_t i) { return task_should_compute_output(2 + i); });
    if (rows.wanted) found[1] = place->few(rows.gradient, scale_sizes, place->depth(scale));
    std::move(of_layer.begin(), of_layer.end(), found.begin() + 2);
    if (!own && is_alone() && !autograd::get_current_graph_task_keep_graph()) stock.let_go();
    return found;
  }

 private:
  at::ScalarType dtype() const { return c10::typeMetaToScalarType(next_edge(0).function->input_metadata(0).dtype()); }
  Tensor cast(const Tensor& bias) const { return bias.defined() ? bias.to(dtype()) : bias; }

  Node& layer() const {
    Node* node = next_edge(0).function.get();
    while (is_view(*node)) node = node->next_edge(0).function.get();
    return *node;
  }

  template <class Found>
  bool any_between(const Found& found) const {
    for (const Edge* edge = &next_edge(0);; edge = &edge->function->next_edge(0)) {
      if (found(edge->function)) return true;
      if (!is_view(*edge->function)) return false;
    }
  }
  bool is_asked_for() const {
    return any_between([](const NodePtr& node) { return has_hooks(*node) || is_captured(*node); });
  }
  // Nobody else holds y or has it in a graph.
  bool is_alone() const {
    return !any_between([](const NodePtr& node) { return node.use_count() > 1; });
  }
};

OptionalTensor linear_scale(const Tensor& first, const Tensor& second) {
  const bool swapped = first.numel() < second.numel();
  const Tensor &y = swapped ? second : first, &scale = swapped ? first : second;
  const bool is_device = y.is_cpu() || y.is_cuda();
  const bool is_dtype =
      y.scalar_type() != at::kHalf && y.is_floating_point();  // products without the scale would overflow
  if (!is_device || !is_dtype || y.layout() != at::kStrided || int64_t(bytes_of(y)) < kLeastScaled ||
      !at::GradMode::is_enabled() || !y.requires_grad() || !scale.requires_grad() || y.is_leaf() || y._version() != 0)
    return std::nullopt;
  const bool fits = scale.device() == y.device() && scale.layout() == at::kStrided && scale.is_floating_point() &&
                    at::is_expandable_to(scale.sizes(), y.sizes()) && is_unseen(y) && is_unseen(scale) &&
                    !needs_stock(y, scale) && !y.is_neg() && !y.is_conj();
  if (!fits) return std::nullopt;
  Node* node = y.grad_fn().get();
  while (is_view(*node) && node->num_outputs() == 1 && node->next_edge(0).is_valid())
    node = node->next_edge(0).function.get();
  auto* own = dynamic_cast<LinearNode*>(node);
  const StockLinear stock(*node);
  if (own ? !own->is_linear() : !stock.is_linear()) return std::nullopt;
  const auto place = Rows::of(y);
  if (!place) return std::nullopt;
  const Tensor groups = place->groups(scale.detach());
  const int64_t features = groups.size(1), inner = (own ? own->weight() : stock.weight()).size(1);
  // A group's product with the input takes as long to read as so many rows.
  if (4 * y.numel() < groups.size(0) * inner * features) return std::nullopt;
  Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = at::mul(y, scale);
  }
  auto made = make_node<LinearScaleBackward>();
  autograd::edge_list edges = autograd::collect_next_edges(y, scale);
  edges.insert(edges.end(), node->next_edges().begin(), node->next_edges().end());
  made->set_next_edges(std::move(edges));
  made->place = place;
  made->scale_sizes = scale.sizes();
  autograd::set_history(out, made);
  made->save(scale), made->save(own ? Tensor() : stock.bias());
  return out;
}

OptionalTensor linear_scale_entry(const Tensor& first, const Tensor& second) {
  const pybind11::gil_scoped_release no_gil;
  return linear_scale(first, second);
}

constexpr char kLinearScale[] = "linear_scale";

}  // namespace

void bind_linear_scale(pybind11::module_& m) { eager::bind<linear_scale_entry, kLinearScale>(m); }

}  // namespace memkit
