"""Every family's CUDA kernels once over shapes that take each of their paths: short enough for compute-sanitizer, which
`make gpu` runs them under. How exact they are is other tests' to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memkit.functional as M
from memkit import optim
from memkit._reference_norm import STOCK

pytestmark = [pytest.mark.cuda, pytest.mark.sanitize]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
Function = Callable[..., Any]


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def both(function: Function, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Results, and the gradients of all tensors."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    found = function(*leaves)
    results = [found] if isinstance(found, Tensor) else list(found)
    upstream = [normal(tuple(r.shape), r.dtype, seed=7 + i) for i, r in enumerate(results)]
    return [r.detach() for r in results] + list(torch.autograd.grad(results, leaves, upstream))


def check(mine: Function, stock: Function, *tensors: Tensor) -> None:
    """Against stock in float64, as far as the dtype goes."""
    tolerance = 0.02 if tensors[0].dtype.itemsize == 2 else 1e-4
    want = both(stock, [x.double() for x in tensors])
    for got, truth in zip(both(mine, tensors), want, strict=True):
        size = truth.abs().max().clamp_min(1e-3)
        assert ((got.double() - truth) / size).abs().max() < tolerance


@dtypes
def test_activations(dtype: torch.dtype) -> None:
    for n in (1, 1023, 2048):
        for save in ("input", "output"):
            check(lambda x, save=save: M.silu(x, save=save), F.silu, normal((n,), dtype))
    x, bias = normal((6, 40), dtype), normal((40,), dtype, 1)
    check(lambda x, b: M.bias_act(x, b, "relu"), lambda x, b: F.relu(x + b), x, bias)
    check(lambda x: M.gelu(x * 1, inplace=True), F.gelu, x)
    y = M.dropout(x, 0.5, True)
    assert ((y == 0) | (y == 2 * x)).all()


@dtypes
def test_softmax(dtype: torch.dtype) -> None:
    for shape in ((33, 1), (70, 64), (9, 1003), (5, 5000), (2, 40_000)):
        check(lambda x: M.softmax(x, -1), lambda x: x.softmax(-1), normal(shape, dtype))
    check(lambda x: M.log_softmax(x, 1), lambda x: x.log_softmax(1), normal((3, 20, 5), dtype))
    mask = torch.arange(2050, device="cuda") % 3 < 2
    check(
        lambda x: M.softmax(x, -1, mask=mask, causal=True),
        lambda x: x.masked_fill(~(mask & torch.ones_like(x, dtype=torch.bool).tril()), -torch.inf).softmax(
            -1
        ),
        normal((2, 7, 2050), dtype),
    )


@dtypes
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_row_norms(op: str, dtype: torch.dtype) -> None:
    inputs = 2 if op.startswith("add_") else 1

    def of(function: Function, columns: int) -> Function:
        return lambda *t: function(*t[:inputs], (columns,), *t[inputs:], 1e-5)

    for columns in (7, 24, 64, 513, 1000, 1024, 2048, 3001, 9000):
        for of_columns in (dtype, torch.float64) if columns == 1000 else (dtype,):
            tensors = [normal((37, columns), of_columns, i) for i in range(inputs)]
            tensors += [
                1 + 0.1 * normal((columns,), of_columns, 5 + i) for i in range(2 if "layer" in op else 1)
            ]
            check(of(getattr(M, op), columns), of(STOCK[op], columns), *tensors)


@dtypes
def test_channel_norms(dtype: torch.dtype) -> None:
    for channels, side in ((8, 1), (16, 7), (64, 8), (8, 16), (16, 56), (100, 4), (1028, 4), (4, 96)):
        weight, bias = 1 + 0.1 * normal((channels,), dtype, 1), normal((channels,), dtype, 2)
        for form in (torch.contiguous_format, torch.channels_last):
            x = normal((5, channels, side, side), dtype).contiguous(memory_format=form)
            check(
                lambda x, w, b: M.batch_norm_act(x, None, None, w, b, True, 0.1, 1e-5, act="silu"),
                lambda x, w, b: F.silu(F.batch_norm(x, None, None, w, b, True, 0.1, 1e-5)),
                x,
                weight,
                bias,
            )
            check(
                lambda x, w, b: M.group_norm(x, 4, w, b),
                lambda x, w, b: F.group_norm(x, 4, w, b),
                x,
                weight,
                bias,
            )


@dtypes
def test_pooling(dtype: torch.dtype) -> None:
    for kernel, stride, padding in ((2, 2, 0), (3, 2, 1), (3, 1, 1), (5, 3, 2)):
        for side in (16, 17):
            for form in (torch.contiguous_format, torch.channels_last):
                x = normal((2, 16, side, side), dtype).contiguous(memory_format=form)
                check(
                    lambda x, k=kernel, s=stride, p=padding: M.max_pool2d(x, k, s, p),
                    lambda x, k=kernel, s=stride, p=padding: F.max_pool2d(x, k, s, p),
                    x,
                )


@dtypes
def test_gates_and_rotary(dtype: torch.dtype) -> None:
    for n in (1000, 1024):
        gate, up = normal((5, n), dtype), normal((5, n), dtype, 1)
        check(M.swiglu, lambda g, u: F.silu(g) * u, gate, up)
    q = normal((2, 9, 4, 32), dtype)
    angles = torch.arange(9, device="cuda")[:, None] / 100 ** (torch.arange(16, device="cuda") / 16)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def turned(q: Tensor) -> Tensor:
        a, b = q.chunk(2, -1)
        c, s = cos.to(q.dtype)[:, None], sin.to(q.dtype)[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    check(lambda q: M.apply_rotary(q, None, cos.repeat(1, 2), sin.repeat(1, 2), layout="bshd"), turned, q)


@dtypes
def test_losses(dtype: torch.dtype) -> None:
    for rows, classes in ((33, 1000), (9, 5003), (2, 70_000)):
        target = torch.arange(rows, device="cuda") * 7 % classes
        for options in ({}, {"label_smoothing": 0.1}):
            check(
                lambda x, t=target, o=options: M.cross_entropy(x, t, reduction="sum", **o).float(),
                lambda x, t=target, o=options: F.cross_entropy(x, t, reduction="sum", **o).float(),
                normal((rows, classes), dtype),
            )
    target = torch.arange(40, device="cuda")
    check(
        lambda x, w: M.linear_cross_entropy(x, w, target).float(),
        lambda x, w: F.cross_entropy(x @ w.T, target).float(),
        normal((40, 64), dtype),
        normal((300, 64), dtype, 1) / 8,
    )


@dtypes
@pytest.mark.parametrize("state", [None, "8bit"])
def test_optimizers(state: str | None, dtype: torch.dtype) -> None:
    params = [torch.nn.Parameter(normal(shape, dtype)) for shape in ((100, 70), (5000,), (3,), (0, 4))]
    before = [p.detach().clone() for p in params]
    for make in (optim.AdamW, optim.SGD):
        optimizer = make(params, lr=0.1, state_dtype=state)
        for step in range(3):
            for i, p in enumerate(params):
                p.grad = normal(tuple(p.shape), dtype, 10 * step + i)
            optimizer.step()
    assert all(p.isfinite().all() for p in params)
    assert all((p != b).any() for p, b in zip(params, before, strict=True) if p.numel())
