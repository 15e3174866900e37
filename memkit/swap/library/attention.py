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
from torch.compiler import is_compiling

from ..._lean import is_lean
from ..._modes import is_tracing
from .attend import attend, may_drop
from .checkpoint import checkpointed
from .rotary import NAME, calls_rotary, is_rotary, rotary_of
from .twin import Twin, own_tensors, twin_of, undecorated, with_names
from .written_attention import as_written, is_fused, is_learned

TABLE = "ALL_ATTENTION_FUNCTIONS"
NEAR = 24
"""So many nodes are looked at between a projection and its parts."""


class Attention(Twin, kind="attention"):
    _in_lean, _turns, _drops = True, False, True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self)._stock_forward
        if is_compiling() or is_tracing():
            return forward(self, *args, **kwargs)
        names: dict[str, Any] = {}
        written = undecorated(forward)
        in_lean = is_lean() and torch.is_grad_enabled()
        # Asked again: of a pickle, the library may be another now.
        if self._in_lean and (in_lean or (self._drops and self.training)) and _asks(written):
            names[TABLE] = _Table(written.__globals__[TABLE], self._drops, in_lean)
        if self._turns and calls_rotary(written):
            names[NAME] = rotary_of(self, written)
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
    slow = query.device.type == "cpu" and (dropout > 0 or any(map(is_learned, (*args, *kwargs.values()))))
    keeps_weights = function is written_out or (is_fused(function) and slow)
    keeps_weights = keeps_weights and key.shape[-2] >= query.shape[-1]  # else they are smaller than the query
    # Inside of lean() and outside, recorded or not: a checkpoint's two runs have to drop the same.
    drops = drops and keeps_weights and may_drop(dropout)
    if not (in_lean or drops):
        return function(module, query, key, value, *args, **kwargs)
    if in_lean:
        value = _alone(value, query, key)
    if not keeps_weights:
        if is_fused(function) and not slow:
            query = _tokens_first(query)
        return function(module, query, key, value, *args, **kwargs)
    how = None
    if drops or not dropout:
        how = as_written(function, module, query, key, value, args, kwargs)
    if how is not None:
        out, weights = attend(query, key, value, *how)
        return out.transpose(1, 2).contiguous(), None if is_fused(function) else weights
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
