"""What libraries write out in elementwise operators, each of which keeps what it is given.

Inside :class:`memkit.lean` the input alone is kept and backward runs the library's own lines again, to the bit: gates of
mixtures of experts that are none of memkit's (with limits, as GPT-OSS has them), and activations with parameters. What
convolutions standardize (`standardized.py`) and activations called as functions (`functions.py`) are made again by the
context itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..._lean import is_lean
from .activations import library_activation
from .attention import is_attention
from .functions import Functions, calls_functions, only_attends
from .scans import Scan, calls_scan
from .standardized import StandardizedConv, is_standardized
from .twin import Twin, checkpointed, own_tensors

ACTIVATIONS = "XIELUActivation", "Snake1d", "SnakeBeta"
"""How names end of classes that call no other modules, which might work in place."""


def may_be_idle(module: nn.Module, kind: str) -> bool:
    """Whether a run says if its twin did anything (`served`)."""
    return kind == Functions.kind and only_attends(module)


class ActivationAgain(Twin, kind="activation_again"):
    def forward(self, *given: Any, **named: Any) -> Any:
        return _again(self._stock_forward, given, named, [*self.parameters(), *self.buffers()])


class GateAgain(Twin, kind="gate_again"):
    def _apply_gate(self, *given: Any, **named: Any) -> Any:
        stock: Any = super()
        return _again(stock._apply_gate, given, named, own_tensors(self, stock._apply_gate))


def made_again(module: nn.Module, names: frozenset[str]) -> str:
    """The kind of twin that makes it again, if one does."""
    cls = type(module)
    if "gated" in names and hasattr(cls, "_apply_gate"):
        return GateAgain.kind
    if "attention" in names and calls_scan(cls):
        return Scan.kind
    if "conv2d" in names and is_standardized(cls):
        return StandardizedConv.kind
    if "act_linear" in names and cls.__name__.endswith(ACTIVATIONS):
        return ActivationAgain.kind
    others = is_attention(cls) or library_activation(module) is not None
    return Functions.kind if calls_functions(module, names) and not others else ""


def _again(
    function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any], reads: list[Tensor]
) -> Any:
    alone = len(given) == 1 and not named and isinstance(given[0], Tensor)
    if not (alone and is_lean() and torch.is_grad_enabled() and given[0].requires_grad):
        return function(*given, **named)
    return checkpointed(function, *given, reads=reads)
