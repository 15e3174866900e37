"""Norms that divide by a deviation plus eps, or by a 2-norm: as exact as what people write, in any layout and transform."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from norm_cases import DTYPES, KINDS, assert_as_good_as_stock, inputs, normal, saves
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as nnf

import memkit
import memkit.functional as M
from memkit._reference_norm import run
from memkit.memory import measure

EPS = {"deviation": 1e-3, "sample_deviation": 1e-6, "norm": 1e-4}
CASES = [each for each in product(("layer_norm", "rms_norm"), EPS) if each != ("layer_norm", "norm")]
cases = pytest.mark.parametrize(("op", "denominator"), CASES)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
devices = pytest.mark.parametrize("device", DEVICES)
dims = pytest.mark.parametrize("dim", [-1, 1], ids=["rows", "apart"])
SHAPES = [(2, 64, 16, 16), (3, 8, 9), (1, 300, 7, 40), (5, 24, 1, 8)]


def stock(op: str, denominator: str, dim: int) -> Callable[..., Tensor]:
    """In PyTorch's operators, as libraries write it; of half dtypes in float32, where their squares have room."""

    def norm(x: Tensor, *parameters: Tensor) -> Tensor:
        dtype = x.dtype
        wide = dtype if dtype == torch.float64 else torch.float32
        x, parameters = x.movedim(dim, -1).to(wide), tuple(p.to(wide) for p in parameters)
        distance = x - x.mean(-1, keepdim=True) if op == "layer_norm" else x
        n = x.shape[-1]
        if denominator == "norm":
            below = distance.norm(dim=-1, keepdim=True).clamp_min(EPS[denominator])
        elif op == "layer_norm":
            below = x.std(-1, unbiased=denominator == "sample_deviation", keepdim=True) + EPS[denominator]
        else:
            share = n - 1 if denominator == "sample_deviation" else n
            below = distance.norm(dim=-1, keepdim=True) * share**-0.5 + EPS[denominator]
        y = distance / below
        for parameter, place in zip(parameters, (torch.mul, torch.add), strict=False):
            y = place(y, parameter)
        return y.movedim(-1, dim).to(dtype)

    return norm


def ours(op: str, denominator: str, dim: int, **keep: Any) -> Callable[..., Tensor]:
    function, how = getattr(M, op), {"eps": EPS[denominator], "dim": dim, "denominator": denominator, **keep}
    return lambda x, *p: function(x, (x.shape[dim],), *p, **how)


def parameters(op: str, n: int, dtype: torch.dtype) -> list[Tensor]:
    weight = normal((n,), dtype, 1).abs() + 0.5
    return [weight, weight * normal((n,), dtype, 2).clamp(-0.9, 0.9)][: 2 if op == "layer_norm" else 1]


@devices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@saves
@dims
@cases
def test_as_exact_as_stock(
    op: str, denominator: str, dim: int, save: str, dtype: torch.dtype, kind: str, device: str
) -> None:
    for shape in SHAPES:
        given = [inputs(kind, shape, dtype), *parameters(op, shape[dim], dtype)]
        tensors = [t.to(device) for t in given]
        grads = [normal(shape, dtype, 3).to(device)]
        mine = run(ours(op, denominator, dim, save=save), tensors, grads)
        theirs = run(stock(op, denominator, dim), tensors, grads)
        if dtype == torch.float64:
            tolerance = 1e-6 if kind == "large mean" else 1e-9
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
            continue
        want = run(stock(op, denominator, dim), tensors, grads, torch.float64)
        names = "y input weight bias"[: 14 if op == "rms_norm" else None]
        assert_as_good_as_stock(names, mine, theirs, want, units=1)


@dims
@cases
def test_rows_without_deviation(op: str, denominator: str, dim: int) -> None:
    x = torch.zeros(2, 6, 3, 4, dtype=torch.float64)
    x[0] = normal((6, 3, 4), torch.float64, 0)
    x[1, :, 1] = 1e-9 * normal((6, 4), torch.float64, 1)  # far below eps
    tensors = [x, *parameters(op, x.shape[dim], torch.float64)]
    grads = [normal(tuple(x.shape), torch.float64, 2)]
    mine, theirs = (run(f(op, denominator, dim), tensors, grads) for f in (ours, stock))
    for a, b in zip(mine, theirs, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("denominator", ["deviation", "sample_deviation"])
def test_wide_biases_are_not_taken_off_the_output(denominator: str) -> None:
    """Of rows without deviation their rounding would be left, and be multiplied by eps over nothing."""
    x = torch.full((3, 16), 0.5).bfloat16().requires_grad_()
    weight, bias = parameters("layer_norm", 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = ours("layer_norm", denominator, -1)(x, weight, bias)
    assert M.norm_saves(y) == "input"
    g = normal((3, 16), torch.bfloat16, 3)
    (got,) = torch.autograd.grad(y, x, g)
    want = weight * g.float() / EPS[denominator]
    torch.testing.assert_close(
        got.float(), want - want.mean(-1, keepdim=True), rtol=1e-2, atol=1e-2 / EPS[denominator]
    )
    message = r"layer_norm: expected, .*, a bias of the output's dtype BFloat16 beside a denominator"
    for how in ({"save": "output"}, {"inplace": True}):
        with pytest.raises(ValueError, match=message):
            ours("layer_norm", denominator, -1, **how)(x * 1, weight, bias)
    narrow = weight.bfloat16(), (bias * 0.5).bfloat16()
    assert M.norm_saves(ours("layer_norm", denominator, -1)(x, *narrow)) == "output"


@saves
@dims
@cases
def test_gradcheck(op: str, denominator: str, dim: int, save: str) -> None:
    x = normal((2, 9, 2, 8), torch.float64, 0)
    leaves = [t.requires_grad_() for t in (x, *parameters(op, x.shape[dim], torch.float64))]
    function = ours(op, denominator, dim, save=save)
    torch.autograd.gradcheck(function, leaves)
    torch.autograd.gradgradcheck(function, leaves)


@dims
@cases
def test_transforms_and_compile(op: str, denominator: str, dim: int) -> None:
    x = normal((5, 2, 8, 3, 8), torch.float64, 0)
    given = parameters(op, 8, torch.float64)
    mine, theirs = (f(op, denominator, dim) for f in (ours, stock))
    square = lambda f: lambda x: f(x, *given).square().sin().sum()  # noqa: E731
    torch.testing.assert_close(vmap(grad(square(mine)))(x), vmap(grad(square(theirs)))(x))
    torch._dynamo.reset()
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (2, 5):
        leaves = [t.clone().requires_grad_() for t in (x[0].repeat(size, 1, 1, 1), *given)]
        compiled(*leaves).square().sum().backward()
        again = [t.detach().clone().requires_grad_() for t in leaves]
        theirs(*again).square().sum().backward()
        torch.testing.assert_close([t.grad for t in leaves], [t.grad for t in again])


def test_lean_makes_it_again() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(32, 64, requires_grad=True)

    def run() -> Tensor:
        normed = M.rms_norm(x, (64,), None, 1e-6, denominator="deviation", save="input")
        return nnf.linear(normed, weight).sum()

    def run_lean() -> Tensor:
        with memkit.lean():
            return run()

    assert measure(run_lean).saved == measure(run).saved - x.nbytes
    ours, theirs = (torch.autograd.grad(each(), [x, weight]) for each in (run_lean, run))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dim", [0, 1, 2, -1], ids=["0 apart", "1 apart", "2", "-1"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_normalize(dtype: torch.dtype, dim: int) -> None:
    x = normal((6, 12, 10), dtype, 0)
    grads = [normal((6, 12, 10), dtype, 1)]
    mine = run(lambda x: M.normalize(x, dim=dim), [x], grads)
    theirs = run(lambda x: nnf.normalize(x, dim=dim), [x], grads)
    want = run(lambda x: nnf.normalize(x, dim=dim), [x], grads, torch.float64)
    if dtype == torch.float64:
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        return
    assert_as_good_as_stock("y input", mine, theirs, want, units=1)


def test_normalize_keeps_one_tensor() -> None:
    x = torch.randn(64, 128, requires_grad=True)
    rows = x.shape[0] * x.element_size()
    assert measure(lambda: M.normalize(x * 1, dim=1)).saved == x.nbytes + rows
    assert measure(lambda: nnf.normalize(x * 1, dim=1)).saved > x.nbytes + rows


def test_normalize_in_place() -> None:
    x = torch.randn(6, 12)
    want = nnf.normalize(x)
    assert M.normalize(x, inplace=True) is x
    torch.testing.assert_close(x, want)


def test_refused() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"layer_norm: expected denominator 'root', .*, got 'std'"):
        M.layer_norm(x, (3,), denominator="std")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^norm: expected denominator 'root', .*, got 'std'"):
        torch.ops.memkit._row_norm(x, 1, 0, None, None, 1e-5, True, x.dtype, "auto", "std")
    with pytest.raises(
        ValueError, match=r"layer_norm: expected denominator 'root', 'deviation' or .* got 'norm'"
    ):
        M.layer_norm(x, (3,), denominator="norm")
    with pytest.raises(
        ValueError, match="normalize: expected an eps of at least 0 beside denominator 'norm', got -1"
    ):
        M.normalize(x, eps=-1.0)
    with pytest.raises(ValueError, match=r"normalize: expected p=2, got 1; use torch\.nn\.functional"):
        M.normalize(x, p=1)
    with pytest.raises(ValueError, match=r"normalize: expected dim in \[-2, 1\], got 2 for \[2, 3\]"):
        M.normalize(x, dim=2)
    for dim in ("1", 1.0, (0, 1), None):
        name = type(dim).__name__
        with pytest.raises(TypeError, match=f"normalize: expected dim to be an int, got {name}"):
            M.normalize(x, dim=dim)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="normalize: expected eps to be a number, got NoneType"):
        M.normalize(x, eps=None)  # type: ignore[arg-type]
