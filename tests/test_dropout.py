"""Dropout: what it drops, what it keeps for backward, and that every combination is the composition of stock's pieces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
import memkit.functional as M
from memkit._reference import ACTIVATIONS
from memkit.memory import measure

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ACTS = [name for name in ACTIVATIONS if name != "gelu"] + ["gelu", "gelu_tanh"]
JUMPS = ["relu6", "hardtanh", "hardsigmoid", "hardswish"]
SEED = -0x123456789ABCDEF


def words(count: int, key: int) -> np.ndarray:
    """Philox4x32-10 in numpy: the words of the first elements."""
    counters = np.arange((count + 3) // 4, dtype=np.uint64)
    low32 = np.uint64(0xFFFFFFFF)
    a, b = counters & low32, counters >> np.uint64(32)
    c = d = np.zeros_like(a)
    low, high = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32 & 0xFFFFFFFF)
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b = second >> np.uint64(32) ^ b ^ low, second & low32
        c, d = first >> np.uint64(32) ^ d ^ high, first & low32
        low, high = low + np.uint64(0x9E3779B9) & low32, high + np.uint64(0xBB67AE85) & low32
    return np.stack([a, b, c, d], axis=1).reshape(-1)[:count]


def seeded(fn: Callable[[], Any], seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return fn()


def mask(shape: tuple[int, ...], p: float, seed: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    """What the next dropout of this shape multiplies with."""
    return seeded(lambda: M.dropout(torch.ones(shape, dtype=dtype), p), seed)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("size", [1, 3, 4, 1023, 1024, 1029, 70_000])
def test_drops_what_philox_says(size: int, p: float, device: torch.device) -> None:
    x = torch.arange(1, size + 1, dtype=torch.float64, device=device)
    seed = torch.tensor(SEED, device=device)
    got = torch.ops.memkit._activation(
        x, None, -1, "identity", [], "auto", None, seed, [p, 1 / (1 - p) if p < 1 else 1.0, 0.0, 0.0]
    )
    kept = words(size, SEED & (1 << 64) - 1) >= min(round(p * 2**32), 2**32)
    wanted = torch.where(torch.from_numpy(kept), x.cpu() / (1 - p) if p < 1 else x.cpu(), 0.0)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-15, atol=0)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9])
def test_share_and_mean(p: float, repeatable: None) -> None:
    n = 400_000
    y = M.dropout(torch.ones(n), p)
    sigma = math.sqrt(p * (1 - p) / n)
    assert abs((y == 0).double().mean() - p) < 5 * sigma
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
    pairs = (y[:-1] == 0) & (y[1:] == 0)  # neighbours are independent
    assert abs(pairs.double().mean() - p * p) < 6 * math.sqrt(p * p / n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inplace", [False, True, "auto"])
def test_value_and_gradient(dtype: torch.dtype, inplace: Any, device: torch.device) -> None:
    x = torch.randn(37, 53, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn_like(x)
    y = seeded(lambda: M.dropout(x * 1, 0.3, inplace=inplace))
    kept = y != 0
    factor = kept.double() / 0.7
    torch.testing.assert_close(
        y, (x.double() * factor).to(dtype), rtol=1e-6 if dtype.itemsize > 2 else 0, atol=0
    )
    (slope,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(
        slope, (grad.double() * factor).to(dtype), rtol=1e-6 if dtype.itemsize > 2 else 0, atol=0
    )


@pytest.mark.parametrize("mode", ["input", "output", "inplace"])
@pytest.mark.parametrize("act", ACTS)
def test_act_dropout_is_the_composition(act: str, mode: str) -> None:
    name, stock = ("gelu", lambda x: F.gelu(x, approximate="tanh")) if act == "gelu_tanh" else (act, None)
    stock = stock or (lambda x: (ACTIVATIONS[name].exact or ACTIVATIONS[name].stock)(x))
    x = torch.randn(515, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(515, 3, dtype=torch.float64)
    keep = {"inplace": True} if mode == "inplace" else {"save": mode}
    if act in JUMPS and mode != "input":
        with pytest.raises(ValueError, match="whose scaling blurs where the slope jumps"):
            M.act_dropout(x * 1, act, 0.4, **keep)
        return
    for b in (None, bias):
        leaves = (x,) if b is None else (x, b)
        h = x.clone() if mode == "inplace" else x
        y = seeded(lambda h=h, b=b: M.act_dropout(h, act, 0.4, bias=b, **keep))
        wanted = stock(x if b is None else x + b) * mask((515, 3), 0.4)
        torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-13)
        near_minimum = 1e-6 if mode != "input" else 1e-12
        for got, want in zip(
            torch.autograd.grad(y, leaves, grad), torch.autograd.grad(wanted, leaves, grad), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=near_minimum, atol=near_minimum)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", JUMPS)
def test_bounds_stay_flat(act: str, dtype: torch.dtype) -> None:
    """Where the scaled bound rounds: no gradient passes beyond it, whatever the probability."""
    x = torch.tensor([20.0, 3.0, -20.0] * 50, dtype=dtype, requires_grad=True)
    stock = ACTIVATIONS[act].stock
    for p in (0.1, 0.3, 0.37, 0.77):
        for inplace in (False, "auto"):
            y = seeded(lambda p=p, inplace=inplace: M.act_dropout(x * 1, act, p, inplace=inplace))
            wanted = stock(x) * mask((150,), p).to(dtype)
            slopes = [torch.autograd.grad(each.sum(), x)[0] for each in (y, wanted)]
            torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_against_float64(dtype: torch.dtype) -> None:
    """One rounding where stock's composition has several: never worse than twice stock's error."""
    x, residual = torch.randn(64, 100, dtype=dtype), torch.randn(64, 100, dtype=dtype)
    bias = torch.randn(100, dtype=dtype)
    m = mask((64, 100), 0.25)
    cases = {
        "dropout_add": (
            lambda: M.dropout_add(x, residual, 0.25),
            residual + x * m.to(dtype),
            residual.double() + x.double() * m,
        ),
        "bias_dropout_add": (
            lambda: M.bias_dropout_add(x, bias, residual, 0.25),
            residual + (x + bias) * m.to(dtype),
            residual.double() + (x.double() + bias.double()) * m,
        ),
        "act_dropout": (
            lambda: M.act_dropout(x, "silu", 0.25),
            F.silu(x) * m.to(dtype),
            F.silu(x.double()) * m,
        ),
    }
    for name, (ours, stock, exact) in cases.items():
        error = (seeded(ours).double() - exact).abs().max()
        stock_error = (stock.double() - exact).abs().max()
        assert error <= 2 * stock_error + 1e-15, name


@pytest.mark.parametrize("inplace", [False, True])
def test_bias_dropout_add(inplace: bool, device: torch.device) -> None:
    leaves = [
        torch.randn(shape, device=device, requires_grad=True) for shape in ((9, 5, 33), (33,), (9, 5, 33))
    ]
    x, bias, residual = leaves
    y = seeded(lambda: M.bias_dropout_add(x * 1, bias, residual, 0.5, inplace=inplace))
    factor = seeded(lambda: M.dropout(torch.ones_like(x), 0.5))
    wanted = residual + (x + bias) * factor
    torch.testing.assert_close(y, wanted)
    grad = torch.randn_like(y)
    for got, want in zip(
        torch.autograd.grad(y, leaves, grad), torch.autograd.grad(wanted, leaves, grad), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_saved_bytes() -> None:
    """Beyond what the next layer keeps anyway: a seed, and a bit where the activation has a minimum."""
    x = torch.randn(1024, 64, dtype=torch.bfloat16, requires_grad=True)
    n = x.numel()
    assert measure(lambda: M.dropout(x, 0.1)).saved == 8
    assert measure(lambda: M.dropout_add(x, x.detach(), 0.1)).saved == 8
    assert measure(lambda: M.alpha_dropout(x, 0.1, True)).saved == 8
    assert measure(lambda: M.dropout2d(x.view(16, 64, 8, 8), 0.1)).saved == 16 * 64 * 2  # the mask
    linear = nn.Linear(64, 64, dtype=torch.bfloat16)
    saved = {
        "dropout": measure(lambda: linear(M.dropout(x * 1, 0.1, inplace=True))).saved - 8,
        "gelu": measure(lambda: linear(M.act_dropout(x * 1, "gelu", 0.1, inplace=True))).saved - 8,
        "relu": measure(lambda: linear(M.act_dropout(x * 1, "relu", 0.1, save="output"))).saved - 8,
    }
    assert {name: each / n for name, each in saved.items()} == {"dropout": 2.0, "gelu": 2.125, "relu": 2.0}
    assert measure(lambda: linear(F.dropout(F.gelu(x * 1), 0.1))).saved / n == 6.0 + 0.0  # stock


def test_incoming_gradients_memory_is_reused() -> None:
    x = torch.randn(1 << 18, requires_grad=True)

    def step(dropout: Callable[[Tensor], Tensor]) -> int:
        loss = (dropout(x) * 2).sum()
        return measure(lambda: loss.backward(retain_graph=True)).peak

    step(lambda h: M.dropout(h, 0.5))  # makes x.grad
    assert step(lambda h: M.dropout(h, 0.5)) <= step(lambda h: F.dropout(h, 0.5)) - x.nbytes + 64


def test_who_governs_the_seed(device: torch.device) -> None:
    x = torch.randn(1000, device=device)
    first, again = (seeded(lambda: M.dropout(x, 0.5)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, M.dropout(x, 0.5))
    generator = torch.Generator(device).manual_seed(3)
    a = M.dropout(x, 0.5, generator=generator)
    state = torch.get_rng_state()
    b = M.dropout(x, 0.5, generator=generator.manual_seed(3))
    assert torch.equal(a, b)
    assert torch.equal(state, torch.get_rng_state())
    on_cpu = torch.Generator().manual_seed(3)  # the same elements wherever the tensor is
    c = M.dropout(x, 0.5, generator=on_cpu)
    d = M.dropout(x.cpu(), 0.5, generator=on_cpu.manual_seed(3))
    assert torch.equal(c.cpu(), d)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_drops_the_same_again(use_reentrant: bool) -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def block(h: Tensor) -> Tensor:
        return M.act_dropout(h * 2, "gelu", 0.5, inplace="auto")

    wanted = seeded(lambda: torch.autograd.grad(block(x).sum(), x))[0]
    y = seeded(lambda: checkpoint(block, x, use_reentrant=use_reentrant))
    y.sum().backward()
    torch.testing.assert_close(x.grad, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(x.grad == 0, wanted == 0)


def test_evaluation_and_nothing_to_drop() -> None:
    x = torch.randn(8)
    state = torch.get_rng_state()
    for module in (nn.Dropout, nn.AlphaDropout):
        twin = getattr(memkit.nn, module.__name__)(0.5).eval()
        assert twin(x) is x
    assert M.dropout(x, 0.0) is x
    assert M.dropout_add(x, x, 0.3, training=False).equal(x + x)
    assert M.act_dropout(x, "relu", 0.3, training=False).equal(F.relu(x))
    empty = torch.empty(0, 3)
    assert M.dropout(empty, 0.5).shape == (0, 3)
    assert torch.equal(state, torch.get_rng_state())
    assert M.dropout(torch.tensor(2.0), 0.0).shape == ()


def test_an_activations_parameters_go_by_name() -> None:
    x = torch.randn(64)
    y = seeded(lambda: M.act_dropout(x, "leaky_relu", 0.3, negative_slope=0.2))
    torch.testing.assert_close(y, seeded(lambda: M.dropout(F.leaky_relu(x, 0.2), 0.3)))
    assert not torch.allclose(y, seeded(lambda: M.act_dropout(x, "leaky_relu", 0.3)))


def test_special_values() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan] * 100)
    y = M.dropout(x, 0.5)
    dropped = mask((300,), 0.5, dtype=torch.float32) == 0
    y = seeded(lambda: M.dropout(x, 0.5))
    assert y[dropped].isnan().all()  # 0 * infinity, as in stock
    assert torch.equal(y[~dropped].isnan(), x[~dropped].isnan())
    assert M.dropout(torch.randn(1000), 1.0).eq(0).all()


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "strided", "expanded"])
@pytest.mark.parametrize("inplace", [False, True])
def test_layouts(layout: str, inplace: bool) -> None:
    base = torch.randn(4, 6, 8, 10, requires_grad=True)
    make: dict[str, Callable[[Tensor], Tensor]] = {
        "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
        "transposed": lambda t: t.transpose(1, 3),
        "strided": lambda t: (t * 1)[:, ::2],
        "expanded": lambda t: t[:, :1].expand(4, 6, 8, 10),
    }
    h = make[layout](base * 1)
    if layout == "expanded" and inplace:
        with pytest.raises(RuntimeError, match="dropout: expected, in place"):
            M.dropout(h, 0.5, inplace=True)
        return
    before = h.detach().clone()
    y = M.dropout(h, 0.5, inplace=inplace)
    if layout == "channels_last":
        assert y.is_contiguous(memory_format=torch.channels_last)
    factor = torch.where(y.detach() == 0, 0.0, 2.0)
    assert 0.3 < (factor == 0).float().mean() < 0.7
    torch.testing.assert_close(y, before * factor)
    for grad in (torch.randn(y.shape), torch.randn(y.shape[::-1]).permute(3, 2, 1, 0)):
        (slope,) = torch.autograd.grad(y, base, grad, retain_graph=True)
        (wanted,) = torch.autograd.grad(make[layout](base) * factor, base, grad)
        torch.testing.assert_close(slope, wanted)


def test_gradcheck() -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    r = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    b = torch.randn(7, dtype=torch.float64, requires_grad=True)
    check, second = torch.autograd.gradcheck, torch.autograd.gradgradcheck
    for function, args in (
        (lambda x: seeded(lambda: M.dropout(x, 0.4)), (x,)),
        (lambda x: seeded(lambda: M.alpha_dropout(x, 0.4, True)), (x,)),
        (lambda x, b, r: seeded(lambda: M.bias_dropout_add(x, b, r, 0.4)), (x, b, r)),
        (lambda x, b: seeded(lambda: M.act_dropout(x, "tanh", 0.4, bias=b)), (x, b)),
        (lambda x, b: seeded(lambda: M.act_dropout(x, "gelu", 0.4, bias=b, save="input")), (x, b)),
    ):
        assert check(function, args)
        assert second(function, args)


def test_transforms() -> None:
    x = torch.ones(6, 50)
    slope = torch.func.grad(lambda t: M.dropout(t, 0.5).sum())(x)
    assert set(slope.unique().tolist()) == {0.0, 2.0}
    same = torch.vmap(lambda t: M.dropout(t, 0.5), randomness="same")(x)
    assert (same == same[0]).all()
    assert set(same.unique().tolist()) == {0.0, 2.0}
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda t: M.dropout(t, 0.5))(x)
    with pytest.raises(NotImplementedError, match="randomness='same'"):
        torch.vmap(lambda t: M.dropout(t, 0.5), randomness="different")(x)
    value, tangent = torch.func.jvp(lambda t: M.dropout(t, 0.5), (x,), (x * 3,))
    torch.testing.assert_close(tangent, value * 3)


def test_batched_gradients_in_another_memory_order() -> None:
    x = torch.ones(50, 6).t().requires_grad_()
    y, rows = M.dropout(x, 0.5), torch.arange(3 * 300.0).view(3, 6, 50)
    (got,) = torch.autograd.grad(y, x, rows, is_grads_batched=True)
    torch.testing.assert_close(got, rows * y.detach())


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    weight = torch.randn(64, 64, requires_grad=True)

    def network(x: Tensor, residual: Tensor) -> Tensor:
        h = M.act_dropout(x @ weight, "gelu", 0.5, save="output")
        return M.dropout_add(h, residual, 0.25) + M.dropout(h, 0.5, inplace="auto")

    compiled = torch.compile(network, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    x, residual = torch.randn(32, 64), torch.randn(32, 64)
    got, wanted = (seeded(lambda f=f: f(x, residual)) for f in (compiled, network))
    torch.testing.assert_close(got, wanted)
    grads = [torch.autograd.grad(each.square().sum(), weight)[0] for each in (got, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


def test_opcheck() -> None:
    seed = torch.tensor(SEED)
    drop = [0.3, 1 / 0.7, 0.0, 0.0]
    for grad in (False, True):
        x = torch.randn(9, 14, requires_grad=grad)
        for op, residual in (("identity", torch.randn(9, 14)), ("identity", None), ("silu", None)):
            args = (x, None, -1, op, (), "auto", residual, seed, drop)
            torch.library.opcheck(torch.ops.memkit._activation.default, args)
    x, grads = torch.randn(9, 14), torch.randn(9, 14)
    torch.library.opcheck(
        torch.ops.memkit._dropout_mask.default, ((3, 5), seed, drop), {"dtype": torch.float32}
    )
    out, bits = torch.ops.memkit._activation_with_bits(x, None, -1, "silu", (), seed, drop)
    backward = (grads, out, None, -1, bits, "silu", (), True, seed, drop)
    torch.library.opcheck(torch.ops.memkit._activation_backward.default, backward)
    meta = torch.ops.memkit.dropout(torch.empty(3, 4, device="meta"), 0.5)
    assert (meta.shape, meta.is_meta) == ((3, 4), True)


def test_autocast_adds_as_stock() -> None:
    """A Linear's bfloat16 output to a float32 stream: the sum has the stream's dtype."""
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = seeded(lambda: M.dropout_add(linear(x), x, 0.5))
        z = seeded(lambda: M.bias_dropout_add(linear(x), linear.bias, x, 0.5))
    assert y.dtype == z.dtype == torch.float32
    assert M.dropout_add(torch.randn(4, 8), torch.randn(8), 0.5).shape == (4, 8)
    with pytest.raises(ValueError, match="expected, in place, a residual of the input's shape"):
        M.dropout_add(torch.randn(4, 8), torch.randn(8), 0.5, inplace=True)


def test_alpha_dropout() -> None:
    x = F.selu(torch.randn(1 << 18))
    x = (x - x.mean()) / x.std()
    for p in (0.1, 0.5):
        y = seeded(lambda p=p: M.alpha_dropout(x, p, True))
        assert abs(y.mean()) < 0.02
        assert abs(y.std() - 1) < 0.02
        dropped = mask((1 << 18,), p, dtype=torch.float32) == 0
        a = (1.7580993408473766**2 * p + 1) ** -0.5 * (1 - p) ** -0.5
        torch.testing.assert_close(y[dropped], torch.full_like(y[dropped], a * 1.7580993408473766 * (p - 1)))
        torch.testing.assert_close(y[~dropped], x[~dropped] * a + a * 1.7580993408473766 * p)
    channels = M.feature_alpha_dropout(torch.randn(512, 64, 8), 0.3, True)
    assert abs(channels.mean()) < 0.02
    assert abs(channels.std() - 1) < 0.02
    constant = (channels == channels[..., :1]).all(-1).float().mean()
    assert abs(constant - 0.3) < 0.02


@pytest.mark.parametrize(
    ("name", "shape", "dims"),
    [
        ("dropout1d", (20, 30, 5), 2),
        ("dropout1d", (30, 5), 1),
        ("dropout2d", (20, 30, 2, 3), 2),
        ("dropout2d", (30, 2, 3), 1),
        ("dropout3d", (20, 30, 2, 2, 2), 2),
        ("drop_path", (500, 2, 3), 1),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_whole_features(name: str, shape: tuple[int, ...], dims: int, inplace: bool) -> None:
    x = torch.ones(shape, requires_grad=True)
    y = getattr(M, name)(x * 1, 0.4, inplace=inplace)
    flat = y.detach().flatten(dims)
    assert (flat == flat[..., :1]).all()
    values = set(flat.unique().tolist())
    assert values == {0.0, torch.tensor(1 / 0.6).item()}
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(slope, y.detach())
    wrong = x.flatten()[:6].view(6) if name != "drop_path" else x.sum()
    with pytest.raises(ValueError, match=f"{name}: expected an input of"):
        getattr(M, name)(wrong, 0.4)


def test_drop_path_without_scaling() -> None:
    y = M.drop_path(torch.ones(300, 4), 0.5, scale_by_keep=False)
    assert set(y.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    "name", ["Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"]
)
def test_modules_are_their_twins(name: str) -> None:
    ours, stock = getattr(memkit.nn, name)(0.3), getattr(nn, name)(0.3)
    assert isinstance(ours, type(stock))
    assert (repr(ours), ours.state_dict()) == (repr(stock), {})
    x = torch.randn(16, 16, 4, 4, 4)[
        (slice(None),) * 2 + (0,) * {"Dropout1d": 2, "Dropout2d": 1}.get(name, 0)
    ]
    assert not torch.equal(ours(x), x)
    assert torch.equal(ours.eval()(x), x)
    with pytest.raises(ValueError, match="between 0 and 1"):
        getattr(memkit.nn, name)(1.5)


def test_automatic_falls_back() -> None:
    x = torch.randn(6)
    for kwargs in ({"save": "input"}, {"act": "leaky_relu", "negative_slope": -0.1}, {"act": "relu6"}):
        leaf = x.clone().requires_grad_()
        y = seeded(lambda leaf=leaf, kwargs=kwargs: M.act_dropout(leaf * 1, p=0.5, inplace="auto", **kwargs))
        wanted = seeded(lambda leaf=leaf, kwargs=kwargs: M.act_dropout(leaf * 1, p=0.5, **kwargs))
        assert torch.equal(y, wanted)


def test_bad_input() -> None:
    x = torch.randn(4, 6)
    state = torch.get_rng_state()
    for args, kwargs, message in (
        ((0.5, 1), {}, "dropout: expected a bool, got int"),
        ((0.5, np.True_), {}, "dropout: expected a bool, got numpy.bool"),
        (("x",), {}, "dropout: expected a number, got str"),
        ((0.5,), {"generator": 42}, "dropout: expected a torch.Generator or None, got int"),
    ):
        with pytest.raises(TypeError, match=message):
            M.dropout(x, *args, **kwargs)
    with pytest.raises(ValueError, match="drop_path: expected inplace"):
        M.drop_path(x, 0.5, inplace="yes")
    for function in (M.dropout_add, lambda x, y, **kw: M.bias_dropout_add(x, x[0], y, **kw)):
        with pytest.raises(
            RuntimeError, match="dropout_add: expected, in place, a residual in memory of its own"
        ):
            function(x, x.view(4, 6), inplace=True)
    with pytest.raises(RuntimeError, match="dropout_add: expected a dense"):
        M.dropout_add(x, x.to_sparse())
    assert torch.equal(state, torch.get_rng_state())
    for p in (-0.1, 1.1, math.nan):
        for function in (M.dropout, M.dropout1d, M.drop_path, M.act_dropout):
            with pytest.raises(ValueError, match="expected a probability p in"):
                function(x, p=p)
    with pytest.raises(
        TypeError, match=r"dropout: expected float32, float64, float16 or bfloat16, got torch\.int64"
    ):
        M.dropout(torch.ones(3, dtype=torch.long))
    for function, shape in (
        (M.dropout1d, (2, 3)),
        (M.dropout2d, (2, 3, 4)),
        (M.dropout3d, (2, 3, 4, 5)),
        (M.drop_path, (2, 3)),
        (M.feature_alpha_dropout, (2, 3)),
    ):
        whole = torch.ones(shape, dtype=torch.long)
        for p in (0.5, 1.0):
            with pytest.raises(
                TypeError, match=rf"{function.__name__}: expected float32, .*, got torch\.int64 \[2"
            ):
                function(whole, p, True)
    with pytest.raises(ValueError, match="feature_alpha_dropout: expected inplace True, False or 'auto'"):
        M.feature_alpha_dropout(x, 0.5, True, "yes")
    with pytest.raises(
        TypeError, match=r"act_dropout: expected parameters \['negative_slope'\] for leaky_relu, got"
    ):
        M.act_dropout(x, "leaky_relu", slope=0.2)
    with pytest.raises(ValueError, match="dropout: expected inplace True, False or 'auto', got 1"):
        M.dropout(x, inplace=1)
    with pytest.raises(ValueError, match=r"bias_dropout_add: expected a bias of shape \[6\]"):
        M.bias_dropout_add(x, torch.zeros(4), x)
    with pytest.raises(ValueError, match="activation: expected one of"):
        M.act_dropout(x, "swish")
    leaf = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf that requires grad"):
        M.dropout(leaf, inplace=True)
    with pytest.raises(RuntimeError, match="residual in memory of its own"):
        M.dropout_add(x, x, 0.5, inplace=True)
    before = x.clone()
    ops = torch.ops.memkit
    for seed, drop, message in (
        (torch.tensor(1.0), [0.5, 2.0, 0.0, 0.0], "expected as seed one int64"),
        (torch.tensor([1, 2]), [0.5, 2.0, 0.0, 0.0], "expected as seed one int64"),
        (torch.tensor(1), [0.5], "beside a seed, got 1 numbers"),
        (torch.tensor(1), [1.5, 2.0, 0.0, 0.0], r"expected a probability in \[0, 1\], got 1.5"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            ops._activation_(x, None, -1, "identity", [], "auto", None, seed, drop)
    with pytest.raises(ValueError, match="expected no activation beside a residual"):
        ops._activation(x, None, -1, "relu", [], "auto", x)
    assert torch.equal(x, before)
