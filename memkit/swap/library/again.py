"""What libraries write out in elementwise operators, each of which keeps what it is given.

Inside :class:`memkit.lean` the input alone is kept and backward runs the library's own lines again, to the bit: gates of
mixtures of experts that are none of memkit's (with limits, as GPT-OSS has them), and activations with parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..._lean import is_lean
from .twin import Twin

ACTIVATIONS = frozenset({"XIELUActivation"})
"""Names of classes that call no other modules, which might work in place."""


class ActivationAgain(Twin, kind="activation_again"):
    def forward(self, input: Tensor) -> Tensor:
        return _again(self._stock_forward, input)


class GateAgain(Twin, kind="gate_again"):
    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        return _again(super()._apply_gate, gate_up_out)  # type: ignore[misc]


def made_again(module: nn.Module, names: frozenset[str]) -> str:
    """The kind of twin that makes it again, if one does."""
    cls = type(module)
    if "gated" in names and hasattr(cls, "_apply_gate"):
        return GateAgain.kind
    return ActivationAgain.kind if "act_linear" in names and cls.__name__ in ACTIVATIONS else ""


def _again(function: Callable[[Tensor], Any], input: Tensor) -> Tensor:
    if not (is_lean() and torch.is_grad_enabled() and input.requires_grad):
        return cast(Tensor, function(input))
    return cast(Tensor, checkpoint(function, input, use_reentrant=False, determinism_check="none"))
