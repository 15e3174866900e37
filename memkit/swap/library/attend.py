"""Attention written out: dropout(softmax(scale · query keyᵀ + what is added)) value, of which query, key and value are kept.

Backward makes the weights again, one product and one softmax more, and is spared some passes over them that stock takes. For
what transformers' models write out because no fused kernel has it: scores that are capped (Gemma 2), a position's bias that
is learned (T5), weights that are returned. Of dropout it keeps a seed, and drops other elements than stock's under the same
random state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import functional as F
from ..._modes import in_transform
from ...functional._dropout import draw_seed, drop_numbers

DROP: tuple[Any, ...] = (None, -1, "identity", [])
"""Of ``memkit::_activation``: dropout alone."""

_as_stock = 0


@contextmanager
def stock_dropout() -> Iterator[None]:
    """Inside, twins drop what stock drops under the same random state, so that results can be compared."""
    global _as_stock
    _as_stock += 1
    try:
        yield
    finally:
        _as_stock -= 1


def may_drop(p: Any) -> bool:
    """Whether `attend` may take the place of attention with this dropout: of nothing that differs between the two runs of a
    checkpoint."""
    return isinstance(p, float) and 0.0 < p < 1.0 and not _as_stock and not in_transform()


class Scores(NamedTuple):
    scale: float
    cap: float | None = None
    """cap · tanh(scores / cap) stands for the scores, before a mask is added."""
    dropout: float = 0.0
    """Of the weights: below 1."""
    fill: float | None = None
    """Stands for the scores that a mask (bool) hides. None: nothing of them is left."""
    wide: bool = False
    """Computed in float32, the weights' dtype then, as PyTorch's function does where it has no kernel for half precision."""

    @property
    def factor(self) -> float:
        """Of the product."""
        return self.scale / (self.cap or 1.0)

    @property
    def after(self) -> float:
        """Of what the softmax is taken of."""
        return self.cap or 1.0


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scores: Scores,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The result, [batch, heads, tokens, width] as the query, and the weights, [batch, heads, tokens, keys], as they are
    multiplied with the value: with dropout.

    ``key`` and ``value`` have as many heads, or a part of them, each for some neighbours. ``mask`` is added to the scores;
    beside a ``bias``, which is added too and may be learned, it says (bool) where that is the least number there is instead,
    or, where ``scores`` has a ``fill``, what hides the sum.
    ``sinks``, which expand to [batch, heads, tokens, 1] and may be learned, are scores beside those of the keys, without a
    value: a column behind them in memory, that the products pass by.
    """
    return _Attend.apply(query, key, value, mask, bias, scores, sinks)  # type: ignore[no-any-return]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any, scores: Scores, sinks: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        kept, dtype = (query, key, value, mask, bias, sinks), query.dtype
        query, key, value, mask, bias, sinks = _in_its_dtype(kept, scores)
        _, weights = _weights(query, key, mask, bias, scores, sinks)
        seed = draw_seed("attend", weights, None) if scores.dropout else None
        ctx.save_for_backward(*kept, seed)
        ctx.scores = scores
        if seed is not None:
            torch.ops.memkit._activation_(weights, *DROP, "auto", None, seed, drop_numbers(scores.dropout))
        given = _of_keys(weights, key)
        out = query.new_empty(*query.shape[:3], value.shape[3])  # no view, which could not be written to
        torch.bmm(_grouped(given, key), value.flatten(0, 1), out=_grouped(out, key))
        if given is not weights:  # no view for autograd: it may be written to
            at = given.storage_offset(), given.shape, given.stride()
            given = weights.new_empty(0).set_(weights.untyped_storage(), *at)
        return out.to(dtype), given

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_weights: Tensor | None) -> tuple[Any, ...]:
        *saved, seed = ctx.saved_tensors
        scores: Scores = ctx.scores
        if grad is None and grad_weights is None:
            return None, None, None, None, None, None, None
        # Several gradients at once, or one that is to be differentiated.
        if _is_batched(grad) or _is_batched(grad_weights) or torch.is_grad_enabled():
            wanted = *ctx.needs_input_grad[:5], ctx.needs_input_grad[6]
            with torch.enable_grad():
                *found, grad_sinks = _gradients(saved, seed, scores, wanted, (grad, grad_weights))
            return *found, None, grad_sinks
        query, key, value, mask, bias, sinks = _in_its_dtype(saved, scores)
        grad, grad_weights = _in_its_dtype((grad, grad_weights), scores)
        capped, weights = _weights(query, key, mask, bias, scores, sinks)
        drop = None, seed, drop_numbers(scores.dropout)
        grad_value = None
        d = torch.empty_like(weights)
        if sinks is not None:
            d[..., -1] = 0
        of_keys = _of_keys(d, key)
        if grad is None:  # the weights' alone
            of_keys.copy_(grad_weights)
        else:
            grad = _grouped(grad, key)
            dropped = weights if seed is None else torch.ops.memkit._activation(weights, *DROP, "auto", *drop)
            grad_value = torch.bmm(_grouped(_of_keys(dropped, key), key).mT, grad).view(value.shape)
            del dropped
            _product(grad, value.flatten(0, 1).mT, 1.0, _grouped(of_keys, key))
            if grad_weights is not None:
                of_keys += grad_weights
        if seed is not None:
            torch.ops.memkit._activation_(d, *DROP, "auto", *drop)
        fills = scores.fill is not None
        masked = not (fills or (mask is None and bias is None))
        torch.ops.memkit._softmax_backward_(d, weights, -1, scores.after, False, False, masked)
        del weights, grad
        if capped is not None:
            torch.ops.aten.tanh_backward.grad_input(d, capped, grad_input=d)
        if fills:
            of_keys.masked_fill_(~mask, 0)
            mask = None
        grad_bias = grad_sinks = None
        if ctx.needs_input_grad[6]:
            grad_sinks = d[..., -1:].sum_to_size(sinks.shape)
        if ctx.needs_input_grad[4]:
            kept = of_keys if mask is None or mask.shape[0] == 1 else of_keys.masked_fill(~mask, 0)
            grad_bias = kept.sum_to_size(bias.shape)
            if kept is of_keys and mask is not None:
                grad_bias = grad_bias.masked_fill(~mask, 0)
        d = _grouped(of_keys, key)
        grad_query = _product(d, key.flatten(0, 1), scores.factor).view(query.shape)
        grad_key = _product(d.mT, _grouped(query, key), scores.factor).view(key.shape)
        grads = grad_query, grad_key, grad_value, None, grad_bias, None, grad_sinks
        return grads if not scores.wide else tuple(x if x is None else x.to(saved[0].dtype) for x in grads)


def _is_batched(x: Tensor | None) -> bool:
    functorch: Any = torch._C._functorch
    return x is not None and (functorch.is_legacy_batchedtensor(x) or functorch.is_batchedtensor(x))


def _in_its_dtype(tensors: Any, scores: Scores) -> Any:
    """That it is computed in."""
    if not scores.wide:
        return [*tensors]
    return [x.float() if x is not None and x.is_floating_point() else x for x in tensors]


def _gradients(
    given: Any, seed: Tensor | None, scores: Scores, wanted: Any, grads: tuple[Any, Any]
) -> list[Any]:
    """Of the inputs wanted, by operators that have derivatives; of each by itself, be one the other or made from it."""
    given = [x if x is None else x.view_as(x) for x in given]
    leaves = [x for x, each in zip(given, wanted, strict=True) if each]
    dtype = given[0].dtype
    query, key, value, mask, bias, sinks = _in_its_dtype(given, scores)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    s = torch.matmul(query, key.mT) * scores.factor
    if scores.cap is not None:
        s = s.tanh() * scores.cap
    if bias is not None:
        s = s + _biased(bias, mask, scores)
    elif mask is not None and scores.fill is None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask
    if scores.fill is not None:
        s = s.masked_fill(~mask, scores.fill)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype).expand(*s.shape[:3], 1)], -1)
    if scores.fill is None:
        hidden = (s == float("-inf")).all(-1, keepdim=True)
        weights = s.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
    else:
        weights = s.softmax(-1)
    if seed is not None:
        drop = drop_numbers(scores.dropout)
        weights = weights * torch.ops.memkit._dropout_mask(weights.shape, seed, drop, dtype=weights.dtype)
    weights = _of_keys(weights, key)
    results = torch.matmul(weights, value).to(dtype), weights
    outs = [out for out, g in zip(results, grads, strict=True) if g is not None]
    arrived = [g for g in grads if g is not None]
    found = iter(torch.autograd.grad(outs, leaves, arrived, create_graph=True, allow_unused=True))
    return [next(found) if each else None for each in wanted]


def _weights(
    query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, scores: Scores, sinks: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """The tanh of the scores, where they are capped, and the weights, those of sinks in a column behind the keys'."""
    s = query.new_empty(*query.shape[:3], key.shape[2] + (sinks is not None))
    of_keys = _of_keys(s, key)
    if bias is not None:
        of_keys.copy_(_biased(bias, mask, scores))
        if scores.fill is None:
            mask = s.new_zeros(1, 1, 1, 1)  # rows that see nothing are zero
    _product(
        _grouped(query, key), key.flatten(0, 1).mT, scores.factor, _grouped(of_keys, key), bias is not None
    )
    if scores.fill is not None and mask is not None:
        of_keys.masked_fill_(~mask, scores.fill)
        mask = None
    if sinks is not None:
        s[..., -1:] = sinks
        if mask is not None and mask.numel() > 1:
            mask = mask.expand(*mask.shape[:3], key.shape[2])
            mask = torch.cat(
                [mask, mask.new_full((1,), mask.dtype == torch.bool).expand(*mask.shape[:3], 1)], -1
            )
    if scores.cap is None:
        return None, F.softmax(s, -1, mask=mask, inplace=True)
    s.tanh_()
    return s, F.softmax(s, -1, scale=scores.after, mask=mask)


def _biased(bias: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """What is added."""
    return (
        bias
        if mask is None or scores.fill is not None
        else torch.where(mask, bias, torch.finfo(bias.dtype).min)
    )


def _of_keys(x: Tensor, key: Tensor) -> Tensor:
    """Its columns but that of sinks."""
    return x if x.shape[-1] == key.shape[2] else x[..., : key.shape[2]]


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """[batch, heads, tokens, width] with the heads of one key below each other."""
    return x.reshape(key.shape[0] * key.shape[1], -1, x.shape[3])


def _product(a: Tensor, b: Tensor, factor: float, out: Tensor | None = None, adds: bool = False) -> Tensor:
    """factor · a b; written to ``out``, or added to what is there."""
    if out is None:
        return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=factor)
    return out.baddbmm_(a, b, beta=float(adds), alpha=factor)
