"""Feed-forward networks whose forward calls its activation as a function, whatever their layers' names are.

    self.w2(F.silu(self.w1(x)) * self.w3(x))        self.fc2(F.gelu(self.fc1(x)))

Code that goes straight from its one argument to its result, and knows nothing but Linears of its own and one activation
of PyTorch's, can be little else; which Linear is which, the verification of each row says.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..layers import is_linear
from ..recipes import FUNCTIONS
from .mlps import GATES, Gating, Steps

STRAIGHT = (
    *("LOAD_", "STORE_FAST", "PRECALL", "CALL", "KW_NAMES", "BINARY_OP", "BINARY_MULTIPLY"),
    *("RETURN_", "RESUME", "PUSH_NULL", "CACHE", "NOP"),
)
"""How the operations of code start that neither branches nor stores anything beyond its variables."""
MODULES = (torch, nn, nn.functional)


def written(module: nn.Module) -> Iterator[Steps | Gating]:
    """The rows that it may be."""
    linears = {name: child for name, child in module._modules.items() if is_linear(child)}
    if len(linears) != len(module._modules) or len(linears) not in (2, 3):
        return
    for act in _activations(type(module).forward, linears):
        if len(linears) == 2 and act != "relu":  # whose result the next layer keeps
            first, last = linears
            if linears[first].out_features == linears[last].in_features:
                yield Steps((first, f"={act}", last))
        for down in linears if len(linears) == 3 and act in GATES else ():
            one, other = (name for name in linears if name != down)
            if linears[one].out_features == linears[other].out_features == linears[down].in_features:
                yield Gating(one, other, down, f"={act}")
                yield Gating(other, one, down, f"={act}")


def _activations(forward: Any, linears: Any) -> tuple[str, ...]:
    """What it may call, if that is one function, and it knows nothing else."""
    if type(forward) is not FunctionType or not _is_straight(forward):
        return ()
    acts = set()
    for name in set(forward.__code__.co_names) - set(linears):
        known = (getattr(module, name) for module in (nn.functional, nn, torch) if hasattr(module, name))
        held = forward.__globals__.get(name, next(known, None))
        if held in FUNCTIONS:
            acts.add(FUNCTIONS[held])
        elif not any(held is each for each in MODULES):
            return ()
    act = acts.pop() if len(acts) == 1 else ""
    return ("gelu", "gelu_tanh") if act == "gelu" else (act,) if act else ()


def _is_straight(forward: FunctionType) -> bool:
    code = forward.__code__
    alone = code.co_argcount == 2 and not (code.co_kwonlyargcount or code.co_freevars or code.co_cellvars)
    plain = not code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return alone and plain and all(each.opname.startswith(STRAIGHT) for each in dis.get_instructions(code))
