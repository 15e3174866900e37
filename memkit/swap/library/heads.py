"""The loss of transformers' language models straight from what their last layer is given, by `linear_cross_entropy`.

Only where it is asked for by that name: in training with labels the model then returns no logits, which never exist whole.
Its last layer hands out what stands for them (losses.py), where the model's own forward calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from sys import _getframe
from threading import local
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ... import _C
from ..._modes import in_forward_mode, in_transform, is_tracing
from ..._sharding import is_dtensor
from ..layers import is_linear, serves
from ..types import caller
from .losses import INSTEAD, Logits, holds, take_loss
from .rotary import served
from .twin import Twin, is_plain, undecorated

_now = local()
_kept = 0


class _Asked(NamedTuple):
    """The layer whose logits the loss will take, when this code calls it for this model."""

    head: nn.Module
    code: CodeType
    model: nn.Module


@contextmanager
def with_logits() -> Iterator[None]:
    """Inside, models return them."""
    global _kept
    _kept += 1
    try:
        yield
    finally:
        _kept -= 1


class Head(Twin, kind="head"):
    def forward(self, input: Tensor) -> Any:
        asked: _Asked | None = getattr(_now, "asked", None)
        if asked is None or asked.head is not self or not serves(input) or input.dtype == torch.float64:
            return self._stock_forward(input)
        if _is_coded(self._parameters.get("weight")):  # since the model was swapped
            return self._stock_forward(input)
        if caller(_getframe(2)) is not asked.code:  # past what names the argument as stock does
            return self._stock_forward(input)
        served.add(asked.model)
        return Logits(self, input)


class WithoutLogits(Twin, kind="without logits"):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: Any = type(self)._stock_forward
        outer = getattr(_now, "asked", None)
        head = head_of(self) if kwargs.get("labels") is not None and _may(self) else None
        if outer is None and head is None:
            return forward(self, *args, **kwargs)
        ours = isinstance(head, Head) and is_plain(head)
        _now.asked = _Asked(head, undecorated(forward).__code__, self) if head is not None and ours else None
        try:
            out = _without(forward(self, *args, **kwargs))
        finally:
            _now.asked, loss = outer, take_loss()
        if loss is not None:
            # With the frames of the forward gone, the last norm's result is, where nobody asked for it.
            _C.take_place_of_norm(loss)
        return out


def _is_coded(weight: Tensor | None) -> bool:
    """Quantized, say: of a class with operators of its own, which ours is not among."""
    own = weight is not None and type(weight).__torch_dispatch__ is not nn.Parameter.__torch_dispatch__
    return own and not is_dtensor(weight)


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
        and holds(model)  # a user may have set another loss since
        and not (_kept or is_compiling() or is_tracing() or in_transform() or in_forward_mode())
    )


def _without(out: Any) -> Any:
    if isinstance(out, Logits):
        raise RuntimeError(f"{INSTEAD}, got a model without a loss")
    if isinstance(out, Mapping):  # which allows nothing to be taken out
        return type(out)(**{name: each for name, each in out.items() if not isinstance(each, Logits)})
    return tuple(each for each in out if not isinstance(each, Logits)) if type(out) is tuple else out


def but_logits(out: Any) -> Any:
    """Of what a model returns, all that it returns without logits too; of a tuple the loss."""
    if isinstance(out, Mapping):
        return {name: each for name, each in out.items() if name != "logits"}
    return out[0] if type(out) is tuple and out else out
