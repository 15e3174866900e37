"""Feed-forward networks whose forward calls its activation as a function: known by that code, verified by their values."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memkit import swap, unswap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")

D = 8
SEEN = []


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(D, 3 * D, bias=False), nn.Linear(3 * D, D, bias=False)
        self.w3 = nn.Linear(D, 3 * D, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class UpFirst(Gated):
    def forward(self, x):
        up = self.w1(x)
        return self.w2(up * nn.functional.gelu(self.w3(x), approximate="tanh"))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Linear(D, 3 * D), nn.Linear(3 * D, D)

    def forward(self, x):
        hidden = torch.nn.functional.gelu(self.up(x))
        return self.out(hidden)


class Tanh(Plain):
    def forward(self, x):
        return self.out(F.gelu(self.up(x), approximate="tanh"))


class Held(Plain):
    """An activation that is a module."""

    def __init__(self):
        super().__init__()
        self.act = nn.GELU()

    def forward(self, x):
        hidden = self.up(x)
        return self.out(self.act(hidden))


class HeldGated(Gated):
    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x):
        return self.w2(self.act(self.w3(x)) * self.w1(x))


class Stores(Gated):
    def forward(self, x):
        self.hidden = self.w1(x)
        return self.w2(F.silu(self.hidden) * self.w3(x))


class Branches(Gated):
    def forward(self, x):
        if len(x) > 100:
            return x
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class CallsMore(Gated):
    def forward(self, x):
        SEEN.append(x.shape)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Scaled(Gated):
    scale = 1.0

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x)) * self.scale


class Other(Gated):
    """Only its values show it."""

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x)) * 2


class CallsTwice(Held):
    def forward(self, x):
        return self.out(self.act(self.act(self.up(x))))


class Idle(Held):
    """Has an activation that it does not call."""

    def forward(self, x):
        return self.out(self.up(x))


KNOWN = {
    Gated: "gate, up",
    UpFirst: "gate, up",
    Plain: "h",
    Tanh: "h",
    Held: "h",
    HeldGated: "gate, up",
}


class Model(nn.Module):
    def __init__(self, cls):
        super().__init__()
        self.mlp, self.norm = cls(), nn.LayerNorm(D)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def step(model, x):
    model.zero_grad()
    out = model(x)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def row(report):
    return next((row for row in report if row.path == "mlp"), None)


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("cls", KNOWN)
def test_known(cls, sampled):
    model, x = Model(cls), torch.randn(2, 5, D)
    stock = copy.deepcopy(model)
    report = swap(model, sample=x if sampled else None)
    assert row(report).saved == KNOWN[cls], report
    for changed in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(step(changed, x), step(stock, x))
        ours, theirs = (measure(lambda m=m: m.mlp(x), device="cpu").saved for m in (changed, stock))
        hidden = 2 * 5 * 3 * D * 4
        assert theirs - ours == hidden * (2 if issubclass(cls, Gated) else 1)
    if sampled:
        assert row(report).bytes_before - row(report).bytes_after == theirs - ours
    unswap(model)
    assert type(model.mlp) is cls


@pytest.mark.parametrize("cls", [Stores, Branches, CallsMore, Scaled, Other, CallsTwice, Idle])
def test_left(cls):
    model, x = Model(cls), torch.randn(2, 5, D)
    expected = step(copy.deepcopy(model), x)
    report = swap(model, sample=x)
    assert row(report) is None or not row(report).changed, report
    torch.testing.assert_close(step(model, x), expected)
    assert type(model.mlp) is cls


@pytest.mark.parametrize("turned", [False, True])
def test_which_layer_is_first_is_seen_by_the_values(turned):
    class Square(Held):
        def __init__(self):
            super().__init__()
            self.up, self.out = nn.Linear(D, D), nn.Linear(D, D)

        if turned:

            def forward(self, x):
                return self.up(self.act(self.out(x)))

    model, x = Model(Square), torch.randn(2, 5, D)
    stock = copy.deepcopy(model)
    assert row(swap(model, sample=x)).saved == "h"
    torch.testing.assert_close(step(model, x), step(stock, x))


@pytest.mark.parametrize("cls", KNOWN)
def test_a_layer_that_was_replaced(cls):
    """As by an adapter."""
    model, x = Model(cls), torch.randn(2, 5, D)
    swap(model, sample=x)
    last = "w2" if issubclass(cls, Gated) else "out"
    setattr(model.mlp, last, nn.Sequential(getattr(model.mlp, last), nn.Tanh()))
    stock = copy.deepcopy(model)
    unswap(stock)
    torch.testing.assert_close(step(model, x), step(stock, x))


@pytest.mark.parametrize("cls", KNOWN)
def test_compiled(cls):
    model, x = Model(cls), torch.randn(2, 5, D)
    expected = step(copy.deepcopy(model), x)
    swap(model, sample=x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled, x), expected)


class Mixer(nn.Module):
    """As a library's feed-forward network, with something more that it may be given."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(D, 3 * D), nn.GELU(), nn.Linear(3 * D, D)

    def forward(self, hidden_states, scale=None):
        out = self.fc2(self.act(self.fc1(hidden_states)))
        return out if scale is None else out * scale


@pytest.mark.parametrize("sampled", [True, False])
def test_calls_by_name(sampled):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gated, self.mixer = Gated(), Mixer()

        def forward(self, x):
            return self.gated(x=x) + self.mixer(hidden_states=x) + self.mixer(x, 2) + self.mixer(x, scale=3)

    model, x = Model(), torch.randn(4, D)
    stock, before = copy.deepcopy(model), measure(lambda: model(x)).saved
    report = swap(model, sample=x if sampled else None, lean="call")
    assert {row.after for row in report if row.path in ("gated", "mixer")} == {"memkit"}, report
    torch.testing.assert_close(model(x), stock(x))
    assert measure(lambda: model(x)).saved < before
    with pytest.raises(TypeError, match="hidden"):
        model.mixer(hidden=x)
