"""Activations that a module's forward calls as functions: `F.leaky_relu(x, 0.1)`, or a `gelu` that its library writes out.

Stock keeps what they are given, and what follows keeps their result. Inside :class:`memkit.lean` the twin runs the library's
own forward with memkit's activations under those names: the input alone is kept, and the result is made again.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ... import functional as F
from ..._lean import is_lean
from ...functional._activation import _PARAMETERS
from ..layers import serves
from ..recipes import FUNCTIONS
from .activations import computes
from .twin import Instead, Twin, is_tracing, with_names

KEEP_RESULT = {"relu", "sigmoid", "tanh"}
"""Of which stock keeps the result, as what follows does."""
WRITTEN_OUT = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "mish": "mish",
    "silu": "silu",
    "swish": "silu",
}
"""Names of libraries' own functions, and which activation each is where values and slopes agree."""

_checked: dict[FunctionType, bool] = {}


class Functions(Twin, kind="functions"):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: Any = type(self)._stock_forward
        if is_lean() and torch.is_grad_enabled() and not is_tracing():
            forward = with_names(forward, **_ours(forward))
        return forward(self, *args, **kwargs)


def calls_activations(cls: type[nn.Module], names: frozenset[str]) -> bool:
    """Whether its forward calls such functions, all of these names."""
    called = set() if cls.__module__.startswith(("torch.", "memkit.")) else _called(cls.forward)
    return bool(called) and called <= names


def _called(forward: Any) -> set[str]:
    """Names of memkit's activations."""
    names = {"gelu" if op == "gelu_tanh" else op for op in _functions(forward).values()}
    for held in _modules(forward).values():
        path = {nn: {"functional"}, torch: {"nn", "functional"}}.get(held, set())
        here = NAMES if path <= set(forward.__code__.co_names) else set(vars(_STAND_INS[held]))
        names |= NAMES & here & set(forward.__code__.co_names)
    return names


def _ours(forward: Any) -> dict[str, Any]:
    """What its names stand for instead."""
    known, functions = forward.__globals__, _functions(forward)
    instead: dict[str, Any] = {name: _STAND_INS[held] for name, held in _modules(forward).items()}
    return instead | {name: partial(_call, op, known[name]) for name, op in functions.items()}


def _modules(forward: Any) -> dict[str, Any]:
    return {name: held for name, held in _globals(forward) if type(held) is ModuleType and held in _STAND_INS}


def _functions(forward: Any) -> dict[str, str]:
    """Which activations they are."""
    return {name: op for name, held in _globals(forward) if (op := _activation(name, held)) is not None}


def _globals(forward: Any) -> list[tuple[str, Any]]:
    """That its code asks for."""
    if type(forward) is not FunctionType:
        return []
    known = forward.__globals__
    return [(name, known[name]) for name in _asked(forward.__code__) if name in known]


@cache
def _asked(code: CodeType) -> frozenset[str]:
    return frozenset(each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")


def _activation(name: str, held: Any) -> str | None:
    """Which activation a function is."""
    if type(held) not in (FunctionType, BuiltinFunctionType):
        return None
    if (op := FUNCTIONS.get(held)) is not None:
        return None if op in KEEP_RESULT else op
    op = WRITTEN_OUT.get(name)
    if op is None or type(held) is not FunctionType:
        return None
    if held not in _checked:
        _checked[held] = computes(held, op)
    return op if _checked[held] else None


def _call(op: str, stock: Callable[..., Any], input: Any, *args: Any, **kwargs: Any) -> Any:
    """Ours, with its input kept, where stock would be out of place."""
    ours = (
        isinstance(input, Tensor)
        and input.requires_grad
        and serves(input)
        and len(args) <= len(_PARAMETERS.get(op, ()))
        and not kwargs.get("inplace", False)
        and "out" not in kwargs
    )
    if not ours:
        return stock(input, *args, **kwargs)
    kwargs.pop("inplace", None)
    if op == "gelu_tanh":
        return F.gelu(input, "tanh", save="input")
    return getattr(F, op)(input, *args, **kwargs, save="input")


def _instead(module: Any) -> dict[str, Any]:
    return {
        op: partial(_call, op, held)
        for op in NAMES
        if FUNCTIONS.get(held := getattr(module, op, None)) == op and held is not None
    }


NAMES = set(FUNCTIONS.values()) - KEEP_RESULT
"""Of PyTorch's functions and of memkit's."""
_FUNCTIONAL = Instead(nn.functional, **_instead(nn.functional))
_NN = Instead(nn, functional=_FUNCTIONAL)
_STAND_INS: dict[Any, Instead] = {
    nn.functional: _FUNCTIONAL,
    nn: _NN,
    torch: Instead(torch, nn=_NN, **_instead(torch)),
}
