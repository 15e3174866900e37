// Gated linear units, act(gate) * up (Shazeer, "GLU variants improve transformer", 2020), and what every engine is handed.
#pragma once

#include "arguments.h"

namespace memkit {

template <class T>
struct GluGradients {
  T gate, up;
};

template <class Op, class T>
MEMKIT_FN T glu_value(const Op& op, T gate, T up) {
  return op.value(gate) * up;
}

template <class Op, class T>
MEMKIT_FN GluGradients<T> glu_gradients(const Op& op, T grad, T gate, T up) {
  return {gradient_at_input(op, grad * up, gate), grad * op.value(gate)};
}

// Element c of row r: gate[r * row + c * step] and up[the same]; the product and its gradient lie densely at r * width + c.
// The gradients of gate and up lie as gate and up do, and may be these themselves.
struct GluArgs {
  Act act;
  Dtype dtype;
  int64_t rows = 0, width = 0, row = 0, step = 1;
  const void* gate = nullptr;
  const void* up = nullptr;
  const void* grad = nullptr;  // backward
  void* out = nullptr;         // forward
  void* grad_gate = nullptr;   // backward
  void* grad_up = nullptr;     // backward
};

// Calls f.template operator()<Op>(args...) with the struct of a kind that gated units use.
template <class F, class... Args>
MEMKIT_FN auto visit_gate(Act kind, F&& f, Args&&... args) {
  switch (kind) {
    case Act::relu: return f.template operator()<Relu>(args...);
    case Act::sigmoid: return f.template operator()<Sigmoid>(args...);
    case Act::gelu: return f.template operator()<Gelu>(args...);
    case Act::gelu_tanh: return f.template operator()<GeluTanh>(args...);
    case Act::silu: return f.template operator()<Silu>(args...);
    default: break;
  }
  return f.template operator()<Identity>(args...);
}

}  // namespace memkit
