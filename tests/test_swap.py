"""swap changes what a model's structure proves, and nothing that anybody can notice."""

import copy
import inspect
import time
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from swap_cases import (
    STOCK,
    Block,
    D,
    acts,
    assert_as_stock,
    batch,
    mlp,
    only,
    plain,
    some_acts,
)
from torch import nn

import memkit
from memkit import swap, unswap
from memkit.swap import types

pytestmark = pytest.mark.usefixtures("repeatable")


# -- by structure ------------------------------------------------------------------------------------------------------


@acts
def test_every_activation_in_a_sequential(act, calls):
    model = mlp(STOCK[act]())
    stock_type, attributes = type(model[1]), dict(vars(model[1]))
    report = swap(model)
    assert only(report).after == "in place"
    assert isinstance(model[1], getattr(memkit.nn, stock_type.__name__))
    assert isinstance(model[1], stock_type)
    assert_as_stock(model, batch())
    assert calls == [("gelu" if act == "gelu" else act, True)]
    assert {k: v for k, v in vars(model[1]).items() if k != "_swap"} == attributes
    unswap(model)
    assert type(model[1]) is stock_type
    assert vars(model[1]) == attributes


def test_gelu_tanh(calls):
    model = mlp(nn.GELU(approximate="tanh"))
    swap(model)
    assert_as_stock(model, batch())
    assert calls == [("gelu_tanh", True)]


@acts
def test_every_activation_by_sample(act, calls):
    model = Block(plain, STOCK[act]())
    report = swap(model, sample=batch())
    assert only(report).after == "in place"
    assert_as_stock(model, batch())
    assert calls[-1][1]


def test_parameters_read_at_each_call():
    model = mlp(nn.LeakyReLU(0.1))
    swap(model)
    for slope in (0.3, -0.5):  # a negative slope cannot come from the output: stock serves
        model[1].negative_slope = slope
        assert_as_stock(model, batch())


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (nn.LeakyReLU(-0.1), "negative_slope >= 0"),
        (nn.ELU(-1.0), "alpha >= 0"),
        (nn.ReLU(inplace=True), "already in place"),
        (nn.Hardtanh(inplace=True), "already in place"),
    ],
)
def test_left_with_a_reason(act, reason):
    model = mlp(act)
    for sample in (None, batch()):
        row = only(swap(model, sample=sample))
        assert not row.changed
        assert reason in row.reason


@pytest.mark.parametrize("act", ["silu", "mish", "hardswish", "hardsigmoid"])
@pytest.mark.parametrize("by_sample", [False, True])
def test_stock_in_place_that_copies_its_input(act, by_sample, calls):
    model = mlp(STOCK[act](inplace=True))
    row = only(swap(model, sample=batch() if by_sample else None))
    assert row.changed
    assert model[1].inplace is True
    assert_as_stock(model, batch())
    assert calls[-1] == (act, True)
    x = batch(3, D)
    with torch.no_grad():
        y = x.clone()
        model[1](y)
        torch.testing.assert_close(y, getattr(F, act)(x))
    leaf = batch().requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):  # as in stock
        model[1](leaf)


def test_subclasses_are_reported_and_left():
    class Mine(nn.GELU):
        def forward(self, input):
            return super().forward(input) + 1

    row = only(swap(mlp(Mine())))
    assert not row.changed
    assert "subclass of torch.nn.GELU" in row.reason


def test_memkit_modules_are_left():
    assert len(swap(mlp(memkit.nn.GELU(save="output")))) == 0


def test_replaced_forward_is_left():
    model = mlp(nn.GELU())
    model[1].forward = lambda x: x * 2
    for sample in (None, batch()):
        assert "forward is replaced" in only(swap(model, sample=sample)).reason


FOLLOWERS = {
    "Linear": (nn.Linear(D, D), True),
    "Identity, Linear": (nn.Sequential(nn.Identity(), nn.Linear(D, D)), True),
    "LayerNorm": (nn.LayerNorm(D), True),
    "Dropout(0), Linear": (nn.Sequential(nn.Dropout(0.0), nn.Linear(D, D)), True),
    "Dropout, Linear": (nn.Sequential(nn.Dropout(0.5), nn.Linear(D, D)), False),
    "in-place Dropout": (nn.Dropout(0.5, inplace=True), False),
    "in-place ReLU": (nn.ReLU(inplace=True), False),
    "Flatten, in-place ReLU": (nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True)), False),
    "unknown": (nn.Softmax(-1), False),
    "nothing": (nn.Identity(), False),
    "frozen Linear": (nn.Linear(D, D).requires_grad_(False), False),
}


@pytest.mark.parametrize("name", FOLLOWERS)
def test_what_follows(name):
    follower, proven = FOLLOWERS[name]
    model = nn.Sequential(nn.Linear(D, D), nn.GELU(), copy.deepcopy(follower)).double()
    row = swap(model, ops=["gelu"]).rows[0]
    assert row.changed == proven, row.reason
    assert_as_stock(model, batch())


def test_torchvision_style_sequential(calls):
    class ConvAct(nn.Sequential):
        pass

    model = ConvAct(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Hardswish(), nn.Conv2d(4, 2, 3)).double()
    assert only(swap(model)).changed
    assert_as_stock(model, batch(2, 3, 8, 8))
    assert calls == [("hardswish", True)]


def test_a_sequential_with_its_own_forward_proves_nothing():
    class Twice(nn.Sequential):
        def forward(self, x):
            for module in self:
                x = module(x) + x
            return x

    model = Twice(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)).double()
    assert "pass sample=" in only(swap(model)).reason


@acts
def test_children_called_by_hand(act):
    """The proof of a Sequential holds for calls from its forward alone."""
    model = Block(lambda self, x: None, mlp(STOCK[act]()))
    assert only(swap(model)).changed

    def features(self, x):
        kept = [x]
        for module in self.act:
            kept.append(module(kept[-1]))
        return sum(kept)

    def residual(self, x):
        h = self.act[0](x)
        return self.act[2](self.act[1](h) + h)

    def changed_afterwards(self, x):
        y = self.act[1](self.act[0](x))
        return self.act[2](y.mul_(2)) if act not in types.KEEPS_OUTPUT else y

    def sliced(self, x):
        h = self.act[:1](x)
        return self.act[1:](h) + h

    for model.run in (features, residual, changed_afterwards, sliced):
        assert_as_stock(model, batch())


@some_acts
def test_one_activation_in_several_places(act, calls):
    shared = STOCK[act]()
    a = nn.Sequential(nn.Linear(D, D), shared, nn.Linear(D, D), shared, nn.Linear(D, D))
    model = nn.Sequential(OrderedDict(a=a, b=nn.Sequential(shared, nn.Linear(D, D)))).double()
    row = only(swap(model))
    assert row.path == "a.1, a.3, b.0"
    assert model.a[1] is model.a[3] is model.b[0] is shared
    assert_as_stock(model, batch())
    assert [overwritten for _, overwritten in calls] == [True, True, False]


def test_one_unproven_place_spoils_all():
    shared = nn.GELU()
    model = nn.Sequential(nn.Linear(D, D), shared, nn.Linear(D, D), shared).double()
    assert not only(swap(model)).changed


def test_shared_with_a_module_of_ones_own(calls):
    shared = nn.GELU()
    model = nn.Sequential(
        nn.Linear(D, D), shared, nn.Linear(D, D), Block(lambda self, x: self.act(x) + x, shared)
    ).double()
    assert only(swap(model)).changed
    assert_as_stock(model, batch())
    assert calls == [("gelu", True)]


@pytest.mark.parametrize("names", [["gelu"], ("relu", "gelu"), {"relu"}, frozenset()])
def test_ops(names):
    model = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
    swap(model, ops=names)
    assert isinstance(model[1], types.Swapped) == ("gelu" in names)
    assert isinstance(model[3], types.Swapped) == ("relu" in names)


def test_a_thousand_modules_are_quick():
    layers = [layer for _ in range(500) for layer in (nn.Linear(2, 2), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(2, 2))
    begin = time.perf_counter()
    report = swap(model)
    assert time.perf_counter() - begin < 1
    assert len(report.changed) == 500


def test_gelu_tanh_in_ops_is_that_form_alone():
    model = nn.Sequential(*mlp(nn.GELU()), nn.GELU(approximate="tanh"), nn.Linear(D, D))
    assert [row.path for row in swap(model, ops=["gelu_tanh"]).changed] == ["3"]
    assert [row.path for row in swap(model, ops=["gelu"]).changed] == ["1", "3"]


# -- wrong arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"model": 3}, TypeError, "swap: expected a torch.nn.Module, got int"),
        (
            {"ops": ["gelu", "geluu"]},
            ValueError,
            "swap: expected ops 'all' or a collection of relu.*; got 'geluu'",
        ),
        ({"ops": None}, ValueError, "swap: expected ops 'all' or a collection of .*; got NoneType"),
        ({"exact": "no"}, ValueError, "swap: expected exact True or False, got 'no'"),
        (
            {"ops": "gelu"},
            ValueError,
            "swap: expected ops 'all' or a collection of .*got 'gelu', which .* is \\['gelu'\\]",
        ),
        ({"sample": [torch.ones(2)]}, TypeError, "swap: expected sample to be a tensor, a tuple .* got list"),
        (
            {"sample": torch.ones(0, 2)},
            ValueError,
            "swap: expected a sample to compare results of, got tensors of no elements: \\[0, 2\\]",
        ),
        (
            {"model": nn.LazyLinear(2), "sample": torch.ones(2)},
            ValueError,
            "swap: expected parameters that are there",
        ),
        (
            {"model": nn.Linear(2, 2, device="meta"), "sample": torch.ones(2)},
            ValueError,
            "swap: expected parameters that are there, got some on the meta device",
        ),
        ({"model": torch.jit.trace(nn.GELU(), torch.ones(2))}, TypeError, "swap: .* got a ScriptModule"),
    ],
)
def test_wrong_arguments(kwargs, error, message):
    kwargs = {"model": mlp(nn.GELU()), **kwargs}
    with pytest.raises(error, match=message):
        swap(**kwargs)


def test_unswap_of_other_things():
    unswap(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"unswap: expected a torch\.nn\.Module, got int"):
        unswap(3)


def test_help_says_how_it_is_called():
    assert memkit.swap.__doc__.startswith("swap(model, *, sample=None, ")
    assert "sample:" in memkit.swap.__doc__
    assert list(inspect.signature(memkit.swap).parameters) == ["model", "sample", "ops", "exact", "lean"]
