"""A recurrence over the tokens a piece at a time, of which what it is given is kept, and a state between two pieces.

A piece is worked off in chunks: what decays within one are products of matrices, and one state a chunk goes on to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as stock

from .checkpoint import checkpointed

PIECE = 512
LEAST = -80.0
"""Of what decays further nothing is left: numbers below a float's normal ones take processors a hundred times as long."""


def in_pieces(
    step: Callable[..., tuple[Tensor, Tensor]], state: Tensor | None, tokens: Sequence[Tensor], *others: Any
) -> tuple[Tensor, Tensor]:
    """The results of ``step(state, *pieces of tokens, *others)``, [batch, tokens, ...] as ``tokens``, and the last state."""
    results = []
    for piece in zip(*(torch.split(x, PIECE, 1) for x in tokens), strict=True):
        result, state = checkpointed(step, state, *piece, *others, rng=False)
        results.append(result)
    assert state is not None  # there are tokens
    return (results[0] if len(results) == 1 else torch.cat(results, 1)), state


def in_chunks(x: Tensor, size: int) -> Tensor:
    """[batch, tokens, heads, ...] as [chunks, batch, heads, size, ...]; zeros make up the last."""
    if missing := -x.shape[1] % size:
        x = stock.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return torch.unflatten(x, 1, (-1, size)).transpose(2, 3).transpose(0, 1).contiguous()


def as_tokens(x: Tensor, count: int) -> Tensor:
    """What `in_chunks` made, of any width, as it was before; a tensor of its own, which others may write to."""
    x = x.transpose(0, 1).transpose(2, 3).flatten(1, 2)
    return x if x.shape[1] == count else x[:, :count].clone()


def decay(exponent: Tensor) -> Tensor:
    return stock.threshold(exponent, LEAST, -torch.inf).exp()


def decays(logarithms: Tensor) -> Tensor:
    """What is left at token i of what came in at token j, [..., j, i], 1 where i comes first.

    Of sums of the logarithms in between, [..., tokens]: differences of sums from the start lose what is small beside them.
    """
    upper = logarithms.new_ones(logarithms.shape[-1], logarithms.shape[-1]).triu()
    return decay((logarithms.unsqueeze(-2) * upper.triu(1)) @ upper)
