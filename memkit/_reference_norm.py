"""What memkit's norms are held against, in PyTorch alone: as people run them today, and the truth in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._reference import stock as stock_activation


def add_layer_norm(
    input: Tensor, residual: Tensor, normalized_shape: Sequence[int], *args: Any
) -> tuple[Tensor, Tensor]:
    total = input + residual
    return F.layer_norm(total, list(normalized_shape), *args), total


def add_rms_norm(
    input: Tensor, residual: Tensor, normalized_shape: Sequence[int], *args: Any
) -> tuple[Tensor, Tensor]:
    total = input + residual
    return F.rms_norm(total, list(normalized_shape), *args), total


def batch_norm_act(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *args: Any,
    act: str | None = None,
    **params: Any,
) -> Tensor:
    normed = F.batch_norm(input, running_mean, running_var, *args)
    if act is None:
        return normed
    if act == "gelu_tanh":
        return stock_activation("gelu", normed, approximate="tanh")
    return stock_activation(act, normed, **params)


STOCK: dict[str, Callable[..., Any]] = {
    "layer_norm": F.layer_norm,
    "rms_norm": F.rms_norm,
    "add_layer_norm": add_layer_norm,
    "add_rms_norm": add_rms_norm,
    "group_norm": F.group_norm,
    "batch_norm_act": batch_norm_act,
}


def run(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    grads: Sequence[Tensor],
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """The results of function(*tensors), detached, then the gradients of all tensors; in ``dtype`` where it is given."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    out = function(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    incoming = [g.to(o.dtype) for o, g in zip(outs, grads, strict=True)]
    found = torch.autograd.grad(outs, leaves, incoming)
    return [o.detach() for o in outs] + list(found)
