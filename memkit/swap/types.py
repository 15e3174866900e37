"""What a swapped activation is: its class, what it may do, and the checks of each call that keep it safe.

A swapped module's class is a subclass of memkit.nn's twin; its attributes stay as they were, and one, `_swap`, says what
was proven. Each call checks what cannot be proven once and for all:

- References. In place needs a tensor that nothing else can reach. C++ counts the references of autograd, views and
  storages. Python's own holders (a variable, a list of features, a hook, a checkpoint's arguments) show in the
  input's reference count, compared with that of a call on a temporary.
- The caller, where the proof rests on its source: `nn.Sequential.forward` drops what it passes on, a loop over the
  same children might not. In place, the line that calls, too: another one may go on with the input.
- The dtype, where the slope from the output is not exact in all of them.

Whatever is not proven or not supported (integers, other devices, tensor subclasses, hooks added later) goes to the
stock forward. DTensors are worked on out of place.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe, getrefcount
from types import CodeType, FrameType
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import _global_forward_pre_hooks

from .. import _C
from .. import nn as memkit_nn
from .._hooks import shows_result
from .._lean import is_lean
from .._modes import is_tracing
from .._older import is_exporting
from .._sharding import is_dtensor
from ..functional._activation import TWO_SLOPES as TWO_SLOPES
from ..functional._activation import Inplace, Save, _dispatched
from .recipes import CALLERS

Place = tuple[str, str, int, int]
"""Where code stands, and the line of it that runs: its file, name and first line, and that line."""


def place(frame: FrameType) -> Place:
    code = frame.f_code
    return code.co_filename, code.co_name, code.co_firstlineno, frame.f_lineno or 0


class Proof(NamedTuple):
    """What was proven of one module. Plain values: copied and pickled with the module."""

    inplace: Inplace
    """False: out of place. "auto": in place where a call's references allow it. True: stock overwrites its input too."""
    holders: int = 0
    """Python references to the input that do no harm, beside the call's own."""
    callers: bool = False
    """Holds only for calls from `recipes.CALLERS`."""
    hooked: bool = False
    """Holds with the forward hooks that the module has."""
    dtypes: frozenset[torch.dtype] | None = None
    """Where the slope may come from the output; None: wherever memkit computes."""
    original: Callable[[Tensor], Tensor] | None = None
    """The function whose place the module took."""
    save: Save = "output"
    """What the slope comes from. "input": as in stock, so that there is nothing to prove; for `memkit.lean`. "bit": where
    nothing else keeps the output, which may then be changed."""
    training: bool | None = None
    """The module's mode in which "auto" was proven: in the other, a forward may go on with the input. None: in both."""
    seen: frozenset[tuple[Place, ...]] = frozenset()
    """The lines that called it where "auto" was proven, and as many of what called these as have variables that may hold the
    input: others may go on with it."""
    compiled: bool = True
    """It is memkit's under a compiler too: not beside a norm, which a compiler makes again in backward together with it."""


def stock_of(cls: type[nn.Module]) -> type[nn.Module]:
    """What a changed module's class was before; of one that was parametrized since, the same around that."""
    changed: Any = cls
    if "_stock" in vars(cls):
        return cast("type[nn.Module]", changed._stock)
    own = {name: held for name, held in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    bases = tuple(stock_of(base) if issubclass(base, Changed) else base for base in cls.__bases__)
    return type(f"Parametrized{bases[0].__name__}", bases, own)


def innermost_of(cls: Any) -> Any:
    """The stock class of one that may have been changed twice, as a root is."""
    while issubclass(cls, Changed):
        cls = cls._stock
    return cls


_OWN: dict[tuple[str, str], type[Any]] = {}
"""Twins of torch.nn's modules by where they are; they go by the names of those, which others write into files."""


def own_name(cls: type[Any]) -> Any:
    """What a pickle calls the class: of such a twin where it is."""
    return vars(cls).get("_own", cls)


def class_of(name: Any) -> Any:
    return _OWN[name] if isinstance(name, tuple) else name


def _new(module: str, name: str) -> Any:
    """For pickles."""
    cls = class_of((module, name))
    return cls.__new__(cls)


class Changed(nn.Module):
    """Mixed into the twin that takes a stock module's place, before it."""

    _own: ClassVar[tuple[str, str]]
    _swap: Any
    """What was proven, or chosen; gone when the module is changed back."""
    _stock: ClassVar[type[nn.Module]]
    _stock_forward: ClassVar[Callable[[Any, Tensor], Tensor]]

    def __init_subclass__(cls) -> None:
        # Of a twin that is made of a class: in its namespace, as a metaclass may take no argument.
        stock: type[nn.Module] | None = vars(cls).get("_stock")
        concrete = any(getattr(base, "_stock", nn.Module) is not nn.Module for base in cls.__bases__)
        if stock is not None or not concrete:  # else it was parametrized
            torchs = (base for base in cls.__mro__ if base.__module__.startswith("torch.nn."))
            cls._stock = stock or next(torchs)
            cls._stock_forward = innermost_of(cls).forward
        if stock is None and not concrete and cls._stock is not nn.Module:
            cls._own = cls.__module__, cls.__qualname__
            _OWN[cls._own] = cls
            cls.__module__, cls.__qualname__ = cls._stock.__module__, cls._stock.__qualname__

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        return (_new, type(self)._own, *reduced[2:]) if "_own" in vars(type(self)) else reduced

    def extra_repr(self) -> str:
        return cast(str, innermost_of(type(self)).extra_repr(self))

    def __prepare_scriptable__(self) -> nn.Module:
        cls = innermost_of(type(self))
        stock: nn.Module = cls.__new__(cls)
        vars(stock).update(vars(self))
        vars(stock).pop("_swap", None)
        return stock


class Swapped(Changed):
    """An activation."""

    _swap: Proof
    _op: str
    _params: tuple[float, ...] = ()

    def __init_subclass__(cls, **how: Any) -> None:
        super().__init_subclass__(**how)
        # What a stock module's attributes say, as functions: a compiler need not follow a property of another class.
        for name in ("_op", "_params"):
            said = getattr(cls, name, None)
            of = staticmethod(said.fget) if isinstance(said, property) else None  # type: ignore[arg-type]
            setattr(cls, f"{name}_of", of)

    def forward(self, input: Tensor) -> Tensor:
        if is_dynamo_compiling():
            return self._compiled(input)
        inplace, holders, callers, hooked, dtypes, _, save, training, seen, _ = self._swap
        if (dtypes is not None and input.dtype not in dtypes) or (save == "input" and not is_lean()):
            return self._stock_forward(input)
        if save != "input" and not hooked and shows_result(self):
            return self._stock_forward(input)
        try:
            if callers and caller(_getframe(1)) not in CALLERS:
                return self._stock_forward(input)
            # Dispatch modes (selective checkpointing) must see one and the same operator each time. What a hook put
            # in the input's place has fewer holders to begin with, so that one more would not show.
            if inplace == "auto" and (
                getrefcount(input) > holders + ALONE
                or (seen and not was_seen(_getframe(1), seen))
                or (holders >= LAYER and shows_argument(_getframe(1), holders // LAYER))
                or (training is not None and self.training != training)
                or _len_torch_dispatch_stack()
                or self._forward_pre_hooks
                or _global_forward_pre_hooks
            ):
                inplace = False
            out = _C.activation(self._op, input, None, -1, self._params, inplace, save)
            if out is None:  # a tensor subclass, a torch function mode, or a trace
                if is_dtensor(input):
                    inplace = False  # else the result would be copied into it
                elif type(input) is not Tensor or is_tracing():
                    return self._stock_forward(input)
                out = _dispatched(self._op, input, self._params, inplace, save, None, -1)
        except (RuntimeError, TypeError, ValueError) as error:
            # memkit refuses before it writes, in these words. Other errors may come after.
            if not str(error).startswith((f"{self._op}: expected", "call stack is not deep enough")):
                raise
            return self._stock_forward(input)
        return out

    def _compiled(self, input: Tensor) -> Tensor:
        """Out of place: compilers functionalize, so nothing can be changed later. Without a gradient they fuse better."""
        proof = self._swap
        if (
            not proof.compiled
            or proof.save == "input"
            or (proof.save == "output" and self._op in KEEPS_OUTPUT)
            or not input.requires_grad
            or input.dtype not in (FLOATS if proof.dtypes is None else proof.dtypes)
            or input.device.type not in ("cpu", "cuda")
            or is_exporting()
        ):
            return self._stock_forward(input)
        return _dispatched(self._op, input, self._params, proof.inplace, proof.save, None, -1)


WRAPPED: CodeType = nn.Module._wrapped_call_impl.__code__
_CALL: CodeType = nn.Module._call_impl.__code__
_INNER = next((c for c in _CALL.co_consts if isinstance(c, CodeType) and c.co_name == "inner"), None)
"""What of _call_impl calls the forward where there are hooks."""


CALL_CODES = frozenset({WRAPPED, _CALL, _INNER})


def calling(frame: FrameType | None) -> FrameType | None:
    """What called the module whose forward this frame called; None where it called that past `__call__`."""
    if frame is not None and frame.f_code is _INNER:
        frame = frame.f_back
    for code in (_CALL, WRAPPED):
        if frame is None or frame.f_code is not code:
            return None
        frame = frame.f_back
    return frame


def was_seen(frame: FrameType | None, seen: frozenset[tuple[Place, ...]]) -> bool:
    frame = calling(frame)
    if frame is None:
        return False
    places: tuple[Place, ...] = (place(frame),)
    while places not in seen:
        if len(places) == max(map(len, seen)):
            return False
        frame = frame.f_back
        while frame is not None and frame.f_code in CALL_CODES:
            frame = frame.f_back
        if frame is None:
            return False
        places = *places, place(frame)
    return True


def caller(frame: FrameType | None) -> CodeType | None:
    """Its code."""
    frame = calling(frame)
    return None if frame is None else frame.f_code


def shows_argument(frame: FrameType | None, modules: int) -> bool:
    """Whether one of so many modules, in whose forwards this call of an activation is, has hooks: forward hooks are given
    what it was called with, afterwards too."""
    frame = calling(frame)
    while frame is not None and modules:
        if frame.f_code is _INNER:
            return True
        modules -= frame.f_code is WRAPPED
        frame = frame.f_back
    return False


class _Counter(nn.Module):
    def forward(self, input: Tensor) -> int:
        return getrefcount(input)  # as in Swapped.forward


class _Around(nn.Module):
    def __init__(self, count: _Counter) -> None:
        super().__init__()
        self.count = count

    def forward(self, input: Tensor) -> int:
        return cast(int, self.count(input))


def _references_of_a_temporary() -> int:
    """What `getrefcount` says in a module's forward of an input that only the call holds."""
    count = _Counter()
    temporary = cast(int, count(torch.empty(0, device="cpu")))
    variable = torch.empty(0, device="cpu")
    held = cast(int, count(variable))
    in_sequence = cast(int, nn.Sequential(nn.PReLU(), count)(variable))
    if not (held == in_sequence == temporary + 1):
        return -(1 << 30)  # an interpreter that counts in another way: never in place
    # A tracer may hold references now that it does not hold later. 6 is CPython 3.10 to 3.13's count without one.
    return min(temporary, 6)


ALONE = _references_of_a_temporary()


def _references_on_the_way() -> tuple[int, int, int, int]:
    """How many references to an argument the call of a module holds, beside the variable of its forward that it becomes;
    where it is given by name; how many the call of a function; and how many fewer `module(*args)` holds than `module(arg)`.
    What CPython 3.10 to 3.13 hold at most, as above."""
    count = _Counter()
    around = _Around(count)
    temporary = cast(int, count(torch.empty(0, device="cpu"))) + 1

    def function(input: Tensor) -> int:
        return cast(int, count(input))

    def unpacked(*inputs: Tensor) -> int:
        return cast(int, count(*inputs))

    fewer = temporary - unpacked(torch.empty(0, device="cpu"))
    layer = cast(int, around(torch.empty(0, device="cpu"))) - temporary
    named = cast(int, around(input=torch.empty(0, device="cpu"))) - temporary
    return (
        max(1, min(layer, 4)),
        max(1, min(named, 9)),
        min(function(torch.empty(0, device="cpu")) - temporary, 1),
        max(fewer, 2),
    )


LAYER, NAMED, FUNCTION, FEWER = _references_on_the_way()

FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
HALVES = torch.float16, torch.bfloat16
WIDE = frozenset({torch.float32, torch.float64})


class ReLU(Swapped, memkit_nn.ReLU):
    _op = "relu"


class LeakyReLU(Swapped, memkit_nn.LeakyReLU):
    _op = "leaky_relu"

    @property
    def _params(self) -> tuple[float, ...]:  # type: ignore[override]
        return (self.negative_slope,)


class ELU(Swapped, memkit_nn.ELU):
    _op = "elu"

    @property
    def _params(self) -> tuple[float, ...]:  # type: ignore[override]
        return (self.alpha,)


class SELU(Swapped, memkit_nn.SELU):
    _op = "selu"


class CELU(Swapped, memkit_nn.CELU):
    _op = "celu"

    @property
    def _params(self) -> tuple[float, ...]:  # type: ignore[override]
        return (self.alpha,)


class Sigmoid(Swapped, memkit_nn.Sigmoid):
    _op = "sigmoid"


class Tanh(Swapped, memkit_nn.Tanh):
    _op = "tanh"


class Softplus(Swapped, memkit_nn.Softplus):
    _op = "softplus"

    @property
    def _params(self) -> tuple[float, ...]:  # type: ignore[override]
        return (self.beta, self.threshold)


class Hardtanh(Swapped, memkit_nn.Hardtanh):
    _op = "hardtanh"

    @property
    def _params(self) -> tuple[float, ...]:  # type: ignore[override]
        return (self.min_val, self.max_val)


class ReLU6(Swapped, memkit_nn.ReLU6):
    """Stock's is a Hardtanh, whose bounds are attributes."""

    @property
    def _op(self) -> str:  # type: ignore[override]
        return "relu6" if (self.min_val, self.max_val) == (0, 6) else "hardtanh"

    @property
    def _params(self) -> tuple[float, ...]:  # type: ignore[override]
        return () if (self.min_val, self.max_val) == (0, 6) else (self.min_val, self.max_val)


class Hardsigmoid(Swapped, memkit_nn.Hardsigmoid):
    _op = "hardsigmoid"


class GELU(Swapped, memkit_nn.GELU):
    @property
    def _op(self) -> str:  # type: ignore[override]
        return "gelu" if self.approximate == "none" else "gelu_tanh"


class SiLU(Swapped, memkit_nn.SiLU):
    _op = "silu"


class Mish(Swapped, memkit_nn.Mish):
    _op = "mish"


class Hardswish(Swapped, memkit_nn.Hardswish):
    _op = "hardswish"


TWINS: dict[str, type[Swapped]] = {
    "relu": ReLU,
    "leaky_relu": LeakyReLU,
    "elu": ELU,
    "selu": SELU,
    "celu": CELU,
    "sigmoid": Sigmoid,
    "tanh": Tanh,
    "softplus": Softplus,
    "relu6": ReLU6,
    "hardtanh": Hardtanh,
    "hardsigmoid": Hardsigmoid,
    "gelu": GELU,
    "silu": SiLU,
    "mish": Mish,
    "hardswish": Hardswish,
}
"""The names that `ops` takes."""

KEEPS_OUTPUT = frozenset({"relu", "sigmoid", "tanh"})
"""Stock keeps the output too: whatever is done to it later does as much harm to stock."""

NEEDS_BIT = frozenset({"gelu", "gelu_tanh", "quick_gelu", "silu", "mish", "hardswish"})
"""A bit an element beside the output says on which side of the minimum the input was."""

COPIES_INPUT = frozenset({"silu", "mish", "hardswish", "hardsigmoid"})
"""Stock with inplace=True keeps a copy of the input; the others keep the output."""

INEXACT = {
    "elu": (2.5e-4, 2e-3),
    "selu": (5e-4, 4e-3),
    "celu": (2.5e-4, 2e-3),
    "softplus": (1.2e-4, 6e-4),
    "gelu": (8e-3, 1.6e-2),
    "gelu_tanh": (8e-3, 1.6e-2),
    "quick_gelu": (9e-3, 2.4e-2),
    "relu_squared": (5e-4, 5e-4),
    "silu": (8e-3, 1.5e-2),
    "mish": (7e-3, 1.5e-2),
    "hardswish": (9e-3, 2.4e-2),
}
"""How far the slope from the output may be off in float16 and bfloat16, where that is more than `EXACT`; elu at alpha=1."""

EXACT = 2e-4
"""How far it may be off in the other dtypes, at worst."""
