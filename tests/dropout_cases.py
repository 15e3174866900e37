"""What the tests of dropout share: seeds, and the masks that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import memkit.functional as M

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SEED = -0x123456789ABCDEF


def seeded(fn: Callable[[], Any], seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return fn()


def mask(shape: tuple[int, ...], p: float, seed: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    """What the next dropout of this shape multiplies with."""
    return seeded(lambda: M.dropout(torch.ones(shape, dtype=dtype), p), seed)
