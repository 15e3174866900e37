"""Dropout that a module's forward calls as a function: a seed is kept, no mask."""

import abc
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit import lean, swap, unswap
from memkit.memory import measure
from memkit.swap.library import dropped

pytestmark = pytest.mark.usefixtures("repeatable")

P, WIDTH = 0.3, 64


class Calls(nn.Module):
    def __init__(self, p=P, **given):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.p, self.given = p, given

    def forward(self, x):
        return F.dropout(self.last(self.first(x)), self.p, self.training, **self.given)


class Both(Calls):
    def forward(self, x):
        hidden = nn.functional.gelu(self.first(x))
        return self.last(nn.functional.dropout(hidden, p=self.p, training=self.training))


class Attends(Calls):
    """A region that is made again, with a dropout in it."""

    def forward(self, x):
        query, key = self.first(x), self.last(x)
        weights = torch.softmax(query @ key.mT, -1)
        weights = F.dropout(weights, self.p, self.training)
        return weights @ x


class Hands(Calls):
    def forward(self, x):
        return self.handed(F.dropout, x)

    def handed(self, function, x):
        return function(self.first(x), self.p, self.training)


def drawn(model, x, seed=1):
    torch.manual_seed(seed)
    return model(x)


def gradients(model, x, call=None):
    model.zero_grad()
    torch.manual_seed(2)
    (call or model)(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("how", [False, "call"])
def test_keeps_a_seed_in_place_of_a_mask(how):
    model, x = nn.Sequential(Calls()), torch.randn(512, WIDTH)
    before = measure(lambda: model(x).sum()).saved
    report = swap(model, sample=x, lean=how)
    after = measure(lambda: model(x).sum()).saved
    assert before - after >= 0.99 * 4 * x.numel()
    assert report.saved_after - after < 1024  # it counts what will be dropped
    (row,) = [row for row in report.rows if row.path == "0.dropout"]
    assert (row.before, row.after, row.saved) == ("dropout", "memkit", "seed")


def test_drops_each_element_with_that_probability_and_scales_the_others():
    model = swap_of(Calls())
    nn.init.eye_(model.first.weight), nn.init.eye_(model.last.weight)
    nn.init.zeros_(model.first.bias), nn.init.zeros_(model.last.bias)
    out = model(torch.ones(2000, WIDTH))
    assert ((out == 0) | torch.isclose(out, torch.tensor(1 / (1 - P)))).all()
    assert (out == 0).float().mean().item() == pytest.approx(P, abs=0.01)


def swap_of(model, **how):
    swap(model, **how)
    return model


@pytest.mark.parametrize("kind", [Calls, Both, Attends])
def test_draws_are_the_same_recorded_or_not_and_inside_lean_or_not(kind):
    model, x = swap_of(kind()), torch.randn(2, 768, WIDTH)
    outs = [drawn(model, x)]
    with lean():
        outs.append(drawn(model, x))
    with torch.no_grad():
        outs.append(drawn(model, x))
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


@pytest.mark.parametrize("kind", [Both, Attends])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_inside_lean_and_checkpoints_are_those_outside(kind, reentrant):
    model, x = swap_of(kind().double()), torch.randn(2, 512, WIDTH, dtype=torch.float64).requires_grad_()

    def again(x):
        return checkpoint(model, x, use_reentrant=reentrant)

    def inside(x):
        with lean():
            return model(x)

    def inside_again(x):
        with lean():
            return again(x)

    wanted = gradients(model, x)
    for call in (inside, again, inside_again):
        for ours, theirs in zip(gradients(model, x, call), wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


class Alpha(nn.Module):
    def forward(self, x):
        return F.alpha_dropout(x, P, self.training)


def test_alpha_dropout():
    model, x = Alpha(), torch.randn(64, WIDTH).requires_grad_()
    before = measure(lambda: model(x).sum()).saved
    swap(model, lean=False)
    assert measure(lambda: model(x).sum()).saved <= 64 < before
    ours = drawn(model, x)
    torch.manual_seed(1)
    torch.testing.assert_close(ours, memkit.functional.alpha_dropout(x, P, True), rtol=0, atol=0)


def test_is_stocks_in_evaluation_without_dropout_in_ops_and_unswapped():
    unswapped = swap_of(Both())
    unswap(unswapped)
    assert type(unswapped) is Both
    for model in (swap_of(Both()).eval(), swap_of(Both(), ops=["gelu"]), unswapped):
        stock = Both().train(model.training)
        stock.load_state_dict(model.state_dict())
        x = torch.randn(8, WIDTH)
        torch.testing.assert_close(drawn(model, x), drawn(stock, x), rtol=0, atol=0)


@pytest.mark.parametrize(("p", "given"), [(0.0, {}), (1.0, {}), (1, {}), (P, {"inplace": True})])
def test_what_memkit_does_not_drop_is_stocks(p, given):
    stock, x = Calls(p, **given), torch.randn(8, WIDTH)
    model = swap_of(copy.deepcopy(stock))
    torch.testing.assert_close(drawn(model, x), drawn(stock, x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("p", "given", "error"),
    [(1.5, {}, ValueError), (P, {"training": True}, TypeError), (P, {"q": 1}, TypeError)],
)
def test_errors_are_stocks(p, given, error):
    stock = Calls(p, **given)
    model = swap_of(copy.deepcopy(stock))
    with pytest.raises(error) as theirs:
        stock(torch.randn(2, WIDTH))
    with pytest.raises(error) as ours:
        model(torch.randn(2, WIDTH))
    assert str(ours.value) == str(theirs.value)


class Asks(Calls):
    """Of its own class, which a twin is not."""

    def forward(self, x):
        return F.dropout(super(type(self), self).forward(x), self.p, self.training)


@pytest.mark.parametrize("kind", [Hands, Asks])
def test_a_forward_that_does_more_with_it_stays_as_it_is(kind):
    model = swap_of(kind(), lean=False)
    assert type(model) is kind
    assert model(torch.randn(2, WIDTH)).shape == (2, WIDTH)


def test_a_mode_that_is_no_bool_is_stocks_error():
    model = swap_of(Calls()).train()
    model.training = 1
    with pytest.raises(TypeError, match="must be bool"):
        model(torch.randn(2, WIDTH))


class WithoutDictionary(abc.ABC, Calls):
    pass


@pytest.mark.parametrize("how", [False, "call"])
def test_a_class_that_takes_no_twin_is_left_with_a_reason(how):
    report = swap(
        nn.Sequential(WithoutDictionary(), nn.LayerNorm(WIDTH)), sample=torch.randn(8, WIDTH), lean=how
    )
    assert [row.path for row in report.changed] == ["1"]
    assert [row.reason for row in report.left] == [
        "objects of WithoutDictionary are laid out as its first base's, ABC: put that last"
    ]


class Gaps(Calls):
    """What the activation is given has gaps, and its dimensions in another order."""

    def forward(self, x):
        hidden = F.gelu(self.first(x)[:, ::2].transpose(0, 1))
        return F.dropout(hidden, self.p, self.training)


def test_drops_the_same_where_an_activation_is_given_what_has_gaps():
    model, x = swap_of(Gaps(), lean=True), torch.randn(8, 6, WIDTH)
    outside = drawn(model, x)
    with lean():
        inside = drawn(model, x)
    torch.testing.assert_close(inside, outside)


def test_the_report_says_where_nothing_is_dropped():
    class Parts(nn.ModuleDict):
        def forward(self, x):
            return self["overwrites"](self["drops"](x))

    parts = Parts({"drops": Calls(), "overwrites": Calls(inplace=True), "idle": Calls()})
    report = swap(parts, sample=torch.randn(8, WIDTH))
    assert [row.path for row in report.changed] == ["drops.dropout"]
    reason = "not called on the sample, or with nothing to drop out of place"
    assert [(row.path, row.after, row.reason) for row in report.left] == [
        (f"{name}.dropout", "unchanged", reason) for name in ("overwrites", "idle")
    ]


def test_transforms_take_stocks():
    model, x = swap_of(Calls()), torch.randn(3, 5, WIDTH)
    out = torch.func.vmap(model, randomness="different")(x)
    assert out.shape == x.shape
    grads = torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).sum())(
        dict(model.named_parameters())
    )
    assert all(torch.isfinite(grad).all() for grad in grads.values())


def test_a_sample_compares_with_what_stock_drops():
    model = nn.Sequential(Both(), nn.LayerNorm(WIDTH), Calls())
    report = swap(model, sample=torch.randn(64, WIDTH), lean="call")
    assert not [row for row in report.rows if row.after == "unchanged"]
    x = torch.randn(64, WIDTH)
    assert not torch.equal(drawn(model, x, 1), drawn(model, x, 2))


def test_compiles_whole_with_the_compilers_dropout():
    model, x = swap_of(Calls()), torch.randn(8, WIDTH)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = compiled(x)
    out.sum().backward()
    assert (out == 0).any()
    assert model.first.weight.grad is not None


def test_what_dropped_is_said_of_the_module_whose_forward_called_it():
    class Around(Calls):
        def __init__(self):
            super().__init__()
            self.inner = Calls(p=0.0)

        def forward(self, x):
            return F.dropout(self.inner(x), 0.5, self.training)

    model = Around()
    assert {row.path for row in swap(model).changed} == {"dropout", "inner.dropout"}
    model(torch.randn(8, WIDTH))
    assert model in dropped
    assert model.inner not in dropped
