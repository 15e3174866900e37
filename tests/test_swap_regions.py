"""Attention that layers write out: inside `lean()` what it is taken of is kept, and the weights are made again."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from attention_cases import HEADS, TOKENS, WIDTH, Attention, given, small, steps_saved
from swap_cases import assert_as_stock
from torch import nn
from torch.utils.checkpoint import checkpoint

from memkit import swap, unswap

__all__ = ["small"]  # a fixture
pytestmark = pytest.mark.usefixtures("repeatable")


class InOneLine(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        return self.merged((q @ k.mT + self.bias).softmax(-1) @ v)


class InBranches(Attention):
    fused = False

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, self.bias)
        else:
            q = q * q.shape[-1] ** -0.5
            scores = q @ k.transpose(-2, -1)
            scores += self.bias
            if mask is not None:
                scores = scores.view(-1, 2, HEADS, TOKENS, TOKENS) + mask.float()
                scores = scores.view(-1, HEADS, TOKENS, TOKENS)
                weights = nn.Softmax(dim=-1)(scores)
            else:
                weights = scores.softmax(-1)
            y = self.dropout(weights) @ v
        return self.merged(y)


class ByMethods(Attention):
    def forward(self, x, mask=None):
        out, _ = self._attn(*self.projected(x), mask)
        return self.merged(out)

    def _attn(self, q, k, v, mask):
        scores = torch.einsum("bhid,bhjd->bhij", q, k)
        scores = scores + self.relative(q, shape=scores.shape)
        weights = scores.softmax(-1)
        if scores.shape[-1] != k.shape[-2]:
            raise ValueError(f"expected {k.shape[-2]} keys")
        return torch.einsum("bhij,bhjd->bhid", weights, v), weights

    def relative(self, q, shape):
        scores = 0
        for i in range(2):
            scores += i * q.sum(-1, keepdim=True) * self.bias
        return scores.view(shape)


def attend(q, k, v, bias, sizes):
    scores = q @ k.mT * sizes[0]
    hidden = scores.new_zeros(TOKENS, TOKENS)
    count = 0
    for rows in (slice(0, 3), slice(3, TOKENS)):
        hidden[rows] = count
        count += 2
    return torch.softmax(scores + bias + hidden, -1).matmul(v)


class ByAFunction(Attention):
    def forward(self, x, mask=None):
        sizes = [2, 3]
        y = attend(*self.projected(x), self.bias, sizes)
        sizes[0] = 5  # after its copy was made
        return self.merged(y)


def attention(query, key, value, bias=None, dropout=None):
    """As "The annotated transformer" has it."""
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if bias is not None:
        scores = scores + bias
    weights = scores.softmax(dim=-1)
    if dropout is not None:
        weights = dropout(weights)
    return torch.matmul(weights, value), weights


class GivesALayer(Attention):
    def forward(self, x, mask=None):
        y, _ = attention(*self.projected(x), bias=self.bias, dropout=self.dropout)
        return self.merged(y)


class GivesWeights(Attention):
    def forward(self, x, mask=None, wanted=True):
        q, k, v = self.projected(x)
        weights = torch.matmul(q, k.transpose(-1, -2))
        weights = torch.softmax(weights, dim=-1)
        y = self.merged(torch.matmul(weights, v))
        outputs = (y,)
        if wanted:
            outputs = (*outputs, weights.sum(-2).transpose(1, 2).repeat(1, 1, WIDTH // HEADS))
        return outputs


class OfAnotherName(Attention):
    """That of the first argument."""

    def forward(layer, x, mask=None):  # noqa: N805
        q, k, v = layer.projected(x)
        scores = q @ k.mT
        scores = layer.relative(scores)
        return layer.merged(layer.dropout(scores.softmax(-1)) @ v)

    def relative(me, scores):  # noqa: N805
        return scores + me.own_bias()

    def own_bias(me):  # noqa: N805
        return me.bias


KINDS = [
    *(Attention, InOneLine, InBranches, ByMethods, ByAFunction, GivesALayer, GivesWeights, OfAnotherName),
]
kinds = pytest.mark.parametrize("kind", KINDS)
BY_ATTEND = {InOneLine, GivesWeights}
"""Without a dropout of stock's, and with no more than `attend` computes."""


@kinds
@pytest.mark.parametrize("by_sample", [False, True])
def test_as_stock(kind, by_sample):
    model, x = kind().double(), given()
    report = swap(model, sample=x if by_sample else None, lean="call")
    assert [row.after for row in report.changed if row.path == ""] == ["in lean()"]
    assert_as_stock(model, x)
    unswap(model)
    assert type(model) is kind


@pytest.mark.parametrize("kind", [Attention, InBranches])
def test_masks(kind):
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    model = kind().double()
    swap(model, lean="call")
    assert_as_stock(model, given(), mask)


@kinds
def test_no_weights_are_kept(kind):
    model, x = kind(), given(torch.float32)
    stock = steps_saved(copy.deepcopy(model), x)
    swap(model, lean="call")
    weights = 4 * 2 * HEADS * TOKENS**2
    assert steps_saved(model, x) <= stock - weights


@kinds
def test_draws_as_stock(kind):
    """The run that counts what is kept leaves no trace, and backward draws the same; under a checkpoint, to the bit."""
    stock = kind(p=0.5)
    model, x = copy.deepcopy(stock), given(torch.float32)
    swap(model, ops=["attention"], lean="call")
    found = []
    for each in (stock, model):
        torch.manual_seed(3)
        out = torch.cat(each(x)) if kind is GivesWeights else each(x)
        drawn = torch.rand(3)
        each.eval()  # before backward
        out.square().sum().backward()
        found.append([out, drawn, *(p.grad for p in each.parameters() if p.grad is not None)])
    rtol, atol = (1e-5, 1e-4) if kind in BY_ATTEND else (0, 0)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


class OfKeysFirst(Attention):
    """Linear in the number of tokens: softmax of queries and keys by themselves (Shen et al. 2018)."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        q = q.softmax(dim=-1)
        k = k.softmax(dim=-2)
        q = q * q.shape[-1] ** -0.5
        context = torch.einsum("bhnd,bhne->bhde", k, v)
        return self.merged(torch.einsum("bhde,bhnd->bhne", context, q))


def test_softmax_of_what_is_no_product():
    """What it is taken of is kept then."""
    model, x = OfKeysFirst().double(), given()
    report = swap(model, sample=x, lean="call")
    assert [row.after for row in report.changed if row.path == ""] == ["in lean()"]
    assert_as_stock(model, x)
    model, x = OfKeysFirst(), given(torch.float32)
    stock = steps_saved(copy.deepcopy(model), x)
    swap(model, lean="call")
    assert steps_saved(model, x) <= stock - x.nbytes


def test_differentiated_twice_and_kept():
    stock, x = Attention().double(), given().requires_grad_()
    model = copy.deepcopy(stock)
    swap(model, lean="call")
    found = []
    for each in (stock, model):
        loss = each(x).square().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), [x, each.bias], retain_graph=True)
        found.append([first, *second, *torch.autograd.grad(loss, [x, each.bias])])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant):
    model = Attention().double()
    stock, x = copy.deepcopy(model), given().requires_grad_()
    swap(model, lean="call")
    grads = []
    for each in (stock, model):
        checkpoint(each, x, use_reentrant=reentrant).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in each.parameters())])
        x.grad = None
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_autocast():
    stock, x = Attention(), given(torch.float32)
    model = copy.deepcopy(stock)
    swap(model, ops=["attention"], lean="call")
    found = []
    for each in (stock, model):
        with torch.autocast("cpu", torch.bfloat16):
            out = each(x)
        out.float().square().sum().backward()
        found.append([out, *(p.grad for p in each.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_copies_pickles_and_compilers():
    model, x = Attention(), given(torch.float32)
    swap(model, lean="call")
    expected = model(x)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


class Appends(Attention):
    def forward(self, x, mask=None):
        q, k, v = (each.split(1, 1) for each in self.projected(x))
        outs = []
        for i in range(HEADS):
            weights = (q[i] @ k[i].mT).softmax(-1)
            outs.append(weights @ v[i])
        return self.merged(torch.cat(outs, 1))


class InAComprehension(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        weights = (q @ k.mT).softmax(-1)
        return self.merged(torch.cat([weights @ v for v in v.split(2, -1)], -1))


class InACondition(Attention):
    values = True

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        v = v if self.values else None
        weights = (q @ k.mT).softmax(-1)
        y = weights @ v if v is not None else q
        return self.merged(y)


class Closes(Attention):
    def forward(self, x, mask=None):
        def entropy():
            return (weights * weights.log()).sum()

        q, k, v = self.projected(x)
        weights = (q @ k.mT).softmax(-1)
        return self.merged(weights @ v) + entropy()


class CallsSuper(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        weights = (q @ k.mT * (1 + len(super().extra_repr()))).softmax(-1)
        return self.merged(weights @ v) + super().forward(x)


class GivenAFunction(Attention):
    def forward(self, x, mask=None):
        return self.merged(self.attend(*self.projected(x), torch.sigmoid))

    def attend(self, q, k, v, function):
        return function(q @ k.mT).softmax(-1) @ v


class GivenAList(Attention):
    def forward(self, x, mask=None):
        shared = {}
        shared["q"], shared["k"], shared["v"] = self.projected(x)
        y = self.attend(shared)
        shared["q"] = shared["k"] = shared["v"] = None
        return self.merged(y)

    def attend(self, shared):
        weights = (shared["q"] @ shared["k"].mT).softmax(-1)
        return weights @ shared["v"]


class Breaks(Attention):
    def forward(self, x, mask=None):
        for _ in range(3):
            q, k, v = self.projected(x)
            weights = (q @ k.mT).softmax(-1)
            x = self.merged(weights @ v)
            if x.sum() > 1e6:
                break
        return x


ODD = [Appends, InAComprehension, InACondition, Closes, CallsSuper, GivenAFunction, GivenAList, Breaks]


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("by_sample", [False, True])
def test_code_of_other_forms(kind, by_sample):
    model, x = kind().double(), given()
    swap(model, sample=x if by_sample else None, lean="call")
    assert_as_stock(model, x)
    if kind is InACondition:
        model.values = False
        assert_as_stock(model, x)
