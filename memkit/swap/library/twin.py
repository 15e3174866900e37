"""Twins of classes that are not torch.nn's: each a subclass of the library's own class, made when it is first needed.

What memkit adds is a mixin before that class, known by a name. So `isinstance` holds, parameters and `state_dict` stay as
they are, and a pickle or a copy says: this mixin before that class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial, update_wrapper, wraps
from threading import RLock, get_ident
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..._hooks import has_global_hooks, has_hooks, only_read
from ..._lean import lean
from ..._sharding import is_dtensor
from ..layers import is_linear, serves
from ..types import Changed, Swapped, class_of, innermost_of, own_name
from .source import has_class

MIXINS: dict[str, type[Twin]] = {}
"""By the names that pickles hold."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""How far, relatively, a twin's values and gradients may be from those of what it stands for."""


_making = RLock()


class _Twins(dict[str, Any]):
    """Of a class, by the mixin's name. The class holds them: they live as long as it does, and keep nobody else alive."""

    def __reduce__(self) -> Any:
        return dict, ()  # where a class is pickled by value, for who may not have memkit


class Twin(Changed):
    kind: ClassVar[str]
    """The mixin's name."""

    def __init_subclass__(cls, kind: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if kind:
            cls.kind = kind
            MIXINS[kind] = cls

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        _, _, *state = reduced
        kinds: list[str] = []
        cls: type[Any] = type(self)
        while issubclass(cls, Twin):
            kinds.append(cls.kind)
            cls = cls._stock
        return (_make, (tuple(reversed(kinds)), own_name(cls)), *state)


def twin_of(kind: str, stock: type[nn.Module]) -> type[Any]:
    """The mixin of this name before that class, under the class's own name."""
    with _making:  # or two threads make two classes of one name
        twins = vars(stock).get("_memkit_twins")
        if type(twins) is not _Twins:
            twins = _Twins()
            type.__setattr__(stock, "_memkit_twins", twins)
        known: type[Any] | None = twins.get(kind)
        forward = innermost_of(stock).forward
        # A function may have been patched since; what a descriptor gives is another object each time.
        is_patched = (
            known is not None and type(forward) is FunctionType and known._stock_forward is not forward
        )
        if known is None or known._stock is not stock or is_patched:
            known = twins[kind] = _new(kind, stock)
        return known


def fits(module: nn.Module, twin: type[Any]) -> bool:
    """Whether it can become one: not where its class has a base without a dictionary, such as abc.ABC, before its others."""
    stock = type(module)
    try:
        module.__class__ = twin
    except TypeError:
        return False
    module.__class__ = stock
    return True


def why_not_fits(module: nn.Module, twin: type[Any]) -> str:
    """Nothing if it does."""
    cls = type(module)
    first = cls.__bases__[0].__name__
    why = f"objects of {cls.__name__} are laid out as its first base's, {first}: put that last"
    return "" if fits(module, twin) else why


def _new(kind: str, stock: type[nn.Module]) -> type[Any]:
    names: dict[str, Any] = {
        "_stock": stock,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    mixin: Any = MIXINS[kind]
    if issubclass(mixin, Swapped):
        names["forward"] = _by_its_name(mixin.forward, stock.forward)
    elif _takes_one(mixin.forward):
        names["forward"] = _as_called(mixin.forward, stock.forward)
    elif mixin.forward is not nn.Module.forward:
        names["forward"] = _with_its_signature(mixin.forward, stock.forward)
    made: type[Any] = type(mixin)(stock.__name__, (mixin, stock), names)
    return made


def _takes_one(forward: Any) -> bool:
    code = getattr(forward, "__code__", None)
    return code is not None and code.co_argcount == 2 and not code.co_flags & inspect.CO_VARARGS


def _by_its_name(ours: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Ours, its argument named as in stock's. Not called by another, as it counts references and asks who calls it."""
    code = ours.__code__
    own, _, *others = code.co_varnames
    _, name, *_ = inspect.signature(stock).parameters
    renamed = code.replace(co_varnames=(own, name, *others))
    return FunctionType(renamed, ours.__globals__, ours.__name__, ours.__defaults__, ours.__closure__)


def _with_its_signature(ours: Any, stock: Callable[..., Any]) -> Any:
    """Ours, which takes what stock takes, for those who ask how it is called: tracers, exporters, trainers."""
    made = FunctionType(ours.__code__, ours.__globals__, ours.__name__, ours.__defaults__, ours.__closure__)
    made.__kwdefaults__ = ours.__kwdefaults__
    return update_wrapper(made, stock)


def _as_called(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """Ours where there is one argument, also by the name that it has in stock's, to which all other calls go."""
    _, *names = inspect.signature(stock).parameters

    @wraps(stock)
    def forward(self: nn.Module, given: Any = None, /, *others: Any, **named: Any) -> Any:
        if not (others or named):
            return ours(self, given)
        args = (given, *others) if others or given is not None else ()
        if not args and [*named] == names[:1]:
            return ours(self, *named.values())
        return stock(self, *args, **named)

    return forward


def _make(kinds: tuple[str, ...], name: Any) -> Any:
    cls = class_of(name)
    for kind in kinds:
        cls = twin_of(kind, cls)
    return cls.__new__(cls)


class InLean(Twin, kind="lean"):
    """Each call runs inside :class:`memkit.lean`. May stand before another twin."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with lean():
            return super().__call__(*args, **kwargs)


def undecorated(forward: Any) -> Any:
    """The function that was written, without decorators that keep what they wrap in a variable."""
    while (inner := _wrapped(forward)) is not None:
        forward = inner
    return forward


def decorated(forward: Any) -> Iterator[Any]:
    """The function and, one after the other, what its decorators keep, last the one that was written."""
    while forward is not None:
        yield forward
        forward = _wrapped(forward)


def with_names(forward: Any, code: CodeType | None = None, /, **names: Any) -> Callable[..., Any]:
    """The same code, or that, over its module's names, of which some stand for other things. Decorators stay around it."""
    known, cells = forward.__globals__, forward.__closure__
    if (inner := _wrapped(forward)) is None:
        if names:
            held = _Names(known, names)
            known = {**known, **held} if has_class(forward.__code__) else held
    else:
        ours = CellType(with_names(inner, code, **names))
        cells = tuple(ours if _holds(cell, inner) else cell for cell in cells)
        code = None
    made = FunctionType(code or forward.__code__, known, forward.__name__, forward.__defaults__, cells)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


class _Names(dict[str, Any]):
    """Those of a module as they are when they are asked for, but for some. Bodies of classes do not ask."""

    SEEN = (
        "__name__",
        "__package__",
        "__spec__",
        "__loader__",
        "__file__",
        "__builtins__",
        "__warningregistry__",
    )
    """By the interpreter, which does not ask."""

    def __init__(self, held: dict[str, Any], names: dict[str, Any]) -> None:
        held.setdefault("__warningregistry__", {})  # shared, or a warning would be shown in each call
        super().__init__({name: held[name] for name in self.SEEN if name in held}, **names)
        self._held = held

    def __missing__(self, name: str) -> Any:
        return self._held[name]


def _wrapped(forward: Any) -> Any:
    if type(forward) is not FunctionType:
        return None
    inner = forward.__dict__.get("__wrapped__")
    if type(inner) is not FunctionType:
        return None
    # A compiler ties what it made to a module's names.
    if forward.__globals__.get("__name__", "").startswith("torch."):
        return None
    for cell in forward.__closure__ or ():  # a loop: it runs in each call
        if _holds(cell, inner):
            return inner
    return None


def _holds(cell: CellType, held: Any) -> bool:
    try:
        return cell.cell_contents is held
    except ValueError:  # empty
        return False


class Instead:
    """A module but for some names: what `with_names` may put in its place."""

    def __init__(self, stock: ModuleType, **names: Any) -> None:
        self._stock = stock
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class Ours(partial[Any]):
    """A call of ours in the place of a function, which comes last of what is given first."""

    @property
    def stock(self) -> Any:
        return self.args[-1]


def own_tensors(module: nn.Module, function: Any) -> list[Tensor]:
    """Those of the module that the function's code names."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    held = {**module._parameters, **module._buffers}
    return [x for name in getattr(code, "co_names", ()) if (x := held.get(name)) is not None]


def numbers(shape: Sequence[int], like: Tensor | None) -> Tensor:
    """The same normal numbers each time, without the program's random state, of a parameter's dtype and device."""
    drawn = torch.randn(tuple(shape), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return drawn if like is None else drawn.to(like)


def near(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours.double() - theirs.double()).norm() <= TOLERANCE[theirs.dtype] * theirs.double().norm())


def itself(x: Tensor) -> Tensor:
    """As a saved-tensor hook: keeps other hooks from seeing what is verified."""
    return x


def is_plain(module: Any) -> bool:
    """Whether a call of it is its class's forward and nothing else."""
    return not (has_hooks(module) or has_global_hooks())


def linear_weights(module: Any) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a layer that is a Linear and nothing else; transformers' Conv1D is one transposed.

    A weight of another tensor subclass (quantised) brings its own linear, which only a call of the layer reaches.
    """
    linear = is_linear(module)
    transposed = not linear and _is_of(module, "Conv1D", "transformers.pytorch_utils")
    # transformers' layer for Falcon writes a Linear's product out
    other = not linear and (
        transposed or _is_of(module, "FalconLinear", "transformers.models.falcon.modeling_falcon")
    )
    if not ((linear or other) and is_plain(module)):
        return None
    weight: Any = module.weight
    if type(weight) in (nn.Parameter, Tensor) or is_dtensor(weight):
        return (weight.t() if transposed else weight), module.bias
    return None


def _is_of(module: Any, name: str, source: str) -> bool:
    return type(module).__name__ == name and type(module).__module__ == source


_IN_PLACE_OF_FORWARD = RLock()


def linear_call(module: Any) -> Callable[..., Tensor] | None:
    """Calls ``op(weight, bias, *inputs)`` in the place of a layer that is a Linear and nothing else; else None.

    Beside hooks that were read, as the layer's own forward: they gather its parameters for that and for its backward.
    """
    if (weights := linear_weights(module)) is not None:
        return lambda op, *inputs: cast(Tensor, op(*weights, *inputs))
    if (
        not is_linear(module)
        or type(module._parameters.get("weight")) is not nn.Parameter
        or not only_read(module)
        or is_compiling()
    ):
        return None

    def call(op: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        owner = get_ident()

        def forward(*given: Tensor) -> Tensor:  # another thread may have taken the layer for one with hooks
            if get_ident() == owner:
                return op(module.weight, module.bias, *given)
            return type(module).forward(module, *given)

        with _IN_PLACE_OF_FORWARD:
            vars(module)["forward"] = forward
            try:
                return cast(Tensor, module(*inputs))
            finally:
                del vars(module)["forward"]

    return call


def computes_in(input: Any, *layers: Any) -> bool:
    """Whether memkit's operators give what stock gives: no dtypes that promote each other, but under autocast."""
    if not serves(input, sharded=True):
        return False
    if torch.is_autocast_enabled(input.device.type):
        return True
    dtype = input.dtype
    for layer in layers:  # a loop, and no exceptions: it runs in each call
        weight = weight_of(layer)
        if isinstance(weight, Tensor) and weight.dtype != dtype:
            return False
    return True


def weight_of(layer: Any) -> Any:
    """Past the dictionary's own way to look it up, by which ZeRO 3 gathers what another module asks for. Of a parametrized
    one the largest tensor that it is made of: to make it may change buffers, or draw numbers."""
    if isinstance(layer, nn.Module):
        if (held := layer._parameters.get("weight")) is not None:
            return held
        parts: Any = getattr(layer._modules.get("parametrizations"), "weight", None)
        if parts is not None and (made_of := [*parts._parameters.values(), *parts._buffers.values()]):
            return max(made_of, key=torch.numel)
        elsewhere = (
            layer._buffers
            or layer._modules
            or "weight" in vars(layer)
            or hasattr(type(layer), "weight")
            or type(layer).__getattr__ is not nn.Module.__getattr__
        )
        if not elsewhere:
            return None
    return getattr(layer, "weight", None)
