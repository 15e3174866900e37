"""What the tests of the consumers share: each as memkit's node and as memkit's operator followed by PyTorch's layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_cases import generator
from torch import Tensor

import memkit.functional as M
from memkit._reference_norm import batch_norm_act

Function = Callable[..., Tensor]
SEED = 5
ROWS, IN, OUT = 12, 24, 10


@dataclass(frozen=True)
class Case:
    """``ours`` and ``parts`` of the same tensors, whose shapes are ``shapes``; ``stock`` in PyTorch alone, where it can."""

    shapes: tuple[tuple[int, ...], ...]
    ours: Function
    parts: Function
    stock: Function | None = None


def seeded(function: Function) -> Function:
    """Draws the same dropout each time."""

    def call(*tensors: Tensor) -> Tensor:
        torch.manual_seed(SEED)
        return function(*tensors)

    return call


def linear(before: Function, inputs: int) -> Function:
    """F.linear of what ``before`` makes of the tensors that are not its weight and bias."""
    return lambda *t: F.linear(before(*t[:inputs], *t[inputs + 2 :]), t[inputs], t[inputs + 1])


def _act(act: str, shape: tuple[int, ...] = (3, ROWS, IN), **params: float) -> Case:
    function = getattr(M, act)
    stock = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu, "leaky_relu": F.leaky_relu}.get(act)
    return Case(
        (shape, (OUT, IN), (OUT,)),
        lambda x, w, b: M.act_linear(x, w, b, act, **params),
        linear(lambda x: function(x, save="input", **params), 1),
        stock and linear(lambda x: stock(x, **params), 1),
    )


def _glu(act: str, packing: str) -> Case:
    if packing == "split":
        stock = linear(lambda g, u: {"silu": F.silu, "relu": F.relu}[act](g) * u, 2)
        shapes = ((2, ROWS, IN), (2, ROWS, IN), (OUT, IN), (OUT,))
        return Case(
            shapes,
            lambda g, u, w, b: M.glu_linear(g, u, w, b, act),
            linear(lambda g, u: M.gated(g, u, act), 2),
            stock,
        )
    return Case(
        ((ROWS, 2 * IN), (OUT, IN), (OUT,)),
        lambda x, w, b: M.glu_linear(x, None, w, b, act, packing=packing),
        linear(lambda x: M.gated(x, None, act, packing=packing), 1),
    )


def _norm(norm: str) -> Case:
    shape = (3, ROWS, IN)
    if norm == "layer_norm":
        return Case(
            (shape, (OUT, IN), (OUT,), (IN,), (IN,)),
            lambda x, w, b, nw, nb: M.norm_linear(x, w, b, norm_weight=nw, norm_bias=nb),
            linear(lambda x, nw, nb: M.layer_norm(x, (IN,), nw, nb, save="input"), 1),
            linear(lambda x, nw, nb: F.layer_norm(x, (IN,), nw, nb), 1),
        )
    return Case(
        (shape, (OUT, IN), (OUT,), (IN,)),
        lambda x, w, b, nw: M.norm_linear(x, w, b, norm="rms_norm", norm_weight=nw, eps=1e-6),
        linear(lambda x, nw: M.rms_norm(x, (IN,), nw, 1e-6, save="input"), 1),
        linear(lambda x, nw: F.rms_norm(x, (IN,), nw, 1e-6), 1),
    )


def _dropout(act: str | None) -> Case:
    before = (
        (lambda x: M.dropout(x, 0.4)) if act is None else lambda x: M.act_dropout(x, act, 0.4, save="input")
    )
    return Case(
        ((3, ROWS, IN), (OUT, IN), (OUT,)),
        seeded(lambda x, w, b: M.dropout_linear(x, w, b, 0.4, act=act)),
        seeded(linear(before, 1)),
    )


def conv(function: Callable[..., Tensor], training: bool, act: str | None) -> Function:
    """batch_norm_act, memkit's or stock's, before PyTorch's convolution; statistics of all zeros and ones are given."""

    def call(x: Tensor, w: Tensor, b: Tensor, nw: Tensor, nb: Tensor) -> Tensor:
        mean, variance = torch.zeros_like(nw).detach(), torch.ones_like(nw).detach()
        return F.conv2d(function(x, mean, variance, nw, nb, training, act=act), w, b, 2, (1, 2), 1, 2)

    return call


def norm_act_conv2d(training: bool, act: str | None) -> Function:
    def call(x: Tensor, w: Tensor, b: Tensor, nw: Tensor, nb: Tensor) -> Tensor:
        given: dict[str, Any] = {
            "running_mean": torch.zeros_like(nw).detach(),
            "running_var": torch.ones_like(nw).detach(),
        }
        return M.norm_act_conv2d(
            x, w, b, 2, (1, 2), 1, 2, norm_weight=nw, norm_bias=nb, training=training, act=act, **given
        )

    return call


def _conv(training: bool, act: str | None) -> Case:
    return Case(
        ((3, 8, 7, 6), (6, 4, 3, 3), (6,), (8,), (8,)),
        norm_act_conv2d(training, act),
        conv(M.batch_norm_act, training, act),
        conv(batch_norm_act, training, act),
    )


def _bare_conv() -> Case:
    def stock(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w, b, 2, (1, 2), 1, 2)

    return Case(
        ((3, 8, 7, 6), (6, 4, 3, 3), (6,)), lambda x, w, b: M.conv2d(x, w, b, 2, (1, 2), 1, 2), stock, stock
    )


def _bare_linear() -> Case:
    return Case(((2, ROWS, IN), (OUT, IN), (OUT,)), M.linear, F.linear, F.linear)


def _act_conv() -> Case:
    how: Any = (2, (1, 2), 1, 2)
    return Case(
        ((3, 8, 7, 6), (6, 4, 3, 3), (6,)),
        lambda x, w, b: M.act_conv2d(x, w, b, *how, act="gelu"),
        lambda x, w, b: F.conv2d(M.gelu(x, save="input"), w, b, *how),
        lambda x, w, b: F.conv2d(F.gelu(x), w, b, *how),
    )


def _biased() -> Case:
    return Case(
        ((ROWS, IN), (OUT, IN), (OUT,), (IN,)),
        lambda x, w, b, a: M.act_linear(x, w, b, "gelu", act_bias=a),
        linear(lambda x, a: M.bias_act(x, a, "gelu", save="input"), 1),
        linear(lambda x, a: F.gelu(x + a), 1),
    )


CASES: dict[str, Case] = {
    "gelu": _act("gelu"),
    "silu": _act("silu"),
    "relu": _act("relu", (ROWS, IN)),
    "relu_squared": _act("relu_squared"),
    "leaky_relu": _act("leaky_relu", negative_slope=0.3),
    "biased gelu": _biased(),
    "dropout": _dropout(None),
    "gelu dropout": _dropout("gelu"),
    "swiglu": _glu("silu", "split"),
    "reglu": _glu("relu", "split"),
    "packed": _glu("gelu", "gate_up"),
    "interleaved": _glu("silu", "interleaved"),
    "layer_norm": _norm("layer_norm"),
    "rms_norm": _norm("rms_norm"),
    "gelu conv": _act_conv(),
    "batch_norm": _conv(True, "silu"),
    "batch_norm relu": _conv(True, "relu"),
    "batch_norm eval": _conv(False, "relu"),
    "batch_norm alone": _conv(True, None),
    "conv2d": _bare_conv(),
    "linear": _bare_linear(),
}


# One of each kind, where a test takes long.
KINDS = (
    "gelu",
    "biased gelu",
    "dropout",
    "gelu dropout",
    "swiglu",
    "interleaved",
    "layer_norm",
    "rms_norm",
    "gelu conv",
    "batch_norm",
    "batch_norm eval",
    "conv2d",
    "linear",
)

cases = pytest.mark.parametrize("name", CASES)
kinds = pytest.mark.parametrize("name", KINDS)


def tensors(
    case: Case, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> list[Tensor]:
    """Leaves; the same values in every dtype, up to its rounding."""
    g = generator(seed)
    made = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in case.shapes]
    return [t.to(device, dtype).requires_grad_() for t in made]


def with_gradients(function: Function, leaves: list[Tensor], grad: Tensor | None = None) -> list[Tensor]:
    """The result and the gradients of all leaves for one incoming gradient."""
    out = function(*leaves)
    if grad is None:
        grad = torch.randn(out.shape, generator=generator(9), dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
