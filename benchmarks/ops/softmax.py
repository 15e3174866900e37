"""Softmax of rows of 1,024 elements, or of 64 or 32,768. Masked is softmax of scaled scores [heads, queries, keys] with a
mask of bools, causal with that of a decoder; stock PyTorch takes several operators for both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import memkit.functional as M

from .op import Op, Size, with_in_place

SCALE = 0.125
KEYS = 1024


def rows(columns: int, log: bool = False) -> Op:
    ours = M.log_softmax if log else M.softmax
    return with_in_place(
        lambda x: (F.log_softmax if log else F.softmax)(x, -1),
        lambda x, inplace=False: ours(x, -1, inplace=inplace),
        lambda size: [size.normal(-1, columns)],
        least=columns,
    )


def scores(size: Size) -> list[Tensor]:
    return [size.normal(-1, queries(size), KEYS)]


def queries(size: Size) -> int:
    return min(KEYS, size.elements // KEYS)


def mask(size: Size) -> list[Tensor]:
    return [size.normal(queries(size), KEYS, part=8) > -1]


def stock(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """As people write it, without a thought for rows of which nothing is left."""
    if mask is None:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
    return F.softmax((x * SCALE).masked_fill(~mask, -torch.inf), -1)


def masked(x: Tensor, mask: Tensor, **more: Any) -> Tensor:
    return M.softmax(x, -1, scale=SCALE, mask=mask, **more)


def causal(x: Tensor, **more: Any) -> Tensor:
    return M.softmax(x, -1, scale=SCALE, causal=True, **more)


OPS = {
    "softmax": rows(KEYS),
    "softmax, rows of 64": rows(64),
    "softmax, rows of 32Ki": rows(32768),
    "log_softmax": rows(KEYS, log=True),
    "softmax, masked": with_in_place(stock, masked, scores, parameters=mask),
    "softmax, causal": with_in_place(stock, causal, scores),
}
