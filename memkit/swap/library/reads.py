"""What a forward reads of its module beside layers and parameters, and what it writes there.

A twin is compared with what the module is now. Numbers that the forward reads may be others later, and what it writes down
for others to read has to be written.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, MutableSet
from contextlib import contextmanager
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..types import innermost_of
from ..untouched import MEMBERS, STATELESS, attributes_of
from .twin import Twin
from .writes import ADDS, IN_PLACE, MAY_ADD, OWN, Followed, Write, codes_of, is_foreign, matters

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes of every module, its mode among them."""
FUNCTIONS_LOOKED_AT = 100
DEPTH = 3
"""Of containers in containers, and in objects, whose members are compared."""
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
    writes: frozenset[Write]
    """To what others have."""
    of_class: frozenset[str]
    """What it reads of its class, past the object."""
    asks: frozenset[str]
    """By `getattr`."""
    asks_any: bool
    """By `getattr`, names that its code does not tell."""


Function = tuple[FunctionType, str]
"""What its first argument is, too, see `Followed`."""
_uses: WeakKeyDictionary[type[nn.Module], dict[str, Uses]] = WeakKeyDictionary()


def uses(cls: type[nn.Module], method: str = "forward") -> Uses:
    """By its code, that of its own methods and of the user's functions. Not that of torch."""
    cls = innermost_of(cls)
    known = _uses.setdefault(cls, {})
    if method not in known:
        known[method] = _uses_of(cls, methods_of(cls, method))
    return known[method]


def _uses_of(cls: type[nn.Module], functions: Iterable[Function]) -> Uses:
    names: set[str] = set()
    held: set[Read] = set()
    sets: set[str] = set()
    writes: set[Write] = set()
    of_class: set[str] = set()
    asks: set[str] = set()
    asks_any = False
    todo = deque(functions)
    seen: set[Function] = set()
    while todo and len(seen) < FUNCTIONS_LOOKED_AT:
        function, role = todo.pop()
        if (function, role) in seen:
            continue
        seen.add((function, role))
        known = Followed(function, role, cls)
        sets |= known.sets
        writes |= known.writes
        of_class |= known.of_class
        asks |= known.asks
        asks_any |= known.asks_any
        own = {*known.asks, *(name for code in codes_of(function.__code__) for name in code.co_names)}
        names |= own
        for name in own:
            todo += methods_of(cls, name)
        for path, other in known.objects.items():
            if isinstance(other, int | float):
                of = known.objects.get(path[:-1]) if path[:-1] else sys.modules.get(_file(function))
                theirs = path[:-1] and not _is_users(*_where(of), _file(function))
                if isinstance(of, ModuleType) and vars(of).get(path[-1]) is other and not theirs:
                    held.add((of.__name__, path[-1]))
            elif isinstance(other, FunctionType):
                role = "" if known.gives.get(path, True) else "alone"
                for each in _functions_of(other, own, _file(function)):
                    if each.__globals__ is function.__globals__:
                        todo.append((each, role))
                    else:
                        todo.appendleft((each, role))
            else:  # last
                todo.extendleft((each, "") for each in _functions_of(other, own, _file(function)))
    return Uses(
        frozenset(names),
        frozenset(held),
        frozenset(sets),
        frozenset(writes),
        frozenset(of_class),
        frozenset(asks),
        asks_any,
    )


def _file(function: FunctionType) -> str:
    return str(function.__globals__.get("__name__", ""))


def methods_of(cls: type[nn.Module], name: str) -> Iterator[Function]:
    """All of this name, as one may call that of its base, and what is around them."""
    for base in cls.__mro__:
        if base is nn.Module or base.__module__.startswith(("torch.", "memkit.")):
            continue
        found: Any = vars(base).get(name)
        role = {staticmethod: "", classmethod: "class"}.get(type(found), "self")
        found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        yield from (
            (each, role) for each in _unwrapped(found) if not _file(each).startswith(("torch.", "memkit."))
        )


def _unwrapped(found: Any) -> Iterator[FunctionType]:
    """With the decorators around it, each of which keeps what it wraps."""
    while callable(found):
        if isinstance(found, FunctionType):
            yield found
        found = vars(found).get("__wrapped__") if hasattr(found, "__dict__") else None


def _functions_of(held: Any, names: Iterable[str], user: str) -> Iterator[FunctionType]:
    """Those that a call of it, or of its methods of these names, may run: the user's own, none of another package."""
    if isinstance(held, partial):
        for part in (held.func, *held.args, *held.keywords.values()):
            yield from _functions_of(part, names, user)
    elif isinstance(held, FunctionType):
        yield from _users_own(held, user)
    elif isinstance(held, MethodType):
        yield from _functions_of(held.__func__, names, user)
    elif not isinstance(held, nn.Module | Tensor | ModuleType) and is_foreign(held):
        cls = held if isinstance(held, type) else type(held)
        if not issubclass(cls, nn.Module | torch.autograd.Function):
            for name in {*names, "__call__"}:
                found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
                found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
                yield from _users_own(found, user)


def _users_own(found: Any, user: str) -> Iterator[FunctionType]:
    for each in _unwrapped(found):
        if _is_users(_file(each), each.__code__.co_filename, user):
            yield each


def _where(module: Any) -> tuple[str, str | None]:
    return str(getattr(module, "__name__", "")), getattr(module, "__file__", None)


def _is_users(module: str, file: str | None, user: str) -> bool:
    package = module.partition(".")[0]
    if package == user.partition(".")[0]:
        return True
    return package not in STATELESS and not _INSTALLED.search(file or "")


_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")


def why_stock_has_to_run(module: nn.Module, method: str = "forward") -> str:
    """What it sets, or changes elsewhere, in each call, which a twin would not; nothing if there is no such thing."""
    used = uses(type(module), method)
    name = type(module).__name__
    if used.sets:
        return f"{name} sets {', '.join(sorted(used.sets))} in each call"
    changed = {".".join(filter(None, write.path)) for write in used.writes if matters(write, module)}
    for attribute in used.names & vars(module).keys() - INTERNAL:
        if _records(vars(module)[attribute], used.names, type(module).__module__):
            changed.add(attribute)
    return f"{name} changes {', '.join(sorted(changed))} in each call" if changed else ""


def written_in_place(module: nn.Module, method: str = "forward") -> set[str]:
    """Its buffers that its code changes, on some path."""
    found = {path[1] for path, how in uses(type(module), method).writes if path[0] == OWN and len(path) == 2}
    return {name for name in found if module._buffers.get(name) is not None}


def _records(held: Any, names: frozenset[str], user: str) -> bool:
    """Whether what an attribute holds, if it is called, writes to what others have."""
    if isinstance(held, partial):
        return any(_records(each, names, user) for each in (held.func, *held.args, *held.keywords.values()))
    if isinstance(held, BuiltinMethodType):
        return isinstance(held.__self__, list | dict | set | deque) and held.__name__ in ADDS | MAY_ADD
    if isinstance(held, nn.Module | Tensor | type):
        return False
    found = _uses_of(nn.Module, [(each, "") for each in _functions_of(held, names, user)])
    return bool(found.sets) or any(write.how != IN_PLACE for write in found.writes)


def numbers_read(module: nn.Module, method: str = "forward") -> dict[Read, Any]:
    """Numbers, switches, words, None, functions that it holds, and tensors that are no parameters."""
    used = uses(type(module), method)
    found: dict[Read, Any] = {}
    names = used.names | vars(module).keys() if used.asks_any else used.names
    for name in sorted(names - INTERNAL):
        value = held_by(module, name)
        if value is _ABSENT:
            value = of_class(module, name)
        if value is _ABSENT and name in used.asks:
            value = None
        plain = value is None or isinstance(value, int | float | str)
        calls = name in vars(module) and callable(value)
        if plain or calls or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter)):
            found["", name] = value
    for where, name in sorted(used.globals):
        value = vars(sys.modules[where]).get(name) if where in sys.modules else None
        if isinstance(value, int | float):
            found[where, name] = value
    return found


def held_by(module: nn.Module, name: str) -> Any:
    """Of what is registered tensors alone, and None."""
    for held in (vars(module), module._buffers):
        if name in held:
            return held[name]
    registered: Any = {**module._parameters, **module._modules}
    return None if name in registered and registered[name] is None else _ABSENT


def of_class(module: nn.Module, name: str) -> Any:
    for base in innermost_of(type(module)).__mro__:
        if base is not nn.Module and name in vars(base):
            return vars(base)[name]
    return _ABSENT


def read_of_class(module: nn.Module, method: str = "forward") -> frozenset[str]:
    """Numbers, switches, words and None that its code asks its class for."""
    asked = uses(type(module), method).of_class
    values = {name: of_class(module, name) for name in asked - INTERNAL if not name.startswith("__")}
    return frozenset(
        name for name, held in values.items() if held is None or isinstance(held, int | float | str)
    )


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
        if value.is_complex() or value.is_quantized:
            return None
        return value * 1.5 + 0.25 if value.is_floating_point() else value + 1
    if value is None:
        return 0.375
    if isinstance(value, str):
        return f"{value}_"
    if isinstance(value, bool):
        return not value
    if callable(value):
        return _uncallable
    return value + 1 if isinstance(value, int) else value * 1.5 + 0.25


def _uncallable(*args: Any, **kwargs: Any) -> Any:
    raise TypeError("called")


@contextmanager
def instead(module: nn.Module, read: Read, value: Any) -> Iterator[None]:
    where, name = read
    if where:
        held: MutableMapping[str, Any] = vars(sys.modules[where])
    else:
        held = module._buffers if module._buffers.get(name) is not None else vars(module)
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
        for name, value in (*vars(part).items(), *part._buffers.items(), *part._parameters.items()):
            if name not in INTERNAL:
                found[at, name] = _mark(value)
    return found


def _mark(value: Any, depth: int = DEPTH) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, int | float | str):
        return value
    held = value
    if not isinstance(value, MutableMapping | MutableSequence | MutableSet | deque):
        held = attributes_of(value)
    if held is None or not depth or isinstance(value, nn.Module | type):
        return id(value)
    if len(held) > MEMBERS:
        return id(value), len(held)
    members = held.items() if isinstance(held, MutableMapping) else ((None, each) for each in held)
    return id(value), tuple((_mark(name, 0), _mark(each, depth - 1)) for name, each in members)


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
