"""Code that may be run again for backward: it gives the same, and changes nothing but what it has made itself.

By its lines and its operations, those of the functions and methods that it calls, and the layers that it uses.
"""

from __future__ import annotations

import builtins
import dis
import math
import operator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..._hooks import has_hooks
from .lines import GRAD, repeats
from .remembered import Remembered
from .source import definition, owner_name

CHANGES = (
    *("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_"),
    *("YIELD_", "SEND", "IMPORT_", "LOAD_SUPER_ATTR"),
)
"""How the operations of code start that may change what is not its own, or depend on more."""
MODULES = (torch, nn, nn.functional, math, operator)
BUILTINS = {
    *("len", "range", "int", "float", "bool", "str", "tuple", "list", "dict", "set", "slice"),
    *("type", "isinstance", "hasattr", "min", "max", "sum", "abs", "round", "pow"),
    *("divmod", "zip", "enumerate", "reversed", "sorted", "all", "any"),
    *("ValueError", "TypeError", "RuntimeError", "AssertionError", "NotImplementedError"),
}
OWN = ("torch.nn.modules.", "memkit.")
CONSTANTS = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
TORCH = ("torch.nn.functional", "torch.functional")
LIBRARIES = ("einops",)
"""Whose functions are."""


Names = frozenset[str]
"""That code which may be run again may ask its layer for."""

_known: Remembered[Names | None] = Remembered()


def reach(code: CodeType, names: dict[str, Any], cls: Any) -> Names | None:
    """Of a function of this code over these names of its module, that is part of a method of that class, if of one; None
    where it may not be run again. Its own lines have been looked at by who made it."""
    known = _known.of(cls)
    if code not in known:
        found: set[str] = set()
        repeats = _collect(code, names, cls, found, set(), checked=True)
        known[code] = frozenset(found) if repeats else None
    return known[code]


def reach_of(layer: nn.Module) -> Names | None:
    """Of a call of a layer that may be run again; None for PyTorch's and memkit's."""
    forward: Any = type(layer).forward
    is_known = is_torchs(layer) or type(forward) is not FunctionType
    return None if is_known else reach(forward.__code__, forward.__globals__, type(layer))


def is_readable(module: nn.Module, known: Names) -> bool:
    """Whether what it reads of a layer is layers that change nothing of their own, and values."""
    if hasattr(type(module), "__del__") or _has_ways(type(module)):  # there will be another object
        return False
    held = vars(module)
    for name in known:
        layer = module._modules.get(name)
        if layer is not None and not is_layer(layer):
            return False
        if name in held and not _is_value(held[name]):
            return False
    return True


def _collect(
    code: CodeType, names: dict[str, Any], cls: Any, found: set[str], seen: set[Any], checked: bool = False
) -> bool:
    """Adds the names that it and what it calls read of a layer; False where it may not be run again."""
    if (code, cls) in seen:
        return True
    seen.add((code, cls))
    if code.co_freevars or "distributed" in code.co_names or not (checked or may_repeat(code)):
        return False
    for each in dis.get_instructions(code):
        if each.opname.startswith(CHANGES) and each.argval != GRAD:
            return False
        if each.opname == "LOAD_GLOBAL" and not _is_known(each.argval, names, found, seen):
            return False
    found.update(code.co_names)
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return all(_collect(each, names, cls, found, seen, checked=True) for each in inner) and all(
        _is_own(name, cls, found, seen) for name in code.co_names if cls is not None
    )


def may_repeat(code: CodeType) -> bool:
    """Whether its source can be found, and its own lines change nothing."""
    source = definition(code.co_filename, code)
    return source is not None and repeats(source[1], owner_name(*source))


def _is_known(name: str, names: dict[str, Any], found: set[str], seen: set[Any]) -> bool:
    """Whether what a module's name stands for may be read, and called."""
    if name not in names:
        return name in BUILTINS and hasattr(builtins, name)
    held = names[name]
    if isinstance(held, ModuleType):
        return any(held is each for each in MODULES)
    if type(held) is FunctionType:
        source = held.__module__ or ""
        known = source.startswith(TORCH) or source.partition(".")[0] in LIBRARIES
        return known or _collect(held.__code__, held.__globals__, None, found, seen)
    if type(held) is BuiltinFunctionType:
        return str(held.__module__ or "").startswith(("torch", "math"))
    return isinstance(held, CONSTANTS) or held is Tensor


def _is_own(name: str, cls: Any, found: set[str], seen: set[Any]) -> bool:
    """Methods and constants of a class, but what all modules have."""
    if hasattr(nn.Module, name) or not hasattr(cls, name):
        return True
    held = getattr(cls, name)
    if isinstance(held, property):
        held = held.fget
    if type(held) is FunctionType:
        return _collect(held.__code__, held.__globals__, cls, found, seen)
    return isinstance(held, CONSTANTS)


def is_torchs(layer: nn.Module) -> bool:
    return type(layer).__module__.startswith(OWN)


def is_layer(layer: nn.Module) -> bool:
    """One that changes nothing of its own, nor what it is given."""
    if has_hooks(layer) or "parametrizations" in layer._modules:
        return False
    if is_torchs(layer):
        parts = [part for part in layer._modules.values() if part is not None]
        if isinstance(layer, nn.Sequential):  # what a layer before it has made may be overwritten
            parts = [part for i, part in enumerate(parts) if not (i and _overwrites(part, parts[i - 1]))]
        own = any(getattr(layer, name, None) for name in ("track_running_stats", "inplace", "max_norm"))
        return not own and all(map(is_layer, parts))
    known = reach_of(layer)
    return known is not None and may_repeat(type(layer).forward.__code__) and is_readable(layer, known)


def _has_ways(cls: type[nn.Module]) -> bool:
    """Of its own, to be called or asked."""
    ways = (
        getattr(cls, name, None) for name in ("__call__", "__getattr__", "__getattribute__", "__setattr__")
    )
    return any(
        type(way) is FunctionType and not str(way.__module__).startswith(("torch.", "memkit."))
        for way in ways
    )


def _overwrites(layer: nn.Module, before: nn.Module) -> bool:
    return bool(getattr(layer, "inplace", False)) and isinstance(before, nn.Linear | nn.modules.conv._ConvNd)


def _is_value(held: Any) -> bool:
    """That a layer holds: numbers, words, tensors, and lists of them, which are taken as fixed."""
    if isinstance(held, tuple | list):
        return all(map(_is_value, held))
    return isinstance(held, (*CONSTANTS, Tensor)) or type(held).__name__.endswith("Config")
