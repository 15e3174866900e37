"""Batch norm with an activation behind it, and group norm: the input and the statistics are all that is kept for backward.

Stock PyTorch keeps the input of the norm and, for most activations, the input of the activation as well; here that is
computed again. weight keeps its sign: nothing is inverted, so pretrained weights of either sign are exact. The rest is as
in :mod:`memkit.functional._norm`: statistics in float32 (float64 for float64), the autocast dtype as the
result's under autocast, weights of another dtype than the input's. Channels last stays channels last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._sharding import call
from ._activation import _PARAMETERS
from ._norm import output_dtype
from ._shared import check_number, describe

__all__ = ["batch_norm_act", "group_norm"]


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Each group of channels of each sample normalised (Wu and He 2018).

    As in PyTorch, the result is channels_last where the input is, on the CPU, and else contiguous.
    """
    if not hasattr(num_groups, "__index__"):
        raise TypeError(f"group_norm: expected num_groups to be an int, got {type(num_groups).__name__}")
    if num_groups < 1:
        raise ValueError(f"group_norm: expected num_groups of at least 1, got {num_groups}")
    if not is_dynamo_compiling():
        out: Tensor | None = _C.group_norm(input, num_groups, weight, bias, eps)
        if out is not None:
            return out
    x = input.contiguous() if input.is_cuda else input
    found: Tensor = call("_group_norm", x, num_groups, weight, bias, eps, output_dtype(input))
    return found


def batch_norm_act(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    act: str | None = None,
    process_group: Any = None,
    **params: Any,
) -> Tensor:
    """act(batch_norm(input)) (Ioffe and Szegedy 2015), with act the name of an activation of :mod:`memkit.functional`.

    ``act``: None for none; "gelu_tanh" is gelu(approximate="tanh"). ``params``: the activation's own, by name
    (``negative_slope=0.2``). ``process_group``: a group of ``torch.distributed`` over whose processes the statistics of a
    training step are taken together, and the gradients of those statistics; None for this process alone.
    ``ValueError``: one value a channel or an eps of 0 in training, or an eps below 0, as in PyTorch.
    """
    check_eps("batch_norm_act", training, eps)
    name = act or ""
    names = _PARAMETERS.get(name, {})
    if not params.keys() <= names.keys():
        raise TypeError(
            f"batch_norm_act: expected parameters {sorted(names)} for {act}, got {sorted(params)}"
        )
    values = [params.get(key, default) for key, default in names.items()]
    if process_group is None and not is_dynamo_compiling():
        found: Tensor | None = _C.batch_norm_act(
            *(input, weight, bias, running_mean, running_var, bool(training)),
            *(momentum if training else 0.0, eps, name, values),
        )
        if found is not None:
            return found
    if training:
        check_running("batch_norm_act", input, running_mean, running_var)
    if not training:
        if running_mean is None or running_var is None:
            raise ValueError(
                "batch_norm_act: expected running_mean and running_var outside training, got None"
            )
        return _run(input, weight, bias, running_mean, running_var, eps, name, values)[0]
    if process_group is not None:
        from ._sync_norm import synchronised

        out, mean, variance, count = synchronised(input, weight, bias, eps, name, values, process_group)
    else:
        count = input.numel() // max(1, input.shape[1]) if input.dim() > 1 else 0
        if input.dim() > 1 and count == 1:
            raise ValueError(
                f"batch_norm_act: expected more than 1 value per channel when training, got {list(input.shape)}"
            )
        out, mean, variance = _run(input, weight, bias, None, None, eps, name, values)
    if running_mean is not None and running_var is not None and count:
        move_running(running_mean, running_var, mean, variance, count, momentum)
    return out


def _run(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    eps: float,
    act: str,
    params: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    made: tuple[Tensor, Tensor, Tensor] = call(
        "_batch_norm_act", input, weight, bias, mean, variance, eps, act, params, output_dtype(input)
    )
    return made


def check_eps(op: str, training: bool, eps: float) -> None:
    """What torch.nn.functional.batch_norm takes."""
    check_number(op, "eps", eps)
    if eps <= 0 and (training or eps < 0):
        least = "above 0 when training" if training else "of at least 0"
        raise ValueError(f"{op}: expected an eps {least}, got {eps}")


def check_running(op: str, input: Tensor, *statistics: Tensor | None) -> None:
    """Before a training step writes to them: one that fits is not to change where the other does not fit."""
    if len({each is None for each in statistics}) > 1:
        raise ValueError(f"{op}: expected both running_mean and running_var or neither, got one")
    for each in statistics:
        if each is None or input.dim() < 2:
            continue
        fits = tuple(each.shape) == (input.shape[1],) and each.device == input.device
        if not fits or not each.is_floating_point():
            raise ValueError(
                f"{op}: expected running statistics of {input.shape[1]} floating-point numbers on {input.device}, "
                f"got {each.dtype} {list(each.shape)} on {each.device}"
            )
        if each.shape[0] > 1 and each.stride(0) == 0:
            raise RuntimeError(
                f"{op}: expected running statistics to be written in place, got an expanded tensor; clone() it first"
            )


def move_running(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, variance: Tensor, count: int, momentum: float
) -> None:
    """Towards the statistics of `count` values, the variance over count, not count - 1."""
    moved = (running_mean, running_var, mean, variance, count, momentum)
    if is_dynamo_compiling() or _C.move_running(*moved) is None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)


describe(
    (group_norm, batch_norm_act),
    """
    Shapes: input [N, C, ...], whose shape the result has; weight, bias and running statistics [C]. Weights may be float32
    beside an input of half precision. ``ValueError``: shapes that do not fit, one value a channel in training, an unknown
    ``act``. ``TypeError``: another dtype, unknown parameters. ``RuntimeError``: a device or layout without a kernel, tensors
    of several devices.
    """,
)
