"""Recurrences that libraries compute in chunks: ours against what they say token by token, in float64."""

# ruff: noqa: N803, N806  names are the library's

import copy
import functools
import inspect

import pytest
import torch
from swap_cases import tangent_and_gradients
from torch import nn
from torch.nn import functional as stock

from memkit import swap
from memkit.bench.zoo import distance
from memkit.memory import measure
from memkit.swap.library import pieces, recurrences
from memkit.swap.library.chunk_scan import chunk_scan
from memkit.swap.library.delta_rule import gated_delta_rule
from memkit.swap.library.remembered import Remembered

pytestmark = pytest.mark.usefixtures("repeatable")

BATCH, TOKENS, HEADS, GROUPS, WIDTH, STATES = 2, 23, 4, 2, 6, 5


def mamba2_chunk_scan(
    hidden_states,
    dt,
    A,
    B,
    C,
    chunk_size=8,
    D=None,
    dt_bias=None,
    initial_states=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    factor=1.0,
    **kwargs,
):
    heads = hidden_states.shape[2]
    B, C = (x.repeat_interleave(heads // x.shape[2], 2) for x in (B, C))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (stock.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    state = 0 if initial_states is None else initial_states
    results = []
    for t in range(dt.shape[1]):
        now = dt[:, t, :, None, None]
        state = (
            state * (now * A[:, None, None]).exp() + now * hidden_states[:, t, ..., None] * B[:, t, :, None]
        )
        results.append((state * C[:, t, :, None]).sum(-1))
    out = factor * torch.stack(results, 1)
    out = out if D is None else out + D[:, None] * hidden_states
    return (out, state) if return_final_states else out


def torch_chunk_gated_delta_rule(
    query,
    key,
    value,
    g,
    beta,
    chunk_size=8,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    **kwargs,
):
    heads = value.shape[2]
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    if use_qk_l2norm_in_kernel:
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    state = value.new_zeros(*value.shape[:1], heads, key.shape[-1], value.shape[-1])
    state = state if initial_state is None else initial_state
    results = []
    for t in range(g.shape[1]):
        state = state * g[:, t].reshape(*state.shape[:2], -1, 1).exp()
        known = (state * key[:, t, ..., None]).sum(-2)
        state = state + key[:, t, ..., None] * ((value[:, t] - known) * beta[:, t, :, None]).unsqueeze(-2)
        results.append((state * query[:, t, ..., None]).sum(-2))
    return torch.stack(results, 1), state if output_final_state else None


def chunk_kimi_delta_attention(query, key, value, g, beta, chunk_size=8, **kwargs):
    """As its cousin, with a g for each channel of a key."""
    return torch_chunk_gated_delta_rule(query, key, value, g, beta, **kwargs)


def draw(*shape):
    return torch.randn(*shape)


def of_scan(decay=1.0, state=False, bias=True, d=True):
    return [
        draw(BATCH, TOKENS, HEADS, WIDTH),
        draw(BATCH, TOKENS, HEADS),
        -decay * torch.rand(HEADS) - 0.1,
        draw(BATCH, TOKENS, GROUPS, STATES),
        draw(BATCH, TOKENS, GROUPS, STATES),
        draw(HEADS) if d else None,
        draw(HEADS) if bias else None,
        draw(BATCH, HEADS, WIDTH, STATES) if state else None,
    ]


def of_rule(decay=1.0, state=False, groups=GROUPS):
    return [
        draw(BATCH, TOKENS, groups, STATES),
        draw(BATCH, TOKENS, groups, STATES) / 2,
        draw(BATCH, TOKENS, HEADS, WIDTH),
        -decay * torch.rand(BATCH, TOKENS, HEADS),
        torch.rand(BATCH, TOKENS, HEADS),
        draw(BATCH, HEADS, STATES, WIDTH) if state else None,
    ]


def of_channels(decay=1.0, state=False):
    tensors = of_rule(decay, state, groups=HEADS)
    tensors[3] = -decay * torch.rand(BATCH, TOKENS, HEADS, STATES)
    return tensors


SOFTPLUS, NORM = {"dt_softplus": True}, {"use_qk_l2norm_in_kernel": True}
CASES = {
    "scan": (of_scan, {}, SOFTPLUS),
    "scan, limits": (of_scan, {}, {"dt_limit": (0.3, 0.9)}),
    "scan, nothing but the recurrence": (of_scan, {"bias": False, "d": False}, {"dt_limit": (0.0, 1.0)}),
    "scan, states": (of_scan, {"state": True}, SOFTPLUS | {"return_final_states": True}),
    "scan, strong decay": (of_scan, {"decay": 30.0, "state": True}, SOFTPLUS),
    "rule": (of_rule, {}, {}),
    "rule, norm": (of_rule, {}, NORM),
    "rule, as many keys": (of_rule, {"groups": HEADS}, NORM),
    "rule, states": (of_rule, {"state": True}, NORM | {"output_final_state": True}),
    "rule, strong decay": (of_rule, {"decay": 30.0, "state": True}, NORM),
    "channels": (of_channels, {}, {}),
    "channels, states": (of_channels, {"state": True}, NORM | {"output_final_state": True}),
    "channels, strong decay": (of_channels, {"decay": 30.0, "state": True}, NORM),
}
FUNCTIONS = {
    of_scan: (chunk_scan, mamba2_chunk_scan),
    of_rule: (gated_delta_rule, torch_chunk_gated_delta_rule),
    of_channels: (gated_delta_rule, chunk_kimi_delta_attention),
}
SOURCES = {
    mamba2_chunk_scan: "bamba.modeling_bamba",
    torch_chunk_gated_delta_rule: "qwen3_next.modeling_qwen3_next",
    chunk_kimi_delta_attention: "kimi_linear.modeling_kimi_linear",
}


def case(name, dtype=torch.float32):
    """The tensors, ours, theirs, and the options of both."""
    make, shapes, options = CASES[name]
    options = options | {"chunk_size": 4}
    tensors = [None if x is None else x.to(dtype).requires_grad_() for x in make(**shapes)]
    return tensors, *FUNCTIONS[make], options


def by_name(function):
    """A library's, called as ours."""
    names = recurrences.KNOWN[function.__name__].tensors
    return lambda *given, **options: function(**dict(zip(names, given, strict=True)), **options)


def in_groups(library):
    """Older versions of the delta rule take as many queries and keys as values."""
    text = inspect.getsource(library)
    if "query" not in text or "repeat_interleave" in text:
        return library

    @functools.wraps(library)
    def called(query, key, value, *args, **kwargs):
        query, key = (x.repeat_interleave(value.shape[2] // x.shape[2], 2) for x in (query, key))
        return library(query, key, value, *args, **kwargs)

    return called


def widened(tensors):
    return [None if x is None else x.detach().double().requires_grad_() for x in tensors]


def outcome(function, tensors, **options):
    """Results, gradients, and gradients of a norm of those."""
    result = function(*tensors, **options)
    results = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
    leaves = [x for x in tensors if x is not None]
    weights = [torch.linspace(-1, 1, x.numel()).view(x.shape).to(x) for x in results]
    first = torch.autograd.grad(results, leaves, weights, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves, retain_graph=True)
    return [x.detach() for x in (*results, *first)], second


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(recurrences, "_same", Remembered())
    monkeypatch.setattr(pieces, "PIECE", 10)


@pytest.mark.parametrize("name", CASES)
def test_as_token_by_token(name):
    """In pieces and chunks that end in the middle; the derivative of the gradient too."""
    tensors, ours, theirs, options = case(name)
    found = outcome(ours, tensors, **options)
    exact = outcome(by_name(theirs), widened(tensors), **options)
    for some, expected in zip(found, exact, strict=True):
        for a, b in zip(some, expected, strict=True):
            assert a.shape == b.shape
            assert distance([a], [b]) < 3e-6


@pytest.mark.parametrize("name", ["scan", "rule", "channels"])
def test_differentiated_twice_where_one_is_made_from_the_other(name):
    """Each is taken by itself: the way from one to the other is autograd's."""
    tensors, ours, theirs, options = case(name, torch.float64)

    def from_the_first(function):
        def call(first, *others, **options):
            total = first.sin().mean()
            made = [None if x is None else x * total.exp() for x in others]
            return function(first * total.cos(), *made, **options)

        return call

    found = outcome(from_the_first(ours), tensors, **options)
    expected = outcome(from_the_first(by_name(theirs)), tensors, **options)
    for some, others in zip(found, expected, strict=True):
        assert distance(some, others) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_the_library(name, dtype):
    """transformers' own functions, which compute in float32."""
    tensors, ours, theirs, options = case(name, dtype)
    library = getattr(pytest.importorskip(f"transformers.models.{SOURCES[theirs]}"), theirs.__name__)
    found, _ = outcome(ours, tensors, **options)
    expected, _ = outcome(by_name(in_groups(library)), tensors, **options)
    exact, _ = outcome(by_name(theirs), widened(tensors), **options)
    assert [(x.dtype, x.shape) for x in found] == [(x.dtype, x.shape) for x in expected]
    assert distance(found, exact) <= 2 * distance(expected, exact)


def test_no_number_below_the_normal_ones():
    """With which processors compute a hundred times more slowly."""
    logarithms = -torch.arange(120.0)
    left = pieces.decay(logarithms)
    assert bool(((left == 0) | (left > 1e3 * torch.finfo(torch.float32).tiny)).all())
    torch.testing.assert_close(left, logarithms.exp(), rtol=0, atol=1e-34)


class Scanning(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.sizes = [HEADS * WIDTH, HEADS, GROUPS * STATES, GROUPS * STATES]
        self.inner = nn.Linear(WIDTH, sum(self.sizes))
        self.a, self.options = nn.Parameter(torch.zeros(HEADS)), options

    def forward(self, x):
        x, dt, b, c = self.inner(x).split(self.sizes, -1)
        x, b, c = (each.unflatten(-1, (heads, -1)) for each, heads in ((x, HEADS), (b, GROUPS), (c, GROUPS)))
        out = mamba2_chunk_scan(x, dt, -self.a.exp(), b, c, dt_softplus=True, z=None, **self.options)
        return out[0] + out[1].sum() if isinstance(out, tuple) else out


class Ruling(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.sizes = [GROUPS * STATES, GROUPS * STATES, HEADS * WIDTH, HEADS, HEADS]
        self.inner, self.options = nn.Linear(WIDTH, sum(self.sizes)), options

    def forward(self, x):
        q, k, v, g, beta = self.inner(x).split(self.sizes, -1)
        q, k, v = (x.unflatten(-1, (heads, -1)) for x, heads in ((q, GROUPS), (k, GROUPS), (v, HEADS)))
        given = {"g": -stock.softplus(g), "beta": beta.sigmoid(), "use_qk_l2norm_in_kernel": True}
        out, state = torch_chunk_gated_delta_rule(q, k, v, cu_seqlens=None, **given, **self.options)
        return out if state is None else out + state.sum()


class Channels(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4 * HEADS * STATES + HEADS)

    def forward(self, x):
        q, k, v, g, beta = self.inner(x).split([HEADS * STATES] * 4 + [HEADS], -1)
        q, k, v, g = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v, g))
        return chunk_kimi_delta_attention(q, k, v, g=-stock.softplus(g), beta=beta.sigmoid())[0]


LAYERS = {
    "scan": (Scanning, {}, True),
    "scan, the last state": (Scanning, {"return_final_states": True}, True),
    "scan, limits in a list": (Scanning, {"dt_limit": [0.1, 1.0]}, True),
    "another scan": (Scanning, {"factor": 0.5}, False),
    "a tensor nobody knows": (Scanning, {"sequences": torch.ones(1)}, False),
    "rule": (Ruling, {}, True),
    "rule, the last state": (Ruling, {"output_final_state": True}, True),
    "channels": (Channels, {}, True),
}


def gradients(model, x):
    model.zero_grad()
    out = model(x)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def saved(model, x):
    return measure(lambda: model(x), device="cpu").saved


@pytest.mark.parametrize("layer", LAYERS)
def test_which_runs(layer, monkeypatch):
    """Ours where it computes the same, else a checkpoint; both keep what they are given."""
    cls, options, expected = LAYERS[layer]
    model, x = nn.Sequential(cls(**options)), torch.randn(BATCH, TOKENS, WIDTH)
    theirs, before = gradients(model, x), saved(model, x)
    swap(model, sample=x, lean="call")
    ran = []
    in_pieces = pieces.in_pieces
    for module in (recurrences.chunk_scan, recurrences.gated_delta_rule):
        monkeypatch.setitem(
            module.__globals__, "in_pieces", lambda *given: ran.append(given) or in_pieces(*given)
        )
    ours = gradients(model, x)
    assert bool(ran) == expected
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert saved(model, x) < 0.3 * before


@pytest.mark.parametrize("cls", [Scanning, Ruling, Channels])
def test_forward_mode(cls):
    """As stock writes it: parameters need gradients, the input has a tangent."""
    model, x = nn.Sequential(cls()), torch.randn(BATCH, TOKENS, WIDTH)
    stock = copy.deepcopy(model)
    swap(model, lean="call")
    torch.testing.assert_close(tangent_and_gradients(model, x), tangent_and_gradients(stock, x))


def test_autocast_is_left_to_the_library():
    model, x = nn.Sequential(Ruling()), torch.randn(BATCH, TOKENS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = gradients(model, x)
        swap(model, lean="call")
        torch.testing.assert_close(gradients(model, x), theirs, rtol=0, atol=0)


def test_other_shapes_are_left():
    """One step size for all heads: what the library spreads, ours would not."""
    tensors, _, theirs, options = case("scan")
    fits = dict(zip(recurrences.KNOWN[theirs.__name__].tensors, tensors, strict=True))
    assert recurrences.stand_in(theirs.__name__, theirs, None, (), {**fits, **options})
    one = {**fits, "dt": fits["dt"][..., :1]}
    assert not recurrences.stand_in(theirs.__name__, theirs, None, (), {**one, **options})
