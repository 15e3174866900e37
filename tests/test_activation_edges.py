"""Bounds that a dtype cannot hold, flat parts, and memory that is not PyTorch's."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from activation_cases import DTYPES, generator, keep, modes
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import memkit
import memkit.functional as M
from memkit._reference import value_and_gradient

BOUNDS = [(-0.1, 0.1), (-0.7, 0.7), (-1e-30, 1e4), (0.3, 0.3), (-2.0, 0.5)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("mode", modes("hardtanh"))
def test_hardtanh_bounds_that_round(low: float, high: float, mode: str, dtype: torch.dtype) -> None:
    x = torch.tensor(
        [-5.0, -1.0, low - 0.05 - abs(low) / 2, (low + high) / 2, high + 0.05 + abs(high) / 2, 1.0, 5.0],
        dtype=dtype,
    )
    got = value_and_gradient(
        lambda x: M.hardtanh(x.clone() if "inplace" in mode else x, low, high, **keep(mode)), x
    )
    want = value_and_gradient(lambda x: F.hardtanh(x, low, high), x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_hardtanh_modules_and_autocast() -> None:
    x = torch.linspace(-1, 1, 9, dtype=torch.float16)
    want = value_and_gradient(nn.Hardtanh(-0.1, 0.1), x)
    torch.testing.assert_close(value_and_gradient(memkit.nn.Hardtanh(-0.1, 0.1), x), want, rtol=0, atol=0)
    second = torch.autograd.functional.hvp(
        lambda x: M.hardtanh(x, -0.1, 0.1).square().sum(), x, torch.ones_like(x)
    )[1]
    want = torch.autograd.functional.hvp(
        lambda x: F.hardtanh(x, -0.1, 0.1).square().sum(), x, torch.ones_like(x)
    )[1]
    torch.testing.assert_close(second, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_slope_of_zero_lets_nan_through_where_the_function_is_not_flat(dtype: torch.dtype) -> None:
    x = torch.tensor([-1.5, -3.0, -4.0], dtype=dtype, requires_grad=True)
    for save in ("input", "output"):
        y = M.hardswish(x, save=save)
        grad = torch.autograd.grad(y, x, torch.full_like(y, torch.nan))[0]
        assert grad.isnan().tolist() == [True, False, False]


@pytest.mark.parametrize("name", ["relu6", "hardtanh", "hardswish"])
def test_the_gradient_of_nan_is_stocks(name: str) -> None:
    x = torch.tensor([torch.nan])
    got, want = (value_and_gradient(getattr(module, name), x)[1] for module in (M, F))
    torch.testing.assert_close(got, want, equal_nan=True)


def values(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(2050, generator=generator(), dtype=torch.float64) * 4
    ends = [0.0, -0.0, 6.0, 3.0, -3.0, 1.0, -1.0, torch.nan, torch.inf, -torch.inf]
    return torch.cat([x, torch.tensor(ends, dtype=torch.float64)]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inplace", [False, True, "auto"])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("relu", ()), ("leaky_relu", (0.1,)), ("leaky_relu", (-0.5,)), ("relu6", ()), ("hardtanh", (-1.0, 1.0))],
)
def test_from_a_bit_all_is_stocks(
    name: str, arguments: tuple[float, ...], inplace: bool | str, dtype: torch.dtype
) -> None:
    """To the last digit: at the kinks, at NaN and infinities, and with such gradients. A negative slope too."""
    x, grad = values(dtype), torch.randn(2060, generator=generator(1)).to(dtype)
    grad[::7], grad[3::7] = torch.inf, torch.nan

    def run(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return value_and_gradient(lambda leaf: function(leaf * 1), x, grad)

    got = run(lambda x: getattr(M, name)(x, *arguments, inplace=inplace, save="bit"))
    want = run(lambda x: getattr(F, name)(x, *arguments))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_bits_output_may_be_changed() -> None:
    """Nothing of it is kept, so that what comes behind may work in place."""
    x = torch.randn(9, generator=generator(), requires_grad=True)
    for save in ("output", "bit"):
        y = M.relu(x, save=save)
        y += 1
        if save == "output":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
    y.sum().backward()
    assert torch.equal(x.grad, (x > 0).float())


def test_views_from_a_bit() -> None:
    """Of which "auto" makes a new tensor that keeps no output either."""
    x = torch.randn(4, 6, generator=generator(), requires_grad=True)
    with saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        kept: list[int] = []
        y = M.relu((x * 1).view(8, 3), inplace="auto", save="bit")
    y.sum().backward()
    assert kept == [3]
    assert torch.equal(x.grad, (x > 0).float())


def test_auto_leaves_memory_of_others_alone(tmp_path: Path) -> None:
    array = np.linspace(-3, 3, 64, dtype=np.float32)
    before = array.copy()
    M.gelu(torch.from_numpy(array), inplace="auto")
    M.gelu(torch.frombuffer(memoryview(array), dtype=torch.float32), inplace="auto")
    M.gelu(torch.from_dlpack(array), inplace="auto")
    assert np.array_equal(array, before)
    file = tmp_path / "values.bin"
    file.write_bytes(array.tobytes())
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        x = torch.frombuffer(mapped, dtype=torch.float32)
        M.silu(x, inplace="auto")
        assert np.array_equal(x.numpy(), before)
        del x
    M.relu(torch.from_file(str(file), shared=True, size=64), inplace="auto")
    assert file.read_bytes() == before.tobytes()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = np.linspace(-3, 3, 32, dtype=np.float32).reshape(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.values)


@pytest.mark.parametrize("with_sample", [False, True])
def test_swap_leaves_memory_of_others_alone(with_sample: bool) -> None:
    net = nn.Sequential(Table(), nn.GELU(), nn.Linear(8, 8))
    before = net[0].values.copy()
    want = net(torch.ones(1))
    memkit.swap(net, sample=torch.ones(1) if with_sample else None)
    for _ in range(2):
        torch.testing.assert_close(net(torch.ones(1)), want)
    assert np.array_equal(net[0].values, before)


def test_views_that_negate_and_zeros_without_memory() -> None:
    x = torch.randn(8, requires_grad=True)
    negated = torch._neg_view(x * 1)
    with pytest.raises(RuntimeError, match=r"silu: expected, in place, .* a view that negates its base"):
        M.silu(negated, inplace=True)
    torch.testing.assert_close(M.silu(negated, inplace="auto"), F.silu(-x))
    zeros = torch._efficientzerotensor(5)
    assert M.gelu(zeros, inplace="auto").eq(0).all()
    with pytest.raises(RuntimeError, match=r"gelu: expected, in place, .* zeros"):
        M.gelu(zeros, inplace=True)
