"""timm's norms of images, which call the activation behind them themselves.

A batch norm and the activation are one operator. Other norms bring as much inside :class:`memkit.lean` alone, where the
activation is out of place, so that its result can be made again from the norm's input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ... import functional as F
from ..._hooks import only_read
from ..._lean import is_lean
from ...functional._norm import output_dtype
from ...nn.norm import batch_norm_of
from ..layers import Choice, serves
from .activations import activation_of
from .mlps import act_alone
from .twin import MIXINS, Twin


class NormAct(Twin):
    _swap: Choice
    _op: str
    saved = "input"

    def forward(self, input: Tensor) -> Tensor:
        if is_dynamo_compiling():  # compilers make a norm's result again
            return self._stock_forward(input)
        module: Any = self
        behind = _act_of(module)
        idle = type(behind) is nn.Identity and only_read(behind)
        act = (None, {}) if idle else activation_of(behind)
        drop = module._modules.get("drop")
        alone = drop is None or (type(drop) is nn.Identity and only_read(drop))
        if act is None or not alone or not serves(input) or output_dtype(input) != input.dtype:
            return self._stock_forward(input)
        return self._norm_act(input, *act)

    def _norm_act(self, input: Tensor, act: str | None, params: dict[str, float]) -> Tensor:
        module: Any = self
        if self._swap.exact and torch.is_autocast_enabled(input.device.type):  # stock's result is float32
            return self._stock_forward(input)
        if not is_lean():
            output: Tensor = _act_of(module)(self._norm(input))
            return output
        return self._norm(input) if act is None else act_alone(self._norm(input), act, params)

    def _norm(self, input: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def kept(module: Any, shape: torch.Size, lean: bool) -> int:
        return 0


def _act_of(norm: Any) -> Any:
    """By timm's name, or by transformers'."""
    return norm._modules.get("act") or norm.activation


class BatchNormAct(NormAct, kind="batch_norm_act"):
    _op = "batch_norm_act"

    @staticmethod
    def is_alone(norm: nn.Module) -> bool:
        return type(_act_of(norm)) is nn.Identity

    def _norm_act(self, input: Tensor, act: str | None, params: dict[str, float]) -> Tensor:
        if act is None and not is_lean():  # alone, all it brings is that lean() can rebuild its result
            return self._stock_forward(input)
        return batch_norm_of(self, input, act, params)


class GroupNormAct(NormAct, kind="group_norm_act"):
    _op = "group_norm"

    def _norm(self, input: Tensor) -> Tensor:
        module: Any = self
        return F.group_norm(input, module.num_groups, module.weight, module.bias, module.eps)


class LayerNormAct(NormAct, kind="layer_norm_act"):
    _op = "layer_norm"

    def _norm(self, input: Tensor) -> Tensor:
        module: Any = self
        shape = module.normalized_shape
        return F.layer_norm(input, shape, module.weight, module.bias, module.eps, save="input")


class LayerNormAct2d(LayerNormAct, kind="layer_norm_act_2d"):
    """Over the channels of [N, C, H, W]."""

    def _norm(self, input: Tensor) -> Tensor:
        return super()._norm(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def norm_op(kind: str) -> str:
    """Of any norm's twin, its name in `ops`."""
    twin: Any = MIXINS[kind]
    return str(twin._op)
