"""What libraries write out in elementwise operators, each of which keeps what it is given.

Inside :class:`memkit.lean` the input alone is kept and backward runs the library's own lines again, to the bit: gates of
mixtures of experts that are none of memkit's (with limits, as GPT-OSS has them), and activations with parameters. What
convolutions standardize (`standardized.py`) and activations called as functions (`functions.py`) are made again by the
context itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import _C
from ... import functional as F
from ..._hooks import has_hooks
from ..._lean import is_lean
from ..._sharding import is_dtensor
from ..layers import serves
from ..untouched import without_hooks
from .activations import library_activation
from .attention import is_attention
from .checkpoint import checkpointed
from .functions import Dropouts, Functions, StockDropouts, functions_kind, why_idle
from .reads import why_stock_has_to_run
from .rerun import method_again
from .scans import Scan, calls_scan
from .standardized import StandardizedConv, is_standardized
from .twin import Twin, own_tensors

ACTIVATIONS = "XIELUActivation", "Snake1d", "SnakeBeta"
"""How names end of classes that call no other modules, which might work in place."""

LIBRARIES = "transformers.", "diffusers."
"""Whose such classes and gates read what nobody changes, also where their code does not tell."""


def may_be_idle(module: nn.Module, kind: str) -> str:
    """Why its twin did nothing, where a run says that (`served`)."""
    return why_idle(module) if kind in (Functions.kind, StockDropouts.kind) else ""


def drops(kind: str) -> bool:
    """Whether its twin has memkit's dropout in the place of stock's, which draws other numbers."""
    return kind in (Functions.kind, Dropouts.kind)


def needs_lean(kind: str) -> bool:
    """Whether its twin does anything inside memkit.lean() that it does not outside."""
    return kind != Dropouts.kind


class ActivationAgain(Twin, kind="activation_again"):
    def forward(self, *given: Any, **named: Any) -> Any:
        return _again(self._stock_forward, given, named, [*self.parameters(), *self.buffers()])


class StarReLU(Twin, kind="star_relu"):
    """scale · relu(x)² + bias, as one operator behind another, whose result is made again of x."""

    def forward(self, input: Any) -> Any:
        module: Any = self
        if is_lean() and torch.is_grad_enabled() and serves(input) and not has_hooks(module.relu):
            squared = F.relu_squared(input, save="input")
            out = _C.scale_shift(squared, module.scale, module.bias)
            return squared * module.scale + module.bias if out is None else out
        return module._stock_forward(input)


class GateAgain(Twin, kind="gate_again"):
    def _apply_gate(self, *given: Any, **named: Any) -> Any:
        stock: Any = super()
        return _again(stock._apply_gate, given, named, own_tensors(self, stock._apply_gate))


def made_again(module: nn.Module, names: frozenset[str]) -> str:
    """The kind of twin that makes it again, if one does."""
    cls = type(module)
    if "gated" in names and hasattr(cls, "_apply_gate") and not why_stock_has_to_run(module, "_apply_gate"):
        return GateAgain.kind
    if "attention" in names and calls_scan(cls):
        return Scan.kind
    if "conv2d" in names and is_standardized(cls):
        return StandardizedConv.kind
    if "act_linear" in names and cls.__name__.endswith(ACTIVATIONS) and not why_stock_has_to_run(module):
        return ActivationAgain.kind
    if "relu_squared" in names and cls.__name__ == "StarReLU" and _is_star_relu(module):
        return StarReLU.kind
    others = is_attention(cls) or library_activation(module) is not None
    return "" if others else functions_kind(module, names)


def _is_star_relu(module: Any) -> bool:
    """Yu et al., "MetaFormer baselines for vision", 2022."""
    held = module._parameters
    plain = held.keys() == {"scale", "bias"} and module._modules.keys() == {"relu"}
    if not plain or type(module.relu) is not nn.ReLU:
        return False
    if any(x is None or x.numel() != 1 or x.is_meta or is_dtensor(x) for x in held.values()):
        return False
    if why_stock_has_to_run(module):
        return False
    x = torch.linspace(-2, 2, 9).to(module.scale)
    with torch.no_grad(), without_hooks(module):
        ours = module.scale * x.relu().square() + module.bias
        try:
            theirs = type(module).forward(module, x.clone())
        except Exception:  # whatever it wants, it is not a function of one tensor
            return False
        return type(theirs) is Tensor and theirs.dtype == ours.dtype and torch.equal(theirs, ours)


def _again(method: Any, given: tuple[Any, ...], named: dict[str, Any], reads: list[Tensor]) -> Any:
    alone = len(given) == 1 and not named and isinstance(given[0], Tensor)
    if not (alone and is_lean() and torch.is_grad_enabled() and given[0].requires_grad):
        return method(*given, **named)
    if (out := method_again(method, given[0])) is not None:
        return out
    if not method.__module__.startswith(LIBRARIES):
        return method(*given)
    return checkpointed(method, *given, reads=reads)
