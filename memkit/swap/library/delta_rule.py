"""The gated delta rule in chunks: "Gated Delta Networks" (Yang, Kautz and Hatamizadeh, 2024), after "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length" (Yang and others, 2024); with a decay a channel, Kimi Delta Attention.

    S = exp(g[t]) S,   S += k[t] (beta[t] (v[t] - Sᵀ k[t]))ᵀ,   o[t] = Sᵀ q[t]

What a chunk's tokens write depends on what those before them wrote: a triangular system, solved for what is left of the
values after what the state before the chunk knows of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .pieces import as_tokens, decay, decays, in_chunks, in_pieces

CHUNK, CHUNK_BY_CHANNEL = 32, 16


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    chunk_size: int = CHUNK,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The result, [batch, tokens, heads, width] as the value, in the query's dtype; and the last state if that is wanted.

    Query and key may have fewer heads, each for some neighbours. beta is [batch, tokens, heads], g too, or as the key, whose
    channels then decay each by itself. States are [batch, heads, width of keys, width of values]. The query is divided by
    the square root of its width, after both were normalized if wanted.
    """
    size = CHUNK if g.dim() == beta.dim() else CHUNK_BY_CHANNEL
    if state is not None:
        state = state.float()
    tokens = query, key, value, g, beta
    out, state = in_pieces(_piece, state, tokens, use_qk_l2norm_in_kernel, min(chunk_size, size))
    return out.to(query.dtype), state if output_final_state else None


def _piece(
    state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool, size: int
) -> tuple[Tensor, Tensor]:
    count, width = q.shape[1], q.shape[3]
    group = (q.shape[2], v.shape[2] // q.shape[2])
    q, k, v, g, beta = (in_chunks(x.float(), size) for x in (q, k, v, g, beta))
    g, beta, v = (torch.unflatten(x, 2, group) for x in (g, beta.unsqueeze(-1), v))
    # Factors of rows go where two rows meet, or to a decay, so that each row is written anew once for a use.
    of_q, of_k = ((_inverse_norm(x) if norm else torch.ones_like(x[..., :1])).unsqueeze(3) for x in (q, k))
    of_q, written = of_q * width**-0.5, of_k * beta
    by = _by_head if g.dim() == beta.dim() - 1 else _by_channel
    attention, system, since, until = by(q, k, g, of_k)
    attention, system = attention * of_q.mT, system * written.mT
    q, k = q.unsqueeze(3), k.unsqueeze(3)
    parts = (q * (of_q * since), k * (-written * since), k * until, v * beta)

    results, shape = [], v.shape
    if state is None:
        state = v.new_zeros(*shape[1:4], width, shape[-1])
    state = state.flatten(0, -3)
    chunks = (x.flatten(1, 3).unbind() for x in (*parts, attention.mT, system.mT, since[..., -1:, :].mT))
    for reads, unwritten, writes, value, attends, solves, kept in zip(*chunks, strict=True):
        news = torch.baddbmm(value, unwritten, state)
        news = torch.linalg.solve_triangular(solves, news, upper=False, unitriangular=True)
        results.append(torch.baddbmm(reads @ state, attends, news))
        state = torch.baddbmm(state * kept, writes.mT, news)
    out = torch.stack(results).view(shape).flatten(2, 3)
    return as_tokens(out, count), state.view(shape[1], -1, width, shape[-1])


def _by_head(q: Tensor, k: Tensor, g: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Products of keys, down, with queries and with keys, times what is left of the one at the other; what is left since the
    chunk's start; and of the keys at its end."""
    left = decays(g) * of_k
    with_q, with_k = (k @ q.mT).triu().unsqueeze(3) * left, (k @ k.mT).unsqueeze(3) * left
    return with_q, with_k, decay(g.cumsum(-1)).unsqueeze(-1), left[..., -1:]


def _by_channel(q: Tensor, k: Tensor, g: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Here each summand of a product has a factor of its own."""
    total = g.cumsum(-2)
    later = g.new_full((g.shape[-2], g.shape[-2]), -torch.inf).triu(1).unsqueeze(-1)
    left = decay(total.unsqueeze(-2) - total.unsqueeze(-3) + later)
    keys = left * (k.unsqueeze(3) * of_k).unsqueeze(-3)
    with_q, with_k = (keys @ torch.stack((q, k), -1).unsqueeze(3)).unbind(-1)
    return with_q.mT, with_k.mT, decay(total), decay(total[..., -1:, :] - total) * of_k


def _inverse_norm(x: Tensor) -> Tensor:
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() + 1e-6)
