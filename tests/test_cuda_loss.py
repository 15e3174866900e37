"""The losses on a GPU, against the CPU's float64 truth."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loss_cases import (
    VARIANTS,
    arguments,
    assert_as_good,
    class_weights,
    gradients,
    in_double,
    logits,
    target_of,
)
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


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 1000, 16385, 40000])
def test_sums_over_rows(rows: int, dtype: torch.dtype) -> None:
    """In one block and in several: as exact as the result's dtype, and the same bits each time."""
    x = logits("normal", (rows, 3)).to(dtype).cuda()
    target = target_of((rows, 3)).cuda()
    soft = target_of((rows, 3), soft=True, dtype=dtype).cuda()
    weight = torch.tensor([0.5, 1.25, 3.0]).to(dtype).cuda()
    for t, w in ((target, None), (target, weight), (soft, weight)):
        for reduction in ("mean", "sum"):
            loss = M.cross_entropy(x, t, w, reduction=reduction)
            want = reference(x, t, w, reduction=reduction).to(dtype)
            torch.testing.assert_close(loss, want, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)
            again = M.cross_entropy(x, t, w, reduction=reduction)
            torch.testing.assert_close(again, loss, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_of_many_rows(dtype: torch.dtype) -> None:
    """What is divided by was added up by several blocks; ignored rows count for nothing."""
    x = logits("normal", (20000, 3)).to(dtype).cuda()
    target = target_of(x.shape).cuda()
    weight = class_weights(3).to(dtype).cuda()
    want = gradients(lambda x: reference(x, target, weight=weight.double()), x.double())
    theirs = gradients(lambda x: stock(x, target, weight=weight), x)
    mine = gradients(lambda x: M.cross_entropy(x, target, weight), x)
    for three in zip(mine, theirs, want, strict=True):
        assert_as_good(*three)
    assert torch.equal(mine[1][target == -100], torch.zeros_like(mine[1][target == -100]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_that_is_expanded(dtype: torch.dtype) -> None:
    x = logits("normal", (40, 7)).to(dtype).cuda()
    target = target_of(x.shape).cuda()
    one_by_one = gradients(lambda x: M.cross_entropy(x, target, reduction="none"), x)[1]
    expanded = gradients(lambda x: M.cross_entropy(x, target, reduction="none").sum(), x)[1]
    assert torch.equal(expanded, one_by_one)


def operators(function: Any) -> list[str]:
    """PyTorch's own operators that `function` comes to, but for memory."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        function()
    names = [event.name for event in found.events() if event.name.startswith("aten::")]
    return [name for name in names if name not in ("aten::empty", "aten::empty_like", "aten::empty_strided")]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_alone(dtype: torch.dtype, reduction: str) -> None:
    """Each operator of PyTorch's would be a launch, which takes longer than a small loss."""
    x = logits("normal", (64, 10)).to(dtype).cuda().requires_grad_()
    grad = torch.ones((64,) if reduction == "none" else (), dtype=dtype, device="cuda")
    for soft in (False, True):
        target = target_of(x.shape, soft, dtype=dtype).cuda()
        for weight in (None, class_weights(10).float().cuda()):
            forward = partial(M.cross_entropy, x, target, weight, reduction=reduction)
            assert operators(forward) == []
            assert operators(partial(torch.autograd.grad, forward(), x, grad)) == []


def test_captured() -> None:
    """A replay adds up what it finds, in one block and in several."""
    for rows in (100, 20000):
        x = torch.randn(rows, 4, device="cuda", requires_grad=True)
        target = torch.randint(4, (rows,), device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = M.cross_entropy(x, target)
            (grad,) = torch.autograd.grad(loss, x)
        for ignored in (0.0, 0.5):
            with torch.no_grad():
                x.copy_(torch.randn(rows, 4))
            target.copy_(target_of((rows, 4), ignored=ignored))
            graph.replay()
            again = M.cross_entropy(x, target)
            assert torch.equal(loss, again)
            assert torch.equal(grad, torch.autograd.grad(again, x)[0])
