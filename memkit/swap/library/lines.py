"""What lines of code read, set and write to, by their syntax tree: whether they may be run again."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from ..recipes import FUNCTIONS

PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}
SOFTMAXES = {"softmax", "attend"}
"""The other is what layers call a torch.nn.Softmax that they hold."""
FUSED = "scaled_dot_product_attention"
NEW = {
    *PRODUCTS,
    *("softmax", "clone", "where", "arange", "zeros", "ones", "full", "empty", "zeros_like", "ones_like"),
    *("full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "masked_fill"),
}
"""Functions and methods whose result nothing else holds."""
GRAD = "requires_grad"
"""What they may set of a tensor."""
REFUSED = ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom
SCOPES = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
TORCH = {"torch", "nn", "F"}
FUNCTION_NAMES = {each.__name__ for each in FUNCTIONS}
"""Of activations."""
METHODS = {name for name in dir(Tensor) if name[0] != "_"} - {"backward", "register_hook", "retain_grad"}
LOOKS = {"dtype", "device", "shape", "size", "dim", "ndim"}
"""What is read of a tensor without its numbers."""


class OwnLines(ast.NodeTransformer):
    """Puts calls of memkit's into a function's lines, but not into those of functions within."""

    def __init__(self, called: Callable[[str, list[ast.expr], ast.AST], ast.expr]) -> None:
        self.found = False
        self._called = called

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node


class Lines:
    """Whether lines may be run again, and which variables they read that they have not set."""

    def __init__(self, variables: set[str], numbers: set[str], owner: str, is_function: bool = False) -> None:
        """`owner`: the name of the object that they are part of a method of."""
        self._variables, self._owner, self._is_function = variables, owner, is_function
        self.reads: list[str] = []
        self.stored: set[str] = set()
        self.bound = set(numbers)
        """That have a value behind them."""
        self._own = set(numbers)
        """Whose tensors these lines have made: they may be written to."""

    def takes(self, lines: Iterable[ast.stmt]) -> bool:
        return all(map(self._takes, lines))

    def _takes(self, line: ast.stmt) -> bool:
        if isinstance(line, ast.Assign):
            return self._value(line.value) and all(self._store(each, line.value) for each in line.targets)
        if isinstance(line, ast.AnnAssign):
            return line.value is not None and self._value(line.value) and self._store(line.target, line.value)
        if isinstance(line, ast.AugAssign):
            held = line.target.value if isinstance(line.target, ast.Subscript) else line.target
            return self._value(line.value, line.target) and self._is_own(held)
        if isinstance(line, ast.If):
            return self._value(line.test) and self._branches(line.body, line.orelse)
        if isinstance(line, ast.For):
            taken = self._value(line.iter) and not line.orelse
            bound = set(self.bound)
            taken = (
                taken and self._store(line.target, None) and self.takes(line.body) and self.takes(line.body)
            )
            self.bound = bound
            return taken
        if isinstance(line, ast.With):
            entered = all(self._value(each.context_expr) and not each.optional_vars for each in line.items)
            return entered and self.takes(line.body)
        returns = isinstance(line, ast.Return) and self._is_function
        if isinstance(line, ast.Expr):  # a result that nobody takes
            name = _name_of(line.value) if isinstance(line.value, ast.Call) else ""
            return isinstance(line.value, ast.Constant) or (is_in_place(name) and self._value(line))
        if returns or isinstance(line, ast.Raise | ast.Assert):
            return self._value(line)
        return isinstance(line, ast.Pass)

    def _branches(self, *branches: list[ast.stmt]) -> bool:
        bound, own = self.bound, self._own
        after: list[tuple[set[str], set[str]]] = []
        for branch in branches:
            self.bound, self._own = set(bound), set(own)
            if not self.takes(branch):
                return False
            if not _leaves(branch):
                after.append((self.bound, self._own))
        self.bound = set.intersection(*(each for each, _ in after)) if after else bound
        self._own = set.intersection(*(each for _, each in after)) if after else own
        return True

    def _value(self, *read: ast.AST) -> bool:
        for node in nodes(read):
            if isinstance(node, REFUSED) or (isinstance(node, SCOPES) and not self._is_function):
                return False
            if isinstance(node, ast.Name) and node.id in self._variables - self.bound - {*self.reads}:
                self.reads.append(node.id)
            if isinstance(node, ast.Call) and not self._leaves_alone(node):
                return False
        return True

    def _leaves_alone(self, call: ast.Call) -> bool:
        """Whether it writes to nothing but what these lines have made."""
        name, receiver = _name_of(call), getattr(call.func, "value", None)
        named = {each.arg: each.value for each in call.keywords}
        inplace = named.get("inplace")
        if {"out", "max_norm"} & named.keys() or (
            inplace is not None and getattr(inplace, "value", True) is not False
        ):
            return False
        if is_in_place(name):
            return receiver is not None and self._is_own(receiver)
        if name in FUNCTION_NAMES and any(getattr(each, "value", None) is True for each in call.args):
            return False  # in place, by position
        if isinstance(call.func, ast.Name):  # of a variable: a layer that is given, which will be looked at
            given = not self._is_function and name not in self.stored
            return given or name not in self._variables
        if isinstance(call.func, ast.Call):  # nn.Softmax(dim=-1)(x)
            return root(getattr(call.func.func, "value", call.func)) in TORCH - self._variables
        of = root(receiver)
        if of == self._owner:
            return isinstance(receiver, ast.Name) or name in METHODS
        return name in METHODS or bool(of and of not in self._variables)

    def _store(self, target: ast.expr, value: ast.expr | None) -> bool:
        if isinstance(target, ast.Tuple | ast.List):
            return all(self._store(each, None) for each in target.elts)
        if isinstance(target, ast.Subscript):
            return self._value(target.value, target.slice) and self._is_own(target.value)
        if isinstance(target, ast.Attribute):
            return target.attr == GRAD and self._value(target.value) and self._is_own(target.value)
        if not isinstance(target, ast.Name):
            return False
        is_own = value is not None and self._is_own(value)
        (self._own.add if is_own else self._own.discard)(target.id)
        self.stored.add(target.id)
        self.bound.add(target.id)
        return True

    def _is_own(self, value: ast.AST) -> bool:
        """A number, or a tensor, maybe a view, that these lines have made."""
        if isinstance(value, ast.Name):
            return value.id in self._own and value.id in self.bound
        if isinstance(value, ast.IfExp):
            return self._is_own(value.body) and self._is_own(value.orelse)
        if isinstance(value, ast.Subscript | ast.Attribute):
            return self._is_own(value.value)
        if isinstance(value, ast.Call):
            if is_softmax(value) or (_name_of(value) in NEW and not _is_view(value)):
                return True
            receiver = getattr(value.func, "value", None)
            if receiver is not None and self._is_own(receiver):
                return True
            of_torch = root(receiver) in TORCH and not _is_view(value)
            return (of_torch or "drop" in _name_of(value)) and any(map(self._is_own, value.args[:1]))
        if isinstance(value, ast.BinOp):  # not of lists
            return not any(isinstance(each, ast.List | ast.Tuple) for each in (value.left, value.right))
        new = isinstance(value, ast.UnaryOp) and not isinstance(value.op, ast.UAdd)
        return new or isinstance(value, ast.Compare | ast.Constant)


def repeats(function: ast.FunctionDef, owner: str) -> bool:
    """Whether it may be run again, as far as its lines say."""
    lines = Lines(variables_of(function), _numbers(function.args), owner, is_function=True)
    return lines.takes(function.body)


def _numbers(arguments: ast.arguments) -> set[str]:
    """Arguments that are numbers if nothing else is given for them."""
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    pairs = [*zip(with_default, arguments.defaults, strict=True)]
    return {arg.arg for arg, default in pairs if isinstance(getattr(default, "value", None), int | float)}


def nodes(roots: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for root in roots:
        yield from ast.walk(root)


def is_product(node: ast.AST) -> bool:
    matmul = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
    return matmul or (isinstance(node, ast.Call) and _name_of(node) in PRODUCTS)


def is_softmax(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Call):  # nn.Softmax(dim=-1)(x)
        return _name_of(node.func) == "Softmax"
    return _name_of(node) in SOFTMAXES


def is_fused(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name_of(node) == FUSED


def is_own_call(node: ast.AST, owner: str) -> bool:
    """`self.layer(x)`"""
    function = node.func if isinstance(node, ast.Call) else None
    held = function.value if isinstance(function, ast.Attribute) else None
    return isinstance(held, ast.Name) and held.id == owner


def _is_view(call: ast.Call) -> bool:
    """An einsum of one tensor."""
    return _name_of(call) == "einsum" and len(call.args) < 3


def root(value: ast.AST | None) -> str:
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _name_of(call: ast.Call) -> str:
    function = call.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)


def read(roots: Iterable[ast.AST]) -> set[str]:
    names = {
        node.id for node in nodes(roots) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    changed = (node.target for node in nodes(roots) if isinstance(node, ast.AugAssign))
    return names | {each.id for each in changed if isinstance(each, ast.Name)}


def used(line: ast.stmt) -> set[str]:
    """Variables of which more is read than their shapes and the like."""
    looked_at = {
        id(node.value) for node in ast.walk(line) if isinstance(node, ast.Attribute) and node.attr in LOOKS
    }
    loaded = {node.id for node in ast.walk(line) if isinstance(node, ast.Name) and id(node) not in looked_at}
    return loaded & read([line])


def stored(roots: Iterable[ast.AST]) -> set[str]:
    """Variables, but those of comprehensions."""
    found = [*nodes(roots)]
    heads = (node.target for node in found if isinstance(node, ast.comprehension))
    within = {id(node) for node in nodes(heads)}
    names = (node for node in found if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return {node.id for node in names if id(node) not in within}


def captured(function: ast.FunctionDef) -> set[str]:
    """Variables that functions, classes and comprehensions within it may see."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, *SCOPES)
    inner = [node for node in ast.walk(function) if isinstance(node, kinds) and node is not function]
    return {node.id for node in nodes(inner) if isinstance(node, ast.Name)}


def variables_of(function: ast.FunctionDef) -> set[str]:
    """All that are set in it, and its arguments."""
    arguments = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    inner = {each.name for each in ast.walk(function) if isinstance(each, kinds) and each is not function}
    imported = (each for each in ast.walk(function) if isinstance(each, ast.alias))
    return arguments | stored([function]) | inner | {each.asname or each.name for each in imported}


def stored_by_head(line: ast.With | ast.For) -> set[str]:
    """By its head."""
    heads: list[ast.AST] = [line.target] if isinstance(line, ast.For) else list(line.items)
    return stored(heads)


def bound_by(lines: Iterable[ast.stmt]) -> set[str]:
    """Variables that have a value behind them, whichever way they take."""
    bound: set[str] = set()
    for line in lines:
        if isinstance(line, ast.Assign | ast.AnnAssign | ast.AugAssign):
            bound |= stored([line])
        elif isinstance(line, ast.With):
            bound |= stored_by_head(line) | bound_by(line.body)
        elif isinstance(line, ast.If):
            ways = [branch for branch in (line.body, line.orelse) if not _leaves(branch)]
            bound |= set.intersection(*map(bound_by, ways)) if ways else set()
    return bound


def _leaves(branch: list[ast.stmt]) -> bool:
    return bool(branch) and isinstance(branch[-1], ast.Return | ast.Raise | ast.Break | ast.Continue)
