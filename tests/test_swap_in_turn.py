"""A batch norm and an activation in a sequence of a library's own class, which `lean()` makes again without a sample too."""

import copy

import pytest
import torch
from swap_cases import assert_as_stock, step
from torch import nn

from memkit import lean, swap, unswap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

C = 6


class ConvNormAct(nn.Sequential):
    """As torchvision has it."""

    def __init__(self, act):
        super().__init__(nn.Conv2d(C, C, 3, padding=1, bias=False), nn.BatchNorm2d(C), act)


class Net(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.first, self.second = ConvNormAct(act()), ConvNormAct(act())
        self.last = nn.Conv2d(C, C, 1)

    def forward(self, x):
        return self.last(self.second(self.first(x)))


ACTS = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "silu in place": lambda: nn.SiLU(inplace=True),
    "relu6 in place": lambda: nn.ReLU6(inplace=True),
    "hardswish": nn.Hardswish,
}
acts = pytest.mark.parametrize("act", ACTS)


def images():
    return torch.randn(4, C, 16, 16)


@acts
def test_the_norms_input_alone_is_kept(act):
    model, x = Net(ACTS[act]), images()
    report = swap(model, lean="call")
    assert sum(row.after == "in lean()" and row.saved == "input" for row in report) >= 2, report
    statistics = 2 * 16 * C
    assert measure(lambda: model(x)).saved <= 3 * x.nbytes + statistics


@acts
@pytest.mark.parametrize("mode", [True, "call"])
def test_as_stock(act, mode):
    model, x = Net(ACTS[act]).double(), images().double()
    swap(model, lean=mode)
    assert_as_stock(model, x)
    with lean():
        assert_as_stock(model, x)
        assert_as_stock(model.eval(), x)
    unswap(model)
    assert not any("_swap" in vars(module) for module in model.modules())


def test_called_by_other_code_it_still_overwrites():
    """Which may look at what it gave, and not at the result."""

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = ConvNormAct(nn.ReLU(inplace=True))

        def forward(self, x):
            h = self.block(x) - 1.0
            self.block[2](h)
            return h.square()

    model, x = Other().double(), images().double()
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    torch.testing.assert_close(step(model, x), step(stock, x))


def test_norms_that_stay():
    """Nothing of theirs is made again, so the activation stays in place."""
    model, x = Net(ACTS["relu in place"]), images()
    stock = measure(lambda: model(x)).saved
    swap(model, lean="call", ops=["relu"])
    assert measure(lambda: model(x)).saved <= stock
