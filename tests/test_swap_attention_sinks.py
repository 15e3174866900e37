"""Attention with sinks: scores without a key or a value, for each head or token, beside those of the keys."""

import copy

import pytest
import torch
from torch import nn

from memkit import swap
from memkit.memory import measure
from memkit.swap.library import written_attention
from memkit.swap.library.attend import Scores, attend

pytestmark = pytest.mark.usefixtures("repeatable")

HEADS, KEYS, TOKENS, WIDTH = 4, 2, 24, 8
LOW = torch.finfo(torch.float32).min


def with_sinks(module, query, key, value, attention_mask, scaling, dropout=0.0, sinks=None, **kwargs):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    if sinks is None:
        sinks = module.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, sinks], -1)
    scores = scores - scores.max(-1, keepdim=True).values
    weights = scores.softmax(-1)[..., :-1].to(value.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def without(module, query, *args, s_aux=None, sinks=None, **kwargs):
    """Takes none of the sinks that it is given."""
    few = query.new_full((*query.shape[:3], 1), -1e9)
    return with_sinks(module, query, *args, sinks=few, **kwargs)


def halved(module, query, *args, s_aux=None, sinks=None, **kwargs):
    sinks = module.sinks.view(1, -1, 1, 1) if sinks is None else sinks
    return with_sinks(module, query, *args, sinks=sinks.expand(*query.shape[:3], 1) / 2, **kwargs)


def auxiliary(module, query, *args, s_aux=None, **kwargs):
    sinks = s_aux.view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    return with_sinks(module, query, *args, sinks=sinks, **kwargs)


class Others(nn.Module):
    """Gives sinks that are not its own."""

    def __init__(self, function):
        super().__init__()
        self.attention, self.other = Attention(function), nn.Parameter(torch.full((HEADS,), -1e9))
        if function is auxiliary:
            del self.attention.sinks

    def forward(self, x):
        attention = self.attention
        attention.given = {"s_aux": self.other}
        return attention(x)


class Table(dict):
    def get_interface(self, name, default):
        return self.get(name, default)


ALL_ATTENTION_FUNCTIONS = Table()


class Attention(nn.Module):
    def __init__(self, function=with_sinks, masked=True, per_token=False, dropout=0.0):
        super().__init__()
        self.function, self.dropout, self.given = function, dropout, None
        self.q, self.k, self.v = (nn.Linear(HEADS * WIDTH, n * WIDTH) for n in (HEADS, KEYS, KEYS))
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.per_token = nn.Linear(HEADS * WIDTH, HEADS) if per_token else None
        causal = torch.zeros(TOKENS, TOKENS).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), LOW)
        self.register_buffer("mask", causal[None, None] if masked else None)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        function = ALL_ATTENTION_FUNCTIONS.get_interface("eager", self.function)
        given = {"dropout": self.dropout if self.training else 0.0}
        if self.given is not None:
            given |= self.given
        elif self.per_token is None:
            given["s_aux"] = self.sinks
        else:
            given["sinks"] = self.per_token(x).transpose(1, 2).unsqueeze(-1)
        out, weights = function(self, q, k, v, self.mask, scaling=WIDTH**-0.5, **given)
        return torch.cat([out.flatten(-2), weights.transpose(1, 2).flatten(-2)], -1)


def step(model, x):
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def verdicts(monkeypatch):
    """What the check of functions says from now on."""
    said = {}
    monkeypatch.setattr(written_attention._same, "of", lambda function, kind: said)
    return said


@pytest.mark.parametrize("function", [with_sinks, without, halved])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("per_token", [True, False])
def test_result_weights_and_gradients_are_stocks(function, masked, per_token, monkeypatch):
    stock = nn.Sequential(Attention(function, masked, per_token)).double()
    model, x, said = (
        copy.deepcopy(stock),
        torch.randn(2, TOKENS, HEADS * WIDTH).double(),
        verdicts(monkeypatch),
    )
    swap(model, lean="call")
    ours, theirs = step(model, x), step(stock, x)
    assert set(said.values()) == {function is with_sinks}
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_keeps_query_key_and_value():
    stock = Attention()
    model, x = nn.Sequential(copy.deepcopy(stock)), torch.randn(2, TOKENS, HEADS * WIDTH)
    swap(model, lean="call")
    model(x)
    numbers = x.shape[0] * TOKENS * (HEADS + 2 * KEYS) * WIDTH
    assert measure(lambda: model(x).sum()).saved <= 4 * numbers
    assert measure(lambda: stock(x).sum()).saved >= 4 * (numbers + x.shape[0] * HEADS * TOKENS * TOKENS)


@pytest.mark.parametrize("hides", [None, "additive", "bool"])
@pytest.mark.parametrize("shape", [(1, HEADS, 1, 1), (2, HEADS, TOKENS, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_attend_with_sinks_against_its_definition(hides, shape, groups):
    heads = HEADS, HEADS // groups, HEADS // groups
    query, key, value = (
        torch.randn(2, n, TOKENS, WIDTH, dtype=torch.float64).requires_grad_() for n in heads
    )
    sinks = torch.randn(shape, dtype=torch.float64).requires_grad_()
    seen = torch.rand(2, 1, TOKENS, TOKENS) > 0.4
    seen[0, 0, 3] = False  # a row that sees the sink alone
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, float("-inf"))
    mask = {None: None, "additive": added, "bool": seen}[hides]
    scores = query @ key.repeat_interleave(groups, 1).mT * 0.3 + (0 if hides is None else added)
    wide = torch.cat([scores, sinks.expand(2, HEADS, TOKENS, 1)], -1).softmax(-1)[..., :-1]
    wanted = wide @ value.repeat_interleave(groups, 1), wide
    found = attend(query, key, value, mask, None, Scores(0.3), sinks)
    torch.testing.assert_close(found, wanted)
    weight = torch.randn_like(wide)
    ours, theirs = (
        torch.autograd.grad((out.square().sum(), (weights * weight).sum()), (query, key, value, sinks))
        for out, weights in (found, wanted)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradcheck_once_and_twice(dropout):
    query, key, value = (torch.randn(1, n, 3, 2, dtype=torch.float64).requires_grad_() for n in (2, 1, 1))
    sinks = torch.randn(1, 2, 1, 1, dtype=torch.float64).requires_grad_()
    bias = torch.randn(1, 2, 3, 3, dtype=torch.float64).requires_grad_()

    def call(query, key, value, sinks, bias):
        torch.manual_seed(0)
        return attend(query, key, value, None, bias, Scores(0.5, None, dropout), sinks)

    assert torch.autograd.gradcheck(call, (query, key, value, sinks, bias))
    assert torch.autograd.gradgradcheck(call, (query, key, value, sinks, bias))


def test_dropout_drops_weights_and_no_sinks(monkeypatch):
    said = verdicts(monkeypatch)
    model, x = nn.Sequential(Attention(dropout=0.4)), torch.randn(2, TOKENS, HEADS * WIDTH)
    swap(model, lean="call")
    torch.manual_seed(0)
    out = model(x)
    assert set(said.values()) == {True}
    model[0].dropout = 0.0
    every = model(x)[..., HEADS * WIDTH :]
    dropped = out[..., HEADS * WIDTH :]
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], every[kept] / 0.6)
    assert 0.5 < kept[every > 0].float().mean() < 0.7


def distances(ours, exact):
    return [(a.double() - b).square().sum() for a, b in zip(ours, exact, strict=True)]


@pytest.mark.parametrize("wide", [False, True])
def test_half_precision_is_as_near_as_stock(wide, monkeypatch):
    """Of sinks in float32 stock takes the softmax in that, and their gradient with it: that is left to a checkpoint."""
    errors = []
    for seed in range(8):
        torch.manual_seed(seed)
        stock, said = nn.Sequential(Attention()).bfloat16(), verdicts(monkeypatch)
        if wide:
            stock[0].sinks.data = torch.randn(HEADS)
        model, x = copy.deepcopy(stock), torch.randn(2, TOKENS, HEADS * WIDTH).bfloat16()
        exact = step(copy.deepcopy(stock).double(), x.double())
        swap(model, lean="call")
        ours, theirs = step(model, x), step(stock, x)
        assert set(said.values()) == {not wide}
        errors.append([distances(ours, exact), distances(theirs, exact)])
    mine, stocks = torch.tensor(errors).sum(0).sqrt()
    assert (mine <= 2 * stocks).all()


@pytest.mark.parametrize("function", [auxiliary, with_sinks])
def test_sinks_that_are_given_are_not_the_modules(function):
    """The first call cannot see them. One function takes them, the other its module's own."""
    stock = Others(function).double()
    model, x = copy.deepcopy(stock), torch.randn(2, TOKENS, HEADS * WIDTH).double()
    swap(model, lean="call")
    for value in (-1e9, 0.5):
        for each in (model, stock):
            each.zero_grad()
            nn.init.constant_(each.other, value)
        for a, b in zip(step(model, x), step(stock, x), strict=True):
            torch.testing.assert_close(a, b)


def test_weights_that_come_back_may_be_written_to():
    query, key, value = (torch.randn(2, HEADS, TOKENS, WIDTH).requires_grad_(n < 2) for n in range(3))
    sinks = torch.randn(1, HEADS, 1, 1).requires_grad_()
    out, weights = attend(query, key, value, None, None, Scores(0.3, None, 0.3), sinks)
    plain = torch.autograd.grad(
        out.sum() + 2 * weights.square().sum(), (query, key, sinks), retain_graph=True
    )
    weights.mul_(2.0)
    written = torch.autograd.grad(out.sum() + weights.square().sum() / 2, (query, key, sinks))
    torch.testing.assert_close(written, plain)
