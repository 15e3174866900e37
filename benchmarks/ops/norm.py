"""The norms. Rows of 1,024 elements, images of 64 channels with 16 x 16 pixels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

import memkit.functional as M
from memkit._reference_norm import STOCK

from .op import Op, Size

COLUMNS = 1024
CHANNELS, SIDE = 64, 16


def parameters(count: int, length: int) -> Callable[[Size], list[Tensor]]:
    """A weight near 1, and with `count` 2 a small bias."""

    def make(size: Size) -> list[Tensor]:
        made = [1 + 0.1 * size.normal(length, part=8), 0.1 * size.normal(length, part=9)]
        return [each.requires_grad_() for each in made[:count]]

    return make


def rows(name: str, inputs: int, count: int) -> Op:
    options: dict[str, Any] = {"eps": 1e-6 if "rms" in name else 1e-5}

    def call(function: Callable[..., Any], *tensors: Tensor, **more: Any) -> Any:
        return function(*tensors[:inputs], (COLUMNS,), *tensors[inputs:], options["eps"], **more)

    return Op(
        partial(call, STOCK[name]),
        partial(call, getattr(M, name)),
        partial(call, getattr(M, name), inplace=True) if inputs == 1 else None,
        lambda size: [size.normal(-1, COLUMNS, part=i) for i in range(inputs)],
        parameters(count, COLUMNS),
        passes=2 * inputs,
    )


def image(size: Size) -> list[Tensor]:
    return [size.normal(-1, CHANNELS, SIDE, SIDE)]


def group(function: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return function(x, 8, weight, bias, 1e-5)


def batch(function: Callable[..., Any], act: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return function(x, None, None, weight, bias, True, 0.1, 1e-5, act=act)


def channels(call: Callable[..., Any], name: str, *args: Any) -> Op:
    return Op(
        partial(call, STOCK[name], *args),
        partial(call, getattr(M, name), *args),
        None,
        image,
        parameters(2, CHANNELS),
    )


def over_channels(name: str) -> Op:
    """Stock has norms over the last dimension alone."""

    def stock(x: Tensor, *parameters: Tensor) -> Tensor:
        return STOCK[name](x.permute(0, 2, 3, 1), (CHANNELS,), *parameters, 1e-5).permute(0, 3, 1, 2)

    def ours(x: Tensor, *parameters: Tensor) -> Tensor:
        return getattr(M, name)(x, (CHANNELS,), *parameters, eps=1e-5, dim=1)  # type: ignore[no-any-return]

    return Op(stock, ours, None, image, parameters(2 if name == "layer_norm" else 1, CHANNELS))


def annotated(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Rush, "The Annotated Transformer", 2018."""
    return weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + bias


def by_sample_deviation(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return M.layer_norm(x, (COLUMNS,), weight, bias, 1e-6, denominator="sample_deviation")


def row(size: Size) -> list[Tensor]:
    return [size.normal(-1, COLUMNS)]


OPS = {
    "layer_norm": rows("layer_norm", 1, 2),
    "rms_norm": rows("rms_norm", 1, 1),
    "layer_norm, channels": over_channels("layer_norm"),
    "rms_norm, channels": over_channels("rms_norm"),
    "layer_norm, x.std() + eps": Op(annotated, by_sample_deviation, None, row, parameters(2, COLUMNS)),
    "normalize": Op(partial(F.normalize, dim=-1), partial(M.normalize, dim=-1), None, row),
    "add_layer_norm": rows("add_layer_norm", 2, 2),
    "add_rms_norm": rows("add_rms_norm", 2, 1),
    "group_norm": channels(group, "group_norm"),
    "batch norm, relu": channels(batch, "batch_norm_act", "relu"),
    "batch norm, silu": channels(batch, "batch_norm_act", "silu"),
}
