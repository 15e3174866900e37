"""Feed-forward networks of torch.nn: an `nn.Sequential` of Linears and activations, and that of its transformer layers.

A dropout between activation and Linear makes a new tensor, so that both the activation's input and the Linear's are kept.
The twin runs the three as one, which keeps the input alone. Without dropout other recipes do as much: in place, where the
Linear keeps what the activation returns; and for two slopes, of which a bit tells.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layers import LINEARS, is_linear
from ..recipes import RECIPES
from ..types import TWO_SLOPES
from .activations import activation_of
from .mlps import run
from .twin import Twin, computes_in

SIMPLE = {*LINEARS, nn.Dropout, nn.Identity, nn.LayerNorm, nn.RMSNorm}
"""What may stand beside activations in a Sequential that is run in another way."""


class Sequence(Twin, kind="sequence"):
    saved = "h"

    def forward(self, input: Tensor) -> Tensor:
        steps = tuple(self._modules.values())
        if not computes_in(input, *steps):
            return self._stock_forward(input)
        return run(steps, input, dropout=True)

    @staticmethod
    def kept(module: Any, shape: torch.Size, lean: bool) -> int:
        rows = shape.numel() // max(1, shape[-1])
        return rows * sum(int(linear.in_features) for _, linear in pairs_of(module))


class TransformerLayer(Twin, kind="ff_block"):
    saved = "h"

    def _ff_block(self, x: Tensor) -> Tensor:
        module: Any = self
        steps = steps_of(module)
        if not computes_in(x, *steps):
            return super()._ff_block(x)  # type: ignore[misc,no-any-return]
        return run(steps, x, dropout=True)

    @staticmethod
    def kept(module: Any, shape: torch.Size, lean: bool) -> int:
        return shape.numel() // max(1, shape[-1]) * int(module.linear2.in_features)


def steps_of(layer: Any) -> tuple[Any, ...]:
    """Of one of torch.nn's transformer layers, what its feed-forward network calls in turn; a function as it is."""
    last = layer.dropout3 if isinstance(layer, nn.TransformerDecoderLayer) else layer.dropout2
    return layer.linear1, layer.activation, layer.dropout, layer.linear2, last


def is_ff_layer(module: Any) -> bool:
    """Whether it is such a layer, and its network keeps less when run as one."""
    if type(module) not in RECIPES:
        return False
    first, act, dropout, last, _ = steps_of(module)
    known = is_linear(first) and is_linear(last) and type(dropout) is nn.Dropout
    return known and _gains(act, dropout)


def pairs_of(module: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Activations of a Sequential and the Linears that run as one with them, if one of them keeps less so."""
    if type(module) is not nn.Sequential:
        return []
    children: list[Any] = [child for child in module._modules.values() if child is not None]
    if not all(type(child) in SIMPLE or activation_of(child) for child in children):
        return []
    pairs, gains = [], False
    for before, act, *behind in zip(
        children, children[1:], children[2:], [*children[3:], None], strict=False
    ):
        if not is_linear(before) or not activation_of(act):
            continue
        if is_linear(behind[0]):
            pairs.append((act, behind[0]))
        elif type(behind[0]) is nn.Dropout and is_linear(behind[1]):
            pairs.append((act, behind[1]))
            gains = gains or _gains(act, behind[0])
    return pairs if gains else []


def _gains(act: Any, dropout: nn.Dropout) -> bool:
    known = activation_of(act)
    return known is not None and known[0] not in TWO_SLOPES and dropout.p > 0
