"""What memkit's rotary embeddings are held against, in PyTorch alone: as models write them, and the truth in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def halves(x: Tensor) -> Tensor:
    """(a, b) -> (-b, a) of the two halves."""
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def neighbours(x: Tensor) -> Tensor:
    """(a, b) -> (-b, a) of neighbours."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def stock(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: bool = False,
    layout: str = "bhsd",
) -> Tensor:
    """As in transformers' models, with a column for each element that is turned."""
    length = x.size(2 if layout == "bhsd" else 1)
    cos, sin = (t[..., :length, :] if position_ids is None else t[position_ids] for t in (cos, sin))
    cos, sin = (t.unsqueeze(-3 if layout == "bhsd" else -2).to(x.dtype) for t in (cos, sin))
    part, rest = x[..., : cos.size(-1)], x[..., cos.size(-1) :]
    turned = part * cos + (neighbours if interleaved else halves)(part) * sin
    return torch.cat((turned, rest), -1) if rest.size(-1) else turned


def tables(
    positions: int, dim: int, *, interleaved: bool = False, base: float = 10000.0
) -> tuple[Tensor, Tensor]:
    """cos and sin in float64, [positions, dim]."""
    steps = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), steps)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()
