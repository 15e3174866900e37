"""Recurrences as transformers' models write them: inside :class:`memkit.lean`, what they are given is all that is kept.

State space models (Mamba, Bamba) and linear attention (Qwen3-Next) call the function that runs over the tokens by a name of
their module. The twin runs the layer's own forward with a function of ours under that name, which calls what computes the
same in less time (`recurrences.py`), or the library's under a checkpoint. Those that a kernel of another library serves are
called as they are.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..._lean import is_lean
from ..._modes import in_forward_mode, is_tracing
from ..layers import serves
from .checkpoint import checkpointed
from .recurrences import KNOWN, stand_in
from .twin import Twin, undecorated, with_names


class Scan(Twin, kind="scan"):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: Any = type(self)._stock_forward
        if is_lean() and torch.is_grad_enabled() and not is_tracing() and calls_scan(type(self)._stock):
            ours = {n: partial(_scan, n, f, type(self)) for n, f in _called(undecorated(forward)).items()}
            forward = with_names(forward, **ours)
        return forward(self, *args, **kwargs)


def calls_scan(cls: type[nn.Module]) -> bool:
    """Whether its forward calls one, by the function's name in its module."""
    return bool(_called(undecorated(cls.forward)))


def _called(forward: Any) -> dict[str, Any]:
    if type(forward) is not FunctionType:
        return {}
    named = {name: forward.__globals__.get(name) for name in KNOWN.keys() & set(forward.__code__.co_names)}
    return {name: function for name, function in named.items() if _is_written_out(function)}


def _is_written_out(function: Any) -> bool:
    """Not in a kernel, which a wrapper of transformers' may call in its place and which keeps little."""
    if type(function) is not FunctionType:
        return False
    closure = inspect.getclosurevars(function).nonlocals
    return not hasattr(function, "__wrapped__") or closure.get("is_new_implementation") is False


def _scan(name: str, function: Any, cls: type[nn.Module], *args: Any, **kwargs: Any) -> Any:
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    needed = any(each.requires_grad for each in given)
    if not needed or in_forward_mode() or not all(map(serves, given)):
        return function(*args, **kwargs)
    if (ours := stand_in(name, function, cls, args, kwargs)) is not None:
        return ours()
    return checkpointed(function, *args, rng=False, **kwargs)
