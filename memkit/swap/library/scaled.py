"""What a linear layer makes, times numbers for its features: `self.gamma * self.mlp(x)`, `gate.unsqueeze(1) * out`.

Touvron et al., "Going deeper with image transformers", 2021 (layer scale); Peebles & Xie, "Scalable diffusion models with
transformers", 2022 (gates for each sample). Stock keeps the layer's result for the gradient of these numbers, which follows
from what the layer keeps as well. Inside :class:`memkit.lean` the same code runs with one operator in the place of the
product; where that is not for what it is given, the product is stock's.
"""

from __future__ import annotations

import ast
import dis
import threading
from types import CodeType
from typing import Any

from torch import Tensor, nn

from ... import _C
from ..._lean import may_ask_again
from .lines import OwnLines
from .rotary import served

NAMES = ("gamma", "lambda", "layer_scale", "gate")
"""Parts of the names of such numbers."""


_running = threading.local()


class Running:
    """Whose code runs inside."""

    __slots__ = ("_module", "_outer")

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._outer, _running.module = runs(), self._module

    def __exit__(self, *error: object) -> None:
        _running.module = self._outer


def runs() -> nn.Module | None:
    return getattr(_running, "module", None)


def note_served(module: nn.Module | None = None) -> None:
    """Something of its code, or of that which runs, has been memkit's."""
    for each in (module, runs()):
        if each is not None:
            served.add(each)


def linear_scale(first: Any, second: Any) -> Any:
    """first * second."""
    out = _in_lean(first, second)
    return first * second if out is None else out


def linear_scale_by_mul(first: Any, second: Any) -> Any:
    """first.mul(second)."""
    out = _in_lean(first, second)
    return first.mul(second) if out is None else out


def _in_lean(first: Any, second: Any) -> Tensor | None:
    if not (isinstance(first, Tensor) and isinstance(second, Tensor) and may_ask_again()):
        return None
    out = _C.linear_scale(first, second)
    if out is not None:
        note_served()
    return out


def may_scale(code: CodeType) -> bool:
    """Whether it has such a name, and multiplies: cheaper than its source."""
    if not any(map(_is_name, (*code.co_names, *code.co_varnames))):
        return False
    return "mul" in code.co_names or any(
        each.opname == "BINARY_MULTIPLY" or (each.opname == "BINARY_OP" and each.argrepr == "*")
        for each in dis.get_instructions(code)
    )


class Scaling(OwnLines, ast.NodeTransformer):
    """`self.gamma * x`, `x * gate[:, None]`, `x.mul(self.gamma.reshape(1, -1, 1, 1))` as calls."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return (
            self._product("linear_scale", node, node.left, node.right)
            if isinstance(node.op, ast.Mult)
            else node
        )

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        function = node.func
        if not isinstance(function, ast.Attribute) or function.attr != "mul" or node.keywords:
            return node
        if len(node.args) != 1 or isinstance(node.args[0], ast.Starred):
            return node
        return self._product("linear_scale_by_mul", node, function.value, node.args[0])

    def _product(self, name: str, node: ast.expr, first: ast.expr, second: ast.expr) -> ast.expr:
        if not (_is_scale(first) or _is_scale(second)):
            return node
        self.found = True
        return self._called(name, [first, second], node)


def _is_name(name: str) -> bool:
    return any(part in name for part in NAMES)


def _is_scale(node: ast.expr) -> bool:
    """A variable or an attribute of such a name, or a view of one."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        elif isinstance(node, ast.Attribute):
            return _is_name(node.attr)
        else:
            return isinstance(node, ast.Name) and _is_name(node.id)
