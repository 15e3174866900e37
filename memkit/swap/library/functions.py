"""What a module's forward calls as functions: `F.leaky_relu(x, 0.1)`, `F.dropout(x, p, self.training)`, or a `gelu` that its
library writes out.

Of activations stock keeps what they are given, and what follows keeps their result. Inside :class:`memkit.lean` the twin
runs the library's own forward with memkit's under those names: the input alone is kept, and the result is made again. Of
dropout stock keeps a mask, memkit's a seed: in training it stands in inside and outside, recorded or not, since a
checkpoint's two runs have to drop the same. The source has to show that it calls them, and does nothing else with them or
with the modules that it finds them in.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ... import functional as F
from ..._lean import is_lean
from ..._modes import is_tracing
from ...functional._activation import _PARAMETERS
from ..layers import Pending, serves
from ..recipes import FUNCTIONS
from .activations import computes
from .attend import may_drop
from .remembered import Remembered
from .rewritten import rewrites, rewritten
from .scaled import Running, runs
from .sdpa import attending
from .source import CODES, global_names, has_class
from .twin import Instead, Ours, Twin, decorated, undecorated, with_names

DROPOUTS: dict[Any, Callable[..., Tensor]] = {
    nn.functional.dropout: F.dropout,
    nn.functional.alpha_dropout: F.alpha_dropout,
}
"""Those of whole features keep a number for each, in stock too."""
DROPS = {"dropout", "attention"}
"""What is dropout, or has it."""
SDPA: Any = nn.functional.scaled_dot_product_attention
NORMALIZE: Any = nn.functional.normalize
KEEP_RESULT = {"relu", "sigmoid", "tanh"}
"""Of which stock keeps the result, as what follows does."""
WRITTEN_OUT = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "mish": "mish",
    "silu": "silu",
    "swish": "silu",
}
"""Names of libraries' own functions, and which activation each is where values and slopes agree."""

NEEDS = {
    "modulate": {"layer_norm", "rms_norm"},
    "scale": {"act_linear"},
    "norm and act": {"batch_norm_act"},
    "attend": {"attention"},
    "attend elsewhere": {"attention"},
}
"""Which names what is rewritten belongs to."""
BELONGS = {"gelu_tanh": "gelu", "normalize": "rms_norm"}
"""Names in `ops` of what goes by another one here."""
WHY_IDLE = {
    "attend": "not called on the sample, or without a MiB of weights to make again",
    "norm and act": "not called on the sample, or of no norm whose result is made again",
    "scale": (
        "not called on the sample, or not with the result of a linear layer for many rows whose input needs a gradient"
    ),
}

dropped: WeakSet[nn.Module] = WeakSet()
"""Modules of whose dropouts one has been memkit's."""

_checked: Remembered[bool] = Remembered()
"""By the function and the numbers of its module that it reads."""


class Functions(Twin, kind="functions"):
    _acts, _drops = True, True
    _made: ClassVar[dict[tuple[bool, bool], _Made]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._made = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cls = type(self)
        forward: Any = cls._stock_forward
        if is_compiling() or is_tracing():
            return forward(self, *args, **kwargs)
        in_lean = self._acts and is_lean() and torch.is_grad_enabled()
        drops = self._drops and self.training
        if not (in_lean or drops):
            return forward(self, *args, **kwargs)
        with Running(self):
            return _with_ours(cls, in_lean, drops)(self, *args, **kwargs)


class Dropouts(Functions, kind="dropouts"):
    _acts = False


class StockDropouts(Functions, kind="functions, stock dropouts"):
    _drops = False


def functions_kind(module: nn.Module, names: frozenset[str]) -> str:
    """The kind of twin for what it calls, if there is one: activations, all of these names, or what is rewritten for them;
    dropouts."""
    drops = "dropout" in names and bool(DROPS & {*_functions(type(module)).values()})
    if _acts(module, names):
        return Functions.kind if drops else StockDropouts.kind
    return Dropouts.kind if drops else ""


def what_drops(module: nn.Module) -> str:
    """As a row names it."""
    return "dropout" if "dropout" in _functions(type(module)).values() else SDPA.__name__


def _acts(module: nn.Module, names: frozenset[str]) -> bool:
    if any(NEEDS[what] <= names for what in rewrites(module)):
        return True
    called = {BELONGS.get(op, op) for op in {*_functions(type(module)).values()} - DROPS}
    return bool(called & names) and called - {"rms_norm"} <= names


def why_idle(module: nn.Module) -> str:
    """What to say where the twin did nothing on the sample; nothing where that is not known of all that it does."""
    whys = {WHY_IDLE.get(what, "") for what in rewrites(module)}
    return min(whys) if whys and not {*_functions(type(module)).values()} - DROPS else ""


class _Made(NamedTuple):
    function: Any
    """A forward in its other form."""
    parts: tuple[Any, ...]
    """Of the forward and of its decorators then."""
    seen: tuple[tuple[dict[str, Any], str, Any], ...]
    """What decided on it: of modules, what they hold by a name."""


_LASTING = (FunctionType, BuiltinFunctionType, ModuleType, type, int, float, str, NoneType)
"""What may be kept that a module holds: no tensors, which would outlive it."""


def _with_ours(cls: type[Functions], acts: bool, drops: bool) -> Any:
    """The forward with our activations, or dropouts for what :class:`Running` says; that of the last call, where all that
    it depends on is still there. This runs in each call: looking takes a tenth of the time that making it takes."""
    forward: Any = cls._stock_forward
    if type(forward) is not FunctionType:
        return forward
    parts = [
        part
        for each in decorated(forward)
        for part in (each, each.__code__, each.__defaults__, each.__kwdefaults__)
    ]
    made = cls._made.get((acts, drops))
    if made is not None and len(parts) == len(made.parts) and all(map(is_, parts, made.parts)):
        for where, name, held in made.seen:
            if where.get(name) is not held:
                break
        else:
            return made.function
    names = _ours(forward, acts, drops)
    function = rewritten(forward, **names) if acts else with_names(forward, **names) if names else forward
    # Not with a class inside, whose body sees what its module held then.
    if not (names and has_class(undecorated(forward).__code__)):
        seen = tuple(_seen(forward))
        if all(isinstance(held, _LASTING) for _, _, held in seen):
            cls._made[acts, drops] = _Made(function, tuple(parts), seen)
    return function


def _ours(forward: Any, acts: bool, drops: bool) -> dict[str, Any]:
    """What its names stand for instead: activations, and dropouts."""
    known = undecorated(forward).__globals__
    paths = [path for path, op in _called(forward).items() if (drops if op in DROPS else acts)]
    return {path[0]: _instead(path[0], known[path[0]], acts, drops) for path in paths}


def _seen(forward: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """What :func:`_called` looks at."""
    forward = undecorated(forward)
    for use in _uses(forward.__code__):
        where, held = forward.__globals__, None
        for name in use.path:
            held = where.get(name)
            yield where, name, held
            if not _is_module(held):
                break
            where = vars(held)
        if type(held) is FunctionType and name in WRITTEN_OUT:
            reads = global_names(held.__code__) or ()
            yield from ((held.__globals__, each, held.__globals__.get(each)) for each in reads)


def _functions(cls: type[nn.Module]) -> dict[tuple[str, ...], str]:
    return {} if cls.__module__.startswith(("torch.", "memkit.")) else _called(cls.forward)


def _called(forward: Any) -> dict[tuple[str, ...], str]:
    """Which activations, dropouts and attention with dropout it calls, by their paths from its module; none if it does
    anything else with one of them."""
    forward = undecorated(forward)
    if type(forward) is not FunctionType or _asks_for_its_class(forward.__code__):
        return {}
    found = {}
    for use in _uses(forward.__code__):
        held, past = _follow(use.path, forward.__globals__)
        op = _op(use.path[-1 - past], held)
        if op == "attention" and (use.call is None or not _gives_dropout(use.call)):
            continue
        if op is not None and use.call is not None and not past:
            found[use.path] = op
        elif op is not None or _is_module(held) or held is torch.compile:
            return {}
    return found


def _asks_for_its_class(code: CodeType) -> bool:
    """`super(type(self), self)` would find what it stands in again, in a subclass."""
    return "super" in code.co_names and bool({"type", "__class__"} & {*code.co_names})


def _follow(path: tuple[str, ...], known: dict[str, Any]) -> tuple[Any, int]:
    """What a path leads to through PyTorch's modules, and how many of its names come after that."""
    held, at = known.get(path[0]), 1
    while at < len(path) and _is_module(held):
        held, at = getattr(held, path[at], None), at + 1
    return held, len(path) - at


class _Use(NamedTuple):
    path: tuple[str, ...]
    """`("F", "gelu")`."""
    call: ast.Call | None


@lru_cache(maxsize=CODES)
def _uses(code: CodeType) -> tuple[_Use, ...]:
    """What its source says of its module's names; nothing where it cannot be read, or may look at them in other ways."""
    names = global_names(code)
    if names is None:
        return ()
    try:
        source = inspect.getsource(code)
        (function,) = ast.parse(f"if True:\n{source}" if source[0].isspace() else source).body
        (function,) = function.body if isinstance(function, ast.If) else (function,)
    except (OSError, SyntaxError, ValueError):
        return ()
    if not isinstance(function, ast.FunctionDef) or function.name != code.co_name:
        return ()
    uses = tuple(use for line in function.body for use in _used(line) if use.path[0] in names)
    return uses if names == {use.path[0] for use in uses} else ()


def _used(node: ast.AST, call: ast.Call | None = None) -> Iterator[_Use]:
    """`call`: that it is the function of."""
    if (path := _path(node)) is not None:
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            path, call = path[:-1], None  # what is changed
        yield _Use(path, call)
        return
    for child in ast.iter_child_nodes(node):
        yield from _used(child, node if isinstance(node, ast.Call) and child is node.func else None)


def _gives_dropout(call: ast.Call) -> bool:
    """Of attention, by position or by name."""
    return len(call.args) > 4 or any(each.arg in ("dropout_p", None) for each in call.keywords)


def _path(node: ast.AST) -> tuple[str, ...] | None:
    if isinstance(node, ast.Attribute) and (before := _path(node.value)) is not None:
        return (*before, node.attr)
    return (node.id,) if isinstance(node, ast.Name) else None


def _op(name: str, held: Any) -> str | None:
    """Which activation a function is, or a dropout, attention or a norm."""
    if type(held) not in (FunctionType, BuiltinFunctionType):
        return None
    if held in DROPOUTS:
        return "dropout"
    if held is NORMALIZE:
        return "normalize"
    if held is SDPA:
        return "attention"
    if (op := FUNCTIONS.get(held)) is not None:
        return None if op in KEEP_RESULT else op
    op = WRITTEN_OUT.get(name)
    if op is None or type(held) is not FunctionType:
        return None
    known = {**vars(builtins), **held.__globals__}
    reads = {name: known.get(name) for name in global_names(held.__code__) or ()}
    seen = tuple((name, each) for name, each in reads.items() if type(each) in (int, float))
    checked = _checked.of(held)
    if seen not in checked:
        checked[seen] = _is_alone(held, reads.values()) and computes(held, op) and _is_elementwise(held)
    return op if checked[seen] else None


def _is_alone(function: FunctionType, reads: Iterable[Any]) -> bool:
    """Whether what it computes depends on what it is given alone, and on what it reads of its module."""
    fixed = (BuiltinFunctionType, int, float)
    return (
        global_names(function.__code__) is not None
        and not function.__closure__
        and all(type(each) in fixed or _is_module(each) or each is math for each in reads)
    )


def _is_elementwise(function: FunctionType) -> bool:
    """Whether it leaves its argument as it is, and its result lies in memory as that does."""
    x = torch.linspace(-2, 2, 24, device="cpu").view(2, 3, 4).transpose(1, 2)
    before = x.clone()
    try:
        y = function(x)
    except Exception:  # it wants another shape
        return False
    return y is not x and y.stride() == x.stride() and torch.equal(x, before)


def _is_module(held: Any) -> bool:
    return held is torch or held is nn or held is nn.functional


def _instead(name: str, held: Any, acts: bool, drops: bool) -> Any:
    op = _op(name, held)
    if op == "dropout":
        return _dropping(held) if drops else held
    if op == "attention":
        return attending(held, note_dropped) if drops else held
    if op is not None and acts:
        return Ours(_normalize, held) if op == "normalize" else Ours(_call, op, held)
    if op is not None:
        return held
    return _WithOurs(held, _choice=(acts, drops)) if _is_module(held) else held


class _WithOurs(Instead):
    """Asks for what the module holds at that time, which may have been patched."""

    _choice: tuple[bool, bool]

    def __getattr__(self, name: str) -> Any:
        return _instead(name, super().__getattr__(name), *self._choice)


def note_dropped() -> None:
    """That a dropout of the module whose forward runs is memkit's."""
    if (module := runs()) is not None:
        dropped.add(module)


def _dropping(stock: Any) -> Callable[..., Tensor]:
    """Ours, out of place, where there is something to drop."""

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if isinstance(input, Pending) and stock is nn.functional.dropout:
            pending = input.drop(p if training else 0.0)
            if pending is not input:
                note_dropped()
            return pending  # type: ignore[no-any-return]
        if (
            training is True
            and inplace is False
            and may_drop(p)
            and isinstance(input, Tensor)
            and serves(input)
        ):
            note_dropped()
            return DROPOUTS[stock](input, p, True)
        return stock(input, p, training, inplace)  # type: ignore[no-any-return]

    dropout.__defaults__, dropout.__qualname__ = stock.__defaults__, stock.__qualname__
    return dropout


def _call(op: str, stock: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Ours, with its input kept, where stock would be out of place and takes what it is given."""
    names = ("input", *_PARAMETERS.get(op, ()))
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    input, inplace = given.pop("input", None), given.pop("inplace", False)
    ours = (
        isinstance(input, Tensor)
        and input.requires_grad
        and serves(input)
        and len(args) <= len(names)
        and not kwargs.keys() & names[: len(args)]
        and (stock in FUNCTIONS or not kwargs)
        and all(type(each) in (int, float, str) for each in given.values())
        and not inplace
        and _lies_alike(input)
    )
    if ours:
        try:
            return _OURS[op](input, **given, save="input")
        except (TypeError, ValueError):  # by what it is called with: stock says what it thinks of it
            pass
    return stock(*args, **kwargs)


def _normalize(stock: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Ours, with its input kept, where that is by a 2-norm of one dimension and of stock's dtype."""
    names = ("input", "p", "dim", "eps")
    given: dict[str, Any] = {"input": None, "p": 2.0, "dim": 1, "eps": 1e-12}
    given |= {**dict(zip(names, args, strict=False)), **kwargs}
    input, p, dim, eps = (given[name] for name in names)
    ours = (
        isinstance(input, Tensor)
        and serves(input)
        and not torch.is_autocast_enabled(input.device.type)  # stock's result is of another dtype then
        and len(args) <= len(names) == len(given)
        and not kwargs.keys() & names[: len(args)]
        and type(p) in (int, float)
        and (p, type(dim), type(eps)) == (2, int, float)
        and eps >= 0
        and -input.dim() <= dim < input.dim()
        and 0 not in input.stride()
    )
    if not ours:
        return stock(*args, **kwargs)
    # Stock's results lie in memory in the order of what they are of.
    order = sorted(range(input.dim()), key=lambda i: -input.stride(i))
    out = F.normalize(input.permute(order), 2.0, order.index(dim % input.dim()), eps, save="input")
    return out.permute(sorted(range(input.dim()), key=order.__getitem__))


def _lies_alike(x: Tensor) -> bool:
    """Whether results of ours lie in memory as stock's do, by which a dropout behind them goes: not where there are gaps in
    what has its dimensions in another order."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return strides == sorted(strides, reverse=True) or x.numel() == last + 1


_OURS = {op: getattr(F, op) for op in FUNCTIONS.values()} | {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": F.quick_gelu,
}
