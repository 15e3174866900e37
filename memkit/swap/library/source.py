"""The source of functions, where it is what they were compiled of, and code compiled of a changed one."""

from __future__ import annotations

import ast
import copy
import dis
import linecache
import operator
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

COMPARED = (
    *("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags"),
)
CODES = 4096
"""Of so many something is remembered."""
SEES_GLOBALS = {"globals", "eval", "exec"}


@lru_cache(maxsize=CODES)
def global_names(code: CodeType) -> frozenset[str] | None:
    """Of its module and of builtins, that it reads; None where it changes one, or may see them in other ways."""
    names = set()
    for each in dis.get_instructions(code):
        if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return None
        if each.opname == "LOAD_GLOBAL":
            names.add(each.argval)
    for inner in (global_names(each) for each in code.co_consts if isinstance(each, CodeType)):
        if inner is None:
            return None
        names |= inner
    return None if names & SEES_GLOBALS else frozenset(names)


@lru_cache(maxsize=CODES)
def has_class(code: CodeType) -> bool:
    """Whether a class is defined in it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return any(
        ("__module__" in each.co_names and "__qualname__" in each.co_names) or has_class(each)
        for each in inner
    )


def changed(
    code: CodeType, change: Callable[[ast.FunctionDef, str], bool], constant: str, value: Any
) -> CodeType | None:
    """The code of a function as `change` leaves its syntax tree, at the lines of the original, with an object in the place
    of a constant that the tree has got; nothing where `change` returns False, or the source cannot be read or is not the
    function's. `change` is given the name of the function's object too."""
    found = definition(code.co_filename, code)
    if found is None:
        return None
    module, function = found
    own = copy.deepcopy(function)  # the rest of the tree is shared
    owner = owner_name(module, function)
    made = _compiled(_with(own, function, module), code) if change(own, owner) else None
    return made and _with_constant(made, constant, value)


@lru_cache(maxsize=CODES)
def definition(_file: str, code: CodeType) -> tuple[ast.Module, ast.FunctionDef] | None:
    """The syntax tree of a function, and of what is compiled with it, where its file is what it was compiled of."""
    found = _definition("".join(linecache.getlines(code.co_filename)), code)
    if found is None or (original := _compiled(found[0], code)) is None or not _is_same(original, code):
        return None
    return found


def owner_name(module: ast.Module, function: ast.FunctionDef) -> str:
    """What a method calls the object that it is of: its first argument. Of another function "self", which it may be given to
    become one."""
    classes = (each for each in ast.walk(module) if isinstance(each, ast.ClassDef))
    is_static = any(
        isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list
    )
    arguments = [*function.args.posonlyargs, *function.args.args]
    is_method = any(each is function for cls in classes for each in cls.body) and not is_static and arguments
    return arguments[0].arg if is_method else "self"


def _with(new: ast.FunctionDef, old: ast.FunctionDef, module: ast.Module) -> ast.Module:
    """The module with one function for another."""

    def replaced(node: Any) -> Any:
        if node is old:
            return new
        if isinstance(node, list):
            parts = [replaced(each) for each in node]
            return node if all(map(operator.is_, parts, node)) else parts
        if not isinstance(node, ast.stmt | ast.Module | ast.ExceptHandler):
            return node
        held = {name: replaced(value) for name, value in vars(node).items()}
        if all(held[name] is value for name, value in vars(node).items()):
            return node
        made = copy.copy(node)
        vars(made).update(held)
        return made

    return replaced(module)  # type: ignore[no-any-return]


def _with_constant(code: CodeType, constant: str, value: Any) -> CodeType:
    consts = (
        _with_constant(each, constant, value)
        if isinstance(each, CodeType)
        else value
        if type(each) is str and each == constant
        else each
        for each in code.co_consts
    )
    return code.replace(co_consts=tuple(consts))


def _definition(source: str, code: CodeType) -> tuple[ast.Module, ast.FunctionDef] | None:
    """Of its file what is compiled with it: imports, which decide how methods are called, and what it stands in."""
    tree = _parsed(source)
    if tree is None:
        return None
    imports: list[ast.stmt] = [
        each for each in _of_module(tree.body) if isinstance(each, ast.Import | ast.ImportFrom)
    ]
    for top in tree.body:
        for node in ast.walk(top):
            if (
                isinstance(node, ast.FunctionDef)
                and node.name == code.co_name
                and _first(node) == code.co_firstlineno
            ):
                body = imports if any(top is each for each in imports) else [*imports, top]
                return ast.Module(body, []), node
    return None


@lru_cache(maxsize=4)  # of a file that several functions are asked of
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def _of_module(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All that are run by the module itself."""
    for each in statements:
        yield each
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for name in ("body", "orelse", "finalbody"):
                yield from _of_module(getattr(each, name, []))
            for handler in getattr(each, "handlers", []):
                yield from _of_module(handler.body)


def _first(function: ast.FunctionDef) -> int:
    return min((each.lineno for each in function.decorator_list), default=function.lineno)


def _compiled(module: ast.Module, like: CodeType) -> CodeType | None:
    ast.fix_missing_locations(module)
    try:
        made: Any = compile(module, like.co_filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    alike = (
        each
        for each in _inside(made)
        if each.co_name == like.co_name and each.co_firstlineno == like.co_firstlineno
    )
    return next(alike, None)


def _inside(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _inside(each)


def _is_same(one: CodeType, other: CodeType) -> bool:
    """Whether both do the same."""
    return (
        all(getattr(one, name) == getattr(other, name) for name in COMPARED)
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_is_same_constant, one.co_consts, other.co_consts))
    )


def _is_same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _is_same(one, other)
    return type(one) is type(other) and bool(one == other)
