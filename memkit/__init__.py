"""Less memory for PyTorch training: fused in-place layers, preallocated pools, and tools that measure both.

    swap(model, sample=batch)   changes layers for memkit's, where a run proves it right; unswap(model) takes it back
    lean()                      inside, cheap operators' results are computed again in backward instead of kept
    Pool("64MiB")               memory taken once; Plan and Plans give each allocation of a step its place
    functional, nn, optim       operators, modules and optimizers, by the names of torch's
    memory.measure(step)        what a step peaks at and what it keeps for backward

Each has help of its own, as help(memkit.Pool).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from . import _build

if TYPE_CHECKING:  # what `__getattr__` loads
    from . import functional, memory, nn, optim, plan, pool
    from ._lean import lean
    from .plan import Plan, Plans
    from .pool import Pool, PoolExhausted, PoolStats
    from .swap import SwapReport, swap, unswap  # swap is a package too, which can be called

__all__ = [
    "Plan",
    "Plans",
    "Pool",
    "PoolExhausted",
    "PoolStats",
    "SwapReport",
    "functional",
    "lean",
    "memory",
    "nn",
    "optim",
    "plan",
    "pool",
    "swap",
    "unswap",
]

__version__ = "0.1.0"

_build.check(torch.__version__, torch.version.cuda)

from . import _C as _C  # noqa: E402  loading it registers torch.ops.memkit

# Loaded on first use, as importing memkit costs torch alone: name -> module that holds it; others are modules.
_HOMES = {
    "Plan": "plan",
    "Plans": "plan",
    "Pool": "pool",
    "PoolExhausted": "pool",
    "PoolStats": "pool",
    "SwapReport": "swap",
    "lean": "_lean",
    "unswap": "swap",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'memkit' has no attribute {name!r}")
        value = importlib.import_module(f"memkit.{_HOMES.get(name, name)}")
        if name in _HOMES:
            value = getattr(value, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """What is public, and what has an underscore: not what this file imports."""
    return sorted({*(name for name in globals() if name[0] == "_"), *__all__})
