"""Dropout: what it drops, what it keeps for backward, and that every combination is the composition of stock's pieces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dropout_cases import DTYPES, SEED, mask, seeded
from test_emulated import emulated
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
import memkit.functional as M
from memkit._reference import ACTIVATIONS
from memkit.functional._dropout import draw_seed
from memkit.memory import measure

ACTS = [name for name in ACTIVATIONS if name != "gelu"] + ["gelu", "gelu_tanh"]
JUMPS = ["relu6", "hardtanh", "hardsigmoid", "hardswish"]


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
    kept = seeded(lambda: M.dropout(torch.ones_like(x), 0.3)) != 0  # not y's: x may hold zeros
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


def test_automatic_falls_back() -> None:
    x = torch.randn(6)
    for kwargs in ({"save": "input"}, {"act": "leaky_relu", "negative_slope": -0.1}, {"act": "relu6"}):
        leaf = x.clone().requires_grad_()
        y = seeded(lambda leaf=leaf, kwargs=kwargs: M.act_dropout(leaf * 1, p=0.5, inplace="auto", **kwargs))
        wanted = seeded(lambda leaf=leaf, kwargs=kwargs: M.act_dropout(leaf * 1, p=0.5, **kwargs))
        assert torch.equal(y, wanted)


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available() or emulated, reason="needs a GPU, with a generator of its own"
)
def test_the_seed_is_what_the_device_would_draw() -> None:
    """So that eager calls, compiled ones and captured graphs drop the same."""
    x, limits = torch.ones(4, device="cuda"), torch.iinfo(torch.int64)
    for _ in range(3):
        state = torch.cuda.get_rng_state()
        seed = draw_seed("dropout", x, None)
        after = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(state)
        drawn = torch.randint(limits.min, limits.max, (), device="cuda")
        assert seed.device.type == "cpu"
        assert seed.item() == drawn.item()
        assert torch.equal(torch.cuda.get_rng_state(), after)
