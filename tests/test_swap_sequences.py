"""swap and the feed-forward networks of torch.nn: Linear, activation, dropout, Linear."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
import memkit.functional as M
from memkit import swap, unswap
from memkit.memory import measure

D, H = 32, 128
DOUBLE = {"dtype": torch.float64}


def network(act: Any = nn.GELU, p: float = 0.2, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(D, H, **options), act(), nn.Dropout(p), nn.Linear(H, D, **options), nn.Dropout(p)
    )


def batch(rows: int = 64, **options: Any) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, D, **{**DOUBLE, **options})


def results(module: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *module.parameters()])]


def same(ours: list[Tensor], theirs: list[Tensor], **how: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **how)


def rows(model: nn.Module, **options: Any) -> dict[str, str]:
    return {row.path: row.after for row in swap(model, **options).rows}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("act", [nn.GELU, nn.SiLU, nn.ELU, nn.Tanh, nn.Softplus, nn.Mish])
def test_in_evaluation_it_is_stock(act: Any, given: bool) -> None:
    model = network(act, **DOUBLE)
    ours = copy.deepcopy(model)
    x = batch()
    assert rows(ours, sample=x if given else None) == {"": "memkit", "2": "memkit", "4": "memkit"}
    ours.eval(), model.eval()
    same(results(ours, x), results(model, x), rtol=1e-8, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))


def test_in_training_it_is_dropout_linear() -> None:
    ours = network(p=0.4, **DOUBLE)
    ours[4].p = 0.0
    model: Any = copy.deepcopy(ours)
    swap(ours)
    x = batch()

    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            first, _, dropout, last, _ = self.layers
            return M.dropout_linear(first(x), last.weight, last.bias, dropout.p, act="gelu")

    torch.manual_seed(3)
    theirs = results(ByHand(), x)
    torch.manual_seed(3)
    same(results(ours, x), theirs)


@pytest.mark.parametrize("lean", [False, True, "call"])
def test_what_is_kept(lean: Any) -> None:
    x = batch(dtype=torch.float32)
    model = nn.Sequential(network(), network(nn.ReLU), network(nn.SiLU, 0.0))
    stock = measure(lambda: model(x)).saved
    report = swap(model, sample=x, lean=lean)

    def step() -> Tensor:
        with memkit.lean() if lean is True else nullcontext():
            return model(x)

    ours = measure(step).saved
    assert report.saved_after == ours  # the sample ran as the model will
    hidden, row = 64 * H * 4, 64 * D * 4
    assert ours <= 3 * hidden + 4 * row + 2048 < stock - 4 * hidden


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = batch(dtype=dtype)
    model = network(dtype=dtype)
    ours = copy.deepcopy(model)
    assert rows(ours, sample=x)[""] == "memkit"
    stock, kept = (measure(lambda m=m: m(x)).saved for m in (model, ours))  # type: ignore[misc]
    assert kept < stock - 2 * 64 * H * 2
    ours.eval(), model.eval()
    same(results(ours, x), results(model, x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("act", ["relu", "gelu", nn.SiLU()])
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
@pytest.mark.parametrize("lean", [False, "call"])
def test_transformer_layers_with_dropout(kind: Any, act: Any, norm_first: bool, lean: Any) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        own = copy.deepcopy(act)
        return kind(D, 4, H, 0.1, activation=own, batch_first=True, norm_first=norm_first, **DOUBLE)

    model, ours = make(), make()
    x = torch.randn(2, 5, D, **DOUBLE)
    given = (x,) if kind is nn.TransformerEncoderLayer else (x, torch.randn(2, 7, D, **DOUBLE))
    report = swap(ours, sample=given, lean=lean)
    if act == "relu":
        assert report.rows[0].saved == "1 bit"
    else:
        assert report.rows[0].before == kind.__name__
    assert all(row.changed for row in report), report
    for m in (model, ours):
        for part in m.modules():
            if isinstance(part, nn.Dropout | nn.MultiheadAttention):
                part.eval()

    def grads(m: Any) -> list[Tensor]:
        y = m(*given)
        return [y, *torch.autograd.grad(y.sin().sum(), [*m.parameters()])]

    same(grads(ours), grads(model), rtol=1e-7, atol=1e-9)
    ours.train()
    torch.manual_seed(0)
    assert measure(lambda: ours(*given)).saved < 0.75 * measure(lambda: model.train()(*given)).saved
    if (
        kind is nn.TransformerEncoderLayer
    ):  # a copy of torch's other one forgets an activation that is a module
        for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            same(grads(made.eval()), grads(model.eval()), rtol=1e-7, atol=1e-9)
    unswap(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in model.modules()]


def test_parts_of_it() -> None:
    """A slice is a Sequential that runs, and one that was edited."""
    model = network(**DOUBLE).eval()
    ours = copy.deepcopy(model)
    swap(ours)
    x = batch()
    hidden = model[0](x).detach()
    same(
        [ours[:2](x), ours[1:](hidden), ours[3](hidden)], [model[:2](x), model[1:](hidden), model[3](hidden)]
    )
    ours[1], model[1] = nn.ReLU(), nn.ReLU()
    ours.append(nn.Softmax(-1)), model.append(nn.Softmax(-1))
    same(results(ours, x), results(model, x))
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        same(results(made, x), results(model, x))
    unswap(ours)
    assert type(ours) is nn.Sequential
    assert type(ours[2]) is nn.Dropout


@pytest.mark.parametrize("at", range(5))
def test_hooks_see_what_they_see_in_stock(at: int) -> None:
    model = network(**DOUBLE).eval()
    ours = copy.deepcopy(model)
    swap(ours)
    seen: dict[int, list[Tensor]] = {}
    for m in (model, ours):
        found = seen.setdefault(id(m), [])
        m[at].register_forward_hook(lambda _, given, out, found=found: found.extend((*given, out)))
    x = batch()
    same(results(ours, x), results(model, x), rtol=1e-8, atol=1e-10)
    same(seen[id(ours)], seen[id(model)])


def test_what_stays() -> None:
    assert rows(nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Dropout(0.0), nn.Linear(H, D))) == {
        "1": "in place",
        "2": "memkit",
    }
    with_conv = nn.Sequential(nn.Conv1d(D, H, 1), nn.GELU(), nn.Dropout(0.1), nn.Linear(H, D))
    assert "" not in rows(with_conv)
    assert "" not in rows(network(nn.ReLU))  # a bit tells
    first = nn.Sequential(nn.GELU(), nn.Dropout(0.1), nn.Linear(H, D))  # whose input is another's
    assert "" not in rows(first)
    assert "" not in rows(network(), ops=["gelu", "dropout"])


def test_compiled() -> None:
    model = network(**DOUBLE).eval()
    ours = copy.deepcopy(model)
    swap(ours)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x = batch()
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(torch.export.export(ours, (x,)).module()(x), model(x))
    ours.train()
    assert (compiled(x) - model(x)).abs().max() > 0


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("kind", ["sequence", "layer"])
def test_a_checkpoint_draws_twice_the_same(kind: str, lean: Any, reentrant: bool) -> None:
    torch.manual_seed(0)
    model: Any = network(**DOUBLE)
    if kind == "layer":
        model = nn.TransformerEncoderLayer(D, 4, H, 0.2, batch_first=True, **DOUBLE)
    swap(model, lean=lean)
    x = batch(6).view(2, 3, D).requires_grad_()

    def gradients(call: Any) -> list[Tensor]:
        x.grad = None
        model.zero_grad()
        torch.manual_seed(5)
        y = call(x)
        y.sin().sum().backward()
        return [y, x.grad, *(p.grad for p in model.parameters())]

    theirs = gradients(model)
    same(gradients(lambda x: checkpoint(model, x, use_reentrant=reentrant)), theirs)


class ConvNorm(nn.Sequential):
    """timm's EfficientViT: children of the names of a module that calls relu by itself."""

    def __init__(self, *sizes):
        super().__init__()
        self.add_module("conv", nn.Conv2d(*sizes, 3))
        self.add_module("bn", nn.BatchNorm2d(sizes[1]))


def test_sequential_calls_no_functions():
    """No row says that it computes something else than one that does."""
    model = nn.Sequential(ConvNorm(3, 8), nn.ReLU(), ConvNorm(8, 4))
    report = swap(model, lean="call")
    assert [(row.path, row.before) for row in report.left] == []
    assert report.changed
