"""Rotary position embeddings as the attention layers of transformers' models call them: one pass over queries and keys.

Their forward calls a function that its module knows under one name. The twin runs it with one of ours under that name,
which turns by :func:`memkit.functional.apply_rotary` where that computes the same: values and gradients on a few numbers
say so, for each way in which that function is called.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from ... import functional as F
from ..layers import serves
from .twin import in_forward_mode, itself, near, numbers, undecorated

NAME = "apply_rotary_pos_emb"


class Way(NamedTuple):
    """How `apply_rotary` is asked for what a library's function computes."""

    interleaved: bool
    columns: str
    """Of the tables: one for each element, for each pair, or for each element with those of the first half taken."""

    def turn(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_at: int) -> tuple[Tensor, Tensor]:
        width = cos.shape[-1]
        if self.columns == "first half":
            cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        rotary = {"elements": None, "first half": width, "pairs": 2 * width}[self.columns]
        layout: Any = "bhsd" if heads_at == 1 else "bshd"
        return F.apply_rotary(q, k, cos, sin, interleaved=self.interleaved, layout=layout, rotary_dim=rotary)


WAYS = [Way(i, columns) for columns in ("elements", "pairs", "first half") for i in (False, True)]
TURNED = "all", "half", "part"
"""Of a head, as many elements as tables have columns; or twice as many; or others."""

_ways: dict[Any, Way | None] = {}


def calls_rotary(forward: Any) -> bool:
    """Whether it calls such a function by its name."""
    forward = undecorated(forward)
    return (
        type(forward) is FunctionType
        and NAME in forward.__code__.co_names
        and callable(forward.__globals__.get(NAME))
    )


def is_rotary(forward: Any) -> bool:
    """Whether what it calls computes what `apply_rotary` does, of heads with tables as wide at least."""
    function = undecorated(forward).__globals__[NAME]
    like = torch.zeros((), device="cpu")
    return any(_way(function, {}, turned, like) is not None for turned in TURNED)


def rotary_of(forward: Any) -> Any:
    """What stands for the function that it calls."""
    return partial(_turn, undecorated(forward).__globals__[NAME])


def _turn(function: Any, q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
    heads_at = kwargs.get("unsqueeze_dim", 1)
    if args or not kwargs.keys() <= {"unsqueeze_dim"} or not _fit(q, k, cos, sin, heads_at):
        return function(q, k, cos, sin, *args, **kwargs)
    columns, size = cos.shape[-1], q.shape[-1]
    turned = TURNED[0] if columns == size else TURNED[1] if 2 * columns == size else TURNED[2]
    way = _way(function, kwargs, turned, q)
    if way is None:
        return function(q, k, cos, sin, **kwargs)
    return way.turn(q, k, cos, sin, heads_at)


def _fit(q: Any, k: Any, cos: Any, sin: Any, heads_at: Any) -> bool:
    """Whether these are what `apply_rotary` takes, and stock would give results of that dtype and shape."""
    if not (all(map(serves, (q, k, cos, sin))) and q.dim() == k.dim() == 4 and heads_at in (1, 2)):
        return False
    length = q.shape[3 - heads_at]
    return (
        q.dtype == k.dtype == cos.dtype == sin.dtype
        and q.device == k.device == cos.device == sin.device
        and (q.shape[0], q.shape[3], length) == (k.shape[0], k.shape[3], k.shape[3 - heads_at])
        and cos.shape == sin.shape
        and cos.dim() == 3
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1] == length
        and cos.shape[2] % 2 == 0
        and 0 < cos.shape[2] <= q.shape[3]
        and not (cos.requires_grad or sin.requires_grad)
        and not in_forward_mode()
    )


def _way(function: Any, kwargs: dict[str, Any], turned: str, like: Tensor) -> Way | None:
    seen = (function, *kwargs.values(), turned, like.dtype, like.device)
    if seen not in _ways:
        _ways[seen] = next((way for way in WAYS if _is_same(function, kwargs, turned, like, way)), None)
    return _ways[seen]


def _is_same(function: Any, kwargs: dict[str, Any], turned: str, like: Tensor, way: Way) -> bool:
    """Of a few numbers, in float32 and in the dtype in question.

    Tables whose columns differ tell one way from another; a library's hold each column twice, and its function may count on
    that: then the first half says it all.
    """
    size, columns = {"all": (8, 8), "half": (8, 4), "part": (12, 4)}[turned]
    heads_at = kwargs.get("unsqueeze_dim", 1)
    with torch.enable_grad(), saved_tensors_hooks(itself, itself), _disable_current_modes():
        for dtype in dict.fromkeys((torch.float32, like.dtype)):
            as_given = torch.empty(0, dtype=dtype, device=like.device)
            drawn = [numbers((2, heads, 5, size), as_given) for heads in (4, 2)]
            drawn = [x if heads_at == 1 else x.transpose(1, 2) for x in drawn]
            cos, sin = numbers((2, 2, 5, columns), as_given).unbind()
            found = []
            for turn in (partial(function, **kwargs), partial(way.turn, heads_at=heads_at)):
                leaves = [x.detach().requires_grad_() for x in drawn]
                try:
                    out = turn(*leaves, cos, sin)
                    weights = [numbers(x.shape, x.detach()) for x in out]
                    found.append([*out, *torch.autograd.grad(out, leaves, weights)])
                except Exception:  # a function of other arguments, or a way that does not fit
                    return False
            if not all(
                a.shape == b.shape and a.dtype == b.dtype and near(b, a) for a, b in zip(*found, strict=True)
            ):
                return False
    return True
