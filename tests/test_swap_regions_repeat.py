"""Which attention may be made again: what changes nothing else, and finds the second time what it found the first."""

import copy
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from attention_cases import HEADS, TOKENS, Attention, given, small, steps_saved
from swap_cases import assert_as_stock
from torch import nn

import memkit
from memkit import swap, unswap
from memkit.swap.library import rerun

__all__ = ["small"]  # a fixture
pytestmark = pytest.mark.usefixtures("repeatable")


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


class Counter(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * 1.0


class Calls(Attention):
    """What a function is given."""

    def __init__(self, given):
        super().__init__()
        self.given = given

    def forward(self, x, mask=None):
        given = self.given
        q, k, v = self.projected(x)
        weights = given((q @ k.mT).softmax(-1))
        return self.merged(weights @ v)


class CallsWhatItFinds(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT
        found = self.dropout
        return self.merged(found(scores.softmax(-1)) @ v)


class Doubles(nn.Module):
    def forward(self, x):
        return x * 2.0


@pytest.mark.parametrize(
    ("layer", "hooked"), [(nn.Dropout(0.0), False), (nn.Dropout(0.0), True), (Doubles(), 0)]
)
def test_layers_of_torch_that_it_is_given_may_be_run_again(layer, hooked):
    x = given(torch.float32)
    model = Calls(layer)
    stock = steps_saved(copy.deepcopy(model), x)
    swap(model, ops=["attention"], lean="call")
    calls = []
    if hooked:
        layer.register_forward_hook(lambda *args: calls.append(1))
    assert (steps_saved(model, x) < stock) == (type(layer) is nn.Dropout and not hooked)
    assert len(calls) == hooked


class Proxy(nn.Module):
    """Finds what it has not got in what it holds."""

    def __init__(self):
        super().__init__()
        self.held = nn.Dropout(0.0)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("held"), name)

    def forward(self, x):
        return x * (1 - self.p)


class CountsItsCalls(nn.Module):
    calls = 0

    def __call__(self, x):
        self.calls += 1
        return super().__call__(x)

    def forward(self, x):
        return x * 1.0


class CallsItsOwn(Calls):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        return self.merged(self.given((q @ k.mT).softmax(-1)) @ v)


@pytest.mark.parametrize("kind", [Calls, CallsItsOwn])
@pytest.mark.parametrize("layer", [Proxy, CountsItsCalls])
def test_layers_with_ways_of_their_own_are_left(kind, layer):
    model, x = kind(layer()).double(), given()
    swap(model, ops=["attention"], lean="call")
    assert_as_stock(model, x)
    if layer is CountsItsCalls:
        assert model.given.calls == 2


counted = []


def count(x):
    counted.append(1)
    return x


def by_default(x, function=count):
    return function(x)


class CallsADefault(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        return self.merged(by_default((q @ k.mT).softmax(-1)) @ v)


def test_what_a_function_calls_by_default_is_called_once():
    model = CallsADefault()
    swap(model, ops=["attention"], lean="call")
    counted.clear()
    model(given(torch.float32)).sum().backward()
    assert len(counted) == 1


class AsksWhichItIs(Attention):
    """Of a layer that it gives, and holds."""

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        return self.merged(self.attended(q, k, v, self.dropout))

    def attended(self, q, k, v, drop):
        weights = (q @ k.mT).softmax(-1)
        if drop is self.dropout:
            weights = weights * 2.0
        return drop(weights) @ v


def test_a_layer_that_it_is_given_is_itself():
    model, x = AsksWhichItIs().double(), given()
    swap(model, ops=["attention"], lean="call")
    assert_as_stock(model, x)


def test_others_that_it_is_given_are_called_once():
    for called in (Counter(), Counter().forward):
        model = Calls(called)
        swap(model, ops=["attention"], lean="call")
        model(given(torch.float32)).sum().backward()
        assert getattr(called, "__self__", called).calls == 1
    assert not swap(CallsWhatItFinds(), ops=["attention"], lean="call").changed


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
    model, x = Attention(), given(torch.float32)[:, :4]
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


class Holds(Attention):
    scale, window = 1.0, None

    def __init__(self):
        super().__init__()
        self.factors = [1.0]

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = q @ k.mT * self.scale * self.factors[0] + self.shift()
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
        each.scale, each.window, each.factors[0] = None, None, 7.0
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
        torch.testing.assert_close(ours, theirs)


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
    assert calls or kind is Mixed  # which `attend` computes
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
            scores = q @ k.mT
            scores = scores + self.table(torch.arange(TOKENS)).T[:, None]
            return self.merged(scores.softmax(-1) @ v)

    model = Table()
    assert not swap(model, ops=["attention"], lean="call").changed
    model(given(torch.float32)).sum().backward()
