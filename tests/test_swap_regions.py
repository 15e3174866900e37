"""Attention that layers write out: inside `lean()` what it is taken of is kept, and the weights are made again."""

import copy
import math
import pickle
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from swap_cases import assert_as_stock
from torch import nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit import swap, unswap
from memkit.memory import measure
from memkit.swap.library import rerun

pytestmark = pytest.mark.usefixtures("repeatable")

WIDTH, HEADS, TOKENS = 32, 4, 48


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tensors are worth it here."""
    monkeypatch.setattr(rerun, "LEAST", 0)
    monkeypatch.setattr(rerun, "_worth", {})


class Attention(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(p)
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))

    def heads(self, x):
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)

    def projected(self, x):
        return self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))

    def merged(self, x):
        return self.out(x.transpose(1, 2).flatten(2))

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        scores = scores + self.bias
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf)
        weights = self.dropout(F.softmax(scores, dim=-1))
        return self.merged(torch.matmul(weights, v))


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


def attend(q, k, v, bias):
    scores = q @ k.mT
    hidden = scores.new_zeros(TOKENS, TOKENS)
    count = 0
    for rows in (slice(0, 3), slice(3, TOKENS)):
        hidden[rows] = count
        count += 2
    return torch.softmax(scores + bias + hidden, -1).matmul(v)


class ByAFunction(Attention):
    def forward(self, x, mask=None):
        return self.merged(attend(*self.projected(x), self.bias))


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


KINDS = [Attention, InOneLine, InBranches, ByMethods, ByAFunction, GivesWeights]
kinds = pytest.mark.parametrize("kind", KINDS)


def given(dtype=torch.float64):
    return torch.randn(2, TOKENS, WIDTH, dtype=dtype)


def steps_saved(model, *args):
    def step():
        out = model(*args)
        return out[0] if isinstance(out, tuple) else out

    return measure(step).saved


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
def test_bit_for_bit_with_dropout(kind):
    """Its draws are stock's: the run that counts what is kept leaves no trace, and backward draws the same."""
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
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


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


class Counts(Attention):
    calls = 0

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        self.calls = self.calls + 1
        return self.merged(scores.softmax(-1) @ v)


class CountsInAMethod(Attention):
    calls = 0

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        return self.merged(self.counted(q @ k.mT).softmax(-1) @ v)

    def counted(self, scores):
        self.calls += 1
        return scores


class WritesToWhatItIsGiven(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        q, shared = q.detach().requires_grad_() * 1.0, self.bias.detach().clone()
        scores = q @ k.mT
        shared += 1.0
        return self.merged((scores + shared).softmax(-1) @ v)


class WritesToAView(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        shared = self.bias.detach().clone()
        scores = q @ k.mT
        rows = torch.einsum("hij->ihj", shared)
        rows.mul_(2.0)
        return self.merged((scores + shared).softmax(-1) @ v)


class DrawsItself(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT * random.random()
        return self.merged(scores.softmax(-1) @ v)


class HoldsABatchNorm(Attention):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(HEADS)

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        return self.merged(self.norm(q @ k.mT).softmax(-1) @ v)


class Remembers(Attention):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        self.seen.append(scores.shape)
        return self.merged(scores.softmax(-1) @ v)


@pytest.mark.parametrize(
    "kind",
    [Counts, CountsInAMethod, WritesToWhatItIsGiven, WritesToAView, DrawsItself, HoldsABatchNorm, Remembers],
)
def test_what_may_not_be_run_again_is_left(kind):
    model = kind()
    report = swap(model, ops=["attention"], lean="call")
    assert not report.changed
    model(given(torch.float32)).sum().backward()
    assert getattr(model, "calls", 1) == 1
    assert len(getattr(model, "seen", "1")) == 1


def test_hooks_on_its_parts():
    model, x = Attention(), given(torch.float32)
    swap(model, ops=["attention"], lean="call")
    model(x)
    calls = []
    model.dropout.register_forward_hook(lambda *args: calls.append(1))
    model(x).sum().backward()
    assert len(calls) == 1


def test_small_weights_are_kept():
    """With fewer tokens than the heads are wide a checkpoint would keep as much."""
    model, x = InOneLine(), given(torch.float32)[:, :4]
    model.bias = nn.Parameter(torch.randn(HEADS, 4, 4))
    stock = steps_saved(copy.deepcopy(model), x)
    swap(model, lean="call")
    assert steps_saved(model, x) == stock


def test_a_call_that_keeps_little_is_left(monkeypatch):
    monkeypatch.setattr(rerun, "LEAST", 2**20)
    model, x = Attention(), given(torch.float32)
    stock = steps_saved(copy.deepcopy(model), x)
    swap(model, lean="call")
    assert steps_saved(model, x) == stock


def test_outside_lean_it_is_stocks():
    model, x = Attention(), given(torch.float32)
    stock = steps_saved(copy.deepcopy(model), x)
    swap(model, ops=["attention"], lean=True)
    assert steps_saved(model, x) == stock
    with memkit.lean():
        model(x).sum().backward()


def test_a_change_between_forward_and_backward_raises():
    model, x = Attention(), given(torch.float32)
    swap(model, lean="call")
    loss = model(x).sum()
    with torch.no_grad():
        model.bias.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


def test_a_row_says_where_nothing_was_made_again(monkeypatch):
    x = given(torch.float32)
    (row,) = swap(Attention(), ops=["attention"], sample=x, lean="call").rows
    assert (row.after, row.reason) == ("in lean()", "")
    monkeypatch.setattr(rerun, "LEAST", 2**20)
    monkeypatch.setattr(rerun, "_worth", {})
    (row,) = swap(Attention(), ops=["attention"], sample=x, lean="call").rows
    assert row.after == "unchanged"
    assert "without a MiB" in row.reason


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


class Holds(Attention):
    scale, window = 1.0, None

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT * self.scale + self.shift()
        return self.merged(F.dropout(scores.softmax(-1), 0.5) @ v)  # in evaluation too

    def shift(self):
        return self.bias if self.window is None else self.window


def test_what_it_reads_is_as_it_was():
    stock, x = Holds().double().eval(), given()
    model = copy.deepcopy(stock)
    swap(model, ops=["attention"], lean="call")
    found = []
    for each in (stock, model):
        torch.manual_seed(1)
        loss = each(x).square().sum()
        each.scale, each.window = 3.0, torch.ones(TOKENS, TOKENS, dtype=torch.float64)
        loss = loss + each(x).square().sum()
        each.scale, each.window = None, None
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in each.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_other_weights_by_functional_call():
    model, x = Attention().double(), given()
    swap(model, ops=["attention"], lean="call")
    others = {name: 2 * p.detach() for name, p in model.named_parameters()}
    found = []
    for each in (unswapped(model), model):
        leaves = {name: p.clone().requires_grad_() for name, p in others.items()}
        torch.func.functional_call(each, leaves, (x,)).square().sum().backward()
        found.append([p.grad for p in leaves.values()])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def unswapped(model):
    stock = copy.deepcopy(model)
    unswap(stock)
    return stock


def test_layers_that_compute_their_weights():
    class Heads(Attention):
        def __init__(self):
            super().__init__()
            self.mix = nn.utils.parametrizations.spectral_norm(nn.Linear(HEADS, HEADS))

        def forward(self, x, mask=None):
            q, k, v = self.projected(x)
            scores = self.mix((q @ k.mT).transpose(1, -1)).transpose(1, -1)
            return self.merged(scores.softmax(-1) @ v)

    model, x = Heads().double(), given()
    report = swap(model, ops=["attention"], lean="call")
    assert not report.changed
    model(x).sum().backward()


class Regularized(Attention):
    def __init__(self):
        super().__init__()
        self.reg = nn.Dropout(0.3)

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        return self.merged(self.reg((q @ k.mT).softmax(-1)) @ v)


class Kernel(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        bias = self.shift() * 2.0
        p = 0.3 if self.training else 0.0
        return self.merged(F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p))

    def shift(self):
        return self.bias[None]


class Gumbel(Attention):
    def forward(this, x, mask=None):  # noqa: N805
        q, k, v = this.projected(x)
        scores = q @ k.mT
        drawn = torch.empty_like(scores).exponential_()
        return this.merged((scores - drawn.log()).softmax(-1) @ v)


class Mixed(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(F.gelu(x))
        return self.merged(F.softmax(q @ k.mT, -1) @ v)


@pytest.mark.parametrize("kind", [Regularized, Kernel, Gumbel, Mixed])
def test_draws_of_any_kind(kind, monkeypatch):
    calls = []
    checkpointed = rerun.checkpointed
    monkeypatch.setattr(rerun, "checkpointed", lambda *a, **k: calls.append(1) or checkpointed(*a, **k))
    stock, x = kind().double(), given()
    model = copy.deepcopy(stock)
    swap(model, ops=["attention", "gelu"], lean="call")
    found = []
    for each in (stock, model):
        torch.manual_seed(3)
        loss = each(x).square().sum()
        found.append(
            [loss.detach(), torch.rand(3), *torch.autograd.grad(loss, [each.q.weight, each.v.weight])]
        )
    assert calls
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


class Remembered(Attention):
    def __new__(cls, unused):
        return super().__new__(cls)

    def __init__(self, unused):
        super().__init__()
        self.map = None

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        weights = (q @ k.mT).softmax(-1)
        self.map = weights
        return self.merged(weights @ v)


def test_maps_that_a_layer_remembers_are_let_go():
    model, x = Remembered(None), given(torch.float32)
    swap(model, ops=["attention"], lean="call")
    maps = []
    for _ in range(3):
        model(x)
        maps.append(weakref.ref(model.map))
    assert [each() is None for each in maps] == [True, True, False]


def test_masks_of_other_kinds():
    x = given(torch.float32)
    sparse = SparseBias()
    swapped = copy.deepcopy(sparse)
    swap(swapped, ops=["attention"], lean="call")
    bias = torch.eye(TOKENS).to_sparse()
    assert torch.equal(swapped(x, bias), sparse(x, bias))
    with torch.inference_mode():
        bias = torch.eye(TOKENS)
    plain = PlainBias()
    swapped = copy.deepcopy(plain)
    swap(swapped, ops=["attention"], lean="call")
    assert torch.equal(swapped(x, bias), plain(x, bias))


class PlainBias(Attention):
    def forward(self, x, bias):
        q, k, v = self.projected(x)
        return self.merged((q @ k.mT + bias).softmax(-1) @ v)


class SparseBias(Attention):
    def forward(self, x, bias):
        q, k, v = self.projected(x)
        return self.merged((q @ k.mT + bias.to_dense()).softmax(-1) @ v)


def test_function_transforms():
    stock, x = PlainBias(), given(torch.float32)
    model = copy.deepcopy(stock)
    swap(model, ops=["attention"], lean="call")
    bias = torch.zeros(TOKENS, TOKENS)
    with memkit.lean():
        ours = torch.func.vmap(lambda each: model(each[None], bias))(x)
    torch.testing.assert_close(ours[:, 0], stock(x, bias))


def test_a_table_that_writes_to_its_weight():
    class Table(Attention):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(TOKENS, HEADS, max_norm=1.0)

        def forward(self, x, mask=None):
            q, k, v = self.projected(x)
            bias = self.table(torch.arange(TOKENS)).T[:, None]
            return self.merged((q @ k.mT + bias).softmax(-1) @ v)

    model = Table()
    swap(model, ops=["attention"], lean="call")
    model(given(torch.float32)).sum().backward()
