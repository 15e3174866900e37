"""What a model returns, looked through to its tensors: in objects of any class, closures and generators too."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import types
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

LOOKED_AT = 100_000
"""So many objects of a result are looked at."""

_ATOMS = {type(None), bool, int, float, complex, str, bytes}
_SHUT = type, nn.Module, types.ModuleType, types.CodeType, weakref.ref, *weakref.ProxyTypes
"""Not entered: modules are looked at after the step, and what is everybody's is not the result's."""
_OPAQUE = torch.UntypedStorage, torch.TypedStorage, torch.autograd.graph.Node, threading.local
_PLAIN = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    torch.finfo,
    torch.iinfo,
)
_RUNS = {
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}
_COLLECTED = 1 << 14
"""Py_TPFLAGS_HAVE_GC: the garbage collector is told what such an object refers to. Others refer to nothing, as a rule."""


def look_through(result: Any, found: list[Tensor]) -> str:
    """Adds to the tensors found those that are in no container that PyTorch knows. Returns the class of what cannot be
    looked into, if there is something."""
    seen = {*map(id, found)}
    kept: list[Any] = []  # what is made on the way, so that no other gets its id
    left, open_ = LOOKED_AT, deque([result])
    for tensor in found:
        open_ += vars(tensor).values()
    while open_:
        each = open_.popleft()
        kind: Any = type(each)
        if kind in _ATOMS or issubclass(kind, _SHUT) or id(each) in seen:
            continue
        seen.add(id(each))
        if issubclass(kind, Tensor):
            found.append(each)
            open_ += vars(each).values()
            continue
        kept.append(each)
        left -= 1
        inner = _inside(each)
        if inner is None or left < 0:
            return str(kind.__name__)
        open_ += inner
    return ""


def _inside(held: Any) -> list[Any] | None:
    """What an object refers to; None where that cannot be told."""
    kind: Any = type(held)
    if kind is types.FunctionType:
        cells = [value for cell in held.__closure__ or () for value in _contents(cell)]
        return [*cells, held.__defaults__, held.__kwdefaults__, vars(held)]
    if kind is types.BuiltinFunctionType:  # a method of an object, it may be
        return [held.__self__]
    if kind is types.FrameType:
        own = held.f_locals.values() if held.f_code.co_flags & inspect.CO_OPTIMIZED else ()
        others = (each for each in gc.get_referents(held) if type(each) not in (dict, types.FrameType))
        return [*own, *others]
    if kind in _RUNS:
        return [*gc.get_referents(held), getattr(held, _RUNS[kind])]
    if (
        issubclass(kind, _OPAQUE)
        or isinstance(held, torch.autograd.graph.Node)
        or kind.__name__ == "PyCapsule"
    ):
        return None
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return [held.base, *(held.ravel().tolist() if held.dtype.hasobject else ())]
    if kind.__flags__ & _COLLECTED:
        return [] if kind is dict and _is_of_a_module(held) else gc.get_referents(held)
    if issubclass(kind, _PLAIN) or (numpy is not None and issubclass(kind, (numpy.generic, numpy.dtype))):
        return []
    return [] if str(kind.__module__).partition(".")[0] in sys.stdlib_module_names else None


def _contents(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # empty
        return []


def _is_of_a_module(namespace: dict[Any, Any]) -> bool:
    name = namespace.get("__name__")
    module = sys.modules.get(name) if type(name) is str else None
    return module is not None and vars(module) is namespace
