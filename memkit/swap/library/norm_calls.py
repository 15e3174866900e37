"""A batch norm and the activation behind it in a layer's own code: `F.relu(self.bn1(x))`, or in two lines

    out = self.bn1(out)
    out = F.relu(out)

Stock keeps the norm's input and the activation's result, which the convolution behind it keeps as well. Inside
:class:`memkit.lean` the same code runs with one operator in the place of the two, whose result is made again: the norm's
input is kept alone. Behind another norm whose result can be made again, so can be that of an activation that keeps its
input. Where neither is for what it is given, both are called as they are written.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from ... import _C
from ... import functional as F
from ..._lean import is_lean
from ...functional._activation import _PARAMETERS
from ...functional._norm import output_dtype
from ...nn.norm import batch_norm_of
from ..layers import InstanceNorm, Norm, has_statistics, serves
from ..recipes import FUNCTIONS
from .activations import activation_of
from .lines import FUNCTION_NAMES, OwnLines, captured, read, root
from .mlps import is_batch_norm
from .scaled import note_served
from .twin import Ours, is_plain

NORMS = ("bn", "norm", "gn", "ln")
"""Parts of the names of norms."""
ACTS = ("act", "relu", "elu", "silu", "swish", "mish", "nonlin", "sigmoid", "tanh")
"""And of activations that are layers."""


def norm_act(act: Any, norm: Any, input: Any, *args: Any, **named: Any) -> Any:
    """act(norm(input), ...)."""
    if not (isinstance(norm, nn.Module) and is_lean() and torch.is_grad_enabled()):
        return act(norm(input), *args, **named)
    how = _how(act, args, named) if _is_known(norm) else None
    if how is not None and is_batch_norm(norm) and _serves(norm, input):
        try:
            out = batch_norm_of(norm, input, *how)
        except (RuntimeError, TypeError, ValueError) as error:
            if not str(error).startswith("batch_norm_act: expected"):  # how memkit refuses, before it writes
                raise
        else:
            note_served()
            return out
    if how is None or isinstance(act, nn.Module):
        return act(norm(input), *args, **named)
    normed = norm(input)
    if not serves(normed) or _C.recipe(normed) is None:
        return act(normed, *args, **named)
    note_served()
    op, params = how
    return getattr(F, op)(normed, **params, save="input")


def _how(act: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[str, dict[str, float]] | None:
    """Name and parameters, where it is one of memkit's and what it is given are numbers."""
    if isinstance(act, nn.Module):
        return None if args or named else activation_of(act)
    act = act.stock if isinstance(act, Ours) else act
    op = FUNCTIONS.get(act) if callable(act) and isinstance(act, Hashable) else None
    names = _PARAMETERS.get(op or "", ())
    given = {**dict(zip((*names, "inplace"), args, strict=False)), **named}
    inplace = given.pop("inplace", False)
    plain = (
        op is not None
        and len(args) <= len(names) + 1
        and not named.keys() & {*(*names, "inplace")[: len(args)]}
        and type(inplace) is bool
        and all(type(each) in (int, float) for each in given.values())
    )
    return (op, given) if op is not None and plain else None


def _is_known(norm: nn.Module) -> bool:
    """Whether its result is a new tensor, that nobody else sees."""
    known = is_batch_norm(norm) or isinstance(norm, Norm | InstanceNorm)
    return known and "forward" not in vars(norm) and is_plain(norm)


def _serves(norm: nn.Module, input: Any) -> bool:
    return (
        isinstance(input, Tensor)
        and serves(input)
        and output_dtype(input) == input.dtype
        and has_statistics(norm, input)
    )


def may_norm(code: CodeType) -> bool:
    """Whether it has such names: cheaper than its source."""
    names = (*code.co_names, *code.co_varnames)
    acts = any(name in FUNCTION_NAMES or _has(name, ACTS) for name in names)
    return acts and any(_has(name, NORMS) for name in names) and "locals" not in code.co_names


def join_lines(function: ast.FunctionDef) -> None:
    """`x = self.norm(x)` and an activation of it that takes its variable's place, as one line."""
    seen = captured(function)
    for lines in _blocks(function):
        for i in reversed(range(len(lines) - 1)):
            if (joined := _joined(lines[i], lines[i + 1], seen)) is not None:
                lines[i : i + 2] = [joined]


def _joined(line: ast.stmt, behind: ast.stmt, seen: set[str]) -> ast.stmt | None:
    name = _only_target(line)
    if name is None or name in seen or not isinstance(line, ast.Assign) or not _is_norm(line.value):
        return None
    if not isinstance(behind, ast.Return) and _only_target(behind) != name:
        return None
    call = behind.value  # type: ignore[attr-defined]
    if not (_is_act(call) and isinstance(call.args[0], ast.Name) and call.args[0].id == name):
        return None
    others = [call.func, *call.args[1:], *(each.value for each in call.keywords)]
    if name in read(others):
        return None
    call.args[0] = line.value
    return behind


def _only_target(line: ast.stmt) -> str | None:
    target = line.targets[0] if isinstance(line, ast.Assign) and len(line.targets) == 1 else None
    return target.id if isinstance(target, ast.Name) else None


def _blocks(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    """Of lines that are left by their end, or the function with them: what follows does not see them half done."""
    ahead: list[Any] = [function]
    while ahead:
        node = ahead.pop()
        for name in ("body", "orelse"):
            if lines := getattr(node, name, []):
                yield lines
                ahead += filter(_is_left_by_its_end, lines)


def _is_left_by_its_end(line: ast.stmt) -> bool:
    """`with torch.autocast(...)` lets no error pass."""
    return isinstance(line, ast.If | ast.For | ast.While) or (
        isinstance(line, ast.With)
        and all(
            isinstance(each.context_expr, ast.Call) and root(each.context_expr.func) == "torch"
            for each in line.items
        )
    )


class Norming(OwnLines, ast.NodeTransformer):
    """`F.relu(self.bn1(x))`, `self.act(norm(x))` as calls."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not _is_act(node) or not _is_norm(node.args[0]):
            return node
        self.found = True
        norm: Any = node.args[0]
        call: Any = self._called("norm_act", [node.func, norm.func, norm.args[0], *node.args[1:]], node)
        call.keywords = node.keywords
        return call  # type: ignore[no-any-return]


def _is_act(node: Any) -> bool:
    """A call of what may be an activation; what it is given besides is computed by nothing."""
    if not isinstance(node, ast.Call) or not node.args:
        return False
    further = [*node.args[1:], *(each.value for each in node.keywords)]
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return (
        (name in FUNCTION_NAMES or _has(name, ACTS))
        and _is_read(node.func)
        and all(map(_is_read, further))
        and all(each.arg is not None for each in node.keywords)
    )


def _is_norm(node: ast.expr) -> bool:
    """A call with one argument of what may be a norm: `self.bn1`, `self.norms[i]`, `norm`."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return False
    held = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    name = held.attr if isinstance(held, ast.Attribute) else getattr(held, "id", "")
    return (
        _has(name, NORMS) and _is_read(node.func, of_norms=True) and not isinstance(node.args[0], ast.Starred)
    )


def _is_read(node: ast.expr, of_norms: bool = False) -> bool:
    """A constant, a variable, or something of one; of no norm, which may set it when it is called."""
    if isinstance(node, ast.Subscript):
        return _is_read(node.value, of_norms) and _is_read(node.slice, of_norms)
    if isinstance(node, ast.Attribute):
        return (of_norms or not _has(node.attr, NORMS)) and _is_read(node.value, of_norms)
    if isinstance(node, ast.Name):
        return of_norms or not _has(node.id, NORMS)
    return isinstance(node, ast.Constant)


def _has(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name.lower() for part in parts)
