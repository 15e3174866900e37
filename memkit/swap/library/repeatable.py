"""Code that may be run again for backward: it gives the same, and changes nothing but what it has made itself.

By what its operations are, those of the functions and methods that it calls, and the layers that it uses. `again` runs such
code under a checkpoint.
"""

from __future__ import annotations

import builtins
import dis
import math
import operator
from collections.abc import Callable, Hashable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from ..._hooks import has_global_hooks, has_hooks
from ..._lean import is_lean
from .lines import GRAD, repeats
from .source import definition
from .twin import checkpointed, in_modes, is_tracing, itself, own_tensors

CHANGES = (
    *("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_"),
    *("YIELD_", "SEND", "IMPORT_", "LOAD_SUPER_ATTR"),
)
"""How the operations of code start that may change what is not its own, or depend on more."""
MODULES = (torch, nn, nn.functional, math, operator)
BUILTINS = {
    *("len", "range", "int", "float", "bool", "str", "tuple", "list", "dict", "set", "slice"),
    *("type", "isinstance", "hasattr", "getattr", "min", "max", "sum", "abs", "round", "pow"),
    *("divmod", "zip", "enumerate", "reversed", "sorted", "all", "any"),
    *("ValueError", "TypeError", "RuntimeError", "AssertionError", "NotImplementedError"),
}
NUMBERS = (int, float, bool, str, type(None), torch.dtype, torch.device)
TORCH = ("torch.nn.functional", "torch.functional")
LIBRARIES = ("einops",)
"""Whose functions are."""

_known: dict[Hashable, bool] = {}


def is_repeatable(code: CodeType, names: dict[str, Any], module: nn.Module | None) -> bool:
    """Whether a function of this code over these names of its module is, for a layer whose method it is part of.

    Its own lines have been looked at by who made it.
    """
    layers = () if module is None else tuple(type(each) for each in module.modules())
    key = (code, type(module), layers)
    if key not in _known:
        if len(_known) > 1000:
            _known.clear()
        _known[key] = _is_pure(code, names, module, set(), checked=True)
    return _known[key] and (module is None or not _has_hooked(code, module))


def _is_pure(
    code: CodeType, names: dict[str, Any], module: nn.Module | None, seen: set[Any], checked: bool = False
) -> bool:
    if (code, type(module)) in seen:
        return True
    seen.add((code, type(module)))
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    if (
        code.co_freevars
        or "distributed" in code.co_names
        or not all(_is_pure(each, names, module, seen, checked=True) for each in inner)
    ):
        return False
    if not (checked or _repeats(code)):
        return False
    for each in dis.get_instructions(code):
        if each.opname.startswith(CHANGES) and each.argval != GRAD:
            return False
        if each.opname == "LOAD_GLOBAL" and not _is_known(each.argval, names, seen):
            return False
    return module is None or all(_is_own_pure(held, module, seen) for held in _own(code, module))


def _repeats(code: CodeType) -> bool:
    found = definition(code.co_filename, code)
    return found is not None and repeats(found[1])


def _is_known(name: str, names: dict[str, Any], seen: set[Any]) -> bool:
    """Whether what a module's name stands for may be read, and called."""
    if name not in names:
        return name in BUILTINS and hasattr(builtins, name)
    held = names[name]
    if isinstance(held, ModuleType):
        return any(held is each for each in MODULES)
    if type(held) is FunctionType:
        source = held.__module__ or ""
        known = source.startswith(TORCH) or source.partition(".")[0] in LIBRARIES
        return known or _is_pure(held.__code__, held.__globals__, None, seen)
    if type(held) is BuiltinFunctionType:
        return str(held.__module__ or "").startswith(("torch", "math"))
    return isinstance(held, NUMBERS) or held is torch.Tensor


def _own(code: CodeType, module: nn.Module) -> Iterator[Any]:
    """Methods and layers of a module that code names, but what all modules have."""
    for name in code.co_names:
        if hasattr(nn.Module, name):
            continue
        if name in module._modules:
            yield module._modules[name]
        elif name in vars(module):
            yield vars(module)[name]
        elif hasattr(type(module), name):
            yield getattr(type(module), name)


def _is_own_pure(held: Any, module: nn.Module, seen: set[Any]) -> bool:
    if isinstance(held, property):
        held = held.fget
    if isinstance(held, nn.Module):
        return _is_layer(held, seen)
    if type(held) is FunctionType:
        return _is_pure(held.__code__, held.__globals__, module, seen)
    return not callable(held)


def _is_layer(layer: nn.Module, seen: set[Any]) -> bool:
    """One that changes nothing of its own."""
    if "forward" in vars(layer) or getattr(layer, "track_running_stats", False):
        return False
    forward = type(layer).forward
    source = type(layer).__module__
    if source.startswith(("torch.nn.", "memkit.")):
        return all(_is_layer(each, seen) for each in layer.children())
    return type(forward) is FunctionType and _is_pure(forward.__code__, forward.__globals__, layer, seen)


def _has_hooked(code: CodeType, module: nn.Module) -> bool:
    named = (module._modules.get(name) for name in code.co_names)
    return bool(has_global_hooks()) or any(
        has_hooks(part) for layer in named if layer is not None for part in layer.modules()
    )


_worth: dict[Hashable, bool] = {}


def again(function: Callable[..., Any], *given: Any) -> Any:
    """A call of a function that `regions` made, which backward makes again where that keeps less."""
    tensors = [x for x in given if isinstance(x, Tensor)]
    plain = is_lean() and torch.is_grad_enabled() and not is_tracing()
    if not plain or any(type(x) not in (Tensor, nn.Parameter) for x in tensors):
        return function(*given)
    module = next((each for each in given if isinstance(each, nn.Module)), None)
    made: Any = function
    if not is_repeatable(made.__code__, made.__globals__, module):
        return function(*given)
    key = (made.__code__, *((x.shape, x.dtype, x.requires_grad) for x in tensors))
    if key not in _worth:
        if any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing():
            return function(*given)
        if len(_worth) > 1000:
            _worth.clear()
        _worth[key] = _keeps_less(function, given, tensors)
    if not _worth[key]:
        return function(*given)
    reads = [] if module is None else _tensors(module, function)
    training = True if module is None else any(each.training for each in module.modules())
    call = function if module is None else in_modes(function, module)
    return checkpointed(call, *given, reads=reads, rng=training)


def _keeps_less(function: Callable[..., Any], given: tuple[Any, ...], tensors: list[Tensor]) -> bool:
    """Whether a checkpoint keeps at most seven tenths of what autograd keeps of a call. That call is made, once for each
    shape; a checkpoint around the model sees nothing of it."""
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            kept[_memory(x)] = x
        return x

    devices = [x.device for x in tensors if x.is_cuda]
    with saved_tensors_hooks(keep, itself), _disable_current_modes(), torch.random.fork_rng(devices):
        results = function(*given)
        before = sum(x.untyped_storage().nbytes() for x in kept.values())
    del results
    weights = max(
        (x for x in kept.values() if _memory(x) not in map(_memory, tensors)), key=Tensor.numel, default=None
    )
    after: dict[int, float] = {}
    for x in tensors:
        if not isinstance(x, nn.Parameter):
            # Masks and biases, which mostly all layers are given, count half.
            shared = _memory(x) not in kept and weights is not None and x.shape[-2:] == weights.shape[-2:]
            after[_memory(x)] = x.untyped_storage().nbytes() * (0.5 if shared else 1.0)
    return bool(after) and sum(after.values()) <= 0.7 * before


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _tensors(module: nn.Module, function: Any) -> list[Tensor]:
    """Of a layer and of its parts, that a function names."""
    parts = (module._modules.get(name) for name in function.__code__.co_names)
    return [
        *own_tensors(module, function),
        *(x for part in parts if part is not None for x in (*part.parameters(), *part.buffers())),
    ]
