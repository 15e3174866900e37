"""What a module of a library may be."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class Match(NamedTuple):
    """What a module may be."""

    kind: str
    op: str
    """Its name in `ops`."""
    choice: Any
    """What `_swap` will hold."""
    probe: tuple[Tensor, ...]
    method: str = "forward"
    takes: tuple[nn.Module, ...] = ()
    """Activations that it calls as part of itself, and itself if it holds one as a function."""
    further: tuple[tuple[Tensor, ...], ...] = ()
    """Probes beside that one."""
