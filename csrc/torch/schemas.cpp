// Every operator memkit registers, in one readable place. Kernels register themselves where they are defined.
//
// The named operators (memkit::gelu, memkit::gelu_, ...) are what models call and graphs show; each is one line over
// memkit::_activation, which carries the derivative. The operators after it are the backends' part, below autograd.
//   op      one of the names below, or "gelu_tanh"
//   params  leaky_relu [negative_slope]; elu, celu [alpha]; softplus [beta, threshold]; hardtanh [min, max]; else []
//   save    "auto" | "input" | "output" | "bit": what backward computes the slope from
//   bits    one bit an element, packed: the element lies right of the function's minimum; for "bit", where the slope has two
//           values, where the function is active
//   seed    int64, one element on the input's device or the CPU: which elements dropout drops; element i is drawn by its
//           place in memory
//   drop    [p, scale, kept, dropped]: a kept element becomes x * scale + kept, a dropped one x * 0 + dropped
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

#define MEMKIT_DROPOUT(NAME, TENSORS, REST)                                                                      \
  m.def(NAME "(Tensor input, " TENSORS "float p=0.5, bool training=True, *, Generator? generator=None" REST      \
             ") -> Tensor");                                                                                     \
  m.def(NAME "_(Tensor(a!) input, " TENSORS "float p=0.5, bool training=True, *, Generator? generator=None" REST \
             ") -> Tensor(a!)");
  MEMKIT_DROPOUT("dropout", "", "")
  MEMKIT_DROPOUT("alpha_dropout", "", "")
  MEMKIT_DROPOUT("dropout_add", "Tensor residual, ", "")
  MEMKIT_DROPOUT("bias_dropout_add", "Tensor bias, Tensor? residual, ", ", int dim=-1")
  MEMKIT_DROPOUT("act_dropout", "str act, ", ", Tensor? bias=None, int dim=-1, float[]? params=None, str save='auto'")
#undef MEMKIT_DROPOUT

  // act(gate) * up. Without `up`, gate holds both along its last dimension: "gate_up" or "up_gate" halves, or "interleaved".
  m.def("glu(Tensor gate, Tensor? up=None, str act='silu', str packing='gate_up') -> Tensor");
  m.def("_glu(Tensor gate, Tensor? up, str act, str packing) -> Tensor");
  m.def("_glu_backward(Tensor grad, Tensor gate, Tensor? up, str act, str packing) -> (Tensor, Tensor)");
  m.def("_glu_backward_(Tensor grad, Tensor(a!) gate, Tensor(b!)? up, str act, str packing) -> ()");

  // q and k, of 4 dimensions with the heads in `heads_at`, 1 or 2, turned by cos and sin of [positions, columns] or [batch,
  // positions, columns]; position_ids: rows of these. rotary: elements of a head that are turned, 0 for as many as there are
  // columns. back: the gradient. Without k the second result has no elements.
#define MEMKIT_ROTARY \
  "Tensor cos, Tensor sin, Tensor? position_ids, bool interleaved, int heads_at, int rotary, bool back"
  m.def("_rotary(Tensor q, Tensor? k, " MEMKIT_ROTARY ") -> (Tensor, Tensor)");
  m.def("_rotary_(Tensor(a!) q, Tensor(b!)? k, " MEMKIT_ROTARY ") -> ()");
#undef MEMKIT_ROTARY

  // Max pooling with the arguments of torch.nn.functional's. places: of each result, where in its window it was found; size: of
  // the input.
#define MEMKIT_WINDOW "int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode"
  m.def("_max_pool2d(Tensor input, " MEMKIT_WINDOW ") -> (Tensor, Tensor)");
  m.def("_max_pool2d_backward(Tensor grad, Tensor places, SymInt[] size, bool channels_last, " MEMKIT_WINDOW
        ") -> Tensor");
#undef MEMKIT_WINDOW

  // softmax(scale input + mask) over `dim`, or its logarithm; mask: bool, what takes part, or what is added. masked: there was a
  // mask or it was causal.
#define MEMKIT_SOFTMAX "int dim, Tensor? mask, float scale, bool causal, bool log"
#define MEMKIT_BACKWARD "Tensor output, int dim, float scale, bool causal, bool log, bool masked"
  m.def("_softmax(Tensor input, " MEMKIT_SOFTMAX ", ScalarType dtype) -> Tensor");
  m.def("_softmax_(Tensor(a!) input, " MEMKIT_SOFTMAX ") -> Tensor(a!)");
  m.def("_softmax_backward(Tensor grad, " MEMKIT_BACKWARD ") -> Tensor");
  m.def("_softmax_backward_(Tensor(a!) grad, " MEMKIT_BACKWARD ") -> Tensor(a!)");
#undef MEMKIT_SOFTMAX
#undef MEMKIT_BACKWARD

  // y = residual + drop(act(input + bias)).
#define MEMKIT_INPUT "Tensor? bias, int dim, str op, float[] params"
#define MEMKIT_DROP "Tensor? seed=None, float[] drop=[]"
#define MEMKIT_BACKWARD \
  "Tensor? saved, Tensor? bias, int dim, Tensor? bits, str op, float[] params, bool from_output, " MEMKIT_DROP
  m.def("_activation(Tensor input, " MEMKIT_INPUT ", str save, Tensor? residual=None, " MEMKIT_DROP ") -> Tensor");
  m.def("_activation_(Tensor(a!) input, " MEMKIT_INPUT ", str save, Tensor? residual=None, " MEMKIT_DROP
        ") -> Tensor(a!)");

  // The bits' order is the order of the output's memory, so a compiler must not change strides on the way.
  const std::vector<at::Tag> tags{at::Tag::needs_exact_strides};
  m.def("_activation_with_bits(Tensor input, " MEMKIT_INPUT ", " MEMKIT_DROP ") -> (Tensor, Tensor)", tags);
  m.def("_activation_with_bits_(Tensor(a!) input, " MEMKIT_INPUT ", " MEMKIT_DROP ") -> Tensor", tags);
  m.def("_activation_backward(Tensor grad, " MEMKIT_BACKWARD ") -> Tensor", tags);
  m.def("_activation_backward_(Tensor(a!) grad, " MEMKIT_BACKWARD ") -> Tensor(a!)", tags);
  // What dropout multiplies a contiguous tensor of this size with.
  m.def("_dropout_mask(SymInt[] size, Tensor seed, float[] drop, *, ScalarType dtype) -> Tensor");
  // A copy of a seed, which a compiler must keep for backward: drawn again it were another one.
  m.def("_kept(Tensor seed) -> Tensor");
#undef MEMKIT_INPUT
#undef MEMKIT_DROP
#undef MEMKIT_BACKWARD

  // Losses. The named ones take what torch.nn.functional's take; "_" ones are their parts:
  //   reduction  at::Reduction: 0 none, 1 mean, 2 sum;  softcap  0: none
  //   stats      [2, rows]: each row's largest logit, and what e^(x - largest) is multiplied by in the gradient
  //   total      what the losses' sum is divided by, []; [0] where by nothing
  //   dtype      of the loss;  compute  of the matrix products
  //   inplace    0 never, 1 forced, 2 where proven: backward writes the gradient into the logits' memory
#define MEMKIT_LOSS "int reduction, int ignore_index, float label_smoothing, float z_loss, float softcap"
#define MEMKIT_LINEAR "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? weight, "
  m.def(
      "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, str reduction='mean', int ignore_index=-100, "
      "float label_smoothing=0.0, *, float z_loss=0.0, float? softcap=None) -> Tensor");
  m.def(
      "linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, "
      "Tensor? weight=None, str reduction='mean', int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, "
      "float? softcap=None, int? chunk=None) -> Tensor");
  m.def("_cross_entropy(Tensor input, Tensor target, Tensor? weight, " MEMKIT_LOSS
        ", ScalarType dtype, int inplace) -> Tensor");
  m.def("_cross_entropy_forward(Tensor input, Tensor target, Tensor? weight, " MEMKIT_LOSS
        ", ScalarType dtype) -> (Tensor loss, Tensor stats, Tensor total)");
  m.def(
      "_cross_entropy_backward(Tensor input, Tensor grad, Tensor target, Tensor? weight, Tensor stats, Tensor "
      "total, " MEMKIT_LOSS ") -> Tensor");
  m.def(
      "_cross_entropy_backward_(Tensor(a!) input, Tensor grad, Tensor target, Tensor? weight, Tensor stats, "
      "Tensor total, " MEMKIT_LOSS ") -> Tensor(a!)");
  m.def("_linear_cross_entropy(" MEMKIT_LINEAR MEMKIT_LOSS
        ", ScalarType compute, ScalarType dtype, int chunk) -> Tensor");
  m.def("_linear_cross_entropy_forward(" MEMKIT_LINEAR MEMKIT_LOSS
        ", ScalarType compute, ScalarType dtype, int chunk, bool[3] grads) -> "
        "(Tensor loss, Tensor stats, Tensor factors, Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  m.def("_linear_cross_entropy_backward(Tensor grad, " MEMKIT_LINEAR "Tensor stats, " MEMKIT_LOSS
        ", ScalarType compute, int chunk, bool[3] grads) -> (Tensor, Tensor, Tensor)");
#undef MEMKIT_LOSS
#undef MEMKIT_LINEAR

  // LayerNorm (centered) and RMSNorm over the last `dims` dimensions but for the `behind` last ones, of the input or of
  // input + residual; `dtype` is the
  // output's. save: "auto" | "input" | "output". The last two are the backends' part; `sum` and `mean` have no elements
  // where there are none, nor have gradients that are not `wanted` (of input, weight, bias).
  m.def(
      "_row_norm(Tensor input, int dims, int behind, Tensor? weight, Tensor? bias, float eps, bool centered, "
      "ScalarType dtype, str save, str denominator=\"root\") -> Tensor");
  m.def(
      "_add_row_norm(Tensor input, Tensor residual, int dims, Tensor? weight, Tensor? bias, float eps, bool centered, "
      "ScalarType dtype, str save) -> (Tensor normed, Tensor sum)");
  m.def(
      "_row_norm_forward(Tensor input, Tensor? residual, int dims, int behind, Tensor? weight, Tensor? bias, float "
      "eps, bool centered, ScalarType dtype, str denominator=\"root\") -> (Tensor out, Tensor sum, Tensor mean, Tensor "
      "rstd)");
  m.def(
      "_row_norm_backward(Tensor grad, Tensor? grad_sum, Tensor saved, int dims, int behind, Tensor? weight, Tensor? "
      "bias, Tensor? mean, Tensor rstd, bool centered, bool from_output, ScalarType input_dtype, bool[3] wanted, float "
      "eps=0, str denominator=\"root\") -> (Tensor, Tensor, Tensor)");

  // Batch norm with an activation behind it (a name as above, '' for none), by the statistics given or else its own,
  // which it returns; what a batch norm with running statistics does in eager mode; group norm. The rest is the backends' part: with groups 0 one statistic a channel, else one for each
  // group of each sample. c1, c2: what the gradient loses for the input's part in its own statistics.
  m.def(
      "_batch_norm_act(Tensor input, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? variance, float eps, str act, "
      "float[] params, ScalarType dtype) -> (Tensor out, Tensor mean, Tensor variance)");
  m.def(
      "_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!) running_mean, Tensor(b!) running_var, bool "
      "training, float momentum, float eps, str act, float[] params, ScalarType dtype) -> Tensor");
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

  // An operator and the layers that consume its result, which backward makes again from what the operator was given.
  //   op          "activation": inputs input, bias, seed; numbers drop where there is a seed, then params
  //               "glu": gate, up;  "layer_norm", "rms_norm": input, weight, bias; dims, eps[, 1 to keep the result]
  //               "batch_norm": input, weight, bias, mean, variance; eps, params
  //   conv        [] for linear layers; else the stride, padding and dilation of a 2d convolution, two each, and its groups
  //   dtype       of the layers, to which the result is cast; None: the input's
  //   statistics  what the norms keep beside their inputs, and a kept result, which backward takes for the input
  //   wanted      gradients: of inputs, weights, biases
  m.def(
      "_consumer(Tensor?[] inputs, str op, str act, str packing, float[] numbers, Tensor[] weights, Tensor?[] biases, "
      "int[] conv, ScalarType? dtype=None) -> (Tensor[] outputs, Tensor[] statistics)",
      tags);
  m.def(
      "_consumer_backward(Tensor?[] grads, Tensor?[] inputs, Tensor[] statistics, str op, str act, str packing, "
      "float[] "
      "numbers, Tensor[] weights, int[] conv, bool[] wanted) -> Tensor[]",
      tags);

  // One optimizer step for all parameters in the lists; lists of state that a rule has not are empty.
  //   *_scales   one float32 a block of block_size elements where the moments are int8 and uint8; no elements where not
  //   lr_tensor  the learning rate in place of lr;  seed  int64: bfloat16 is rounded stochastically
  //   grad_scale, found_inf  as PyTorch's fused optimizers take them: gradients are written back without their scale
#define MEMKIT_STEP "int block_size=256, Tensor? seed=None, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()"
  m.def(
      "_adamw_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
      "Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] exp_avg_scales, Tensor(g!)[] exp_avg_sq_scales, Tensor(h!)[] steps, "
      "*, float lr, Tensor? lr_tensor=None, float beta1, float beta2, float eps, float weight_decay, "
      "bool maximize=False, " MEMKIT_STEP);
  m.def(
      "_sgd_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffers, Tensor(d!)[] momentum_scales, "
      "Tensor(e!)[] steps, *, float lr, Tensor? lr_tensor=None, float momentum=0, float dampening=0, "
      "float weight_decay=0, bool nesterov=False, bool maximize=False, " MEMKIT_STEP);
#undef MEMKIT_STEP

  // Scratch tensors of a memkit.Pool, by its id. The tag keeps a compiler from making one of two equal calls.
  const std::vector<at::Tag> fresh{at::Tag::nondeterministic_seeded};
  m.def(
      "pool_empty(int pool, SymInt[] size, *, ScalarType? dtype=None, MemoryFormat? memory_format=None, str tag='') -> "
      "Tensor",
      fresh);
  m.def("pool_empty_strided(int pool, SymInt[] size, SymInt[] stride, *, ScalarType? dtype=None, str tag='') -> Tensor",
        fresh);
}
