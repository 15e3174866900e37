"""Blocks of convolutional networks. Residual ones: two or three convolutions, the sum with the input, then an activation.

Each batch norm runs with the activation behind it. Inside `memkit.lean` the sum is a tensor of its own, as what was changed
in place afterwards could not be rebuilt; outside it is written into the last batch norm's result, as stock does.

DenseNet's: twice a batch norm, an activation and a convolution, of all that the layers before have given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import _C
from ..._lean import is_lean
from ..layers import serves
from .activations import activation_of
from .mlps import act_alone, run
from .twin import Twin


class Block(NamedTuple):
    """Children in the order of their calls, the last one after the sum. Those that are None are left out."""

    names: tuple[str, ...]

    @property
    def op(self) -> str:
        return "batch_norm_act"


BLOCKS = (
    Block(("conv1", "bn1", "relu", "conv2", "bn2", "relu")),  # torchvision
    Block(("conv1", "bn1", "relu", "conv2", "bn2", "relu", "conv3", "bn3", "relu")),
    Block(("conv1", "bn1", "drop_block", "act1", "aa", "conv2", "bn2", "se", "drop_path", "act2")),  # timm
    Block(
        (
            *("conv1", "bn1", "act1", "conv2", "bn2", "drop_block", "act2", "aa"),
            *("conv3", "bn3", "se", "drop_path", "act3"),
        )
    ),
)
OPTIONAL = frozenset({"se", "drop_path", "downsample", "drop_block", "aa"})


class ResidualBlock(Twin, kind="residual"):
    _swap: Block
    saved = "input of each norm"

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        steps = [step for name in self._swap.names if (step := getattr(module, name)) is not None]
        act = activation_of(steps[-1])
        if act is None or not serves(x):
            return self._stock_forward(x)
        out = run(steps[:-1], x, dropout=False)
        shortcut = x if module.downsample is None else module.downsample(x)
        if is_lean():
            return act_alone(out + shortcut, *act)
        out += shortcut
        return steps[-1](out)  # type: ignore[no-any-return]

    @staticmethod
    def kept(module: Any, shape: torch.Size, lean: bool) -> int:
        layers = [module._modules.get(name) for name in ("conv1", "conv2", "conv3")]
        return _kept(sum(getattr(layer, "out_channels", 0) for layer in layers), shape, lean)


DENSE = ("norm1", "relu1", "conv1", "norm2", "relu2", "conv2")


class DenseLayer(Twin, kind="dense_layer"):
    _swap: Any
    saved = "input of each norm"

    def forward(self, input: Any) -> Tensor:
        module: Any = self
        given = [input] if isinstance(input, Tensor) else input
        # What is joined says it of all of them: there are as many as layers before.
        if (
            module.memory_efficient
            or not all(map(serves, given[:1]))
            or not serves(joined := torch.cat(given, 1))
        ):
            return self._stock_forward(input)
        if is_lean():
            _C.note_joined(joined, given)
        out = run([getattr(self, name) for name in DENSE], joined, dropout=False)
        if module.drop_rate > 0:
            out = nn.functional.dropout(out, module.drop_rate, self.training)
        return out

    @staticmethod
    def kept(module: Any, shape: torch.Size, lean: bool) -> int:
        return _kept(module.conv1.in_channels + module.conv1.out_channels, shape, lean)


def _kept(channels: int, shape: torch.Size, lean: bool) -> int:
    """Elements of each norm's input, of all their channels, and outside of `memkit.lean` of each activation's result; all as
    high as the output."""
    return shape.numel() // shape[1] * channels * (1 if lean else 2)


def is_dense_layer(module: nn.Module) -> bool:
    """By its children, and a method that joins what it is given."""
    joins: Any = getattr(type(module), "bn_function", None)
    return module._modules.keys() == set(DENSE) and joins is not None and "cat" in joins.__code__.co_names
