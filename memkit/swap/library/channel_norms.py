"""Norms over the channels of images [N, C, H, W], as model libraries write them out, and of sequences and volumes.

Weights are of shape (C,), (C, 1, 1) or (1, C, 1, 1), which say of how many dimensions inputs are. The result is
channels_last where the input is, else contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ... import functional as F
from ...functional._norm import Denominator
from ..layers import Norm
from .norms import (
    GAINS,
    LEAST_LENGTH,
    OFFSETS,
    eps_of,
    holds_others,
    input_dims,
    made_of,
    parameter_of,
    row_of,
)
from .twin import Twin

PIXEL_EPS = 1e-8
"""Of a norm of pixels that holds none (Karras et al. 2018)."""


class ChannelNorm(Norm, Twin):
    """Weights of another dtype would decide the result's, and are left to stock."""

    def _stays(self, input: Tensor) -> bool:
        weight, bias = self._weight(), row_of(parameter_of(self, *OFFSETS))
        promotes = any(each is not None and each.dtype != input.dtype for each in (weight, bias))
        return promotes or input.dim() != input_dims(self) or super()._stays(input)

    @staticmethod
    def row_shape(module: Any, shape: Sequence[int]) -> tuple[int, ...]:
        """By its weight, as stock may take other inputs too."""
        weight = row_of(parameter_of(module, "weight", *GAINS))
        return tuple(shape[1:2] if weight is None else weight.shape)

    def _weight(self) -> Tensor | None:
        return row_of(parameter_of(self, "weight", *GAINS))


class ChannelLayerNorm(ChannelNorm, kind="channel_layer_norm"):
    _op = "layer_norm"
    _denominator: Denominator = "root"

    def _memkit(self, input: Tensor) -> Tensor:
        weight, bias = self._weight(), row_of(parameter_of(self, *OFFSETS))
        shape, eps, denominator = input.shape[1:2], eps_of(self), self._denominator
        return F.layer_norm(input, shape, weight, bias, eps, dim=1, denominator=denominator, save=self.save)


class DeviationChannelLayerNorm(ChannelLayerNorm, kind="channel_layer_norm/deviation"):
    """(x - mean) / (deviation + eps), as in older ones of lucidrains' diffusion models."""

    _denominator = "deviation"


class ChannelRMSNorm(ChannelNorm, kind="channel_rms_norm"):
    _op = "rms_norm"

    def _memkit(self, input: Tensor) -> Tensor:
        eps = PIXEL_EPS if (own := eps_of(self)) is None else own
        return F.rms_norm(input, input.shape[1:2], self._weight(), eps, dim=1, save=self.save)


class ChannelNormalized(ChannelNorm, kind="channel_normalized"):
    """sqrt(C) * x / max(|x|, 1e-12) * gamma, as in lucidrains' diffusion models."""

    _op = "rms_norm"

    def _memkit(self, input: Tensor) -> Tensor:
        eps = LEAST_LENGTH**2 / input.shape[1]
        return F.rms_norm(input, input.shape[1:2], self._weight(), eps, dim=1, save=self.save)


class OffsetChannelNormalized(ChannelNormalized, kind="channel_normalized+1"):
    def _weight(self) -> Tensor | None:
        weight = super()._weight()
        return None if weight is None else made_of(weight + 1, weight)


def channel_norm_kinds(module: nn.Module) -> tuple[str, ...]:
    """Which twins may be it, by its looks."""
    name = type(module).__name__.lower().removesuffix("2d")
    rms = name.endswith(("rmsnorm", "pixelnorm"))
    held = {
        name: each
        for name, each in (*module._parameters.items(), *module._buffers.items())
        if each is not None
    }
    known = {"weight", *GAINS, *(() if rms else OFFSETS)}
    if (
        not (rms or name.endswith("layernorm"))
        or isinstance(module, nn.LayerNorm | nn.RMSNorm)
        or module._modules
        or holds_others(module)
        or not held.keys() <= known
        or not all(map(_is_row, held.values()))
        or len({each.shape for each in held.values()}) > 1
    ):
        return ()
    if not rms:
        known_eps = held and eps_of(module) is not None
        return ("channel_layer_norm", "layer_norm_2d", "channel_layer_norm/deviation") if known_eps else ()
    written = ("channel_rms_norm",) if name.endswith("pixelnorm") or eps_of(module) is not None else ()
    return (*written, "channel_normalized", "channel_normalized+1") if held else written


def _is_row(parameter: Tensor) -> bool:
    """Whether it has a number for each channel."""
    if parameter.dim() < 2:
        return parameter.dim() == 1
    first, second = parameter.shape[:2]
    return (second if first == 1 else first) == parameter.numel()
