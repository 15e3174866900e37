"""What memkit's losses are held against, in PyTorch alone: as people write them today, and the truth in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def stock(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """F.cross_entropy, with a softcap before and a z-loss beside it."""
    x = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    kwargs: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if z_loss == 0:
        return F.cross_entropy(x, target, weight, reduction=reduction, **kwargs)
    regular = z_loss * x.logsumexp(1 if x.dim() > 1 else 0).square()
    total = torch.tensor(float(regular.numel()), dtype=x.dtype, device=x.device)
    if not target.is_floating_point():
        counted = target != ignore_index
        regular = regular * counted
        weights = counted if weight is None else weight[target.clamp_min(0)] * counted
        total = weights.sum()
    losses = F.cross_entropy(x, target, weight, reduction="none", **kwargs) + regular
    if reduction == "none":
        return losses
    return losses.sum() / total if reduction == "mean" else losses.sum()


def reference(logits: Tensor, target: Tensor, weight: Tensor | None = None, **kwargs: Any) -> Tensor:
    """The truth: as :func:`stock`, in float64."""
    wide = target.double() if target.is_floating_point() else target
    return stock(logits.double(), wide, None if weight is None else weight.double(), **kwargs)


def stock_linear(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """The logits whole, in the dtype of the input."""
    return stock(F.linear(input, linear_weight, linear_bias), target, **kwargs)
