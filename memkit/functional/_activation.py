"""Activations in place or not, with the least memory kept for backward that an exact gradient allows.

Every function takes the arguments of its ``torch.nn.functional`` twin, in their order, and by keyword one or two more:

``inplace``
    ``False``: a new tensor. ``True``: the input's memory is overwritten; raises where that would corrupt a value or a
    gradient. ``"auto"``: overwritten where autograd and reference counts prove that nothing else needs it, else a new
    tensor; a new one that keeps the output, as if overwritten, where the input is a view that autograd records (its copy
    into the base would take more). No check can see a later read by your own code (``act_(h) + h``);
    :func:`memkit.swap` with ``sample=`` does.
``save``
    What backward computes the slope from: ``"input"``, or ``"output"`` (free where the next layer keeps its input, as
    Linear and Conv do; one bit an element more where the function has a minimum). ``"auto"``: ``"output"`` in place and
    for monotone functions, else ``"input"``. ``"bit"``, for relu, leaky_relu, relu6, hardtanh and hardsigmoid, whose
    slope has two values: one bit an element and no tensor, the least where nothing else keeps the output (``torch.cat``,
    a sum, :func:`max_pool2d`). Exact for all parameters, and the output may be changed afterwards.

Shapes: any; the result has the input's shape and dtype. Dtypes: float32, float64, float16, bfloat16, computed in float32
(float64 in float64). Devices: CPU, CUDA. ``TypeError``: another dtype. ``ValueError``: an unknown ``save``,
``approximate`` or ``act``, a parameter out of range. ``RuntimeError``: a device or layout memkit has no kernel for; in
place refused; backward through an output changed afterwards.

The slope from the output is exact to rounding for monotone functions. For gelu, silu, quick_gelu, mish and hardswish
rounding of the output near the minimum costs, at worst and in the slope: 2e-4 in float32 (1e-6 root mean square over
N(0, 1)), 1e-8 in float64, 9e-3 in float16 and 2.4e-2 in bfloat16 (2.5e-3 root mean square). An output that rounds to a
bound has the slope of the bound: hardsigmoid within rounding of +-3, hardswish where it rounds to 3 (1 instead of
up to 1.5), relu_squared where the square is subnormal (inputs below 7.8e-3 in float16: at most 5e-4 of slope) or
overflows.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from .. import _C
from .._modes import has_torch_modes, in_forward_mode, in_transform, is_tracing
from .._sharding import call
from ._shared import describe

__all__ = [
    "bias_act",
    "celu",
    "elu",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "mish",
    "quick_gelu",
    "relu",
    "relu6",
    "relu_squared",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "tanh",
]

Inplace = bool | Literal["auto"]
Save = Literal["auto", "input", "output", "bit"]

TWO_SLOPES = frozenset({"relu", "leaky_relu", "relu6", "hardtanh", "hardsigmoid"})
"""Where `save` may be "bit"."""


def check_inplace(op: str, inplace: object, save: str = "auto") -> None:
    """What the eager entries check by themselves."""
    if not (inplace is True or inplace is False or inplace == "auto"):  # 1 is no True elsewhere
        raise ValueError(f"{op}: expected inplace True, False or 'auto', got {inplace!r}")
    if inplace is True and save == "input":
        raise ValueError(
            f"{op}: expected save 'auto' or 'output' in place, got 'input', which is overwritten"
        )


def save_of(save: str, inplace: Inplace) -> str:
    """Of what is in place, where operators are functional."""
    return "output" if inplace is True and save == "auto" else save


def _apply(
    op: str,
    input: Tensor,
    params: tuple[float, ...],
    inplace: Inplace,
    save: str,
    bias: Tensor | None = None,
    dim: int = -1,
) -> Tensor:
    if not is_dynamo_compiling():
        out = _C.activation(op, input, bias, dim, params, inplace, save)
        if out is not None:
            return out
    return _dispatched(op, input, params, inplace, save, bias, dim)


_LINEAR, _FORWARD = nn.functional.linear, nn.Linear.forward
"""Which somebody may have replaced, to look on."""


def overwrites(own: Tensor) -> bool:
    """Whether an activation may work in the memory of a tensor that nobody but its caller has: nothing is recorded of it,
    and nobody looks on."""
    return (
        type(own) is Tensor
        and not (own.requires_grad and torch.is_grad_enabled())
        and not is_compiling()
        and not is_tracing()
        and not has_torch_modes()
        and nn.functional.linear is _LINEAR
        and nn.Linear.forward is _FORWARD
        and not in_transform()
        and not in_forward_mode()
    )


def _dispatched(
    op: str,
    input: Tensor,
    params: tuple[float, ...],
    inplace: Inplace,
    save: str,
    bias: Tensor | None,
    dim: int,
) -> Tensor:
    """Through torch.ops: what a compiler traces, and what DTensors take. Functional, with a copy in place."""
    check_inplace(op, inplace, save)
    out: Tensor = call("_activation", input, bias, dim, op, params, save_of(save, inplace))
    return input.copy_(out) if inplace is True else out


def relu(input: Tensor, inplace: Inplace = False, *, save: Save = "auto") -> Tensor:
    """max(0, x) (Nair and Hinton 2010)."""
    return _apply("relu", input, (), inplace, save)


def leaky_relu(
    input: Tensor, negative_slope: float = 0.01, inplace: Inplace = False, *, save: Save = "auto"
) -> Tensor:
    """x for x > 0, else negative_slope * x (Maas et al. 2013). From the output where negative_slope >= 0."""
    return _apply("leaky_relu", input, (negative_slope,), inplace, save)


def elu(input: Tensor, alpha: float = 1.0, inplace: Inplace = False, *, save: Save = "auto") -> Tensor:
    """x for x > 0, else alpha * (exp(x) - 1) (Clevert et al. 2015). From the output where alpha >= 0."""
    return _apply("elu", input, (alpha,), inplace, save)


def selu(input: Tensor, inplace: Inplace = False, *, save: Save = "auto") -> Tensor:
    """scale * elu(x, alpha) with the constants of Klambauer et al. 2017."""
    return _apply("selu", input, (), inplace, save)


def celu(input: Tensor, alpha: float = 1.0, inplace: Inplace = False, *, save: Save = "auto") -> Tensor:
    """max(0, x) + min(0, alpha * (exp(x / alpha) - 1)) (Barron 2017). From the output where alpha > 0."""
    return _apply("celu", input, (alpha,), inplace, save)


def sigmoid(input: Tensor, *, inplace: Inplace = False, save: Save = "auto") -> Tensor:
    """1 / (1 + exp(-x))."""
    return _apply("sigmoid", input, (), inplace, save)


def tanh(input: Tensor, *, inplace: Inplace = False, save: Save = "auto") -> Tensor:
    """The hyperbolic tangent."""
    return _apply("tanh", input, (), inplace, save)


def softplus(
    input: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    *,
    inplace: Inplace = False,
    save: Save = "auto",
) -> Tensor:
    """log(1 + exp(beta * x)) / beta (Dugas et al. 2001), and x where beta * x > threshold.

    From the output where beta > 0 and threshold >= 20: a lower threshold makes a step that two inputs share.
    """
    return _apply("softplus", input, (beta, threshold), inplace, save)


def relu6(input: Tensor, inplace: Inplace = False, *, save: Save = "auto") -> Tensor:
    """min(max(0, x), 6) (Krizhevsky 2010)."""
    return _apply("relu6", input, (), inplace, save)


def hardtanh(
    input: Tensor,
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: Inplace = False,
    *,
    save: Save = "auto",
) -> Tensor:
    """min(max(min_val, x), max_val) (Collobert 2004)."""
    return _apply("hardtanh", input, (min_val, max_val), inplace, save)


def hardsigmoid(input: Tensor, inplace: Inplace = False, *, save: Save = "auto") -> Tensor:
    """relu6(x + 3) / 6 (Howard et al. 2019)."""
    return _apply("hardsigmoid", input, (), inplace, save)


def relu_squared(input: Tensor, *, inplace: Inplace = False, save: Save = "auto") -> Tensor:
    """relu(x)² (So et al. 2021, Primer). The slope from the output is 2 * sqrt(y)."""
    return _apply("relu_squared", input, (), inplace, save)


def gelu(
    input: Tensor, approximate: str = "none", *, inplace: Inplace = False, save: Save = "auto"
) -> Tensor:
    """x * Phi(x), or its tanh approximation (Hendrycks and Gimpel 2016). ``approximate``: "none" or "tanh"."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: expected approximate 'none' or 'tanh', got {approximate!r}")
    return _apply("gelu" if approximate == "none" else "gelu_tanh", input, (), inplace, save)


def quick_gelu(input: Tensor, *, inplace: Inplace = False, save: Save = "auto") -> Tensor:
    """x * sigmoid(1.702 * x) (Hendrycks and Gimpel 2016)."""
    return _apply("quick_gelu", input, (), inplace, save)


def silu(input: Tensor, inplace: Inplace = False, *, save: Save = "auto") -> Tensor:
    """x * sigmoid(x) (Hendrycks and Gimpel 2016; as swish, Ramachandran et al. 2017)."""
    return _apply("silu", input, (), inplace, save)


def mish(input: Tensor, inplace: Inplace = False, *, save: Save = "auto") -> Tensor:
    """x * tanh(softplus(x)) (Misra 2019)."""
    return _apply("mish", input, (), inplace, save)


def hardswish(input: Tensor, inplace: Inplace = False, *, save: Save = "auto") -> Tensor:
    """x * relu6(x + 3) / 6 (Howard et al. 2019)."""
    return _apply("hardswish", input, (), inplace, save)


# The parameters of the activations that have some, with their defaults, in the operators' order.
_PARAMETERS: dict[str, dict[str, float]] = {
    "leaky_relu": {"negative_slope": 0.01},
    "elu": {"alpha": 1.0},
    "celu": {"alpha": 1.0},
    "softplus": {"beta": 1.0, "threshold": 20.0},
    "hardtanh": {"min_val": -1.0, "max_val": 1.0},
}


def _parameters(op: str, act: str, params: dict[str, Any]) -> list[float]:
    """An activation's own parameters in order, from those given by name and the defaults."""
    names = _PARAMETERS.get(act, {})
    if not params.keys() <= names.keys():
        raise TypeError(f"{op}: expected parameters {sorted(names)} for {act}, got {sorted(params)}")
    return [float(params.get(name, default)) for name, default in names.items()]


def bias_act(
    input: Tensor,
    bias: Tensor,
    act: str = "gelu",
    *,
    dim: int = -1,
    inplace: Inplace = False,
    save: Save = "auto",
    **params: Any,
) -> Tensor:
    """act(input + bias), in one pass and one memory.

    ``bias``: shape [input.size(dim)], of input's dtype and device (under autocast it is cast). ``dim``: the dimension the
    bias runs along: -1 after Linear, 1 after Conv. ``act``: the name of a function above, or "gelu_tanh". ``params``:
    that function's own, by name (``negative_slope=0.2``). With save="output" the biased input is never kept.
    """
    numbers = tuple(_parameters("bias_act", act, params))
    if bias is None:
        raise TypeError("bias_act: expected bias to be a Tensor, got NoneType")
    tensors = isinstance(input, Tensor) and isinstance(bias, Tensor)  # and not what a tracer passes for one
    if tensors and bias.dtype != input.dtype and torch.is_autocast_enabled(input.device.type):
        bias = bias.to(input.dtype)
    return _apply(act, input, numbers, inplace, save, bias, dim)


describe(
    (globals()[name] for name in __all__),
    """
    Shapes: any; the result has the input's shape and dtype. ``TypeError``: another dtype, no tensor. ``ValueError``: a shape
    of the bias, an unknown ``inplace``, ``save``, ``approximate`` or ``act``, a parameter out of range. ``RuntimeError``: a
    device or layout without a kernel; in place refused; backward through an output changed afterwards.

    ``inplace``: False, a new tensor; True, the input is overwritten or an error raised; "auto", overwritten where no
    graph and no other tensor needs it. ``save``: what backward computes the slope from, "input", "output" or "auto"; for
    functions of two slopes "bit" too.
    """,
)
