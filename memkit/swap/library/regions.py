"""Attention that a layer writes out in its own code, made again in backward.

    scores = query @ key.transpose(-1, -2) + bias
    weights = self.dropout(scores.softmax(-1))
    return weights @ value

Stock keeps a number for each pair of tokens, of the softmax and of each step beside it. Inside :class:`memkit.lean` the
lines from the product that the softmax is taken of (or from the softmax, in attention that is linear in the number of
tokens) to the product that takes its result are run as a function, by
:func:`attend` where that computes what they do (described.py), else under a checkpoint: what they read is kept. They may
assign to variables, branch, and write to what they made; what they call has to be `repeatable`. Lines that do anything
else stay as they are.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Callable, Iterator
from types import CodeType
from typing import NamedTuple

from .lines import (
    FUSED,
    PRODUCTS,
    SCOPES,
    SOFTMAXES,
    Lines,
    bound_by,
    captured,
    is_fused,
    is_own_call,
    is_product,
    is_read,
    is_softmax,
    nodes,
    read,
    stored,
    stored_by_head,
    used,
    variables_of,
)

NAME = "_memkit_region"
"""How the names of such functions start."""
PRODUCT = "_memkit_product"
"""The variable for what such a function ends with."""
CONDITIONAL = (ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda, *SCOPES)
Call = Callable[[str, list[ast.expr], ast.AST], ast.expr]


def may_attend(code: CodeType) -> bool:
    """Whether it has a softmax and a product: cheaper than its source."""
    names = set(code.co_names)
    return FUSED in names or (
        bool(names & {*SOFTMAXES, "Softmax"})
        and (
            bool(names & PRODUCTS)
            or any(
                each.argrepr in ("@", "@=") or each.opname.endswith("MATRIX_MULTIPLY")
                for each in dis.get_instructions(code)
            )
        )
    )


def regions_of(code: CodeType) -> list[CodeType]:
    """Of the functions that `with_regions` has made in it."""
    return [each for each in code.co_consts if isinstance(each, CodeType) and each.co_name.startswith(NAME)]


def with_regions(function: ast.FunctionDef, owner: str, called: Call) -> bool:
    """Makes functions of such lines, and calls of them by `called("again", ...)`; False where there are none. `owner`: what
    the function calls its layer."""
    arguments = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
    count = 0
    for is_end in (is_fused, is_softmax):
        for block in reversed([*_blocks(function.body, arguments)]):
            if any(map(_is_region, nodes(block.lines))):
                continue  # it was in a block of this one
            lines = (i for i, line in enumerate(block.lines) if any(map(is_end, ast.walk(line))))
            regions = (_region(block, i, function, owner) for i in lines)
            if (region := next(filter(None, regions), None)) is not None:
                _make(region, block.lines, f"{NAME}{count}", _first_argument(function), called)
                count += 1
    return count > 0


def _first_argument(function: ast.FunctionDef) -> ast.expr:
    """The layer, of a method."""
    names = [each.arg for each in [*function.args.posonlyargs, *function.args.args][:1]]
    deleted = {
        each.id for each in nodes([function]) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Del)
    }
    return ast.Name(names[0], ast.Load()) if names and names[0] not in deleted else ast.Constant(None)


class _Block(NamedTuple):
    lines: list[ast.stmt]
    bound: set[str]
    """Variables that have a value before it."""
    is_repeated: bool


class _Region(NamedTuple):
    first: int
    last: int
    """Its lines are those before this one."""
    body: list[ast.stmt]
    product: ast.expr | None
    """Of the line behind it, that its body ends with."""
    reads: list[str]
    outs: list[str]


def _blocks(lines: list[ast.stmt], bound: set[str], is_repeated: bool = False) -> Iterator[_Block]:
    """All of a function's, the outer ones first."""
    yield _Block(lines, bound, is_repeated)
    for line in lines:
        if isinstance(line, ast.If | ast.With | ast.For):
            inner = bound | (set() if isinstance(line, ast.If) else stored_by_head(line))
            repeated = is_repeated or isinstance(line, ast.For)
            yield from _blocks(line.body, inner, repeated)
            if isinstance(line, ast.If):
                yield from _blocks(line.orelse, inner, repeated)
        bound = bound | bound_by([line])


def _region(block: _Block, at: int, function: ast.FunctionDef, owner: str) -> _Region | None:
    """Around the softmax or the kernel in that line."""
    lines = block.lines
    if fused := [each for each in ast.walk(lines[at]) if is_fused(each)]:
        first = _first_of_mask(lines, at, fused[0], owner)
        end: tuple[int, ast.expr | None] | None = at, _taken_out(lines[at], fused[0])
    else:
        first, end = _first(lines, at, owner), _end(lines, at)
    if first is None or end is None:
        return None
    last, product = end
    if product is None:
        last += 1
    body = lines[first:last]
    if product is not None:
        assigned = ast.Assign([ast.Name(PRODUCT, ast.Store())], product)
        body = [*body, ast.copy_location(assigned, lines[last])]
    variables = variables_of(function)
    given = block.bound | bound_by(lines[:first])
    check = Lines(variables, set(), owner)
    if not check.takes(body):
        return None
    inside = {id(node) for node in nodes(body)}
    outside = (node for node in ast.walk(function) if id(node) not in inside)
    start = lines[first].lineno
    reads = (node for node in outside if isinstance(node, ast.Name) and is_read(node))
    read_after = {node.id for node in reads if block.is_repeated or node.lineno >= start}
    outs = sorted(check.stored & read_after) + [PRODUCT] * (product is not None)
    known = set(check.reads) <= given and set(outs) <= check.bound | set(check.reads)
    if not outs or not known or check.stored & captured(function):
        return None
    return _Region(first, last, body, product, check.reads, outs)


def _first(lines: list[ast.stmt], at: int, owner: str) -> int:
    """The line of the first product that leads to a softmax without another one in between; the softmax's without one."""
    softmax = next(filter(is_softmax, ast.walk(lines[at])))
    first = at if any(map(is_product, ast.walk(softmax))) else None
    needed = used(lines[at])
    for i in reversed(range(at)):
        line = lines[i]
        found = stored([line]) & needed
        if not found:
            continue
        needed -= bound_by([line])
        if any(map(is_product, ast.walk(line))):
            first = i
        elif _calls_own(line, owner):  # of what a layer is given, what comes back
            needed |= used(line) & found
        else:
            needed |= used(line)
    return at if first is None else first


def _end(lines: list[ast.stmt], at: int) -> tuple[int, ast.expr | None] | None:
    """The line of the product that takes a softmax's result, and that product where it can be taken out."""
    softmax = next(filter(is_softmax, ast.walk(lines[at])))
    made: set[str] = set()
    for i, line in enumerate(lines[at:], at):
        products = [each for each in ast.walk(line) if is_product(each) and _takes(each, made, softmax)]
        inner = [
            each for each in products if not any(one is not each and _holds(each, one) for one in products)
        ]
        if inner:
            return i, _taken_out(line, inner[0])
        if i == at or read([line]) & made:
            made |= stored([line])
    return None


def _first_of_mask(lines: list[ast.stmt], at: int, kernel: ast.AST, owner: str) -> int | None:
    """The line with which a fused kernel's mask begins, where its function computes it: PyTorch's for the CPU have no
    gradient of one, and keep the weights where it is wanted."""
    needed, first = _mask_of(kernel), None
    for i in reversed(range(at)):
        found = stored([lines[i]]) & needed
        if found:
            first = i
            needed -= bound_by([lines[i]])
            calls = _calls_own(lines[i], owner) or any(map(_is_plain_call, ast.walk(lines[i])))
            needed |= used(lines[i]) & found if calls else used(lines[i])
    return first


def _mask_of(kernel: ast.AST) -> set[str]:
    assert isinstance(kernel, ast.Call)
    given = [*kernel.args[3:4], *(each.value for each in kernel.keywords if each.arg == "attn_mask")]
    return read(given)


def _calls_own(line: ast.stmt, owner: str) -> bool:
    return any(is_own_call(each, owner) for each in ast.walk(line))


def _is_plain_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def _taken_out(line: ast.stmt, product: ast.AST) -> ast.expr | None:
    """Where it may stand before its line: it is computed in any case, once, and no call before it."""
    if not isinstance(line, ast.Assign | ast.Return) or not isinstance(product, ast.expr):
        return None
    around = [each for each in ast.walk(line) if _holds(each, product)]
    place = product.lineno, product.col_offset
    before = [
        each
        for each in ast.walk(line)
        if isinstance(each, ast.Call) and each not in around and (each.lineno, each.col_offset) < place
    ]
    return None if before or any(isinstance(each, CONDITIONAL) for each in around) else product


def _takes(product: ast.AST, made: set[str], softmax: ast.AST) -> bool:
    return bool(read([product]) & made) or (product is not softmax and _holds(product, softmax))


def _holds(outer: ast.AST, inner: ast.AST) -> bool:
    return any(each is inner for each in ast.walk(outer))


def _make(region: _Region, lines: list[ast.stmt], name: str, owner: ast.expr, called: Call) -> None:
    place = lines[region.first]
    source = f"def {name}({', '.join(region.reads)}): return ({', '.join(region.outs)},)"
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    for node in ast.walk(definition):
        ast.copy_location(node, place)
    definition.body[:0] = region.body
    variables = [ast.Name(each, ast.Load()) for each in (name, *region.reads)]
    call = called("again", [variables[0], owner, *variables[1:]], place)
    outs: list[ast.expr] = [ast.Name(each, ast.Store()) for each in region.outs]
    assignment = ast.Assign([ast.Tuple(outs, ast.Store())], call)
    for node in ast.walk(assignment):
        ast.copy_location(node, place)
    if region.product is not None:
        _Product(region.product).visit(lines[region.last])
    lines[region.first : region.last] = [definition, assignment]


class _Product(ast.NodeTransformer):
    """The variable in its place."""

    def __init__(self, product: ast.expr) -> None:
        self._product = product

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self._product:
            return ast.copy_location(ast.Name(PRODUCT, ast.Load()), node)
        return self.generic_visit(node)


def _is_region(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith(NAME)
