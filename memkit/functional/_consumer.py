"""An operator and the layers that consume its result, as one: what the operator was given is all that is kept for backward.

``linear(gelu(h))`` keeps h for gelu's slope and gelu(h) for the layer's weight gradient. ``act_linear`` keeps h alone and
computes gelu(h) again in backward, into memory that then takes gelu(h)'s gradient and h's: one tensor instead of two, exact
whatever the values, for one more pass over memory. Values and gradients are those of memkit's operator followed by
``torch.nn.functional.linear``, to the bit in float32 with one layer.

``weight`` and ``bias``: as in ``torch.nn.functional.linear``. Lists of weights (and of biases, each a tensor or None) stand
for several layers of one input, as the projections of an attention layer are: the result is then a tuple, and the gradient
of their input a single sum.

Under autocast the layers compute in its dtype, with weights from autocast's cache; the operator gets its input as it
arrives, which is what is kept, and no cast of it. A norm makes its result in the autocast dtype, and may keep that where
its input is float32. Derivatives of the gradient (``create_graph=True``) go through operators that have derivatives. In a
compiled function each stays one operator, which keeps its input.

Dtypes: float32, float64, float16, bfloat16; weights of the input's dtype outside autocast. Devices: CPU, CUDA.
``ValueError``: shapes that do not fit. ``TypeError``: another dtype, or two.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, cast, overload

import torch
from torch import Generator, Tensor
from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy

from .. import _C
from .._sharding import call
from ._activation import _parameters
from ._channel_norm import check_eps, check_running, move_running
from ._dropout import check_probability, draw_seed, drop_numbers
from ._glu import Packing
from ._norm import _resolve_eps
from ._shared import check_tensor, describe

__all__ = [
    "act_conv2d",
    "act_linear",
    "conv2d",
    "dropout_linear",
    "glu_linear",
    "linear",
    "norm_act_conv2d",
    "norm_linear",
]

Tensors = Sequence[Tensor]
Biases = Sequence["Tensor | None"]
_ONE = (Tensor, Proxy)  # what stands for a single weight


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` with less memory in backward, to the bit for a contiguous input.

    The weight's gradient is made first. The input's takes the input's memory then where nobody else has that, as it is
    with what :func:`memkit.lean` makes again.
    """
    return cast(Tensor, _linear("linear", "activation", [input, None, None], weight, bias, "identity"))


@overload
def act_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    act: str = "gelu",
    *,
    act_bias: Tensor | None = None,
    **params: Any,
) -> Tensor: ...
@overload
def act_linear(
    input: Tensor,
    weight: Tensors,
    bias: Biases | None = None,
    act: str = "gelu",
    *,
    act_bias: Tensor | None = None,
    **params: Any,
) -> tuple[Tensor, ...]: ...
def act_linear(
    input: Tensor,
    weight: Tensor | Tensors,
    bias: Tensor | Biases | None = None,
    act: str = "gelu",
    *,
    act_bias: Tensor | None = None,
    **params: Any,
) -> Tensor | tuple[Tensor, ...]:
    """linear(act(input + act_bias)); keeps the input.

    ``act``: the name of an activation of :mod:`memkit.functional`, or "gelu_tanh"; ``params``: its own, by name.
    ``act_bias``: of shape [input.shape[-1]].
    """
    numbers = _parameters("act_linear", act, params)
    return _linear("act_linear", "activation", [input, act_bias, None], weight, bias, act, numbers=numbers)


@overload
def dropout_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    p: float = 0.5,
    training: bool = True,
    *,
    act: str | None = None,
    act_bias: Tensor | None = None,
    generator: Generator | None = None,
    **params: Any,
) -> Tensor: ...
@overload
def dropout_linear(
    input: Tensor,
    weight: Tensors,
    bias: Biases | None = None,
    p: float = 0.5,
    training: bool = True,
    *,
    act: str | None = None,
    act_bias: Tensor | None = None,
    generator: Generator | None = None,
    **params: Any,
) -> tuple[Tensor, ...]: ...
def dropout_linear(
    input: Tensor,
    weight: Tensor | Tensors,
    bias: Tensor | Biases | None = None,
    p: float = 0.5,
    training: bool = True,
    *,
    act: str | None = None,
    act_bias: Tensor | None = None,
    generator: Generator | None = None,
    **params: Any,
) -> Tensor | tuple[Tensor, ...]:
    """linear(dropout(act(input + act_bias))); keeps the input and a seed of 8 bytes.

    Drops what :func:`dropout` and :func:`act_dropout` drop under the same seed. The rest as in :func:`act_linear`.
    """
    check_tensor("dropout_linear", "input", input)
    check_probability("dropout_linear", p)
    act = act or "identity"
    numbers = _parameters("dropout_linear", act, params)
    seed = None
    if training and p > 0 and input.numel():
        seed = draw_seed("dropout_linear", input, generator)
        numbers = [*drop_numbers(p), *numbers]
    elif act == "identity" and act_bias is None:  # nothing in front of the layers
        weights, biases = _layers("dropout_linear", weight, bias)
        outs = tuple(torch.nn.functional.linear(input, w, b) for w, b in zip(weights, biases, strict=True))
        return outs[0] if isinstance(weight, _ONE) else outs
    return _linear(
        "dropout_linear", "activation", [input, act_bias, seed], weight, bias, act, numbers=numbers
    )


@overload
def glu_linear(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    act: str = "silu",
    *,
    packing: Packing = "gate_up",
) -> Tensor: ...
@overload
def glu_linear(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensors,
    bias: Biases | None = None,
    act: str = "silu",
    *,
    packing: Packing = "gate_up",
) -> tuple[Tensor, ...]: ...
def glu_linear(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor | Tensors,
    bias: Tensor | Biases | None = None,
    act: str = "silu",
    *,
    packing: Packing = "gate_up",
) -> Tensor | tuple[Tensor, ...]:
    """linear(act(gate) * up); keeps gate and up, whose memory takes their gradients where nobody else can see it.

    ``up=None``: gate packs both. ``act`` and ``packing`` as in :func:`gated`.
    """
    return _linear("glu_linear", "glu", [gate, up], weight, bias, act, packing)


@overload
def norm_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float | None = None,
) -> Tensor: ...
@overload
def norm_linear(
    input: Tensor,
    weight: Tensors,
    bias: Biases | None = None,
    *,
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, ...]: ...
def norm_linear(
    input: Tensor,
    weight: Tensor | Tensors,
    bias: Tensor | Biases | None = None,
    *,
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """linear(norm(input)), normalised over the last dimension; keeps the input and 8 bytes a row (rms_norm: 4).

    Exact whatever the norm's weights are. Under autocast a float32 input is twice as large as the normalised one: where the
    norm's weights allow it, by the rule of :func:`layer_norm`, that is kept instead, and 4 bytes a row. ``eps`` None: 1e-5
    for layer_norm, the machine epsilon of the type computed in for rms_norm.
    """
    if norm not in ("layer_norm", "rms_norm"):
        raise ValueError(f"norm_linear: expected norm 'layer_norm' or 'rms_norm', got {norm!r}")
    if eps is None:
        eps = 1e-5 if norm == "layer_norm" else _resolve_eps(None, input.dtype)
    return _linear("norm_linear", norm, [input, norm_weight, norm_bias], weight, bias, numbers=[1.0, eps])


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.nn.functional.conv2d`` with less memory in backward on the CPU; ``padding`` in numbers.

    The weight's gradient is made first, then the input's, which PyTorch computes in memory of another order, up to three
    times the gradient's size in all: where it is large beside the weight, a quarter of the batch at a time. Values are
    those of stock's convolution, to the bit where that computes an image alike whatever the batch.
    """
    return _convolved("conv2d", "identity", [], input, weight, bias, stride, padding, dilation, groups)


def act_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    act: str = "gelu",
    **params: Any,
) -> Tensor:
    """conv2d(act(input)); keeps the input, [N, C, H, W] or [C, H, W].

    Arguments as in :func:`conv2d`; ``act`` and ``params`` as in :func:`act_linear`.
    """
    numbers = _parameters("act_conv2d", act, params)
    return _convolved("act_conv2d", act, numbers, input, weight, bias, stride, padding, dilation, groups)


def _convolved(
    op: str,
    act: str,
    numbers: Sequence[float],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *how: Any,
) -> Tensor:
    check_tensor(op, "input", input)
    if input.dim() == 3:
        return _convolved(op, act, numbers, input.unsqueeze(0), weight, bias, *how).squeeze(0)
    if input.dim() != 4:
        raise ValueError(f"{op}: expected an input [N, C, H, W] or [C, H, W], got {list(input.shape)}")
    conv = _convolution(op, *how)
    inputs = [input, None, None]
    outputs, _ = _consumer(op, inputs, "activation", act, "", numbers, [weight], [bias], conv)
    return outputs[0]


def norm_act_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    act: str | None = "relu",
    **params: Any,
) -> Tensor:
    """conv2d(act(batch_norm(input))); keeps the input, [N, C, H, W], and 16 bytes a channel.

    The first arguments are those of ``torch.nn.functional.conv2d``, the others those of :func:`batch_norm_act`.
    ``padding`` in numbers. ``ValueError``: one value a channel or an eps of 0 in training, or an eps below 0.
    """
    op, name = "norm_act_conv2d", act or ""
    check_eps(op, training, eps)
    check_tensor(op, "input", input)
    conv = _convolution(op, stride, padding, dilation, groups)
    numbers = [eps, *_parameters(op, name, params)]
    if not is_dynamo_compiling():
        found = _C.norm_act_conv2d(
            *(input, weight, bias, conv, norm_weight, norm_bias, running_mean, running_var),
            *(bool(training), momentum if training else 0.0, name, numbers),
        )
        if found is not None:
            return found
    if input.dim() != 4:
        raise ValueError(f"{op}: expected an input of 4 dimensions, [N, C, H, W], got {list(input.shape)}")
    if not training and (running_mean is None or running_var is None):
        raise ValueError(f"{op}: expected running_mean and running_var outside training, got None")
    count = input.numel() // max(1, input.shape[1])
    if training and count == 1:
        raise ValueError(
            f"{op}: expected more than 1 value per channel when training, got {list(input.shape)}"
        )
    if training:
        check_running(op, input, running_mean, running_var)
    given = (None, None) if training else (running_mean, running_var)
    inputs = [input, norm_weight, norm_bias, *given]
    outputs, statistics = _consumer(op, inputs, "batch_norm", name, "", numbers, [weight], [bias], conv)
    if running_mean is not None and running_var is not None and training and count:
        mean, variance = statistics
        move_running(running_mean, running_var, mean, variance, count, momentum)
    return outputs[0]


def _linear(
    name: str,
    op: str,
    inputs: list[Tensor | None],
    weight: Tensor | Tensors,
    bias: Tensor | Biases | None,
    act: str = "",
    packing: str = "",
    numbers: Sequence[float] = (),
) -> Tensor | tuple[Tensor, ...]:
    check_tensor(name, "input", inputs[0])
    weights, biases = _layers(name, weight, bias)
    outputs = _consumer(name, inputs, op, act, packing, numbers, weights, biases, [])[0]
    return outputs[0] if isinstance(weight, _ONE) else tuple(outputs[i] for i in range(len(weights)))


def _consumer(
    name: str,
    inputs: list[Tensor | None],
    op: str,
    act: str,
    packing: str,
    numbers: Sequence[float],
    weights: list[Tensor],
    biases: list[Tensor | None],
    conv: list[int],
) -> tuple[list[Tensor], list[Tensor]]:
    """The layers' results and the producer's statistics."""
    args = inputs, op, act, packing, numbers, weights, biases, conv
    try:
        results = None if is_dynamo_compiling() else _C.consumer(*args)
    except TypeError:  # looked into where something is wrong, and not in every call
        for each in [*inputs[1:], *weights, *biases]:
            if each is not None:
                check_tensor(name, "a tensor argument", each)
        raise
    if results is None:
        results = call("_consumer", *args)
    return results


def _layers(
    op: str, weight: Tensor | Tensors, bias: Tensor | Biases | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """A bias or None for each weight."""
    if isinstance(weight, _ONE):
        return [weight], [bias]  # type: ignore[list-item]
    try:
        weights = list(weight)
    except TypeError:
        raise TypeError(
            f"{op}: expected weight to be a Tensor or several, got {type(weight).__name__}"
        ) from None
    if not weights:
        raise ValueError(f"{op}: expected at least 1 weight, got 0")
    biases: list[Tensor | None] = [None] * len(weights) if bias is None else list(bias)
    if len(biases) != len(weights):
        raise ValueError(
            f"{op}: expected a bias or None for each of {len(weights)} weights, got {len(biases)}"
        )
    return weights, biases


def _convolution(
    op: str,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> list[int]:
    numbers: list[int] = []
    for name, value, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        given = value if type(value) is tuple else tuple(value) if isinstance(value, Sequence) else (value,)
        fit = [hasattr(each, "__index__") and each >= least for each in given]
        if len(fit) not in (1, 2) or not all(fit):
            raise ValueError(
                f"{op}: expected {name} of one or two whole numbers, at least {least}, got {value!r}"
            )
        numbers += (operator.index(given[0]), operator.index(given[-1]))
    return [*numbers, groups]


describe(
    (linear, act_linear, dropout_linear, glu_linear, norm_linear),
    """
    Shapes: input [..., in_features] (gate and up of one shape, or a gate of twice as many features that packs both), weight
    [out_features, in_features] and bias [out_features], as in ``torch.nn.functional.linear``; the result is [...,
    out_features]. Several weights (not of ``linear``), and a bias or None for each, give a tuple. Weights have the input's
    dtype outside autocast.

    ``ValueError``: shapes that do not fit, an unknown name or a number out of range. ``TypeError``: another dtype, or two;
    no tensor. ``RuntimeError``: a device or layout without a kernel.
    """,
)
describe(
    (conv2d, act_conv2d, norm_act_conv2d),
    """
    Shapes: input [N, C, H, W], weight [out, C / groups, kH, kW], bias [out], as in ``torch.nn.functional.conv2d``. Weights
    have the input's dtype outside autocast.

    ``ValueError``: shapes that do not fit, an unknown ``act``, sizes that are no whole numbers. ``TypeError``: another
    dtype, or two; no tensor. ``RuntimeError``: a device or layout without a kernel.
    """,
)
