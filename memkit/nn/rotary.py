"""Rotary position embeddings with their tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import functional as F
from ..functional import Inplace
from ..functional._activation import check_inplace
from ..functional._rotary import Layout
from ..functional._shared import check_number


class RotaryEmbedding(nn.Module):
    """Turns q and k by their positions: :func:`memkit.functional.apply_rotary` with tables of its own.

    The angle of pair i at position p is p · base^(-2i / dim), computed in float64 and kept as float32 cosines and sines of
    [positions, dim / 2], whatever dtype the model is cast to. The tables belong to no ``state_dict``. They grow when a
    sequence is longer than they are, or on the CPU a position in ``position_ids`` larger; on a GPU nobody waits to look at
    these, and under a compiler tables do not grow: there ``max_position_embeddings`` has to be large enough.

    dim: how many of a head's elements are turned, its first ones; even. Shapes, ``layout`` and ``inplace``: as there.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dim: int,
        max_position_embeddings: int = 2048,
        base: float = 10000.0,
        interleaved: bool = False,
        *,
        layout: Layout = "bhsd",
        inplace: Inplace = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not hasattr(dim, "__index__"):
            raise TypeError(f"RotaryEmbedding: expected dim to be an int, got {type(dim).__name__}")
        if dim < 2 or dim % 2:
            raise ValueError(f"RotaryEmbedding: expected an even dim of at least 2, got {dim}")
        check_number("RotaryEmbedding", "base", base)
        if not base > 0:
            raise ValueError(f"RotaryEmbedding: expected a base above 0, got {base}")
        if layout not in ("bhsd", "bshd"):
            raise ValueError(f"RotaryEmbedding: expected layout 'bhsd' or 'bshd', got {layout!r}")
        check_inplace("RotaryEmbedding", inplace)
        self.dim = dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        self.interleaved = interleaved
        self.layout: Layout = layout
        self.inplace: Inplace = inplace
        self._fill(max_position_embeddings, torch.device(device or "cpu"))

    def _fill(self, positions: int, device: torch.device) -> None:
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device) / self.dim
        steps = torch.arange(positions, dtype=torch.float64, device=device)
        angles = torch.outer(steps, self.base**-exponents)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Moves with the module, but stays float32, whatever the model is cast to, and full, also after to_empty()."""
        before = self.cos
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos is not before:
            self._fill(self.cos.size(0), self.cos.device)
        return self

    def _grow(self, q: Tensor, position_ids: Tensor | None) -> None:
        if torch.compiler.is_compiling():
            return
        needed = q.size(-2 if self.layout == "bhsd" else -3)
        if position_ids is not None and position_ids.is_cpu and position_ids.numel():
            needed = max(needed, int(position_ids.max()) + 1)
        if needed > self.cos.size(0):
            self._fill(max(needed, 2 * self.cos.size(0)), self.cos.device)

    def forward(
        self, q: Tensor, k: Tensor | None = None, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """(q, k), turned; q alone without k."""
        if self.dim > q.size(-1):
            raise ValueError(
                f"RotaryEmbedding: expected heads of at least {self.dim} elements, dim, got {list(q.shape)}"
            )
        self._grow(q, position_ids)
        return F.apply_rotary(
            q,
            k,
            self.cos,
            self.sin,
            position_ids,
            interleaved=self.interleaved,
            layout=self.layout,
            rotary_dim=self.dim,
            inplace=self.inplace,
        )

    def extra_repr(self) -> str:
        text = f"{self.dim}, max_position_embeddings={self.max_position_embeddings}, base={self.base}"
        if self.interleaved:
            text += ", interleaved=True"
        if self.layout != "bhsd":
            text += f", layout={self.layout!r}"
        return f"{text}, inplace={self.inplace!r}" if self.inplace else text
