// memkit::_consumer: a producer's result goes into its layers and is dropped; backward makes it again, for the gradients
// of the layers' weights, puts its gradient into the same memory, and the producer's own gradient there after that.
#include "consumer.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "channel_running.h"
#include "checks.h"
#include "derivative.h"
#include "eager.h"
#include "layout.h"
#include "named_ops.h"
#include "operators.h"
#include "saved_node.h"
#include "transforms.h"

namespace memkit::consumer_op {
namespace {

namespace autograd = torch::autograd;
using at::Tensor;
using Text = c10::string_view;
using Params = c10::ArrayRef<double>;
using OptionalTensors = c10::List<std::optional<Tensor>>;
using Results = std::tuple<Tensors, Tensors>;  // outputs, statistics

Tensors defined_or_not(const OptionalTensors& list) {
  Tensors tensors;
  for (const std::optional<Tensor>& each : list) tensors.push_back(each.value_or(Tensor()));
  return tensors;
}

OptionalTensors optionals(const Tensors& tensors) {
  OptionalTensors list;
  list.reserve(tensors.size());
  for (const Tensor& each : tensors) list.push_back(optional(each));
  return list;
}

Results call(const OptionalTensors& inputs, Text op, Text act, Text packing, Params numbers, at::TensorList weights,
             const OptionalTensors& biases, at::IntArrayRef conv, std::optional<at::ScalarType> dtype) {
  return MEMKIT_CALL("memkit::_consumer",
                     Results(const OptionalTensors&, Text, Text, Text, Params, at::TensorList, const OptionalTensors&,
                             at::IntArrayRef, std::optional<at::ScalarType>))(inputs, op, act, packing, numbers,
                                                                              weights, biases, conv, dtype);
}

at::ScalarType resolved(std::optional<at::ScalarType> dtype, const Tensors& inputs) {
  TORCH_CHECK_VALUE(!inputs.empty() && inputs[0].defined(), "_consumer: expected an input, got none");
  return dtype.value_or(inputs[0].scalar_type());
}

// A tensor as the producer takes it for its gradient's model: the shape that its result has.
Tensor like_result(const Tensor& x, const Tensors& inputs, Text op) {
  if (op != "glu" || inputs[1].defined()) return x;
  return x.narrow_symint(-1, 0, x.sym_size(-1) / 2);
}

// -- below autograd

Results forward(const OptionalTensors& inputs, Text op, Text act, Text packing, Params numbers, at::TensorList weights,
                const OptionalTensors& biases, at::IntArrayRef conv, std::optional<at::ScalarType> dtype) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Tensors given = defined_or_not(inputs);
  const at::ScalarType computed = resolved(dtype, given);
  const ProducerSpec spec{op, act, packing, numbers, computed};
  const auto producer = make_producer(spec, std::move(given));
  Consumers layers{weights.vec(), defined_or_not(biases), conv};
  layers.check(spec, producer->inputs);
  Tensors statistics;
  const Tensor h = producer->forward(statistics);
  return {layers.forward(h), statistics};
}

// Wanted: of the inputs, the weights, the biases. inputs: the only handles where `last`.
Tensors gradients(const Tensors& grads, Tensors inputs, Tensors statistics, const ProducerSpec& spec,
                  const Consumers& layers, const std::vector<bool>& wanted, bool last) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const size_t before = inputs.size();
  const std::vector<bool> of_inputs(wanted.begin(), wanted.begin() + before);
  std::vector<bool> of_layers(wanted.begin() + before - 1, wanted.end());
  of_layers[0] = std::find(of_inputs.begin(), of_inputs.end(), true) != of_inputs.end();
  const auto producer = make_producer(spec, std::move(inputs));
  const Tensor& x = producer->inputs[0];
  // A part of a larger storage would keep all of that.
  const bool is_dead = last && producer->is_nothing() && eager::is_dead(x) && x.storage().nbytes() < 2 * x.nbytes();
  const auto h = [&] { return producer->forward(statistics); };
  Consumers::Gradients g =
      layers.backward(grads, h, like_result(producer->inputs[0], producer->inputs, spec.op), of_layers, is_dead);
  Tensors found(before);
  if (of_layers[0]) found = producer->backward(std::move(g.h), statistics, of_inputs, last);
  found.insert(found.end(), g.weights.begin(), g.weights.end());
  found.insert(found.end(), g.biases.begin(), g.biases.end());
  for (size_t i = 0; i < found.size(); ++i)
    if (!wanted[i]) found[i].reset();
  return found;
}

Tensors backward(const OptionalTensors& grads, const OptionalTensors& inputs, at::TensorList statistics, Text op,
                 Text act, Text packing, Params numbers, at::TensorList weights, at::IntArrayRef conv,
                 c10::List<bool> wanted) {
  const at::AutoDispatchBelowADInplaceOrView below;  // what is written into needs no gradient
  TORCH_CHECK_VALUE(!weights.empty() && grads.size() == weights.size() && !inputs.empty() &&
                        wanted.size() == inputs.size() + 2 * weights.size(),
                    "_consumer_backward: expected weights, a gradient for each, inputs, and whether each of them is ",
                    "wanted, got ", weights.size(), ", ", grads.size(), ", ", inputs.size(), " and ", wanted.size());
  const size_t kept = op == "layer_norm" || op == "batch_norm" ? 2 : op == "rms_norm" ? 1 : 0;
  TORCH_CHECK_VALUE(statistics.size() >= kept, "_consumer_backward: expected ", kept, " statistics, got ",
                    statistics.size());
  std::vector<bool> asked;
  for (const bool each : wanted) asked.push_back(each);
  const ProducerSpec spec{op, act, packing, numbers, weights[0].scalar_type()};
  Consumers layers{weights.vec(), Tensors(weights.size()), conv};
  const Tensors given = defined_or_not(inputs);
  layers.check(spec, make_producer(spec, given)->inputs);
  Tensors found = gradients(defined_or_not(grads), given, statistics.vec(), spec, layers, asked, false);
  for (Tensor& each : found)  // operators return tensors
    if (!each.defined()) each = at::empty({0}, weights[0].options());
  return found;
}

// -- autograd

// By operators that have derivatives of their own.
Results composed(const ProducerSpec& spec, Tensors inputs, const Consumers& layers) {
  Tensors statistics;
  const Tensor h = make_producer(spec, std::move(inputs))->differentiable(statistics);
  return {layers.forward(h), statistics};
}

bool is_batched(const Tensor& grad) {
  return grad.defined() && (needs_stock(grad) || grad.key_set().has(c10::DispatchKey::Batched));
}

struct ConsumerBackward : SavedNode, ScalableLayer {
  std::string op, act, packing;
  std::vector<double> numbers;
  std::vector<int64_t> conv;
  at::ScalarType dtype = at::kFloat;
  size_t inputs = 0, statistics = 0, layers = 0;
  bool from_result = false;   // which stands in the first input's place
  c10::SymDimVector strides;  // of the memory order that dropout follows

  // Saved: the inputs, the statistics, weights, biases.
  std::string name() const override { return "memkit::" + op + (conv.empty() ? "_linear" : "_conv2d") + "_backward"; }

  bool is_conv() const override { return !conv.empty(); }
  std::optional<size_t> weight_edge() const override {
    const bool is_one = layers == 1 && next_edge(inputs).is_valid();
    return is_one && (conv.empty() || is_pointwise()) ? std::optional(inputs) : std::nullopt;
  }
  Tensor result_again() override {
    autograd::variable_list found = with_saved([this] {
      Tensors all;
      return again(all);
    });
    return found[0];
  }
  autograd::variable_list scaled_backward(const Tensor& grad, LinearScale& scale, bool last) override {
    return with_saved([&] { return plain_backward({grad}, last, &scale); });
  }

 protected:
  autograd::variable_list backward(autograd::variable_list&& grads) override {
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& g) { return g.defined(); }))
      return autograd::variable_list(num_outputs());
    // create_graph: the gradient itself needs a derivative. Batches of gradients: operators that have rules for them.
    if (at::GradMode::is_enabled() || std::any_of(grads.begin(), grads.end(), is_batched)) return differentiable(grads);
    return plain_backward(grads, /*last=*/true);
  }

 private:
  size_t saved() const { return inputs + statistics + 2 * layers; }
  ProducerSpec spec() const { return {op, act, packing, numbers, dtype}; }

  Tensors unpacked(size_t first, size_t count) {
    Tensors tensors;
    for (size_t i = first; i < first + count; ++i) tensors.push_back(unpack(i));
    return tensors;
  }

  // A convolution with a kernel of one pixel, each for itself.
  bool is_pointwise() const {
    const auto sizes = shape_of(next_edge(inputs));
    return sizes.size() == 4 && sizes[2] * sizes[3] == 1 &&
           c10::ArrayRef(conv) == c10::ArrayRef<int64_t>({1, 1, 0, 0, conv[4], conv[5], 1});
  }

  // last: nobody asks again where the graph is not kept. scale: what the result was multiplied by, of which grads[0] is.
  autograd::variable_list plain_backward(const autograd::variable_list& grads, bool last,
                                         LinearScale* scale = nullptr) {
    const size_t edges = inputs + 2 * layers;
    std::vector<bool> wanted(edges);
    for (size_t i = 0; i < edges; ++i) wanted[i] = task_should_compute_output(i);
    for (size_t i = 0; i < layers; ++i) {
      const bool arrived = grads[i].defined();
      wanted[inputs + i] = wanted[inputs + i] && arrived;
      wanted[inputs + layers + i] = wanted[inputs + layers + i] && arrived;
    }
    const Tensors made = unpacked(inputs, statistics), weights = unpacked(inputs + statistics, layers);
    Tensors given;
    for (size_t i = 0; i < inputs; ++i) given.push_back(last ? take(i) : unpack(i));
    restore_order(given);
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto ordinary = [](const Tensor& x) { return !x.defined() || is_plain(x); };
    const bool plain = ordinary(given[0]) && std::all_of(weights.begin(), weights.end(), ordinary) &&
                       std::all_of(grads.begin(), grads.end(), ordinary);
    const Consumers layer{weights, scale ? unpacked(inputs + statistics + layers, layers) : Tensors(layers), conv,
                          scale};
    if (plain || scale) return gradients(grads, std::move(given), made, spec(), layer, wanted, last);

    c10::List<bool> asked;
    for (const bool each : wanted) asked.push_back(each);
    Tensors found = MEMKIT_CALL("memkit::_consumer_backward",
                                Tensors(const OptionalTensors&, const OptionalTensors&, at::TensorList, Text, Text,
                                        Text, Params, at::TensorList, at::IntArrayRef, c10::List<bool>))(
        optionals(grads), optionals(given), made, op, act, packing, numbers, weights, conv, asked);
    for (size_t i = 0; i < edges; ++i)
      if (!wanted[i]) found[i].reset();
    return found;
  }

  // Saved-tensor hooks may hand back another memory order than the one that dropout follows.
  void restore_order(Tensors& given) const {
    if (strides.empty() || same_order(given[0].sym_sizes(), given[0].sym_strides(), strides)) return;
    given[0] = at::empty_strided_symint(given[0].sym_sizes(), strides, given[0].options()).copy_(given[0]);
  }

  // The results by operators that autograd knows, of aliases of what is saved: the gradient of each apart from that of
  // others which it was made from.
  Tensors again(Tensors& all) {
    all = unpacked(0, saved());
    restore_order(all);
    ProducerSpec whole = spec();
    if (from_result) {
      const auto producer = make_producer(whole, {all.begin(), all.begin() + inputs});
      all[0] = producer->input_again({all.begin() + inputs, all.begin() + inputs + statistics});
      autograd::impl::set_gradient_edge(all[0], next_edge(0));
      whole.numbers = whole.numbers.slice(0, numbers.size() - 1);
    }
    for (Tensor& each : all)
      if (each.defined() && each.requires_grad()) each = at::alias(each);
    const auto weights = all.begin() + inputs + statistics, biases = weights + layers;
    const Consumers consumers{{weights, biases}, {biases, all.end()}, conv};
    return std::get<0>(composed(whole, {all.begin(), all.begin() + inputs}, consumers));
  }

  autograd::variable_list differentiable(const autograd::variable_list& grads) {
    const bool create_graph = at::GradMode::is_enabled();
    const at::AutoGradMode on(true);
    Tensors all;
    const Tensors outs = again(all);
    all.erase(all.begin() + inputs, all.begin() + inputs + statistics);

    std::vector<bool> asked;
    for (size_t i = 0; i < all.size(); ++i) asked.push_back(task_should_compute_output(i));
    return gradients_of({outs.begin(), outs.begin() + layers}, grads, all, asked, create_graph);
  }
};

Results recorded(const OptionalTensors& inputs, Text op, Text act, Text packing, Params numbers, at::TensorList weights,
                 const OptionalTensors& biases, at::IntArrayRef conv, std::optional<at::ScalarType> dtype) {
  const Tensors given = defined_or_not(inputs);
  const ProducerSpec spec{op, act, packing, numbers, resolved(dtype, given)};
  Consumers layers{weights.vec(), defined_or_not(biases), conv};
  const auto producer = make_producer(spec, given);  // checks
  layers.check(spec, given);
  Tensors all = given;
  all.insert(all.end(), layers.weights.begin(), layers.weights.end());
  all.insert(all.end(), layers.biases.begin(), layers.biases.end());
  const auto is_frozen = [](const Tensor& weight) { return !weight.requires_grad(); };
  const bool needs_no_input =
      producer->is_nothing() && std::all_of(layers.weights.begin(), layers.weights.end(), is_frozen);
  if (needs_no_input ||
      std::any_of(all.begin(), all.end(), [](const Tensor& x) { return x.defined() && needs_stock(x); }))
    return composed(spec, given, layers);
  const bool records = autograd::compute_requires_grad(all), from_result = records && producer->prefers_result();
  std::vector<double> asked = numbers.vec();
  if (from_result) asked.push_back(1);
  Results results;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    results = call(inputs, op, act, packing, asked, weights, biases, conv, spec.dtype);
  }
  if (!records) return results;
  auto& [outs, statistics] = results;
  Tensor first = given[0];
  if (from_result) {
    first = std::move(statistics.back());
    statistics.pop_back();
  }
  auto node = make_node<ConsumerBackward>();
  node->set_next_edges(autograd::collect_next_edges(all));
  node->op = op;
  node->act = act;
  node->packing = packing;
  node->numbers = std::move(asked);
  node->conv = conv.vec();
  node->dtype = spec.dtype;
  node->inputs = given.size();
  node->statistics = statistics.size();
  node->layers = weights.size();
  node->from_result = from_result;
  if (op == "activation" && given[2].defined() && given[0].is_non_overlapping_and_dense())
    node->strides = c10::SymDimVector(given[0].sym_strides().begin(), given[0].sym_strides().end());
  for (const Tensor& each : outs) autograd::set_history(each, node);
  const bool running = op == "batch_norm" && given[3].defined();  // and running on: the copies are kept
  node->save(first);
  for (size_t i = 1; i < given.size(); ++i) node->save(running && i >= 3 ? statistics[i - 3] : given[i]);
  for (const Tensor& each : statistics) node->save(each);
  for (const Tensor& each : layers.weights) node->save(each);
  for (const Tensor& each : layers.biases) node->save(each);
  return results;
}

Results by_parts(const OptionalTensors& inputs, Text op, Text act, Text packing, Params numbers, at::TensorList weights,
                 const OptionalTensors& biases, at::IntArrayRef conv, std::optional<at::ScalarType> dtype) {
  const Tensors given = defined_or_not(inputs);
  return composed({op, act, packing, numbers, resolved(dtype, given)}, given,
                  {weights.vec(), defined_or_not(biases), conv});
}

// The layers compute in the autocast dtype, of which the norms make their result; what the producer is given stays.
Results in_autocast(const OptionalTensors& inputs, Text op, Text act, Text packing, Params numbers,
                    at::TensorList weights, const OptionalTensors& biases, at::IntArrayRef conv,
                    std::optional<at::ScalarType> dtype) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Tensors given = defined_or_not(inputs);
  at::ScalarType to = resolved(dtype, given);
  const auto device = given[0].device().type();
  if (to != at::kDouble && !dtype) to = at::autocast::get_autocast_dtype(device);
  if (op == "activation" && given[1].defined()) given[1] = given[1].to(given[0].scalar_type());
  Tensors cast = defined_or_not(biases);
  for (Tensor& each : cast)
    if (each.defined()) each = at::autocast::cached_cast(to, each, device);
  return call(optionals(given), op, act, packing, numbers, at::autocast::cached_cast(to, weights, device),
              optionals(cast), conv, to);
}

constexpr char kConsumer[] = "consumer", kNormActConv2d[] = "norm_act_conv2d";

Results consumer_entry(const OptionalTensors& inputs, Text op, Text act, Text packing,
                       const std::vector<double>& numbers, const Tensors& weights, const OptionalTensors& biases,
                       const std::vector<int64_t>& conv) {
  const pybind11::gil_scoped_release no_gil;
  return call(inputs, op, act, packing, numbers, weights, biases, conv, std::nullopt);
}

// Nothing where Python has to look itself: what it refuses, too.
std::optional<Tensor> norm_act_conv2d_entry(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                            const std::vector<int64_t>& conv, const OptionalTensor& norm_weight,
                                            const OptionalTensor& norm_bias, const OptionalTensor& running_mean,
                                            const OptionalTensor& running_var, bool training, double momentum,
                                            std::string_view act, const std::vector<double>& numbers) {
  if (input.dim() != 4 || !fit(running_mean, running_var, input, training)) return std::nullopt;
  const pybind11::gil_scoped_release no_gil;
  const OptionalTensor none;
  const OptionalTensors inputs(
      {input, norm_weight, norm_bias, training ? none : running_mean, training ? none : running_var});
  const auto [outs, found] =
      call(inputs, "batch_norm", act, "", numbers, weight, OptionalTensors({bias}), conv, std::nullopt);
  if (training && running_mean)
    RunningStatistics{*running_mean, *running_var, momentum}.move(found[0], found[1], input.numel() / input.size(1));
  return outs[0];
}

}  // namespace

#define MEMKIT_BACKEND(KEY)                 \
  TORCH_LIBRARY_IMPL(memkit, KEY, m) {      \
    m.impl("_consumer", forward);           \
    m.impl("_consumer_backward", backward); \
  }
MEMKIT_BACKEND(CPU)
MEMKIT_BACKEND(CUDA)
MEMKIT_BACKEND(Meta)
#undef MEMKIT_BACKEND
TORCH_LIBRARY_IMPL(memkit, Autograd, m) { m.impl("_consumer", recorded); }
TORCH_LIBRARY_IMPL(memkit, FuncTorchBatched, m) { m.impl("_consumer", by_parts); }
// torch.jit.trace knows no lists of tensors some of which are missing.
TORCH_LIBRARY_IMPL(memkit, Tracer, m) { m.impl("_consumer", by_parts); }
TORCH_LIBRARY_IMPL(memkit, AutocastCPU, m) { m.impl("_consumer", in_autocast); }
TORCH_LIBRARY_IMPL(memkit, AutocastCUDA, m) { m.impl("_consumer", in_autocast); }

}  // namespace memkit::consumer_op

void memkit::bind_consumer(pybind11::module_& m) {
  eager::bind<consumer_op::consumer_entry, consumer_op::kConsumer>(m);
  eager::bind<consumer_op::norm_act_conv2d_entry, consumer_op::kNormActConv2d>(m);
}
