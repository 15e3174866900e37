"""Norms of images that call the activation behind them themselves, as timm's do, and group norms of other classes."""

import copy
import pickle

import pytest
import torch
from swap_cases import assert_as_stock, step
from torch import nn

from memkit import swap, unswap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

C = 8


class WithAct(nn.Module):
    """Mixed into a norm, which it calls before them."""

    def __init__(self, *args, act=None, drop=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.drop, self.act = drop or nn.Identity(), act or nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class GroupNormAct(WithAct, nn.GroupNorm):
    pass


class BitGroupNormActivation(nn.GroupNorm):
    """transformers'."""

    def __init__(self, *args):
        super().__init__(*args)
        self.activation = nn.ReLU()

    def forward(self, x):
        return self.activation(super().forward(x))


class LayerNormAct(WithAct, nn.LayerNorm):
    pass


class Over2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class LayerNormAct2d(WithAct, Over2d):
    pass


class GroupNorm1(nn.GroupNorm):
    """One group."""

    def __init__(self, channels):
        super().__init__(1, channels)

    def forward(self, x):
        return nn.functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


NORMS = {
    "group": lambda: GroupNormAct(2, C),
    "group, transformers": lambda: BitGroupNormActivation(2, C),
    "group silu": lambda: GroupNormAct(2, C, act=nn.SiLU()),
    "group, no act": lambda: GroupNormAct(2, C, act=nn.Identity()),
    "group, no weight": lambda: GroupNormAct(2, C, affine=False),
    "rows": lambda: LayerNormAct(4),
    "images": lambda: LayerNormAct2d(C),
    "images gelu": lambda: LayerNormAct2d(C, act=nn.GELU()),
    "images, no act": lambda: LayerNormAct2d(C, act=nn.Identity()),
    "one group": lambda: GroupNorm1(C),
}
norms = pytest.mark.parametrize("name", NORMS)


def make(norm):
    first, last = nn.Conv2d(3, C, 3, padding=1), nn.Conv2d(C, 3, 3, padding=1)
    return nn.Sequential(first, norm, last).double(), torch.randn(2, 3, 6, 4, dtype=torch.float64)


def is_swapped(model):
    return type(model[1]).__mro__[1].__module__.startswith("memkit.swap.library")


@norms
@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("by_sample", [False, True])
def test_as_stock(name, by_sample, lean):
    model, x = make(NORMS[name]())
    stock = [type(m) for m in model.modules()]
    report = swap(model, sample=x if by_sample else None, lean=lean)
    assert is_swapped(model), report
    assert_as_stock(model, x)
    assert_as_stock(model.eval(), x)
    copied = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(step(copied, x), step(model, x))
    unswap(model)
    assert [type(m) for m in model.modules()] == stock


@norms
def test_in_lean_the_result_is_made_again(name):
    """What the norm was given is all that is kept, beside the sample and numbers of rows or groups."""
    model, x = make(NORMS[name]())
    report = swap(model, sample=x, lean="call")
    tensor = 2 * C * 6 * 4 * 8
    assert tensor <= report.saved_after <= 1.5 * tensor
    assert report.saved_before >= 2 * tensor


@pytest.mark.parametrize("norm", [GroupNormAct, LayerNormAct2d])
@pytest.mark.parametrize("lean", [False, "call"])
def test_a_dropout_between_is_called(norm, lean):
    arguments = (2, C) if norm is GroupNormAct else (C,)
    model, x = make(norm(*arguments, act=nn.Identity(), drop=nn.Dropout(0.5)))
    swap(model, sample=x, lean=lean)
    found = {}
    model[2].register_forward_pre_hook(lambda module, args: found.update(x=args[0]))
    model(x)
    assert 0.3 < (found["x"] == 0).double().mean() < 0.7


@norms
def test_what_comes_later_is_called(name):
    model, x = make(NORMS[name]())
    swap(model, lean="call")
    seen = []
    for child in model[1].children():
        child.register_forward_hook(lambda module, args, out: seen.append(module))
    assert_as_stock(model, x)
    assert len(seen) == 2 * len(list(model[1].children()))


@norms
@pytest.mark.parametrize("lean", [False, "call"])
def test_autocast(name, lean):
    model, x = make(NORMS[name]())
    model, x = model.float(), x.float()
    swap(model, lean=lean, ops=["group_norm", "layer_norm"])
    assert is_swapped(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_stock(model, x, rtol=0, atol=0)


@norms
def test_compiled(name):
    model, x = make(NORMS[name]())
    expected = step(copy.deepcopy(model), x)
    swap(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled, x), expected)


class BatchNormAct2d(WithAct, nn.BatchNorm2d):
    pass


class Branches(nn.Module):
    """As in MobileOne and RepVGG."""

    def __init__(self, norm, act):
        super().__init__()
        self.norms = nn.ModuleList(norm() for _ in range(2))
        self.first, self.act, self.last = nn.Conv2d(3, C, 3), act, nn.Conv2d(C, 3, 3)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.act(self.norms[0](x) + self.norms[1](x)))


@pytest.mark.parametrize("act", ["in place", "out of place"])
@pytest.mark.parametrize(
    "norm", [lambda: nn.BatchNorm2d(C), lambda: BatchNormAct2d(C, act=nn.Identity())], ids=["torch", "timm"]
)
def test_batch_norms_whose_results_nobody_keeps(norm, act):
    """They stay stock's, which keeps smaller statistics; not where an activation keeps their sum, which is made again."""
    model, x = Branches(norm, nn.ReLU(inplace=act == "in place")), torch.randn(2, 3, 16, 16)
    stock, before = type(model.norms[0]), measure(lambda: model(x)).saved
    swap(model, sample=x, lean="call")
    assert {type(each) is stock for each in model.norms} == {act == "in place"}
    after = measure(lambda: model(x)).saved
    assert after <= before if act == "in place" else after < 0.8 * before
    model.double()
    assert_as_stock(model, x.double())
