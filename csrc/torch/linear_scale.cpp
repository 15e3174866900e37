// What a layer made, times few numbers: its result is not kept for their gradient.
#include "linear_scale.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
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

// In which the parts of a gradient are put together.
at::ScalarType exact(at::ScalarType dtype) { return at::promote_types(dtype, at::kFloat); }

// One for each slice of x along a dimension.
Tensor spread_along(const Tensor& numbers, const Tensor& x, int64_t dim) {
  c10::DimVector sizes(x.dim(), 1);
  sizes[dim] = numbers.numel();
  return numbers.reshape(sizes);
}

// Of each feature: of blocks of rows or of an image, and then of these in float64.
Tensor sums(const Tensor& x) {
  constexpr int64_t block = 64;
  const at::ScalarType dtype = exact(x.scalar_type());
  if (x.dim() > 2) return x.flatten(2).sum(2, false, dtype).sum(0, false, at::kDouble);
  const int64_t whole = x.size(0) / block * block;
  Tensor found = x.narrow(0, whole, x.size(0) - whole).sum(0, false, dtype).to(at::kDouble);
  return found.add_(x.narrow(0, 0, whole).unflatten(0, {-1, block}).sum(1, false, dtype).sum(0, false, at::kDouble));
}

// Of the gradient, weighted by the squares of the input's rows: so the products that are added up are the smallest.
Tensor mean_of(const Tensor& g, const Tensor& x, at::ScalarType dtype) {
  const Tensor squares = at::linalg_vector_norm(x, 2, 1, false, dtype).square_();
  const Tensor sum = x.dim() > 2 ? (g * squares.unsqueeze(1)).transpose(0, 1).flatten(1).sum(1)
                                 : at::mv(g.t(), squares.to(g.scalar_type()));
  const Tensor mean = sum.to(dtype).div_(squares.sum());
  return mean.masked_fill_(mean.isfinite().logical_not_(), 0);
}

template <class T>
void finish_rows(const Tensor& made, const Tensor& w, const Tensor& mean, const Tensor& inputs, const Tensor& by,
                 const Tensor& found) {
  constexpr int64_t lanes = 16;
  const int64_t count = made.size(1);
  T* const products = made.data_ptr<T>();
  const T *weights = w.const_data_ptr<T>(), *means = mean.const_data_ptr<T>(), *sums = inputs.const_data_ptr<T>(),
          *scales = by.const_data_ptr<T>();
  double* const results = found.data_ptr<double>();
  at::parallel_for(0, made.size(0), std::max<int64_t>(1, 8192 / count), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* const p = products + row * count;
      const T *const each = weights + row * count, m = means[row], s = scales[row];
      double total = 0;
      for (int64_t first = 0; first < count; first += lanes * lanes) {
        const int64_t last = std::min(count, first + lanes * lanes);
        T part[lanes] = {};
        int64_t k = first;
        for (; k + lanes <= last; k += lanes)
          for (int64_t lane = 0; lane < lanes; ++lane) {
            part[lane] += p[k + lane] * each[k + lane];
            p[k + lane] = s * (p[k + lane] + m * sums[k + lane]);
          }
        for (; k < last; ++k) {
          part[0] += p[k] * each[k];
          p[k] = s * (p[k] + m * sums[k]);
        }
        for (const T lane : part) total += lane;
      }
      results[row] = total;
    }
  });
}

// Σ made ∘ w of each row, and by ∘ (made + mean ⊗ inputs) in the place of made.
Tensor finish(Tensor& made, const Tensor& w, const Tensor& mean, const Tensor& inputs, const Tensor& by) {
  const auto fits = [&](const Tensor& x) { return x.is_contiguous() && x.scalar_type() == made.scalar_type(); };
  if (made.is_cpu() && made.numel() && fits(made) && fits(w) && fits(mean) && fits(inputs) && fits(by)) {
    Tensor found = at::empty({made.size(0)}, made.options().dtype(at::kDouble));
    if (made.scalar_type() == at::kFloat) finish_rows<float>(made, w, mean, inputs, by, found);
    if (made.scalar_type() == at::kDouble) finish_rows<double>(made, w, mean, inputs, by, found);
    return found;
  }
  const Tensor found = (made * w).sum(1).to(at::kDouble);
  made.addr_(mean, inputs).mul_(spread_along(by, made, 0));
  return found;
}

}  // namespace

std::pair<Tensor, Tensor> LinearScale::of_layer(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                const Tensor& bias, const Product& product) {
  const int64_t groups = scale.size(0), rows = grad.size(0) / groups;
  const at::ScalarType dtype = weight.scalar_type(), wide = exact(dtype);
  const auto part = [&](const Tensor& x, int64_t i) { return groups == 1 ? x : x.narrow(0, i * rows, rows); };
  const Tensor w = weight.flatten(1);
  Tensor of_weight, of_bias;
  std::vector<Tensor> of_scale;
  for (int64_t i = 0; i < groups; ++i) {
    const Tensor g = part(grad, i), x = part(input, i), by = scale[i], mean = mean_of(g, x, wide);
    const Tensor apart = (g - spread_along(mean, g, 1)).to(dtype),
                 inputs = x.dim() > 2 ? sums(x) : x.sum(0, false, wide);
    Tensor made = product(apart, x).flatten(1).to(wide);
    Tensor found = finish(made, w, mean, inputs.to(wide), by.to(wide));
    if (wanted) {
      if (bias.defined()) found.add_(sums(apart).mul_(bias));
      of_scale.push_back(found.add_(mean * results[i]));
    }
    of_weight = of_weight.defined() ? of_weight.add_(made) : made;
    const Tensor sum = sums(g) * by;
    of_bias = of_bias.defined() ? of_bias.add_(sum) : sum;
  }
  if (wanted) gradient = at::stack(of_scale).to(scale.scalar_type());
  return {of_weight.to(dtype).view(weight.sizes()), of_bias.to(dtype)};
}

std::pair<Tensor, Tensor> LinearScale::of_layer(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                const Tensor& bias) {
  return of_layer(grad, input, weight, bias, [](const Tensor& g, const Tensor& x) { return at::mm(g.t(), x); });
}

Tensor LinearScale::times(const Tensor& grad) const {
  const Tensor made = scale.size(0) == 1 ? grad * spread_along(scale, grad, 1)
                                         : grad.reshape({scale.size(0), -1, grad.size(1)}) * scale.unsqueeze(1);
  return made.reshape(grad.sizes());
}

namespace {

using autograd::Edge;
using autograd::Node;
using namespace autograd::generated;

// Smaller ones are not worth the time.
constexpr int64_t kLeastScaled = 1 << 16, kLeastRows = 64;
// To sum up the layer's input takes this share of a product with it.
constexpr int64_t kLeastWidth = 96;
// The weight's gradient is added up of those of so many groups at most, each of which is some 15 operators: on a GPU, launches.
int64_t most_groups(const Tensor& y) { return y.is_cpu() ? 128 : 4; }

template <class... N>
bool is_one_of(const Node& node) {
  return (dynamic_cast<const N*>(&node) || ...);
}

// Whether its result has the elements of its input in the same memory.
bool is_view(const Node& node) {
  return is_one_of<ViewBackward0, UnsafeViewBackward0, ReshapeAliasBackward0, PermuteBackward0, TransposeBackward0,
                   TBackward0, UnsqueezeBackward0, SqueezeBackward0, SqueezeBackward1, AliasBackward0>(node);
}

// How the features that a layer made lie in a view of its result: for each, its row or its channel.
class Features {
 public:
  // Nothing where the view is not of all that it made.
  static std::optional<Features> of(const Tensor& y, bool is_conv) {
    const Tensor base = y.is_view() ? Tensor(y._base()) : y;
    Features found;
    found.sizes_ = y.sizes(), found.order_.resize(y.dim());
    std::iota(found.order_.begin(), found.order_.end(), 0);
    if (is_conv) {
      found.is_conv_ = true;
      std::rotate(found.order_.begin() + 1, found.order_.begin() + 2, found.order_.end());
      return base.is_same(y) && y.dim() > 2 ? std::optional(found) : std::nullopt;
    }
    const auto step = [&](int64_t d) { return y.size(d) == 1 ? INT64_MAX : y.stride(d); };
    std::stable_sort(found.order_.begin(), found.order_.end(), [&](int64_t a, int64_t b) { return step(a) > step(b); });
    const Tensor ordered = y.permute(found.order_);
    const bool is_all = base.is_contiguous() && base.numel() == y.numel() && ordered.is_contiguous();
    if (!is_all || base.size(-1) < 2 || ordered.size(-1) != base.size(-1)) return std::nullopt;
    return found;
  }

  int64_t width() const { return sizes_[order_.back()]; }

  // As the layer made it: rows, or images.
  Tensor made(const Tensor& x) const { return is_conv_ ? x : x.permute(order_).reshape({-1, x.size(order_.back())}); }

  // [groups, features]
  Tensor sums_of(const Tensor& y, int64_t groups) const {
    std::vector<Tensor> found;
    const Tensor all = made(y);
    if (groups == 1) return sums(all).unsqueeze(0);
    for (const Tensor& each : all.unflatten(0, {groups, -1}).unbind()) found.push_back(sums(each));
    return at::stack(found);
  }

  // As y was.
  Tensor back(const Tensor& made) const {
    if (is_conv_) return made;
    c10::DimVector sizes;
    for (const int64_t d : order_) sizes.push_back(sizes_[d]);
    return in_place_of_order(made.reshape(sizes));
  }

  // For how many of the dimensions, in order, few numbers have values of their own.
  int64_t depth(const Tensor& few) const {
    const int64_t fewer = int64_t(sizes_.size()) - few.dim();
    int64_t found = 0;
    for (int64_t d = 0; d + 1 < int64_t(order_.size()); ++d)
      if (order_[d] >= fewer && few.size(order_[d] - fewer) != 1) found = d + 1;
    return found;
  }

  int64_t count(int64_t depth) const {
    int64_t found = 1;
    for (int64_t d = 0; d < depth; ++d) found *= sizes_[order_[d]];
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

  bool is_conv_ = false;
  c10::DimVector sizes_, order_;  // the features last
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

// The layer that a node ends in: memkit's own, or PyTorch's, which is described anew for each use.
struct Layer {
  explicit Layer(Node& node, Tensor bias = {}) : bias(std::move(bias)), own(dynamic_cast<ScalableLayer*>(&node)) {
    if (!own) stock = stock_layer(node, this->bias);
  }

  ScalableLayer* get() const { return own ? own : stock.get(); }
  ScalableLayer* operator->() const { return get(); }

  Tensor bias;  // of PyTorch's
  ScalableLayer* own;
  std::unique_ptr<ScalableLayer> stock;
};

// Its first edges are y, which waits for it although it is given nothing mostly, and the numbers; then those of the layer,
// whose work it does. Where somebody wants to see y's gradient, y is made again, and the layer does its own work.
struct LinearScaleBackward : SavedNode {
  std::optional<Features> place;
  c10::DimVector scale_sizes;

  // Saved: the numbers, the bias where the layer is PyTorch's, the sums of y.
  std::string name() const override { return "memkit::linear_scale_backward"; }

 protected:
  autograd::variable_list backward(autograd::variable_list&& grads) override {
    autograd::variable_list found(num_outputs());
    if (!grads[0].defined()) return found;
    const Tensor grad = std::move(grads[0]), scale = unpack(0);
    const bool is_wanted = task_should_compute_output(1);
    const Layer layer(made_by(), is_wanted ? unpack(1) : Tensor());  // else it may have changed
    if (at::GradMode::is_enabled() || !is_unseen(grad) || needs_stock(grad) || is_asked_for()) {
      if (is_wanted) found[1] = at::sum_to(grad * place->back(layer->result_again()), scale_sizes);
      found[0] = grad * scale;
      return found;
    }
    LinearScale numbers{place->groups(scale), is_wanted, is_wanted ? unpack(2) : Tensor(), {}};
    auto of_layer = layer->scaled_backward(place->made(grad), numbers, is_alone());
    if (numbers.wanted) found[1] = place->few(numbers.gradient, scale_sizes, place->depth(scale));
    std::move(of_layer.begin(), of_layer.end(), found.begin() + 2);
    return found;
  }

 private:
  Node& made_by() const {
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

// Whether both are such that one node may stand for the product.
bool may_fit(const Tensor& y, const Tensor& scale) {
  if (!at::GradMode::is_enabled() || !y.requires_grad() || !scale.requires_grad() || y.is_leaf() || y.dim() < 1 ||
      int64_t(bytes_of(y)) < kLeastScaled || y._version() != 0)
    return false;
  const auto is_ordinary = [](const Tensor& x) {
    return x.layout() == at::kStrided && x.is_floating_point() && is_unseen(x) && !needs_stock(x);
  };
  // In float16, products without the scale might overflow. Of wider numbers stock's gradient is more exact.
  const bool same = y.scalar_type() == scale.scalar_type();
  const bool fits = y.scalar_type() == at::kBFloat16 ? same || scale.scalar_type() == at::kFloat : same;
  return fits && y.scalar_type() != at::kHalf && (y.is_cpu() || y.is_cuda()) && scale.device() == y.device() &&
         is_ordinary(y) && is_ordinary(scale) && at::is_expandable_to(scale.sizes(), y.sizes());
}

OptionalTensor linear_scale(const Tensor& first, const Tensor& second) {
  const bool swapped = first.numel() < second.numel();
  const Tensor &y = swapped ? second : first, &scale = swapped ? first : second;
  if (!may_fit(y, scale)) return std::nullopt;
  // Who has hooks may need to see the gradient before the layer has its weight.
  Node* node = y.grad_fn().get();
  while (is_view(*node) && !has_hooks(*node) && node->next_edge(0).is_valid()) node = node->next_edge(0).function.get();
  if (has_hooks(*node) || !lean_packed(*node)) return std::nullopt;
  const Layer layer(*node);
  const auto edge = layer.get() ? layer->weight_edge() : std::nullopt;
  const auto place = edge ? Features::of(y, layer->is_conv()) : std::nullopt;
  if (!place) return std::nullopt;
  const int64_t groups = place->count(place->depth(scale));
  // A group's gradient of the weight takes as long to read as so many rows. Of images there is one group.
  const bool is_small = 4 * y.numel() < groups * c10::multiply_integers(shape_of(node->next_edge(*edge))) ||
                        y.numel() < groups * place->width() * kLeastRows;
  if (is_small || place->width() < kLeastWidth || groups > (layer->is_conv() ? 1 : most_groups(y))) return std::nullopt;
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
  made->save(scale), made->save(layer.bias), made->save(place->sums_of(y.detach(), groups));
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
