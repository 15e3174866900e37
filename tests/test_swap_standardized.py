"""Convolutions that standardize their weight in each call: inside `lean()` it is made again."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from swap_cases import assert_as_stock, step
from torch import nn

from memkit import swap, unswap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")


class BiTConv2d(nn.Conv2d):
    """As in timm and transformers, with a padding of its own."""

    def forward(self, x):
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = nn.functional.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-6)
        weight = weight.reshape_as(self.weight)
        x = F.pad(x, (1, 0, 1, 0))
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ScaledConv2d(nn.Conv2d):
    """As in NFNets."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def forward(self, x):
        rows, gain = self.weight.reshape(1, self.out_channels, -1), (self.gain * 0.3).view(-1)
        weight = F.batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0, eps=1e-6)
        return self._conv_forward(x, weight.reshape_as(self.weight), self.bias)


KINDS = pytest.mark.parametrize("kind", [BiTConv2d, ScaledConv2d])


def model_of(kind):
    return nn.Sequential(kind(4, 8, 3, bias=False), nn.ReLU(), kind(8, 8, 3, groups=2, stride=2)).double()


def images(dtype=torch.float64):
    return torch.randn(2, 4, 9, 9, dtype=dtype, requires_grad=True)


@KINDS
@pytest.mark.parametrize("by_sample", [False, True])
def test_as_stock(kind, by_sample):
    model, x = model_of(kind), images()
    report = swap(model, sample=x if by_sample else None, lean="call")
    assert {row.path for row in report.changed} >= {"0", "2"}
    for _ in range(2):
        assert_as_stock(model, x)
        model.eval()


@KINDS
def test_the_standardized_weight_is_not_kept(kind):
    model, x = model_of(kind).float(), images(torch.float32)
    stock = measure(lambda: model(x)).saved
    convolutions = model[0], model[2]
    swap(model, lean="call", ops={"conv2d"})
    kept = measure(lambda: model(x)).saved
    weights = sum(conv.weight.nbytes for conv in convolutions)
    statistics = 2 * sum(conv.out_channels for conv in convolutions)
    assert stock - kept == weights - statistics * (8 - 4)  # float64 instead of float32


@KINDS
def test_without_lean_it_is_stock(kind):
    model, x = model_of(kind), images()
    model[1] = nn.Identity()
    stock = measure(lambda: model(x)).saved
    assert not swap(model).changed
    swap(model, lean=True)
    assert measure(lambda: model(x)).saved == stock
    assert_as_stock(model, x)


def test_under_autocast_and_with_other_statistics():
    class Running(nn.Conv2d):
        def forward(self, x):
            mean, variance = x.new_zeros(self.in_channels), x.new_ones(self.in_channels)
            return super().forward(F.batch_norm(x, mean, variance, None, None, self.training))

    model = nn.Sequential(Running(4, 4, 3))
    swap(model, lean="call")
    x = images(torch.float32)
    assert_as_stock(model, x, rtol=1e-5, atol=1e-6)
    model = model_of(BiTConv2d).float()
    swap(model, lean="call")
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_stock(model, x, rtol=0, atol=0)


@KINDS
def test_copies_pickles_and_back(kind):
    model, x = model_of(kind), images()
    swap(model, lean="call")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(step(copied, x), step(model, x))
    unswap(model)
    assert type(model[0]) is kind
    assert "_swap" not in vars(model[0])
