"""What the loss tests share: variants of the loss, inputs, comparisons with the truth in float64 and with stock."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memkit._reference_loss import reference, stock

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Arguments by name; "weight" and "soft" stand for tensors that `case` makes.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight": {"weight": True},
    "smooth": {"label_smoothing": 0.1},
    "weight smooth": {"weight": True, "label_smoothing": 0.2},
    "soft": {"soft": True},
    "soft weight smooth": {"soft": True, "weight": True, "label_smoothing": 0.1},
    "z": {"z_loss": 0.01},
    "softcap": {"softcap": 2.5},
    "all": {"weight": True, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0},
    "soft all": {"soft": True, "weight": True, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0},
}
KINDS = ("normal", "far", "sharp", "masked")


def logits(kind: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """float64 values that bfloat16 holds exactly: N(0, 1); the same far from 0; heavy tails; some at -infinity."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "far":
        x = x * 4 + 300
    elif kind == "sharp":
        x = x**3 * 10
    elif kind == "masked":
        x = x.masked_fill(torch.rand(shape, generator=generator) < 0.2, -torch.inf)
    return x.bfloat16().double()


def target_of(
    shape: tuple[int, ...], soft: bool = False, ignored: float = 0.2, dtype: torch.dtype = torch.float64
) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    classes = shape[1] if len(shape) > 1 else shape[0]
    if soft:
        probabilities = torch.rand(shape, generator=generator, dtype=torch.float64)
        return (probabilities / probabilities.sum(1 if len(shape) > 1 else 0, keepdim=True)).to(dtype)
    rows = shape[:1] + shape[2:] if len(shape) > 1 else ()
    index = torch.randint(classes, rows, generator=generator)
    return index.masked_fill(torch.rand(rows, generator=generator) < ignored, -100) if rows else index


def class_weights(classes: int) -> Tensor:
    return torch.rand(classes, generator=torch.Generator().manual_seed(3)).bfloat16().double() + 0.5


def arguments(variant: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """The target and the keyword arguments of a variant."""
    kwargs = dict(VARIANTS[variant])
    target = target_of(shape, kwargs.pop("soft", False))
    if target.is_floating_point():
        target = target.to(dtype)
    if kwargs.pop("weight", False):
        kwargs["weight"] = class_weights(shape[1] if len(shape) > 1 else shape[0]).to(dtype)
    return target, kwargs


def in_double(target: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    return (target.double() if target.is_floating_point() else target), wide


def gradients(function: Any, *inputs: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    """The value of function(*leaves), and its gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = function(*leaves)
    found = torch.autograd.grad(value, leaves, torch.ones_like(value) if grad is None else grad.to(value))
    return value.detach(), *found


def assert_as_good(mine: Tensor, theirs: Tensor, want: Tensor, name: str = "") -> None:
    """At most twice stock's error, worst and root mean square, plus half a unit in the largest value's last place."""
    assert mine.shape == theirs.shape, (mine.shape, theirs.shape)
    assert mine.dtype == theirs.dtype
    finite = want.isfinite() & theirs.isfinite()
    odd = ~want.isfinite()
    torch.testing.assert_close(mine.double()[odd], want[odd], equal_nan=True)
    assert mine[finite].isfinite().all(), name
    if not finite.any():
        return
    if mine.dtype == torch.float64:  # the truth is as good as stock
        atol = 1e-14 * want[finite].abs().max().item()
        torch.testing.assert_close(mine[finite], want[finite], rtol=1e-12, atol=atol)
        return
    wrong = (mine.double() - want)[finite].abs()
    stock_wrong = (theirs.double() - want)[finite].abs()
    slack = torch.finfo(mine.dtype).eps / 2 * want[finite].abs().max()
    for kind, a, b in (
        ("worst", wrong.max(), stock_wrong.max()),
        ("rms", wrong.square().mean().sqrt(), stock_wrong.square().mean().sqrt()),
    ):
        assert a <= 2 * b + slack, f"{name}: {kind} error {a:.2e}, stock's {b:.2e}, slack {slack:.2e}"


__all__ = [
    "DTYPES", "KINDS", "VARIANTS", "F", "arguments", "assert_as_good", "class_weights", "gradients", "in_double",
    "logits", "reference", "stock", "target_of",
]  # fmt: skip
