"""Adaptive norms, whose scale and shift are computed for each sample: `norm(x) * (1 + scale) + shift`.

Peebles & Xie, "Scalable diffusion models with transformers", 2022. Libraries write that out in the forward of a block, or in
a function `modulate` beside it. Stock keeps the norm's input, its result and what follows keeps the sum. Inside
:class:`memkit.lean` the same code runs with one operator in the place of the two, whose result is made again: the norm's
input is kept alone. Where the operator is not for what it is given, the expression is stock's.
"""

from __future__ import annotations

import ast
import dis
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor

from ... import _C
from .source import changed, global_names
from .twin import undecorated, with_names

NAME = "_memkit_scale_shift"


def modulates(forward: Any) -> bool:
    """Whether it does that, itself or by a function of its module."""
    return bool(_codes(forward))


def with_modulation(forward: Any, **names: Any) -> Any:
    """The same function, with these names of its module too. Asks for what the names stand for now, which may be patched."""
    codes = _codes(forward)
    for name, code in codes.items():
        if name:
            names[name] = with_names(undecorated(forward).__globals__[name], code, **{NAME: scale_shift})
    if codes:
        names[NAME] = scale_shift
    return with_names(forward, codes.get(""), **names) if names else forward


def scale_shift(first: Any, second: Any, shift: Any = None) -> Any:
    """first * second + shift."""
    if (
        isinstance(first, Tensor)
        and isinstance(second, Tensor)
        and (shift is None or isinstance(shift, Tensor))
    ):
        out = _C.scale_shift(first, second, shift)
        if out is not None:
            return out
    product = first * second
    return product if shift is None else product + shift


def _codes(forward: Any) -> dict[str, CodeType]:
    """Changed code of the function under "", and of functions that it calls by the names of its module."""
    forward = undecorated(forward)
    if not _is_of_a_library(forward) or not _may_move(forward.__code__):
        return {}
    found = {"": _changed(forward.__code__)}
    for name in global_names(forward.__code__) or ():
        held = forward.__globals__.get(name)
        if _is_of_a_library(held) and _may_move(held.__code__) and not hasattr(held, "__wrapped__"):
            found[name] = _changed(held.__code__)
    return {name: code for name, code in found.items() if code is not None}


def _is_of_a_library(function: Any) -> bool:
    return type(function) is FunctionType and not str(function.__module__).startswith(("torch.", "memkit."))


@cache
def _changed(code: CodeType) -> CodeType | None:
    rewriting = _Rewriting()

    def change(function: ast.FunctionDef) -> bool:
        function.body = [rewriting.visit(line) for line in function.body]
        return rewriting.found

    return changed(code, change) if _may_modulate(code) else None


def _may_move(code: CodeType) -> bool:
    """Whether it may run over a copy of its module's names; a compiler would take that for another function in each call."""
    return global_names(code) is not None and "compile" not in code.co_names


NEAR = 12


def _may_modulate(code: CodeType) -> bool:
    """Whether it loads a one, adds to it and multiplies by the sum soon: cheaper than its source."""
    one = add = -NEAR
    for i, each in enumerate(dis.get_instructions(code)):
        operation = {"BINARY_ADD": "+", "BINARY_MULTIPLY": "*"}.get(each.opname, each.argrepr)
        if each.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and _is_one(each.argval):
            one = i
        elif each.opname.startswith("BINARY_") and operation == "+" and i - one < NEAR:
            add = i
        elif each.opname.startswith("BINARY_") and operation == "*" and i - add < 4 * NEAR:
            return True
    return False


class _Rewriting(ast.NodeTransformer):
    """`x * (1 + scale) + shift`, `(1 + scale) * x` and the like, as calls."""

    def __init__(self) -> None:
        self.found = False

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        product, shift = node, []
        if isinstance(node.op, ast.Add) and isinstance(node.left, ast.BinOp) and _is_read_only(node.right):
            product, shift = node.left, [node.right]
        if not _is_modulation(product, is_shifted=bool(shift)):
            return self.generic_visit(node)  # type: ignore[return-value]
        self.found = True
        factors = [self.visit(product.left), self.visit(product.right)]
        call = ast.Call(ast.Name(NAME, ast.Load()), [*factors, *shift], [])
        for each in (call, call.func):
            ast.copy_location(each, node)
        return call

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node


def _is_modulation(node: ast.BinOp, is_shifted: bool) -> bool:
    """A product of one factor 1 + scale and something else. `(i + 1) * n` alone is mostly of whole numbers."""
    if not isinstance(node.op, ast.Mult) or any(isinstance(each, ast.NamedExpr) for each in ast.walk(node)):
        return False
    return _is_factor(node.left, is_shifted) != _is_factor(node.right, is_shifted)


def _is_factor(node: ast.expr, in_any_order: bool) -> bool:
    """`1 + scale`, or a view of that."""
    if inner := _viewed(node):
        return _is_factor(inner, in_any_order)
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
        return False
    sides = ((node.left, node.right), (node.right, node.left))[: 1 + in_any_order]
    return any(
        isinstance(one, ast.Constant) and _is_one(one.value) and _is_read_only(scale) for one, scale in sides
    )


def _is_read_only(node: ast.expr) -> bool:
    """A variable, or a view of one: nothing happens when it is read a little earlier."""
    inner = _viewed(node)
    return _is_read_only(inner) if inner else isinstance(node, ast.Name)


def _viewed(node: ast.expr) -> ast.expr | None:
    """`x` of `x[:, None]` and `x.unsqueeze(1)`."""
    if isinstance(node, ast.Subscript):
        return node.value if all(isinstance(each, _CONSTANT) for each in ast.walk(node.slice)) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
        constant = not node.keywords and all(
            isinstance(each, _CONSTANT) for arg in node.args for each in ast.walk(arg)
        )
        return node.func.value if constant else None
    return None


_VIEWS = {"unsqueeze", "squeeze"}
_CONSTANT = ast.Slice, ast.Constant, ast.Tuple, ast.Load, ast.UnaryOp, ast.USub


def _is_one(value: Any) -> bool:
    return type(value) in (int, float) and value == 1
