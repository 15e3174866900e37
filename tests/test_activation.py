"""Value and gradient of every activation: against float64, against stock PyTorch, within what the docstrings promise."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import pytest
import torch
from activation_cases import (
    BRANCHES,
    CASES,
    HALVES,
    KINDS,
    MODES,
    MONOTONE,
    all_cases,
    every_half,
    exact,
    generator,
    inputs,
    modes,
    ours,
    reference,
    stock,
)
from torch import Tensor

import memkit.functional as M
from memkit._reference import ACTIVATIONS, value_and_gradient

# The slope from the output, for functions with a minimum: worst, and root mean square over N(0, 1). The docstring of
# memkit.functional states these.
SLOPE_BOUNDS = {
    torch.float32: (2e-4, 1e-6),
    torch.float64: (1e-8, 1e-11),
    torch.float16: (9e-3, 6e-4),
    torch.bfloat16: (2.4e-2, 2.5e-3),
}


def errors(got: Tensor, want: Tensor, relative: bool = False) -> tuple[float, float]:
    """The largest and the root mean square error; relative where the values span many magnitudes."""
    error = (got.double() - want).abs()
    if relative:
        error /= want.abs().clamp_min(torch.finfo(got.dtype).tiny)
    return error.max().item(), error.square().mean().sqrt().item()


def assert_as_good_as_stock(
    got: Tensor, stock: Tensor, want: Tensor, relative: bool = False, units: float = 0.5
) -> None:
    """At most twice stock's error, plus `units` in the last place of the largest value."""
    finite = want.abs() <= torch.finfo(got.dtype).max
    torch.testing.assert_close(got[~finite], stock[~finite], equal_nan=True, rtol=0, atol=0)
    finite &= stock.isfinite()  # intermediate values may overflow
    assert got[finite].isfinite().all()
    got, stock, want = got[finite], stock[finite], want[finite]
    slack = units * torch.finfo(got.dtype).eps * (1 if relative else want.abs().max().item())
    for name, mine, theirs in zip(
        ("worst", "rms"), errors(got, want, relative), errors(stock, want, relative), strict=True
    ):
        assert mine <= 2 * theirs + slack, f"{name} error {mine:.2e}, stock's {theirs:.2e}, slack {slack:.2e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_value(case: str, dtype: torch.dtype, kind: str) -> None:
    x = inputs(kind, dtype)
    x = x[x.abs() <= torch.finfo(dtype).max]
    want = reference(case)(x)
    theirs = stock(case)(x.to(dtype))
    mine = ours(case)(x.to(dtype))
    assert mine.dtype == dtype
    assert_as_good_as_stock(mine, theirs, want, relative=kind in ("tails", "tiny"))
    for mode in modes(case):
        assert torch.equal(ours(case, mode)(x.to(dtype)), mine)


def output_tells(case: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the output in dtype still has the slope: test_slope_lost_where_the_output_rounds has the rest."""
    info = torch.finfo(dtype)
    if CASES[case][0] == "relu_squared":
        return (x <= 0) | ((x**2 >= info.tiny) & (x**2 < 0.99 * info.max))
    if CASES[case][0] == "hardsigmoid":
        return (3 - x.abs()).abs() > 4 * info.eps
    return torch.ones_like(x, dtype=torch.bool)


GRADIENTS = [(dtype, kind) for dtype in (torch.float32, *HALVES) for kind in KINDS]
GRADIENTS += [(dtype, "every value") for dtype in HALVES]


@pytest.mark.parametrize(("dtype", "kind"), GRADIENTS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradient(case: str, dtype: torch.dtype, kind: str) -> None:
    """From the input, and from the output where that determines the slope."""
    x = every_half(dtype).double() if kind == "every value" else inputs(kind, dtype)
    x = x[x.abs() <= torch.finfo(dtype).max]
    grad = torch.randn(x.shape, generator=generator(1)).to(dtype)
    _, want = value_and_gradient(reference(case), x, grad.double())
    _, theirs = value_and_gradient(stock(case), x.to(dtype), grad)
    for mode in modes(case) if case in MONOTONE else ("input",):
        _, mine = value_and_gradient(ours(case, mode), x.to(dtype), grad)
        tells = mode == "input" or "bit" in mode
        keep = torch.ones_like(x, dtype=torch.bool) if tells else output_tells(case, x, dtype)
        assert_as_good_as_stock(mine[keep], theirs[keep], want[keep])


def exact_values(case: str, x: Tensor) -> tuple[Tensor, Tensor]:
    value, slope = exact(case)
    with mpmath.workdps(40):
        points = [mpmath.mpf(v) for v in x.tolist()]
        return (
            torch.tensor([float(value(p)) for p in points], dtype=torch.float64),
            torch.tensor([float(slope(p)) for p in points], dtype=torch.float64),
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_float64_against_exact_values(case: str, kind: str) -> None:
    x = inputs(kind, torch.float64, 300)
    value, slope = exact_values(case, x)
    their_value, their_slope = value_and_gradient(stock(case), x)
    for mode in modes(case):
        my_value, my_slope = value_and_gradient(ours(case, mode), x)
        # memkit's exponential and logarithm are right to 1 ulp, stock's to half of one.
        assert_as_good_as_stock(my_value, their_value, value, relative=kind == "tiny", units=1)
        if (
            CASES[case][0] == "softplus" and mode != "input"
        ):  # just above the threshold: slope 1, which is exp(-20) more
            torch.testing.assert_close(my_slope, slope, rtol=0, atol=2.1e-9)
        elif mode == "input" or case in MONOTONE:
            assert_as_good_as_stock(my_slope, their_slope, slope, units=1)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_itself(case: str) -> None:
    for kind in KINDS:
        x = inputs(kind, torch.float64, 100)
        for got, want in zip(value_and_gradient(reference(case), x), exact_values(case, x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)


def around_the_minimum(case: str, dtype: torch.dtype, n: int = 4000) -> Tensor:
    """N(0, 1), both tails, and points ever closer to the minimum from both sides; all that a 16-bit dtype has."""
    if dtype in HALVES:
        return every_half(dtype).double()
    minimum = ACTIVATIONS[CASES[case][0]].minimum
    assert minimum is not None
    near = torch.logspace(-8, 1, n, dtype=torch.float64)
    x = torch.cat([inputs(kind, dtype, n) for kind in KINDS] + [minimum + near, minimum - near])
    return x.to(dtype).double()


@pytest.mark.parametrize("dtype", SLOPE_BOUNDS, ids=str)
@pytest.mark.parametrize("mode", ["output", "inplace"])
@pytest.mark.parametrize("case", BRANCHES)
def test_slope_from_the_output_of_a_function_with_a_minimum(case: str, mode: str, dtype: torch.dtype) -> None:
    worst, rms = SLOPE_BOUNDS[dtype]
    x = around_the_minimum(case, dtype)
    _, want = value_and_gradient(reference(case), x)
    _, got = value_and_gradient(ours(case, mode), x.to(dtype))
    assert errors(got, want)[0] <= worst
    x = inputs("normal", dtype, 200_000)
    _, want = value_and_gradient(reference(case), x)
    _, got = value_and_gradient(ours(case, mode), x.to(dtype))
    assert errors(got, want)[1] <= rms


@pytest.mark.slow
@pytest.mark.parametrize("case", BRANCHES)
def test_slope_from_the_output_over_all_of_float32(case: str) -> None:
    """Every 97th float32 between -50 and 50: 22 million."""
    worst, _ = SLOPE_BOUNDS[torch.float32]
    top = int(torch.tensor(50.0).view(torch.int32))
    for sign in (0, -(2**31)):
        for first in range(0, top, 97 << 22):
            bits = torch.arange(first, min(first + (97 << 22), top), 97) + sign
            x = bits.to(torch.int32).view(torch.float32)
            _, want = value_and_gradient(reference(case), x.double())
            _, got = value_and_gradient(ours(case, "output"), x)
            assert errors(got, want)[0] <= worst


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_slope_lost_where_the_output_rounds(dtype: torch.dtype) -> None:
    """relu_squared and hardsigmoid, as the docstring of memkit.functional says."""
    info = torch.finfo(dtype)
    x = every_half(dtype)
    value, slope = value_and_gradient(M.relu_squared, x, save="output")
    _, want = value_and_gradient(reference("relu_squared"), x.double())
    subnormal = (x > 0) & (x.double() ** 2 < info.tiny)
    assert errors(slope[subnormal], want[subnormal])[0] <= math.sqrt(3 * info.tiny * info.eps)
    assert {torch.float16: 5e-4, torch.bfloat16: 1e-19}[dtype] >= math.sqrt(3 * info.tiny * info.eps)
    assert (slope[value.isinf()] == math.inf).all()

    _, slope = value_and_gradient(M.hardsigmoid, x, save="output")
    _, want = value_and_gradient(reference("hardsigmoid"), x.double())
    assert torch.equal(slope, want.to(dtype))


def test_slope_of_hardsigmoid_next_to_its_kinks() -> None:
    for kink in (-3.0, 3.0):
        bits = torch.tensor(kink).view(torch.int32)
        x = torch.arange(int(bits) - 50, int(bits) + 50).to(torch.int32).view(torch.float32)
        _, slope = value_and_gradient(M.hardsigmoid, x, save="output")
        _, want = value_and_gradient(M.hardsigmoid, x, save="input")
        far = (x - kink).abs() > 4 * torch.finfo(torch.float32).eps
        assert torch.equal(slope[far], want[far])


def test_gradients_that_are_not_finite() -> None:
    """Nothing comes through where a function is flat; elsewhere what comes is passed on."""
    x = torch.tensor([-700.0, -5.0, -3.0, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 7.0]).repeat(5)
    for name in ("relu", "relu6", "hardtanh", "hardsigmoid", "hardswish", "relu_squared", "leaky_relu(0)"):
        for bad in (math.inf, -math.inf, math.nan):
            _, want = value_and_gradient(stock(name), x, torch.full_like(x, bad))
            for mode in MODES:
                _, got = value_and_gradient(ours(name, mode), x, torch.full_like(x, bad))
                torch.testing.assert_close(got, want, equal_nan=True)


# -- special values ------------------------------------------------------------------------------------------------------


def one_by_one(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Through stock's scalar code: its vectorised code gives other results for NaN and infinity."""
    pairs = [value_and_gradient(function, v) for v in x]
    return torch.stack([value for value, _ in pairs]), torch.stack([slope for _, slope in pairs])


@pytest.mark.parametrize(("case", "mode", "dtype"), all_cases(), ids=str)
def test_nan_and_infinity(case: str, mode: str, dtype: torch.dtype) -> None:
    """What stock gives. The slope may be the limit where stock's is NaN, and anything where the value is NaN."""
    x = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    want_value, want_slope = one_by_one(stock(case), x)
    limit = torch.tensor([math.nan, 1, 0], dtype=dtype)
    for repeats in (1, 37):  # in the vectorised part of the loop and in its rest
        value, slope = value_and_gradient(ours(case, mode), x.repeat(repeats))
        for v, s in zip(value.split(3), slope.split(3), strict=True):
            torch.testing.assert_close(v, want_value, rtol=0, atol=0, equal_nan=True)
            free = v.isnan() | (want_slope.isnan() & ((s - limit).abs() <= 1e-6))
            rounding = 0 if mode == "input" else torch.finfo(dtype).eps  # of selu's lower bound
            torch.testing.assert_close(s[~free], want_slope[~free], rtol=0, atol=rounding, equal_nan=True)


ORDINARY = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 6.0, 10.0, 20.0, 88.8, 104.0, 710.0, 746.0, 1e4]


@pytest.mark.parametrize(("case", "mode", "dtype"), all_cases(), ids=str)
def test_zeros_kinks_subnormals_and_huge_values(case: str, mode: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    extreme = [info.max, info.max / 2, info.tiny, info.tiny * info.eps, info.tiny / 2, info.eps]
    x = torch.tensor([s * v for v in ORDINARY + extreme for s in (1, -1)], dtype=torch.float64).to(dtype)
    x = x[x.isfinite()].repeat(3)
    value, slope = value_and_gradient(ours(case, mode), x)
    want_value, want_slope = one_by_one(stock(case), x)
    ulps = max(4 * info.eps, 1e-8)  # stock's 1/6 in hardsigmoid is a float32
    if case == "hardswish":  # x * 6 / 6 overflows in stock
        want_value = torch.where(want_value.isinf(), x, want_value)
    torch.testing.assert_close(value, want_value, rtol=ulps, atol=ulps)
    free = want_slope.isnan()  # gelu(tanh) of a huge value
    assert slope[free].isfinite().all()
    if mode != "input":
        free |= value.isinf()  # relu_squared overflowed, and its root with it
    if mode != "input" and case in BRANCHES:
        ulps = SLOPE_BOUNDS[dtype][0]
    torch.testing.assert_close(slope[~free], want_slope[~free], rtol=ulps, atol=ulps)
