"""Attention that layers write out: by `attend` where the lines say no more than it computes, else under a checkpoint."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from attention_cases import HEADS, TOKENS, WIDTH, Attention, given, small
from swap_cases import assert_as_stock
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from memkit import lean, swap
from memkit.swap.library import rerun

__all__ = ["small"]  # a fixture
pytestmark = pytest.mark.usefixtures("repeatable")

DEPTH = WIDTH // HEADS
CAUSAL = torch.ones(TOKENS, TOKENS).tril()


class WithMask(Attention):
    """As nanoGPT's layer has it."""

    def __init__(self, p=0.0):
        super().__init__(p)
        self.register_buffer("causal", CAUSAL.view(1, 1, TOKENS, TOKENS))

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.causal[:, :, :TOKENS, :TOKENS] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.dropout(att)
        return self.merged(att @ v)


class WithAFunction(WithMask):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        att = torch.matmul(q, k.mT).masked_fill_(self.causal == 0, -1e4).softmax(-1)
        att = F.dropout(att, self.dropout.p, self.training)
        return self.merged(torch.matmul(att, v))


class Hidden(WithMask):
    """Rows that see nothing: their weights are all alike, and no gradient comes to their scores."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        seen = self.causal.flip(-1)[..., 1:].bool()
        scores = q @ k[:, :, 1:].mT / 2
        scores = scores.masked_fill(~seen, -6e4)
        return self.merged(scores.softmax(-1) @ v[:, :, 1:])


class HiddenAndBiased(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        keys = torch.arange(TOKENS)[:, None] > torch.tensor([[0]])
        scores = 0.5 * (q @ k.mT)
        scores = scores + self.bias
        scores = torch.where(keys, scores, torch.tensor(-5.0, dtype=x.dtype))
        return self.merged(scores.softmax(dim=3) @ v)


class Added(WithMask):
    """As Meta's Llama has it."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        full = torch.full((TOKENS, TOKENS), float("-inf"), dtype=x.dtype)
        mask = torch.triu(full, diagonal=1)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(DEPTH)
        scores = scores + mask
        scores += self.bias.detach()[:1, :1]
        scores = F.softmax(scores.to(x.dtype), dim=-1).type_as(q)
        return self.merged(torch.matmul(scores, v))


class Unused(Attention):
    """What nobody takes changes nothing; in place it does."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        other = scores * 3.0
        same = scores
        same *= 0.5
        other = scores + self.bias[:, :1]  # noqa: F841
        weights = scores.softmax(-1)
        return self.merged(weights @ v)


class ByEinsum(Attention):
    """With the tokens before the heads, as many tutorials have it."""

    def forward(self, x, mask=None):
        q, k, v = (y.view(*x.shape[:2], HEADS, DEPTH) for y in (self.q(x), self.k(x), self.v(x)))
        energy = torch.einsum("nqhd,nkhd->nhqk", [q, k]) if mask is not None else 0
        energy = torch.einsum("nqhd,nkhd->nhqk", q, k)
        weights = torch.softmax(energy / (DEPTH ** (1 / 2)), dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", weights, v)
        return self.out(out.reshape(*x.shape))


class WithoutHeads(Attention):
    def forward(self, x, mask=None):
        q, k, v = (y.flatten(0, 1) for y in self.projected(x))
        weights = torch.bmm(q, k.transpose(1, 2)) * DEPTH**-0.5
        weights = weights + self.bias[:1]
        weights = self.dropout(weights.softmax(dim=-1))
        return self.merged(torch.bmm(weights, v).view(x.shape[0], HEADS, TOKENS, DEPTH))


class Before(WithMask):
    """A layer before the product too, and nothing kept behind it."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        return self.attend(q, k, v, self.dropout).sum((1, 3))

    def attend(self, q, k, v, layer):
        q = layer(q)
        scores = q @ k.mT
        weights = F.softmax(scores, dim=-1)
        return layer(weights) @ v


class GivesWeights(WithMask):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        weights = self.dropout(scores.softmax(-1))
        y = weights @ v
        return self.merged(y), weights.sum(-2).transpose(1, 2).repeat(1, 1, DEPTH)


TAKEN = [
    Attention,
    WithMask,
    WithAFunction,
    Hidden,
    HiddenAndBiased,
    Added,
    ByEinsum,
    WithoutHeads,
    GivesWeights,
]


class Normed(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        weights = (q @ k.mT).softmax(-1)
        weights = weights / (1e-9 + weights.sum(dim=1, keepdim=True))
        return self.merged(weights @ v)


class Detached(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        return self.merged((scores - scores.detach().amax(-1, keepdim=True)).softmax(-1) @ v)


class Asked(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        if (scores > 0).any():
            scores = scores * 2.0
        return self.merged(scores.softmax(-1) @ v)


class OtherAxis(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        return self.merged((q @ k.mT).softmax(-2) @ v)


class Scaled(Attention):
    """After something was added."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT + self.bias
        scores = scores * 0.5
        return self.merged(scores.softmax(-1) @ v)


class LearnedScale(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT * self.bias[:, :1, :1]
        return self.merged(scores.softmax(-1) @ v)


class OfEachSample(Attention):
    """As many numbers as there are weights."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        relative = torch.einsum("bhid,hjd->bhij", q, self.bias[:, :, :DEPTH])
        scores = q @ k.mT + relative
        return self.merged(scores.softmax(-1) @ v)


class Unrecorded(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        with torch.no_grad():
            scores = q @ k.mT
            weights = scores.softmax(-1)
        return self.merged(weights @ v)


class UnrecordedAfter(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        with torch.no_grad():
            y = scores.softmax(-1) @ v
        return self.merged(y)


class PartlyUnrecorded(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        with torch.no_grad():
            weights = scores.softmax(-1)
        return self.merged(weights @ v)


class AsksMore(Attention):
    """Of scores, what nothing is said of."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        scores = scores * (2.0 if scores.is_cuda or hasattr(scores, "other") else 1.0)
        return self.merged(scores.softmax(-1) @ v)


class AsksItsType(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        scores = scores * (1.0 if type(scores) is torch.Tensor else 2.0)
        return self.merged(scores.softmax(-1) @ v)


class Overwrites(Attention):
    """What it has added."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        hidden = scores.new_zeros(1, TOKENS)
        hidden[:, :3] = -1.0
        scores = scores + hidden
        hidden += 5.0 * torch.arange(TOKENS)
        return self.merged(scores.softmax(-1) @ v)


class GivesScores(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        y = self.dropout(scores.softmax(-1)) @ v
        return self.merged(y) + scores.mean()


class GivesWeightsBefore(Attention):
    """Dropout."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        weights = (q @ k.mT).softmax(-1)
        y = F.dropout(weights, 0.5) @ v
        return self.merged(y) + weights.mean()


LEFT = [
    *(Normed, Detached, Asked, OtherAxis, Scaled, LearnedScale, OfEachSample),
    *(
        Unrecorded,
        UnrecordedAfter,
        PartlyUnrecorded,
        AsksMore,
        AsksItsType,
        Overwrites,
        GivesScores,
        GivesWeightsBefore,
    ),
]


def swapped(model, **how):
    swap(model, lean="call", **how)
    return model


def ways():
    return {worth for worth in rerun._worth.values() if worth}


@pytest.mark.parametrize("kind", TAKEN)
def test_as_stock_by_attend(kind):
    model, x = swapped(kind().double()), given()
    assert_as_stock(model, x)
    assert ways() == {"attend"}


@pytest.mark.parametrize("kind", [WithMask, WithAFunction, WithoutHeads])
def test_by_attend_after_a_sample_too(kind):
    """Which is compared under stock's dropout."""
    model, x = kind(0.3), given(torch.float32)
    report = swap(model, sample=x, lean="call")
    rows = [row for row in report.rows if row.path == "dropout" and row.before == "dropout"]
    assert [row.after for row in rows] == ["memkit"] * (kind is WithAFunction)
    rerun_ways = rerun._worth.copy()
    drawn(model, x)
    assert rerun._worth == rerun_ways  # asked in the run with dropout
    assert "attend" in ways()


@pytest.mark.parametrize("kind", LEFT)
def test_as_stock_by_a_checkpoint(kind):
    torch.manual_seed(0)
    model, x = swapped(kind().double(), ops=["attention"]), given()
    assert_as_stock(model, x)
    assert "attend" not in ways()


@pytest.mark.parametrize("kind", TAKEN)
def test_derivatives(kind):
    stock, x = kind().double(), given().requires_grad_()
    model, found = swapped(copy.deepcopy(stock)), []
    for each in (stock, model):
        out = each(x)
        loss = sum(y.square().sum() for y in out) if isinstance(out, tuple) else out.square().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        own = list(each.parameters())
        second = torch.autograd.grad(first.square().sum(), [x, *own], retain_graph=True, allow_unused=True)
        found.append([first, *second, *torch.autograd.grad(loss, [x, *own], allow_unused=True)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


def drawn(model, x, call=None):
    torch.manual_seed(4)
    out = (call or model)(x)
    return torch.cat(out) if isinstance(out, tuple) else out


WITH_DROPOUT = [Attention, WithMask, WithAFunction, WithoutHeads, GivesWeights]


@pytest.mark.parametrize("kind", WITH_DROPOUT)
def test_draws_are_those_outside_lean(kind):
    model, x = kind(0.3).double(), given()
    swap(model, lean=True)
    outs = [drawn(model, x)]
    with torch.no_grad():
        outs.append(drawn(model, x))
    with lean():
        outs.append(drawn(model, x))
    after = [torch.rand(1)]
    assert ways() == {"attend"}
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])
    drawn(model, x)
    torch.testing.assert_close(torch.rand(1), after[0])


@pytest.mark.parametrize("kind", WITH_DROPOUT)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_with_dropout(kind, reentrant):
    model, x, found = kind(0.3).double(), given().requires_grad_(), []
    swap(model, lean=True)

    def again(x):
        return checkpoint(model, x, use_reentrant=reentrant)

    def inside(x, call=model):
        with lean():
            return call(x)

    for call in (model, inside, again, lambda x: inside(x, again)):
        model.zero_grad()
        drawn(model, x, call).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
        x.grad = None
    for grads in found[1:]:
        for ours, theirs in zip(grads, found[0], strict=True):
            torch.testing.assert_close(ours, theirs)


class Wants(WithMask):
    """The weights before dropout, if they are wanted: another branch than the one that was looked at."""

    wants = False

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = self.dropout(q) @ k.mT
        before = None
        weights = scores.softmax(-1)
        if self.wants:
            before = weights
        y = self.dropout(weights) @ v
        if before is not None:
            y = y + before.mean()
        return self.merged(y)


def test_a_run_that_ends_has_drawn_nothing():
    model, x = swapped(Wants(0.3).double()), given()
    drawn(model, x)
    assert ways() == {"attend"}
    model.wants = True
    outs = [drawn(model, x)]
    after = torch.rand(1)
    with torch.no_grad():
        outs.append(drawn(model, x))
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(torch.rand(1), after)


class Changes(WithMask):
    """The factor, and what is hidden, from call to call."""

    factor, hides, adds = 0.5, False, False

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT * self.factor
        if self.adds:
            scores = scores + self.bias[:, :1]
            scores = scores * 0.5
        if self.hides:
            scores = scores.masked_fill(self.causal == 0, -1e9)
        return self.merged(scores.softmax(-1) @ v)


class Given(WithMask):
    """Of each call another layer."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        return self.merged(self.attend(q, k, v, self.dropout))

    def attend(self, q, k, v, layer):
        factor = 2.0 if isinstance(layer, nn.Identity) else 1.0
        weights = (q @ k.mT).softmax(-1)
        if factor > 1:
            weights = weights * factor
        return layer(weights) @ v


def test_what_is_done_with_weights_is_not_done_with_scores():
    for layer in (nn.Dropout(0.0), nn.Softmax(-1), nn.Identity(), nn.Dropout(0.0)):
        if layer is not None:
            model, x = Given().double(), given()
            model.dropout = layer
            swap(model, lean="call")
            assert_as_stock(model, x)
    assert ways() == {"attend"}  # asked once


@pytest.mark.parametrize("kind", [WithMask, Before])
def test_a_checkpoint_that_stops_early(kind):
    """Once it has made again what was kept of the lines."""
    model, x = swapped(kind(0.3).double()), given().requires_grad_()
    drawn(model, x, lambda x: checkpoint(model, x, use_reentrant=False)).square().sum().backward()
    again = x.grad
    x.grad = None
    drawn(model, x).square().sum().backward()
    torch.testing.assert_close(again, x.grad)


class Later(WithMask):
    """From the second call on, what ends a run or would change its result unseen."""

    how = ""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        hidden = scores.new_zeros(1, TOKENS)
        scores = scores + hidden
        if self.how == "written to":
            hidden += torch.arange(TOKENS)
        if self.how == "asked" and scores.is_cuda:
            scores = scores + 1.0 * hidden.sum() * torch.arange(TOKENS)
            scores = scores.masked_fill(self.causal == 0, -1e9)
        if self.how == "unused":
            other = scores.masked_fill(self.causal == 0, -1e9)  # noqa: F841
        return self.merged(scores.softmax(-1) @ v)


class LaterOfItsType(WithMask):
    how = ""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        if self.how and type(scores) is not torch.Tensor:
            scores = scores.masked_fill(self.causal == 0, -1e9)
        return self.merged(scores.softmax(-1) @ v)


@pytest.mark.parametrize("how", ["written to", "asked", "unused"])
@pytest.mark.parametrize("kind", [Later, LaterOfItsType])
def test_branches_that_come_later(kind, how):
    model, x = swapped(kind().double()), given()
    model(x)
    assert ways() == {"attend" if kind is Later else "again"}
    model.how = how
    assert_as_stock(model, x)


def test_stocks_dropout_draws_as_stock_after_evaluation():
    stock, x = WithAFunction(0.3).double().eval(), given()
    model = swapped(copy.deepcopy(stock), ops=["attention"])
    model(x)
    assert ways() == {"attend"}
    torch.testing.assert_close(drawn(model.train(), x), drawn(stock.train(), x))


def test_each_call_is_described_anew():
    model, x = swapped(Changes().double()), given()
    cases = [(0.5, False, False), (2, True, False), (0.1, False, True), (torch.tensor(0.3), True, False)]
    for factor, hides, adds in cases:
        model.factor, model.hides, model.adds = factor, hides, adds
        assert_as_stock(model, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Attention, WithMask, Hidden, HiddenAndBiased])
def test_error_in_every_dtype(kind, dtype):
    stock, x = kind().to(dtype), given().to(dtype)
    wide, model, errors = copy.deepcopy(stock).double(), swapped(copy.deepcopy(stock)), []
    exact = wide(x.double())
    exact.square().sum().backward()
    for each in (model, stock):
        out = each(x)
        out.float().square().sum().backward()
        pairs = [(out, exact)]
        pairs += [(p.grad, q.grad) for p, q in zip(each.parameters(), wide.parameters(), strict=True)]
        errors.append([float((a.double() - b).detach().norm()) for a, b in pairs if b is not None])
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= 2 * theirs + 1e-6


class Wrong(WithMask):
    how = "right"

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        if self.how == "grad":
            scores.requires_grad = False
        if self.how == "fill":
            scores = scores.masked_fill(self.causal == 0, 10**30)
        return self.merged(F.softmax(scores, dim=-1.0 if self.how == "dim" else -1) @ v)


@pytest.mark.parametrize("how", ["grad", "fill", "dim"])
def test_what_stock_refuses_raises(how):
    model, x = swapped(Wrong()), given(torch.float32)
    model(x)
    assert ways() == {"attend"}
    model.how = how
    with pytest.raises((RuntimeError, TypeError, OverflowError)):
        model(x)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 2 if function is F.softmax else out


def test_modes_see_what_they_see():
    stock, x = WithMask().double(), given()
    model = swapped(copy.deepcopy(stock))
    model(x)
    with Doubles():
        torch.testing.assert_close(model(x), stock(x))


class HasALayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.soft = Attention(), nn.Softmax(-1)
        self.attend = nn.Identity()

    def forward(self, x):
        q, k, v = self.attention.projected(x)
        weights = self.soft(self.attend(q @ k.mT))
        return self.attention.merged(weights @ v)


def test_layers_that_pass_on_what_they_are_given():
    model, x = swapped(HasALayer().double()), given()
    assert_as_stock(model, x)
