"""memkit.nn: each module is its torch.nn twin to everything but the memory."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activation_cases import generator
from torch import nn

import memkit.nn
from memkit._reference import ACTIVATIONS, stock
from memkit.functional._activation import TWO_SLOPES

NAMES = {name: a.module.__name__ for name, a in ACTIVATIONS.items() if a.module} | {
    "quick_gelu": "QuickGELU",
    "relu_squared": "ReLUSquared",
}
TWINS = [name for name, a in ACTIVATIONS.items() if a.module]
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "leaky_relu": (0.2,),
    "elu": (0.5,),
    "celu": (2.0,),
    "softplus": (2.0, 25.0),
    "hardtanh": (-2.0, 0.5),
    "gelu": ("tanh",),
}
X = torch.randn(4, 7, generator=generator())


def pair(name: str, *arguments: Any, **keep: Any) -> tuple[nn.Module, nn.Module]:
    return getattr(memkit.nn, NAMES[name])(*arguments, **keep), ACTIVATIONS[name].module(*arguments)


def test_every_function_has_a_module() -> None:
    modules = [
        name for name in memkit.nn.__all__ if getattr(memkit.nn, name).__module__ == "memkit.nn.activation"
    ]
    assert sorted(NAMES.values()) == sorted(modules)
    assert NAMES.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize(
    "name", [name for name in memkit.nn.__all__ if hasattr(nn, name)] + ["QuickGELU", "ReLUSquared"]
)
def test_help_names_the_arguments_that_torch_does_not_have(name: str) -> None:
    module = getattr(memkit.nn, name)
    twin = getattr(nn, name, nn.Module)
    own = inspect.signature(module).parameters.keys() - inspect.signature(twin).parameters.keys()
    text = inspect.getdoc(module) or ""
    assert [argument for argument in own - {"args", "kwargs"} if f"``{argument}``" not in text] == []


def test_repr_names_the_options_given() -> None:
    assert repr(memkit.nn.GELU()) == "GELU(approximate='none')"
    assert repr(memkit.nn.GELU(inplace=True)) == "GELU(approximate='none', inplace=True)"
    assert repr(memkit.nn.SiLU(inplace=True)) == "SiLU(inplace=True)"
    assert repr(memkit.nn.SiLU(inplace="auto")) == "SiLU(inplace='auto')"
    assert repr(memkit.nn.QuickGELU(save="output")) == "QuickGELU(save='output')"
    assert repr(memkit.nn.LeakyReLU(0.2, "auto", save="input")) == (
        "LeakyReLU(negative_slope=0.2, inplace='auto', save='input')"
    )


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("arguments", ["defaults", "given"])
def test_a_twin_is_what_it_was(name: str, arguments: str) -> None:
    given = ARGUMENTS.get(name, ()) if arguments == "given" else ()
    mine, theirs = pair(name, *given)
    assert isinstance(mine, type(theirs))
    assert repr(mine) == repr(theirs)
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    assert {k: v for k, v in vars(mine).items() if k not in ("inplace", "save")} == {
        k: v for k, v in vars(theirs).items() if k != "inplace"
    }
    torch.testing.assert_close(mine(X), theirs(X))
    before = list(inspect.signature(type(theirs)).parameters)
    after = list(inspect.signature(type(mine)).parameters)
    assert after[: len(before)] == before or after[0] == "args"  # passed on as they are


@pytest.mark.parametrize("name", TWINS)
def test_a_twins_keywords(name: str) -> None:
    defaults = dict(ACTIVATIONS[name].defaults)
    torch.testing.assert_close(getattr(memkit.nn, NAMES[name])(**defaults)(X), stock(name, X))


KEEP = ({"inplace": True}, {"save": "output"}, {"save": "input"}, {"inplace": "auto"})


@pytest.mark.parametrize(
    ("name", "keep"),
    [*itertools.product(NAMES, KEEP), *itertools.product(sorted(TWO_SLOPES), [{"save": "bit"}])],
    ids=str,
)
def test_forward_backward_copies_and_pickles(name: str, keep: dict[str, Any]) -> None:
    module = getattr(memkit.nn, NAMES[name])(*ARGUMENTS.get(name, ()), **keep)
    params = dict(zip(ACTIVATIONS[name].defaults, ARGUMENTS.get(name, ()), strict=False))
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for one in (
        module,
        copy.deepcopy(module),
        copy.copy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
    ):
        assert (one.inplace, one.save) == (keep.get("inplace", False), keep.get("save", "auto"))
        x = X.double().requires_grad_()
        h = x * 1
        out = one(h)
        if keep.get("inplace") is True:
            assert out is h
        (got,) = torch.autograd.grad(out.sum(), x)
        (want,) = torch.autograd.grad(stock(name, x, **params).sum(), x)
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: memkit.nn.GELU(save="both"), "GELU: expected save 'auto', 'input' or 'output', got 'both'"),
        (lambda: memkit.nn.GELU(save="bit"), "GELU: expected save 'auto', 'input' or 'output', got 'bit'"),
        (
            lambda: memkit.nn.ReLU(save="both"),
            "ReLU: expected save 'auto', 'input', 'output' or 'bit', got 'both'",
        ),
        (
            lambda: memkit.nn.LayerNorm(4, inplace="yes"),
            "LayerNorm: expected inplace True, False or 'auto', got 'yes'",
        ),
        (
            lambda: memkit.nn.ReLU(True, save="input"),
            "ReLU: expected save 'auto' or 'output' in place, got 'input'",
        ),
        (
            lambda: memkit.nn.Softmax(-1, inplace="yes"),
            "Softmax: expected inplace True, False or 'auto', got 'yes'",
        ),
        (lambda: memkit.nn.CrossEntropyLoss(inplace="yes"), "CrossEntropyLoss: expected inplace"),
    ],
)
def test_unknown_variants_are_refused_at_once(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_attributes_choose_at_any_time() -> None:
    module = memkit.nn.SiLU()
    h = X.clone()
    assert module(h) is not h
    module.inplace = True
    assert module(h) is h
    h = X.clone().requires_grad_() * 1
    module.save = "input"
    with pytest.raises(ValueError, match="silu: expected save"):
        module(h)


@pytest.mark.parametrize("name", TWINS)
def test_a_stock_module_whose_class_is_changed(name: str) -> None:
    """What swap does: attributes, hooks and flags stay."""
    module = ACTIVATIONS[name].module(*ARGUMENTS.get(name, ()))
    want = module(X.clone())
    calls: list[int] = []
    module.register_forward_hook(lambda *_: calls.append(1))
    module.eval()
    old = pickle.dumps(ACTIVATIONS[name].module(*ARGUMENTS.get(name, ())))
    module.__class__ = getattr(memkit.nn, NAMES[name])
    torch.testing.assert_close(module(X.clone()), want)
    assert calls == [1]
    assert not module.training
    assert module.save == "auto"
    back = pickle.loads(old)  # from before the change, without the attributes
    back.__class__ = getattr(memkit.nn, NAMES[name])
    torch.testing.assert_close(back(X.clone()), want)
    module.__class__ = ACTIVATIONS[name].module
    torch.testing.assert_close(module(X.clone()), want)


def test_hardtanhs_old_keywords() -> None:
    with pytest.warns(FutureWarning):
        module = memkit.nn.Hardtanh(min_value=-2.0, max_value=0.5)
    torch.testing.assert_close(module(X), F.hardtanh(X, -2.0, 0.5))


def test_in_a_model() -> None:
    """state_dict of a model with memkit's modules loads into one with stock's and back."""
    ours = nn.Sequential(nn.Linear(7, 7), memkit.nn.GELU(inplace=True), nn.Linear(7, 7), memkit.nn.Tanh())
    theirs = nn.Sequential(nn.Linear(7, 7), nn.GELU(), nn.Linear(7, 7), nn.Tanh())
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(X), theirs(X))
    ours.half().to("meta")
    assert ours[1].inplace is True
