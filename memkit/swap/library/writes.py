"""What a function's code writes to that others have, and what it asks of its class: its bytecode is followed, and of each
value is known where it comes from.

A variable is what was put into it anywhere. What a call gives is the caller's own, but for one of the module's or of the
user's, which may give what it holds.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..untouched import STATELESS

PASSES = 4
"""Over a function, as a loop may put into a variable what an earlier line reads."""
ADDS = frozenset(
    {
        *("append", "appendleft", "extend", "extendleft", "insert", "setdefault", "update"),
        *("pop", "popleft", "popitem", "remove", "discard", "clear", "write", "writelines"),
    }
)
"""Methods that change what they are of; no tensor has one of these names."""
MAY_ADD = frozenset({"add", "sort", "put", "reverse"})
"""As these, of what is no tensor."""
OWN_NAMES = frozenset(
    {"__dict__", "__setattr__", "__delattr__", "__setitem__", "__delitem__", "__setstate__"}
)
OWN = ""
"""The module itself, where a path starts."""
IN_PLACE, OF_A_RESULT, STORES = "=", "()[]", "[]"
"""How something is written to, beside a method's name: `x += y`, `f()[i] = y`, `x[i] = y` and `x.y = z`."""

_ACCESS = re.compile(r"(LOAD|STORE|DELETE)_(?:FAST|DEREF)")
_NOTHING = {
    *("CACHE", "EXTENDED_ARG", "KW_NAMES", "NOP", "NOT_TAKEN", "PRECALL", "RESUME", "GET_ITER"),
    *("MAKE_CELL", "COPY_FREE_VARS", "GEN_START", "SETUP_ANNOTATIONS"),
}
_TAKES = (
    "STORE_",
    "DELETE_",
    "POP_",
    "RETURN_",
    "LIST_",
    "SET_ADD",
    "SET_UPDATE",
    "MAP_ADD",
    "DICT_",
    "JUMP_",
    "END_",
)
"""Beginnings of the names of instructions that leave nothing of their own."""
_ENDS = (
    "RETURN_VALUE",
    "RETURN_CONST",
    "RAISE",
    "RERAISE",
    "JUMP_FORWARD",
    "JUMP_ABSOLUTE",
    "JUMP_BACKWARD",
    "JUMP_NO",
)
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_ASKS = {getattr, hasattr}
_GOES_OVER = {iter, enumerate, reversed, zip, next}
_WRITES = {setattr, delattr, vars}
_RUNS = {exec, eval, globals}


class Value(NamedTuple):
    kind: str
    """"self", "class", "held" by one of these or a global, "given" as an argument, "got" from a call, "word", "made"."""
    path: tuple[str, ...] = ()


Values = frozenset[Value]
MADE: Values = frozenset({Value("made")})
UNKNOWN: Values = frozenset({Value("given", ("something",))})


class Write(NamedTuple):
    path: tuple[str, ...]
    how: str


class Followed:
    """What is known of a function. ``role``: what its first argument is, "self", "class" or nothing; "alone" where nobody
    else has any."""

    def __init__(self, function: FunctionType, role: str, cls: type[Any]) -> None:
        self.sets: set[str] = set()
        """Of itself."""
        self.writes: set[Write] = set()
        self.of_class: set[str] = set()
        """What it reads of the class, past the object."""
        self.asks: set[str] = set()
        """By `getattr`."""
        self.asks_any = False
        self.objects: dict[tuple[str, ...], Any] = {}
        """Globals, and what modules among them hold."""
        self.gives: dict[tuple[str, ...], bool] = {}
        """Of those that it calls, whether it gives them what others have."""
        self._globals, self._class = function.__globals__, cls
        self._variables: dict[Any, Values] = {}
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.objects[name,] = cell.cell_contents
            except ValueError:  # empty
                continue
            self._variables[name] = frozenset({Value("held", (name,))})
        codes = list(codes_of(code))
        for each in codes:
            self._given(each, role if each is code else "")
        for _ in range(PASSES):
            before = dict(self._variables)
            try:
                for each in codes:
                    self._follow(each)
            except Exception:  # instructions that nobody knows
                self.writes.add(Write(("something",), STORES))
            if self._variables == before:
                break

    def _given(self, code: CodeType, role: str) -> None:
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & inspect.CO_VARARGS)
        for i, name in enumerate(code.co_varnames[:count]):
            kind = role if role == "alone" or (not i and code.co_argcount) else ""
            given = {"": Value("given", (name,)), "alone": Value("made")}.get(kind, Value(kind))
            self._put(code, name, frozenset({given}))
        if code.co_flags & inspect.CO_VARKEYWORDS:
            self._put(code, code.co_varnames[count], MADE)

    def _key(self, code: CodeType, name: str) -> Any:
        """Functions within share what they close over."""
        return name if name in (*code.co_cellvars, *code.co_freevars) else (id(code), name)

    def _put(self, code: CodeType, name: str, values: Values) -> None:
        key = self._key(code, name)
        self._variables[key] = self._variables.get(key, frozenset()) | values

    def _follow(self, code: CodeType) -> None:
        stack: list[Values] = []
        waiting: dict[int, list[Values]] = {}
        goes_on = True
        for step in dis.get_instructions(code):
            for at in [at for at in waiting if at <= step.offset]:
                other = waiting.pop(at)
                stack, goes_on = _joined(stack, other) if goes_on else other, True
            if not goes_on:  # what handles an error
                stack, goes_on = [], True
            if step.opcode in _JUMPS:
                there = list(stack)
                _apply(there, step, True)
                if step.argval > step.offset:
                    before = waiting.get(step.argval)
                    waiting[step.argval] = there if before is None else _joined(there, before)
            self._step(code, step, stack)
            goes_on = not step.opname.startswith(_ENDS)

    def _step(self, code: CodeType, step: dis.Instruction, stack: list[Values]) -> None:
        name, argval, arg = step.opname, step.argval, step.arg or 0
        if name in _NOTHING:
            return
        if accesses := _ACCESS.findall(name):
            self._access(code, accesses, argval if isinstance(argval, tuple) else (argval,), stack)
        elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
            _push(stack, step, self._global(argval))
        elif name == "LOAD_CONST":
            stack.append(frozenset({Value("word", (argval,))}) if isinstance(argval, str) else MADE)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            owner = _pop(stack)
            _push(stack, step, self._attribute(owner, argval), 1)
        elif name == "LOAD_SUPER_ATTR":
            _pops(stack, 3)
            _push(stack, step, self._attribute(frozenset({Value("self")}), argval), 3)
        elif name in ("STORE_ATTR", "DELETE_ATTR"):
            self._set(_pop(stack), argval)
            _pops(stack, name == "STORE_ATTR")
        elif name in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            key = _pops(stack, 1 + (name == "STORE_SLICE"))[-1]
            self._store(_pop(stack), key)
            _pops(stack, name != "DELETE_SUBSCR")
        elif name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            self.writes.add(Write((argval,), STORES))
            _pops(stack, name == "STORE_GLOBAL")
        elif name in ("BINARY_SUBSCR", "BINARY_SLICE") or step.argrepr == "[]":
            _pops(stack, 1 + (name == "BINARY_SLICE"))
            stack.append(_part(_pop(stack)))
        elif name.startswith("INPLACE_") or (name == "BINARY_OP" and step.argrepr.endswith("=")):
            _pop(stack)
            owner = _pop(stack)
            self.writes.update(Write(each.path, IN_PLACE) for each in owner if each.kind == "held")
            stack.append(frozenset({each if each.kind == "held" else Value("made") for each in owner}))
        elif name in ("UNPACK_SEQUENCE", "UNPACK_EX"):
            owner = _pop(stack)
            _push(stack, step, _part(owner), 1)
        elif name == "IMPORT_NAME":
            _pops(stack, 2)
            self.objects[argval,] = sys.modules.get(argval)
            stack.append(frozenset({Value("held", (argval,))}))
        elif name == "IMPORT_FROM":
            stack.append(self._attribute(stack[-1] if stack else UNKNOWN, argval))
        elif name == "FOR_ITER":
            stack.append(_part(stack[-1] if stack else UNKNOWN))
        elif "CALL" in name and not name.startswith("CALL_INTRINSIC"):
            first = (
                1 if name in ("CALL_FUNCTION", "CALL_FUNCTION_KW") else 2
            )  # beside it its object, or nothing
            beside = {"CALL": 2, "CALL_KW": 3}.get(name)
            held = _pops(stack, arg + beside if beside else 1 - _effect(step, False))
            stack.append(self._call(frozenset().union(*held[:first]), held[first:]))
        elif not _shuffles(name, arg, stack):
            _apply(stack, step, False)

    def _access(
        self, code: CodeType, verbs: Iterable[str], names: Iterable[str], stack: list[Values]
    ) -> None:
        for verb, name in zip(verbs, names, strict=False):
            if verb == "LOAD":
                stack.append(self._variables.get(self._key(code, name), frozenset()))
            elif verb == "STORE":
                # What handles an error puts back a comprehension's variable.
                self._put(code, name, stack.pop() if stack else frozenset())
                if (name,) in self.objects and name in code.co_freevars:  # of who made the function
                    self.writes.add(Write((name,), STORES))

    def _global(self, name: str) -> Values:
        held = self._globals.get(name, vars(builtins).get(name))
        self.objects[name,] = held
        return frozenset({Value("held", (name,))})

    def _attribute(self, owners: Values, name: str) -> Values:
        return frozenset(found for owner in owners for found in self._attribute_of(owner, name))

    def _attribute_of(self, owner: Value, name: str) -> Iterator[Value]:
        kind, path = owner
        held = self.objects.get(path) if kind == "held" else None
        if kind == "class" or (isinstance(held, type) and issubclass(self._class, held)):
            self.of_class.add(name)
        if name in OWN_NAMES and kind != "made":
            self.writes.add(Write(path or (kind,), STORES))
        if isinstance(held, ModuleType):
            inner = (*path, name)
            self.objects[inner] = vars(held).get(name)
        elif name in ADDS and kind not in ("made", "word", "self", "class"):
            self.writes.add(Write(path, OF_A_RESULT if kind == "got" else name))
        elif kind == "held" and (name in MAY_ADD or is_in_place(name)):
            self.writes.add(Write(path, name))
        if kind == "self" and name == "__class__":
            yield Value("class")
        elif kind in ("self", "class"):
            yield Value("held", (OWN, name))
        elif kind == "held":
            yield Value("held", (*path, name))
        else:
            yield Value("made") if kind == "word" else owner

    def _set(self, owners: Values, name: str) -> None:
        for kind, path in owners:
            if kind == "self":
                self.sets.add(name)
            elif kind not in ("made", "word"):
                self.writes.add(Write((*path, name), STORES))

    def _store(self, owners: Values, key: Values) -> None:
        by_word = any(each.kind == "word" for each in key)
        for kind, path in owners:
            if kind == "got":
                self.writes.add(Write(path, STORES if by_word else OF_A_RESULT))
            elif kind not in ("made", "word"):
                self.writes.add(Write(path or (kind,), STORES))

    def _call(self, called: Values, args: list[Values]) -> Values:
        found: set[Value] = set()
        for kind, path in called:
            held = self.objects.get(path) if kind == "held" else None
            if isinstance(held, FunctionType):
                gives = any(each.kind not in ("made", "word") for arg in args for each in arg)
                self.gives[path] = gives or self.gives.get(path, False)
            words = [word for each in args[1:2] for _, (word, *_) in _of_kind(each, "word")]
            if _is_in(held, _ASKS) and len(args) > 1:
                if any(each.kind in ("self", "class", "given") for each in args[0]):
                    self.asks.update(words)
                    self.asks_any |= not words
                found.update(
                    *(self._attribute(args[0], word) for word in words), () if words else _part(args[0])
                )
            elif held is type and len(args) == 1:
                found.update(Value("class") if each.kind == "self" else Value("made") for each in args[0])
            elif held is super:
                found.add(Value("self"))
            elif _is_in(held, _GOES_OVER):
                found.update(*map(_part, args))
            elif _is_in(held, _RUNS):
                self.writes.add(Write(path, STORES))
            elif _is_in(held, _WRITES) and args:
                for word in words or ["something"]:
                    self._set(args[0], word)
            elif kind == "self" or (kind in ("held", "got") and not _is_known(held)):
                found.add(Value("got", path or (OWN,)))
            else:
                found.add(Value("made"))
        return frozenset(found)


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """With those of the functions within."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes_of(each)


def is_in_place(method: str) -> bool:
    """By its name, as PyTorch's are called."""
    return method.endswith("_") and not method.endswith("__")


def is_foreign(held: Any) -> bool:
    """Whether what defines it is neither PyTorch's, nor memkit's, nor the standard library's."""
    where = (
        held.__globals__.get("__name__")
        if isinstance(held, FunctionType)
        else getattr(held, "__module__", None)
    )
    return str(where or "builtins").partition(".")[0] not in STATELESS


def matters(write: Write, module: nn.Module) -> bool:
    """Whether it may be seen later, as what the module holds tells. Of a buffer that is changed in place a run tells, as it
    is one of a twin, too."""
    path, how = write
    if path[0] != OWN:
        return how != IN_PLACE
    held = _resolved(module, path[1:])
    if how == IN_PLACE and not isinstance(held, Tensor | list | dict | set):
        return False
    if how == OF_A_RESULT or how in MAY_ADD:
        return not isinstance(held, Tensor | nn.Module)
    if how == IN_PLACE or is_in_place(how):
        return not (len(path) == 2 and path[1] in module._buffers) and not isinstance(held, nn.Module)
    return True


def _resolved(held: Any, path: Iterable[str]) -> Any:
    for name in path:
        if isinstance(held, Tensor):
            return held
        own = getattr(held, "__dict__", {})
        inner = (own, *(own.get(each) or {} for each in ("_parameters", "_buffers", "_modules")))
        held = next((each[name] for each in inner if name in each), None)
    return held


def _is_known(held: Any) -> bool:
    """What gives nothing that it holds."""
    return held is not None and not is_foreign(held)


def _is_in(held: Any, those: set[Any]) -> bool:
    return held is not None and any(held is each for each in those)


def _of_kind(values: Values, kind: str) -> list[Value]:
    return [each for each in values if each.kind == kind]


def _part(values: Values) -> Values:
    return frozenset(Value("held", (OWN,)) if each.kind == "self" else each for each in values)


def _joined(one: list[Values], other: list[Values]) -> list[Values]:
    count = min(len(one), len(other))
    return [a | b for a, b in zip(one[len(one) - count :], other[len(other) - count :], strict=True)]


def _pop(stack: list[Values]) -> Values:
    return stack.pop() if stack else UNKNOWN


def _pops(stack: list[Values], count: int) -> list[Values]:
    """In the order in which they were pushed."""
    return [_pop(stack) for _ in range(count)][::-1]


def _effect(step: dis.Instruction, jumps: bool) -> int:
    return dis.stack_effect(step.opcode, step.arg, jump=jumps)


def _push(stack: list[Values], step: dis.Instruction, values: Values, popped: int = 0) -> None:
    """Once more where an instruction prepares a call."""
    stack += [values] * (_effect(step, False) + popped)


def _apply(stack: list[Values], step: dis.Instruction, jumps: bool) -> None:
    """An instruction of which no more is known than how many values it takes or leaves."""
    effect = _effect(step, jumps)
    _pops(stack, max(0, -effect))
    stack += [MADE] * max(0, effect)
    if effect <= 0 and not jumps and stack and not step.opname.startswith(_TAKES):
        stack[-1] = MADE


def _shuffles(name: str, arg: int, stack: list[Values]) -> bool:
    if name == "PUSH_NULL":
        stack.append(frozenset())
    elif name in ("COPY", "DUP_TOP"):
        stack.append(stack[-max(arg, 1)] if len(stack) >= max(arg, 1) else UNKNOWN)
    elif name == "DUP_TOP_TWO":
        stack += stack[-2:]
    elif name == "SWAP" and len(stack) >= arg:
        stack[-1], stack[-arg] = stack[-arg], stack[-1]
    elif name.startswith("ROT_"):
        count = {"ROT_TWO": 2, "ROT_THREE": 3, "ROT_FOUR": 4}.get(name, arg)
        top = _pop(stack)
        stack.insert(max(0, len(stack) - count + 1), top)
    else:
        return False
    return True
