"""swap: hooks of a model see nothing of what its layers are verified with."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit import swap
from memkit.swap.untouched import without_hooks

WIDTH = 16


def hooked(model: Any, calls: list[str]) -> None:
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append("forward"))
        module.register_forward_pre_hook(lambda *_: calls.append("before"))
        module.register_full_backward_hook(lambda *_: calls.append("backward"))
    for parameter in model.parameters():
        parameter.register_hook(lambda _: calls.append("gradient"))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class StarReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.relu(x) ** 2 + self.bias


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("kind", [FeedForward, RMSNorm, StarReLU])
def test_hooks_are_not_called_while_a_layer_is_verified(kind: type[nn.Module], lean: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, WIDTH))
    calls: list[str] = []
    hooked(model, calls)
    swap(model, lean=lean)
    assert not calls
    assert lean or kind is StarReLU or type(model[1]) is not kind
    x = torch.randn(3, WIDTH, requires_grad=True)
    model(x).square().sum().backward()
    assert {*calls} == {"forward", "before", "backward", "gradient"}
    assert calls.count("gradient") == len(list(model.parameters()))
    assert calls.count("forward") == len(list(model.modules()))


def test_hooks_can_be_removed_after_a_swap() -> None:
    model: Any = nn.Sequential(FeedForward())
    calls: list[str] = []
    handles = [
        model[0].fc1.register_forward_hook(lambda *_: calls.append("")),
        model[0].fc1.weight.register_hook(lambda _: calls.append("")),
    ]
    swap(model)
    for handle in handles:
        handle.remove()
    model(torch.randn(3, WIDTH)).sum().backward()
    assert not calls
    assert not model[0].fc1._forward_hooks


def halved(factor: float, module: nn.Module, given: Any) -> Any:
    return tuple(factor * x for x in given)


def test_hooks_that_make_a_weight_stay() -> None:
    linear = torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
    linear.register_forward_pre_hook(partial(halved, 0.5))
    linear.weight_g.register_hook(lambda gradient: 2 * gradient)
    before = dict(linear._forward_pre_hooks)
    assert len(before) == 2
    with without_hooks(linear):
        assert len(linear._forward_pre_hooks) == 1
        assert not linear.weight_g._backward_hooks
    assert dict(linear._forward_pre_hooks) == before
    x = torch.randn(3, WIDTH)
    linear(x).sum().backward()
    doubled, linear.weight_g.grad = linear.weight_g.grad, None
    linear.weight_g._backward_hooks.clear()
    linear(x).sum().backward()
    torch.testing.assert_close(doubled, 2 * linear.weight_g.grad)
