// The layers of memkit::_consumer: torch's own linear and convolution, and their gradients in the order that needs the
// least memory.
#include <ATen/ATen.h>

#include <array>

#include "checks.h"
#include "consumer.h"

namespace memkit {

using at::Tensor;

void Consumers::check(const Tensor& input, at::ScalarType dtype) const {
  TORCH_CHECK_VALUE(!weights.empty() && weights.size() == biases.size() && (conv.empty() || conv.size() == 7),
                    "_consumer: expected a bias or None for each weight, got ", weights.size(), " and ", biases.size());
  const size_t dims = conv.empty() ? 2 : 4;
  TORCH_CHECK_VALUE(input.dim() >= 1 && (conv.empty() || input.dim() == 4),
                    "conv2d: expected an input of 4 dimensions, got ", input.sym_sizes());
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor &weight = weights[i], &bias = biases[i];
    const char* name = conv.empty() ? "linear" : "conv2d";
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

std::optional<Tensor> optional(const Tensor& x) { return x.defined() ? std::optional<Tensor>(x) : std::nullopt; }

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

}  // namespace

Tensors Consumers::forward(const Tensor& h) const {
  const int64_t inner = conv.empty() ? -1 : 1;
  Tensors outs;
  for (size_t i = 0; i < weights.size(); ++i) {
    const c10::SymInt wanted = weights[i].sym_size(1) * (conv.empty() ? 1 : conv[6]);
    TORCH_CHECK_VALUE(h.sym_size(inner) == wanted, conv.empty() ? "linear" : "conv2d", ": expected ", wanted,
                      " features, got ", h.sym_sizes(), " for a weight ", weights[i].sym_sizes());
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
                                         const std::vector<bool>& wanted) const {
  const size_t n = weights.size();
  Gradients found{{}, Tensors(n), Tensors(n)};
  const auto shape = like.sym_sizes();
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
    const auto gradients = [&](const Tensor& input, std::array<bool, 3> mask) {
      return at::convolution_backward(grads[0], input, w, at::IntArrayRef{w.size(0)}, part(conv, 0), part(conv, 1),
                                      part(conv, 2), false, {0, 0}, conv[6], mask);
    };
    // One after the other: their input is gone before its gradient is made, which takes of it the shape alone.
    Tensor unused;
    if (wanted[1]) std::tie(unused, found.weights[0], found.biases[0]) = gradients(h(), {false, true, wanted[2]});
    const bool of_bias = wanted[2] && !wanted[1];
    if (wanted[0] || of_bias) {
      const Tensor shaped =
          like.scalar_type() == w.scalar_type() ? like : at::empty_like(like, like.options().dtype(w.scalar_type()));
      Tensor bias;
      std::tie(found.h, unused, bias) = gradients(shaped, {wanted[0], false, of_bias});
      if (of_bias) found.biases[0] = bias;
    }
    if (wanted[0]) found.h = found.h.contiguous(format_of(like));
    if (wanted[1]) found.weights[0] = found.weights[0].contiguous();
    return found;
  }
  Tensor rows;
  bool is_own = false;
  for (size_t i = 0; i < n; ++i) {
    if (!grads[i].defined()) continue;
    const Tensor g = as_rows(grads[i]);
    if (wanted[1 + i]) {
      if (!rows.defined()) {
        const Tensor made = h();
        const bool is_sole = made.use_count() == 1 && made.storage().use_count() == 1;
        rows = as_rows(made);
        is_own = rows.is_contiguous() && (is_sole || !rows.is_alias_of(made));
      }
      found.weights[i] = at::mm(g.t(), rows);
    }
    if (wanted[1 + n + i]) found.biases[i] = g.sum(0);
  }
  if (!wanted[0]) return found;
  Tensor into = is_own ? rows : Tensor();  // nobody needs the values any more
  rows.reset();
  for (size_t i = 0; i < n; ++i) {
    if (!grads[i].defined()) continue;
    const Tensor g = as_rows(grads[i]);
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
