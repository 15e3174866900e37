"""Feed-forward networks whose forward is one line of calls, whatever their layers' names are.

    self.w2(F.silu(self.w1(x)) * self.w3(x))        self.linear_2(self.act(self.linear_1(x)))

Code that goes straight from its one argument to its result, and knows nothing but Linears of its own and one activation,
a function of PyTorch's or a module, can be little else; which Linear is which, the verification of each row says.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from itertools import permutations
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..layers import is_linear
from ..recipes import FUNCTIONS
from .activations import activation_of
from .mlps import ALONE, GATES, Gating, Steps

STRAIGHT = (
    *("LOAD_", "STORE_FAST", "PRECALL", "CALL", "KW_NAMES", "BINARY_OP", "BINARY_MULTIPLY"),
    *("RETURN_", "RESUME", "PUSH_NULL", "CACHE", "NOP"),
)
"""How the operations of code start that neither branches nor stores anything beyond its variables."""
MODULES = (torch, nn, nn.functional)


def written(module: nn.Module) -> Iterator[Steps | Gating]:
    """The rows that it may be."""
    children = module._modules
    linears: Any = {name: child for name, child in children.items() if is_linear(child)}
    if len(linears) not in (2, 3) or len(children) > len(linears) + 1:
        return
    for step, act in _activations(type(module).forward, children, linears):
        if len(linears) == 2 and act not in ALONE:
            for first, last in permutations(linears):
                if linears[first].out_features == linears[last].in_features:
                    yield Steps((first, step, last))
        for down in linears if len(linears) == 3 and act in GATES else ():
            one, other = (name for name in linears if name != down)
            if linears[one].out_features == linears[other].out_features == linears[down].in_features:
                yield Gating(one, other, down, step)
                yield Gating(other, one, down, step)


def _activations(forward: Any, children: Any, linears: Any) -> list[tuple[str, str]]:
    """What it may call, as a step and by its name, if that is one function or module, and it knows nothing else."""
    if type(forward) is not FunctionType or not _is_straight(forward):
        return []
    if held := children.keys() - linears.keys():
        called = activation_of(children[name]) if (name := held.pop()) in forward.__code__.co_names else None
        return [] if called is None or set(forward.__code__.co_names) - set(children) else [(name, called[0])]
    acts = set()
    for name in set(forward.__code__.co_names) - set(linears):
        known = (getattr(module, name) for module in (nn.functional, nn, torch) if hasattr(module, name))
        function = forward.__globals__.get(name, next(known, None))
        if function in FUNCTIONS:
            acts.add(FUNCTIONS[function])
        elif not any(function is each for each in MODULES):
            return []
    act = acts.pop() if len(acts) == 1 else ""
    names = ("gelu", "gelu_tanh") if act == "gelu" else (act,) if act else ()
    return [(f"={name}", name) for name in names]


def _is_straight(forward: FunctionType) -> bool:
    code = forward.__code__
    alone = code.co_argcount == 2 and not (code.co_kwonlyargcount or code.co_freevars or code.co_cellvars)
    plain = not code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return alone and plain and all(each.opname.startswith(STRAIGHT) for each in dis.get_instructions(code))
