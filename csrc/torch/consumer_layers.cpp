// The layers of memkit::_consumer: torch's own linear and convolution, and their gradients in the order that needs the
// least memory.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "checks.h"
#include "consumer.h"

namespace memkit {

using at::Tensor;

// The function of memkit.functional that makes such a call.
static const char* name_of(const ProducerSpec& spec, const Tensors& inputs, bool conv) {
  if (spec.op == "glu") return "glu_linear";
  if (spec.op == "batch_norm") return "norm_act_conv2d";
  if (spec.op != "activation") return "norm_linear";
  if (inputs[2].defined()) return "dropout_linear";
  if (spec.act == "identity") return conv ? "conv2d" : "linear";
  return conv ? "act_conv2d" : "act_linear";
}

void Consumers::check(const ProducerSpec& spec, const Tensors& inputs) {
  const Tensor& input = inputs[0];
  const at::ScalarType dtype = spec.dtype;
  TORCH_CHECK_VALUE(!weights.empty() && weights.size() == biases.size() && (conv.empty() || conv.size() == 7),
                    "_consumer: expected a bias or None for each weight, got ", weights.size(), " and ", biases.size());
  const size_t dims = conv.empty() ? 2 : 4;
  name = name_of(spec, inputs, !conv.empty());
  check_float_tensor(name, input);
  TORCH_CHECK_VALUE(conv.empty() ? input.dim() >= 1 : input.dim() == 4, name, ": expected an input of ",
                    conv.empty() ? "at least 1 dimension" : "4 dimensions", ", got ", input.sym_sizes());
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor &weight = weights[i], &bias = biases[i];
    check_float_tensor(name, weight);
    TORCH_CHECK_VALUE(size_t(weight.dim()) == dims, name, ": expected a weight of ", dims, " dimensions, got ",
                      weight.sym_sizes());
    TORCH_CHECK_TYPE(weight.scalar_type() == dtype, name, ": expected a weight of the input's dtype ", dtype, ", got ",
                     describe(weight));
    TORCH_CHECK(weight.device() == input.device(), name, ": expected input and weight on one device, got ",
                input.device(), " and ", weight.device());
    if (!bias.defined()) continue;
    TORCH_CHECK_VALUE(bias.dim() == 1 && bias.sym_size(0) == weight.sym_size(0), name, ": expected a bias of shape [",
                      weight.sym_size(0), "], got ", bias.sym_sizes());
    TORCH_CHECK_TYPE(bias.scalar_type() == dtype && bias.device() == weight.device(), name,
                     ": expected weight and bias of one dtype on one device, got ", describe(weight), " and ",
                     describe(bias));
  }
}

namespace {

// [stride, padding, dilation] of two numbers each, then the groups.
at::IntArrayRef part(at::IntArrayRef conv, size_t i) { return conv.slice(2 * i, 2); }

// What a convolution makes and what its gradient is, whatever the backend prefers.
at::MemoryFormat format_of(const Tensor& x) { return x.suggest_memory_format(); }
at::MemoryFormat format_of(const Tensor& x, const Tensor& weight) {
  return format_of(x) == at::MemoryFormat::Contiguous ? format_of(weight) : format_of(x);
}

// As a matrix of rows; -1 would say nothing where a row is empty.
Tensor as_rows(const Tensor& x) { return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2); }

Tensor meta_output(const Tensor& h, const Tensor& weight, at::IntArrayRef conv) {
  auto shape = c10::SymDimVector(h.sym_sizes().begin(), h.sym_sizes().end());
  if (conv.empty()) {
    shape.back() = weight.sym_size(0);
    return at::empty_symint(shape, h.options());
  }
  shape[1] = weight.sym_size(0);
  for (int d = 0; d < 2; ++d) {
    const c10::SymInt reach = (weight.sym_size(2 + d) - 1) * part(conv, 2)[d] + 1;
    shape[2 + d] = (shape[2 + d] + 2 * part(conv, 1)[d] - reach) / part(conv, 0)[d] + 1;
  }
  return at::empty_symint(shape, h.options(), format_of(h, weight));
}

std::tuple<Tensor, Tensor, Tensor> conv_gradients(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                  at::IntArrayRef conv, std::array<bool, 3> wanted) {
  return at::convolution_backward(grad, input, weight, at::IntArrayRef{weight.size(0)}, part(conv, 0), part(conv, 1),
                                  part(conv, 2), false, {0, 0}, conv[6], wanted);
}

// What stands for a convolution's input where its shape alone is asked for.
Tensor as_input(const Tensor& like, const Tensor& weight) {
  return like.scalar_type() == weight.scalar_type() ? like : at::empty_like(like, weight.options());
}

// On the CPU a convolution puts its operands into memory of its own order and makes a gradient there before it copies it:
// for a gradient up to three times its size in all. A part after the other takes less. What every part reads whole is put
// in order once a part, so that it must be small beside what is divided, or time is lost.
constexpr int64_t kParts = 4, kLeast = int64_t{1} << 17;  // elements of a part

// Makes `whole` of parts along a dimension: part(begin, count).
template <class Part>
Tensor in_parts(Tensor whole, int64_t dim, int64_t parts, const Part& part) {
  for (int64_t i = 0, begin = 0; i < parts; ++i) {
    const int64_t count = whole.size(dim) * (i + 1) / parts - begin;
    whole.narrow(dim, begin, count).copy_(part(begin, count));
    begin += count;
  }
  return whole;
}

// In parts of the batch, or of the input channels where the weight is the largest. Of the input it takes the shape alone.
Tensor conv_input_gradient(const Tensor& grad, const Tensor& like, const Tensor& weight, at::IntArrayRef conv) {
  const auto made = [&](const Tensor& grad, const Tensor& like, const Tensor& weight) {
    return std::get<0>(conv_gradients(grad, as_input(like, weight), weight, conv, {true, false, false}));
  };
  const auto whole = [&] { return at::empty(like.sizes(), weight.options(), format_of(like)); };
  // A product of matrices in the order that they have.
  const bool is_pointwise = weight.size(2) * weight.size(3) * conv[0] * conv[1] == 1;
  if (!like.is_cpu() || is_pointwise) return made(grad, like, weight).contiguous(format_of(like));
  const int64_t weights = weight.numel(), values = like.numel() + grad.numel();
  const int64_t batches = std::min({kParts, like.size(0), conv_parts(like.numel(), weights)});
  if (batches > 1)
    return in_parts(whole(), 0, batches, [&](int64_t begin, int64_t count) {
      return made(grad.narrow(0, begin, count), like.narrow(0, begin, count), weight);
    });
  if (conv[6] == 1 && weights > std::max(2 * values, kParts * kLeast) && weights < 4 * values && like.size(1) >= kParts)
    return in_parts(whole(), 1, kParts, [&](int64_t begin, int64_t count) {
      return made(grad, like.narrow(1, begin, count), weight.narrow(1, begin, count));
    });
  return made(grad, like, weight).contiguous(format_of(like));
}

}  // namespace

int64_t conv_parts(int64_t input, int64_t weight) { return input / std::max(2 * weight, kLeast); }

Tensors Consumers::forward(const Tensor& h) const {
  const int64_t inner = conv.empty() ? -1 : 1;
  Tensors outs;
  for (size_t i = 0; i < weights.size(); ++i) {
    const c10::SymInt wanted = weights[i].sym_size(1) * (conv.empty() ? 1 : conv[6]);
    TORCH_CHECK_VALUE(h.sym_size(inner) == wanted, name, ": expected ", wanted,
                      conv.empty() ? " features, got " : " channels, got ", h.sym_sizes(), " for a weight ",
                      weights[i].sym_sizes());
    if (h.is_meta()) {
      outs.push_back(meta_output(h, weights[i], conv));
    } else if (conv.empty()) {
      outs.push_back(at::linear(h, weights[i], optional(biases[i])));
    } else {
      outs.push_back(
          at::conv2d(h, weights[i], optional(biases[i]), part(conv, 0), part(conv, 1), part(conv, 2), conv[6])
              .contiguous(format_of(h, weights[i])));
    }
  }
  return outs;
}

Consumers::Gradients Consumers::backward(const Tensors& grads, const std::function<Tensor()>& h, const Tensor& like,
                                         const std::vector<bool>& wanted, bool is_dead) const {
  const size_t n = weights.size();
  Gradients found{{}, Tensors(n), Tensors(n)};
  const auto shape = like.sym_sizes();
  const auto scaled = [&](const Tensor& grad) {
    return scale ? scale->times(grad).to(weights[0].scalar_type()) : grad;
  };
  if (like.is_meta()) {
    for (size_t i = 0; i < n; ++i) {
      if (wanted[1 + i]) found.weights[i] = at::empty_like(weights[i], at::MemoryFormat::Contiguous);
      if (wanted[1 + n + i]) found.biases[i] = at::empty_symint({weights[i].sym_size(0)}, weights[i].options());
    }
    const auto format = conv.empty() ? at::MemoryFormat::Contiguous : format_of(like);
    if (wanted[0]) found.h = at::empty_symint(shape, weights[0].options(), format);
    return found;
  }
  if (!conv.empty()) {
    const Tensor& w = weights[0];
    // One after the other: their input is gone before its gradient is made.
    if (scale && (wanted[1] || scale->wanted)) {
      const auto product = [&](const Tensor& g, const Tensor& x) {
        return std::get<1>(conv_gradients(g, x, w, conv, {false, true, false})).contiguous();
      };
      std::tie(found.weights[0], found.biases[0]) = scale->of_layer(grads[0], h(), w, biases[0], product);
    } else if (wanted[1] || wanted[2]) {
      const Tensor input = wanted[1] ? h() : as_input(like, w);
      auto [unused, weight, bias] = conv_gradients(scaled(grads[0]), input, w, conv, {false, wanted[1], wanted[2]});
      if (wanted[1]) found.weights[0] = weight.contiguous();
      if (wanted[2]) found.biases[0] = bias;
    }
    if (wanted[0]) found.h = conv_input_gradient(scaled(grads[0]), like, w, conv);
    return found;
  }
  Tensor rows;
  bool is_own = false;
  for (size_t i = 0; i < n; ++i) {
    if (!grads[i].defined()) continue;
    const Tensor g = as_rows(grads[i]);
    if (wanted[1 + i] || (scale && scale->wanted)) {
      if (!rows.defined()) {
        const Tensor made = h();
        const bool is_sole = made.use_count() == 1 && made.storage().use_count() == 1;
        rows = as_rows(made);
        is_own = rows.is_contiguous() && (is_sole || is_dead || !rows.is_alias_of(made));
      }
      if (scale) {
        std::tie(found.weights[i], found.biases[i]) = scale->of_layer(g, rows, weights[i], biases[i]);
        continue;
      }
      found.weights[i] = at::mm(g.t(), rows);
    }
    if (wanted[1 + n + i]) found.biases[i] = scaled(g).sum(0);
  }
  if (!wanted[0]) return found;
  Tensor into = is_own ? rows : Tensor();  // nobody needs the values any more
  rows.reset();
  for (size_t i = 0; i < n; ++i) {
    if (!grads[i].defined()) continue;
    const Tensor g = scaled(as_rows(grads[i]));
    if (found.h.defined()) {
      at::addmm_out(found.h, found.h, g, weights[i]);
    } else {
      found.h = into.defined() ? at::mm_out(into, g, weights[i]) : at::mm(g, weights[i]);
    }
  }
  found.h = found.h.view_symint(shape);
  return found;
}

}  // namespace memkit
