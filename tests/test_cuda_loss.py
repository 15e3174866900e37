"""The losses on a GPU, against the CPU's float64 truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loss_cases import VARIANTS, arguments, assert_as_good, gradients, in_double, logits, target_of
from torch import Tensor

import memkit.functional as M
from memkit._reference_loss import reference, stock, stock_linear
from memkit.memory import measure

pytestmark = pytest.mark.cuda
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def on_gpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.cuda() if isinstance(v, Tensor) else v for k, v in kwargs.items()}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_cross_entropy(variant: str, dtype: torch.dtype, reduction: str) -> None:
    """A warp a row, a block a row, rows that lie off 16 bytes, a thread a row; one row, whose single number is as exact as
    luck has it, many times."""
    for shape, draws in (((33, 1000), 1), ((9, 5003), 1), ((5, 70000), 1), ((3, 21, 5, 60), 1), ((11,), 16)):
        found = [three_ways(variant, shape, dtype, reduction, seed) for seed in range(draws)]
        for parts in zip(*found, strict=True):  # the losses of all draws, then the gradients, of each way
            mine, theirs, want = (torch.stack(each) for each in zip(*parts, strict=True))
            assert_as_good(mine, theirs, want)


def three_ways(
    variant: str, shape: tuple[int, ...], dtype: torch.dtype, reduction: str, seed: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(memkit's, stock's, exact) loss and gradient, of memkit out of place and in place."""
    x = logits("normal", shape, seed).to(dtype).cuda()
    target, kwargs = arguments(variant, shape, dtype)
    kwargs = on_gpu(kwargs) | {"reduction": reduction}
    target = target.cuda()
    want = gradients(lambda x: reference(x, target, **kwargs), x.double())
    theirs = gradients(lambda x: stock(x, target, **kwargs), x)
    three = []
    for inplace in (False, "auto"):
        mine = gradients(lambda x: M.cross_entropy(x * 1, target, **kwargs, inplace=inplace), x)  # noqa: B023
        three += zip(mine, theirs, want, strict=True)
    return three


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", ["plain", "all", "soft"])
def test_linear_cross_entropy(variant: str, dtype: torch.dtype, reduction: str) -> None:
    target, kwargs = arguments(variant, (600, 700), dtype)
    wide_target, wide = in_double(target, kwargs)
    x, w = ((torch.randn(n, 64) / 2).to(dtype).cuda() for n in (600, 700))
    more = on_gpu(kwargs) | {"reduction": reduction}
    mine = gradients(lambda x, w: M.linear_cross_entropy(x, w, target.cuda(), **more), x, w)
    theirs = gradients(lambda x, w: stock_linear(x, w, target.cuda(), **more), x, w)
    exact = on_gpu(wide) | {"reduction": reduction}
    want = gradients(lambda x, w: stock_linear(x, w, wide_target.cuda(), **exact), x.double(), w.double())
    for three in zip(mine, theirs, want, strict=True):
        assert_as_good(*three)


def test_peak() -> None:
    x = torch.randn(8192, 512, device="cuda", requires_grad=True)
    w = torch.randn(32768, 512, device="cuda", requires_grad=True)
    target = target_of((8192, 32768)).cuda()

    def peak(function: Any) -> int:
        torch.autograd.grad(function(), (x, w))
        return measure(lambda: torch.autograd.grad(function(), (x, w)), device="cuda").peak

    theirs = peak(lambda: F.cross_entropy(F.linear(x, w), target))
    mine = peak(lambda: M.linear_cross_entropy(x, w, target))
    assert mine - x.nbytes - w.nbytes <= 0.06 * theirs
