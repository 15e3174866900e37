"""Recurrences over the tokens that have a function of ours, by the library's names for them, and where it stands in.

It computes the same: results and gradients on some numbers of the first call's shapes say so, for a function as the modules
of a class call it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from .chunk_scan import chunk_scan
from .delta_rule import gated_delta_rule
from .remembered import Remembered
from .selective_scan import selective_scan
from .twin import itself, near, numbers

TOKENS, CHUNK = 8, 5
"""Of a trial: more than one chunk, the last not full."""


class Known(NamedTuple):
    ours: Callable[..., Any]
    """Takes these tensors in this order, and options by the library's names."""
    tensors: dict[str, str]
    """By the library's names, their dimensions: t are the tokens."""
    widens: bool = True
    """Whether it computes in float32, as the library's; else in its inputs' dtype, which is that or float64."""


KNOWN = {
    "mamba_selective_scan": Known(
        selective_scan,
        {"hidden_states": "b c t", "dt": "b c t", "A": "c n", "B": "b n t", "C": "b n t"}
        | {"D": "c", "z": "b c t", "delta_bias": "c"},
        widens=False,
    ),
    "mamba2_chunk_scan": Known(
        chunk_scan,
        {"hidden_states": "b t h p", "dt": "b t h", "A": "h", "B": "b t g n", "C": "b t g n"}
        | {"D": "h", "dt_bias": "h", "initial_states": "b h p n"},
    ),
    "torch_chunk_gated_delta_rule": Known(
        gated_delta_rule,
        {"query": "b t g k", "key": "b t g k", "value": "b t h v", "g": "b t h", "beta": "b t h"}
        | {"initial_state": "b h k v"},
    ),
    "chunk_kimi_delta_attention": Known(
        gated_delta_rule,
        {"query": "b t h k", "key": "b t h k", "value": "b t h v", "g": "b t h k", "beta": "b t h"}
        | {"initial_state": "b h k v"},
    ),
}

_same: Remembered[bool] = Remembered()
"""Whether ours is what a function computes, in a layer of that class."""


def stand_in(name: str, function: Any, cls: Any, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Ours, to be called in the function's place."""
    known = KNOWN[name]
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return None
    held = {name: tuple(each) if isinstance(each, list) else each for name, each in bound.arguments.items()}
    tensors: dict[str, Any] = {name: held.pop(name, None) for name in known.tensors}
    held |= held.pop("kwargs", {})
    if not (_fit(known, tensors) and all(map(_is_constant, held.values()))):
        return None
    taken = inspect.signature(known.ours).parameters
    options = {name: each for name, each in held.items() if name in taken}
    dtypes = tuple(None if x is None else x.dtype for x in tensors.values())
    same, seen = _same.of(function, cls), (dtypes, tuple(sorted(held.items())))
    if seen not in same:
        same[seen] = _is_same(known, function, bound, tensors, options)
    return partial(known.ours, *tensors.values(), **options) if same[seen] else None


def _fit(known: Known, tensors: dict[str, Any]) -> bool:
    sizes: dict[str, int] = {}
    first = next(iter(tensors.values()))
    taken = inspect.signature(known.ours).parameters.values()
    for (name, x), parameter in zip(tensors.items(), taken, strict=False):
        if x is None and parameter.default is None:
            continue
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.numel() == 0:
            return False
        if not known.widens and (x.dtype != first.dtype or x.dtype not in (torch.float32, torch.float64)):
            return False
        letters = known.tensors[name].split()
        if len(letters) != x.dim():
            return False
        if any(sizes.setdefault(each, size) != size for each, size in zip(letters, x.shape, strict=True)):
            return False
    return not torch.is_autocast_enabled(first.device.type)


def _is_constant(held: Any) -> bool:
    each = held if isinstance(held, tuple) else (held,)
    return all(isinstance(x, bool | int | float | str | None) for x in each)


def _is_same(
    known: Known, function: Any, bound: Any, tensors: dict[str, Any], options: dict[str, Any]
) -> bool:
    """Of some tokens, with numbers of our own, so small that not all decays at once: results and all gradients.

    A checkpoint around the model sees nothing of it, since it is not done again when that computes again.
    """
    with torch.enable_grad(), saved_tensors_hooks(itself, itself), _disable_current_modes():
        some = {name: None if x is None else _some(x, known.tensors[name]) for name, x in tensors.items()}
        bound.arguments |= {name: x for name, x in some.items() if name in bound.arguments}
        if "chunk_size" in bound.signature.parameters:
            bound.arguments["chunk_size"] = CHUNK
            options = options | {"chunk_size": CHUNK}
        found = _outcome(function(*bound.args, **bound.kwargs), some)
        ours = _outcome(known.ours(*some.values(), **options), some)
    if len(found) != len(ours):
        return False
    for a, b in zip(ours, found, strict=True):
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            return False
        if known.widens and b.dtype == torch.float64:
            a, b = a.float(), b.float()
        if not near(a, b):
            return False
    return True


def _some(x: Tensor, dimensions: str) -> Tensor:
    part = x.detach()[tuple(slice(TOKENS if each == "t" else None) for each in dimensions.split())]
    return (0.1 * (part + numbers(part.shape, part))).requires_grad_()


def _outcome(result: Any, given: dict[str, Any]) -> list[Tensor | None]:
    """Results, and gradients of what is given."""
    results = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
    leaves = [x for x in given.values() if x is not None]
    weights = [numbers(x.shape, x.detach()) for x in results]
    return [*results, *torch.autograd.grad(results, leaves, weights, allow_unused=True)]
