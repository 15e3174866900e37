"""Some activations; bench_activation.py has all of them, and stock PyTorch with a reused output."""

from __future__ import annotations

import memkit.functional as M
from memkit._reference import ACTIVATIONS

from .op import flat, with_in_place

OPS = {
    name: with_in_place(ACTIVATIONS[name].stock, getattr(M, name), flat)
    for name in ("relu", "gelu", "silu", "mish")
}
