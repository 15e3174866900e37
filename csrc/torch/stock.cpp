#include "stock.h"

#include <ATen/ATen.h>

namespace memkit {

using at::Tensor;

at::Tensor stock_activation(const ActivationSpec& spec, const Tensor& x) {
  const ActParams& p = spec.params;
  switch (spec.act) {
    case Act::identity: return x.clone();
    case Act::relu: return at::relu(x);
    case Act::leaky_relu: return at::leaky_relu(x, p.a);
    case Act::elu: return at::elu(x, p.a, p.b, p.c);
    case Act::sigmoid: return at::sigmoid(x);
    case Act::tanh: return at::tanh(x);
    case Act::softplus: return at::softplus(x, p.a, p.b);
    case Act::hardtanh: return at::hardtanh(x, p.a, p.b);
    case Act::hardsigmoid: return at::hardsigmoid(x);
    case Act::relu_squared: return at::relu(x).square();
    case Act::gelu: return at::gelu(x, "none");
    case Act::gelu_tanh: return at::gelu(x, "tanh");
    case Act::quick_gelu: return x * at::sigmoid(1.702 * x);
    case Act::silu: return at::silu(x);
    case Act::mish: return at::mish(x);
    case Act::hardswish: return at::hardswish(x);
  }
  TORCH_INTERNAL_ASSERT(false);
}

at::Tensor stock_activation_backward(const ActivationSpec& spec, const Tensor& grad, const Tensor& saved,
                                     bool from_output) {
  const ActParams p = from_output ? spec.params_of_output(saved.scalar_type()) : spec.params;
  TORCH_CHECK(!(from_output && spec.has_branch()), spec.name,
              ": expected save='input' for a derivative of the gradient, got save='output', whose input is gone; in a "
              "swapped model memkit.swap(model, lean='call') keeps what it takes");
  switch (spec.act) {
    case Act::identity: return grad;
    case Act::relu: return at::threshold_backward(grad, saved, 0);
    case Act::leaky_relu: return at::leaky_relu_backward(grad, saved, p.a, from_output);
    case Act::elu: return at::elu_backward(grad, p.a, p.b, p.c, from_output, saved);
    case Act::sigmoid: return at::sigmoid_backward(grad, from_output ? saved : at::sigmoid(saved));
    case Act::tanh: return at::tanh_backward(grad, from_output ? saved : at::tanh(saved));
    case Act::softplus: {
      if (!from_output) return at::softplus_backward(grad, saved, p.a, p.b);
      return grad * at::where(saved * p.a > p.b, at::ones({}, saved.options()), -at::expm1(saved * -p.a));
    }
    case Act::hardtanh: return at::hardtanh_backward(grad, saved, p.a, p.b);
    case Act::hardsigmoid:  // ATen's own hardsigmoid_backward has no derivative
      return at::hardtanh_backward(grad, saved, from_output ? 0 : -3, from_output ? 1 : 3) / 6;
    case Act::relu_squared: {
      if (!from_output) return grad * at::relu(saved) * 2;
      // The root's own derivative is infinite at 0, where the slope is 0 all the same.
      const Tensor positive = saved > 0;
      return grad * at::where(positive, 2 * at::sqrt(at::where(positive, saved, 1)), 0);
    }
    case Act::gelu: return at::gelu_backward(grad, saved, "none");
    case Act::gelu_tanh: return at::gelu_backward(grad, saved, "tanh");
    case Act::quick_gelu: {
      const Tensor s = at::sigmoid(1.702 * saved);
      return grad * s * (1 + 1.702 * saved * (1 - s));
    }
    case Act::silu: {
      const Tensor s = at::sigmoid(saved);
      return grad * s * (1 + saved * (1 - s));
    }
    case Act::mish: {
      const Tensor t = at::tanh(at::softplus(saved));
      return grad * (t + saved * at::sigmoid(saved) * (1 - t * t));
    }
    case Act::hardswish: return at::hardswish_backward(grad, saved);
  }
  TORCH_INTERNAL_ASSERT(false);
}

bool stock_backward_is_one(const ActivationSpec& spec, bool from_output) {
  switch (spec.act) {
    case Act::sigmoid:
    case Act::tanh: return from_output;
    case Act::softplus: return !from_output;
    case Act::elu:
    case Act::gelu:
    case Act::gelu_tanh:
    case Act::hardswish: return true;
    default: return spec.has_two_slopes();
  }
}

Tensor stock_activation_backward_where(const ActivationSpec& spec, const Tensor& grad, const Tensor& active) {
  if (spec.act == Act::leaky_relu) return at::leaky_relu_backward(grad, active, spec.params.a, false);
  const Tensor passed = at::threshold_backward(grad, active, 0);
  return spec.act == Act::hardsigmoid ? passed / 6 : passed;
}

}  // namespace memkit
