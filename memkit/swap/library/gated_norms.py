"""RMS norms with a gate, as state space models and linear attention call them on what they computed.

    norm first: act(gate) * (weight * norm(x)), as in Qwen3-Next; else weight * norm(act(gate) * x), as in Mamba 2

Between two Linears stock keeps six tensors of x's size, in bfloat16 nine to eleven, as it computes in float32; the twin
keeps four, inside :class:`memkit.lean` two, x and gate. A norm in groups keeps one more, for its weight's gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import functional as F
from ..._lean import is_lean
from ..layers import serves
from .norms import eps_of, of_two_sizes
from .twin import Twin, numbers


class Gate(NamedTuple):
    act: str
    norm_first: bool


GATES = tuple(Gate(act, norm_first) for norm_first in (False, True) for act in ("silu", "sigmoid"))


class GatedNorm(Twin, kind="gated_norm"):
    _swap: Gate
    saved = "x, gate"

    def forward(self, *given: Any, **named: Any) -> Tensor:
        weight: Any = self.weight
        takes = len(given) == 2 and not named and all(map(serves, given)) and given[0].shape == given[1].shape
        if (
            not takes
            or not given[0].dtype == given[1].dtype == weight.dtype
            or torch.is_autocast_enabled(weight.device.type)
        ):
            return self._stock_forward(*given, **named)
        x, gate = given
        act: Any = self._swap.act
        if self._swap.norm_first:
            return F.gated(gate, self._normed(x, "input" if is_lean() else "auto"), act)
        return self._normed(F.gated(gate, x, act), "input")

    def _normed(self, x: Tensor, save: F.Save) -> Tensor:
        module: Any = self
        width, size = module.weight.numel(), group_size(module)
        if size == width:
            return F.rms_norm(x, (width,), module.weight, eps_of(module), save=save)
        groups = x.reshape(*x.shape[:-1], width // size, size)
        weight: Tensor = module.weight
        return weight * F.rms_norm(groups, (size,), None, eps_of(module), save=save).view(x.shape)

    @staticmethod
    def kept(module: Any, shape: torch.Size, lean: bool) -> int:
        return shape.numel() * (1 if lean else 2)


def group_size(module: Any) -> int:
    """Of the columns that one mean is taken over."""
    width = int(module.weight.numel())
    return int(getattr(module, "group_size", None) or width // getattr(module, "n_groups", 1))


def is_gated_norm(module: Any) -> bool:
    held = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    return (
        type(module).__name__.endswith(("NormGated", "GatedNorm"))
        and not module._modules
        and not module._buffers
        and held.keys() == {"weight"}
        and held["weight"].dim() == 1
        and eps_of(module) is not None
    )


def gated_norm_probe(module: Any) -> tuple[Tensor, Tensor]:
    x, gate = numbers((2, 2, 3, module.weight.numel()), module.weight)
    return of_two_sizes(x), gate.clone()
