"""Mamba's recurrence over the tokens, of which what it is given is kept, and a state every `PIECE` tokens.

    h[t] = exp(delta[t] A) h[t - 1] + delta[t] u[t] B[t],   y[t] = (h[t] · C[t] + D u[t]) silu(z[t])

with delta = softplus(dt + bias). Backward makes the states of a piece again, then goes through them from the last to the
first. Sums over states and channels are products of matrices, for all tokens of a piece at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as stock

PIECE = 64


def selective_scan(
    u: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    delta_softplus: bool = False,
) -> Tensor:
    """The result, [batch, channels, tokens] as u, dt and z; b and c are [batch, states, tokens], a is [channels, states]."""
    return _Scan.apply(u, dt, a, b, c, d, z, bias, delta_softplus)  # type: ignore[no-any-return]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *more: Any) -> Tensor:
        d, z, bias, ctx.softplus = more
        first = tuple(map(_by_token, (u, _delta(dt, bias, ctx.softplus), b, c)))
        state = u.new_zeros(u.shape[0], *a.shape)
        starts, results = [], []
        for u_t, delta, b_t, c_t in zip(*(torch.split(x, PIECE) for x in first), strict=True):
            starts.append(state)
            states = _states(u_t, delta, a, b_t, state)[1]
            results.append((states @ c_t.unsqueeze(-1)).squeeze(-1))
            state = states[-1].clone()
        ctx.save_for_backward(u, dt, a, b, c, d, z, bias, *starts[1:])
        return _result(torch.cat(results).permute(1, 2, 0), u, d, z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        u, dt, a, b, c, d, z, bias, *starts = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated
            # Of each by itself, be one made from the other.
            given: list[Any] = [x if x is None else x.view_as(x) for x in (u, dt, a, b, c, d, z, bias)]
            leaves = [x for x, each in zip(given, ctx.needs_input_grad, strict=False) if each]
            u, dt, a, b, c, d, z, bias = given
            out = _token_by_token(u, dt, a, b, c, d, z, bias, ctx.softplus)
            found = iter(torch.autograd.grad(out, leaves, grad, create_graph=True))
            return (*(next(found) if each else None for each in ctx.needs_input_grad[:8]), None)
        delta = _delta(dt, bias, ctx.softplus)
        u_t, delta_t, b_t, c_t = map(_by_token, (u, delta, b, c))
        pieces = list(zip(*(torch.split(x, PIECE) for x in (u_t, delta_t, b_t, c_t)), strict=True))
        starts = [u.new_zeros(u.shape[0], *a.shape), *starts]
        # Of what stands behind the recurrence: its result is made first, a piece at a time.
        grad_y = grad if z is None else grad * stock.silu(z)
        grad_d = None if d is None else (grad_y * u).sum((0, 2))
        grad_z = None if z is None else torch.empty_like(grad)
        grad_y_t = _by_token(grad_y)
        grad_u, grad_delta = torch.empty_like(u_t), torch.empty_like(delta_t)
        grad_b, grad_c = torch.empty_like(b_t), torch.empty_like(c_t)
        grad_a, behind = torch.zeros_like(a), torch.zeros_like(starts[0])
        for i in reversed(range(len(pieces))):
            part = slice(i * PIECE, (i + 1) * PIECE)
            u_i, delta_i, b_i, c_i = pieces[i]
            decay, states = _states(u_i, delta_i, a, b_i, starts[i])
            if grad_z is not None:
                grad_z[..., part] = (states @ c_i.unsqueeze(-1)).squeeze(-1).permute(1, 2, 0)
            y = grad_y_t[part]
            grad_c[part] = (y.unsqueeze(-2) @ states).squeeze(-2)
            g = y.unsqueeze(-1) * c_i.unsqueeze(-2)
            g[-1] += behind
            for t in reversed(range(len(g) - 1)):
                g[t].addcmul_(decay[t + 1], g[t + 1])
            behind = decay[0] * g[0]
            into = delta_i * u_i
            grad_b[part] = (into.unsqueeze(-2) @ g).squeeze(-2)
            grad_into = (g @ b_i.unsqueeze(-1)).squeeze(-1)
            grad_u[part] = grad_into * delta_i
            # Of the exponent, delta A.
            g[0] *= starts[i]
            g[1:] *= states[:-1]
            g *= decay
            grad_delta[part] = torch.einsum("tbcn,cn->tbc", g, a).addcmul_(grad_into, u_i)
            grad_a += torch.einsum("tbcn,tbc->cn", g, delta_i)
        grad_u = grad_u.permute(1, 2, 0)
        if d is not None:
            grad_u = grad_u + grad_y * d[:, None]
        if grad_z is not None:
            if d is not None:
                grad_z.addcmul_(u, d[:, None])
            grad_z = torch.ops.aten.silu_backward(grad * grad_z, z)
        grad_dt = grad_delta.permute(1, 2, 0)
        if ctx.softplus:
            x = dt if bias is None else dt + bias[:, None]
            grad_dt = torch.ops.aten.softplus_backward(grad_dt, x, 1, 20)
        grad_bias = None if bias is None else grad_dt.sum((0, 2))
        of_b, of_c = grad_b.permute(1, 2, 0), grad_c.permute(1, 2, 0)
        return grad_u, grad_dt, grad_a, of_b, of_c, grad_d, grad_z, grad_bias, None


def _by_token(x: Tensor) -> Tensor:
    """[batch, channels, tokens] as [tokens, batch, channels]."""
    return x.permute(2, 0, 1).contiguous()


def _delta(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    x = dt if bias is None else dt + bias[:, None]
    return stock.softplus(x) if softplus else x


def _states(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """How much of a state is left, and the states, both [tokens, batch, channels, states]."""
    decay = torch.mul(delta.unsqueeze(-1), a).exp_()
    states = (delta * u).unsqueeze(-1) * b.unsqueeze(-2)
    for t in range(len(states)):
        state = states[t].addcmul_(decay[t], state)
    return decay, states


def _result(y: Tensor, u: Tensor, d: Tensor | None, z: Tensor | None) -> Tensor:
    y = y.contiguous() if d is None else torch.addcmul(y, u, d[:, None])
    return y if z is None else y * stock.silu(z)


def _token_by_token(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Any, z: Any, bias: Any, softplus: bool
) -> Tensor:
    """By operators that have derivatives."""
    delta = _delta(dt, bias, softplus)
    state, results = u.new_zeros(u.shape[0], *a.shape), []
    for t in range(u.shape[-1]):
        now = delta[..., t, None]
        state = torch.exp(now * a) * state + now * u[..., t, None] * b[:, None, :, t]
        results.append((state * c[:, None, :, t]).sum(-1))
    return _result(torch.stack(results, -1), u, d, z)
