"""Feed-forward networks of which nothing is recorded: activations work in the memory of what nobody else has."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from swap_cases import D
from swap_library_layers import MLP, ConvMLP, GatedMLP
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import memkit
from memkit import swap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")


def sample(kind: Any) -> torch.Tensor:
    return torch.randn((4, 2, 16, 16) if kind is ConvMLP else (64, D))


def frozen(model: nn.Module) -> Any:
    model.requires_grad_(False)
    return nullcontext()


WAYS = {
    "no_grad": lambda model: torch.no_grad(),
    "inference_mode": lambda model: torch.inference_mode(),
    "frozen": frozen,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("kind", [MLP, ConvMLP, GatedMLP])
def test_takes_no_more_than_stock(kind: Any, lean: Any, way: str) -> None:
    stock, x = kind(), sample(kind)
    ours = copy.deepcopy(stock)
    assert swap(ours, sample=x, lean=lean).changed
    peaks, before = [], x.clone()
    for model in (ours, stock):
        with WAYS[way](model):
            model(x)
            peaks.append(measure(lambda model=model: model(x)).peak)
            out = model(x)
    torch.testing.assert_close(ours(x), out)
    assert peaks[0] <= peaks[1]
    assert kind is not MLP or peaks[0] < 0.8 * peaks[1]
    assert torch.equal(x, before)


def test_memkits_own_take_no_more_either() -> None:
    x = torch.randn(64, D)
    for stock, ours in (
        (MLP(), memkit.nn.MLP(D, 3 * D)),
        (GatedMLP(), memkit.nn.GatedMLP(D, 3 * D, bias=True)),
    ):
        ours.load_state_dict(stock.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(ours(x), stock(x))
            assert measure(lambda ours=ours: ours(x)).peak <= measure(lambda stock=stock: stock(x)).peak


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        if function is nn.functional.linear:
            self.seen.append(out)
        return out


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        if function is torch.ops.aten.addmm.default:
            self.seen.append(out)
        return out


@pytest.mark.parametrize("made", ["own", "swapped"])
@pytest.mark.parametrize("how", ["hook", "global hook", "functions", "operators"])
def test_who_looks_on_sees_what_stock_shows(how: str, made: str) -> None:
    x = torch.randn(64, D)
    model: Any = memkit.nn.MLP(D, 3 * D) if made == "own" else MLP()
    if made == "swapped":
        swap(model, sample=x)
    seen: list[Any] = []
    mode: Any = {"functions": Functions, "operators": Operators}.get(how, nullcontext)()

    def hook(module: nn.Module, given: Any, out: torch.Tensor) -> None:
        seen.append(out)

    removed = [model.fc1.register_forward_hook(hook)] if how == "hook" else []
    removed += [register_module_forward_hook(hook)] if how == "global hook" else []
    with torch.no_grad(), mode:
        model(x)
    for each in removed:
        each.remove()
    hidden = (seen or mode.seen)[0]
    torch.testing.assert_close(hidden, nn.functional.linear(x, model.fc1.weight, model.fc1.bias).detach())


class Same(nn.Parameter):
    """A weight whose product is what it is given."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            return args[0]
        return super().__torch_function__(function, types, args, kwargs or {})


def test_weights_of_other_classes_may_give_what_is_not_theirs() -> None:
    x, model = torch.randn(64, D), memkit.nn.MLP(D, D)
    model.fc1.weight = Same(model.fc1.weight.data)
    before = x.clone()
    with torch.no_grad():
        model(x)
    assert torch.equal(x, before)


def test_a_replaced_linear_sees_what_stock_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    x, model, seen = torch.randn(64, D), MLP(), []
    swap(model, sample=x)
    linear = nn.functional.linear

    def kept(*args: Any) -> torch.Tensor:
        seen.append(linear(*args))
        return seen[-1]

    monkeypatch.setattr(nn.functional, "linear", kept)
    with torch.no_grad():
        model(x)
    torch.testing.assert_close(seen[0], linear(x, model.fc1.weight, model.fc1.bias).detach())
