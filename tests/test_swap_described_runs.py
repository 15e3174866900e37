"""Runs of lines that `attend` computes: what ends them, what they leave behind, and who looks on."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attention_cases import TOKENS, Attention, given, small
from described_cases import (
    Before,
    WithAFunction,
    WithMask,
    drawn,
    swapped,
    ways,
)
from swap_cases import assert_as_stock
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from memkit import swap

__all__ = ["small"]  # a fixture
pytestmark = pytest.mark.usefixtures("repeatable")


class Wants(WithMask):
    """The weights before dropout, if they are wanted: another branch than the one that was looked at."""

    wants = False

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = self.dropout(q) @ k.mT
        before = None
        weights = scores.softmax(-1)
        if self.wants:
            before = weights
        y = self.dropout(weights) @ v
        if before is not None:
            y = y + before.mean()
        return self.merged(y)


def test_a_run_that_ends_has_drawn_nothing():
    model, x = swapped(Wants(0.3).double()), given()
    drawn(model, x)
    assert ways() == {"attend"}
    model.wants = True
    outs = [drawn(model, x)]
    after = torch.rand(1)
    with torch.no_grad():
        outs.append(drawn(model, x))
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(torch.rand(1), after)


class Changes(WithMask):
    """The factor, and what is hidden, from call to call."""

    factor, hides, adds = 0.5, False, False

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT * self.factor
        if self.adds:
            scores = scores + self.bias[:, :1]
            scores = scores * 0.5
        if self.hides:
            scores = scores.masked_fill(self.causal == 0, -1e9)
        return self.merged(scores.softmax(-1) @ v)


class Given(WithMask):
    """Of each call another layer."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        return self.merged(self.attend(q, k, v, self.dropout))

    def attend(self, q, k, v, layer):
        factor = 2.0 if isinstance(layer, nn.Identity) else 1.0
        weights = (q @ k.mT).softmax(-1)
        if factor > 1:
            weights = weights * factor
        return layer(weights) @ v


def test_what_is_done_with_weights_is_not_done_with_scores():
    for layer in (nn.Dropout(0.0), nn.Softmax(-1), nn.Identity(), nn.Dropout(0.0)):
        if layer is not None:
            model, x = Given().double(), given()
            model.dropout = layer
            swap(model, lean="call")
            assert_as_stock(model, x)
    assert ways() == {"attend"}  # asked once


@pytest.mark.parametrize("kind", [WithMask, Before])
def test_a_checkpoint_that_stops_early(kind):
    """Once it has made again what was kept of the lines."""
    model, x = swapped(kind(0.3).double()), given().requires_grad_()
    drawn(model, x, lambda x: checkpoint(model, x, use_reentrant=False)).square().sum().backward()
    again = x.grad
    x.grad = None
    drawn(model, x).square().sum().backward()
    torch.testing.assert_close(again, x.grad)


class Later(WithMask):
    """From the second call on, what ends a run or would change its result unseen."""

    how = ""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        hidden = scores.new_zeros(1, TOKENS)
        scores = scores + hidden
        if self.how == "written to":
            hidden += torch.arange(TOKENS)
        if self.how == "asked" and scores.is_cuda:
            scores = scores + 1.0 * hidden.sum() * torch.arange(TOKENS)
            scores = scores.masked_fill(self.causal == 0, -1e9)
        if self.how == "unused":
            other = scores.masked_fill(self.causal == 0, -1e9)  # noqa: F841
        return self.merged(scores.softmax(-1) @ v)


class LaterOfItsType(WithMask):
    how = ""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        if self.how and type(scores) is not torch.Tensor:
            scores = scores.masked_fill(self.causal == 0, -1e9)
        return self.merged(scores.softmax(-1) @ v)


@pytest.mark.parametrize("how", ["written to", "asked", "unused"])
@pytest.mark.parametrize("kind", [Later, LaterOfItsType])
def test_branches_that_come_later(kind, how):
    model, x = swapped(kind().double()), given()
    model(x)
    assert ways() == {"attend" if kind is Later else "again"}
    model.how = how
    assert_as_stock(model, x)


def test_stocks_dropout_draws_as_stock_after_evaluation():
    stock, x = WithAFunction(0.3).double().eval(), given()
    model = swapped(copy.deepcopy(stock), ops=["attention"])
    model(x)
    assert ways() == {"attend"}
    torch.testing.assert_close(drawn(model.train(), x), drawn(stock.train(), x))


def test_each_call_is_described_anew():
    model, x = swapped(Changes().double()), given()
    cases = [(0.5, False, False), (2, True, False), (0.1, False, True), (torch.tensor(0.3), True, False)]
    for factor, hides, adds in cases:
        model.factor, model.hides, model.adds = factor, hides, adds
        assert_as_stock(model, x)


class Wrong(WithMask):
    how = "right"

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        if self.how == "grad":
            scores.requires_grad = False
        if self.how == "fill":
            scores = scores.masked_fill(self.causal == 0, 10**30)
        return self.merged(F.softmax(scores, dim=-1.0 if self.how == "dim" else -1) @ v)


@pytest.mark.parametrize("how", ["grad", "fill", "dim"])
def test_what_stock_refuses_raises(how):
    model, x = swapped(Wrong()), given(torch.float32)
    model(x)
    assert ways() == {"attend"}
    model.how = how
    with pytest.raises((RuntimeError, TypeError, OverflowError)):
        model(x)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 2 if function is F.softmax else out


def test_modes_see_what_they_see():
    stock, x = WithMask().double(), given()
    model = swapped(copy.deepcopy(stock))
    model(x)
    with Doubles():
        torch.testing.assert_close(model(x), stock(x))


class HasALayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.soft = Attention(), nn.Softmax(-1)
        self.attend = nn.Identity()

    def forward(self, x):
        q, k, v = self.attention.projected(x)
        weights = self.soft(self.attend(q @ k.mT))
        return self.attention.merged(weights @ v)


def test_layers_that_pass_on_what_they_are_given():
    model, x = swapped(HasALayer().double()), given()
    assert_as_stock(model, x)
