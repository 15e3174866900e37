"""A norm over rows and an activation side by side: inside `lean()` one tensor of the two is kept."""

import pytest
import torch
from swap_cases import assert_as_stock
from torch import nn

from memkit import swap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

ROWS, WIDTH = 64, 48
TENSOR = ROWS * WIDTH * 4


class ChannelsLast(nn.Module):
    """A norm of what lies in another order of dimensions, as speech models have it between convolutions."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.transpose(-2, -1)).transpose(-2, -1)


def rows(*middle):
    return nn.Sequential(nn.Linear(8, WIDTH), *middle, nn.Linear(WIDTH, 8)), torch.randn(ROWS, 8)


def signals(*middle):
    model = nn.Sequential(nn.Conv1d(8, WIDTH, 3, padding=1), *middle, nn.Conv1d(WIDTH, 8, 3, padding=1))
    return model, torch.randn(2, 8, ROWS // 2)


CHAINS = {
    "norm, act": lambda: rows(nn.LayerNorm(WIDTH), nn.GELU()),
    "rms norm, act": lambda: rows(nn.RMSNorm(WIDTH), nn.SiLU()),
    "norm, act in place": lambda: rows(nn.LayerNorm(WIDTH), nn.ReLU(inplace=True)),
    "norm, act, of another order": lambda: signals(ChannelsLast(nn.LayerNorm(WIDTH)), nn.GELU()),
    "act, norm": lambda: rows(nn.GELU(), nn.LayerNorm(WIDTH)),
    "act, norm, of another order": lambda: signals(nn.GELU(), ChannelsLast(nn.LayerNorm(WIDTH))),
}
chains = pytest.mark.parametrize("name", CHAINS)


@chains
def test_one_tensor_is_kept(name):
    model, x = CHAINS[name]()
    report = swap(model, sample=x, lean="call")
    assert report.saved_after == measure(lambda: model(x)).saved
    beside = x.nbytes + 2 * ROWS * 4  # statistics
    assert TENSOR < report.saved_after <= TENSOR + beside, report


@chains
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_as_stock(name, dtype):
    model, x = CHAINS[name]()
    model, x = model.to(dtype), x.to(dtype)
    swap(model, sample=x, lean="call")
    if dtype == torch.bfloat16:
        assert measure(lambda: model(x)).saved <= TENSOR // 2 + x.nbytes + 2 * ROWS * 4
    else:
        assert_as_stock(model, x)


def test_a_norm_whose_result_others_keep_too():
    """The activation is made again from it."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
            self.one, self.other = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

        def forward(self, x):
            h = self.norm(x)
            return self.one(self.act(h)) + self.other(h)

    model, x = Both(), torch.randn(ROWS, WIDTH)
    report = swap(model, sample=x, lean="call")
    assert report.saved_after <= 2 * TENSOR + 2 * ROWS * 4, report
    model = model.double()
    assert_as_stock(model, x.double())


def test_under_autocast_stocks_norm_stays():
    """Its result, of float32, is what the activation keeps as in stock."""
    model, x = rows(nn.LayerNorm(WIDTH), nn.GELU())
    with torch.autocast("cpu", torch.bfloat16):
        stock = measure(lambda: model(x)).saved
        report = swap(model, sample=x, lean="call")
        assert measure(lambda: model(x)).saved <= stock, report
