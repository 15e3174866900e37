"""swap: numbers that a library's forward reads of its module may change later, and what it writes down has to be written."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memkit import swap, unswap
from memkit.swap.library.activations import _checked, library_activation
from memkit.swap.library.reads import uses

WIDTH = 16
FACTOR = 1.0
HOWS: list[dict[str, Any]] = [{}, {"sample": True}, {"lean": "call"}, {"sample": True, "lean": "call"}]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)


class Annealed(FeedForward):
    k = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x))) * self.k


class InAMethod(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.k = 1.0

    @property
    def factor(self) -> float:
        return self.k

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.fc2(self.act(self.fc1(x))))


class OfABase(Annealed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def scaled_by(module: Any, x: Tensor) -> Tensor:
    return x * module.k


class InAFunction(Annealed):
    def forward(self, x: Tensor) -> Tensor:
        return scaled_by(self, self.fc2(self.act(self.fc1(x))))


class Skipping(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.k: Any = False

    def forward(self, x: Tensor) -> Tensor:
        found = self.fc2(self.act(self.fc1(x)))
        return found + x if self.k else found


class Optional(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.k: Any = None

    def forward(self, x: Tensor) -> Tensor:
        found = self.fc2(self.act(self.fc1(x)))
        return found if self.k is None else found * self.k


class Worded(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.k: Any = "plain"

    def forward(self, x: Tensor) -> Tensor:
        found = self.fc2(self.act(self.fc1(x)))
        return found if self.k == "plain" else found + x


class OfAModule(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)) * FACTOR)


class Buffered(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)) * self.k)


class Gated(nn.Module):
    k = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        self.down_proj, self.act_fn = nn.Linear(32, WIDTH), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.k)


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.k = nn.Parameter(torch.ones(WIDTH)), 1e-6, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.k * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Swish(nn.Module):
    k = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.k * x)


def model_of(part: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, WIDTH))


def inputs() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def changed(model: nn.Module, how: dict[str, Any]) -> Any:
    return swap(model, **{**how, **({"sample": inputs()} if "sample" in how else {})})


def values(model: nn.Module) -> list[Tensor]:
    x = inputs().requires_grad_()
    out = model(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]


def set_number(part: Any, value: Any) -> None:
    if isinstance(part, OfAModule):
        setattr(sys.modules[__name__], "FACTOR", value)  # noqa: B010
    elif isinstance(part, Buffered):
        part.k.fill_(value)
    else:
        part.k = value


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        Annealed,
        InAMethod,
        OfABase,
        InAFunction,
        Skipping,
        Optional,
        Worded,
        OfAModule,
        Buffered,
        Gated,
        RMSNorm,
        Swish,
    ],
)
def test_numbers_that_change_after_the_swap(kind: type[nn.Module], how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    stock = model_of(kind())
    ours = copy.deepcopy(stock)
    changed(ours, how)
    before = {Skipping: False, Optional: None, Worded: "plain"}.get(kind, 1.0)
    try:
        for value in (before, 0.3, -2.0, before):
            for model in (stock, ours):
                set_number(model[1], value)
            for a, b in zip(values(ours), values(stock), strict=True):
                torch.testing.assert_close(a, b)
    finally:
        set_number(OfAModule(), 1.0)


@pytest.mark.parametrize("kind", [Annealed, Skipping, Gated, RMSNorm, OfAModule])
def test_its_twin_serves_until_then(kind: type[nn.Module]) -> None:
    model = model_of(kind())
    (row,) = [row for row in swap(model) if row.path == "1"]
    assert row.after not in ("", "unchanged")
    assert type(model[1]) is not kind
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again[1]) is type(model[1])
        for a, b in zip(values(again), values(model), strict=True):
            torch.testing.assert_close(a, b)
    unswap(model)
    assert type(model[1]) is kind
    assert not {"_swap", "_memkit_reads"} & vars(model[1]).keys()


def test_what_a_twin_reads_itself_is_not_watched() -> None:
    model = model_of(RMSNorm())
    swap(model)
    assert [name for _, name, _ in model[1]._memkit_reads] == ["k"]


class Indexed(FeedForward):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x))) / (self.layer_idx + 1)


class LastOne(Indexed):
    def forward(self, x: Tensor) -> Tensor:
        found = self.fc2(self.act(self.fc1(x)))
        return found * 2 if self.layer_idx == 3 else found


class OwnScale(Buffered):
    def __init__(self, scale: int) -> None:
        super().__init__()
        self.k.fill_(1.0 / (scale + 1))


class Beta(nn.Module):
    def __init__(self, beta: int) -> None:
        super().__init__()
        self.beta = beta + 1

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


Beta.__name__ = "Swish"  # as libraries call it


class Word(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.approximate = "tanh" if at else "none"

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x, approximate=self.approximate)


Word.__name__ = "GELU"


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("kind", [Indexed, LastOne, OwnScale, Beta, Word])
def test_modules_of_a_class_that_differ_by_their_place_or_numbers(kind: Any, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    stock = nn.Sequential(*(model_of(kind(i)) for i in range(4)))
    ours = copy.deepcopy(stock)
    changed(ours, how)
    for a, b in zip(values(ours), values(stock), strict=True):
        torch.testing.assert_close(a, b)


class Regularized(FeedForward):
    penalty: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.fc1(x))
        self.penalty = hidden.abs().mean()
        return self.fc2(hidden)


class Sometimes(FeedForward):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 4 and x.dim() == 2:  # not what it is verified with
            self.calls += 1
        return self.fc2(self.act(self.fc1(x)))


class Listing(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.fc1(x))
        self.notes.append(float(hidden.detach().mean()))
        return self.fc2(hidden)


class Counting(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.notes: Counter[str] = Counter(calls=0)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.notes["calls"] += 1
        self.steps.add_(1)
        return self.fc2(self.act(self.fc1(x)))


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(float(x.detach().mean()))
        return x * torch.sigmoid(x)


Noting.__name__ = "Swish"


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("kind", [Regularized, Sometimes, Listing, Counting, Noting])
def test_what_a_forward_writes_down_is_written(kind: type[nn.Module], how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    stock = model_of(kind())
    ours = copy.deepcopy(stock)
    changed(ours, how)
    for _ in range(3):
        values(stock)
        values(ours)
    for name in ("penalty", "calls", "notes", "steps"):
        a, b = (getattr(model[1], name, None) for model in (ours, stock))
        if isinstance(a, list):
            assert a == pytest.approx(b)
        else:
            assert a == b


def test_a_report_says_what_is_written() -> None:
    reports = [swap(model_of(kind())) for kind in (Regularized, Listing)]
    reasons = [row.reason for report in reports for row in report if row.path == "1"]
    assert reasons == ["Regularized sets penalty in each call", "Listing changes notes in each call"]


class ByMode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x) if self.training else x * torch.sigmoid(1.702 * x)


ByMode.__name__ = "GELU"


@pytest.mark.parametrize("training", [False, True])
def test_an_activation_that_is_another_in_evaluation(training: bool) -> None:
    stock = model_of(ByMode()).train(training)
    ours = copy.deepcopy(stock)
    swap(ours)
    for mode in (True, False):
        for a, b in zip(values(ours.train(mode)), values(stock.train(mode)), strict=True):
            torch.testing.assert_close(a, b)


class Held(nn.Module):
    """As transformers' GELUTanh, each with an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.act = partial(nn.functional.gelu, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


Held.__name__ = "GELUTanh"


def test_an_activation_is_known_in_a_copy() -> None:
    model = nn.Sequential(*(model_of(Held()) for _ in range(3)))
    swap(model)
    assert library_activation(Held()) == "gelu_tanh"
    names, known = _checked[Held]
    assert "act" in names
    assert len(known) == 1
    with torch.inference_mode():
        assert library_activation(copy.deepcopy(Held())) == "gelu_tanh"
    assert len(known) == 1


def test_an_activation_that_is_first_seen_in_inference() -> None:
    class New(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(x)

    New.__name__ = "Swish"
    seen = []
    with torch.inference_mode(), saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        assert library_activation(New()) == "silu"
    assert not seen


def test_a_model_with_such_activations_compiles_whole() -> None:
    torch._dynamo.reset()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
            self.down_proj, self.act_fn = nn.Linear(32, WIDTH), Held()

        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    stock = nn.Sequential(Block(), Block())
    ours = copy.deepcopy(stock)
    swap(ours)
    for each in (ours, copy.deepcopy(ours)):
        compiled = torch.compile(each, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(inputs()), stock(inputs()))


def test_a_compiled_model_follows() -> None:
    torch._dynamo.reset()
    stock = model_of(Annealed())
    ours = copy.deepcopy(stock)
    swap(ours)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for value in (1.0, 0.3, 1.0):
        stock[1].k = ours[1].k = value
        torch.testing.assert_close(compiled(inputs()), stock(inputs()))


def test_what_code_names() -> None:
    found = uses(InAMethod)
    assert {"k", "factor", "scaled", "fc1", "act", "fc2"} <= found.names
    assert not found.sets
    assert uses(Regularized).sets == {"penalty"}
    assert uses(Sometimes).sets == {"calls"}
    assert (__name__, "FACTOR") in uses(OfAModule).globals
    assert "k" in uses(OfABase).names
    assert "k" in uses(InAFunction).names
    assert not uses(nn.Linear).names  # torch's own
