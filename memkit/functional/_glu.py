"""Gated linear units, act(gate) * up, that keep gate and up alone.

Shazeer, "GLU variants improve transformer", 2020. ``gate`` and ``up`` are two tensors of one shape, or one tensor that packs
both along its last dimension: ``packing="gate_up"`` (gate in the first half), ``"up_gate"`` or ``"interleaved"`` (gate, up,
gate, up, ...).

Backward keeps gate and up, which are 4 bytes an element of the product in bfloat16; stock keeps act(gate) too. Their memory
takes their gradients where the graph is not retained and nobody else can see it. The product itself is kept by the next
layer, unless it is called as :func:`glu_linear`, or :func:`memkit.lean` is on, which computes it again.

Shapes: any; the result has gate's shape, or half the last dimension of what packs both. Dtypes: float32, float64, float16,
bfloat16, computed in float32 (float64 in float64). ``ValueError``: shapes that do not fit, an odd last dimension, an unknown
``packing`` or ``act``. ``TypeError``: another dtype, or two.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._sharding import call
from ._shared import describe

__all__ = ["gated", "geglu", "reglu", "swiglu"]

Packing = Literal["gate_up", "up_gate", "interleaved"]


def gated(
    gate: Tensor,
    up: Tensor | None = None,
    act: Literal["silu", "gelu", "gelu_tanh", "relu", "sigmoid", "identity"] = "silu",
    *,
    packing: Packing = "gate_up",
) -> Tensor:
    """act(gate) * up (Shazeer 2020); "identity": the bilinear unit.

    "sigmoid" with ``packing="up_gate"`` is ``torch.nn.functional.glu``.
    """
    if not is_dynamo_compiling():
        out = _C.glu(gate, up, act, packing)
        if out is not None:
            return out
    product: Tensor = call("glu", gate, up, act, packing)
    return product


def swiglu(gate: Tensor, up: Tensor | None = None, *, packing: Packing = "gate_up") -> Tensor:
    """silu(gate) * up (Shazeer 2020)."""
    return gated(gate, up, "silu", packing=packing)


def geglu(
    gate: Tensor, up: Tensor | None = None, approximate: str = "none", *, packing: Packing = "gate_up"
) -> Tensor:
    """gelu(gate) * up (Shazeer 2020); ``approximate`` "none" or "tanh", as in gelu."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"geglu: expected approximate 'none' or 'tanh', got {approximate!r}")
    return gated(gate, up, "gelu" if approximate == "none" else "gelu_tanh", packing=packing)


def reglu(gate: Tensor, up: Tensor | None = None, *, packing: Packing = "gate_up") -> Tensor:
    """relu(gate) * up (Shazeer 2020)."""
    return gated(gate, up, "relu", packing=packing)


describe(
    (gated, swiglu, geglu, reglu),
    """
    Shapes: any; gate and up of one shape, which the result has; or one tensor that packs both along its last dimension, of
    which the result has half: ``packing`` "gate_up", "up_gate" or "interleaved". Keeps gate and up for backward.

    ``ValueError``: shapes that do not fit, an odd last dimension, an unknown ``packing``, ``act`` or ``approximate``.
    ``TypeError``: another dtype, or two; no tensor. ``RuntimeError``: a device or layout without a kernel.
    """,
)
