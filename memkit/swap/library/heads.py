"""The loss of transformers' language models straight from what their last layer is given, by `linear_cross_entropy`.

Only where it is asked for by that name: in training with labels the model then returns no logits, which never exist whole.
Its last layer hands out what stands for them, which the loss takes (losses.py) and nothing else can use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ... import functional as F
from ..._lean import in_transform
from ..layers import is_linear, serves
from .rotary import served
from .twin import Twin, in_forward_mode, is_plain, is_tracing

HALVES = torch.float16, torch.bfloat16
INSTEAD = 'swap: expected, with "linear_cross_entropy", nothing but the loss to use the logits in training with labels'

_now = local()
_kept = 0


@contextmanager
def with_logits() -> Iterator[None]:
    """Inside, models return them."""
    global _kept
    _kept += 1
    try:
        yield
    finally:
        _kept -= 1


class Logits:
    """What stands for the result of the last layer, or for a multiple of it, or for cap * tanh(a multiple)."""

    def __init__(self, head: Any, hidden: Tensor, times: float = 1.0, cap: float | None = None) -> None:
        self._head, self._hidden, self._times, self._cap = head, hidden, times, cap
        self.device = hidden.device

    def contiguous(self) -> Logits:
        return self

    def float(self) -> Logits:
        """The loss is taken in float32."""
        return self

    def tanh(self) -> Logits:
        if self._cap is not None:
            raise TypeError(INSTEAD)
        return Logits(self._head, self._hidden, self._times, 1.0)

    def __mul__(self, number: Any) -> Logits:
        if not isinstance(number, int | float):
            raise TypeError(INSTEAD)
        if self._cap is not None:
            return Logits(self._head, self._hidden, self._times, self._cap * number)
        return Logits(self._head, self._hidden, self._times * number)

    __rmul__ = __mul__

    def __truediv__(self, number: Any) -> Logits:
        if not isinstance(number, int | float):
            raise TypeError(INSTEAD)
        return self * (1 / number)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{INSTEAD}, got .{name}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        raise TypeError(f"{INSTEAD}, got {getattr(function, '__name__', function)}")

    def loss(self, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
        kind, dtype = self.device.type, self._hidden.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        half = dtype in HALVES
        hidden, bias = self._hidden.flatten(0, -2), self._head.bias
        times = self._times * (self._cap or 1.0)  # cap * tanh(times * x / cap)
        if abs(times - 1) > 1e-12:
            hidden, bias = hidden * times, None if bias is None else bias * times
        with torch.autocast(kind, dtype if half else None, enabled=half):  # in which the loss is float32
            return F.linear_cross_entropy(
                hidden,
                self._head.weight,
                target,
                linear_bias=bias,
                ignore_index=ignore_index,
                reduction=reduction,
                softcap=self._cap,
            )


class Head(Twin, kind="head"):
    def forward(self, input: Tensor) -> Any:
        if getattr(_now, "head", None) is self and serves(input) and input.dtype != torch.float64:
            return Logits(self, input)
        return self._stock_forward(input)


class WithoutLogits(Twin, kind="without logits"):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: Any = type(self)._stock_forward
        head = head_of(self)
        if kwargs.get("labels") is None or not (isinstance(head, Head) and is_plain(head) and _may(self)):
            return forward(self, *args, **kwargs)
        outer, _now.head = getattr(_now, "head", None), head
        try:
            out = _without(forward(self, *args, **kwargs))
            served.add(self)
            return out
        finally:
            _now.head = outer


def head_of(model: Any) -> nn.Module | None:
    """The layer that gives a language model's logits, where that is a Linear and nothing else."""
    if not hasattr(model, "get_output_embeddings"):
        return None
    head = model.get_output_embeddings()
    whole = is_linear(head) and type(head._parameters.get("weight")) is nn.Parameter
    return head if whole or isinstance(head, Head) else None


def _may(model: nn.Module) -> bool:
    return (
        model.training
        and torch.is_grad_enabled()
        and not (_kept or is_compiling() or is_tracing() or in_transform() or in_forward_mode())
    )


def _without(out: Any) -> Any:
    if isinstance(out, Logits):
        raise RuntimeError(f"{INSTEAD}, got a model without a loss")
    if isinstance(out, Mapping):  # which allows nothing to be taken out
        return type(out)(**{name: each for name, each in out.items() if not isinstance(each, Logits)})
    return tuple(each for each in out if not isinstance(each, Logits)) if type(out) is tuple else out


def loss_of(out: Any) -> Any:
    """Of what a language model returns. None without labels."""
    if isinstance(out, Mapping):
        return out.get("loss")
    return out[0] if type(out) is tuple and isinstance(out[0], Tensor) and out[0].dim() == 0 else None
