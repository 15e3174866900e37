"""Rotary position embeddings as the attention layers of transformers' models call them: one pass over queries and keys.

Their forward calls a function that its module knows under one name. The twin runs it with one of ours under that name,
which turns by :func:`memkit.functional.apply_rotary` where that computes the same: values and gradients on a few numbers
say so, for each way in which that function is called. What a user puts under that name is called as it is.
"""

from __future__ import annotations

import dis
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from ... import functional as F
from ..._modes import in_forward_mode, in_transform
from ..layers import serves
from .twin import itself, near, numbers, undecorated

NAME = "apply_rotary_pos_emb"
LIBRARIES = ("transformers.", "liger_kernel.")

served: WeakSet[nn.Module] = WeakSet()
"""Layers whose queries and keys memkit's operator has turned."""


class Way(NamedTuple):
    """How `apply_rotary` is asked for what a library's function computes."""

    interleaved: bool
    columns: str
    """Of the tables: one for each element, for each pair, or for each element with those of the first half taken."""
    joins: bool = False
    """Stock puts its results together from parts: they are contiguous, whatever it was given."""

    def turn(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_at: int) -> tuple[Tensor, Tensor]:
        width = cos.shape[-1]
        if self.columns == "first half":
            cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        rotary = {"elements": None, "first half": width, "pairs": 2 * width}[self.columns]
        layout: Any = "bhsd" if heads_at == 1 else "bshd"
        q, k = F.apply_rotary(q, k, cos, sin, interleaved=self.interleaved, layout=layout, rotary_dim=rotary)
        return (q.contiguous(), k.contiguous()) if self.joins else (q, k)


WAYS = [
    Way(interleaved, columns, joins)
    for columns in ("elements", "pairs", "first half")
    for interleaved in (False, True)
    for joins in (False, True)
]
TURNED = {"all": (8, 8), "half": (8, 4), "part": (12, 4)}
"""Of a head, as many elements as tables have columns, or twice as many, or others; heads and columns to tell that by."""

_ways: WeakKeyDictionary[Any, dict[Any, Way | None]] = WeakKeyDictionary()


def calls_rotary(forward: Any) -> bool:
    """Whether it calls such a function by its name."""
    forward = undecorated(forward)
    return type(forward) is FunctionType and NAME in forward.__code__.co_names and NAME in forward.__globals__


def is_rotary(forward: Any, parameters: list[Tensor]) -> bool:
    """Whether what it calls is the library's, and computes what `apply_rotary` does in one way at least."""
    forward = undecorated(forward)
    function = forward.__globals__[NAME]
    if not _is_librarys(function, forward) or any(
        step.opname == "STORE_GLOBAL" for step in dis.get_instructions(forward)
    ):
        return False
    kinds = {(p.dtype, p.device) for p in parameters if p.is_floating_point() and not p.is_meta}
    likes = [torch.empty(0, dtype=dtype, device=device) for dtype, device in kinds]
    likes = [like for like in likes if serves(like)] or [torch.empty(0, device="cpu")]
    # Of all, so that the first calls need not find out.
    found = [_way(function, {}, turned, like, like) for like in likes for turned in TURNED]
    return any(way is not None for way in found)


def rotary_of(module: nn.Module, forward: Any) -> Any:
    """What stands for the function that it calls."""
    forward = undecorated(forward)
    function = forward.__globals__[NAME]
    return partial(_turn, module, function) if _is_librarys(function, forward) else function


def _is_librarys(function: Any, forward: Any) -> bool:
    if type(function) is not FunctionType:
        return False
    module = str(function.__globals__.get("__name__", ""))
    return bool(module == forward.__globals__.get("__name__") or module.startswith(LIBRARIES))


def _turn(module: nn.Module, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    heads_at = kwargs.get("unsqueeze_dim", 1)
    if len(args) == 4 and kwargs.keys() <= {"unsqueeze_dim"} and _fit(*args, heads_at):
        q, _, cos, _ = args
        columns, size = cos.shape[-1], q.shape[-1]
        turned = "all" if columns == size else "half" if 2 * columns == size else "part"
        if (way := _way(function, kwargs, turned, q, cos)) is not None:
            served.add(module)
            return way.turn(*args, heads_at)
    return function(*args, **kwargs)


def _fit(q: Any, k: Any, cos: Any, sin: Any, heads_at: Any) -> bool:
    """Whether these are what `apply_rotary` takes, and stock would give results of that shape."""
    if not (all(map(serves, (q, k, cos, sin))) and q.dim() == k.dim() == 4 and heads_at in (1, 2)):
        return False
    length = q.shape[3 - heads_at]
    return (
        q.dtype == k.dtype
        and cos.dtype == sin.dtype
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


def _way(function: Any, kwargs: dict[str, Any], turned: str, like: Tensor, table: Tensor) -> Way | None:
    """Known, or found out where the moment allows it."""
    known = _ways.setdefault(function, {})
    seen = (*kwargs.values(), turned, like.dtype, table.dtype, like.device)
    if seen not in known and _can_try(like):
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(like.device.type, enabled=False),
            saved_tensors_hooks(itself, itself),
            _disable_current_modes(),
        ):
            tried = (way for way in WAYS if _is_same(function, kwargs, turned, like, table, way))
            try:
                known[seen] = next(tried, None)
            except torch.OutOfMemoryError:  # says nothing of the function
                return None
    return known.get(seen)


def _can_try(like: Tensor) -> bool:
    autograd: Any = torch._C._autograd
    return (
        not in_transform()
        and autograd._saved_tensors_hooks_is_enabled()
        and not (like.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _is_same(
    function: Any, kwargs: dict[str, Any], turned: str, like: Tensor, table: Tensor, way: Way
) -> bool:
    """Of a few numbers, in float32 and in the dtypes in question: values, gradients, and how results lie.

    Tables whose columns differ tell one way from another; a library's hold each column twice, and its function may count on
    that: then the first half says it all.
    """
    size, columns = TURNED[turned]
    heads_at = kwargs.get("unsqueeze_dim", 1)
    for dtype, of_table in dict.fromkeys([(torch.float32, torch.float32), (like.dtype, table.dtype)]):
        of_heads = torch.empty(0, dtype=dtype, device=like.device)
        drawn = [numbers((2, 5, heads, size), of_heads) for heads in (4, 2)]
        drawn = [x.transpose(1, 2) if heads_at == 1 else x for x in drawn]
        cos, sin = numbers((2, 2, 5, columns), torch.empty(0, dtype=of_table, device=like.device)).unbind()
        found: list[list[Tensor]] = []
        turn: Any
        for turn in (partial(function, **kwargs), partial(way.turn, heads_at=heads_at)):
            leaves = [x.detach().requires_grad_() for x in drawn]
            try:
                out = turn(*leaves, cos, sin)
                weights = [numbers(x.shape, x.detach()) for x in out]
                found.append([*out, *torch.autograd.grad(out, leaves, weights)])
            except torch.OutOfMemoryError:
                raise
            except Exception:  # a function of other arguments, or a way that does not fit
                return False
        for i, (a, b) in enumerate(zip(*found, strict=True)):
            if a.shape != b.shape or a.dtype != b.dtype or (i < 2 and a.stride() != b.stride()):
                return False
            if not near(b, a):
                return False
    return True
