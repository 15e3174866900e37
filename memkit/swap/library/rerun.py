"""Calls of a part of a layer's code that backward makes again, under a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from types import MethodType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from ..._hooks import has_global_hooks
from ..._lean import is_lean
from ..._modes import in_forward_mode, in_transform, is_tracing
from .attend import may_drop
from .checkpoint import checkpointed
from .described import attended
from .repeatable import CONSTANTS, Names, is_layer, is_readable, is_torchs, may_repeat, reach, reach_of
from .scaled import note_served
from .twin import itself, near

LEAST = 2**20
"""Bytes that a call has to keep less, which takes some 0.2 ms and what it computes."""

INTERNAL = {*vars(nn.Module()), "_swap"}

Worth = Literal["", "again", "attend"]
_worth: dict[Hashable, Worth] = {}


def again(function: Callable[..., Any], first: Any, *given: Any) -> Any:
    """A call of a function that `regions` made of the code of another, whose first argument may be the layer it is of."""
    tensors = [x for x in given if isinstance(x, Tensor)]
    owner = first if isinstance(first, nn.Module) else None
    if not _may_checkpoint() or not all(x is owner or _is_fixed(x) or _is_given_layer(x) for x in given):
        return function(*given)
    made: Any = function
    # Whether lengths are a little longer or shorter makes no difference.
    shapes = ((*(n.bit_length() for n in x.shape), x.dtype, x.requires_grad) for x in tensors)
    key = (made.__code__, may_drop(0.5), *shapes)  # with stock's dropout `attend` is not for some
    worth = _worth.get(key)
    if worth == "":
        return function(*given)
    names = getattr(made.__globals__, "_held", made.__globals__)  # the module's own, behind stand-ins
    known = reach(made.__code__, names, None if owner is None else type(owner))
    if known is None or not (owner is None or is_readable(owner, known)):
        return function(*given)
    if any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing():
        return function(*given)  # random numbers could not be drawn again
    if worth is None:
        if len(_worth) > 1000:
            _worth.clear()
        _worth[key] = worth = _worth_of(function, given, tensors)
    if worth == "attend" and (found := attended(function, given)) is not None:
        note_served(owner)
        return found
    if worth == "":
        return function(*given)
    read: list[Tensor] = []
    copies: dict[nn.Module, nn.Module] = {}
    then = [_then(x, known if x is owner else None, read, copies) for x in given]
    if not all(map(_is_fixed, read)):
        return function(*given)
    note_served(owner)
    return checkpointed(function, *then, reads=read)


def method_again(method: MethodType, x: Tensor) -> Any:
    """A call of a layer's method that backward makes again, with the layer as it is now; None where its code may not be run
    again, or what it reads may be another by then."""
    layer, function = cast(nn.Module, method.__self__), method.__func__
    code = function.__code__
    known = reach(code, function.__globals__, type(layer)) if may_repeat(code) else None
    if known is None or not is_readable(layer, known):
        return None
    read: list[Tensor] = []
    now = _as_now(layer, known, read, {})
    return checkpointed(function, now, x, reads=read) if all(map(_is_fixed, read)) else None


def _may_checkpoint() -> bool:
    return (
        is_lean()
        and torch.is_grad_enabled()
        and not (is_tracing() or in_forward_mode() or in_transform() or has_global_hooks())
    )


def _is_fixed(x: Any) -> bool:
    """What nobody can change but a tensor's numbers, whose version is kept."""
    if isinstance(x, tuple | list):  # a list is copied
        return all(map(_is_fixed, x)) and not any(isinstance(each, Tensor | list) for each in x)
    if isinstance(x, Tensor):
        plain = x.layout == torch.strided and not x.is_nested and not x.is_inference()
        return plain and type(x) in (Tensor, nn.Parameter)
    return isinstance(x, (*CONSTANTS, slice))


def _is_given_layer(x: Any) -> bool:
    return isinstance(x, nn.Module) and is_torchs(x) and is_layer(x)


def _then(x: Any, known: Names | None, read: list[Tensor], copies: dict[nn.Module, nn.Module]) -> Any:
    """What is given, as it is now."""
    if isinstance(x, nn.Module):
        return _as_now(x, known, read, copies)
    return list(x) if isinstance(x, list) else x


def _as_now(
    module: nn.Module, known: Names | None, read: list[Tensor], copies: dict[nn.Module, nn.Module]
) -> nn.Module:
    """What stands for a layer in its calls, the same each time, with the attributes, parts and modes of now that they read;
    notes the tensors among that. Without names all of it: of PyTorch's layers, which hold little."""
    if (now := copies.get(module)) is not None:
        return now
    copies[module] = now = object.__new__(type(module))
    held = vars(now)
    for name, value in vars(module).items():
        if known is None or name in known or name in INTERNAL:
            held[name] = _value_now(value)
    for name in (known or frozenset()) - held.keys():
        if isinstance(value := getattr(type(module), name, None), CONSTANTS) and value is not None:
            held[name] = value
    for kind in ("_parameters", "_buffers", "_modules"):
        held[kind] = {k: x for k, x in held[kind].items() if known is None or k in known}
    read += [x for kind in ("_parameters", "_buffers") for x in held[kind].values() if x is not None]
    read += [x for x in held.values() if isinstance(x, Tensor)]
    for name, part in held["_modules"].items():
        if part is not None:
            held["_modules"][name] = _as_now(part, reach_of(part), read, copies)
    return now


def _value_now(value: Any) -> Any:
    """Of what `is_readable` lets pass; a configuration's own attributes are numbers and words."""
    if isinstance(value, list):
        return [_value_now(each) for each in value]
    if isinstance(value, (tuple, Tensor, nn.Module, *CONSTANTS)):
        return value
    return copy.copy(value) if type(value).__name__.endswith("Config") else value


def _worth_of(function: Callable[..., Any], given: tuple[Any, ...], tensors: list[Tensor]) -> Worth:
    """Whether a checkpoint keeps three tenths less, and a MiB, than autograd keeps of a call, and whether `attend` computes
    what that call gives. It is made, once for each size; a checkpoint around the model sees nothing of it."""
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        whole = x._base if x._is_view() else x
        if not isinstance(whole, nn.Parameter) and x.layout == torch.strided and not x.is_nested:
            kept[_memory(x)] = x
        return x

    def bytes_kept() -> int:
        return sum(x.untyped_storage().nbytes() for x in kept.values())

    devices = [x.device for x in tensors if x.is_cuda]
    with saved_tensors_hooks(keep, itself), _disable_current_modes(), torch.random.fork_rng(devices):
        results = function(*given)
        before = bytes_kept()
    own = {*map(_memory, tensors)}
    weights = max((x for memory, x in kept.items() if memory not in own), key=Tensor.numel, default=None)
    after: dict[int, float] = {}
    for x in tensors:
        if not isinstance(x, nn.Parameter):
            # Masks and biases, which mostly all layers are given, count half.
            shared = _memory(x) not in kept and weights is not None and x.shape[-2:] == weights.shape[-2:]
            after[_memory(x)] = x.untyped_storage().nbytes() * (0.5 if shared else 1.0)
    less = before - sum(after.values())
    if less < max(0.3 * before, LEAST):
        return ""
    kept.clear()
    with saved_tensors_hooks(keep, itself), _disable_current_modes(), torch.random.fork_rng(devices):
        ours = attended(function, given)
        keeps_more = bytes_kept() > sum(after.values()) + 0.1 * before  # a sum of biases
    same = ours is not None and not keeps_more and all(map(_is_same, ours, results))
    return "attend" if same else "again"


def _is_same(ours: Any, theirs: Any) -> bool:
    """Also in how it lies in memory, by which a dropout behind it may go."""
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)):
        return ours is theirs
    alike = (ours.shape, ours.stride(), ours.dtype, ours.requires_grad) == (
        *(theirs.shape, theirs.stride(), theirs.dtype, theirs.requires_grad),
    )
    return alike and (ours is theirs or near(ours.detach(), theirs.detach()))


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
