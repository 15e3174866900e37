"""RMS norms with a gate, as state space models and linear attention have them: found by name, verified by values."""

import copy
import pickle

import pytest
import torch
from swap_cases import D, assert_as_stock, batch, step
from torch import nn
from torch.nn.functional import silu

from memkit import swap, unswap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")


class TinyRMSNormGated(nn.Module):
    """In float32 at least and rounded at the end, as the libraries' are."""

    def __init__(self, norm_first=False, act=silu, group_size=D, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)
        self.variance_epsilon, self.group_size = eps, group_size
        self.norm_first, self.act = norm_first, act

    def forward(self, hidden_states, gate=None):
        wide = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        x, factor = hidden_states.to(wide), 1.0 if gate is None else self.act(gate.to(wide))
        if not self.norm_first:
            x, factor = x * factor, 1.0
        groups = x.view(*x.shape[:-1], D // self.group_size, self.group_size)
        groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (factor * (self.weight * groups.view(x.shape).to(hidden_states.dtype))).to(hidden_states.dtype)


class Mixer(nn.Module):
    def __init__(self, norm, call=None):
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(D, 2 * D), norm, nn.Linear(D, D)
        self.call = call

    def forward(self, x):
        x, gate = self.before(x).chunk(2, -1)
        return self.after(self.norm(x, gate) if self.call is None else self.call(self.norm, x, gate))


FORMS = {
    "gate first": {},
    "gate first, in groups": {"group_size": 4},
    "norm first": {"norm_first": True},
    "norm first, in groups": {"norm_first": True, "group_size": 4},
    "sigmoid": {"norm_first": True, "act": torch.sigmoid},
}
forms = pytest.mark.parametrize("form", FORMS)


def make(form):
    return Mixer(TinyRMSNormGated(**FORMS[form]))


def is_swapped(model):
    return type(model.norm).__mro__[1].__module__.startswith("memkit.swap.library")


@forms
@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("by_sample", [False, True])
def test_as_stock(form, by_sample, lean):
    model, x = make(form).double(), batch(2, 3, D)
    report = swap(model, sample=x if by_sample else None, lean=lean)
    assert is_swapped(model), report
    assert_as_stock(model, x)
    copied = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(step(copied, x), step(model, x))
    unswap(model)
    assert type(model.norm) is TinyRMSNormGated


@forms
def test_saved_bytes(form):
    """The tensor that x and gate lie in, and a number a group; outside of `lean` two more; the weight's gradient of groups
    needs one."""
    model, x = make(form), torch.randn(64, D)
    groups = D // model.norm.group_size
    for lean, tensors in ((False, 4), ("call", 2)):
        report = swap(model, sample=x, lean=lean)
        assert report.saved_after == measure(lambda: model(x)).saved
        assert report.saved_after == (tensors + (groups > 1)) * x.nbytes + 4 * 64 * groups


@forms
@pytest.mark.parametrize("lean", [False, "call"])
def test_half_precision(form, lean):
    """No further from float64 than twice stock."""
    model, x = make(form).bfloat16(), batch(64, D, dtype=torch.bfloat16)
    theirs, exact = step(model, x), step(copy.deepcopy(model).double(), x.double())
    swap(model, sample=x, lean=lean)
    assert is_swapped(model)
    for a, b, c in zip(step(model, x), theirs, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm()


@forms
def test_compiled(form):
    model, x = make(form).double(), batch(2, 3, D)
    expected = step(model, x)
    swap(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled, x), expected)


CALLS = {
    "no gate": lambda norm, x, gate: norm(x),
    "by name": lambda norm, x, gate: norm(x, gate=gate),
    "another dtype": lambda norm, x, gate: norm(x, gate.float()),
    "a gate that is broadcast": lambda norm, x, gate: norm(x, gate[:, :1]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("by_sample", [False, True])
def test_other_calls_are_stock(call, by_sample):
    model, x = Mixer(TinyRMSNormGated(), call).double(), batch()
    swap(model, sample=x if by_sample else None)
    assert_as_stock(model, x)


def test_autocast_is_stock():
    model, x = make("gate first"), torch.randn(4, D)
    swap(model)
    assert is_swapped(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_stock(model, x, rtol=0, atol=0)


def test_what_computes_something_else_is_left():
    class OtherRMSNormGated(TinyRMSNormGated):
        def forward(self, hidden_states, gate):
            return super().forward(hidden_states, gate + 1e-3)

    model, x = Mixer(OtherRMSNormGated()).double(), batch()
    report = swap(model, sample=x)
    assert not is_swapped(model)
    assert "computes something else" in next(row.reason for row in report if row.path == "norm")
    assert_as_stock(model, x)
