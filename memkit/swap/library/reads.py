"""What a forward reads of its module beside layers and parameters, and what it writes there.

A twin is compared with what the module is now. Numbers that the forward reads may be others later, and what it writes down
for others to read has to be written.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..types import innermost_of
from .twin import Twin, undecorated

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes of every module, its mode among them."""
FUNCTIONS_LOOKED_AT = 100
_ABSENT = object()

Read = tuple[str, str]
"""The name of a Python module, or none for the module itself, and a name in it."""
Reads = tuple[tuple[str, str, Any], ...]
"""The same, and the number there."""


class Uses(NamedTuple):
    """What a class's forward names: of itself and of its Python modules; and what it sets of itself."""

    names: frozenset[str]
    globals: frozenset[Read]
    sets: frozenset[str]


_uses: WeakKeyDictionary[type[nn.Module], dict[str, Uses]] = WeakKeyDictionary()


def uses(cls: type[nn.Module], method: str = "forward") -> Uses:
    """By its code, that of its own methods and of the functions of its file. Not that of torch."""
    cls = innermost_of(cls)
    known = _uses.setdefault(cls, {})
    if method not in known:
        known[method] = _uses_of(cls, method)
    return known[method]


def _uses_of(cls: type[nn.Module], method: str) -> Uses:
    names: set[str] = set()
    held: set[Read] = set()
    sets: set[str] = set()
    todo = list(_methods(cls, method))
    seen: set[FunctionType] = set()
    while todo and len(seen) < FUNCTIONS_LOOKED_AT:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        of_file = function.__globals__.get("__name__", "")
        own = function.__code__.co_varnames[:1]
        for code in _codes(function.__code__):
            sets.update(_sets(code, own))
            for name in code.co_names:
                names.add(name)
                todo += _methods(cls, name)
                other = function.__globals__.get(name)
                if isinstance(other, FunctionType) and other.__globals__ is function.__globals__:
                    todo.append(other)
                elif isinstance(other, int | float) and of_file in sys.modules:
                    held.add((of_file, name))
    return Uses(frozenset(names), frozenset(held), frozenset(sets))


def _methods(cls: type[nn.Module], name: str) -> Iterator[FunctionType]:
    """All of this name, as one may call that of its base."""
    for base in cls.__mro__:
        if base is nn.Module or base.__module__.startswith(("torch.", "memkit.")):
            continue
        found = vars(base).get(name)
        found = (
            found.fget if isinstance(found, property) else inspect.unwrap(found) if callable(found) else None
        )
        found = undecorated(found)
        if isinstance(found, FunctionType):
            yield found


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _sets(code: CodeType, own: tuple[str, ...]) -> Iterator[str]:
    """Attributes of the first argument."""
    before, twice, read = None, False, set()
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_ATTR", "DELETE_ATTR") and (before in own or step.argval in read):
            yield step.argval
        if step.opname in ("COPY", "DUP_TOP"):  # self.x += 1 reads it first
            twice = before in own
        elif step.opname.startswith("LOAD_"):
            if twice and step.opname == "LOAD_ATTR":
                read.add(step.argval)
            before, twice = step.argval[-1] if isinstance(step.argval, tuple) else step.argval, False
        elif step.opname not in ("CACHE", "EXTENDED_ARG"):
            before, twice = None, False


def numbers_read(module: nn.Module, method: str = "forward") -> dict[Read, Any]:
    """Numbers, switches, words, None, and tensors that are no parameters."""
    used = uses(type(module), method)
    found: dict[Read, Any] = {}
    for name in sorted(used.names - INTERNAL):
        value = next((held[name] for held in (vars(module), module._buffers) if name in held), _ABSENT)
        if value is _ABSENT:
            value = _of_class(type(module), name)
        if value is None or (
            isinstance(value, int | float | str | Tensor) and not isinstance(value, nn.Parameter)
        ):
            found["", name] = value
    for where, name in sorted(used.globals):
        value = vars(sys.modules[where]).get(name) if where in sys.modules else None
        if isinstance(value, int | float):
            found[where, name] = value
    return found


def _of_class(cls: type[nn.Module], name: str) -> Any:
    for base in innermost_of(cls).__mro__:
        if base is not nn.Module and name in vars(base):
            return vars(base)[name]
    return _ABSENT


def value_of(module: nn.Module, read: Read) -> Any:
    where, name = read
    if where:
        return vars(sys.modules[where]).get(name)
    return getattr(module, name, None)


def another(value: Any) -> Any:
    """Of the same kind, to see what depends on it, for None a number; None where there is none."""
    if isinstance(value, Tensor):
        if value.dtype == torch.bool:
            return ~value
        return value * 1.5 + 0.25 if value.is_floating_point() else None
    if value is None:
        return 0.375
    if isinstance(value, str):
        return f"{value}_"
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 1.5 + 0.25


@contextmanager
def instead(module: nn.Module, read: Read, value: Any) -> Iterator[None]:
    where, name = read
    if where:
        held: MutableMapping[str, Any] = vars(sys.modules[where])
    else:
        held = module._buffers if name in module._buffers else vars(module)
    before = held.get(name, _ABSENT)
    held[name] = value
    try:
        yield
    finally:
        if before is _ABSENT:
            del held[name]
        else:
            held[name] = before


def marks(module: nn.Module) -> dict[tuple[int, str], Any]:
    """Of all that it and its parts hold, what tells whether it was changed."""
    found: dict[tuple[int, str], Any] = {}
    for at, part in enumerate(module.modules()):
        for name, value in (*vars(part).items(), *part._buffers.items()):
            if name not in INTERNAL:
                found[at, name] = _mark(value)
    return found


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, MutableMapping | MutableSequence | MutableSet):
        return id(value), len(value), _total(value)
    return value if isinstance(value, int | float | str) else id(value)


def _total(value: Any) -> Any:
    """Of counters by name."""
    if not isinstance(value, MutableMapping):
        return None
    return sum(each for each in value.values() if isinstance(each, int | float))


def differing(before: dict[tuple[int, str], Any], after: dict[tuple[int, str], Any]) -> set[tuple[int, str]]:
    return {at for at in before.keys() | after.keys() if before.get(at) != after.get(at)}


class Watching(Twin, kind="watching"):
    """Before another twin: that serves while the numbers that it was verified with are the same."""

    _memkit_reads: Reads

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for where, name, value in self._memkit_reads:
            held = getattr(self, name, None) if not where else vars(sys.modules[where]).get(name)
            if held is not value and (type(held) is not type(value) or held != value):
                stock: Callable[..., Any] = type(self)._stock_forward
                return stock(self, *args, **kwargs)
        return super().forward(*args, **kwargs)
