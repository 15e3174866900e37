"""What is written out in elementwise operators: inside `memkit.lean` its input is kept, and backward makes it again."""

import copy
import pickle

import pytest
import torch
from swap_cases import D, assert_as_stock, batch, step
from torch import nn
from torch.nn.functional import dropout, softplus

from memkit import lean, swap, unswap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")


class LimitedExperts(nn.Module):
    """One expert with GPT-OSS's gate."""

    p = 0.0

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(D, 4 * D))
        self.down_proj = nn.Parameter(torch.randn(2 * D, D))
        self.limit = 2.0

    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate = gate.clamp(max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return dropout((up + 1) * (gate * torch.sigmoid(gate * 1.702)), self.p, self.training)

    def forward(self, x):
        return self._apply_gate(x @ self.gate_up_proj) @ self.down_proj


class XIELUActivation(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.rand(1)), nn.Parameter(torch.rand(1))

    def forward(self, x):
        below = (torch.expm1(torch.clamp(x, max=-1e-6)) - x) * (0.5 + softplus(self.alpha_n))
        return torch.where(x > 0, softplus(self.alpha_p) * x * x, below) + 0.5 * x


class VocoderSnakeBeta(nn.Module):
    """The activation of codecs and vocoders, with parameters for each feature."""

    def __init__(self):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.rand(2 * D)), nn.Parameter(torch.rand(2 * D))

    def forward(self, x):
        return x + torch.exp(self.beta).reciprocal() * torch.sin(x * torch.exp(self.alpha)).pow(2)


class StarReLU(nn.Module):
    """timm's, of a MetaFormer."""

    def __init__(self, inplace=False):
        super().__init__()
        self.relu = nn.ReLU(inplace=inplace)
        self.scale, self.bias = nn.Parameter(torch.rand(1)), nn.Parameter(torch.rand(1))

    def forward(self, x):
        return self.scale * self.relu(x) ** 2 + self.bias


KNOWN = {
    "gate": (LimitedExperts, 2 * D + 4 * D),
    "activation": (lambda: nn.Sequential(nn.Linear(D, 2 * D), XIELUActivation(), nn.Linear(2 * D, D)), 4 * D),
    "snake": (lambda: nn.Sequential(nn.Linear(D, 2 * D), VocoderSnakeBeta(), nn.Linear(2 * D, D)), 4 * D),
    "star": (lambda: nn.Sequential(nn.Linear(D, 2 * D), StarReLU(), nn.Linear(2 * D, D)), 2 * D),
    "star in place": (lambda: nn.Sequential(nn.Linear(D, 2 * D), StarReLU(True), nn.Linear(2 * D, D)), 2 * D),
}
"""With what is kept of each row beside the input: what was given, and the result, which the next layer keeps."""
known = pytest.mark.parametrize("name", KNOWN)


@known
@pytest.mark.parametrize("mode", [True, "call"])
@pytest.mark.parametrize("by_sample", [False, True])
def test_as_stock(name, by_sample, mode):
    model, x = KNOWN[name][0]().double(), batch()
    stock = [type(m) for m in model.modules()]
    expected = step(model, x)
    report = swap(model, sample=x if by_sample else None, lean=mode)
    assert any(row.after == "in lean()" and row.saved == "input" for row in report)
    assert_as_stock(model, x)
    with lean():
        torch.testing.assert_close(step(model, x), expected, rtol=0, atol=0)
        copied = pickle.loads(pickle.dumps(model))
        torch.testing.assert_close(step(copied, x), expected, rtol=0, atol=0)
    unswap(model)
    assert [type(m) for m in model.modules()] == stock


@known
def test_saved_bytes(name):
    make, kept = KNOWN[name]
    model, x = make(), torch.randn(64, D)
    report = swap(model, sample=x, lean="call")
    assert report.saved_after == measure(lambda: model(x)).saved
    assert report.saved_after <= 64 * kept * 4 + 8
    assert report.saved_before > 1.5 * report.saved_after


def test_a_dropout_in_it_drops_the_same():
    class Dropping(LimitedExperts):
        p = 0.5

    model, x = Dropping().double(), batch()
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    torch.testing.assert_close(step(model, x), step(stock, x), rtol=0, atol=0)


@known
def test_without_lean_or_by_other_names_it_is_stock(name):
    model, x = KNOWN[name][0](), torch.randn(4, D)
    saved = measure(lambda: model(x)).saved
    for options in ({}, {"lean": "call", "ops": ["dropout"]}):
        assert not any(row.after == "in lean()" for row in swap(model, **options))
        assert measure(lambda: model(x)).saved == saved


def test_a_star_relu_without_values_is_left():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(D, D), StarReLU(), nn.Linear(D, D))
    assert not any(row.path == "1" and row.changed for row in swap(model, lean="call"))


def test_another_star_relu_is_left():
    class Other(StarReLU):
        def forward(self, x):
            return self.scale * self.relu(x) ** 2 - self.bias

    Other.__name__ = "StarReLU"
    model = nn.Sequential(nn.Linear(D, D), Other(), nn.Linear(D, D)).double()
    report = swap(model, lean="call")
    assert not any(row.path == "1" for row in report)
    assert_as_stock(model, batch())


def test_a_gate_of_two_tensors_is_stock():
    class Split(LimitedExperts):
        def _apply_gate(self, gate, up):
            return super()._apply_gate(torch.stack((gate, up), -1).flatten(-2))

        def forward(self, x):
            gate, up = (x @ self.gate_up_proj).chunk(2, -1)
            return self._apply_gate(gate, up=up) @ self.down_proj

    model, x = Split().double(), batch()
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    torch.testing.assert_close(step(model, x), step(stock, x), rtol=0, atol=0)


@pytest.mark.parametrize("what", ["input", "parameter"])
def test_a_change_before_backward_is_refused(what):
    """As by stock, which saved them."""
    model, x = XIELUActivation(), torch.randn(2, D, requires_grad=True)
    swap(model, lean=True)
    h = x * 1
    with lean():
        out = model(h)
    with torch.no_grad():
        (h if what == "input" else model.alpha_p).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_parameters_that_a_gate_does_not_read_may_change():
    """As they do where an optimizer steps inside of backward."""
    model, x = LimitedExperts(), torch.randn(2, D)
    swap(model, lean=True)
    with lean():
        gated = model._apply_gate(x @ model.gate_up_proj)
    with torch.no_grad():
        model.down_proj.zero_()
    gated.sum().backward()
