"""Who else may read an activation's input later: what the code that called it says of the paths that a run did not take.

The variables that hold the input are looked up in the frames that are running, and followed through their code from the
call on, with its jumps, to where each is stored or deleted. What holds the input and is no such variable may read it.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

METADATA = frozenset(
    {
        *(
            "shape",
            "size",
            "dtype",
            "device",
            "dim",
            "ndim",
            "ndimension",
            "requires_grad",
            "numel",
            "nelement",
        ),
        *(
            "is_cuda",
            "is_meta",
            "is_quantized",
            "is_sparse",
            "is_nested",
            "layout",
            "is_contiguous",
            "stride",
        ),
        *(
            "is_floating_point",
            "is_complex",
            "element_size",
            "itemsize",
            "nbytes",
            "get_device",
            "storage_offset",
        ),
        *("new_zeros", "new_empty", "new_ones", "new_full"),
    }
)
"""Attributes of a tensor that do not read its numbers."""
LOOK_AT_ALL = frozenset({"locals", "vars", "eval", "exec", "dir"})
"""Functions that see a caller's variables."""

_ACCESS = re.compile(r"(LOAD|STORE|DELETE)_(?:FAST|DEREF|CLOSURE|CLASSDEREF|FROM_DICT_OR_DEREF)")
_NOTHING = {"CACHE", "EXTENDED_ARG", "KW_NAMES", "NOP", "NOT_TAKEN", "PRECALL", "RESUME"}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_RUNS = (
    "CALL",
    "BINARY",
    "INPLACE",
    "COMPARE",
    "FOR_ITER",
    "SEND",
    "YIELD",
    "BEFORE",
    "WITH",
    "DELETE",
    "LOAD_SPECIAL",
)
"""Beginnings of the names of instructions that may run a function which reads a variable of this one."""


class Flow:
    """The control flow of a function, and what it does to its variables."""

    def __init__(self, code: CodeType) -> None:
        self.instructions = [each for each in dis.get_instructions(code) if each.opname not in _NOTHING]
        self.offsets = [each.offset for each in self.instructions]
        self.captured = {*code.co_cellvars, *code.co_freevars}
        self.lines = [(start, line) for start, _, line in code.co_lines() if line is not None]
        handled = [
            (entry.start, entry.end, entry.target)
            for entry in getattr(dis.Bytecode(code), "exception_entries", ())
        ]
        for each in self.instructions:
            if (
                each.opname == "SETUP_FINALLY"
            ):  # Python 3.10, which has no table; what is handled stands before its handler
                handled.append((each.offset, each.argval, each.argval))
        swallows = "suppress" in code.co_names
        self.handlers = [
            (start, end, target)
            for start, end, handler in handled
            if not self._is_of_a_with(target := self._at(handler)) or swallows
        ]

    def later(self, name: str, call: int, line: int | None = None) -> int | None:
        """The line where the variable may be read after the call at this offset; None where it is not.

        ``line``: of the call, where others that look like it on the same line count too.
        """
        first = bisect_left(self.offsets, call + 1)
        open_, seen = [first], set[int]()
        if line is not None:
            open_ += [i + 1 for i in self._alike(name, first - 1, line)]
        while open_:
            i = open_.pop()
            if i in seen or i >= len(self.instructions):
                continue
            seen.add(i)
            does = self._does(name, i)
            if does == "read":
                return self.line(self.offsets[i])
            if does != "end":
                open_ += self._behind(i)
        return None

    def line(self, offset: int) -> int:
        return self.lines[max(0, bisect_left(self.lines, (offset + 1,)) - 1)][1] if self.lines else 0

    def _at(self, offset: int) -> int:
        return bisect_left(self.offsets, offset)

    def _is_of_a_with(self, handler: int) -> bool:
        """It calls `__exit__`, which hardly ever swallows an error."""
        return any(each.opname == "WITH_EXCEPT_START" for each in self.instructions[handler : handler + 3])

    def _behind(self, i: int) -> Iterator[int]:
        instruction = self.instructions[i]
        name = instruction.opname
        if instruction.opcode in _JUMPS and not name.startswith("SETUP_"):
            yield self._at(instruction.argval)
        if not (
            name.startswith(("RETURN_VALUE", "RETURN_CONST", "RAISE", "RERAISE")) or _is_plain_jump(name)
        ):
            yield i + 1
        for start, end, handler in self.handlers:
            if start <= instruction.offset < end:
                yield handler

    def _does(self, name: str, i: int) -> str:
        """To the variable: "read", "end" or nothing."""
        instruction = self.instructions[i]
        opname, about = instruction.opname, instruction.argval
        verbs = _ACCESS.findall(opname)
        names = about if isinstance(about, tuple) else (about,)
        for k, (verb, variable) in enumerate(zip(verbs, names, strict=False)):
            if variable != name:
                continue
            if verb != "LOAD":
                return "end"
            if not (k == len(verbs) - 1 and self._is_of_metadata(i + 1)):
                return "read"
        if opname in ("LOAD_GLOBAL", "LOAD_NAME") and about in LOOK_AT_ALL:
            return "read"
        return "read" if name in self.captured and opname.startswith(_RUNS) else ""

    def _is_of_metadata(self, i: int) -> bool:
        """What is done with a variable just loaded: whether it is None, or what of it is no number."""
        behind = self.instructions[i : i + 2]
        opname, about = behind[0].opname, behind[0].argval
        if opname in ("LOAD_ATTR", "LOAD_METHOD"):
            return about in METADATA
        is_none = opname == "LOAD_CONST" and about is None and behind[-1].opname == "IS_OP"
        return is_none or (opname.startswith("POP_JUMP") and opname.endswith("NONE"))

    def _alike(self, name: str, call: int, line: int) -> list[int]:
        """Calls of what is called there, with the variable: which of them runs, its line does not tell."""
        loads = self.instructions[call - 2 : call] if call > 1 else []
        found = []
        for i in range(2, len(self.instructions)):
            before = self.instructions[i - 2 : i]
            if (
                "CALL" in self.instructions[i].opname
                and [(x.opname, x.argval) for x in before] == [(x.opname, x.argval) for x in loads]
                and name
                in (before[1].argval, *(before[1].argval if isinstance(before[1].argval, tuple) else ()))
                and self.line(self.offsets[i]) == line
            ):
                found.append(i)
        return found


def _is_plain_jump(opname: str) -> bool:
    return (
        opname.startswith(("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_NO")) or opname == "JUMP"
    )


def variables(frame: FrameType) -> dict[str, Any]:
    """Of a function; none where looking would show in it."""
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED or not LOOK_AT_ALL.isdisjoint(code.co_names):
        return {}
    held = frame.f_locals
    found = dict(held)
    if sys.version_info < (3, 13):  # a copy that the frame keeps, and with it references that nobody has
        held.clear()
    return found


def reads_parameter(function: Any, number: int) -> bool:
    """Whether it may, as the code of a plain function tells."""
    if type(function) is not FunctionType:
        return True
    code = function.__code__
    if number >= code.co_argcount:
        number = code.co_argcount + code.co_kwonlyargcount  # one for all others
        if not code.co_flags & inspect.CO_VARARGS:
            return True
    return Flow(code).later(code.co_varnames[number], -1) is not None


def times_held(value: Any, tensor: Any) -> int:
    """How often a variable refers to it: itself, or a container in it."""
    if value is tensor:
        return 1
    if type(value) in (tuple, list):
        return sum(each is tensor for each in value)
    return sum(each is tensor for each in value.values()) if type(value) is dict else 0
