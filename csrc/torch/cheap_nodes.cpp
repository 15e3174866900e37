#include "cheap_nodes.h"

#include <ATen/ATen.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>

#include "parameters.h"
#include "rebuild.h"

namespace memkit {

using at::Tensor;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using namespace torch::autograd::generated;

namespace {

Tensor kept(const SavedVariable& saved) {
  Tensor x = saved.unpack();
  check_there(x);
  return x;
}

// Each factor of a product is kept where its node needs it for the other's gradient; another can be made again.
bool keeps_first(const Node& node) { return node.next_edge(1).is_valid(); }
bool keeps_second(const Node& node) { return node.next_edge(0).is_valid() || dynamic_cast<const DivBackward0*>(&node); }

template <class Product>
Tensor first(const Product& n) {
  return keeps_first(n) ? kept(n.self_) : rebuild(*n.next_edge(0).function);
}
template <class Product>
Tensor second(const Product& n) {
  return keeps_second(n) ? kept(n.other_) : rebuild(*n.next_edge(1).function);
}

Tensor result(const MulBackward0& n) { return first(n) * second(n); }
Tensor result(const DivBackward0& n) { return first(n) / second(n); }

Tensor result(const AvgPool2DBackward0& n) {
  return at::avg_pool2d(kept(n.self_), n.kernel_size, n.stride, n.padding, n.ceil_mode, n.count_include_pad,
                        n.divisor_override);
}
Tensor result(const CeluBackward0& n) { return at::celu(kept(n.self_), n.alpha); }
Tensor result(const ClampBackward1& n) { return at::clamp(kept(n.self_), n.min, n.max); }
Tensor result(const CosBackward0& n) { return kept(n.self_).cos(); }
Tensor result(const EluBackward0& n) { return at::elu(kept(n.self_), n.alpha, n.scale, n.input_scale); }
Tensor result(const GeluBackward0& n) { return at::gelu(kept(n.self_), n.approximate); }
Tensor result(const GluBackward0& n) { return at::glu(kept(n.self_), n.dim); }
Tensor result(const HardsigmoidBackward0& n) { return at::hardsigmoid(kept(n.self_)); }
Tensor result(const HardswishBackward0& n) { return at::hardswish(kept(n.self_)); }
Tensor result(const HardtanhBackward0& n) { return at::hardtanh(kept(n.self_), n.min_val, n.max_val); }
Tensor result(const LeakyReluBackward0& n) { return at::leaky_relu(kept(n.self_), n.negative_slope); }
Tensor result(const MishBackward0& n) { return at::mish(kept(n.self_)); }
Tensor result(const PowBackward0& n) { return at::pow(kept(n.self_), n.exponent); }
Tensor result(const PreluKernelBackward0& n) { return at::_prelu_kernel(kept(n.self_), kept(n.weight_)); }
Tensor result(const SiluBackward0& n) { return at::silu(kept(n.self_)); }
Tensor result(const SinBackward0& n) { return kept(n.self_).sin(); }
Tensor result(const SoftplusBackward0& n) { return at::softplus(kept(n.self_), n.beta, n.threshold); }

using AllKept = c10::SmallVector<const SavedVariable*, 2>;

template <class N>
AllKept all_kept(const N& n) {
  return {&n.self_};
}
AllKept all_kept(const PreluKernelBackward0& n) { return {&n.self_, &n.weight_}; }
template <class Product>
AllKept factors_kept(const Product& n) {
  AllKept found;
  if (keeps_first(n)) found.push_back(&n.self_);
  if (keeps_second(n)) found.push_back(&n.other_);
  return found;
}
AllKept all_kept(const MulBackward0& n) { return factors_kept(n); }
AllKept all_kept(const DivBackward0& n) { return factors_kept(n); }

template <class... Nodes>
struct AnyOf {
  static bool holds(const Node& node) { return (dynamic_cast<const Nodes*>(&node) || ...); }

  static AllKept kept_by(const Node& node) {
    AllKept found;
    const auto look = [&](auto* is) { return is && !(found = all_kept(*is)).empty(); };
    (look(dynamic_cast<const Nodes*>(&node)) || ...);
    return found;
  }

  static Tensor run(const Node& node) {
    Tensor found;
    const auto run_if = [&](auto* is) { return is && (found = result(*is)).defined(); };
    (run_if(dynamic_cast<const Nodes*>(&node)) || ...);
    return found;
  }
};
using Products = AnyOf<MulBackward0, DivBackward0>;
using FunctionsOfKept =
    AnyOf<AvgPool2DBackward0, CeluBackward0, ClampBackward1, CosBackward0, EluBackward0, GeluBackward0, GluBackward0,
          HardsigmoidBackward0, HardswishBackward0, HardtanhBackward0, LeakyReluBackward0, MishBackward0, PowBackward0,
          PreluKernelBackward0, SiluBackward0, SinBackward0, SoftplusBackward0>;

}  // namespace

bool is_product(const Node& node) { return Products::holds(node); }

bool is_function_of_kept(const Node& node) { return FunctionsOfKept::holds(node); }

bool has_factors(const Node& node) {
  return (keeps_first(node) || source_of(node.next_edge(0))) && (keeps_second(node) || source_of(node.next_edge(1)));
}

bool takes_parameter(const Node& node, int64_t elements) {
  const auto& edges = node.next_edges();
  return std::any_of(edges.begin(), edges.end(),
                     [&](const Edge& edge) { return edge.is_valid() ? is_parameter(edge, elements) : elements == 0; });
}

bool gives_twice(const Node& node) {
  const AllKept all = is_product(node) ? Products::kept_by(node) : FunctionsOfKept::kept_by(node);
  const pybind11::gil_scoped_acquire gil;
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state().stack;
  PyObject* const unpack = hooks.empty() ? nullptr : hooks.top().second.ptr(getPyInterpreter());
  return std::all_of(all.begin(), all.end(), [&](const SavedVariable* each) {
    if (!each->has_hooks()) return true;
    const auto found = each->retrieve_unpack_hook_data();
    return found && found->first.ptr(getPyInterpreter()) == unpack;
  });
}

Tensor cheap_result(const Node& node) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return is_product(node) ? Products::run(node) : FunctionsOfKept::run(node);
}

}  // namespace memkit
