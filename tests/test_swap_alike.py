"""What counts as alike on a sample: rounding that a model enlarges does, a wrong value does not; of complex numbers too."""

import copy
import math

import pytest
import torch
from swap_cases import (
    DOUBLE,
    Block,
    D,
    assert_as_stock,
    batch,
    mlp,
    only,
    plain,
)
from torch import nn

import memkit
from memkit import swap
from memkit._lean import is_lean
from memkit.memory import measure
from memkit.swap import trial, types

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.mark.parametrize("embedded", [False, True])
def test_a_kink_that_rounding_crosses_is_not_an_error(monkeypatch, embedded):
    """Stock computes exactly 0 before the ReLU, and has no gradient; any rounding moves half of it to the other side."""
    x = torch.arange(4) if embedded else batch()
    model = Block(lambda self, x: torch.relu(plain(self, self.embed(x)) - self.zero))
    model.embed = nn.Embedding(4, D, **DOUBLE) if embedded else nn.Identity()
    model.zero = plain(model, model.embed(x)).detach()
    real = types._C.activation

    class Rounding:
        @staticmethod
        def activation(op, input, *rest):
            return real(op, input * (1 + 1e-12), *rest)

    monkeypatch.setattr(types, "_C", Rounding)
    assert only(swap(model, sample=x)).changed
    model.embed = nn.Identity()
    assert_as_stock(model, batch())


class WithPosition(nn.Embedding):
    """Its result is not a tensor alone."""

    def forward(self, x):
        return {"position": torch.arange(x.shape[0]), "embedded": super().forward(x)}


@pytest.mark.parametrize("embedding", [WithPosition, nn.EmbeddingBag])
def test_embeddings_of_other_forms_are_disturbed_too(embedding):
    embed = embedding(4, D, **DOUBLE)
    model = trial.Trial(embed, torch.arange(4)[:, None])
    exact, again, noisy = (model.run("", noise=noise).outputs[0][0] for noise in (0.0, 0.0, 1e-3))
    assert exact == again
    assert exact * (1 - 1e-3) <= noisy <= exact * (1 + 1e-3)
    assert noisy != exact
    assert not embed._forward_hooks


def test_a_default_device_that_the_model_is_not_on():
    model, x = mlp(nn.GELU()), batch()
    with torch.device("meta"):
        report = swap(model, sample=x)
    assert any(row.changed for row in report)


def test_rounding_that_a_model_enlarges_is_not_an_error():
    """A batch norm over two values gives signs: gradients are as good as noise, stock's too."""
    model = nn.Sequential(
        nn.Conv2d(2, 64, 8), nn.BatchNorm2d(64), nn.SiLU(), nn.Conv2d(64, 4, 1), nn.BatchNorm2d(4)
    )
    report = swap(model, sample=torch.randn(2, 2, 8, 8))
    assert any(row.changed for row in report), report


def test_what_rounding_leaves_of_a_sum_over_many_rows_is_no_difference():
    # Stock sums a norm's bias gradient up in float32: of gradients that cancel, nothing but its rounding is left.
    model = nn.Sequential(nn.Linear(D, 512), nn.LayerNorm(512))
    assert only(swap(model, sample=torch.randn(4096, D))).changed


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_function_is_changed_again_after_a_first_disagreement(monkeypatch, activation):
    layer = nn.TransformerEncoderLayer(D, 2, D, 0.0, activation=activation, batch_first=True, **DOUBLE)
    answers = [False]
    agrees = trial.Outcome.agrees_with
    monkeypatch.setattr(
        trial.Outcome, "agrees_with", lambda *args: answers.pop() if answers else agrees(*args)
    )
    report = swap(layer, sample=batch(2, 3, D))
    assert not answers
    assert any(row.path == "activation" and row.changed for row in report.rows)
    assert_as_stock(layer, batch(2, 3, D))


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_of_whose_gradients_autocast_leaves_nothing(monkeypatch, wrong):
    """Deep, with batch norms over few values: compared in float32, where an error of a hundredth shows."""
    torch.manual_seed(0)
    layers = (nn.Linear(D, D), nn.GELU(), nn.BatchNorm1d(D))
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(20) for layer in layers))
    for linear in model[::3]:
        nn.init.normal_(linear.weight, std=2 / D**0.5)
    x = torch.randn(16, D)
    real = types._C.activation

    class Planted:
        @staticmethod
        def activation(op, input, *rest):
            rounding = 4e-3 * torch.rand_like(input) if input.dtype == torch.bfloat16 else 0.0
            return real(op, input * (1 + rounding + 0.05 * wrong), *rest)

    with torch.autocast("cpu", torch.bfloat16):
        stock, rounded = (trial.Trial(model, x).run("", noise=noise) for noise in (0.0, 2e-3))
        assert not rounded.agrees_with(stock, 0.25)
        monkeypatch.setattr(types, "_C", Planted)
        report = swap(model, sample=x, exact=False)
    changed = [row.changed for row in report.rows if row.before == "GELU"]
    assert len(changed) == 20
    assert not any(changed) if wrong else all(changed)


@pytest.mark.parametrize("wrong", [0.0, 1e-3])
def test_a_model_of_whose_gradients_float32_leaves_nothing(monkeypatch, wrong):
    """Compared in float64, where an error of a thousandth shows; here float32's outcomes never agree."""
    model, x = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)), torch.randn(8, D)
    real, run, agrees = types._C.activation, trial.Trial.run, trial.Outcome.agrees_with
    in_float64 = []

    def noted(self, phase, *args, **kwargs):
        outcome = run(self, phase, *args, **kwargs)
        if next(self.model.parameters()).dtype == torch.float64:
            in_float64.append(id(outcome))
        return outcome

    class Planted:
        @staticmethod
        def activation(op, input, *rest):
            return real(op, input * (1 + wrong), *rest)

    parameters = [p.clone() for p in model.parameters()]
    monkeypatch.setattr(types, "_C", Planted)
    monkeypatch.setattr(trial.Trial, "run", noted)
    # Stock, run again, agrees: it repeats itself on the sample.
    monkeypatch.setattr("memkit.swap.by_sample._disturbed", lambda *args: None)
    repeats = iter([False, False, True])
    monkeypatch.setattr(
        trial.Outcome,
        "agrees_with",
        lambda self, *args: agrees(self, *args) if id(self) in in_float64 else next(repeats),
    )
    report = only(swap(model, sample=x))
    assert report.changed == (not wrong)
    assert in_float64
    assert all(p.equal(q) for p, q in zip(model.parameters(), parameters, strict=True))


class LargeInside(nn.Module):
    """In half precision there is nothing left of what memkit's norm hands on, or no number; then `ends` looks at it."""

    def __init__(self, weight=1.0, bias=0.0, scale=1.0, ends=None, deep=0):
        super().__init__()
        self.norm, self.out, self.ends = nn.LayerNorm(D), nn.Linear(D, 8), ends
        self.scale, self.bias = scale, bias
        nn.init.constant_(self.norm.weight, weight)
        nn.init.constant_(self.norm.bias, bias)
        layers = (nn.Linear(D, D, bias=False), nn.BatchNorm1d(D), nn.ReLU())
        self.deep = nn.Sequential(*(copy.deepcopy(layer) for _ in range(deep) for layer in layers))

    def forward(self, x):
        y = self.out((self.norm(x) - self.bias) * self.scale)
        return self.deep(x), self.ends(y) if self.ends else y


def bfloat16_alone(y):
    assert y.dtype == torch.bfloat16
    return y


def as_many_as_digits(y):
    return y[: 4 if y.dtype == torch.bfloat16 else 5]


@pytest.mark.parametrize("deep", [0, 40])
@pytest.mark.parametrize(
    ("dtype", "kwargs"),
    [
        (torch.float16, {"weight": 1e6, "scale": 1e-6}),  # infinity
        (torch.bfloat16, {"bias": 3000.0}),
        (torch.bfloat16, {"bias": 3000.0, "ends": bfloat16_alone}),
        (torch.bfloat16, {"bias": 3000.0, "ends": as_many_as_digits}),
    ],
)
def test_what_autocast_makes_wrong_is_refused(dtype, kwargs, deep):
    """Also beside a network of whose gradients half precision leaves nothing, and of a model that needs autocast."""
    torch.manual_seed(0)
    model, x = LargeInside(deep=deep, **kwargs), torch.randn(32, D)
    with torch.autocast("cpu", dtype):
        report = swap(model, sample=x, exact=False)
        assert torch.get_autocast_dtype("cpu") is dtype
        assert torch.is_autocast_enabled("cpu")
    assert {row.before for row in report.changed} == ({"ReLU"} if deep else set())
    assert type(model.norm) is nn.LayerNorm


def test_nearness_to_what_is_exact():
    def outcome(*values):
        probes = torch.tensor(values, dtype=torch.float64)
        return trial.Outcome([(probes.norm().item(), probes)], [])

    truth = outcome(1.0, 0.0)
    assert outcome(1.0, 0.19).is_as_near([outcome(0.9, 0.0)], truth, 1e-6)
    assert not outcome(1.0, 0.21).is_as_near([outcome(0.9, 0.0)], truth, 1e-6)
    assert not outcome(math.nan, math.nan).is_as_near([outcome(-9.0, 9.0)], truth, 1.0)
    assert not outcome(1.0).is_as_near([outcome(-9.0, 9.0)], truth, 1.0)
    assert not trial.Outcome([], []).is_as_near([truth], truth, 1.0)
    # An error of stock's in one gradient excuses none in another.
    both = trial.Outcome(truth.outputs, [*outcome(5.0, 0.0).outputs, *outcome(1.0, 0.0).outputs])
    other = trial.Outcome(truth.outputs, [*outcome(1.0, 0.0).outputs, *outcome(-1.0, 0.0).outputs])
    exact = trial.Outcome(truth.outputs, [*outcome(1.0, 0.0).outputs] * 2)
    assert not other.is_as_near([both], exact, 0.05)


class Spectral(nn.Module):
    """With a complex weight."""

    def __init__(self, gives_complex=False):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)
        self.weight = nn.Parameter(torch.randn(D // 2 + 1, dtype=torch.complex64))
        self.gives_complex = gives_complex

    def forward(self, x):
        spectrum = torch.fft.rfft(self.last(self.act(self.first(x)))) * self.weight
        return spectrum if self.gives_complex else torch.fft.irfft(spectrum, n=D)


@pytest.mark.parametrize("wrong", [0.0, 1e-2])
@pytest.mark.parametrize("gives_complex", [False, True])
def test_complex_numbers_are_compared(monkeypatch, gives_complex, wrong):
    forward = types.GELU.forward
    if wrong:
        monkeypatch.setattr(types.GELU, "forward", lambda self, x: (1 + wrong) * forward(self, x))
    model = Spectral(gives_complex)
    report = swap(model, sample=batch(dtype=torch.float32), lean=True)
    assert not report.note
    assert bool(report.changed) == (not wrong)
    assert wrong or report.saved_after < report.saved_before


def test_complex_parts_of_a_wider_copy_stay():
    model = Spectral()
    wide = trial.Trial(model, (batch(dtype=torch.float32),)).widened(torch.float64)
    assert wide.model.weight.dtype == torch.complex64
    assert torch.equal(wide.model.weight, model.weight)
    assert wide.model.first.weight.dtype == torch.float64


def test_the_sample_runs_as_the_model_will():
    seen = []

    class Looks(nn.Module):
        def forward(self, x):
            seen.append(is_lean())
            return x

    # Of stock, three times; swapped; the group norms keep less only inside lean().
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(64, 64, 1), nn.GroupNorm(32, 64), nn.SiLU())]
    model = nn.Sequential(*layers, nn.Conv2d(64, 4, 1), Looks())
    x = torch.randn(2, 64, 2, 2)
    report = swap(model, sample=x, lean=True)
    assert seen[-1]
    assert not seen[0]

    def run():
        with memkit.lean():
            return model(x).sum()

    kept = measure(run).saved
    assert report.saved_after < report.saved_before / 2
    assert abs(report.saved_after - kept) <= 256  # the loss
