"""What the tests of the norms share: inputs of every kind, weights, calls, and how exact a result has to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import memkit.functional as M
from memkit._reference_norm import STOCK

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
LOW = [torch.float32, torch.float16, torch.bfloat16]
KINDS = ("normal", "large mean", "tiny variance", "heavy tails")
OPS = ("layer_norm", "rms_norm")
SAVES = ("input", "output")
ops = pytest.mark.parametrize("op", OPS)
saves = pytest.mark.parametrize("save", SAVES)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values that dtype holds, where stock PyTorch's own arithmetic does not overflow."""
    x = torch.randn(shape, generator=generator(seed), dtype=torch.float64)
    if kind == "large mean":
        x += 1000 if dtype in (torch.float32, torch.float64) else 60
    elif kind == "tiny variance":
        x = 1 + x * (1e-3 if dtype in (torch.float32, torch.float64) else 2e-2)
    elif kind == "heavy tails":
        x = (x * 1.5).sinh()
        x = x.clamp(-1e3, 1e3)
    return x.to(dtype)


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, mean: float = 0, scale: float = 1
) -> Tensor:
    x = torch.randn(shape, generator=generator(seed), dtype=torch.float64)
    return (mean + scale * x).to(dtype)


def uniform(shape: tuple[int, ...], dtype: torch.dtype, seed: int, low: float, high: float) -> Tensor:
    x = torch.rand(shape, generator=generator(seed), dtype=torch.float64)
    return (low + (high - low) * x).to(dtype)


def assert_as_good_as_stock(
    names: str, mine: list[Tensor], theirs: list[Tensor], want: list[Tensor], units: float = 0.5
) -> None:
    """Worst and root mean square error at most twice stock's, plus `units` in the last place of the largest value."""
    for name, a, b, truth in zip(names.split(), mine, theirs, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.isfinite().all(), name
        slack = units * torch.finfo(a.dtype).eps * truth.abs().max().item()
        for measure in ("worst", "rms"):
            own, other = (
                (x.double() - truth).abs().max()
                if measure == "worst"
                else (x.double() - truth).square().mean().sqrt()
                for x in (a, b)
            )
            assert own <= 2 * other + slack, (
                f"{name}: {measure} error {own:.2e}, stock's {other:.2e}, slack {slack:.2e}"
            )


def weights(op: str, columns: int, dtype: torch.dtype, ratio: float = 0.3) -> list[Tensor]:
    """|bias| <= ratio |weight|, of both signs."""
    weight = uniform((columns,), dtype, 1, 0.5, 1.5) * (1 - 2 * (torch.arange(columns) % 3 == 0)).to(dtype)
    if op.endswith("rms_norm"):
        return [weight]
    return [weight, (uniform((columns,), dtype, 2, -ratio, ratio).double() * weight.double().abs()).to(dtype)]


def call(function: Callable[..., Any], op: str, columns: int, **keep: Any) -> Callable[..., Any]:
    """function(input[, residual], weight[, bias]) over the last dimension."""
    tensors = 2 if op.startswith("add_") else 1
    eps = 1e-6 if op.endswith("rms_norm") else 1e-5
    return lambda *t: function(*t[:tensors], (columns,), *t[tensors:], eps, **keep)


def ours(op: str, columns: int, **keep: Any) -> Callable[..., Any]:
    return call(getattr(M, op), op, columns, **keep)


def stock(op: str, columns: int) -> Callable[..., Any]:
    return call(STOCK[op], op, columns)
