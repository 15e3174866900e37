#include "derivative.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <utility>

#include "checks.h"
#include "saved_node.h"
#include "transforms.h"

namespace memkit {
namespace {

namespace autograd = torch::autograd;
using Tensors = std::vector<at::Tensor>;

struct GradientBackward : SavedNode {
  Formula formula;
  std::optional<Remade> remade;
  size_t inputs = 0;
  bool zeros = false;

  std::string name() const override { return "memkit::gradient_backward"; }

 protected:
  autograd::variable_list backward(autograd::variable_list&& grads) override {
    const bool create_graph = at::GradMode::is_enabled();
    const at::AutoGradMode on(true);
    Tensors given;
    std::vector<bool> asked;
    for (size_t i = 0; i < inputs; ++i) given.push_back(unpack(i));
    if (remade) given[remade->place] = made_anew(*remade, given);
    for (size_t i = 0; i < inputs; ++i) {
      asked.push_back(given[i].defined() && task_should_compute_output(i));
      // Aliases: the gradient of each apart from that of others which it was made from.
      if (asked[i]) given[i] = create_graph ? at::alias(given[i]) : given[i].detach().requires_grad_();
    }
    Tensors found = gradients_of(formula(given, create_graph), grads, given, asked, create_graph);
    for (size_t i = 0; zeros && i < inputs; ++i)
      if (asked[i] && !found[i].defined()) found[i] = at::zeros_like(given[i]);
    return found;
  }
};

struct PassedBackward : autograd::Node {
  std::string name() const override { return "memkit::passed_backward"; }
  autograd::variable_list apply(autograd::variable_list&& grads) override { return std::move(grads); }
};

}  // namespace

Tensors gradients_of(Tensors results, const Tensors& arrived, const Tensors& inputs, const std::vector<bool>& asked,
                     bool create_graph) {
  autograd::edge_list from, to;
  Tensors given, found(inputs.size());
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined() || !results[i].requires_grad() || !arrived[i].defined()) continue;
    from.push_back(autograd::impl::gradient_edge(results[i]));
    given.push_back(arrived[i]);
  }
  std::vector<size_t> places;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!asked[i] || !inputs[i].defined() || !inputs[i].requires_grad()) continue;
    to.push_back(autograd::impl::gradient_edge(inputs[i]));
    places.push_back(i);
  }
  if (from.empty() || to.empty()) return found;
  results.clear();  // the graph goes on without their memory
  const Tensors slopes = autograd::Engine::get_default_engine().execute(from, given, /*keep_graph=*/create_graph,
                                                                        create_graph, /*accumulate_grad=*/false, to);
  for (size_t i = 0; i < places.size(); ++i) found[places[i]] = slopes[i];
  return found;
}

Tensors with_derivative(Tensors gradients, const Tensors& inputs, Formula formula, std::optional<Remade> remade,
                        bool zeros) {
  const bool is_remade = remade && remade->edge.is_valid();
  if (!is_remade && !autograd::compute_requires_grad(inputs)) return gradients;
  auto node = make_node<GradientBackward>();
  autograd::edge_list edges = autograd::collect_next_edges(inputs);
  if (is_remade) edges[remade->place] = remade->edge;
  node->set_next_edges(std::move(edges));
  node->formula = std::move(formula);
  node->remade = std::move(remade);
  node->inputs = inputs.size();
  node->zeros = zeros;
  for (const at::Tensor& input : inputs) node->save(input);
  for (at::Tensor& gradient : gradients) autograd::set_history(gradient, node);
  return gradients;
}

Tensors differentiable_gradients(const Tensors& inputs, const std::function<Tensors()>& kernel, Formula formula,
                                 bool zeros) {
  const auto is_other = [](const at::Tensor& input) { return input.defined() && !is_plain(input); };
  if (needs_stock(inputs[0]) || std::any_of(inputs.begin(), inputs.end(), is_other)) return formula(inputs, true);
  Tensors gradients = [&] {
    const at::AutoGradMode off(false);
    return kernel();
  }();
  return with_derivative(std::move(gradients), inputs, std::move(formula), std::nullopt, zeros);
}

at::Tensor made_anew(const Remade& remade, const Tensors& inputs) {
  at::Tensor made = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return remade.make(inputs);
  }();
  if (!remade.edge.is_valid()) return made;
  auto node = make_node<PassedBackward>();
  node->set_next_edges({remade.edge});
  autograd::set_history(made, node);
  return made;
}

}  // namespace memkit
