"""Calls of a part of a layer's code that backward makes again, under a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from ..._hooks import has_global_hooks
from ..._lean import is_lean
from .repeatable import CONSTANTS, Reach, is_readable, reach
from .rotary import served
from .twin import checkpointed, is_tracing, itself

LEAST = 2**20
"""Bytes that a call has to keep less, which takes some 0.5 ms."""

_worth: dict[Hashable, bool] = {}


def again(function: Callable[..., Any], owner: nn.Module | None, *given: Any) -> Any:
    """A call of a function that `regions` made of the code of this layer, if of one's."""
    tensors = [x for x in given if isinstance(x, Tensor)]
    plain = is_lean() and torch.is_grad_enabled() and not is_tracing() and not has_global_hooks()
    if not plain or not all(x is owner or _is_fixed(x) for x in given):
        return function(*given)
    made: Any = function
    known = reach(made.__code__, made.__globals__, None if owner is None else type(owner))
    if known is None or not (owner is None or is_readable(owner, known.names)):
        return function(*given)
    # Whether lengths are a little longer or shorter makes no difference.
    shapes = ((*(n.bit_length() for n in x.shape), x.dtype, x.requires_grad) for x in tensors)
    key = (made.__code__, *shapes)
    on_cuda = any(x.is_cuda for x in tensors)
    if on_cuda and (key not in _worth or known.draws) and torch.cuda.is_current_stream_capturing():
        return function(*given)
    if key not in _worth:
        if len(_worth) > 1000:
            _worth.clear()
        _worth[key] = _keeps_less(function, given, tensors)
    if not _worth[key]:
        return function(*given)
    if owner is None:
        return checkpointed(function, *given, rng=known.draws)
    served.add(owner)
    as_now, read = _as_now(owner, known)
    given = tuple(as_now if x is owner else x for x in given)
    return checkpointed(function, *given, reads=read, rng=known.draws)


def _is_fixed(x: Any) -> bool:
    """What nobody can change but a tensor's numbers, whose version is kept."""
    if isinstance(x, tuple):
        return all(map(_is_fixed, x)) and not any(isinstance(each, Tensor) for each in x)
    return type(x) in (Tensor, nn.Parameter) or isinstance(x, (*CONSTANTS, slice))


def _as_now(module: nn.Module, known: Reach) -> tuple[nn.Module, list[Tensor]]:
    """What stands for a layer in its calls, with the attributes, parts and modes of now, and the tensors among them."""
    cls = type(module)
    copy = cls.__new__(cls)
    held = vars(copy)
    held.update(vars(module))
    read: list[Tensor] = []
    for kind in ("_parameters", "_buffers"):
        held[kind] = dict(held[kind])
        read += [x for name in known.names if (x := held[kind].get(name)) is not None]
    read += [x for name in known.names if isinstance(x := held.get(name), Tensor)]
    held["_modules"] = dict(held["_modules"])
    for name in known.names & held["_modules"].keys():
        if (layer := held["_modules"][name]) is not None:
            held["_modules"][name] = _part_as_now(layer, read)
    return copy, read


def _part_as_now(layer: nn.Module, read: list[Tensor]) -> nn.Module:
    """All of a layer that is called."""
    cls = type(layer)
    copy = cls.__new__(cls)
    held = vars(copy)
    held.update(vars(layer))
    for kind in ("_parameters", "_buffers"):
        held[kind] = dict(held[kind])
        read += [x for x in held[kind].values() if x is not None]
    read += [x for x in held.values() if isinstance(x, Tensor)]
    held["_modules"] = {
        name: None if part is None else _part_as_now(part, read) for name, part in held["_modules"].items()
    }
    return copy


def _keeps_less(function: Callable[..., Any], given: tuple[Any, ...], tensors: list[Tensor]) -> bool:
    """Whether a checkpoint keeps at most seven tenths of what autograd keeps of a call. That call is made, once for each
    size; a checkpoint around the model sees nothing of it."""
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
    own = {*map(_memory, tensors)}
    weights = max((x for memory, x in kept.items() if memory not in own), key=Tensor.numel, default=None)
    after: dict[int, float] = {}
    for x in tensors:
        if not isinstance(x, nn.Parameter):
            # Masks and biases, which mostly all layers are given, count half.
            shared = _memory(x) not in kept and weights is not None and x.shape[-2:] == weights.shape[-2:]
            after[_memory(x)] = x.untyped_storage().nbytes() * (0.5 if shared else 1.0)
    less = before - sum(after.values())
    return less >= max(0.3 * before, LEAST)


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
