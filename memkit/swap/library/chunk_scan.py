"""Mamba 2's recurrence in chunks: "Transformers are SSMs" (Dao and Gu, 2024), the algorithm of section 6.

    h[t] = exp(delta[t] a) h[t - 1] + delta[t] x[t] b[t],   y[t] = h[t] · c[t] + d x[t]

Within a chunk that is attention with c for queries and b for keys, one product for all heads of a group, times what decays
between two tokens. A state a chunk carries what came before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as stock

from .pieces import as_tokens, decay, decays, in_chunks, in_pieces

CHUNK = 64


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    chunk_size: int = CHUNK,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Any:
    """The result, [batch, tokens, heads, width] as x, in float32 or wider; with the last state if that is wanted.

    dt is [batch, tokens, heads], b and c are [batch, tokens, groups, states], a, d and bias [heads], states [batch, heads,
    width, states]. delta = dt + bias, its softplus if wanted, within the limits.
    """
    if state is not None:
        state = torch.unflatten(state.float(), 1, (b.shape[2], -1)).permute(0, 1, 4, 2, 3)
    given = a, d, bias, dt_softplus, dt_limit, min(chunk_size, CHUNK)
    y, state = in_pieces(_piece, state, (x, dt, b, c), *given)
    if not return_final_states:
        return y
    return y, state.permute(0, 1, 3, 4, 2).flatten(1, 2)


def _piece(
    state: Tensor | None,
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
    limit: tuple[float, float],
    size: int,
) -> tuple[Tensor, Tensor]:
    """States are [batch, groups, states, heads of a group, width]: one product for a group."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if softplus:
        dt = stock.softplus(dt)
    dt, x = dt.clamp(*limit).float(), x.float()
    group = (b.shape[2], x.shape[2] // b.shape[2])
    logarithms = in_chunks(dt * a.to(x.dtype), size)
    into, b, c = (in_chunks(each, size) for each in (x * dt.unsqueeze(-1), b.float(), c.float()))

    left = decays(logarithms)
    pairs = (b @ c.mT).triu().unsqueeze(3) * torch.unflatten(left, 2, group)
    y = pairs.flatten(2, 3).mT @ into

    # What a chunk leaves for the next one, and what is left of the state before it.
    into = torch.unflatten(into * left[..., -1:], 2, group).transpose(3, 4)
    added = torch.unflatten(b.mT @ into.flatten(4), 4, into.shape[4:])
    since = decay(logarithms.cumsum(-1)).unsqueeze(-1)
    kept = torch.unflatten(since[..., -1, :], 2, (group[0], 1, group[1]))
    if state is None:
        state = torch.zeros_like(added[0])
    before = []
    for now, part in zip(added.unbind(), kept.unbind(), strict=True):
        before.append(state)
        state = torch.addcmul(now, state, part)
    read = (c @ torch.stack(before).flatten(4)).view(into.shape).transpose(3, 4)
    y = as_tokens(torch.addcmul(y, read.reshape(y.shape), since), x.shape[1])
    return (y if d is None else y + x * d.unsqueeze(-1)), state
