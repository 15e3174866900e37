"""Norms written with `torch.nn.functional.normalize`, and norms whose weight is called gamma, as x-transformers' are."""

import copy

import pytest
import torch
import torch.nn.functional as F
from swap_cases import assert_as_stock
from torch import nn

from memkit import swap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

WIDTH = 24


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.g = WIDTH**0.5, nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * self.g


class OffsetRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.gamma = WIDTH**0.5, nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * (self.gamma + 1)


class SimpleRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = WIDTH**0.5

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale


class LayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("beta", torch.randn(WIDTH))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.gamma, self.beta)


KINDS = [RMSNorm, OffsetRMSNorm, SimpleRMSNorm, LayerNorm]
kinds = pytest.mark.parametrize("kind", KINDS)


def model_of(kind, dtype=torch.float64):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, WIDTH)).to(dtype)


def rows(dtype=torch.float64):
    return torch.randn(3, 50, WIDTH, dtype=dtype)


@kinds
@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("by_sample", [False, True])
def test_as_stock(kind, lean, by_sample):
    model, x = model_of(kind), rows()
    report = swap(model, sample=x if by_sample else None, lean=lean)
    assert [row.path for row in report.changed] == ["1"]
    assert_as_stock(model, x)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_exact_as_stock_and_less_kept(kind, dtype):
    model, x = model_of(kind, dtype), rows(dtype)
    exact, stock = copy.deepcopy(model).double(), copy.deepcopy(model)
    swap(model, lean="call")
    assert measure(lambda: model(x)).saved < 0.8 * measure(lambda: stock(x)).saved

    def gradients(model, x):
        return [model(x), *torch.autograd.grad(model(x).square().sum(), list(model.parameters()))]

    for ours, theirs, true in zip(
        *(gradients(m, x.to(m[0].weight.dtype)) for m in (model, stock, exact)), strict=True
    ):
        error, stocks = ((each.double() - true).norm() for each in (ours, theirs))
        assert error <= 2 * stocks + 1e-7 * true.norm()


@kinds
def test_rows_of_zeros(kind):
    model = model_of(kind)
    swap(model, lean=False)
    x = torch.zeros(4, WIDTH, dtype=torch.float64, requires_grad=True)
    norm = model[1]
    theirs = torch.autograd.grad(type(norm)._stock.forward(norm, x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(norm(x).sum(), x), theirs)


def test_rows_of_another_width_are_stocks():
    """Whose square root it would not be."""
    norm = nn.Sequential(SimpleRMSNorm()).double()
    assert swap(norm).changed
    x = torch.randn(3, 2 * WIDTH, dtype=torch.float64)
    assert torch.equal(norm(x), F.normalize(x, dim=-1) * WIDTH**0.5)


def test_of_samples_is_left():
    class FirstRMSNorm(RMSNorm):
        def forward(self, x):
            return F.normalize(x, dim=0) * self.scale * self.g

    assert not swap(nn.Sequential(FirstRMSNorm())).changed
