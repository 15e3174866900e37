"""Forwards of libraries with memkit's calls in the place of some of their lines.

The twin runs the same code, but for what :mod:`modulated`, :mod:`scaled`,
:mod:`norm_calls` and :mod:`regions` have found in its source.
Functions and methods that it calls are run so too, where their names say that they may modulate or attend.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from .lines import OwnLines
from .modulated import Modulation, may_modulate, scale_shift
from .norm_calls import Norming, join_lines, may_norm, norm_act
from .regions import may_attend, regions_of, with_regions
from .repeatable import is_readable, reach
from .rerun import again
from .scaled import Scaling, linear_scale, linear_scale_by_mul, may_scale
from .source import CODES, changed, global_names
from .twin import undecorated, with_names

PLACE = "memkit.swap.library.rewritten"
"""Of what rewritten code calls."""
CALLED = ("modulate", "attn", "attention", "attend")
"""Parts of the names of functions that are looked into."""


def rewrites(module: nn.Module) -> frozenset[str]:
    """What its class's forward does that memkit does in another way: "modulate", "scale", "norm and act", "attend",
    "attend elsewhere"."""
    return frozenset(_found(type(module).forward, module, set()))


def rewritten(forward: Any, **names: Any) -> Any:
    """The same function, with these names of its module too."""
    code = _code(forward)
    return with_names(forward, code, **names) if names or code is not None else forward


class Ours:
    """What rewritten code calls."""

    again = staticmethod(again)
    linear_scale = staticmethod(linear_scale)
    linear_scale_by_mul = staticmethod(linear_scale_by_mul)
    norm_act = staticmethod(norm_act)
    scale_shift = staticmethod(scale_shift)

    @staticmethod
    def rewritten(function: Any) -> Any:
        """A function or method in its other form, if it has one."""
        plain = function.__func__ if type(function) is MethodType else function
        code = None if hasattr(plain, "__wrapped__") else _code(plain)
        if code is None:
            return function
        made = with_names(plain, code)
        return MethodType(made, function.__self__) if plain is not function else made


def _found(function: Any, module: nn.Module, seen: set[Any], is_own: bool = True) -> Iterator[str]:
    """Itself, or in methods and other functions that it calls."""
    code = _code(function)
    if code is None or code in seen:
        return
    seen.add(code)
    known = undecorated(function).__globals__
    if "scale_shift" in code.co_names:
        yield "modulate"
    if {"linear_scale", "linear_scale_by_mul"} & {*code.co_names}:
        yield "scale"
    if "norm_act" in code.co_names:
        yield "norm and act"
    regions = (reach(region, known, type(module)) for region in regions_of(code))
    if any(each is not None and is_readable(module, each) for each in regions):
        yield "attend" if is_own else "attend elsewhere"
    for name in filter(_may_be_rewritten, code.co_names):
        if name in known:
            yield from _found(known[name], module, seen, is_own=False)
        else:
            yield from _found(getattr(type(module), name, None), module, seen)


def _code(function: Any) -> CodeType | None:
    """The changed code of a function, without its decorators."""
    function = undecorated(function)
    if type(function) is not FunctionType or str(function.__module__).startswith(("torch.", "memkit.")):
        return None
    return _changed(function.__code__.co_filename, function.__code__)


@lru_cache(maxsize=CODES)
def _changed(_file: str, code: CodeType) -> CodeType | None:
    calls, modulates = any(map(_may_be_rewritten, code.co_names)), may_modulate(code)
    scales, norms = may_scale(code), may_norm(code)
    attends = may_attend(code) and global_names(code) is not None
    if not (calls or modulates or scales or norms or attends):
        return None

    def change(function: ast.FunctionDef, owner: str) -> bool:
        found = attends and with_regions(function, owner, _called)  # first, of lines that say what they call
        visitors: list[Any] = [_Calls(_called)] if calls else []
        if modulates:
            visitors.append(Modulation(_called))
        if scales:
            visitors.append(Scaling(_called))
        if norms:
            join_lines(function)
            visitors.append(Norming(_called))
        function.body = [_visited(line, visitors) for line in function.body]
        return found or any(visitor.found for visitor in visitors)

    return changed(code, change, PLACE, Ours)


def _visited(line: ast.stmt, visitors: list[Any]) -> ast.stmt:
    for visitor in visitors:
        line = visitor.visit(line)
    return line


def _may_be_rewritten(name: str) -> bool:
    return any(part in name for part in CALLED)


class _Calls(OwnLines, ast.NodeTransformer):
    """`modulate(x)`, `self.attend(x)` as calls of their other form."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        is_own = isinstance(function, ast.Name) or isinstance(getattr(function, "value", None), ast.Name)
        self.generic_visit(node)
        if is_own and _may_be_rewritten(name):
            self.found = True
            node.func = self._called("rewritten", [function], function)
        return node


def _called(name: str, args: list[ast.expr], place: ast.AST) -> ast.expr:
    """A call of ours."""
    function = ast.Attribute(ast.Constant(PLACE), name, ast.Load())
    call = ast.Call(function, args, [])
    for each in (call, function, function.value):
        ast.copy_location(each, place)
    return call
