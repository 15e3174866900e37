"""What memkit's softmax is held against, in PyTorch alone: as people write it, and with float64 in, the truth."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def stock(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    log: bool = False,
) -> Tensor:
    """Scores as attention masks them; a row of which nothing is left is 0, its logarithm -infinity."""
    z = x if scale == 1 else x * scale
    if causal:
        seen = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril()
        z = z.masked_fill(~seen, -torch.inf)
    if mask is not None:
        z = z.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else z + mask
    of = F.log_softmax if log else F.softmax
    if mask is None and not causal:
        return of(z, dim).to(x.dtype)
    empty = (z == -torch.inf).all(dim, keepdim=True)
    return of(z.masked_fill(empty, 0), dim).masked_fill(empty, -torch.inf if log else 0).to(x.dtype)
