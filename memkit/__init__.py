"""Less memory for PyTorch training: fused in-place layers, preallocated pools, and tools that measure both.

- swap(model, sample=batch) turns a model's layers into memkit's; unswap(model) turns them back.
- lean() is a context in which results that are cheap to make again are not kept for backward.
- functional and nn have the operators and layers to call by hand, optim the optimizers.
- Pool hands out memory that was allocated before; Plan and Plans lay out a step's tensors ahead of it.
- memory measures what a call allocates and keeps.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from . import _build

__version__ = "0.1.0"

_build.check(torch.__version__, torch.version.cuda)

from . import _C as _C  # noqa: E402  loading it registers torch.ops.memkit

# name -> module that holds it; None where the name is the module. Loaded on first use: importing memkit costs torch alone.
_PUBLIC = {
    "functional": None,
    "memory": None,
    "nn": None,
    "optim": None,
    "Pool": "pool",
    "PoolExhausted": "pool",
    "PoolStats": "pool",
    "pool": None,
    "plan": None,
    "swap": None,
    "Plan": "plan",
    "Plans": "plan",
    "SwapReport": "swap",
    "lean": "_lean",
    "unswap": "swap",
}


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

if TYPE_CHECKING:
    from . import functional, memory, nn, optim, plan, pool
    from ._lean import lean
    from .plan import Plan, Plans
    from .pool import Pool, PoolExhausted, PoolStats
    from .swap import SwapReport, swap, unswap
else:

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'memkit' has no attribute {name!r}")
        home = _PUBLIC[name]
        value = importlib.import_module(f"memkit.{home or name}")
        if home is not None:
            value = getattr(value, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
