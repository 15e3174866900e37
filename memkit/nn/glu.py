"""Gated linear units as modules; the call takes gate and up, or one tensor that packs both."""

from __future__ import annotations

from torch import Tensor, nn

from .. import functional as F
from ..functional._glu import Packing


class _Gated(nn.Module):
    def __init__(self, *, packing: Packing = "gate_up") -> None:
        super().__init__()
        self.packing: Packing = packing

    def extra_repr(self) -> str:
        return "" if self.packing == "gate_up" else f"packing={self.packing!r}"


class SwiGLU(_Gated):
    """silu(gate) * up."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return F.swiglu(gate, up, packing=self.packing)


class GeGLU(_Gated):
    """gelu(gate) * up."""

    def __init__(self, approximate: str = "none", *, packing: Packing = "gate_up") -> None:
        super().__init__(packing=packing)
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return F.geglu(gate, up, self.approximate, packing=self.packing)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (f"approximate={self.approximate!r}", super().extra_repr())))


class ReGLU(_Gated):
    """relu(gate) * up."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return F.reglu(gate, up, packing=self.packing)
