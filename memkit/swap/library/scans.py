"""Recurrences as transformers' models write them: inside :class:`memkit.lean`, what they are given is all that is kept.

State space models (Mamba, Jamba) and linear attention (Qwen3-Next) call the function that runs over the tokens by a name of
their module. The twin runs the layer's own forward with ours under that name. For Mamba's, which goes token by token and
whose autograd keeps three states of each and spreads each one's gradient over all, `selective_scan` stands in where it
computes the same, which values and gradients on some numbers of the first call's shapes say. Others run under a checkpoint,
and those that a kernel of another library serves are called as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from ..._lean import is_lean
from ..layers import serves
from .selective_scan import selective_scan
from .twin import Twin, is_tracing, itself, near, numbers, with_names

SELECTIVE = "mamba_selective_scan"
NAMES = frozenset(
    {SELECTIVE, "mamba2_chunk_scan", "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"}
)
"""Of functions that give a tensor, or a tuple of them, and change nothing."""
GIVEN = "hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias"
WIDE = torch.float32, torch.float64
TOKENS = 8

_same: dict[Any, bool] = {}
"""Whether `selective_scan` is what a function computes, as a module of that class calls it."""


class Scan(Twin, kind="scan"):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: Any = type(self)._stock_forward
        if is_lean() and torch.is_grad_enabled() and not is_tracing() and calls_scan(type(self)._stock):
            forward = _with_ours(forward, type(self))
        return forward(self, *args, **kwargs)


def calls_scan(cls: type[nn.Module]) -> bool:
    """Whether its forward calls one, by the function's name in its module."""
    return bool(_called(_innermost(cls.forward)))


def _called(forward: Any) -> dict[str, Any]:
    if type(forward) is not FunctionType:
        return {}
    named = {name: forward.__globals__.get(name) for name in NAMES & set(forward.__code__.co_names)}
    return {name: function for name, function in named.items() if _is_written_out(function)}


def _is_written_out(function: Any) -> bool:
    """Not in a kernel, which a wrapper of transformers' may call in its place and which keeps little."""
    if type(function) is not FunctionType:
        return False
    closure = inspect.getclosurevars(function).nonlocals
    return not hasattr(function, "__wrapped__") or closure.get("is_new_implementation") is False


def _innermost(forward: Any) -> Any:
    """What decorators wrap that keep it in a variable."""
    while (inner := getattr(forward, "__wrapped__", None)) is not None:
        forward = inner
    return forward


def _with_ours(forward: Any, cls: type[nn.Module]) -> Callable[..., Any]:
    """The same code, decorators around it included."""
    inner = getattr(forward, "__wrapped__", None)
    if inner is None:
        return with_names(forward, **{n: partial(_scan, n, f, cls) for n, f in _called(forward).items()})
    cells = tuple(
        CellType(_with_ours(inner, cls)) if cell.cell_contents is inner else cell
        for cell in forward.__closure__ or ()
    )
    made = FunctionType(forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, cells)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _scan(name: str, function: Any, cls: type[nn.Module], *args: Any, **kwargs: Any) -> Any:
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if not any(each.requires_grad for each in given) or not all(map(serves, given)):
        return function(*args, **kwargs)
    if name == SELECTIVE and (how := _as_written(function, cls, args, kwargs)) is not None:
        return selective_scan(*how)
    again = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
    return again(*args, determinism_check="none", **kwargs)


def _as_written(function: Any, cls: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """What `selective_scan` takes, where it computes what the function does."""
    try:
        held = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return None
    u, dt, *others = tensors = tuple(held.pop(name, None) for name in GIVEN)
    held |= held.pop("kwargs", {})
    options = tuple(sorted(held.items()))
    if held.get("return_last_state") or not all(isinstance(each, bool | float | None) for _, each in options):
        return None
    a, b, c = others[:3]
    if not all(isinstance(x, Tensor) and x.dtype == u.dtype for x in (u, dt, a, b, c)) or u.dtype not in WIDE:
        return None
    batch, channels, tokens = u.shape if u.dim() == 3 else (0, 0, 0)
    states = a.shape[-1]
    fits = (
        u.numel() > 0
        and dt.shape == u.shape
        and a.shape == (channels, states)
        and b.shape == c.shape == (batch, states, tokens)
        and all(x is None or (isinstance(x, Tensor) and x.dtype == u.dtype) for x in others[3:])
        and not torch.is_autocast_enabled(u.device.type)
    )
    if not fits:
        return None
    softplus = bool(held.get("delta_softplus"))
    seen = (function, cls, u.dtype, options, tuple(x is None or x.shape[:-1] for x in tensors[5:]))
    if seen not in _same:
        _same[seen] = _is_same(function, tensors, args, kwargs, softplus)
    return (*tensors, softplus) if _same[seen] else None


def _is_same(function: Any, tensors: tuple[Any, ...], args: Any, kwargs: Any, softplus: bool) -> bool:
    """Of some tokens, with numbers of our own: results and all gradients.

    A checkpoint around the model sees nothing of it, since it is not done again when that computes again.
    """
    with torch.enable_grad(), saved_tensors_hooks(itself, itself), _disable_current_modes():
        tokens = tensors[0].shape[-1]
        some: dict[int, Tensor] = {}
        for at, x in enumerate(tensors):
            if x is not None:
                part = x.detach()[..., :TOKENS] if x.dim() == 3 and x.shape[-1] == tokens else x.detach()
                some[id(x)] = (part + 0.1 * numbers(part.shape, part) * (at != 2)).requires_grad_()
        theirs = function(
            *(some.get(id(x), x) for x in args), **{n: some.get(id(x), x) for n, x in kwargs.items()}
        )
        changed: list[Any] = [*(None if x is None else some[id(x)] for x in tensors), softplus]
        ours = selective_scan(*changed)
        if not isinstance(theirs, Tensor) or theirs.shape != ours.shape or theirs.dtype != ours.dtype:
            return False
        weight, leaves = numbers(theirs.shape, theirs.detach()), list(some.values())
        pairs = [(ours, theirs)]
        found = (torch.autograd.grad(out, leaves, weight, allow_unused=True) for out in (ours, theirs))
        pairs += zip(*found, strict=True)
        return all(a is not None and b is not None and near(a, b) for a, b in pairs)
