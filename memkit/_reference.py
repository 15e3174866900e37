"""What memkit's operators are held against, in PyTorch alone.

``stock`` is what people run today, with the arguments of :mod:`memkit.functional`; ``reference`` is the truth, in float64.
Tests compare errors with both, benchmarks compare times with the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Activation:
    """One activation in stock PyTorch.

    ``module``: the torch.nn twin of memkit's module. ``minimum``: about where the function stops falling and starts to
    rise; None for a monotone one, whose slope is a function of its output. ``defaults``: its parameters. ``exact``: the
    function where stock PyTorch is not exact in float64: gelu's tail, a float32 constant in hardsigmoid's slope.
    """

    stock: Callable[..., Tensor]
    module: type[nn.Module] | None = None
    minimum: float | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    exact: Callable[..., Tensor] | None = None


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return x * torch.erfc(x * -math.sqrt(0.5)) / 2
    return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


def _hardsigmoid(x: Tensor) -> Tensor:
    return (F.hardtanh(x, -3.0, 3.0) + 3) / 6


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(F.relu, nn.ReLU),
    "leaky_relu": Activation(F.leaky_relu, nn.LeakyReLU, defaults={"negative_slope": 0.01}),
    "elu": Activation(F.elu, nn.ELU, defaults={"alpha": 1.0}),
    "selu": Activation(F.selu, nn.SELU),
    "celu": Activation(F.celu, nn.CELU, defaults={"alpha": 1.0}),
    "sigmoid": Activation(torch.sigmoid, nn.Sigmoid),
    "tanh": Activation(torch.tanh, nn.Tanh),
    "softplus": Activation(F.softplus, nn.Softplus, defaults={"beta": 1.0, "threshold": 20.0}),
    "relu6": Activation(F.relu6, nn.ReLU6),
    "hardtanh": Activation(F.hardtanh, nn.Hardtanh, defaults={"min_val": -1.0, "max_val": 1.0}),
    "hardsigmoid": Activation(F.hardsigmoid, nn.Hardsigmoid, exact=_hardsigmoid),
    "relu_squared": Activation(_relu_squared),
    "gelu": Activation(F.gelu, nn.GELU, minimum=-0.7518, defaults={"approximate": "none"}, exact=_gelu),
    "quick_gelu": Activation(_quick_gelu, minimum=-0.7512),
    "silu": Activation(F.silu, nn.SiLU, minimum=-1.2785),
    "mish": Activation(F.mish, nn.Mish, minimum=-1.1924),
    "hardswish": Activation(F.hardswish, nn.Hardswish, minimum=-1.5),
}


def stock(name: str, x: Tensor, bias: Tensor | None = None, dim: int = -1, **params: Any) -> Tensor:
    """The activation as stock PyTorch computes it, of x plus a bias along ``dim`` where there is one."""
    return ACTIVATIONS[name].stock(x if bias is None else _biased(x, bias, dim), **params)


def reference(name: str, x: Tensor, bias: Tensor | None = None, dim: int = -1, **params: Any) -> Tensor:
    """The truth: as :func:`stock`, in float64."""
    x = x.double() if bias is None else _biased(x.double(), bias.double(), dim)
    activation = ACTIVATIONS[name]
    return (activation.exact or activation.stock)(x, **params)


def _biased(x: Tensor, bias: Tensor, dim: int) -> Tensor:
    shape = [1] * x.dim()
    shape[dim] = -1
    return x + bias.view(shape)


def value_and_gradient(
    function: Callable[..., Tensor], x: Tensor, grad: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """function(x) and the gradient of x for the incoming gradient ``grad`` (ones)."""
    leaf = x.detach().requires_grad_()
    out = function(leaf, **kwargs)
    weight = torch.ones_like(out) if grad is None else grad.to(out.dtype)
    (slope,) = torch.autograd.grad(out, leaf, weight)
    return out.detach(), slope
