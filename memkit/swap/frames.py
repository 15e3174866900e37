"""Which variables of the code that is running hold an activation's input, and whether that may go on with them."""

from __future__ import annotations

import dis
import inspect
from types import CodeType, FrameType
from typing import Any, NamedTuple

from .later import Flow, times_held, variables
from .types import CALL_CODES, FEWER, FUNCTION, LAYER, NAMED, WRAPPED

ELSEWHERE = "its input is held by more than variables of the code that calls it"
PAST_CALL = "it is not called as a module"

_WATCH = f"{__package__}.watch"
_TRIAL = f"{__package__}.trial"


class Holders(NamedTuple):
    reason: str
    """Why code may read the input later, where a run need not show it."""
    own: int
    """How many of the references to it are the watch's."""
    frames: tuple[FrameType, ...]
    """What called the activation, and so on up to the last one with a variable that holds it."""
    uncounted: bool = False
    """Whether there are more references than count: `act(*args)` hands on the tuple that the code has."""


class Frames:
    """Of one watched run."""

    def __init__(self) -> None:
        self._flows: dict[CodeType, Flow] = {}
        self._lines: dict[tuple[CodeType, str, int], int | None] = {}

    def look(self, frame: FrameType | None, tensor: Any, references: int) -> Holders:
        """``frame``: what called the module that was given the tensor."""
        if frame is None:
            return Holders(PAST_CALL, 0, (), uncounted=True)
        uncounted = dis.opname[frame.f_code.co_code[frame.f_lasti]] == "CALL_FUNCTION_EX"
        references += FEWER * uncounted
        reason, known, own, depth = "", 0, 0, 1
        passed: list[FrameType] = [frame]
        while frame is not None and known < references and frame.f_globals.get("__name__") != _TRIAL:
            code, of_watch = frame.f_code, frame.f_globals.get("__name__") == _WATCH
            held = {} if code in CALL_CODES and code is not WRAPPED else _held(frame, tensor, of_watch)
            if code not in CALL_CODES and not of_watch and frame is not passed[0]:
                passed.append(frame)
            if code is WRAPPED:
                known += LAYER * held.get("args", 0) + NAMED * held.get("kwargs", 0)
            elif held and of_watch:
                ours = sum(held.values()) + 1 + held.get("named", 0)  # with the arguments that it passes on
                own, known = own + ours, known + ours
            elif held:
                known, depth = known + sum(held.values()), len(passed)
                for name in held:
                    reason = reason or self._why(frame, name)
                if frame.f_back is not None and frame.f_back.f_code not in CALL_CODES:
                    known += FUNCTION * sum(name in code.co_varnames[: code.co_argcount] for name in held)
            frame = frame.f_back
        reason = reason or (ELSEWHERE if known < references else "")
        return Holders(reason, own, tuple(passed[:depth]), uncounted)

    def _why(self, frame: FrameType, name: str) -> str:
        code = frame.f_code
        key = code, name, frame.f_lasti
        if key not in self._lines:
            if code not in self._flows:
                self._flows[code] = Flow(code)
            self._lines[key] = self._flows[code].later(name, frame.f_lasti, frame.f_lineno)
        read = self._lines[key]
        if read is None:
            return ""
        return f"its input, `{name}`, may be read later in {code.co_name} (line {read})"


def _held(frame: FrameType, tensor: Any, every: bool) -> dict[str, int]:
    """The variables that refer to it, with how often: itself, or what the function calls all its other arguments, as such
    tuples and dictionaries are made for the call. Another container may be somebody else's too, unless it is to be
    ``every`` one."""
    code = frame.f_code
    named = code.co_argcount + code.co_kwonlyargcount
    flags = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    others = code.co_varnames[named : named + flags]
    return {
        name: times
        for name, value in variables(frame).items()
        if (value is tensor or every or name in others) and (times := times_held(value, tensor))
    }
