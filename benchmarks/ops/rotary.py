"""Rotary embeddings: q and k of 8 and 2 heads of 64 elements, [batch, positions, heads, size] seen as [batch, heads,
positions, size], as layers make them; stock is what transformers' models write."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

import memkit.functional as M
from memkit._reference_rotary import stock, tables

from .op import Op, Size

HEADS, KEY_HEADS, WIDTH, POSITIONS = 8, 2, 64, 256


def length(size: Size) -> int:
    return min(POSITIONS, size.elements // ((HEADS + KEY_HEADS) * WIDTH))


def heads(size: Size) -> list[Tensor]:
    """Views of one tensor, of at most as many elements as asked for."""
    batch = size.elements // ((HEADS + KEY_HEADS) * WIDTH * length(size))
    x = size.normal(batch, length(size), HEADS + KEY_HEADS, WIDTH)
    return [x[:, :, :HEADS].transpose(1, 2), x[:, :, HEADS:].transpose(1, 2)]


def rotary(interleaved: bool) -> Op:
    def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return stock(q, cos, sin, interleaved=interleaved), stock(k, cos, sin, interleaved=interleaved)

    def made(size: Size) -> list[Tensor]:
        return [t.to(size.device, size.dtype) for t in tables(length(size), WIDTH, interleaved=interleaved)]

    ours: Any = partial(M.apply_rotary, interleaved=interleaved)
    return Op(both, ours, partial(ours, inplace=True), heads, made)


OPS = {"rotary, halves": rotary(False), "rotary, interleaved": rotary(True)}
