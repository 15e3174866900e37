"""What is known of layers from their source. Model libraries' layers get their rows here."""

from __future__ import annotations

from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Recipe(NamedTuple):
    """How a layer applies its activation."""

    attribute: str
    """Holds the activation: a function or a module."""
    caller: CodeType
    """Calls it, keeps its input in no more than one variable and drops that, and does not change its output."""
    then: tuple[str, ...]
    """The modules that take the output, in order."""

    def followers(self, layer: nn.Module) -> list[nn.Module]:
        return [getattr(layer, name) for name in self.then]


RECIPES: dict[type[nn.Module], Recipe] = {
    layer: Recipe("activation", layer._ff_block.__code__, ("dropout", "linear2"))
    for layer in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
}

CALLERS: set[CodeType] = set(
    {nn.Sequential.forward.__code__, *(recipe.caller for recipe in RECIPES.values())}
)
"""Code whose source was read: see `Recipe.caller`."""

FUNCTIONS: dict[Any, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    F.leaky_relu: "leaky_relu",
    F.elu: "elu",
    F.selu: "selu",
    torch.selu: "selu",
    F.celu: "celu",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    F.softplus: "softplus",
    F.relu6: "relu6",
    F.hardtanh: "hardtanh",
    F.hardsigmoid: "hardsigmoid",
    F.gelu: "gelu",
    F.silu: "silu",
    F.mish: "mish",
    F.hardswish: "hardswish",
}
"""Functions that a layer may hold, and which activation each is with its default arguments."""
