"""Adaptive norms, whose scale and shift are computed for each sample: `norm(x) * (1 + scale) + shift`.

Peebles & Xie, "Scalable diffusion models with transformers", 2022. Libraries write that out in the forward of a block, or in
a function `modulate` beside it. Stock keeps the norm's input, its result and what follows keeps the sum. Inside
:class:`memkit.lean` the same code runs with one operator in the place of the two, whose result is made again: the norm's
input is kept alone. Where the operator is not for what it is given, the expression is stock's.
"""

from __future__ import annotations

import ast
import dis
from types import CodeType
from typing import Any

from torch import Tensor

from ... import _C
from .lines import OwnLines


def scale_shift(first: Any, second: Any, shift: Any = None) -> Any:
    """first * second + shift."""
    tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
    if tensors and (shift is None or isinstance(shift, Tensor)):
        out = _C.scale_shift(first, second, shift)
        if out is not None:
            return out
    product = first * second
    return product if shift is None else product + shift


NEAR = 12


def may_modulate(code: CodeType) -> bool:
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


class Modulation(OwnLines, ast.NodeTransformer):
    """`x * (1 + scale) + shift`, `(1 + scale) * x` and the like, as calls."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        product, shift = node, []
        if isinstance(node.op, ast.Add) and isinstance(node.left, ast.BinOp) and _is_read_only(node.right):
            product, shift = node.left, [node.right]
        if not _is_modulation(product, is_shifted=bool(shift)):
            return self.generic_visit(node)  # type: ignore[return-value]
        self.found = True
        factors = [self.visit(product.left), self.visit(product.right)]
        return self._called("scale_shift", [*factors, *shift], node)


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
    """A variable, something of it, or a view or cast of that: nothing happens when it is read a little earlier."""
    if isinstance(node, ast.Attribute):
        return _is_read_only(node.value)
    inner = _viewed(node)
    return _is_read_only(inner) if inner else isinstance(node, ast.Name)


def _viewed(node: ast.expr) -> ast.expr | None:
    """`x` of `x[:, None]`, `x.unsqueeze(1)` and `x.float()`."""
    if isinstance(node, ast.Subscript):
        return node.value if _is_plain(node.slice) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS:
        return node.func.value if not node.keywords and all(map(_is_plain, node.args)) else None
    return None


VIEWS = {"unsqueeze", "squeeze", "view", "to", "type_as", "float", "double", "half", "bfloat16"}
_PLAIN = (
    *(ast.Slice, ast.Constant, ast.Tuple, ast.Load, ast.UnaryOp, ast.USub),
    *(ast.Name, ast.Attribute, ast.BinOp, ast.operator),
)


def _is_plain(node: ast.expr) -> bool:
    """Numbers, slices, names and sums of them."""
    return all(isinstance(each, _PLAIN) for each in ast.walk(node))


def _is_one(value: Any) -> bool:
    return type(value) in (int, float) and value == 1
