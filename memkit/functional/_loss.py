"""Losses over many classes: no softmax is kept, and no logits where they come from a linear layer.

Both take the arguments of their ``torch.nn.functional`` twin, in their order, and three more:

``z_loss``
    Adds ``z_loss * logsumexp(logits)²`` to each row's loss (Chowdhery et al. 2022, PaLM), not weighted by class weights
    and reduced as the loss is.
``softcap``
    Takes ``softcap * tanh(logits / softcap)`` for the logits (Gemma 2). None: as they are.
``inplace`` (cross_entropy), ``chunk`` (linear_cross_entropy)
    See there.

Dtypes: float32, float64, float16, bfloat16, computed in float32 (float64 in float64); the loss has the input's dtype, and
float32 under autocast. Targets: class indices (int64, int32, uint8), or probabilities of any floating dtype. A row whose
target is ``ignore_index`` has loss and gradient 0, whatever its logits. Devices: CPU, CUDA. Where a target or a class
weight requires grad, under ``torch.func`` transforms and in forward mode, PyTorch's own operators do the work.
``TypeError``: a dtype; ``ValueError``: a shape or a number out of range; ``IndexError``: a class index out of range (on
CUDA the kernel stops, as PyTorch's does); ``RuntimeError``: devices or layouts that do not fit, in place refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._sharding import call
from . import _flops
from ._activation import Inplace, check_inplace
from ._partition import keep_results
from ._shared import check_number, check_tensor, describe

__all__ = ["cross_entropy", "linear_cross_entropy"]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    inplace: Inplace = False,
) -> Tensor:
    """torch.nn.functional.cross_entropy that keeps the logits and 8 bytes a row for backward, and no softmax.

    Shapes: input [C], [N, C] or [N, C, d1, ...]; target without C for class indices, as the input for probabilities.

    ``inplace``: where backward writes the logits' gradient. ``False``: into a new tensor. ``True``: into the logits' own
    memory; their values are then gone after backward, and an operation that kept them raises if its backward comes
    later. Raises where it would corrupt: a leaf that requires grad, an output that its producer kept, logits that another
    operation kept. ``"auto"``: into the logits' memory where reference counts prove, in backward, that nothing else can
    read it; keep no variable for the logits. A backward with ``retain_graph=True`` writes into a new tensor. Without
    grad, and under a compiler, ``inplace`` does nothing.

    Higher derivatives: through PyTorch's own operators.
    """
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    if not is_dynamo_compiling():
        out = _C.cross_entropy(
            input,
            target,
            weight,
            reduction,
            ignore_index,
            label_smoothing,
            z_loss,
            _cap("cross_entropy", softcap),
            inplace,
        )
        if out is not None:
            return out
    check_inplace("cross_entropy", inplace)
    result: Tensor = call(
        "cross_entropy",
        input,
        target,
        weight,
        reduction,
        ignore_index,
        label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
    )
    return result


def _cap(op: str, softcap: float | None) -> float:
    if softcap is None:
        return 0.0
    check_number(op, "softcap", softcap)
    if not softcap > 0:
        raise ValueError(f"{op}: expected softcap None or above 0, got {softcap}")
    return softcap


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """cross_entropy(linear(input, linear_weight, linear_bias), target), the logits never whole.

    Shapes: input [..., d], linear_weight [C, d], linear_bias [C], target [...] of class indices or [..., C] of
    probabilities; a weight [C, d1, ..., d] as in torch.nn.functional makes the logits whole.

    Rows are taken ``chunk`` at a time, by default an eighth of them (at least 64, or 1,024 on a GPU; at most what fits
    512 MiB, if that is 1,024 or more): the logits of a chunk are made, turned into their gradient where they lie, and
    multiplied into the gradients of input and weight. So reduced losses have their gradients made in the forward, which
    therefore takes the backward's time too wherever grad is enabled and something requires it, and keeps the gradients
    alone. With ``reduction="none"`` backward makes the logits once more. Under autocast the products are in its dtype and
    the weight's gradient adds up in float32; else, in float16 and bfloat16, it does so from 17 chunks on. In float16 the
    gradients of reduced losses add up in float32, are kept as large as float16 holds them, and are scaled in backward,
    where a loss scale arrives.

    A second derivative raises ``NotImplementedError``.
    """
    for name, given in (("input", input), ("linear_weight", linear_weight), ("target", target)):
        check_tensor("linear_cross_entropy", name, given)
    ignored = -100 if ignore_index is None else ignore_index
    if not is_dynamo_compiling():
        _flops.tell()
    if linear_weight.dim() > 2:
        return _many_dimensions(
            input,
            linear_weight,
            target,
            linear_bias,
            weight,
            reduction,
            ignored,
            label_smoothing,
            z_loss,
            softcap,
        )
    result: Tensor = call(
        "linear_cross_entropy",
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignored,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        chunk=chunk,
    )
    return result


def _many_dimensions(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *rest: Any
) -> Tensor:
    """A weight [C, d1, ..., in_features], whose logits are [N, C, d1, ...]."""
    shape, features = linear_weight.shape[:-1], linear_weight.shape[-1]
    if input.dim() != 2 or input.shape[1] != features:
        raise ValueError(
            f"linear_cross_entropy: expected an input of [N, {features}] beside a weight of "
            f"{list(linear_weight.shape)}, got {list(input.shape)}"
        )
    if linear_bias is not None and linear_bias.shape != shape:
        raise ValueError(
            f"linear_cross_entropy: expected a bias of shape {list(shape)}, got {list(linear_bias.shape)}"
        )
    logits = torch.nn.functional.linear(
        input,
        linear_weight.reshape(math.prod(shape), features),
        None if linear_bias is None else linear_bias.reshape(-1),
    ).reshape(input.shape[0], *shape)
    weight, reduction, ignore_index, label_smoothing, z_loss, softcap = rest
    return cross_entropy(
        logits,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
    )


keep_results(
    "_linear_cross_entropy_forward"
)  # the gradients, of the last in forward and the first in backward
describe(
    (cross_entropy, linear_cross_entropy),
    """
    The loss has the input's dtype, under autocast float32. ``z_loss``: times logsumexp(logits)², added to each row's loss
    (Chowdhery et al. 2022). ``softcap``: softcap * tanh(logits / softcap) for the logits. ``TypeError``: another dtype.
    ``ValueError``: a shape or a number out of range. ``IndexError``: a class index out of range. ``RuntimeError``: devices
    or layouts that do not fit, in place refused.
    """,
)
