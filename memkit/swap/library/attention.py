"""Attention as transformers' models call it: inside :class:`memkit.lean`, query, key and value are all that is kept.

Their attention layers take the function that attends, fused or written out, from a table that their module knows under one
name. The twin runs the layer's own forward with a table of ours under that name, which hands out the same functions and
looks at what they are given:

- For a function that keeps the attention's weights, a number for each pair of tokens, :func:`attend` stands in where it
  computes the same, which values and gradients on some tokens of the first call say. Elsewhere, and with stock's dropout, it
  runs under a checkpoint: backward makes the weights again and drops the same. Fused kernels, which keep none, are called as
  they are, but for this:
- A query that has the heads first in its memory is copied, on the CPU, where the kernel would give a result that has to be.
- Where one projection gives query, key and value, and rotary embeddings have made new tensors of the first two, the value
  alone holds all its memory: it is copied. Not where a norm of query or key keeps its part of that memory.

Rotary embeddings become memkit's inside it and outside (rotary.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes

from ..._lean import is_lean
from ..layers import serves
from ..trial import HALVES
from .attend import Scores, attend, may_drop
from .rotary import NAME, calls_rotary, is_rotary, rotary_of
from .twin import (
    TOLERANCE,
    Twin,
    checkpointed,
    in_forward_mode,
    is_tracing,
    itself,
    near,
    numbers,
    own_tensors,
    twin_of,
    undecorated,
    with_names,
)

TABLE = "ALL_ATTENTION_FUNCTIONS"
FUSED = "sdpa_attention_forward"
TOKENS = 8
NEAR = 24
"""So many nodes are looked at between a projection and its parts."""

_same: dict[Any, bool] = {}
"""Whether `attend` is what a function computes, as a module of that class calls it."""


class Attention(Twin, kind="attention"):
    _in_lean, _turns, _drops = True, False, True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self)._stock_forward
        if is_compiling() or is_tracing():
            return forward(self, *args, **kwargs)
        names: dict[str, Any] = {}
        in_lean = is_lean() and torch.is_grad_enabled()
        # Asked again: of a pickle, the library may be another now.
        if self._in_lean and (in_lean or (self._drops and self.training)) and _asks(forward):
            names[TABLE] = _Table(undecorated(forward).__globals__[TABLE], self._drops, in_lean)
        if self._turns and calls_rotary(forward):
            names[NAME] = rotary_of(self, forward)
        return (with_names(forward, **names) if names else forward)(self, *args, **kwargs)


class Rotary(Attention, kind="rotary"):
    _in_lean, _turns = False, True


class RotaryAttention(Attention, kind="rotary attention"):
    _turns = True


class StockDropout(Attention, kind="attention, stock dropout"):
    _drops = False


class RotaryStockDropout(RotaryAttention, kind="rotary attention, stock dropout"):
    _drops = False


def is_attention(cls: type[nn.Module]) -> bool:
    """Whether its forward asks the table for the function, by the table's name."""
    return _asks(cls.forward)


def why_not_rotary(module: nn.Module) -> str | None:
    """Why rotary embeddings stay as they are: nothing if they become memkit's, None if its forward calls none."""
    forward = type(module).forward
    if not calls_rotary(forward):
        return None
    if "forward" in vars(module):
        return "its forward is replaced"
    same = is_rotary(forward, list(module.parameters()))
    return "" if same else f"{NAME} computes something else than memkit's apply_rotary"


def attention_twin(cls: type[nn.Module], in_lean: bool, turns: bool, drops: bool) -> type[Any]:
    """``drops``: whether memkit's dropout may take the place of stock's."""
    if not in_lean:
        return twin_of("rotary", cls)
    return twin_of(f"{'rotary ' if turns else ''}attention{'' if drops else ', stock dropout'}", cls)


def _asks(forward: Any) -> bool:
    forward = undecorated(forward)
    return (
        type(forward) is FunctionType
        and {TABLE, "get_interface"} <= set(forward.__code__.co_names)
        and hasattr(forward.__globals__.get(TABLE), "get_interface")
    )


class _Table:
    def __init__(self, stock: Any, drops: bool, in_lean: bool) -> None:
        self._stock, self._drops, self._in_lean = stock, drops, in_lean

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return partial(_attend, self._stock.get_interface(name, default), default, self._drops, self._in_lean)


def _attend(
    function: Callable[..., Any],
    written_out: Callable[..., Any],
    drops: bool,
    in_lean: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    in_lean = in_lean and (query.requires_grad or key.requires_grad or value.requires_grad)
    dropout = kwargs.get("dropout", 0.0)
    # PyTorch's kernels for the CPU have neither dropout nor the gradient of what is added.
    slow = query.device.type == "cpu" and (dropout > 0 or any(map(_is_learned, (*args, *kwargs.values()))))
    keeps_weights = function is written_out or (_is_fused(function) and slow)
    keeps_weights = keeps_weights and key.shape[-2] >= query.shape[-1]  # else they are smaller than the query
    # Inside of lean() and outside, recorded or not: a checkpoint's two runs have to drop the same.
    drops = drops and keeps_weights and may_drop(dropout)
    if not (in_lean or drops):
        return function(module, query, key, value, *args, **kwargs)
    if in_lean:
        value = _alone(value, query, key)
    if not keeps_weights:
        if _is_fused(function) and not slow:
            query = _tokens_first(query)
        return function(module, query, key, value, *args, **kwargs)
    how = None
    if drops or not dropout:
        how = _as_written(function, module, query, key, value, args, kwargs)
    if how is not None:
        out, weights = attend(query, key, value, *how)
        return out.transpose(1, 2).contiguous(), None if _is_fused(function) else weights
    if not in_lean:
        return function(module, query, key, value, *args, **kwargs)
    return checkpointed(
        _in_modes(function, module),
        *(module, query, key, value, *args),
        reads=own_tensors(module, function),
        rng=dropout > 0 or module.training,  # a function may take dropout from its module
        **kwargs,
    )


def _in_modes(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """A function that runs with a module and its parts in the modes of now: `eval()` may come before backward."""
    modes = [(part, part.training) for part in module.modules()]

    def call(*args: Any, **kwargs: Any) -> Any:
        other = [(part, training) for part, training in modes if part.training != training]
        try:
            for part, training in other:
                part.training = training
            return function(*args, **kwargs)
        finally:
            for part, training in other:
                part.training = not training

    return call


def _as_written(
    function: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, args: Any, kwargs: Any
) -> tuple[Tensor | None, Tensor | None, Scores, Tensor | None] | None:
    """Mask, bias, scores and sinks for `attend`, where it computes what the function does."""
    mask, *more = args or (kwargs.get("attention_mask"),)
    bias, scale, cap = kwargs.get("position_bias"), kwargs.get("scaling"), kwargs.get("softcap")
    dropout = kwargs.get("dropout", 0.0)
    held, sinks = _sinks_of(module, kwargs)
    if learned := bias is None and _is_learned(mask):
        mask, bias = None, mask
    plain = (
        not more
        and isinstance(scale, float)
        and (cap is None or (isinstance(cap, float) and bias is None and (mask is None or not dropout)))
        and serves(query)
        and query.dtype == key.dtype == value.dtype
        and query.dim() == key.dim() == value.dim() == 4
        and query.numel() > 0
        and query.shape[0] == key.shape[0]  # else the product broadcasts
        and query.shape[1] % key.shape[1] == 0
        and key.shape[:3] == value.shape[:3]
        and not torch.is_autocast_enabled(query.device.type)
        and not in_forward_mode()
    )
    if not plain:
        return None
    tokens = query.shape[:3]
    for each, columns in ((mask, key.shape[2]), (bias, key.shape[2]), (sinks, 1)):
        if each is not None and not (
            type(each) in (Tensor, nn.Parameter) and _expands(each, (*tokens, columns))
        ):
            return None
    if sinks is not None and cap is not None:
        return None
    says = mask is not None and mask.dtype == torch.bool  # what is seen, beside a bias, or to a fused kernel
    if mask is not None and (
        mask.requires_grad or says != (bias is not None or (says and _is_fused(function)))
    ):
        return None
    if mask is None and not learned and _is_fused(function):
        causal = kwargs.get("is_causal")
        if query.shape[2] > 1 and (getattr(module, "is_causal", True) if causal is None else causal):
            mask = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool).tril_()
    how = (mask, bias, Scores(scale, cap, dropout, wide=_is_fused(function) and query.dtype in HALVES), sinks)
    given = tuple(sorted(name for name, held in kwargs.items() if held is not None))
    groups = query.shape[1] // key.shape[1]
    parts = [x if x is None else (x.dtype, *(n == 1 for n in x.shape)) for x in (mask, sinks)]
    places = [each is held for each in _places_of_sinks(module, kwargs)]
    kind = (
        query.dtype,
        groups,
        query.shape[2] == 1,
        *parts,
        *places,
        says,
        learned and not dropout,
        dropout > 0,
    )
    seen = (function, type(module), module.training, given, kind)
    if seen not in _same:
        autograd: Any = torch._C._autograd
        if not autograd._saved_tensors_hooks_is_enabled():
            return None
        try:
            _same[seen] = _is_same(function, module, (query, key, value), args, how, kwargs)
        except Exception:  # it is given something of the size of the batch
            _same[seen] = False
    return how if _same[seen] else None


def _is_same(function: Any, module: Any, tensors: Any, args: Any, how: Any, kwargs: Any) -> bool:
    """Of some tokens: results, weights and gradients; and no parameter of the module has part in them. Numbers and masks are
    ours, so that it does not depend on the first batch.

    A checkpoint around the model sees nothing of it, since it is not done again when that computes again.
    """
    mask, bias, scores, sinks = how
    devices = [tensors[0].device] if tensors[0].is_cuda else []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        saved_tensors_hooks(itself, itself),
        _disable_current_modes(),
        torch.random.fork_rng(devices),
    ):
        for generator in (
            torch.default_generator,
            *(torch.cuda.default_generators[d.index] for d in devices),
        ):
            generator.manual_seed(0)
        query, key, value = (
            numbers((2, x.shape[1], (i + 1) * TOKENS, x.shape[3]), x)[:, :, -TOKENS:]
            for i, x in enumerate(tensors)
        )
        query = query / (scores.scale * query.shape[3] ** 0.5)  # for scores of the size of one
        for x in (query, key, value):
            x.requires_grad_()
        named = "attention_mask" in kwargs
        given = kwargs["attention_mask"] if named else (*args, None)[0]
        learned = given is not None and given is bias
        given, mask, bias = (x if x is None else _added(x) for x in (given, mask, bias))
        leaves = [query, key, value]
        if bias is not None:
            leaves.append(bias.requires_grad_())
        options = {**kwargs, "dropout": 0.0} if scores.dropout else dict(kwargs)
        if sinks is not None:
            held, _ = _sinks_of(module, kwargs)
            per_token = (2, sinks.shape[1], 1 if sinks.shape[2] == 1 else TOKENS, 1)
            leaf = numbers(held.shape if held.dim() == 1 else per_token, held).requires_grad_()
            leaves.append(leaf)
            sinks = _per_head(leaf)
            options = {name: leaf if given is held else given for name, given in options.items()}
            module = _with_sinks(module, leaf) if getattr(module, "sinks", None) is held else module
        if learned:
            given = bias
        elif bias is not None:
            options["position_bias"] = bias
        if named:
            options["attention_mask"] = given

        def theirs_of(value: Tensor) -> tuple[Tensor, Tensor | None]:
            out, weights = function(module, query, key, value, *(() if named else (given,)), **options)
            return out, weights

        theirs, weights = theirs_of(value)
        ours, our_weights = attend(query, key, value, mask, bias, scores._replace(dropout=0.0), sinks)
        pairs = [(ours.transpose(1, 2), theirs)]
        if weights is not None:
            pairs.append((our_weights, weights))
        if any(a.shape != b.shape for a, b in pairs):
            return False
        if scores.dropout:
            options["dropout"] = 0.5
            once = torch.eye(*value.shape[2:]).to(value).expand_as(value)
            dropped, weights = theirs_of(once)
            dropped = dropped.transpose(1, 2)[..., :TOKENS]
            sums = theirs_of(torch.ones_like(value))[0].transpose(1, 2)
            if not _is_dropped(our_weights, dropped, sums) or not (weights is None or near(dropped, weights)):
                return False
        weight = numbers(theirs.shape, theirs.detach())
        own = [p for p in module.parameters() if p.requires_grad]
        found = torch.autograd.grad(theirs, [*leaves, *own], weight, allow_unused=True)
        if any(grad is not None for grad in found[len(leaves) :]):
            return False
        pairs += zip(torch.autograd.grad(pairs[0][0], leaves, weight), found, strict=False)
        return all(b is not None and near(a, b) for a, b in pairs)


def _sinks_of(module: nn.Module, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Scores without a key, for each head and perhaps token: given, or what the module learns; and as they are added."""
    held = next((each for each in _places_of_sinks(module, kwargs) if isinstance(each, Tensor)), None)
    return held, held if held is None else _per_head(held)


def _places_of_sinks(module: nn.Module, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return kwargs.get("sinks"), kwargs.get("s_aux"), getattr(module, "sinks", None)


def _per_head(sinks: Tensor) -> Tensor:
    return sinks.view(1, -1, 1, 1) if sinks.dim() == 1 else sinks


def _with_sinks(module: nn.Module, sinks: Tensor) -> nn.Module:
    """What stands for it, with others."""
    copy: nn.Module = object.__new__(type(module))
    held = vars(copy)
    held.update(vars(module), sinks=sinks)
    for kind in ("_parameters", "_buffers"):
        held[kind] = {name: x for name, x in held[kind].items() if name != "sinks"}
    return copy


def _added(x: Tensor) -> Tensor:
    """In the place of a mask or bias: of one row where that is for all."""
    shape = (1, x.shape[1], *(n if n == 1 else TOKENS for n in x.shape[2:]))
    if x.dtype == torch.bool:
        ones = torch.ones(shape, dtype=torch.bool, device=x.device)
        return ones.tril() if shape[2] > 1 else ones.tril(TOKENS - 2)  # of one row: all but the last
    return numbers(shape, x)


def _is_dropped(weights: Tensor, dropped: Tensor, sums: Tensor) -> bool:
    """Whether of the weights each is either twice as large or zero by itself; they, and not what comes of them: what is left
    of a row is the same for all that is multiplied with it."""
    if weights.shape != dropped.shape:  # a value is narrower than there are tokens
        return False
    tolerance = TOLERANCE[weights.dtype]
    kept = torch.isclose(dropped, 2 * weights, rtol=tolerance, atol=tolerance * 1e-3)
    seen = weights > tolerance
    for dim in range(4):  # no neighbours share their fate
        last, size = weights.shape[dim] - 1, weights.shape[dim]
        a, b = (kept.narrow(dim, at, last) for at in (0, size - last))
        both = seen.narrow(dim, 0, last) & seen.narrow(dim, size - last, last)
        if last and not ((a != b) & both).any():
            return False
    alike = torch.isclose(sums, sums[..., :1], rtol=tolerance, atol=tolerance)
    return bool(alike.all() and (kept | (dropped == 0)).all())


def _expands(x: Tensor, shape: tuple[int, ...]) -> bool:
    return x.dim() == 4 and all(a in (1, b) for a, b in zip(x.shape, shape, strict=True))


def _is_fused(function: Any) -> bool:
    return getattr(function, "__name__", "") == FUSED


def _is_learned(given: Any) -> bool:
    return isinstance(given, Tensor) and given.requires_grad


def _tokens_first(query: Tensor) -> Tensor:
    """A copy whose memory has the tokens before the heads, on the CPU, where the kernel's result lies as its query does: it
    is kept, and the layer behind it would keep a copy in the order of the tokens beside it."""
    if query.device.type != "cpu" or query.dim() != 4 or not query.is_contiguous() or 1 in query.shape[1:3]:
        return query
    return query.transpose(1, 2).contiguous().transpose(1, 2)


def _alone(x: Tensor, *others: Tensor) -> Tensor:
    """A copy, where x is a smaller part of a memory in which none of the others lies."""
    memory = x.untyped_storage()
    if memory.nbytes() < 2 * x.nbytes or any(
        other.untyped_storage()._cdata == memory._cdata for other in others
    ):
        return x
    shared = set(_nodes(x, set()))
    if any("norm" in node.name().lower() for other in others for node in _nodes(other, shared)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _nodes(x: Tensor, shared: set[Any]) -> list[Any]:
    """Nodes of the graph that led to x, the nearest first, as far as those that it shares."""
    found: list[Any] = []
    ahead: list[Any] = [x.grad_fn]
    while ahead and len(found) < NEAR:
        node = ahead.pop(0)
        if node is not None and node not in shared and node not in found:
            found.append(node)
            ahead += [before for before, _ in node.next_functions]
    return found
