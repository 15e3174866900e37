"""The table that the activation tests share: every function with its parameters, ways to call it, inputs, exact values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import torch
from torch import Tensor

import memkit.functional as M
from memkit import _reference
from memkit._reference import ACTIVATIONS
from memkit.functional._activation import TWO_SLOPES

CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ACTIVATIONS}
CASES |= {
    "leaky_relu(0)": ("leaky_relu", {"negative_slope": 0.0}),
    "leaky_relu(0.2)": ("leaky_relu", {"negative_slope": 0.2}),
    "elu(0.5)": ("elu", {"alpha": 0.5}),
    "celu(2)": ("celu", {"alpha": 2.0}),
    "softplus(2, 3)": ("softplus", {"beta": 2.0, "threshold": 3.0}),
    "softplus(2, 20)": ("softplus", {"beta": 2.0, "threshold": 20.0}),
    "hardtanh(-2, 0.5)": ("hardtanh", {"min_val": -2.0, "max_val": 0.5}),
    "gelu(tanh)": ("gelu", {"approximate": "tanh"}),
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]
MODES = ("input", "output", "inplace")  # what is saved, out of place; in place
BIT_MODES = ("bit", "bit_inplace")

BRANCHES = [case for case, (name, _) in CASES.items() if ACTIVATIONS[name].minimum is not None]
MONOTONE = [case for case in CASES if case not in BRANCHES]
NEEDS_INPUT = ["softplus(2, 3)"]  # two slopes share an output


def modes(case: str) -> tuple[str, ...]:
    if CASES[case][0] in TWO_SLOPES:
        return MODES + BIT_MODES
    return MODES[:1] if case in NEEDS_INPUT else MODES


def keep(mode: str) -> dict[str, Any]:
    """The arguments that ask for it."""
    return {
        "inplace": {"inplace": True},
        "bit_inplace": {"inplace": True, "save": "bit"},
    }.get(mode, {"save": mode})


def all_cases(*, halves_only: bool = False) -> list[tuple[str, str, torch.dtype]]:
    dtypes = HALVES if halves_only else DTYPES
    return [(case, mode, dtype) for case in CASES for mode in modes(case) for dtype in dtypes]


def ours(case: str, mode: str = "input") -> Callable[[Tensor], Tensor]:
    """memkit's function. In place it works on a copy made by an operation that keeps nothing, as a layer would."""
    name, params = CASES[case]
    function = getattr(M, name)
    if "inplace" in mode:
        return lambda x: function(x.clone(), **params, **keep(mode))
    return lambda x: function(x, **params, **keep(mode))


def stock(case: str) -> Callable[[Tensor], Tensor]:
    name, params = CASES[case]
    return lambda x: _reference.stock(name, x, **params)


def reference(case: str) -> Callable[[Tensor], Tensor]:
    name, params = CASES[case]
    return lambda x: _reference.reference(name, x, **params)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _both_signs(magnitudes: Tensor) -> Tensor:
    return torch.cat([magnitudes, -magnitudes])


def inputs(kind: str, dtype: torch.dtype, n: int = 20_000) -> Tensor:
    """float64 values that dtype holds exactly."""
    if kind == "normal":
        x = torch.randn(n, generator=generator(), dtype=torch.float64)
    elif kind == "uniform":
        x = torch.rand(n, generator=generator(), dtype=torch.float64) * 40 - 20
    elif kind == "tails":
        x = _both_signs(torch.logspace(1, 4, n // 2, dtype=torch.float64))
    elif kind == "tiny":
        smallest = {torch.float16: -4, torch.float64: -290}.get(dtype, -36)
        x = _both_signs(torch.logspace(smallest, -2, n // 2, dtype=torch.float64))
    return x.to(dtype).double()


KINDS = ("normal", "uniform", "tails", "tiny")


def every_half(dtype: torch.dtype) -> Tensor:
    """All finite values of a 16-bit dtype."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


def _sigmoid(x: mpmath.mpf) -> mpmath.mpf:
    return 1 / (1 + mpmath.exp(-x))


def exact(case: str) -> tuple[Callable[[mpmath.mpf], mpmath.mpf], Callable[[mpmath.mpf], mpmath.mpf]]:
    """Value and slope in arbitrary precision, from the definitions and independent of torch."""
    name, params = CASES[case]
    given = {**ACTIVATIONS[name].defaults, **params}
    mp = mpmath
    if name in ("elu", "selu", "celu"):
        scale, alpha, inner = 1.0, given.get("alpha", 1.0), 1.0
        if name == "selu":
            scale, alpha = 1.0507009873554805, 1.6732632423543772
        if name == "celu":
            inner = 1 / alpha
        return (
            lambda x: scale * x if x > 0 else scale * alpha * mp.expm1(inner * x),
            lambda x: mp.mpf(scale) if x > 0 else scale * alpha * inner * mp.exp(inner * x),
        )
    if name == "softplus":
        beta, threshold = given["beta"], given["threshold"]
        return (
            lambda x: x if beta * x > threshold else mp.log1p(mp.exp(beta * x)) / beta,
            lambda x: mp.mpf(1) if beta * x > threshold else _sigmoid(beta * x),
        )
    if name in ("hardtanh", "relu6"):
        low, high = given.get("min_val", 0.0), given.get("max_val", 6.0)
        return lambda x: min(max(x, mp.mpf(low)), mp.mpf(high)), lambda x: mp.mpf(low < x < high)
    if name == "leaky_relu":
        slope = given["negative_slope"]
        return lambda x: x if x > 0 else slope * x, lambda x: mp.mpf(1 if x > 0 else slope)
    if case == "gelu(tanh)":
        k, c = mp.sqrt(2 / mp.pi), mp.mpf("0.044715")

        def tanh_slope(x: mpmath.mpf) -> mpmath.mpf:
            s = _sigmoid(2 * k * (x + c * x**3))
            return s + x * s * (1 - s) * 2 * k * (1 + 3 * c * x**2)

        return lambda x: x * _sigmoid(2 * k * (x + c * x**3)), tanh_slope

    def mish_slope(x: mpmath.mpf) -> mpmath.mpf:
        w = mp.tanh(mp.log1p(mp.exp(x)))
        return w + x * _sigmoid(x) * (1 - w * w)

    def logistic_slope(x: mpmath.mpf) -> mpmath.mpf:
        s = _sigmoid(x)
        return s * (1 + x * (1 - s))

    gain = 1.702
    return {
        "relu": (lambda x: max(x, mp.mpf(0)), lambda x: mp.mpf(x > 0)),
        "sigmoid": (_sigmoid, lambda x: _sigmoid(x) * _sigmoid(-x)),
        "tanh": (mp.tanh, lambda x: mp.sech(x) ** 2),
        "hardsigmoid": (
            lambda x: min(max(x + 3, mp.mpf(0)), mp.mpf(6)) / 6,
            lambda x: mp.mpf(-3 < x < 3) / 6,
        ),
        "relu_squared": (lambda x: max(x, mp.mpf(0)) ** 2, lambda x: 2 * max(x, mp.mpf(0))),
        "gelu": (lambda x: x * mp.ncdf(x), lambda x: mp.ncdf(x) + x * mp.npdf(x)),
        "quick_gelu": (lambda x: x * _sigmoid(gain * x), lambda x: logistic_slope(gain * x)),
        "silu": (lambda x: x * _sigmoid(x), logistic_slope),
        "mish": (lambda x: x * mp.tanh(mp.log1p(mp.exp(x))), mish_slope),
        "hardswish": (
            lambda x: x * min(max(x + 3, mp.mpf(0)), mp.mpf(6)) / 6,
            lambda x: (2 * x + 3) / 6 if -3 < x < 3 else mp.mpf(x >= 3),
        ),
    }[name]
