"""What the tests of rotary embeddings share: sizes, heads, and how exact a result has to be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
B, H, G, S, D = 2, 4, 2, 7, 24

styles = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
layouts = pytest.mark.parametrize("layout", ["bhsd", "bshd"])


def heads(n: int, layout: str, dtype: torch.dtype = torch.float32, d: int = D, s: int = S) -> Tensor:
    return torch.randn((B, n, s, d) if layout == "bhsd" else (B, s, n, d), dtype=dtype)


def assert_as_good(mine: Tensor, theirs: Tensor, truth: Tensor) -> None:
    assert mine.dtype == theirs.dtype
    assert mine.shape == truth.shape
    if truth.numel() == 0:
        return
    floor = torch.finfo(mine.dtype).eps * truth.abs().max() * (2 if mine.dtype == torch.float64 else 0.5)
    assert (mine - truth).abs().max() <= 2 * (theirs - truth).abs().max() + floor
