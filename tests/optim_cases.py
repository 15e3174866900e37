"""What the tests of the optimizers share: parameters, their gradients, every rule with its options, and comparisons."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit import optim

SHAPES = ((100, 70), (5000,), (3,), (64, 80), (), (0, 4))
RULES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "adamw": (optim.AdamW, torch.optim.AdamW, {}),
    "adamw-all": (
        optim.AdamW,
        torch.optim.AdamW,
        {"betas": (0.3, 0.9), "eps": 1e-3, "weight_decay": 0.3, "amsgrad": True, "maximize": True},
    ),
    "sgd": (optim.SGD, torch.optim.SGD, {}),
    "sgd-momentum": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "sgd-nesterov": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
each_rule = pytest.mark.parametrize("rule", RULES)
each_state = pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, "8bit"])


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def gradients(params: list[nn.Parameter], step: int) -> None:
    """The same for every dtype, up to rounding."""
    generator = torch.Generator().manual_seed(1000 + step)
    for i, p in enumerate(params):
        p.grad = ((torch.randn(p.shape, generator=generator) + 0.1) * 10.0**-i).to(p.dtype)


def train(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 50, start: int = 0
) -> None:
    for step in range(start, start + steps):
        gradients(params, step)
        optimizer.step()


def distance(a: list[nn.Parameter], b: list[nn.Parameter]) -> float:
    """The largest difference, in units of the last place of the tensors' largest values in a's dtype."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if x.numel():
            scale = 2.0 ** math.floor(math.log2(y.abs().max().item())) * torch.finfo(x.dtype).eps
            worst = max(worst, (x.double() - y.double()).abs().max().item() / scale)
    return worst


def equal(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for entry in optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors(optimizer)}
    return sum(storages.values())
