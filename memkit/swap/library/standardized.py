"""Convolutions that standardize their weight in each call, as BiT's and NFNets do: stock keeps the standardized weight.

Inside :class:`memkit.lean` it is made again from the weight, which is there anyway. The twin runs the library's own forward
with memkit's batch norm in the place of PyTorch's, which takes the weight for one image with a channel an output.
"""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ... import functional as F
from ..._lean import is_lean
from ...functional._norm import output_dtype
from ..layers import serves
from .twin import Instead, Twin, undecorated, with_names


class StandardizedConv(Twin, kind="standardized_conv"):
    def forward(self, input: Tensor) -> Tensor:
        forward: Any = type(self)._stock_forward
        if is_lean() and torch.is_grad_enabled() and _calls_batch_norm(forward):
            forward = with_names(forward, **_with_our_norm(forward))
        return forward(self, input)  # type: ignore[no-any-return]


def is_standardized(cls: type[nn.Module]) -> bool:
    """Whether it is a convolution whose forward calls `batch_norm`."""
    return issubclass(cls, nn.Conv2d) and _calls_batch_norm(cls.forward)


def _calls_batch_norm(forward: Any) -> bool:
    forward = undecorated(forward)
    return type(forward) is FunctionType and "batch_norm" in forward.__code__.co_names


def _with_our_norm(forward: Any) -> dict[str, Any]:
    """The names by which it reaches `torch.nn.functional.batch_norm`."""
    functional = Instead(nn.functional, batch_norm=_batch_norm)
    stand_ins = {nn.functional: functional, nn: Instead(nn, functional=functional)}
    forward = undecorated(forward)
    names = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    return {
        name: stand_ins[held]
        for name, held in names.items()
        if isinstance(held, ModuleType) and held in stand_ins
    }


def _batch_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    ours = serves(input) and output_dtype(input) == input.dtype
    stock: Any = nn.functional.batch_norm
    return (F.batch_norm_act if ours else stock)(input, *args, **kwargs)
