"""Activations as model libraries write them: modules of their own, without parameters, known by their classes' names."""

from __future__ import annotations

import inspect
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling

from ... import functional as F
from ..._hooks import only_read
from ..._modes import in_forward_mode, in_transform
from ...functional._activation import _PARAMETERS
from ..drawn import and_draws_nothing
from ..recipes import FUNCTIONS
from ..trial import own_copy
from ..types import TWINS, Swapped
from .elsewhere import asks_of
from .reads import (
    INTERNAL,
    another,
    differing,
    instead,
    marks,
    numbers_read,
    read_of_class,
    uses,
    why_stock_has_to_run,
)
from .twin import Twin, itself, twin_of

CLASSES = {
    "AccurateGELUActivation": "gelu_tanh",
    "BloomGelu": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "HardSigmoid": "hardsigmoid",
    "HardSwish": "hardswish",
    "MemoryEfficientSwish": "silu",
    "Mish": "mish",
    "MishActivation": "mish",
    "NewGELU": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "QuickGELUActivation": "quick_gelu",
    "ReLUSquaredActivation": "relu_squared",
    "ReluSquared": "relu_squared",
    "SiLUActivation": "silu",
    "Sigmoid": "sigmoid",
    "Swish": "silu",
    "Tanh": "tanh",
}
"""Class names, and which activation they stand for wherever a few values and slopes agree."""

_NEAR, _FAR = torch.linspace(-8, 8, 161), torch.tensor([1e1, 2e1, 1e2, 1e3, 1e4])
_PROBE = torch.cat([_NEAR, _FAR, -_FAR]).to("cpu", torch.float64).view(3, 3, -1)
_checked: WeakKeyDictionary[type[nn.Module], tuple[list[str], dict[Any, bool]]] = WeakKeyDictionary()
"""Of a class of such a name the attributes that its forward names; whether it computes what that says, by their values."""


class Activation(Swapped, Twin):
    pass


for _op in sorted(set(CLASSES.values())):
    type(f"Activation_{_op}", (Activation,), {"_op": _op, "__module__": __name__}, kind=f"activation:{_op}")


def library_activation(module: nn.Module) -> str | None:
    """Which activation a module of a library's class is."""
    cls = type(module)
    op = CLASSES.get(cls.__name__)
    if op is None or cls.__module__.startswith(("torch.nn.", "memkit.")):
        return None
    found = _checked.get(cls)
    if found is None:
        found = _checked[cls] = sorted(uses(cls).names - INTERNAL), {}
    names, known = found
    held = vars(module)
    values = tuple((name, _told(held[name])) for name in names if name in held)
    same = known.get(values)
    if same is None:  # of a model that was unpickled, say: in its first call
        if is_compiling() or in_transform() or in_forward_mode():
            return None
        plain = not asks_of(cls).goes_by_them and and_draws_nothing(lambda: _is_activation(module, op))
        same = known[values] = plain
    return op if same else None


def _told(held: Any) -> Any:
    """One value from another, the same in a copy of the module."""
    if isinstance(held, partial):
        return (
            _told(held.func),
            tuple(map(_told, held.args)),
            tuple((k, _told(v)) for k, v in held.keywords.items()),
        )
    if isinstance(held, MethodType):
        return held.__func__
    plain = held is None or isinstance(held, int | float | str | FunctionType | BuiltinFunctionType)
    return (type(held), held) if plain else type(held)


def _is_activation(module: nn.Module, op: str) -> bool:
    """In both modes, whatever the numbers are that it reads, and with nothing written down."""
    if module._parameters or module._buffers or module._modules:
        return False
    if why_stock_has_to_run(module) or read_of_class(module):
        return False
    tried = own_copy(module)  # another thread may call the module itself
    if tried is None:
        return False
    with torch.inference_mode(False), saved_tensors_hooks(itself, itself):
        for training in (True, False):
            tried.training = training
            before = marks(tried)
            if not computes(tried.forward, op) or differing(before, marks(tried)):
                return False
        for read, value in numbers_read(tried).items():
            if not isinstance(value, int | float):
                continue
            with instead(tried, read, another(value)):
                if not computes(tried.forward, op):
                    return False
    return True


def computes(activation: Any, op: str) -> bool:
    """Whether a function of one tensor is this activation, by a few values and slopes."""

    def of(function: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = _PROBE.clone().requires_grad_()
        y = function(x * 1.0)  # not a leaf, which it may not overwrite
        if type(y) is not torch.Tensor or y.dtype != x.dtype or y.shape != x.shape:
            raise TypeError("no activation")
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    try:
        if len(inspect.signature(activation).parameters) != 1:
            return False
        with torch.no_grad():
            for dtype in (torch.float32, torch.bfloat16):
                if activation(_PROBE.to(dtype)).dtype != dtype:
                    return False
        with torch.enable_grad():
            theirs, ours = of(activation), of(lambda x: F.act_dropout(x, op, 0.0))
        return all(torch.allclose(a, b, rtol=1e-8, atol=1e-9) for a, b in zip(theirs, ours, strict=True))
    except Exception:  # whatever it wants, it is not a function of one tensor
        return False


def activation_twin(name: str, module: nn.Module) -> type[Any]:
    return twin_of(f"activation:{name}", type(module))


def activation_of(act: Any) -> tuple[str, dict[str, float]] | None:
    """Name and parameters of what a layer calls as its activation, where that is one of memkit's and nothing else."""
    if not isinstance(act, nn.Module):
        name = FUNCTIONS.get(act)
        return None if name is None else (name, {})
    swapped, twin = isinstance(act, Swapped), _STOCK.get(type(act))
    if not (swapped or twin or type(act).__name__ in CLASSES):  # as most layers, in each call
        return None
    if not only_read(act):
        return None
    if not swapped:
        if (op := library_activation(act)) is not None:
            return op, {}
        if twin is None:
            return None
    op = _said(twin or type(act), "_op", act)
    return op, dict(zip(_PARAMETERS.get(op, ()), _said(twin or type(act), "_params", act), strict=True))


def _said(twin: type[nn.Module], name: str, act: nn.Module) -> Any:
    """What a twin says of an activation that need not be one; compilers follow this, and no view of it as its twin."""
    of = getattr(twin, f"{name}_of", None)
    return getattr(twin, name) if of is None else of(act)


_STOCK: dict[type[nn.Module], type[Swapped]] = {twin._stock: twin for twin in TWINS.values()}
