#include "known_gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "checks.h"
#include "row_norm.h"

namespace memkit {
namespace autograd = torch::autograd;
using at::Tensor;

namespace {

// Autograd's own whose derivative is a function of the gradient alone, or of a number beside it.
bool only_passes_on(const autograd::Node& node) {
  constexpr std::array<std::string_view, 8> kNames{"ViewBackward0",  "UnsafeViewBackward0", "ReshapeAliasBackward0",
                                                   "AliasBackward0", "SliceBackward0",      "ToCopyBackward0",
                                                   "MulBackward0",   "DivBackward0"};
  const std::string name = node.name();
  const bool known = std::find(kNames.begin(), kNames.end(), name) != kNames.end();
  return known && node.num_outputs() > 0 && node.next_edge(0).is_valid() &&
         std::none_of(node.next_edges().begin() + 1, node.next_edges().end(),
                      [](const auto& e) { return e.is_valid(); });
}

// Whether nobody but the one edge can reach the node, or wants to be told when it runs, and it would run here and now.
bool is_within_reach_of(const autograd::Edge& edge) {
  autograd::Node& node = *edge.function;
  const auto stream = node.stream();
  return edge.function.use_count() == 1 && node.pre_hooks().empty() && node.post_hooks().empty() &&
         node.tensor_pre_hooks().empty() && node.retains_grad_hooks().empty() &&
         (!stream || *stream == c10::impl::VirtualGuardImpl(stream->device_type()).getStream(stream->device()));
}

bool fits(const Tensor& grad, const autograd::Node& node, uint32_t number) {
  const auto& expected = node.input_metadata(number);
  return grad.defined() && is_plain(grad) && grad.scalar_type() == expected.options().dtype().toScalarType() &&
         c10::SymIntArrayRef(grad.sym_sizes()) == expected.shape_as_dim_vector();
}

// In place where nobody else can see it. A factor in float16 would be rounded, and may be as small as the gradient is large.
Tensor times(const Tensor& x, const Tensor& factor) {
  Tensor made = is_sole_owner(x) ? x : x.clone();
  if (x.scalar_type() != at::kHalf) return made.mul_(factor);
  constexpr int64_t kPart = int64_t(1) << 22;
  const Tensor flat = made.view({-1});
  for (int64_t first = 0; first < flat.numel(); first += kPart) {
    Tensor part = flat.narrow(0, first, std::min(kPart, flat.numel() - first));
    part.copy_(part.to(at::kFloat).mul_(factor));
  }
  return made;
}

}  // namespace

void check_first_derivative(std::string_view op) {
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), op,
                              ": expected a first derivative, got create_graph=True; for higher ones take "
                              "cross_entropy(linear(input, linear_weight), target)");
}

void KnownGradients::keep(const std::vector<Tensor>& gradients, const Tensor& factors) {
  count_ = gradients.size();
  has_factors_ = factors.defined();
  for (const Tensor& each : gradients) save(each);
  save(factors);
}

autograd::variable_list KnownGradients::backward(autograd::variable_list&& grads) {
  autograd::variable_list result(count_);
  const Tensor& grad = grads[0];
  if (!grad.defined()) return result;
  check_first_derivative(op);
  const bool readable = is_plain(grad) && grad.is_cpu();  // without waiting for a device
  const bool unchanged = !has_factors_ && readable && grad.item<double>() == 1;
  const Tensor factors = has_factors_ ? unpack(count_) * grad : Tensor();
  std::vector<Tensor> own;
  for (size_t i = 0; i < count_; ++i) {
    Tensor& each = result[i] = take(i);
    if (!each.defined()) continue;
    // Never the node's own tensor while the graph is kept: whoever gets it may write to it.
    if (unchanged)
      each = autograd::get_current_graph_task_keep_graph() ? each.clone() : each;
    else if (has_factors_)
      each = times(each, factors.select(0, int64_t(i)));
    else if (is_sole_owner(each))
      own.push_back(each);
    else
      each = each * grad;
  }
  if (!own.empty()) at::_foreach_mul_(own, grad);
  return result;
}

bool KnownGradients::take_place_of_norm() {
  if (has_factors_ || autograd::AnomalyMode::is_enabled() || autograd::get_current_graph_task_id() != -1) return false;
  std::vector<autograd::Node*> way;
  const auto reaches = [&](const autograd::Edge& edge) { return edge.is_valid() && is_within_reach_of(edge); };
  const autograd::Edge* edge = &next_edge(0);
  for (; reaches(*edge) && only_passes_on(*edge->function); edge = &way.back()->next_edge(0))
    way.push_back(edge->function.get());
  if (!reaches(*edge)) return false;
  const SavedNode* norm = row_norm_of(*edge->function);
  if (!norm || !norm->made_in_lean()) return false;

  const at::AutoGradMode off(false);
  Tensor grad = unpack(0);
  // Two bytes with few exponents are for gradients of a loss that is scaled, as this one will be in backward.
  if (!grad.defined() || grad.scalar_type() == at::kHalf) return false;
  for (autograd::Node* each : way) {
    if (!fits(grad, *each, 0)) return false;
    grad = (*each)({grad})[0];
  }
  if (!fits(grad, *edge->function, edge->input_nr)) return false;
  autograd::variable_list arriving(edge->function->num_inputs());
  arriving[edge->input_nr] = std::move(grad);
  std::vector<Tensor> gradients;
  try {
    gradients = (*edge->function)(std::move(arriving));
  } catch (const std::exception&) {  // its input has been written to, say: for backward to tell
    const pybind11::gil_scoped_acquire gil;
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) throw;
    PyErr_Clear();
    return false;
  }
  autograd::edge_list edges = edge->function->next_edges();
  for (size_t i = 1; i < count_; ++i) {
    gradients.push_back(unpack(i));
    edges.push_back(next_edge(i));
  }
  forget();
  keep(gradients, Tensor());
  next_edges() = std::move(edges);
  return true;
}

void bind_known_gradients(pybind11::module_& m) {
  m.def(
      "take_place_of_norm",
      [](const Tensor& loss) {
        auto* node = dynamic_cast<KnownGradients*>(loss.grad_fn().get());
        return node && node->take_place_of_norm();
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace memkit
