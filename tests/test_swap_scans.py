"""Recurrences that a layer calls by a name of its module, as transformers' state space models do: their inputs are all that
is kept."""

# ruff: noqa: N803  names are the library's

import copy
import functools
import pickle

import pytest
import torch
from swap_cases import tangent_and_gradients
from torch import nn

from memkit import lean, swap, unswap
from memkit.bench.zoo import distance
from memkit.memory import measure
from memkit.swap.library import recurrences, scans
from memkit.swap.library import selective_scan as scan_module
from memkit.swap.library.remembered import Remembered
from memkit.swap.library.selective_scan import selective_scan

pytestmark = pytest.mark.usefixtures("repeatable")

CHANNELS, STATES, TOKENS = 6, 4, 12


def mamba_selective_scan(
    hidden_states,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    return_last_state=False,
    factor=1.0,
):
    if delta_bias is not None:
        dt = dt + delta_bias[:, None]
    if delta_softplus:
        dt = nn.functional.softplus(dt)
    state = hidden_states.new_zeros(*hidden_states.shape[:2], A.shape[1])
    decay = torch.exp(A[None, :, None] * dt[..., None])
    into = dt[..., None] * B.mT[:, None] * hidden_states[..., None]
    results = []
    for t in range(dt.shape[-1]):
        state = decay[:, :, t] * state + into[:, :, t]
        results.append((state * C[:, None, :, t]).sum(-1))
    out = factor * torch.stack(results, -1)
    if D is not None:
        out = out + hidden_states * D[:, None]
    if z is not None:
        out = out * nn.functional.silu(z)
    return (out, state) if return_last_state else out


def mamba2_chunk_scan(x, dt, A, B, C):
    weights = torch.sigmoid(A * dt).cumsum(-1) * (B * C).sum(1, keepdim=True)
    return torch.sin(torch.tanh(weights)) * x


def decorated(forward):
    """As transformers' `force_accelerate_hooks`."""

    @functools.wraps(forward)
    def wrapped(self, *args, **kwargs):
        self.calls += 1
        return forward(self, *args, **kwargs)

    return wrapped


class Mixer(nn.Module):
    calls = 0

    def __init__(self, softplus=True, gate=True, skip=True, **options):
        super().__init__()
        self.inner = nn.Linear(CHANNELS, 3 * CHANNELS + 2 * STATES)
        self.a = nn.Parameter(torch.rand(CHANNELS, STATES))
        self.d = nn.Parameter(torch.randn(CHANNELS)) if skip else None
        self.bias = nn.Parameter(torch.randn(CHANNELS)) if softplus else None
        self.softplus, self.gate, self.options = softplus, gate, options

    @decorated
    def forward(self, x):
        sizes = [CHANNELS] * 3 + [STATES] * 2
        u, z, dt, b, c = self.inner(x).mT.split(sizes, 1)
        out = mamba_selective_scan(
            u,
            dt if self.softplus else dt.sigmoid(),
            -self.a.exp(),
            b,
            c,
            D=self.d,
            z=z if self.gate else None,
            delta_bias=self.bias,
            delta_softplus=self.softplus,
            **self.options,
        )
        if isinstance(out, tuple):
            out = out[0] + out[1].sum()
        return out.mT


class ChunkMixer(Mixer):
    def forward(self, x):
        u, _, dt, b, c = self.inner(x).mT.split([CHANNELS] * 3 + [STATES] * 2, 1)
        return mamba2_chunk_scan(u, dt, -self.a.exp().sum(-1, keepdim=True), b, C=c).mT


class Model(nn.Module):
    def __init__(self, cls=Mixer, **options):
        super().__init__()
        self.mixer = cls(**options)

    def forward(self, x):
        return self.mixer(x)


LAYERS = {
    "all of it": {},
    "no gate": {"gate": False},
    "no skip": {"skip": False},
    "no softplus": {"softplus": False},
    "the last state": {"return_last_state": True},
    "another function": {"factor": 0.5},
    "another scan": {"cls": ChunkMixer},
}


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(recurrences, "_same", Remembered())
    monkeypatch.setattr(scan_module, "PIECE", 5)


def step(model, x):
    model.zero_grad()
    out = model(x)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def saved(model, x):
    return measure(lambda: model(x), device="cpu").saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_as_stock(layer, dtype):
    model, x = Model(**LAYERS[layer]).to(dtype), torch.randn(2, TOKENS, CHANNELS, dtype=dtype)
    stock = copy.deepcopy(model)
    report = swap(model, sample=x, lean="call")
    assert next(row for row in report if row.path == "mixer").after == "in lean()", report
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype != torch.bfloat16 else {"rtol": 0, "atol": 0}
    for ours, theirs in zip(step(model, x), step(stock, x), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
    assert saved(model, x) < 0.6 * saved(stock, x)


@pytest.mark.parametrize("layer", ["all of it", "no softplus"])
def test_as_exact_as_stock(layer):
    model, x = Model(**LAYERS[layer]), torch.randn(2, TOKENS, CHANNELS)
    stock = copy.deepcopy(model)
    exact = step(copy.deepcopy(model).double(), x.double())
    swap(model, sample=x, lean="call")

    assert distance(step(model, x), exact) <= 2 * distance(step(stock, x), exact)


def test_which_scan_runs(monkeypatch):
    """`selective_scan` where it computes the same, and only there."""
    ran, own, forward = [], scan_module._Scan, scan_module._Scan.forward
    monkeypatch.setattr(own, "forward", staticmethod(lambda *args: ran.append(args) or forward(*args)))
    x = torch.randn(2, TOKENS, CHANNELS)
    for layer, expected in (("all of it", True), ("another function", False), ("the last state", False)):
        model = Model(**LAYERS[layer])
        swap(model, lean="call")
        model(x)  # the first call tries it
        ran.clear()
        model(x)
        assert bool(ran) == expected, layer


def test_decorators_run_and_nothing_changes_outside_of_lean():
    model, x = Model(), torch.randn(2, TOKENS, CHANNELS)
    before = saved(model, x)
    swap(model, lean=True)
    calls = model.mixer.calls
    assert saved(model, x) == before
    with lean():
        model(x)
    assert model.mixer.calls == calls + 2
    unswap(model)
    assert type(model.mixer) is Mixer


def test_a_kernel_is_left():
    """transformers' wrapper calls one in the function's place."""
    kernel = mamba_selective_scan

    def wrapper(is_new_implementation):
        @functools.wraps(mamba_selective_scan)
        def wrapped(*args, **kwargs):
            return kernel(*args, **kwargs) if is_new_implementation else mamba_selective_scan(*args, **kwargs)

        return wrapped

    assert scans._is_written_out(mamba_selective_scan)
    assert scans._is_written_out(wrapper(False))
    assert not scans._is_written_out(wrapper(True))
    assert not scans._is_written_out(functools.partial(mamba_selective_scan))


@pytest.mark.parametrize("layer", ["all of it", "another scan"])
def test_copies_and_pickles(layer):
    model, x = Model(**LAYERS[layer]), torch.randn(2, TOKENS, CHANNELS)
    swap(model, sample=x, lean="call")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert saved(copied, x) == saved(model, x)
        torch.testing.assert_close(step(copied, x), step(model, x))


def test_compiled():
    model, x = Model(), torch.randn(2, 5, CHANNELS)
    expected = step(copy.deepcopy(model), x)
    swap(model, sample=x, lean="call")
    torch.testing.assert_close(
        step(torch.compile(model, backend="aot_eager"), x), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("layer", ["all of it", "another function"])
def test_a_change_before_backward_is_refused(layer):
    """Of what the function is given by name, in ours and in the library's: it would be called again with another value."""
    model, x = Model(**LAYERS[layer]), torch.randn(2, TOKENS, CHANNELS)
    swap(model, lean="call")
    out = model(x)
    with torch.no_grad():
        model.mixer.d.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("layer", ["all of it", "another function", "another scan"])
def test_forward_mode(layer):
    """As stock writes it: parameters need gradients, the input has a tangent."""
    model, x = Model(**LAYERS[layer]), torch.randn(2, TOKENS, CHANNELS)
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    torch.testing.assert_close(tangent_and_gradients(model, x), tangent_and_gradients(stock, x))


def given(tokens, **options):
    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64).requires_grad_(**options)

    u, dt, z = (draw(2, 3, tokens) for _ in range(3))
    a = (-torch.rand(3, 2, dtype=torch.float64)).requires_grad_(**options)
    return u, dt, a, draw(2, 2, tokens), draw(2, 2, tokens), draw(3), z, draw(3), True


def test_gradients(monkeypatch):
    """In pieces of which the last is shorter; once, twice, and of some inputs only."""
    monkeypatch.setattr(scan_module, "PIECE", 2)
    args = given(5)
    torch.autograd.gradcheck(selective_scan, args)
    torch.autograd.gradgradcheck(selective_scan, given(3))
    some = [
        x.detach().requires_grad_(i in (1, 3)) if isinstance(x, torch.Tensor) else x
        for i, x in enumerate(args)
    ]
    torch.autograd.gradcheck(selective_scan, tuple(some))
    torch.autograd.gradgradcheck(selective_scan, tuple(some))


def test_differentiated_twice_where_one_is_made_from_the_other():
    """Each is taken by itself: the way from one to the other is autograd's."""
    (x, _, a, *_), found = given(5), []
    for scan in (selective_scan, scan_module._token_by_token):
        u = x.sin()
        b = u[:, :2].cos()
        out = scan(u, u, a, b, 2 * b, u.mean((0, 2)), u.tanh(), None, True)
        first = torch.autograd.grad(out.square().sum(), (x, a), create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), (x, a))
        found.append((*first, *second))
    torch.testing.assert_close(*found)
