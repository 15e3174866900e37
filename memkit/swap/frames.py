"""Which variables of the code that is running hold an activation's input, and whether that may go on with them."""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any

from .later import Flow, times_held, variables
from .types import CALL_CODES, FUNCTION, LAYER, NAMED, WRAPPED

ELSEWHERE = "its input is held by more than variables of the code that calls it"
PAST_CALL = "it is not called as a module"

_WATCH = f"{__package__}.watch"
_TRIAL = f"{__package__}.trial"


class Frames:
    """Of one watched run."""

    def __init__(self) -> None:
        self._flows: dict[CodeType, Flow] = {}
        self._lines: dict[tuple[CodeType, str, int, int | None], int | None] = {}

    def look(self, frame: FrameType | None, tensor: Any, references: int) -> tuple[str, int]:
        """Why code may read the tensor later, where a run need not show it, and how many of the references to it are the
        watch's own. ``frame``: what called the module that was given it."""
        if frame is None:
            return PAST_CALL, 0
        reason, known, own = "", 0, 0
        line: int | None = frame.f_lineno
        while frame is not None and known < references and frame.f_globals.get("__name__") != _TRIAL:
            code, held = frame.f_code, {}
            if code is WRAPPED or code not in CALL_CODES:
                held = {n: times for n, v in variables(frame).items() if (times := times_held(v, tensor))}
            if code is WRAPPED:
                known += LAYER * held.get("args", 0) + NAMED * held.get("kwargs", 0)
            elif held and frame.f_globals.get("__name__") == _WATCH:
                ours = sum(held.values()) + 1 + held.get("named", 0)  # with the arguments that it passes on
                own, known = own + ours, known + ours
            elif held:
                known += sum(held.values())
                for name in held:
                    reason = reason or self._why(frame, name, line)
                if frame.f_back is not None and frame.f_back.f_code not in CALL_CODES:
                    known += FUNCTION * sum(name in code.co_varnames[: code.co_argcount] for name in held)
            line = None  # a swapped activation asks what line called it, not what called that
            frame = frame.f_back
        return reason or (ELSEWHERE if known < references else ""), own

    def _why(self, frame: FrameType, name: str, line: int | None) -> str:
        code = frame.f_code
        key = code, name, frame.f_lasti, line
        if key not in self._lines:
            if code not in self._flows:
                self._flows[code] = Flow(code)
            self._lines[key] = self._flows[code].later(name, frame.f_lasti, line)
        read = self._lines[key]
        if read is None:
            return ""
        return f"its input, `{name}`, may be read later in {code.co_name} (line {read})"
