// Every operator memkit registers, in one readable place. Kernels register themselves where they are defined.
//
// The named operators (memkit::gelu, memkit::gelu_, ...) are what models call and graphs show; each is one line over
// memkit::_activation, which carries the derivative. The operators after it are the backends' part, below autograd.
//   op      one of the names below, or "gelu_tanh"
//   params  leaky_relu [negative_slope]; elu, celu [alpha]; softplus [beta, threshold]; hardtanh [min, max]; else []
//   save    "auto" | "input" | "output": what backward computes the slope from
//   bits    one bit an element, packed: the element lies right of the function's minimum
#include <torch/library.h>

TORCH_LIBRARY(memkit, m) {
#define MEMKIT_NAMED(NAME, ARGUMENTS)                                      \
  m.def(NAME "(Tensor input, " ARGUMENTS "*, str save='auto') -> Tensor"); \
  m.def(NAME "_(Tensor(a!) input, " ARGUMENTS "*, str save='auto') -> Tensor(a!)");

  MEMKIT_NAMED("relu", "")
  MEMKIT_NAMED("leaky_relu", "float negative_slope=0.01, ")
  MEMKIT_NAMED("elu", "float alpha=1.0, ")
  MEMKIT_NAMED("selu", "")
  MEMKIT_NAMED("celu", "float alpha=1.0, ")
  MEMKIT_NAMED("sigmoid", "")
  MEMKIT_NAMED("tanh", "")
  MEMKIT_NAMED("softplus", "float beta=1.0, float threshold=20.0, ")
  MEMKIT_NAMED("relu6", "")
  MEMKIT_NAMED("hardtanh", "float min_val=-1.0, float max_val=1.0, ")
  MEMKIT_NAMED("hardsigmoid", "")
  MEMKIT_NAMED("relu_squared", "")
  MEMKIT_NAMED("gelu", "str approximate='none', ")
  MEMKIT_NAMED("quick_gelu", "")
  MEMKIT_NAMED("silu", "")
  MEMKIT_NAMED("mish", "")
  MEMKIT_NAMED("hardswish", "")
#undef MEMKIT_NAMED

  m.def(
      "bias_act(Tensor input, Tensor bias, str act='gelu', *, int dim=-1, float[]? params=None, str save='auto') -> "
      "Tensor");
  m.def(
      "bias_act_(Tensor(a!) input, Tensor bias, str act='gelu', *, int dim=-1, float[]? params=None, str save='auto') "
      "-> "
      "Tensor(a!)");

  m.def("_activation(Tensor input, Tensor? bias, int dim, str op, float[] params, str save) -> Tensor");
  m.def("_activation_(Tensor(a!) input, Tensor? bias, int dim, str op, float[] params, str save) -> Tensor(a!)");

  // The bits' order is the order of the output's memory, so a compiler must not change strides on the way.
  const std::vector<at::Tag> tags{at::Tag::needs_exact_strides};
  m.def("_activation_with_bits(Tensor input, Tensor? bias, int dim, str op, float[] params) -> (Tensor, Tensor)", tags);
  m.def("_activation_with_bits_(Tensor(a!) input, Tensor? bias, int dim, str op, float[] params) -> Tensor", tags);
  m.def(
      "_activation_backward(Tensor grad, Tensor saved, Tensor? bias, int dim, Tensor? bits, str op, float[] params, "
      "bool "
      "from_output) -> Tensor",
      tags);
  m.def(
      "_activation_backward_(Tensor(a!) grad, Tensor saved, Tensor? bias, int dim, Tensor? bits, str op, float[] "
      "params, "
      "bool from_output) -> Tensor(a!)",
      tags);

  // LayerNorm (centered) and RMSNorm over the last `dims` dimensions, of the input or of input + residual; `dtype` is the
  // output's. save: "auto" | "input" | "output". The last two are the backends' part; `sum` and `mean` have no elements
  // where there are none, nor have gradients that are not `wanted` (of input, weight, bias).
  m.def(
      "_row_norm(Tensor input, int dims, Tensor? weight, Tensor? bias, float eps, bool centered, ScalarType dtype, str "
      "save) -> Tensor");
  m.def(
      "_add_row_norm(Tensor input, Tensor residual, int dims, Tensor? weight, Tensor? bias, float eps, bool centered, "
      "ScalarType dtype, str save) -> (Tensor normed, Tensor sum)");
  m.def(
      "_row_norm_forward(Tensor input, Tensor? residual, int dims, Tensor? weight, Tensor? bias, float eps, bool "
      "centered, ScalarType dtype) -> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)");
  m.def(
      "_row_norm_backward(Tensor grad, Tensor? grad_sum, Tensor saved, int dims, Tensor? weight, Tensor? bias, Tensor? "
      "mean, Tensor rstd, bool centered, bool from_output, ScalarType input_dtype, bool[3] wanted) -> (Tensor, Tensor, "
      "Tensor)");

  // Batch norm with an activation behind it (a name as above, '' for none), by the statistics given or else its own,
  // which it returns; group norm. The rest is the backends' part: with groups 0 one statistic a channel, else one for each
  // group of each sample. c1, c2: what the gradient loses for the input's part in its own statistics.
  m.def(
      "_batch_norm_act(Tensor input, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? variance, float eps, str act, "
      "float[] params, ScalarType dtype) -> (Tensor out, Tensor mean, Tensor variance)");
  m.def("_group_norm(Tensor input, int groups, Tensor? weight, Tensor? bias, float eps, ScalarType dtype) -> Tensor");
  m.def("_channel_moments(Tensor input, int groups) -> (Tensor mean, Tensor variance)");
  m.def(
      "_channel_norm_forward(Tensor input, int groups, Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, "
      "float eps, str act, float[] params, ScalarType dtype) -> Tensor");
  m.def(
      "_channel_norm_sums(Tensor grad, Tensor input, int groups, Tensor mean, Tensor variance, Tensor? weight, Tensor? "
      "bias, float eps, str act, float[] params) -> (Tensor dz, Tensor dz_x_hat, Tensor c1, Tensor c2)");
  m.def(
      "_channel_norm_backward(Tensor grad, Tensor input, int groups, Tensor mean, Tensor variance, Tensor? weight, "
      "Tensor? bias, Tensor? c1, Tensor? c2, float eps, str act, float[] params) -> Tensor");

  // Scratch tensors of a memkit.Pool, by its id. The tag keeps a compiler from making one of two equal calls.
  const std::vector<at::Tag> fresh{at::Tag::nondeterministic_seeded};
  m.def(
      "pool_empty(int pool, SymInt[] size, *, ScalarType? dtype=None, MemoryFormat? memory_format=None, str tag='') -> "
      "Tensor",
      fresh);
  m.def("pool_empty_strided(int pool, SymInt[] size, SymInt[] stride, *, ScalarType? dtype=None, str tag='') -> Tensor",
        fresh);
}
