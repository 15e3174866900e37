"""Attention that layers write out: by `attend` where the lines say no more than it computes, else under a checkpoint."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attention_cases import TOKENS, Attention, given, small
from described_cases import (
    DEPTH,
    TAKEN,
    GivesWeights,
    Hidden,
    HiddenAndBiased,
    WithAFunction,
    WithMask,
    WithoutHeads,
    drawn,
    swapped,
    ways,
)
from swap_cases import assert_as_stock
from torch.utils.checkpoint import checkpoint

from memkit import lean, swap
from memkit.swap.library import rerun

__all__ = ["small"]  # a fixture
pytestmark = pytest.mark.usefixtures("repeatable")


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
