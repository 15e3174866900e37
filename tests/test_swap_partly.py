"""A model that stays another as a whole: what can be changed of it is."""

import copy

import pytest
import torch
from swap_cases import D, batch
from torch import nn

import memkit
from memkit import swap, unswap
from memkit.swap import types

OTHERS = {"LayerNorm", "SiLU", "Dropout"}


class Picky(nn.Module):
    """Minds what its GELU is: `does`, where that is not PyTorch's."""

    def __init__(self, does, act=nn.GELU):
        super().__init__()
        self.norm, self.silu, self.act = nn.LayerNorm(D), nn.SiLU(), act()
        self.first, self.second, self.last = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.dropout, self.does = nn.Dropout(0.5), does

    def forward(self, x):
        y = self.silu(self.first(self.norm(x)))
        y = self.act(self.second(y))
        if type(self.act) is not nn.GELU:
            y = self.does(y)
        return self.dropout(self.last(y))


class KeepsMore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(*(x.clone() for _ in range(20)))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0].numel() > 0)


def raises(y):
    raise KeyError("another GELU")


def doubles(y):
    return 2 * y


REASONS = {
    raises: "the swapped model raises on the sample: KeyError: 'another GELU'",
    doubles: "values or gradients of the swapped model differ on the sample",
    KeepsMore.apply: "swapped, the model would keep more on the sample",
}


def step(model, x):
    torch.manual_seed(0)
    model.zero_grad()
    with memkit.lean():
        loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("lean", [False, True, "call"])
@pytest.mark.parametrize("does", REASONS, ids=["raises", "differs", "keeps more"])
def test_all_but_what_the_model_minds(does, lean):
    model, x = Picky(does).double(), batch()
    stock = copy.deepcopy(model)
    report = swap(model, sample=x, lean=lean)
    rows = {row.before: row for row in report.rows}
    assert rows["GELU"].reason == REASONS[does]
    assert {row.before for row in report.changed} == OTHERS
    assert report.saved_after < report.saved_before
    assert report.lean == lean
    assert type(model.act) is nn.GELU
    assert all(isinstance(m, types.Changed) for m in (model.norm, model.silu, model.dropout))
    model.dropout.p = stock.dropout.p = 0.0  # which elements go is not the same
    for a, b in zip(step(model, x), step(stock, x), strict=True):
        torch.testing.assert_close(a, b)
    unswap(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


def test_nothing_where_the_model_minds_all():
    class Minds(Picky):
        def forward(self, x):
            if any(isinstance(m, types.Changed) for m in self.modules()):
                raise KeyError("another model")
            return super().forward(x)

    model = Minds(doubles).double()
    report = swap(model, sample=batch(), lean="call")
    assert not report.changed
    assert {row.reason for row in report.left if row.before in OTHERS | {"GELU"}} == {
        "the swapped model raises on the sample: KeyError: 'another model'"
    }
    assert not any(isinstance(m, types.Changed) for m in model.modules())


def test_names_that_do_not_go_together():
    """Those that come first are kept: activations before norms."""

    class Exclusive(Picky):
        def forward(self, x):
            y = super().forward(x)
            return y if nn.LayerNorm is type(self.norm) or nn.SiLU is type(self.silu) else y + 1

    model = Exclusive(lambda y: y).double()
    report = swap(model, sample=batch())
    assert {row.before for row in report.changed} == {"GELU", "SiLU", "Dropout"}
    assert type(model.norm) is nn.LayerNorm


def test_each_row_says_what_refused_it():
    class Both(Picky):
        def forward(self, x):
            y = super().forward(x)
            return y if type(self.norm) is nn.LayerNorm else 2 * y

    model = Both(raises).double()
    rows = {row.before: row for row in swap(model, sample=batch()).rows}
    assert rows["GELU"].reason == REASONS[raises]
    assert rows["LayerNorm"].reason == REASONS[doubles]
    assert rows["SiLU"].changed


def test_what_changes_with_others_alone():
    """A batch norm, once its activation does."""
    stage = nn.Sequential(nn.Conv2d(D, D, 1), nn.BatchNorm2d(D), nn.ReLU(), nn.Conv2d(D, D, 3))
    model = nn.Sequential(stage, nn.Flatten(2), nn.Linear(36, D), Picky(raises)).double()
    report = swap(model, sample=torch.randn(2, D, 8, 8, dtype=torch.float64))
    rows = {row.before: row for row in report.rows}
    assert rows["ReLU"].after == "with the norm"
    assert rows["GELU"].reason == REASONS[raises]
